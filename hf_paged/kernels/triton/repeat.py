"""Repeated: the attention launches of a step's first layer, prepared to run again for its other layers.

These have tensors of the same layout at other addresses. Choosing kernels and tiles again, and having Triton find the
compiled kernel again by all arguments, would take ten times as long. Knows launches; never layers.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.kernels import buffers
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV, signature_of
from hf_paged.kernels.triton.launch import Launch, Ready, is_current

_INPUTS = ("query", "key_cache", "value_cache", "k_scales", "v_scales", "key", "value")
_OF_LAYER = frozenset((*_INPUTS, "out"))


class Repeated:
    """The launches of a layer of a step, in order, without the launches of the step's partition."""

    __slots__ = ("_aligned", "_device", "_dtype", "_launches", "_shape", "_signature")

    def __init__(
        self,
        launches: list[tuple[Launch, Any]],
        query: torch.Tensor,
        kv: LayerKV,
        new: NewKV | None,
        options: Attention,
        out: torch.Tensor,
    ) -> None:
        """launches: each with what it has returned."""
        self._launches = [Ready.of(launch, run, frozenset(launch.args) - _OF_LAYER) for launch, run in launches]
        self._signature, self._aligned = signature_of(query, kv, new, options), _alignment(_inputs(query, kv, new))
        self._shape, self._dtype, self._device = out.shape, out.dtype, out.device

    def follow(self) -> bool:
        """See `metadata.DecodeArrays`: steps on a CPU."""
        return False

    def run(self, query: torch.Tensor, kv: LayerKV, new: NewKV | None, options: Attention) -> torch.Tensor | None:
        """The attention over these tensors; None if their layout or the options are others."""
        inputs = _inputs(query, kv, new)
        # Triton compiles a kernel anew for addresses that are aligned to 16 bytes where others were not.
        if signature_of(query, kv, new, options) != self._signature or _alignment(inputs) != self._aligned:
            return None
        if not is_current(self._device):
            return None
        out = buffers.empty(self._shape, self._dtype, self._device)
        for launch in self._launches:
            launch.run_on({"out": out, **inputs})
        return out


def _inputs(query: torch.Tensor, kv: LayerKV, new: NewKV | None) -> dict[str, torch.Tensor]:
    key, value = new or (None, None)
    tensors = query, kv.key, kv.value, *kv.scales, key, value
    return {name: tensor for name, tensor in zip(_INPUTS, tensors) if tensor is not None}


def _alignment(inputs: dict[str, torch.Tensor]) -> list[bool]:
    return [tensor.data_ptr() % 16 == 0 for tensor in inputs.values()]
