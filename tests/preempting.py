"""Preempts a request, as if blocks had run out."""

from __future__ import annotations

from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import Preemption
from hf_paged.generation.requests.sequence import SeqStatus


def force_preempt(scheduler: Scheduler, request_id: str, mode: Preemption) -> bool:
    """Between two steps. False if the request does not run."""
    group = scheduler.get(request_id)
    if group is None or group.status is not SeqStatus.RUNNING:
        return False
    scheduler._preempt(group, mode)
    return True
