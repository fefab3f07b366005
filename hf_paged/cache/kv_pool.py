"""KVPool: the K/V tensors of every layer, cut into blocks (SOSP'23 section 4.1).

Knows block ids and tensors; never sequences. Memory is allocated on a layer's first write, with the sizes of what it
writes. K and V may therefore differ in head size, and layers may differ in every size. Layers that have the same place
in a block (see `layers.Layout`) read and write the same memory: their block tables never list the same block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.cache.layers import WHOLE, Layout
from hf_paged.kernels import ops
from hf_paged.kernels.metadata import to_device


@torch.inference_mode(False)  # a tensor made in inference mode could not be written by a later call outside it
def _empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


class LayerKV(NamedTuple):
    """One layer's blocks: key [num_blocks, block_size, num_kv_heads, head_dim], value [..., v_head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


_Home = tuple[int | None, torch.dtype, torch.device]
"""Where memory is: that of one layer, or (None) that of all layers with a place in the layout."""


class KVPool:
    """K/V memory for `num_blocks` blocks of `block_size` tokens.

    Invariant: every layer's tensors have exactly `num_blocks` blocks. Blocks that no sequence owns hold arbitrary bits,
    possibly NaN; readers must not depend on them.
    """

    def __init__(self, num_blocks: int, block_size: int, layout: Layout = WHOLE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, LayerKV] = {}  # those that have been written; read-only for callers
        self._places = {layer: starts for layer, *starts in layout.places}
        self._block_sizes = dict(layout.block_sizes)
        self._memory: dict[_Home, list[torch.Tensor]] = {}  # [num_blocks, elements of a block] each
        self._homes: dict[
            int, tuple[_Home, list[torch.Size]]
        ] = {}  # of each layer, and the shapes of a token's K and V

    def __contains__(self, layer_idx: int) -> bool:
        return layer_idx in self.layers

    def __getitem__(self, layer_idx: int) -> LayerKV:
        return self.layers[layer_idx]

    def layer_for(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
        """The tensors of a layer, allocated on its first write.

        Sizes, dtype and device are taken from key [..., num_kv_heads, head_dim] and
        value [..., num_kv_heads, v_head_dim]. Blocks of a layer with a place in the layout are not contiguous.
        """
        layer = self.layers.get(layer_idx)
        if layer is None:
            has_place = layer_idx in self._places and key.device in self._block_sizes
            shared = has_place and key.dtype == value.dtype
            home = None if shared else layer_idx, key.dtype, key.device
            if home not in self._memory:
                sizes = [self._block_sizes[key.device]] if shared else [t.shape[-2:].numel() for t in (key, value)]
                self._memory[home] = [
                    _empty((self.num_blocks, self.block_size * size), like) for size, like in zip(sizes, (key, value))
                ]
            self._homes[layer_idx] = home, [key.shape[-2:], value.shape[-2:]]
            layer = self.layers[layer_idx] = self._layer(layer_idx)
        return layer

    def _layer(self, layer_idx: int) -> LayerKV:
        home, shapes = self._homes[layer_idx]
        memory, starts = self._memory[home], [0, 0]
        if home[0] is None:
            memory, starts = memory * 2, self._places[layer_idx]
        views = []
        for rows, start, shape in zip(memory, starts, shapes):
            part = rows[:, start * self.block_size : (start + shape.numel()) * self.block_size]
            views.append(part.view(self.num_blocks, self.block_size, *shape))
        return LayerKV(*views)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers that have written so far."""
        return sum(self.bytes_per_block_by_device.values())

    @property
    def bytes_per_block_by_device(self) -> dict[torch.device, int]:
        """The same, split by the devices of the layers."""
        if self.num_blocks == 0:
            return {}
        return {device: sum(t[0].nbytes for t in tensors) for device, tensors in self.by_device().items()}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for memory in self._memory.values() for t in memory)

    @property
    def layout(self) -> tuple[object, ...]:
        """Address, shape and dtype of every layer's tensors."""
        return tuple(
            (index, t.data_ptr(), tuple(t.shape), t.dtype) for index, layer in self.layers.items() for t in layer
        )

    def resize(self, num_blocks: int) -> None:
        """Reallocate every layer to `num_blocks` blocks, keeping the contents of those that remain."""
        keep, self.num_blocks = min(num_blocks, self.num_blocks), num_blocks
        for home, memory in self._memory.items():
            grown = [_empty((num_blocks, old.shape[1]), old) for old in memory]
            for new, old in zip(grown, memory):
                new[:keep] = old[:keep]
            self._memory[home] = grown
            for layer_idx, (own, _) in self._homes.items():
                if own == home:
                    self.layers[layer_idx] = self._layer(layer_idx)

    def release(self) -> None:
        """Drop all tensors; the next write allocates new ones."""
        self.layers.clear()
        self._memory.clear()
        self._homes.clear()

    def by_device(self) -> dict[torch.device, list[torch.Tensor]]:
        """All memory as tensors [num_blocks, elements of a block], in the order of the first writes."""
        tensors: dict[torch.device, list[torch.Tensor]] = {}
        for memory in self._memory.values():
            for tensor in memory:
                tensors.setdefault(tensor.device, []).append(tensor)
        return tensors

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Perform all copy-on-writes of a step for all layers in one launch. `copies`: (src, dst) block ids."""
        if copies:
            pairs = np.array(copies, dtype=np.int64)
            for device, tensors in self.by_device().items():
                ops.copy_blocks(tensors, to_device(pairs, device), in_bounds=True)
