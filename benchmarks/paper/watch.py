"""Watches the scheduler of a running engine: each step's decisions, and which beams continued which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hf_paged.generation.engine.scheduler import Scheduler, SchedulerOutput
from hf_paged.generation.engine.tables import Drafts
from hf_paged.generation.requests.sequence import Sequence, SequenceGroup

OnStep = Callable[[Scheduler, SchedulerOutput], None]
OnReorder = Callable[[SequenceGroup, list[int]], None]


@contextmanager
def watched(on_step: OnStep, on_reorder: OnReorder | None = None) -> Iterator[None]:
    """Call `on_step` after each step has been scheduled, before it is computed, by any scheduler of the process."""
    schedule, reorder = Scheduler.schedule, Scheduler.reorder

    def watched_schedule(self: Scheduler, drafts: Drafts | None = None) -> SchedulerOutput:
        output = schedule(self, drafts)
        on_step(self, output)
        return output

    def watched_reorder(self: Scheduler, group: SequenceGroup, parents: list[int], tokens: list[int]) -> list[Sequence]:
        if on_reorder is not None:
            on_reorder(group, list(parents))
        return reorder(self, group, parents, tokens)

    Scheduler.schedule, Scheduler.reorder = watched_schedule, watched_reorder  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler.schedule, Scheduler.reorder = schedule, reorder  # type: ignore[method-assign]
