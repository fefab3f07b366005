"""PagedMemory: the block tables and K/V tensors of all layers, always changed together. Knows sequences by id; never
requests."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager, SeqId
from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.layers import WHOLE, Layout
from hf_paged.errors import OutOfBlocks
from hf_paged.kernels.metadata import AttentionMetadata, DecodeStep, step_arrays, to_device
from hf_paged.kernels.quantised import EXACT, Storage


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Counts in blocks and bytes at one moment.

    bytes_reserved  size of the K/V tensors
    bytes_touched   size of the blocks allocated at least once; on a CPU only these take physical memory
    bytes_used      size of the blocks that sequences hold
    bytes_filled    size of the slots that hold a token
    """

    num_blocks: int
    blocks_used: int
    blocks_shared: int
    blocks_logical: int
    cow_copies: int
    bytes_reserved: int
    bytes_touched: int
    bytes_used: int
    bytes_filled: int

    @property
    def bytes_saved_by_sharing(self) -> int:
        return (self.blocks_logical - self.blocks_used) * (
            self.bytes_used // self.blocks_used if self.blocks_used else 0
        )


class PagedMemory:
    """The operations of BlockManager with the copies that they need, all or nothing.

    layout: which layers share block tables. When an operation runs out of blocks and `growable` is True, the memory
    grows by at least half, up to `max_blocks` blocks. Otherwise OutOfBlocks is raised and nothing has changed.
    storage: see `KVPool`.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int = 0,
        *,
        layout: Layout = WHOLE,
        storage: Storage = EXACT,
        growable: bool = False,
        max_blocks: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.growable = growable
        self.max_blocks = max_blocks
        self.groups = layout.groups
        self.manager = BlockManager(BlockAllocator(num_blocks), block_size, groups=layout.groups)
        self.pool = KVPool(num_blocks, block_size, layout, storage)
        self._group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers or ()}

    def group_index(self, layer_idx: int) -> int:
        """Index of the group of a layer, and so of its record in a step's metadata."""
        if self.groups[0].layers is None:
            return 0
        return self._group_of[layer_idx]

    # -- verbs --------------------------------------------------------------------------------------------------

    def append(self, appends: Sequence[tuple[SeqId, int]]) -> None:
        """Append (seq_id, num_tokens) for a whole step and perform the copy-on-writes. All or nothing."""
        if not self.manager.has_room(appends):
            self._reserve(self.manager.num_blocks_to_append_all(appends))
        if copies := self.manager.append_all(appends):
            self.pool.copy_blocks(copies)

    def hold(self, num_tokens: int) -> None:
        """Grow if a sequence of so many tokens does not fit. No other one has blocks."""
        assert not len(self.manager), "sequences hold blocks"
        blocks = -(-num_tokens // self.block_size) * len(self.groups)
        if blocks > self.manager.allocator.num_blocks:
            self.pool.resize(blocks)
            self.manager.allocator.grow(blocks)

    def _reserve(self, needed: int) -> None:
        allocator = self.manager.allocator
        missing = needed - allocator.num_available
        if missing <= 0:
            return
        total = allocator.num_blocks + missing
        if not self.growable or (self.max_blocks is not None and total > self.max_blocks):
            raise OutOfBlocks(needed, allocator.num_available, "give the cache more blocks (num_blocks, memory)")
        # By half at least, because each resize copies all blocks.
        target = max(total, allocator.num_blocks + allocator.num_blocks // 2, 16 * len(self.groups))
        if self.max_blocks is not None:
            target = min(target, self.max_blocks)
        # The memory first: if it cannot be had, the allocator must not offer blocks without any.
        self.pool.resize(target)
        allocator.grow(target)

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        self.manager.fork(parent_id, child_id)

    def free(self, seq_id: SeqId) -> None:
        self.manager.free(seq_id)

    def crop(self, seq_id: SeqId, num_tokens: int) -> None:
        self.manager.crop(seq_id, num_tokens)

    def rename(self, old_id: SeqId, new_id: SeqId) -> None:
        self.manager.rename(old_id, new_id)

    def step_done(self, seq_ids: Sequence[SeqId]) -> None:
        """Free the blocks that no later token attends to. Call it after the step that computed the last appended
        tokens."""
        if self.manager.drops_blocks:
            for seq_id in seq_ids:
                self.manager.drop_unseen(seq_id)

    def reorder(self, seq_ids: Sequence[SeqId], parents: Sequence[int]) -> None:
        """Row i takes the tokens of row `parents[i]` (beam search): fork the survivors, free the rest.

        Only block tables change; no K/V is copied. Afterwards the sequences have the same ids, in the same rows.
        """
        if list(parents) == list(range(len(seq_ids))):
            return
        manager = self.manager
        staged = [("reordered", i) for i in range(len(parents))]
        # All forks before the first free, so that no block of a surviving row becomes free in between.
        for new_id, parent in zip(staged, parents):
            manager.fork(seq_ids[parent], new_id)
        for seq_id in seq_ids:
            manager.free(seq_id)
        for new_id, seq_id in zip(staged, seq_ids):
            manager.rename(new_id, seq_id)

    # -- what a step needs on the device --------------------------------------------------------------------------

    def step_metadata(
        self,
        seq_ids: Sequence[SeqId],
        query_lens: Sequence[int],
        device: torch.device,
        seq_lens: Sequence[int] | None = None,
    ) -> tuple[list[AttentionMetadata], torch.Tensor]:
        """Metadata of a packed step, one record per group, and the tokens' positions, int64 [num_tokens].

        Sequence i computes the last `query_lens[i]` of its first `seq_lens[i]` tokens (None: of all appended ones).
        """
        seq_lens = self._lengths(seq_ids) if seq_lens is None else seq_lens
        step = step_arrays(self._tables(seq_ids), seq_lens, query_lens, self.block_size)
        return step.metadata(device), to_device(step.positions, device)

    def decode_step(self, seq_ids: Sequence[SeqId], last: DecodeStep | None = None) -> DecodeStep:
        """The step of the last token of each sequence, on a CPU. last: an earlier step, which may become this one."""
        tables, seq_lens = self._tables(seq_ids), self._lengths(seq_ids)
        # As bytes, because the tables themselves change in place.
        contents = [[table.tobytes() for table in group] for group in tables]
        if last is not None and last.follow(contents, seq_lens):
            return last
        arrays = step_arrays(tables, seq_lens, [1] * len(seq_ids), self.block_size)
        device = torch.device("cpu")
        return DecodeStep(contents, seq_lens, arrays, arrays.metadata(device), to_device(arrays.positions, device))

    def _tables(self, seq_ids: Sequence[SeqId]) -> list[list[array[int]]]:
        """For each group the block table of each sequence."""
        return [[self.manager.block_table(seq_id, group) for seq_id in seq_ids] for group in range(len(self.groups))]

    def _lengths(self, seq_ids: Sequence[SeqId]) -> list[int]:
        return [self.manager.num_tokens(seq_id) for seq_id in seq_ids]

    @property
    def layout(self) -> tuple[object, ...]:
        """Address, shape and dtype of every layer's K/V. Memories with equal layouts are interchangeable for graphs."""
        return self.groups, self.pool.layout

    @property
    def nbytes(self) -> int:
        """Size of the K/V tensors."""
        return self.pool.nbytes

    @property
    def nbytes_by_device(self) -> dict[torch.device, int]:
        """Size of the K/V tensors on each device."""
        return {device: size * self.pool.num_blocks for device, size in self.pool.bytes_per_block_by_device.items()}

    def release(self) -> None:
        """Drop the K/V tensors; every sequence must have been freed."""
        assert not len(self.manager), "sequences still hold blocks"
        self.pool.release()

    # -- figures ------------------------------------------------------------------------------------------------

    def stats(self) -> MemoryStats:
        manager, per_block = self.manager, self.pool.bytes_per_block
        used = manager.allocator.num_used
        return MemoryStats(
            num_blocks=manager.allocator.num_blocks,
            blocks_used=used,
            blocks_shared=manager.num_shared_blocks,
            blocks_logical=manager.num_logical_blocks,
            cow_copies=manager.num_copies,
            bytes_reserved=self.pool.nbytes,
            bytes_touched=manager.allocator.num_touched * per_block,
            bytes_used=used * per_block,
            bytes_filled=manager.num_filled_slots * per_block // self.block_size,
        )

    def check_integrity(self) -> None:
        self.manager.check_integrity()
        assert self.pool.num_blocks == self.manager.allocator.num_blocks
