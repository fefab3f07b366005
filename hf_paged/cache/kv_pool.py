"""KVPool: the K/V tensors of every layer, cut into blocks (SOSP'23 section 4.1).

Knows block ids and tensors; never sequences. Memory is allocated on a layer's first write, with the sizes of what it
writes. K and V may therefore differ in head size, and layers may differ in every size. Layers that have the same place
in a block (see `layers.Layout`) read and write the same memory: their block tables never list the same block.

K and V of a token lie in one row if both have one head, but not of the same size: attention over latents reads both as
one key.

With K or V in eight bits, memory is bytes: in a block, the elements of all its tokens come first, then their scales.
Rows of elements stay as aligned as without scales, and whatever moves a block moves its scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hf_paged.cache.layers import WHOLE, Layout
from hf_paged.kernels import buffers, ops
from hf_paged.kernels.arguments import LayerKV
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.quantised import EXACT, Scales, Storage, part_sizes


# A tensor made in inference mode could not be written by a later call outside it.
@torch.inference_mode(False)
def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device=device)
    if made.is_cpu and buffers.has_memory(made):
        # Attention reads many blocks, each in other pages.
        buffers.ask_for_large_pages(made)
    return made


_Home = tuple[int | None, torch.dtype, torch.device]
"""A piece of memory: its layer (None: all layers with a place in the layout), dtype and device."""


class KVPool:
    """K/V memory for `num_blocks` blocks of `block_size` tokens.

    Invariant: every layer's tensors have exactly `num_blocks` blocks. Blocks that no sequence owns hold arbitrary bits,
    possibly NaN; readers must not depend on them.

    storage: how K and V are stored. Sizes of a layout are in elements, or in bytes if the storage is not exact.
    """

    def __init__(self, num_blocks: int, block_size: int, layout: Layout = WHOLE, storage: Storage = EXACT) -> None:
        self.storage = storage
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, LayerKV] = {}  # those that have been written; read-only for callers
        self._places = {layer: starts for layer, *starts in layout.places}
        self._beside = {layer: group.layers for group in layout.groups for layer in group.layers or ()}
        self._block_sizes = dict(layout.block_sizes)
        self._memory: dict[_Home, list[torch.Tensor]] = {}  # [num_blocks, elements of a block] each
        # Of each layer, and the shapes and dtypes of a token's K and V.
        self._homes: dict[int, tuple[_Home, list[tuple[torch.Size, torch.dtype]]]] = {}

    def __contains__(self, layer_idx: int) -> bool:
        return layer_idx in self.layers

    def __getitem__(self, layer_idx: int) -> LayerKV:
        return self.layers[layer_idx]

    def written_in(self, layer_idx: int) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the K and V that a layer writes."""
        (_, key), (_, value) = self._homes[layer_idx][1]
        return key, value

    def layer_for(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> LayerKV:
        """The tensors of a layer, allocated on its first write.

        Sizes, dtype and device are taken from key [..., num_kv_heads, head_dim] and
        value [..., num_kv_heads, v_head_dim]. Blocks of a layer with a place in the layout are not contiguous.
        """
        layer = self.layers.get(layer_idx)
        if layer is None:
            check_storage(self.storage, key.device)
            has_place = layer_idx in self._places and key.device in self._block_sizes
            parts = [(new.shape[-2:], new.dtype) for new in (key, value)]
            # One piece of memory has one dtype; bytes have place for any that fits.
            shared = has_place and (key.dtype == value.dtype if self.storage.is_exact else self._fits(layer_idx, parts))
            dtypes = [key.dtype, value.dtype] if self.storage.is_exact else [torch.uint8, torch.uint8]
            home = None if shared else layer_idx, dtypes[0], key.device
            if home not in self._memory:
                sizes = [self._block_sizes[key.device]] if shared else list(map(self._size, (0, 1), parts))
                sizes = [sum(sizes)] if self._adjoin(parts) else sizes
                self._memory[home] = [
                    _empty((self.num_blocks, self.block_size * size), dtype, key.device)
                    for size, dtype in zip(sizes, dtypes)
                ]
            self._homes[layer_idx] = home, parts
            layer = self.layers[layer_idx] = self._layer(layer_idx)
        return layer

    def _adjoin(self, parts: list[tuple[torch.Size, torch.dtype]]) -> bool:
        """Return True if a token's K and V form one row: one head each, of different sizes, as latents have."""
        (key, key_dtype), (value, value_dtype) = parts
        one_each = key[0] == value[0] == 1 and key[1] != value[1]
        return one_each and key_dtype == value_dtype and self.storage.is_exact

    def _fits(self, layer_idx: int, parts: list[tuple[torch.Size, torch.dtype]]) -> bool:
        """Return True if a layer's K and V fit into its place: under autocast they may have a larger dtype."""
        start, middle = self._places[layer_idx]
        beside = self._beside.get(layer_idx) or ()
        later = [self._places[other][0] for other in beside if other in self._places]
        end = min((each for each in later if each >= middle), default=max(self._block_sizes.values()))
        return self._size(0, parts[0]) <= middle - start and self._size(1, parts[1]) <= end - middle

    def _size(self, which: int, part: tuple[torch.Size, torch.dtype]) -> int:
        """Size of a token's K (0) or V (1) of this shape and dtype, in the unit of the layout."""
        if self.storage.is_exact:
            return part[0].numel()
        (heads, dim), dtype = part
        return sum(part_sizes(heads, dim, self.storage.dtypes[which] or dtype.itemsize))

    def _layer(self, layer_idx: int) -> LayerKV:
        home, parts = self._homes[layer_idx]
        memory, starts = self._memory[home], [0, 0]
        if home[0] is None:
            # Two names for one tensor, as K and V of a layer without a place have a tensor each.
            memory, starts = memory * 2, self._places[layer_idx]
        if self._adjoin(parts):
            (_, head_dim), (_, v_head_dim) = (shape for shape, _ in parts)
            start, size = starts[0] * self.block_size, (head_dim + v_head_dim) * self.block_size
            rows = memory[0][:, start : start + size].view(self.num_blocks, self.block_size, 1, head_dim + v_head_dim)
            return LayerKV(rows[..., :head_dim], rows[..., head_dim:])
        views, scales = [], []
        for which, (rows, start, part) in enumerate(zip(memory, starts, parts)):
            own = rows[:, start * self.block_size : (start + self._size(which, part)) * self.block_size]
            view, scale = self._views(own, self.storage.dtypes[which], *part)
            views.append(view)
            scales.append(scale)
        return LayerKV(views[0], views[1], Scales(scales[0], scales[1]))

    def _views(
        self, rows: torch.Tensor, stored: torch.dtype | None, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The K or V of a layer, and its scales, in rows [num_blocks, size of the part]."""
        sizes = self.num_blocks, self.block_size
        if self.storage.is_exact:
            return rows.view(*sizes, *shape), None
        itemsize = dtype.itemsize if stored is None else 1
        elements = rows[:, : self.block_size * shape.numel() * itemsize].view(stored or dtype).view(*sizes, *shape)
        if stored is None:
            return elements, None
        count = self.block_size * part_sizes(shape[0], shape[1], stored)[0]
        return elements, rows[:, count:].view(torch.float32).view(*sizes, shape[0])

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
            (index, t.data_ptr(), tuple(t.shape), t.dtype)
            for index, layer in self.layers.items()
            for t in layer.tensors
        )

    def resize(self, num_blocks: int) -> None:
        """Reallocate every layer to `num_blocks` blocks, keeping the contents of those that remain."""
        keep, self.num_blocks = min(num_blocks, self.num_blocks), num_blocks
        for home, memory in self._memory.items():
            grown = [_empty((num_blocks, old.shape[1]), old.dtype, old.device) for old in memory]
            # Home by home, so that only one of them is there twice at a time.
            for new, old in zip(grown, memory):
                new[:keep] = old[:keep]
            self._memory[home] = grown
            for layer_idx, (own, _) in self._homes.items():
                if own == home:
                    self.layers[layer_idx] = self._layer(layer_idx)

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give the memory of these blocks to the system, where they are on the CPU. Their contents are undefined."""
        for memory in self._memory.values():
            for tensor in memory:
                if tensor.is_cpu:
                    buffers.give_back(tensor, blocks)

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


def check_storage(storage: Storage, device: torch.device) -> None:
    """Raise ValueError if the kernels of the device have no such numbers."""
    if torch.float8_e4m3fn in storage.dtypes and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or capability < (8, 9):
            raise ValueError(
                f"key_dtype or value_dtype 'fp8': {torch.cuda.get_device_name(device)} has no such numbers (NVIDIA "
                "GPUs have them from compute capability 8.9 on); use 'int8'"
            )
