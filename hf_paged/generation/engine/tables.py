"""Makes every change to a block table, for all layer groups at once, on the device and in host memory.

Decides nothing and knows no queue. What the device has to do is added to lists of the caller, which are parts of a
SchedulerOutput. Standard library only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hf_paged.cache.block_manager import BlockCopy, BlockManager
from hf_paged.generation.engine.sequence import Plan, Sequence, SequenceGroup

Copies = list[list[BlockCopy]]
Preemption = Literal["recompute", "swap"]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step as data, to be carried out in this order: `swap_out`, `swap_in`, `block_copies`, then the forward.

    The three lists of copies have one entry for each manager (layer group): `swap_out` from device to host blocks,
    `swap_in` from host to device blocks, `block_copies` from device to device blocks. A scheduled sequence samples
    in this step if the step computes the last of its tokens: before `update`, `num_new_tokens` is then
    `seq.num_uncomputed_tokens`.
    """

    block_copies: Copies
    swap_out: Copies
    swap_in: Copies
    scheduled: Plan = field(default_factory=list)  # (sequence, num_new_tokens); a group's sequences are neighbours
    preempted: list[tuple[SequenceGroup, Preemption]] = field(default_factory=list)  # since the last step
    failed: list[SequenceGroup] = field(default_factory=list)  # finished with "error"; `group.error` says why
    admitted: list[SequenceGroup] = field(default_factory=list)  # were waiting
    resumed: list[SequenceGroup] = field(default_factory=list)  # were swapped out
    forks: list[tuple[int, int]] = field(default_factory=list)  # (parent, child) seq_ids since the last step, in order
    finished_seq_ids: list[int] = field(default_factory=list)  # since the last step, beams that lost included

    @classmethod
    def for_managers(cls, count: int) -> SchedulerOutput:
        return cls([[] for _ in range(count)], [[] for _ in range(count)], [[] for _ in range(count)])

    @property
    def moves_blocks(self) -> bool:
        return any(map(any, (self.swap_out, self.swap_in, self.block_copies)))

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.scheduled)


class Tables:
    """One block table for each sequence and layer group: in `managers`, or in `hosts` while it is swapped out.

    Invariant: a sequence without a parent has a table in every manager or in every host, or in none. A sequence that
    still has a parent has no table, and is skipped when its group is freed or moved.
    """

    def __init__(self, managers: list[BlockManager], hosts: list[BlockManager]) -> None:
        self.managers = managers
        self.hosts = hosts
        self._has_warned = False  # of a full swap memory

    # -- is there room? -----------------------------------------------------------------------------------------

    def check_fits_alone(self, group: SequenceGroup) -> None:
        """Raises ValueError if the tokens of the group do not fit even in an empty cache."""
        for manager in self.managers:
            needed, total = _blocks_needed(group, manager), manager.allocator.num_blocks
            if needed > total:
                raise ValueError(
                    f"a prompt of {group.num_prompt_tokens} tokens needs {needed} blocks of {manager.block_size}, "
                    f"but the cache has {total}; give the cache more memory or shorten the prompt"
                )

    def fits(self, group: SequenceGroup, hits: list[int], watermark: float) -> bool:
        """Whether a group without blocks can start with the cached blocks `hits` and leave a share `watermark` free."""
        for manager in self.managers:
            # Unreferenced blocks count as available until they are adopted.
            idle_hits = sum([manager.allocator.ref_count(block_id) == 0 for block_id in hits])
            if not _leaves_free(manager, _blocks_needed(group, manager) - len(hits) + idle_hits, watermark):
                return False
        return True

    def fits_swapped(self, group: SequenceGroup, watermark: float) -> bool:
        """Whether a swapped group, with one more token for each sequence, fits and leaves a share `watermark` free."""
        seq_ids = _with_table(group.live)
        for manager, host in zip(self.managers, self.hosts):
            needed = host.num_blocks_of(seq_ids) + host.num_blocks_to_append_all((seq_id, 1) for seq_id in seq_ids)
            if not _leaves_free(manager, needed, watermark):
                return False
        return True

    def has_room(self, plan: Plan) -> bool:
        """Whether there are blocks for the plan, copies of shared blocks included."""
        num_tokens = sum([count for _, count in plan])
        for manager in self.managers:
            available = manager.allocator.num_available
            # No need to count exactly if there are enough blocks for the worst case: a new and a copied one each.
            if num_tokens // manager.block_size + 2 * len(plan) > available:
                needed = manager.num_blocks_to_append_all((seq.seq_id, count) for seq, count in plan)
                if needed > available:
                    return False
        return True

    def room(self, seq: Sequence) -> int:
        """Upper bound on the tokens that can be appended to `seq`; a copy of its last block is not counted."""
        return min(
            -manager.num_tokens(seq.seq_id) % manager.block_size + manager.allocator.num_available * manager.block_size
            for manager in self.managers
        )

    # -- changes ------------------------------------------------------------------------------------------------

    def start(self, seq: Sequence, hits: list[int]) -> None:
        """Make a table that begins with the blocks `hits` of the prefix cache."""
        for manager in self.managers:
            manager.adopt(seq.seq_id, hits)

    def append(self, plan: Plan, copies: Copies) -> bool:
        """Append slots for the whole plan, or return False and change nothing."""
        if not self.has_room(plan):
            return False
        appends = [(seq.seq_id, count) for seq, count in plan]
        for manager, manager_copies in zip(self.managers, copies):
            manager_copies += manager.append_all(appends)
        return True

    def append_part(self, plan: Plan, copies: Copies) -> Plan:
        """Append slots for the whole plan or, if blocks are missing, for a chunk of the first sequence with several
        tokens to compute. Returns what was appended, which may be nothing."""
        while plan and not self.append(plan, copies):
            seq, num_tokens = next(((seq, count) for seq, count in plan if count > 1), (plan[0][0], 1))
            num_tokens = min(num_tokens - 1, self.room(seq))
            plan = [(seq, num_tokens)] if num_tokens > 0 else []
        return plan

    def take_back(self, seq: Sequence) -> None:
        """Undo the appends of tokens that were not computed."""
        for manager in self.managers:
            manager.crop(seq.seq_id, seq.num_computed_tokens)

    def copy(self, parent: Sequence, forks: list[tuple[int, int]]) -> Sequence:
        """A new sequence with the same tokens and blocks."""
        child = parent.copy()
        self._fork(parent, child, forks)
        return child

    def fork_branches(self, group: SequenceGroup, forks: list[tuple[int, int]]) -> None:
        """After a restart: fork the sequences whose parent has computed what they have in common."""
        for seq in group.live:
            parent = seq.parent
            if parent is None or parent.parent is not None or parent.num_computed_tokens < seq.branch_at:
                continue
            assert parent.num_computed_tokens == seq.branch_at, f"{parent!r} ran past the branch of {seq!r}"
            self._fork(parent, seq, forks)
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.parent = None
        group.has_branches = any(seq.parent is not None for seq in group.live)

    def _fork(self, parent: Sequence, child: Sequence, forks: list[tuple[int, int]]) -> None:
        for manager in self.managers:
            manager.fork(parent.seq_id, child.seq_id)
        forks.append((parent.seq_id, child.seq_id))

    def free(self, seqs: Iterable[Sequence]) -> None:
        seq_ids = _with_table(seqs)
        for manager in self.managers:
            for seq_id in seq_ids:
                manager.free(seq_id)

    def free_swapped(self, seqs: Iterable[Sequence], swap_out: Copies) -> None:
        """Free host blocks, and drop the pending copies into them from `swap_out`."""
        seq_ids = _with_table(seqs)
        for host, copies in zip(self.hosts, swap_out):
            for seq_id in seq_ids:
                host.free(seq_id)
            # The blocks may be allocated again before the step that would have filled them.
            copies[:] = [copy for copy in copies if host.allocator.ref_count(copy.dst)]

    def swap_out(self, group: SequenceGroup, copies: Copies) -> bool:
        """Move the whole group to host memory, or return False and change nothing. Warns once of too little room."""
        seq_ids = _with_table(group.live)
        pairs = list(zip(self.managers, self.hosts))
        if not pairs:
            return False
        if any(manager.num_blocks_of(seq_ids) > host.allocator.num_available for manager, host in pairs):
            self._warn_of_full_swap(group)
            return False
        for (manager, host), manager_copies in zip(pairs, copies):
            manager_copies += manager.move_to(host, seq_ids)
        return True

    def _warn_of_full_swap(self, group: SequenceGroup) -> None:
        if not self._has_warned:
            self._has_warned = True
            total = min(host.allocator.num_blocks for host in self.hosts)
            warnings.warn(
                f"the swap memory of {total} blocks has no room for request {group.request_id!r}, which is computed "
                "again instead (reported once); raise swap_memory, or use preemption='recompute'",
                RuntimeWarning,
                stacklevel=2,
            )

    def swap_in(self, group: SequenceGroup, copies: Copies) -> None:
        seq_ids = _with_table(group.live)
        for manager, host, manager_copies in zip(self.managers, self.hosts, copies):
            manager_copies += host.move_to(manager, seq_ids)
        for seq in group.live:
            seq.num_registered_blocks = 0  # they have moved to other blocks

    # -- diagnostics ---------------------------------------------------------------------------------------------

    def usage(self) -> str:
        return ", ".join(f"{m.allocator.num_used} of {m.allocator.num_blocks} blocks in use" for m in self.managers)

    def check_integrity(self, running: list[SequenceGroup], swapped: list[SequenceGroup], pins: set[object]) -> None:
        """Raises AssertionError unless exactly these groups (and `pins`) have tables, covering what is computed."""
        for groups, managers, others in ((running, self.managers, pins), (swapped, self.hosts, set())):
            seqs = [seq for group in groups for seq in group.live if seq.parent is None]
            for manager in managers:
                manager.check_integrity()
                assert set(manager.seq_ids) - others == {seq.seq_id for seq in seqs}, "tables of others, or none"
                for seq in seqs:
                    assert manager.num_tokens(seq.seq_id) == seq.num_computed_tokens


def _with_table(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.seq_id for seq in seqs if seq.parent is None]


def _leaves_free(manager: BlockManager, needed: int, watermark: float) -> bool:
    allocator = manager.allocator
    return needed + int(watermark * allocator.num_blocks) <= allocator.num_available


def _blocks_needed(group: SequenceGroup, manager: BlockManager) -> int:
    """Blocks for all tokens of a group that holds none, with prefixes shared up to the branches."""
    size, window = manager.block_size, manager.sliding_window
    needed = 0
    for seq in group.live:
        own = -(-seq.num_tokens // size) - seq.branch_at // size
        # With a sliding window, a prefill in small chunks needs no more blocks than the window covers.
        needed += own if window is None else min(own, -(-window // size) + 1)
    return needed
