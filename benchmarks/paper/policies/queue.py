"""What the baselines have in common: a queue in order of arrival, sequences that fork by copying, no preemption."""

from __future__ import annotations

from collections import deque

from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.scheduler import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus, Sequence, SequenceGroup


class Queue:
    """First come, first served. A sequence that forks copies its K/V, because contiguous memory cannot be shared."""

    num_swapped = 0
    num_preemptions = 0

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.running: list[SequenceGroup] = []
        self._waiting: deque[SequenceGroup] = deque()
        self._copied_tokens = 0  # by forks since the last step

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add(self, group: SequenceGroup) -> None:
        self._waiting.append(group)

    def update(self, output: SchedulerOutput) -> None:
        for seq, count in output.scheduled:
            seq.num_computed_tokens += count

    def fork(self, parent: Sequence, tokens: list[int]) -> list[Sequence]:
        group = parent.group
        family = [parent, *(parent.copy() for _ in tokens[1:])]
        self._copied_tokens += parent.num_computed_tokens * (len(tokens) - 1)
        for seq, token in zip(family, tokens):
            seq.token_ids.append(token)
        group.sequences.extend(family[1:])
        group.live = group.sequences[:]
        return family

    def reorder(self, group: SequenceGroup, parents: list[int], tokens: list[int]) -> list[Sequence]:
        """A surviving beam keeps its memory; each further child of it is copied over a beam that lost."""
        old, beams, seen = group.live, [], set()
        for index in parents:
            if index in seen:
                beams.append(old[index].copy())
                self._copied_tokens += old[index].num_computed_tokens
            else:
                beams.append(old[index])
                seen.add(index)
        for seq, token in zip(beams, tokens):
            seq.token_ids.append(token)
        group.sequences = beams
        group.live = beams[:]
        return beams

    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None:
        for seq in group.live:
            seq.finish_reason = reason
        group.live = []
        group.status = SeqStatus.FINISHED
        self.running.remove(group)

    def _start(self, group: SequenceGroup) -> None:
        group.status = SeqStatus.RUNNING
        self.running.append(group)

    def _take_copied(self) -> int:
        copied, self._copied_tokens = self._copied_tokens, 0
        return copied
