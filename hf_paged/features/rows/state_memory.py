"""The memory of recurrent states. It decides which checkpoints a step keeps, restores and drops, and does so.

Knows numbers and ids, never tensors. Standard library only.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

from hf_paged.features.rows.checkpoints import CheckpointRules, Checkpoints, StateMoves
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import Plan, Sequence, SequenceGroup
from hf_paged.sockets import Executor, Parts, SideMemory


class StateMemory(SideMemory):
    """The states of a model that keeps them besides K/V, or instead of it.

    rules: which checkpoints there may be; None: none. state_blocks: the size of a sequence's state in blocks, if states
    and blocks share memory; else 0. The memory is then withheld from the allocator, for each sequence that a running
    group may have, and for each checkpoint.
    """

    goes_back = True  # a state has all tokens of a step, or none

    def __init__(self, rules: CheckpointRules | None = None, state_blocks: float = 0.0) -> None:
        self._rules = rules
        self._state_blocks = state_blocks
        self._num_held = 0  # further states, which the last step has kept for drafts

    def use(self, executor: Executor) -> None:
        # Weakly, so that its memory is freed with the last reference, not with the next collection of garbage.
        self._rows: Any = weakref.proxy(executor)

    def bind(self, schedule: Scheduler) -> None:
        self._schedule, self._allocator = schedule, schedule.manager.allocator
        self._checkpoints: Checkpoints | None = None
        if self._rules is not None and schedule.prefix_cache is not None:
            self._checkpoints = schedule.prefix_cache.checkpoints = Checkpoints(self._rules)
        self.stops_prompts = self._checkpoints is not None

    @property
    def num_blocks(self) -> tuple[int, int]:
        """The blocks whose memory is withheld: for states of running groups, and for checkpoints."""
        if not (size := self._state_blocks):
            return 0, 0
        # Rounded once for all, because a state may be smaller than a block.
        running = math.ceil(size * (self._schedule.num_seqs + self._num_held))
        return running, 0 if self._checkpoints is None else math.ceil(size * len(self._checkpoints))

    @property
    def unlisted_blocks(self) -> tuple[int, int]:
        return self.num_blocks

    def blocks_beside(self, num_seqs: int) -> int:
        return math.ceil(self._state_blocks * num_seqs)

    def ended(self, seq: Sequence, *, is_lost: bool) -> None:
        if self._checkpoints is not None:
            (self._checkpoints.lose if is_lost else self._checkpoints.end)(seq.seq_id)

    def hold(self, num_drafts: int) -> bool:
        """Take the memory of one more state for each draft, to which its sequence may go back."""
        if self._state_blocks:
            former, self._num_held = self._num_held, num_drafts
            if num_drafts and sum(self.num_blocks) > self._room:
                self._num_held = former
                return False
            self.settle()
        return True

    def verified(self, seq: Sequence) -> None:
        self._num_held = max(self._num_held - 1, 0)

    def settle(self) -> None:
        """Keep the memory of states from being used for blocks."""
        if not self._state_blocks:
            return
        if (host := self._schedule.host_manager) is not None:
            host.allocator.withhold(self.blocks_beside(sum(len(group.live) for group in self._schedule.swapped)))
        while sum(self.num_blocks) > self._room and self._checkpoints is not None and self._checkpoints.give_up():
            pass  # blocks were pinned since there was room
        self._allocator.withhold(sum(self.num_blocks))

    @property
    def _room(self) -> int:
        return self._allocator.num_free + self._allocator.num_cached

    def fill(self, output: SchedulerOutput) -> None:
        output.states = StateMoves()
        if self._checkpoints is not None:
            # Before the moves are taken, because checkpoints that no longer fit are dropped by this step.
            self._checkpoints.fit(self._schedule.num_seqs, self._allocator.num_available)
            output.states = self._checkpoints.take_moves()
        if self._state_blocks:
            # Before `untouch`, because the blocks whose memory returns to the system depend on what is withheld.
            self.settle()
            output.untouched += self._allocator.untouch()
            if (host := self._schedule.host_manager) is not None:
                output.untouched_on_host += host.allocator.untouch()

    def computed(self, output: SchedulerOutput) -> None:
        if self._checkpoints is not None and output.states.lost:
            self._checkpoints.lose_copies(output.states.lost)

    def num_idle_blocks(self, but: SequenceGroup | None) -> int:
        return 0 if self._checkpoints is None else math.ceil(self._state_blocks * self._checkpoints.num_spare)

    def evict(self, but: SequenceGroup | None) -> bool:
        """Give up a checkpoint, if that makes room for blocks."""
        if not self._state_blocks or self._checkpoints is None or not self._checkpoints.give_up():
            return False
        self.settle()
        return True

    def recover(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.recover()

    # -- on the device ------------------------------------------------------------------------------------------

    def move(self, output: SchedulerOutput) -> None:
        rows, moves = self._rows, output.states
        late = {seq_id for _, seq_id, _ in moves.restored}  # sequences that begin with a checkpoint, and their forks
        late_forks = []
        # Forks and checkpoints copy the states of sequences that may end in this step, so they come before `free`. A
        # checkpoint that is made in this step may be restored in it, and dropped after that.
        for parent_id, child_id in output.forks:
            if parent_id in late:
                late.add(child_id)
                late_forks.append((parent_id, child_id))
            else:
                rows.fork(parent_id, child_id)
        needed = {number for number, _, _ in moves.restored}
        moves.lost += rows.keep(moves.kept, needed, clears=moves.clears)
        moves.clears = False  # done: a later step repeats what is left, if this one is broken off
        moves.kept.clear()
        for seq_id in output.finished_seq_ids:
            rows.free(seq_id)
        for group, way in output.preempted:
            for seq in group.sequences:
                if way == "recompute":
                    rows.free(seq.seq_id)
                else:
                    rows.suspend(seq.seq_id, seq.num_computed_tokens)
        for restored in moves.restored:
            rows.states.restore(*restored)
        for parent_id, child_id in late_forks:
            rows.fork(parent_id, child_id)
        for number in moves.dropped:
            rows.states.drop(number)

    def can_move_again(self, output: SchedulerOutput) -> bool:
        return not output.forks and not output.states

    def extend(self, parts: Parts, plan: Plan, output: SchedulerOutput) -> None:
        """Hold the states of sequences with drafts, which may be wrong."""
        for seq, _ in plan if output.drafts else ():
            if seq in output.drafts:
                self._rows.hold(seq.seq_id, seq.num_computed_tokens)

    def take_back(self, seq: Sequence, num_tokens: int, *, is_right: bool) -> bool:
        if is_right:
            self._rows.let_go(seq.seq_id)
        else:
            self._rows.go_back(seq.seq_id, num_tokens)
        return not is_right

    def lost(self, groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """Return those whose states have changed or are gone."""
        rows = self._rows
        least = 0 if rows.verifies else math.inf  # tokens that have a state, if that is less than `whole`
        return [
            group
            for group in groups
            if rows.lost(
                (seq.seq_id, seq.num_computed_tokens)
                for seq in group.live
                if seq.parent is None and seq.num_computed_tokens >= min(least, group.whole)
            )
        ]
