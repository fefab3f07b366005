"""The choice of a replica: rules, the memory of what was sent, and the chain of a prompt. No network, no Ray."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.serving.routing import Choice, LeastLoaded, PrefixRouting, RoundRobin, Router, chain_of, make_routing

IDLE = {"a": 0.0, "b": 0.0, "c": 0.0}


def sent(router: Router[str], chain: tuple[int, ...], loads: dict[str, float]) -> Choice[str]:
    choice = router.choose(chain, loads)
    router.sent(chain, choice.replica)
    return choice


def test_round_robin() -> None:
    router = RoundRobin[str]()
    assert [sent(router, (1,), {"a": 9, "b": 0, "c": 0}).replica for _ in range(6)] == ["a", "b", "c"] * 2
    router.forget("b")
    assert sent(router, (), IDLE).replica == "b"  # a new replica is the first


def test_least_loaded() -> None:
    router = LeastLoaded[str]()
    assert sent(router, (1,), {"a": 2, "b": 1, "c": 3}) == Choice("b")
    assert [sent(router, (1,), IDLE).replica for _ in range(3)] == ["a", "c", "b"]


def test_a_conversation_stays() -> None:
    router = PrefixRouting[str]()
    homes = {start: sent(router, (start,), IDLE).replica for start in (1, 2, 3)}
    assert sorted(homes.values()) == ["a", "b", "c"]
    for turn in range(2, 6):
        for start, home in homes.items():
            chain = tuple(start + 10 * place for place in range(turn))
            assert sent(router, chain, IDLE) == Choice(home, turn - 1, turn - 1)


def test_replicas_come_and_go() -> None:
    router = PrefixRouting[str]()
    router.sent((1, 2), "a")
    assert router.choose((1, 2), {"b": 50}) == Choice("b")  # a takes no requests now
    assert router.choose((1, 2), IDLE).replica == "a"
    router.forget("a")
    assert router.choose((1, 2), IDLE).longest == 0 and router.held("a") == 0
    router.forget("never seen")
    with pytest.raises(ValueError, match="no replica"):
        router.choose((1, 2), {})


@pytest.mark.parametrize("name, values", [("blocks_per_request", (0, float("inf"))), ("most_blocks", (0, True, 1.5))])
def test_no_such_weight_or_memory(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"{name}="):
            PrefixRouting(**{name: value})


def test_by_name() -> None:
    assert isinstance(make_routing("prefix", most_blocks=3), PrefixRouting)
    assert isinstance(make_routing("least-loaded"), LeastLoaded)
    assert isinstance(make_routing("round-robin"), RoundRobin)
    with pytest.raises(ValueError, match="policy='random'"):
        make_routing("random")  # type: ignore[arg-type]


REPLICAS = st.sampled_from("abcd")
# Few distinct blocks, so that prompts share beginnings.
CHAINS = st.lists(st.integers(0, 2), max_size=6).map(
    lambda blocks: chain_of(b"", [bytes(blocks[:place]) for place in range(1, len(blocks) + 1)])
)
LOADS = st.dictionaries(REPLICAS, st.integers(0, 9).map(float), min_size=1)
EVENTS = st.lists(st.one_of(st.tuples(CHAINS, REPLICAS), REPLICAS), max_size=20)


def played(router: PrefixRouting[str], events: list[object]) -> dict[str, OrderedDict[int, None]]:
    """What plain lists say that each replica holds after the events: prompts sent, and replicas that are gone."""
    held: dict[str, list[int]] = {}
    for event in events:
        if isinstance(event, str):
            router.forget(event)
            held.pop(event, None)
            continue
        chain, replica = event  # type: ignore[misc]
        router.sent(chain, replica)
        newest = list(chain[: router._most_blocks])
        held[replica] = (newest + [x for x in held.get(replica, []) if x not in newest])[: router._most_blocks]
    return {replica: OrderedDict.fromkeys(entries) for replica, entries in held.items()}


@settings(max_examples=40)
@given(EVENTS, CHAINS, LOADS, st.integers(1, 8), st.sampled_from([0.5, 1.0, 4.0]))
def test_the_best_replica_is_chosen(
    events: list[object], chain: tuple[int, ...], loads: dict[str, float], most: int, weight: float
) -> None:
    """The choice is that of a search over all replicas, and what is remembered is what plain lists say."""
    router = PrefixRouting[str](blocks_per_request=weight, most_blocks=most)
    held = played(router, events)
    for replica in "abcd":
        assert router.held(replica) == len(held.get(replica, ())) <= most
    matched = {replica: router.matched(chain, replica) for replica in loads}
    for replica, count in matched.items():
        assert all(entry in held.get(replica, ()) for entry in chain[:count])
        assert not any(entry in held.get(replica, ()) for entry in chain[count:]), "an entry without those before it"
    choice = router.choose(chain, loads)
    assert choice == router.choose(chain, loads)
    assert (choice.matched, choice.longest) == (matched[choice.replica], max(matched.values()))
    worth = {replica: loads[replica] - matched[replica] / weight for replica in loads}
    assert worth[choice.replica] == min(worth.values())
    assert loads[choice.replica] == min(loads[replica] for replica in loads if worth[replica] == min(worth.values()))


@settings(max_examples=40)
@given(EVENTS)
def test_forgetting_all_leaves_nothing(events: list[object]) -> None:
    router = PrefixRouting[str](most_blocks=5)
    played(router, events)
    for replica in "abcd":
        router.forget(replica)
    assert not router._held and not router._holders


def test_chains() -> None:
    """Entries stand for all that is before them, and are the same in every process."""
    one, other = chain_of(b"m", [b"x", b"y", b"z"]), chain_of(b"m", [b"x", b"q", b"z"])
    assert one[0] == other[0] and one[1:] != other[1:] and one[2] != other[2]
    assert chain_of(b"n", [b"x"])[0] != one[0] and chain_of(b"m", []) == ()
    assert one == chain_of(b"m", [b"x", b"y", b"z"]) and one[0] == 16262505594496322181
