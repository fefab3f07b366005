"""The memory of recurrent states, and which checkpoints of them a step keeps, restores and drops.

Knows numbers and ids, never tensors. Standard library only.
"""

from __future__ import annotations

import math

from hf_paged.cache.checkpoints import CheckpointRules, Checkpoints
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import Sequence, SequenceGroup
from hf_paged.sockets import SideMemory


class StateMemory(SideMemory):
    """The states of a model that keeps them besides K/V, or instead of it.

    rules: which checkpoints there may be; None: none. state_blocks: the memory of the state of one sequence, in blocks,
    if it is in the same memory as the blocks. It is then withheld from the allocator for each sequence that a running
    group may have, and for each checkpoint.
    """

    goes_back = True  # a state has all tokens of a step, or none

    def __init__(self, rules: CheckpointRules | None = None, state_blocks: float = 0.0) -> None:
        self._rules = rules
        self._state_blocks = state_blocks
        self._num_held = 0  # states that the last step has held beside those of its sequences

    def bind(self, schedule: Scheduler) -> None:
        self._schedule, self._allocator = schedule, schedule.manager.allocator
        self._checkpoints: Checkpoints | None = None
        if self._rules is not None and schedule.prefix_cache is not None:
            self._checkpoints = schedule.prefix_cache.checkpoints = Checkpoints(self._rules)
        self.stops_prompts = self._checkpoints is not None

    @property
    def num_blocks(self) -> tuple[int, int]:
        """The blocks whose memory is kept for the states of running groups, and for checkpoints."""
        if not (size := self._state_blocks):
            return 0, 0
        # Rounded once for all, because a state may be smaller than a block.
        running = math.ceil(size * (self._schedule.num_seqs + self._num_held))
        return running, 0 if self._checkpoints is None else math.ceil(size * len(self._checkpoints))

    def blocks_beside(self, num_seqs: int) -> int:
        return math.ceil(self._state_blocks * num_seqs)

    def ended(self, seq: Sequence, *, is_lost: bool) -> None:
        if self._checkpoints is not None:
            (self._checkpoints.lose if is_lost else self._checkpoints.end)(seq.seq_id)

    def hold(self, num_drafts: int) -> bool:
        """Each draft takes the memory of a state more, to which its sequence may go back."""
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
        if self._checkpoints is not None:
            # Before the moves are taken, because checkpoints that no longer fit are dropped by this step.
            self._checkpoints.fit(self._schedule.num_seqs, self._allocator.num_available)
            output.states = self._checkpoints.take_moves()
        if self._state_blocks:
            # Before blocks are counted whose memory goes back to the system: they depend on what is withheld.
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
