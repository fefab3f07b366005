"""Repeated: the attention launches of a step's first layer, prepared to run again for its other layers.

These have tensors of the same layout at other addresses. Choosing kernels and tiles again, and having Triton find the
compiled kernel again by all arguments, would take ten times as long. Knows launches; never layers.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.kernels import buffers
from hf_paged.kernels.quantised import Scales
from hf_paged.kernels.triton.launch import Launch, Ready, is_current
from hf_paged.kernels.validation import layout_of

_INPUTS = ("query", "key_cache", "value_cache", "k_scales", "v_scales", "key", "value")
_OF_LAYER = frozenset((*_INPUTS, "out"))


class Repeated:
    """The launches of one layer of a step, in order; those of the step's partition are not among them."""

    __slots__ = ("_aligned", "_device", "_dtype", "_launches", "_layout", "_shape")

    def __init__(
        self,
        launches: list[tuple[Launch, Any]],
        inputs: tuple[torch.Tensor | None, ...],
        out: torch.Tensor,
        options: tuple[Any, ...],
    ) -> None:
        """launches: each with what it has returned. inputs, options: see `layout_of`."""
        self._launches = [Ready.of(launch, run, frozenset(launch.args) - _OF_LAYER) for launch, run in launches]
        self._layout, self._aligned = layout_of(inputs, options), _alignment(inputs)
        self._shape, self._dtype, self._device = out.shape, out.dtype, out.device

    def follow(self) -> bool:
        """See `metadata.DecodeStep`: steps on a CPU."""
        return False

    def run(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scales: Scales,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        options: tuple[Any, ...],
    ) -> torch.Tensor | None:
        """The attention over these tensors; None if their layout or the options are others."""
        inputs = query, key_cache, value_cache, *scales, key, value
        # Triton compiles a kernel anew for addresses that are aligned to 16 bytes where others were not.
        if layout_of(inputs, options) != self._layout or _alignment(inputs) != self._aligned:
            return None
        if not is_current(self._device):
            return None
        out = buffers.empty(self._shape, self._dtype, self._device)
        tensors = {"out": out, **{name: x for name, x in zip(_INPUTS, inputs) if x is not None}}
        for launch in self._launches:
            launch.run_on(tensors)
        return out


def _alignment(inputs: tuple[torch.Tensor | None, ...]) -> list[bool]:
    return [tensor is None or tensor.data_ptr() % 16 == 0 for tensor in inputs]
