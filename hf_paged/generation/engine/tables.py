"""The changes of block tables that a group needs to start, fork, move and end, on the device and in host memory.

Decides nothing and knows no queue. What the device has to do is added to lists of the caller, which are parts of a
SchedulerOutput. Standard library only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_paged.cache.block_manager import BlockCopy, BlockManager
from hf_paged.cache.prefix_cache import CachedPrefix
from hf_paged.generation.requests.sequence import Plan, SeqStatus, Sequence, SequenceGroup

Copies = list[BlockCopy]
Drafts = dict[Sequence, SequenceOf[int]]
"""Guesses of the tokens that follow the last one of these sequences. Each is not empty."""
Preemption = Literal["recompute", "swap"]


@dataclass(slots=True)
class SchedulerOutput:
    """One step as data, to be carried out in this order: `swap_out`, `swap_in`, `block_copies`, then the forward.

    `swap_out` has copies from device to host blocks, `swap_in` from host to device blocks, `block_copies` from device
    to device blocks. A scheduled sequence samples in this step if the step computes the last of its tokens: before
    `update`, `num_new_tokens` is then `seq.num_uncomputed_tokens`. `drafts`: the forward computes these tokens too,
    after the last one of a scheduled sequence, and they have slots until `drop_drafts`. What is done for memory besides
    block tables, its tenants enter (`SideMemory.fill`): `states`, `untouched`, `encoders`.
    """

    block_copies: Copies = field(default_factory=list)
    swap_out: Copies = field(default_factory=list)
    swap_in: Copies = field(default_factory=list)
    scheduled: Plan = field(default_factory=list)  # (sequence, num_new_tokens); a group's sequences are neighbours
    drafts: Drafts = field(default_factory=dict)
    preempted: list[tuple[SequenceGroup, Preemption]] = field(default_factory=list)  # since the last step
    failed: list[SequenceGroup] = field(default_factory=list)  # finished with "error"; `group.error` says why
    admitted: list[SequenceGroup] = field(default_factory=list)  # were waiting
    resumed: list[SequenceGroup] = field(default_factory=list)  # were swapped out
    forks: list[tuple[int, int]] = field(default_factory=list)  # (parent, child) seq_ids since the last step, in order
    states: Any = None  # since the last step, opaque here
    untouched: list[int] = field(default_factory=list)  # blocks whose memory goes to states, after all copies
    untouched_on_host: list[int] = field(default_factory=list)  # the same, of the swap memory
    encoders: list[Any] = field(default_factory=list)  # before the forward, opaque here
    finished_seq_ids: list[int] = field(default_factory=list)  # since the last step, beams that lost included
    tasks: Collection[SequenceGroup] = ()  # running groups with a task that wants more; the stepper enters them

    @property
    def moves_blocks(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.block_copies)


class Tables:
    """The block tables of each sequence: in `manager`, or in `host` while it is swapped out. beside: how many blocks'
    memory so many sequences of a group use besides, in either.

    Invariant: a sequence without a parent has tables in the manager or in the host, or none. A sequence that still has
    a parent has none, and is skipped when its group is freed or moved.
    """

    def __init__(self, manager: BlockManager, host: BlockManager | None, beside: Callable[[int], int]) -> None:
        self.manager = manager
        self.host = host
        self._beside = beside
        self._has_warned = False  # of a full swap memory

    # -- is there room? -----------------------------------------------------------------------------------------

    def check_fits_alone(self, group: SequenceGroup) -> None:
        """Raises ValueError if the tokens of the group do not fit even in an empty cache."""
        needed, total = self._blocks_needed(group), self.manager.allocator.num_blocks
        if needed > total:
            others = f" ({beside} for what is kept besides K/V)" if (beside := self._beside(group.width)) else ""
            raise ValueError(
                f"a prompt of {group.num_prompt_tokens} tokens needs {needed} blocks of {self.manager.block_size}"
                f"{others}, but the cache has {total}; give the cache more memory or shorten the prompt"
            )

    def num_missing(self, group: SequenceGroup, prefix: CachedPrefix | None, watermark: float, besides: int = 0) -> int:
        """Blocks that are missing for a group without blocks to start with a cached prefix, take `besides` more blocks,
        and leave a share `watermark` free. 0 or less: it can."""
        needed = self._blocks_needed(group) + besides
        if prefix is not None:
            # Idle blocks count as available until they are adopted.
            needed += prefix.num_idle - prefix.num_held
        return self._num_missing(needed, watermark)

    def num_missing_swapped(self, group: SequenceGroup, watermark: float, besides: int = 0) -> int:
        """The same for a swapped group, with one more token for each sequence."""
        assert self.host is not None
        seq_ids = _with_table(group.live)
        appended = self.host.num_blocks_to_append_all((seq_id, 1) for seq_id in seq_ids)
        needed = self.host.num_blocks_of(seq_ids) + appended + self._beside(group.width)
        return self._num_missing(needed + besides, watermark)

    def _num_missing(self, needed: int, watermark: float) -> int:
        allocator = self.manager.allocator
        return needed + int(watermark * allocator.num_blocks) - allocator.num_available

    def _blocks_needed(self, group: SequenceGroup) -> int:
        """Blocks for all tokens of a group that holds none, with prefixes shared up to the branches, and for states. A
        prompt that does not fit at once is computed in small chunks."""
        size = self.manager.block_size
        # Branches share the blocks that are full before they part.
        own = [-(-seq.num_tokens // size) - seq.branch_at // size for seq in group.live]
        blocks = sum(each.kind.most_blocks(count, size) for each in self.manager.groups for count in own)
        return blocks + self._beside(group.width)

    def owed(self, group: SequenceGroup) -> int:
        """Blocks for the tokens of a running group that have no slots yet."""
        manager, size = self.manager, self.manager.block_size
        rows = [seq for seq in group.live if seq.parent is None]
        ends = [(-(-manager.num_tokens(seq.seq_id) // size), -(-seq.num_tokens // size)) for seq in rows]
        kinds = [each.kind for each in manager.groups]
        return sum(kind.most_blocks(end, size) - kind.most_blocks(done, size) for kind in kinds for done, end in ends)

    def room(self, seq: Sequence) -> int:
        """Upper bound on the tokens that can be appended to `seq`; copies of its last blocks are not counted."""
        manager = self.manager
        new = manager.allocator.num_available // len(manager.groups)
        return -manager.num_tokens(seq.seq_id) % manager.block_size + new * manager.block_size

    # -- changes ------------------------------------------------------------------------------------------------

    def start(self, seq: Sequence, prefix: CachedPrefix | None) -> None:
        """Make tables that begin with a cached prefix."""
        num_blocks, tables = (0, [()] * len(self.manager.groups)) if prefix is None else prefix[:2]
        self.manager.adopt(seq.seq_id, tables, num_blocks)

    def append_part(self, plan: Plan, copies: Copies) -> Plan:
        """Append slots for the whole plan or, if blocks are missing, for a chunk of the first sequence with several
        tokens to compute. Returns what was appended, which may be nothing."""
        while plan:
            appended = self.manager.append_if_room([(seq.seq_id, count) for seq, count in plan])
            if appended is not None:
                copies += appended
                break
            seq, num_tokens = next(((seq, count) for seq, count in plan if count > 1), (plan[0][0], 1))
            # At least one less, so that this ends although copies of shared blocks are not counted.
            num_tokens = min(num_tokens - 1, self.room(seq))
            num_tokens = seq.group.undivided(seq.num_computed_tokens, num_tokens) if num_tokens > 0 else 0
            plan = [(seq, num_tokens)] if num_tokens > 0 else []
        return plan

    def take_back(self, seq: Sequence) -> None:
        """Undo the appends of tokens that were not computed."""
        self.manager.crop(seq.seq_id, seq.num_computed_tokens)

    def fork(self, parent: Sequence, tokens: list[int], forks: list[tuple[int, int]]) -> list[Sequence]:
        """See `Scheduler.fork`."""
        group = parent.group
        if len(group.live) + len(tokens) - 1 > group.width or not tokens:
            raise ValueError(f"{len(group.live)} + {len(tokens)} - 1 sequences in a group of width {group.width}")
        assert parent.num_uncomputed_tokens == 0, f"{parent!r} is not computed"
        family = [parent, *(self._copy(parent, forks) for _ in tokens[1:])]
        for seq, token in zip(family, tokens):
            seq.token_ids.append(token)
        group.sequences.extend(family[1:])
        group.live = [seq for seq in group.sequences if seq.finish_reason is None]
        return family

    def reorder(
        self, group: SequenceGroup, parents: list[int], tokens: list[int], forks: list[tuple[int, int]]
    ) -> list[Sequence]:
        """See `Scheduler.reorder`. Returns the sequences that go nowhere, without their tables."""
        old = group.live
        if len(parents) != len(tokens) or not 0 < len(parents) <= max(group.width, len(old)):
            raise ValueError(f"{len(parents)} parents and {len(tokens)} tokens for a group of width {group.width}")
        assert group.status is SeqStatus.RUNNING and all(seq.num_uncomputed_tokens == 0 for seq in old)
        beams: list[Sequence] = []
        seen: set[int] = set()
        for index in parents:
            beams.append(self._copy(old[index], forks) if index in seen else old[index])
            seen.add(index)
        losers = [seq for index, seq in enumerate(old) if index not in seen]
        for seq in losers:
            self.manager.free(seq.seq_id)
        for seq, token in zip(beams, tokens):
            seq.token_ids.append(token)
        group.sequences = [seq for seq in group.sequences if seq.finish_reason is not None] + beams
        group.live = beams[:]
        return losers

    def _copy(self, parent: Sequence, forks: list[tuple[int, int]]) -> Sequence:
        child = parent.copy()
        self._fork(parent, child, forks)
        return child

    def fork_branches(self, group: SequenceGroup, forks: list[tuple[int, int]]) -> None:
        """After a restart: fork the sequences whose parent has computed what they have in common."""
        for seq in group.live:
            parent = seq.parent
            if parent is None or parent.parent is not None or parent.num_computed_tokens < seq.branch_at:
                continue
            # A parent stops at each branch, because a child takes all its blocks.
            assert parent.num_computed_tokens == seq.branch_at, f"{parent!r} ran past the branch of {seq!r}"
            self._fork(parent, seq, forks)
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.parent = None
        group.has_branches = any(seq.parent is not None for seq in group.live)

    def _fork(self, parent: Sequence, child: Sequence, forks: list[tuple[int, int]]) -> None:
        self.manager.fork(parent.seq_id, child.seq_id)
        forks.append((parent.seq_id, child.seq_id))

    def free(self, group: SequenceGroup, seqs: Iterable[Sequence], swap_out: Copies) -> None:
        """Free the blocks of sequences of the group, if it has some. Drop pending copies into host blocks from
        `swap_out`."""
        host = self.host if group.status is SeqStatus.SWAPPED else None
        manager = self.manager if group.status is SeqStatus.RUNNING else host
        if manager is not None:
            for seq_id in _with_table(seqs):
                manager.free(seq_id)
        if host is not None:
            # The blocks may be allocated again before the step that would have filled them.
            swap_out[:] = [copy for copy in swap_out if host.allocator.ref_count(copy.dst)]

    def swap_out(self, group: SequenceGroup, copies: Copies) -> bool:
        """Move the whole group to host memory, or return False and change nothing. Warns once of too little room."""
        seq_ids = _with_table(group.live)
        if self.host is None:
            return False
        # All or nothing: a group with a sequence left behind could not resume as one.
        needed = self.manager.num_blocks_of(seq_ids) + self._beside(len(group.live))
        if needed > self.host.allocator.num_available:
            self._warn_of_full_swap(group, self.host.allocator.num_blocks)
            return False
        copies += self.manager.move_to(self.host, seq_ids)
        return True

    def _warn_of_full_swap(self, group: SequenceGroup, total: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the swap memory of {total} blocks has no room for request {group.request_id!r}, which is computed "
                "again instead (reported once); raise swap_memory, or use preemption='recompute'",
                RuntimeWarning,
                stacklevel=2,
            )

    def swap_in(self, group: SequenceGroup, copies: Copies) -> None:
        assert self.host is not None
        copies += self.host.move_to(self.manager, _with_table(group.live))
        for seq in group.live:
            seq.num_registered_blocks = 0  # they have moved to other blocks

    # -- diagnostics ---------------------------------------------------------------------------------------------

    def usage(self) -> str:
        allocator = self.manager.allocator
        others = f", {allocator.num_withheld} for what is kept besides K/V" if allocator.num_withheld else ""
        return f"{allocator.num_used} of {allocator.num_blocks} blocks in use{others}"

    def check_integrity(self, running: list[SequenceGroup], swapped: list[SequenceGroup], pins: set[object]) -> None:
        """Raises AssertionError unless exactly these groups (and `pins`) have tables, covering what is computed."""
        for groups, manager, others in ((running, self.manager, pins), (swapped, self.host, set())):
            if manager is None:
                continue
            seqs = [seq for group in groups for seq in group.live if seq.parent is None]
            manager.check_integrity()
            assert set(manager.seq_ids) - others == {seq.seq_id for seq in seqs}, "tables of others, or none"
            for seq in seqs:
                assert manager.num_tokens(seq.seq_id) == seq.num_computed_tokens


def _with_table(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.seq_id for seq in seqs if seq.parent is None]
