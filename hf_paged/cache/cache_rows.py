"""CacheRows: the rows of a PagedKVCache, each a sequence of one PagedMemory, and their K/V as dense tensors.

Knows rows, block tables and K/V; never the Cache interface of transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import OutOfBlocks
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import NewKV
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.quantised import dequantised

Attend = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Takes the new K and V of a layer, and its index, and returns what the layer returns to the model."""


class CacheRows:
    """Invariants: all rows have the same logical length `length`. Row r is the sequence `seq_ids[r]`, which stores its
    last `length - padding[r]` positions; its first `padding[r]` are left padding, which takes no memory.

    While `lent`, another owner changes the sequences, and there are no rows here.
    """

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory
        self.manager = memory.manager
        self.ids = itertools.count()
        self.seq_ids: list[int] = []
        self.padding: list[int] = []
        self.length = 0
        self.lent = False
        self.attend: Attend | None = None  # in a view of rows that are read by block tables
        # Slots of a view, which all layers need.
        self._viewed: dict[tuple[object, ...], tuple[torch.Tensor, bool]] | None = None

    def __len__(self) -> int:
        return len(self.seq_ids)

    def has(self, index: int) -> bool:
        """Return True if layer `index` has stored K/V."""
        return index in self.memory.pool

    @property
    def num_layers(self) -> int:
        """One more than the highest index of a layer that has stored K/V."""
        return max(self.memory.pool.layers, default=-1) + 1

    def refuse_any(self) -> None:
        """Raise ValueError if there are rows, or if they are lent."""
        if self.lent:
            raise ValueError("the rows of this cache are in use by a call of generate")
        if self.seq_ids:
            raise ValueError(f"the cache already has {len(self.seq_ids)} rows; call reset() first")

    def start(self, padding: Sequence[int], length: int) -> None:
        """Make `len(padding)` empty rows of logical length `length`."""
        self.refuse_any()
        self.seq_ids = [next(self.ids) for _ in padding]
        self.padding, self.length = list(padding), length
        self.memory.append([(row, 0) for row in self.seq_ids])

    def take(self, seq_ids: Sequence[int], padding: Sequence[int]) -> None:
        """Take ownership of sequences that `memory` holds already."""
        self.refuse_any()
        self.seq_ids, self.padding = list(seq_ids), list(padding)
        # New rows must not get the ids of those that are there.
        self.ids = itertools.count(max(seq_ids, default=-1) + 1)
        self.length = max((self.manager.num_tokens(r) + p for r, p in zip(seq_ids, padding)), default=0)

    def view(self, seq_ids: Sequence[int], padding: Sequence[int], length: int, attend: Attend | None = None) -> None:
        """Present sequences that another owner keeps in `memory` as the rows, until `forget`. Their slots, up to the
        logical length `length`, are appended already. attend: takes the place of writing and gathering K/V."""
        self.attend = attend
        self.seq_ids, self.padding, self.length = list(seq_ids), list(padding), length
        self._viewed = {}

    def forget(self) -> None:
        """Drop the rows without freeing their blocks."""
        self.seq_ids, self.padding, self.length, self._viewed, self.attend = [], [], 0, None, None

    def fork(self, row: int) -> None:
        """A new last row that shares all blocks of `row`."""
        child = next(self.ids)
        self.memory.fork(self.seq_ids[row], child)
        self.seq_ids.append(child)
        self.padding.append(self.padding[row])

    def append(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens in every row. Raises OutOfBlocks, and then changes nothing."""
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: must not be negative; use crop to remove tokens")
        self.memory.append([(row, num_tokens) for row in self.seq_ids])
        self.length += num_tokens

    def check(self, row: int) -> None:
        """Raise IndexError if there is no such row."""
        if not 0 <= row < len(self.seq_ids):
            raise IndexError(f"row {row}: the cache has {len(self.seq_ids)} rows")

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a fork of the former row `rows[i]`; rows that are not in `rows` are freed."""
        old_ids, old_padding = self.seq_ids, self.padding
        self.seq_ids = [next(self.ids) for _ in rows]
        self.padding = [old_padding[r] for r in rows]
        # All forks before the first free, so that no block of a surviving row becomes free in between.
        for source, child in zip(rows, self.seq_ids):
            self.memory.fork(old_ids[source], child)
        for row in old_ids:
            self.memory.free(row)

    def crop(self, length: int) -> None:
        """Forget the positions from `length` on."""
        for row, padding in zip(self.seq_ids, self.padding):
            self.memory.crop(row, max(length - padding, 0))
        self.length = length

    def clear(self) -> None:
        """Free every row."""
        for row in self.seq_ids:
            self.memory.free(row)
        self.forget()

    # -- K/V ----------------------------------------------------------------------------------------------------

    def write(self, index: int, start: int, key: torch.Tensor, value: torch.Tensor) -> int:
        """Write K and V [batch, num_kv_heads, num_new, (v_)head_dim] of layer `index` at the positions from `start` on.

        The first layer of a forward appends the slots for all layers. Returns the position after the last one.
        """
        batch, _, num_new, _ = key.shape
        if not self.seq_ids:
            self.start([0] * batch, 0)
        if batch != len(self.seq_ids):
            raise ValueError(f"update with a batch of {batch} on a cache of {len(self.seq_ids)} rows")
        stop = start + num_new
        if stop > self.length:
            try:
                self.append(stop - self.length)
            except OutOfBlocks as error:
                raise OutOfBlocks(error.needed, error.available, "the PagedKVCache is full; raise num_blocks") from None
        kv = self.memory.pool.layer_for(index, key.transpose(1, 2), value.transpose(1, 2))
        mapping = self._slots_on(key.device, index, start, stop, read=False)[0].view(-1)
        new = NewKV(
            key.transpose(1, 2).reshape(batch * num_new, *kv.key.shape[2:]),
            value.transpose(1, 2).reshape(batch * num_new, *kv.value.shape[2:]),
        )
        ops.write_kv(new, kv, mapping, in_bounds=True)
        return stop

    def _slots_on(
        self, device: torch.device, index: int, start: int, stop: int, *, read: bool
    ) -> tuple[torch.Tensor, bool]:
        """`_slots` on a device, and whether any to be read is -1. In a view they are computed for the first layer of a
        group, and what is read for padding is the first token of the row, which the mask hides."""
        key = device, self.memory.group_index(index), start, stop, read
        if self._viewed is not None and key in self._viewed:
            return self._viewed[key]
        slots = self._slots(index, start, stop, fill=read and self._viewed is not None)
        found = to_device(slots, device), read and bool((slots < 0).any())
        if self._viewed is not None:
            self._viewed[key] = found
        return found

    def _slots(self, index: int, start: int, stop: int, *, fill: bool = False) -> NDArray[np.int64]:
        """Slots of positions `start` to `stop - 1` of every row in layer `index`, int64 [num_rows, stop - start]; -1
        where a window has dropped the block, and at padding (fill: the first slot of the row)."""
        group, size = self.memory.group_index(index), self.memory.block_size
        tables = [self.manager.block_table(row, group) for row in self.seq_ids]
        table = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int64)
        for row, own in zip(table, tables):
            row[: len(own)] = own
        positions = np.arange(start, stop) - np.array(self.padding, dtype=np.int64)[:, None]
        blocks, offsets = np.divmod(positions.clip(min=0), size)
        slots: NDArray[np.int64] = np.take_along_axis(table, blocks, 1) * size + offsets
        # A view's mask hides padding; it reads a slot of the row there, because those of nobody may hold NaN.
        return slots.clip(min=-1) if fill else np.where(positions < 0, -1, slots).clip(min=-1)

    def dense(self, index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of layer `index` at positions `start` to `stop - 1`, gathered; padding reads as zeros.

        Shape [batch, num_kv_heads, stop - start, head_dim], and v_head_dim for V.
        """
        kv = self.memory.pool[index]
        take = self._reader(kv.key.device, index, start, stop)
        parts = zip((kv.key, kv.value), kv.scales, self.memory.pool.written_in(index))
        dense_key, dense_value = (_dense(take, *part) for part in parts)
        return dense_key, dense_value

    def _reader(
        self, device: torch.device, index: int, start: int, stop: int
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Gathers these positions of blocks [num_blocks, block_size, num_heads, size]: contiguous [num_rows, num_heads,
        stop - start, size]."""
        if any(self.padding):
            slots, has_holes = self._slots_on(device, index, start, stop, read=True)
            return partial(_picked, slots=slots, has_holes=has_holes)
        size = self.memory.block_size
        first, last = start // size, -(-stop // size)
        group = self.memory.group_index(index)
        tables = [self.manager.block_table(row, group)[first:last] for row in self.seq_ids]
        blocks_of_rows = np.array(tables, dtype=np.int64).ravel()
        table = to_device(blocks_of_rows.clip(min=0), device)
        # No token attends to dropped blocks any more, but what stands for them must be numbers: 0 times NaN is NaN.
        dropped = to_device(np.flatnonzero(blocks_of_rows < 0), device) if blocks_of_rows.min(initial=0) < 0 else None
        span = slice(start - first * size, stop - first * size)
        rows = len(self.seq_ids), (last - first) * size

        def take(blocks: torch.Tensor) -> torch.Tensor:
            picked = blocks.index_select(0, table)
            if dropped is not None:
                picked.index_fill_(0, dropped, 0)
            picked = picked.view(*rows, *blocks.shape[2:])[:, span].transpose(1, 2)
            # Contiguous, as transformers' caches are: some models call `.view` on it.
            return picked.contiguous()

        return take

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of this class or of its memory does not hold."""
        self.memory.check_integrity()
        for row, padding in zip(self.seq_ids, self.padding):
            assert self.manager.num_tokens(row) == max(self.length - padding, 0)


def _dense(
    take: Callable[[torch.Tensor], torch.Tensor], blocks: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Gather a part of a layer's K or V by `take`, dequantised to `dtype` if it has scales."""
    if scales is None:
        return take(blocks)
    # torch gathers no floats of eight bits.
    rows = take(blocks.view(torch.int8)).view(blocks.dtype)
    return dequantised(rows, take(scales.unsqueeze(-1)).squeeze(-1), dtype)


def _picked(blocks: torch.Tensor, slots: torch.Tensor, *, has_holes: bool) -> torch.Tensor:
    """Tokens of blocks [num_blocks, block_size, num_heads, size] at slots int64 [num_rows, length], zeros at -1:
    contiguous [num_rows, num_heads, length, size]."""
    block_size = blocks.shape[1]
    index = slots.clamp(min=0) if has_holes else slots
    if blocks.is_contiguous():
        picked = (
            blocks.view(-1, *blocks.shape[2:]).index_select(0, index.view(-1)).view(*slots.shape, *blocks.shape[2:])
        )
    else:
        picked = blocks[index // block_size, index % block_size]
    if has_holes:
        # What was read there is a slot of anybody.
        picked.masked_fill_((slots < 0)[..., None, None], 0)
    return picked.transpose(1, 2).contiguous()
