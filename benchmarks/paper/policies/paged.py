"""Ours: hf_paged's own scheduler, block manager and prefix cache, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.paper.policies.interface import Load, Memory, decode_load_of, load_of
from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.scheduler import Scheduler, SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, Sequence, SequenceGroup


class Paged:
    """Adds nothing to the scheduler but counts.

    capacity: slots of the pool. final_lengths: request_id -> tokens whose K/V a sequence of the request holds at its
    end; only used to tell slots that will be used later from those that never will. The swap space is as large as the
    pool (the paper's bound).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: int,
        final_lengths: Mapping[str, int],
        *,
        block_size: int = 16,
        name: str = "ours",
    ) -> None:
        self.name = name
        self.block_size = block_size
        self.manager = BlockManager(BlockAllocator(capacity // block_size), block_size)
        host = BlockManager(BlockAllocator(capacity // block_size), block_size)
        self.scheduler = Scheduler(config, self.manager, host)
        self._final_lengths = final_lengths
        self._shares = config.prefix_caching is not False  # whether blocks may be shared at all

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_swapped(self) -> int:
        return self.scheduler.num_swapped

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.num_preemptions_recompute + self.scheduler.num_preemptions_swap

    @property
    def running(self) -> list[SequenceGroup]:
        return self.scheduler.running

    def add(self, group: SequenceGroup) -> None:
        self._shares = self._shares or group.width > 1
        self.scheduler.check(group)
        self.scheduler.enqueue(group)

    def schedule(self) -> SchedulerOutput:
        return self.scheduler.schedule()

    def update(self, output: SchedulerOutput) -> None:
        self.scheduler.update(output)

    def fork(self, parent: Sequence, tokens: list[int]) -> list[Sequence]:
        return self.scheduler.fork(parent, tokens)

    def reorder(self, group: SequenceGroup, parents: list[int], tokens: list[int]) -> list[Sequence]:
        return self.scheduler.reorder(group, parents, tokens)

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        self.scheduler.finish_group(group, reason)

    def decode_steps(self, limit: int) -> int:
        """How many steps of one token for each running sequence have their blocks: no block is freed meanwhile, so the
        blocks that all of them need together are those of the last."""
        seq_ids = [seq.seq_id for group in self.running for seq in group.live]
        available, manager = self.manager.allocator.num_available, self.manager
        limit = min(limit, self.scheduler.config.token_budget // max(len(seq_ids), 1))
        if len(seq_ids) * (limit // self.block_size + 2) <= available:
            return limit
        # That many tokens fill all free slots, and those of the blocks that the sequences hold.
        slots = available * self.block_size - sum(manager.num_tokens(seq_id) for seq_id in seq_ids)
        slots += self.block_size * sum(len(manager.block_table(seq_id)) for seq_id in seq_ids)
        low, high = 0, min(limit, slots // len(seq_ids))
        while low < high:
            middle = (low + high + 1) // 2
            if manager.num_blocks_to_append_all((seq_id, middle) for seq_id in seq_ids) <= available:
                low = middle
            else:
                high = middle - 1
        return low

    def decode_load(self) -> Load:
        return decode_load_of(self.running)

    def load(self, output: SchedulerOutput) -> Load:
        copies = len(output.block_copies) * self.block_size
        swapped = len(output.swap_out) + len(output.swap_in)
        return load_of(output, copied_tokens=copies, swapped_blocks=swapped)

    def memory(self, ahead: float = 0.0) -> Memory:
        manager, allocator, size = self.manager, self.manager.allocator, self.block_size
        used = allocator.num_used * size
        if self._shares:
            tokens, saved = manager.num_filled_slots, manager.num_logical_blocks * size - used
        else:
            tokens = sum(manager.num_tokens(seq.seq_id) for group in self.running for seq in group.live)
            saved = 0
        later = 0
        for group in self.running:
            final = self._final_lengths.get(group.request_id, 0)
            for seq in group.live:
                length = manager.num_tokens(seq.seq_id) if seq.parent is None else 0
                later += min(-length % size, max(final - length, 0))
        later = min(later, used - tokens)  # a shared block counts once
        free = allocator.num_available * size
        return Memory(tokens - ahead, later, used - tokens - later, 0, free + ahead, saved)


TILE_ROWS = 64
"""Rows of one tile of queries in the Triton decode kernel, at most."""


class Tiled(Paged):
    """A kernel with prefix tiles: the K/V of the prefix that all requests share is read once for every TILE_ROWS rows
    that generate, not once for each. prefix: tokens of it."""

    def __init__(
        self, config: SchedulerConfig, capacity: int, final_lengths: Mapping[str, int], *, prefix: int, **options: Any
    ) -> None:
        super().__init__(config, capacity, final_lengths, **options)
        self._shared = prefix // self.block_size * self.block_size

    def _with_tiles(self, load: Load, rows: int) -> Load:
        return replace(load, kv_tokens=load.kv_tokens - (rows - -(-rows // TILE_ROWS)) * self._shared)

    def decode_load(self) -> Load:
        load = super().decode_load()
        return self._with_tiles(load, load.rows)

    def load(self, output: SchedulerOutput) -> Load:
        return self._with_tiles(super().load(output), sum(count == 1 for _, count in output.scheduled))
