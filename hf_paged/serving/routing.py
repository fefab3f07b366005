"""Choose which of several replicas gets a request. Knows no model, network or clock: standard library only.

A prompt is given as its *chain*: one entry for each of its first blocks, where an entry stands for its block and all
blocks before it (`chain_of`). Two prompts with the same first n blocks have chains with the same first n entries.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

Replica = TypeVar("Replica", bound=Hashable)
Chain = Sequence[int]
Policy = Literal["prefix", "least-loaded", "round-robin"]

# Blocks of a prompt that weigh as much as one request in flight. With a weight for each of them alone, a short system
# prompt that all requests share would draw them to one replica.
BLOCKS_PER_REQUEST = 4.0
# Remembered of each replica: 6 MB of the router's memory, at 373 bytes each (docs/fleet.md).
MOST_BLOCKS = 16_384

# If two entries are equal by chance, a request goes to a replica that knows less of its prompt.
_ENTRY_BYTES = 8


class Choice(NamedTuple, Generic[Replica]):
    """replica: where the request goes. matched: leading blocks of its chain that this replica has probably cached.

    longest: the most that any replica has; above `matched` if that one is too busy.
    """

    replica: Replica
    matched: int = 0
    longest: int = 0


class Router(Generic[Replica]):
    """Chooses among the replicas in `loads`, all of which take requests now.

    A load is the number of requests that a replica has in flight, or any other number in the same unit. `choose`
    changes nothing that a later choice of a replica with cached blocks depends on; `sent` does, and is called when the
    request has gone to the replica.
    """

    def __init__(self) -> None:
        # No clock: turns are all that matters, and simulations have a time of their own.
        self._count = 0  # of requests
        self._turns: dict[Replica, int] = {}  # the count when a replica was sent its last request

    def choose(self, chain: Chain, loads: Mapping[Replica, float]) -> Choice[Replica]:
        """Choose a replica. Raises ValueError if there is none."""
        raise NotImplementedError

    def sent(self, chain: Chain, replica: Replica) -> None:
        self._count += 1
        self._turns[replica] = self._count

    def forget(self, replica: Replica) -> None:
        """The replica is gone, or its cache is empty."""
        self._turns.pop(replica, None)

    def _turn(self, replica: Replica) -> int:
        return self._turns.get(replica, 0)


class RoundRobin(Router[Replica]):
    """Each replica in turn, the one that has waited longest first."""

    def choose(self, chain: Chain, loads: Mapping[Replica, float]) -> Choice[Replica]:
        return Choice(_least(loads, self._turn))


class LeastLoaded(Router[Replica]):
    """The replica with the least load; among equals, the one that has waited longest."""

    def choose(self, chain: Chain, loads: Mapping[Replica, float]) -> Choice[Replica]:
        return Choice(_least(loads, lambda replica: (loads[replica], self._turn(replica))))


class PrefixRouting(Router[Replica]):
    """A request goes where its first blocks are cached, unless that replica is much busier than another one.

    Blocks that need not be computed are weighed against requests in flight: `blocks_per_request` blocks count as much
    as one request. So a prefix of n blocks is worth waiting behind n / blocks_per_request more requests, and a short
    one that all prompts share does not draw them all to one replica. Among replicas of equal worth the one with the
    least load is chosen, then the one to which the fewest blocks were sent, then the one that has waited longest.

    What a replica has cached is not asked but remembered: of each replica the last `most_blocks` entries that were sent
    there, as least-recently-used eviction would leave them. With too high a number requests are sent to blocks that
    are gone; with too low a number the router forgets blocks that are still there.

    Invariant: with an entry, all entries before it in its chain are remembered.

    Time of a choice: proportional to the number of replicas, and to the length of the chain. Memory: two dictionary
    entries for each block that is remembered.
    """

    def __init__(self, *, blocks_per_request: float = BLOCKS_PER_REQUEST, most_blocks: int = MOST_BLOCKS) -> None:
        if not 0 < blocks_per_request < float("inf"):
            raise ValueError(f"blocks_per_request={blocks_per_request!r}: a number above 0 is needed")
        if isinstance(most_blocks, bool) or not isinstance(most_blocks, int) or most_blocks < 1:
            raise ValueError(f"most_blocks={most_blocks!r}: an integer of at least 1 is needed")
        super().__init__()
        self._blocks_per_request = blocks_per_request
        self._most_blocks = most_blocks
        self._held: dict[Replica, OrderedDict[int, None]] = {}  # the least recently sent entry first
        self._holders: dict[int, dict[Replica, None]] = {}  # by entry

    def choose(self, chain: Chain, loads: Mapping[Replica, float]) -> Choice[Replica]:
        def rank(replica: Replica, matched: int) -> tuple[float, float, int, int]:
            load = loads[replica]
            return load - matched / self._blocks_per_request, load, self.held(replica), self._turn(replica)

        best = _least(loads, lambda replica: rank(replica, 0))
        best_rank, best_matched, longest = rank(best, 0), 0, 0
        least_load = loads[best]
        # From the longest match down, so that it can stop as soon as no shorter one can win.
        for matched in range(min(len(chain), self._most_blocks), 0, -1):
            if longest and best_rank[0] < least_load - matched / self._blocks_per_request:
                break  # not even an idle replica with this match would be chosen
            for replica in self._holders.get(chain[matched - 1], ()):
                if replica not in loads:
                    continue
                longest = longest or matched
                if (its_rank := rank(replica, matched)) < best_rank:
                    best, best_rank, best_matched = replica, its_rank, matched
        return Choice(best, best_matched, longest)

    def sent(self, chain: Chain, replica: Replica) -> None:
        """The replica has, or will have, these blocks cached."""
        super().sent(chain, replica)
        held = self._held.setdefault(replica, OrderedDict())
        for entry in reversed(chain[: self._most_blocks]):  # so that no entry is older than one behind it in its chain
            held[entry] = None
            held.move_to_end(entry)
            self._holders.setdefault(entry, {})[replica] = None
        while len(held) > self._most_blocks:
            self._drop(held.popitem(last=False)[0], replica)

    def forget(self, replica: Replica) -> None:
        super().forget(replica)
        for entry in self._held.pop(replica, ()):
            self._drop(entry, replica)

    def held(self, replica: Replica) -> int:
        """Count the blocks that are remembered of a replica."""
        return len(self._held.get(replica, ()))

    def matched(self, chain: Chain, replica: Replica) -> int:
        """Leading blocks of a chain that are remembered of a replica."""
        held: Mapping[int, None] = self._held.get(replica, {})
        return next((place for place, entry in enumerate(chain) if entry not in held), len(chain))

    def _drop(self, entry: int, replica: Replica) -> None:
        holders = self._holders[entry]
        del holders[replica]
        if not holders:
            del self._holders[entry]


def _least(loads: Mapping[Replica, float], rank: Callable[[Replica], object]) -> Replica:
    if not loads:
        raise ValueError("there is no replica to choose")
    return min(loads, key=rank)  # type: ignore[arg-type]  # ranks are numbers, or tuples of numbers


def make_routing(policy: Policy, **options: float) -> Router[Replica]:
    """options: of PrefixRouting. Raises ValueError for an unknown policy."""
    if policy == "prefix":
        return PrefixRouting(**options)  # type: ignore[arg-type]
    if policy not in ("least-loaded", "round-robin"):
        raise ValueError(f"policy={policy!r}: use 'prefix', 'least-loaded' or 'round-robin'")
    return LeastLoaded() if policy == "least-loaded" else RoundRobin()


def chain_of(root: bytes, blocks: Iterable[bytes]) -> tuple[int, ...]:
    """The chain of a prompt. root: what else its K/V depends on, such as the adapter. Each entry has 64 bits."""
    chain: list[int] = []
    parent = hashlib.blake2b(root, digest_size=_ENTRY_BYTES).digest()
    for block in blocks:
        parent = hashlib.blake2b(parent + block, digest_size=_ENTRY_BYTES).digest()
        chain.append(int.from_bytes(parent))
    return tuple(chain)
