"""Latent attention (DeepSeek's MLA): the cache has tokens' compressed K and V, and the kernels read these directly.

Such a layer hands its cache one latent for all heads, [latent_size], beside the part of the key that has a position,
[rotary_size]. Its method `expand_kv` makes K and V of all heads out of them, by the linear layer `kv_b_proj`. In a
packed step nothing is expanded. The first factor of a score, q . (W_k c), is taken to the query's side, (W_k' q) . c,
and W_v is applied to the sum of the latents: one KV head, whose key is the row (latent, rotary part) in the pool, and
whose value is the latent in it.

Knows transformers' modules and tensors; never sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_paged.errors import UnsupportedModelError
from hf_paged.kernels.arguments import LayerKV


class Absorbed:
    """A layer's attention over latents, for queries [num_tokens, num_heads, nope_size + rotary_size]."""

    def __init__(self, layer: Any, kv: LayerKV) -> None:
        if kv.row is None:
            raise UnsupportedModelError(
                f"{type(layer).__name__} keeps latents, which are read in the model's dtype; leave key_dtype and "
                "value_dtype out"
            )
        self.kv = LayerKV(kv.row, kv.key)  # keys are rows, values the latents in them
        size, rotary = kv.key.shape[3], kv.value.shape[3]
        nope = int(layer.qk_nope_head_dim)
        weight = _matrix(layer.kv_b_proj, size, kv.key.dtype).view(-1, nope + int(layer.v_head_dim), size)
        self._rotary, self._nope = rotary, nope
        self._key, self._value = weight[:, :nope], weight[:, nope:]  # [num_heads, nope_size or v_head_dim, latent_size]

    def queries(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_heads, latent_size + rotary_size]"""
        nope, rotary = rows.split([self._nope, self._rotary], dim=-1)
        # Products by head, which need the heads first.
        latents = torch.bmm(nope.transpose(0, 1), self._key.to(rows.dtype)).transpose(0, 1)
        return torch.cat((latents, rotary), dim=-1)

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_heads, latent_size] -> [num_tokens, num_heads, v_head_dim]"""
        return torch.bmm(out.transpose(0, 1), self._value.to(out.dtype).transpose(1, 2)).transpose(0, 1)


def _matrix(layer: Any, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out_features, size] of a linear layer, also of one that adds an adapter or is quantised."""
    if getattr(layer, "bias", None) is not None:
        raise UnsupportedModelError(f"{type(layer).__name__} kv_b_proj has a bias; this model needs the dense view")
    # Anything else is asked for the columns, so that adapters and quantised weights count.
    if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.weight.device.type != "meta":
        return layer.weight
    columns: torch.Tensor = layer(torch.eye(size, dtype=dtype, device=next(layer.parameters()).device))
    return columns.T.contiguous()
