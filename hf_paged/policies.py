"""The policies of `hf_paged.sockets.POLICIES`, which `SchedulerConfig(policy=...)` knows by name.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakSet

from hf_paged.sockets import Group, Policy

# Far more clients than have requests at a time, and a few hundred bytes each: names come from outside.
_MOST_CLIENTS = 4096


class Fair(Policy):
    """Clients take turns by the tokens that were computed for them: who has had least goes first.

    A client is the `client` of a request. Requests without one are of one client together. Among those of one client,
    priority and arrival decide. A client that comes back after a time without requests starts level with the least
    served of those that have some, so that nobody saves up turns. Prompts count as computed, so that what the prefix
    cache has costs nothing.

    Args:
        weights: For a client of weight 2, tokens count half, so that it gets twice as many as one of weight 1.
            Default: 1 for every client.

    Raises:
        ValueError: If a weight is no positive number.

    Source: the virtual token counter of "Fairness in Serving Large Language Models" (OSDI'24), section 4, which lifts
    the counter of a client that comes back.

    Example:
        ```python
        from hf_paged import SchedulerConfig
        from hf_paged.policies import Fair

        config = SchedulerConfig(policy=Fair({"batch jobs": 0.25}))
        ```
    """

    is_static = False

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        for client, weight in self._weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise ValueError(f"weights={{{client!r}: {weight!r}}}: a positive number is needed")
        self._served: dict[str | None, float] = {}
        self._groups: dict[str | None, WeakSet[Group]] = {}

    def key(self, group: Group) -> tuple[float, float, float]:
        """Least served clients first; of one client, by priority and arrival."""
        groups = self._groups.get(group.client, ())
        if group not in groups:
            if not any(each.live for each in groups):
                self._come_back(group.client)
            self._groups.setdefault(group.client, WeakSet()).add(group)
        return self._served[group.client], group.priority, group.arrival

    def victim(self, candidates: Sequence[Group]) -> Group:
        """Choose the last group of the client that was served most."""
        return max(enumerate(candidates), key=lambda each: (self._served.get(each[1].client, 0.0), each[0]))[1]

    def on_served(self, group: Group, num_tokens: int) -> None:
        """Count the tokens of the group for its client."""
        weight = self._weights.get(group.client, 1)
        self._served[group.client] = self._served.get(group.client, 0.0) + num_tokens / weight

    def _come_back(self, client: str | None) -> None:
        """Lift a client that has had no request to the least served of those that have."""
        for name in [name for name, groups in self._groups.items() if not any(group.live for group in groups)]:
            del self._groups[name]
        least = min([self._served[name] for name in self._groups], default=0.0)
        if len(self._served) >= _MOST_CLIENTS:
            # Those that had least are the ones whose count the next request would lift anyway.
            idle = sorted(self._served.keys() - self._groups.keys(), key=self._served.__getitem__)
            for name in idle[: _MOST_CLIENTS // 2]:
                del self._served[name]
        self._served[client] = max(self._served.get(client, 0.0), least)
