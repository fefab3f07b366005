"""PagedMemory: the block tables and K/V tensors of all layer groups, always changed together.

Layers that attend to the same tokens (all full-attention layers; all layers with the same sliding window) form a group
with its own blocks, so that a windowed group can free blocks that left its window. Knows sequences by id; never
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager, SeqId
from hf_paged.cache.kv_pool import KVPool
from hf_paged.errors import OutOfBlocks
from hf_paged.kernels.metadata import AttentionMetadata, DecodeStep, step_arrays, to_device


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share block tables. `layers` None = every layer."""

    manager: BlockManager
    pool: KVPool
    layers: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Counts in blocks and bytes at one moment, summed over all groups.

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


def _summed(parts: Iterable[Mapping[torch.device, int]]) -> dict[torch.device, int]:
    totals: dict[torch.device, int] = {}
    for part in parts:
        for device, size in part.items():
            totals[device] = totals.get(device, 0) + size
    return totals


class PagedMemory:
    """The operations of BlockManager on all groups at once, all or nothing.

    When an operation runs out of blocks and `growable` is True, the group grows by at least half, up to `max_blocks`
    blocks per group. Otherwise OutOfBlocks is raised and nothing has changed.
    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int = 0,
        *,
        windows: Sequence[tuple[frozenset[int] | None, int | None]] = ((None, None),),
        growable: bool = False,
        max_blocks: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.growable = growable
        self.max_blocks = max_blocks
        self.groups = [
            KVGroup(
                BlockManager(BlockAllocator(num_blocks), block_size, sliding_window=window),
                KVPool(num_blocks, block_size),
                layers,
            )
            for layers, window in windows
        ]
        self.managers = [group.manager for group in self.groups]

    def group_index(self, layer_idx: int) -> int:
        for index, group in enumerate(self.groups):
            if group.layers is None or layer_idx in group.layers:
                return index
        raise KeyError(f"layer {layer_idx} belongs to no group")

    # -- verbs --------------------------------------------------------------------------------------------------

    def append(self, appends: Sequence[tuple[SeqId, int]]) -> None:
        """Append (seq_id, num_tokens) for a whole step and perform the copy-on-writes. All or nothing."""
        for group in self.groups:
            self._reserve(group, group.manager.num_blocks_to_append_all(appends))
        for group in self.groups:
            if copies := group.manager.append_all(appends):
                group.pool.copy_blocks(copies)

    def _reserve(self, group: KVGroup, needed: int) -> None:
        allocator = group.manager.allocator
        missing = needed - allocator.num_available
        if missing <= 0:
            return
        total = allocator.num_blocks + missing
        if not self.growable or (self.max_blocks is not None and total > self.max_blocks):
            raise OutOfBlocks(needed, allocator.num_available, "give the cache more blocks (num_blocks, memory)")
        target = max(total, allocator.num_blocks + allocator.num_blocks // 2, 16)
        if self.max_blocks is not None:
            target = min(target, self.max_blocks)
        group.pool.resize(target)
        allocator.grow(target)

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        for manager in self.managers:
            manager.fork(parent_id, child_id)

    def free(self, seq_id: SeqId) -> None:
        for manager in self.managers:
            manager.free(seq_id)

    def crop(self, seq_id: SeqId, num_tokens: int) -> None:
        for manager in self.managers:
            manager.crop(seq_id, num_tokens)

    def rename(self, old_id: SeqId, new_id: SeqId) -> None:
        for manager in self.managers:
            manager.rename(old_id, new_id)

    def step_done(self, seq_ids: Sequence[SeqId]) -> None:
        """Free the blocks that left the windows. Call it after the step that computed the last appended tokens."""
        for manager in self.managers:
            if manager.sliding_window is not None:
                for seq_id in seq_ids:
                    manager.drop_outside_window(seq_id)

    def reorder(self, seq_ids: Sequence[SeqId], parents: Sequence[int]) -> None:
        """Row i takes the tokens of row `parents[i]` (beam search): fork the survivors, free the rest.

        Only block tables change; no K/V is copied. Afterwards the sequences have the same ids, in the same rows.
        """
        if list(parents) == list(range(len(seq_ids))):
            return
        for manager in self.managers:
            staged = [("reordered", i) for i in range(len(parents))]
            for new_id, parent in zip(staged, parents):
                manager.fork(seq_ids[parent], new_id)
            for seq_id in seq_ids:
                manager.free(seq_id)
            for new_id, seq_id in zip(staged, seq_ids):
                manager.rename(new_id, seq_id)

    # -- what a step needs on the device --------------------------------------------------------------------------

    def step_metadata(
        self, seq_ids: Sequence[SeqId], query_lens: Sequence[int], device: torch.device
    ) -> tuple[list[AttentionMetadata], torch.Tensor]:
        """Metadata of a packed step, one record per group, and the tokens' positions, int64 [num_tokens].

        Sequence i computes its last `query_lens[i]` appended tokens.
        """
        tables = [[manager.block_table(seq_id) for seq_id in seq_ids] for manager in self.managers]
        seq_lens = [self.groups[0].manager.num_tokens(seq_id) for seq_id in seq_ids]
        step = step_arrays(tables, seq_lens, query_lens, self.block_size)
        return step.metadata(device), to_device(step.positions, device)

    def decode_step(self, seq_ids: Sequence[SeqId], last: DecodeStep | None = None) -> DecodeStep:
        """The step of the last token of each sequence, on a CPU. last: an earlier step, which may become this one."""
        tables = [[manager.block_table(seq_id) for seq_id in seq_ids] for manager in self.managers]
        contents = [[table.tobytes() for table in group] for group in tables]
        seq_lens = [self.groups[0].manager.num_tokens(seq_id) for seq_id in seq_ids]
        if last is not None and last.follow(contents, seq_lens):
            return last
        arrays = step_arrays(tables, seq_lens, [1] * len(seq_ids), self.block_size)
        device = torch.device("cpu")
        return DecodeStep(contents, seq_lens, arrays, arrays.metadata(device), to_device(arrays.positions, device))

    @property
    def layout(self) -> tuple[object, ...]:
        """Address, shape and dtype of every layer's K/V. Memories with equal layouts are interchangeable for graphs."""
        return tuple((group.layers, group.manager.sliding_window, group.pool.layout) for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Size of the K/V tensors."""
        return sum(group.pool.nbytes for group in self.groups)

    @property
    def bytes_per_block_by_device(self) -> dict[torch.device, int]:
        """On each device, the bytes of one block of every group, over all layers that have written so far."""
        return _summed(group.pool.bytes_per_block_by_device for group in self.groups)

    @property
    def nbytes_by_device(self) -> dict[torch.device, int]:
        """Size of the K/V tensors on each device."""
        return _summed(
            {device: size * group.pool.num_blocks for device, size in group.pool.bytes_per_block_by_device.items()}
            for group in self.groups
        )

    def release(self) -> None:
        """Drop the K/V tensors; every sequence must have been freed."""
        for group in self.groups:
            assert not len(group.manager), "sequences still hold blocks"
            group.pool.release()

    # -- figures ------------------------------------------------------------------------------------------------

    def stats(self) -> MemoryStats:
        totals = [0] * 9
        for group in self.groups:
            manager, pool = group.manager, group.pool
            per_block = pool.bytes_per_block
            used = manager.allocator.num_used
            values = (
                manager.allocator.num_blocks,
                used,
                manager.num_shared_blocks,
                manager.num_logical_blocks,
                manager.num_copies,
                pool.nbytes,
                manager.allocator.num_touched * per_block,
                used * per_block,
                manager.num_filled_slots * per_block // self.block_size,
            )
            totals = [total + value for total, value in zip(totals, values)]
        return MemoryStats(*totals)

    def check_integrity(self) -> None:
        for group in self.groups:
            group.manager.check_integrity()
            assert group.pool.num_blocks == group.manager.allocator.num_blocks
