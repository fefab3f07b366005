"""Arguments of the operations in `ops` and their implementations: a layer's blocks, new K/V, options of an attention.

Knows tensors; never steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels.bounds import UNBOUNDED, Bounds
from hf_paged.kernels.quantised import NO_SCALES, Scales


class LayerKV(NamedTuple):
    """One layer's blocks: key [num_blocks, block_size, num_kv_heads, head_dim], value [..., v_head_dim], and the scales
    of those in eight bits (see `quantised`)."""

    key: torch.Tensor
    value: torch.Tensor
    scales: Scales = NO_SCALES

    @property
    def row(self) -> torch.Tensor | None:
        """K and V of tokens as rows [num_blocks, block_size, 1, head_dim + v_head_dim], if they lie side by side."""
        key, value = self.key, self.value
        size = key.shape[3] + value.shape[3]
        # Only one head can lie so: heads would stand between a token's key and its value.
        if key.shape[2] != 1 or key.stride(1) != size or value.data_ptr() != key.data_ptr() + key[0, 0].nbytes:
            return None
        return key.as_strided((*key.shape[:3], size), key.stride())

    @property
    def elements(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key, self.value

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in (self.key, self.value, *self.scales) if tensor is not None]

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor[0, 0].nbytes for tensor in self.tensors)


class NewKV(NamedTuple):
    """K and V of the tokens of a step, [num_tokens, num_kv_heads, (v_)head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


class Attention(NamedTuple):
    """Options of an attention, see `ops.paged_attention`.

    return_lse: its result has the log-sum-exp too.
    """

    scale: float
    bounds: Bounds = UNBOUNDED
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    distance_bias: torch.Tensor | None = None
    return_lse: bool = False

    @property
    def has_numbers_only(self) -> bool:
        has_tensors = self.sinks is not None or self.alibi_slopes is not None or self.distance_bias is not None
        return not (has_tensors or self.return_lse)


Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Result of an attention: its output, and the log-sum-exp if `Attention.return_lse`."""


def signature_of(query: torch.Tensor, kv: LayerKV, new: NewKV | None, options: Attention) -> tuple[object, ...]:
    """All that `ops.paged_attention` checks about these tensors and numbers, and that a prepared call depends on, but
    addresses."""
    # Without addresses: they alone differ between the layers that share a prepared call.
    tensors = query, kv.key, kv.value, *kv.scales, *(new or ())
    return options[:3], *[x if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device) for x in tensors]
