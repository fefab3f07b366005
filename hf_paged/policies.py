"""Policies: orders of requests, and of the blocks that the prefix cache gives up. See `sockets.py`. Standard library
only."""

from __future__ import annotations

import itertools
import pkgutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

Group = Any


class Policy:
    """The order of requests in one engine: `SchedulerConfig(policy=...)`. This class is "fcfs".

    Whatever a policy says, running groups keep their order: that of their keys if these are static, else that in which
    they began. No group is preempted for one behind it, so the first always makes progress (PagedAttention, section
    4.5).

    Attributes:
        is_static: True if keys never change, so that a group is sorted once, when it comes. False = waiting groups are
            sorted before each step.

    Example:
        ```python
        from collections import Counter
        from hf_paged import SchedulerConfig
        from hf_paged.sockets import Policy


        class FairShare(Policy):
            is_static = False

            def __init__(self, client_of):
                self.client_of, self.served = client_of, Counter()

            def key(self, group):
                return self.served[self.client_of(group.request_id)]

            def on_served(self, group, num_tokens):
                self.served[self.client_of(group.request_id)] += num_tokens


        config = SchedulerConfig(policy=FairShare(lambda request_id: request_id.split("/")[0]))
        ```
    """

    is_static = True

    def key(self, group: Group) -> Any:
        """Return the sorting key of a group.

        Args:
            group: A waiting group.

        Returns:
            Anything that can be compared. Smaller keys go first, and equal ones in the order of arrival.
        """
        return group.priority, group.arrival

    def victim(self, candidates: Sequence[Group]) -> Group:
        """Choose the group to preempt, because blocks have run out.

        Args:
            candidates: Running groups, in order.

        Returns:
            One of the candidates.
        """
        return candidates[-1]

    def shares(self, running: Sequence[Group], starting: Sequence[Group], budget: int) -> Mapping[Group, int] | None:
        """Say how many tokens of a step each group may have, at most.

        Without shares, a prompt that runs takes what is left of each step until it is computed. A group whose share is
        0 waits for another step. Whatever the shares, the first running group makes progress, and a group with images,
        videos or audio takes what it needs.

        Args:
            running: Running groups, in order. What each lacks is the sum of `num_uncomputed_tokens` of its `live`.
            starting: Waiting groups for which there is room, in order.
            budget: The most tokens of the step.

        Returns:
            The most tokens of groups. Those that it does not have, and all if it is None, take what is left, in order.
        """
        return None

    def on_served(self, group: Group, num_tokens: int) -> None:
        """Take note that a step has computed tokens of a group.

        Args:
            group: The group.
            num_tokens: How many tokens, including those of its prompt and of drafts.
        """


POLICIES = {"fcfs": "hf_paged.policies:Policy", "fair": "hf_paged.policies:Fair"}
"""Policies by name: the place of a class that is made without arguments. It is imported when it is chosen."""


def policy_of(given: Policy | str) -> Policy:
    """Return the policy of this name, a new one, or `given` if it is a policy."""
    if isinstance(given, Policy):
        return given
    made: Policy = pkgutil.resolve_name(POLICIES[given])()
    return made


# Far more clients than have requests at a time, and a few hundred bytes each: names come from outside.
_MOST_CLIENTS = 4096

# Seconds: a person who uses a program asks again within a minute.
_ABOUT = 60.0

# A newcomer waits for the step in progress. Of SmolLM2-135M on one thread, a step of 16 tokens, a part of a CPU's
# default, takes 0.05 s, and one of 512 takes 1.3 s: 2.9 and 2.6 ms a token. One of 8 takes 3.8.
_PARTS, _LEAST = 32, 16


class Fair(Policy):
    """Clients take turns by the tokens that were computed for them: who has had least goes first.

    A client is the `client` of a request. Requests without one are of one client together. Among those of one client,
    priority and arrival decide. A client that comes back after a time without requests starts level with the least
    served of those that have some, so that nobody saves up turns. Prompts count as computed, so that what the prefix
    cache has costs nothing.

    If another client has come within the last minute, steps are short, because a newcomer waits for the one in
    progress: a step then has prompts of one client only. They take a 32nd part of its tokens, and at least 16, unless
    that client has just come.

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
        self._came: dict[str | None, float] = {}  # when each client's last request came, in that order
        # Clients that came back and were not served since: they go before the one whose count they have got.
        self._fresh: set[str | None] = set()

    def key(self, group: Group) -> tuple[float, bool, float, float]:
        """Least served clients first; of one client, by priority and arrival."""
        groups = self._groups.get(group.client, ())
        if group not in groups:
            if not any(each.live for each in groups):
                self._come_back(group.client)
            self._groups.setdefault(group.client, WeakSet()).add(group)
            self._came.pop(group.client, None)
            self._came[group.client] = time.monotonic()
        return *self._place(group), group.priority, group.arrival

    def victim(self, candidates: Sequence[Group]) -> Group:
        """Choose the last group of the client that was served most."""
        return max(enumerate(candidates), key=lambda each: (self._served.get(each[1].client, 0.0), each[0]))[1]

    def shares(self, running: Sequence[Group], starting: Sequence[Group], budget: int) -> Mapping[Group, int] | None:
        """Divide a step by who was served least, if several clients are about."""
        if not self._are_several({group.client for group in (*running, *starting)}):
            return None
        order = sorted((*running, *starting), key=self._place)
        prompts, left, shares, whose = 0, budget, dict[Group, int](), list[str | None]()
        for group in order:
            share = min(left, sum([seq.num_uncomputed_tokens for seq in group.live]))
            if share > len(group.live):
                if not whose:
                    whose = [group.client]
                    # A newcomer's first step has all of a short prompt: it is what others' steps are short for.
                    prompts = budget if group.client in self._fresh else max(budget // _PARTS, _LEAST)
                share = min(share, prompts) if group.client == whose[0] else 0
                prompts -= share
            shares[group] = share
            left -= share
        return shares

    def on_served(self, group: Group, num_tokens: int) -> None:
        """Count the tokens of the group for its client."""
        self._fresh.discard(group.client)
        weight = self._weights.get(group.client, 1)
        self._served[group.client] = self._served.get(group.client, 0.0) + num_tokens / weight

    def _place(self, group: Group) -> tuple[float, bool]:
        return self._served.get(group.client, 0.0), group.client not in self._fresh

    def _are_several(self, present: set[str | None]) -> bool:
        """Return True if there are requests of two clients, or of one while another has come within the last minute."""
        oldest = time.monotonic() - _ABOUT
        for client in [*itertools.takewhile(lambda each: self._came[each] < oldest, self._came)]:
            del self._came[client]
        return len(present | self._came.keys()) > 1

    def _come_back(self, client: str | None) -> None:
        """Lift a client that has had no request to the least served of those that have."""
        for name in [name for name, groups in self._groups.items() if not any(group.live for group in groups)]:
            del self._groups[name]
            self._fresh.discard(name)
        least = min([self._served[name] for name in self._groups], default=0.0)
        if len(self._served) >= _MOST_CLIENTS:
            # Those that had least are the ones whose count the next request would lift anyway.
            idle = sorted(self._served.keys() - self._groups.keys(), key=self._served.__getitem__)
            for name in idle[: _MOST_CLIENTS // 2]:
                del self._served[name]
        self._served[client] = max(self._served.get(client, 0.0), least)
        self._fresh.add(client)


# -- blocks ----------------------------------------------------------------------------------------------------------

Eviction = Callable[[OrderedDict[int, None], list[int]], int]
"""`evict(cached, found)` returns the block to evict. cached: blocks that no table holds, those used least recently
first; it may move some to the end. found: by block id, how often requests have found a block's prefix; it may lower
these numbers."""

EVICTIONS = {"lru": "hf_paged.policies:lru", "clock": "hf_paged.policies:clock"}
"""Evictions by name: the place of a function, which is imported when it is chosen."""

# A prefix that nobody asks for any more is given up after so many rounds, however often it was found.
_MOST_ROUNDS = 3


def eviction_of(given: Eviction | str) -> Eviction:
    """Return the eviction of this name, or `given` if it is a function."""
    made: Eviction = pkgutil.resolve_name(EVICTIONS[given]) if isinstance(given, str) else given
    return made


def lru(cached: OrderedDict[int, None], found: list[int]) -> int:
    """Choose the block used least recently."""
    return next(iter(cached))


def clock(cached: OrderedDict[int, None], found: list[int]) -> int:
    """Choose the block used least recently, but pass over one that requests have found as often as they have.

    So a flood of prompts that come once leaves the prefixes that others share (the CLOCK algorithm, with counters).
    """
    while found[block_id := next(iter(cached))]:
        found[block_id] = min(found[block_id], _MOST_ROUNDS) - 1
        cached.move_to_end(block_id)
    return block_id
