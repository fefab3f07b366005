"""Decide how many replicas are wanted. Standard library only."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil
from typing import NamedTuple

WAITING = 8.0
"""Requests that wait on a replica, for which one more replica is wanted."""

KV_USED = 0.8
"""Share of a replica's K/V blocks that requests hold when it has as much to do as it should."""


class Pressure(NamedTuple):
    """Load of a replica. waiting: requests without memory or a place in the step. kv_used: share of blocks in use."""

    waiting: float
    kv_used: float

    @property
    def replicas(self) -> float:
        """Return how many replicas its work would fill; above 1 if requests wait."""
        filled = self.kv_used / KV_USED
        return filled if self.waiting <= 0 else max(1.0, filled) + self.waiting / WAITING


def wanted_replicas(pressures: Collection[Pressure], *, current: int, least: int, most: int) -> int:
    """A number from `least` to `most`. A replica without figures, such as one that starts, counts as one."""
    unknown = max(0, current - len(pressures))
    return max(least, min(most, ceil(sum(each.replicas for each in pressures) + unknown)))
