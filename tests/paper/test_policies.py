"""The baselines of the paper against examples worked by hand; the buddy allocator against brute force."""

from __future__ import annotations

import random

import pytest

from benchmarks.paper.policies.buddy import BuddyAllocator
from benchmarks.paper.policies.interface import Load, Memory
from benchmarks.paper.policies.orca import Orca, reserve_max, reserve_oracle, reserve_pow2
from benchmarks.paper.policies.static import Static
from benchmarks.paper.requests import SimRequest
from hf_paged.config import SchedulerConfig
from tests.paper.simulated import ends, simulate

CONFIG = SchedulerConfig(max_num_batched_tokens=4096, prefix_caching=False)


@pytest.mark.parametrize("seed", range(2))
def test_buddy_against_brute_force(seed: int) -> None:
    """A chunk of size s may start at every multiple of s inside of a root; one is found whenever one is free."""
    rng, capacity = random.Random(seed), 45  # 32 + 8 + 4 + 1
    buddy, owner, live = BuddyAllocator(capacity), [None] * capacity, {}
    for step in range(300):
        if live and rng.random() < 0.5:
            offset = rng.choice(list(live))
            size = live.pop(offset)
            owner[offset : offset + size] = [None] * size
            buddy.free(offset)
        else:
            size = 1 << rng.randint(0, 4)
            roots = ((0, 32), (32, 8), (40, 4), (44, 1))
            places = [at for root, length in roots for at in range(root, root + length - size + 1, size)]
            possible = [at for at in places if not any(owner[at : at + size])]
            offset = buddy.allocate(size)
            assert (offset in possible) if possible else offset is None
            if offset is not None:
                live[offset] = size
                owner[offset : offset + size] = [step + 1] * size
        buddy.check_integrity()
        assert buddy.num_used == sum(live.values())


def test_reservations() -> None:
    """A prompt of 100 tokens with an output of 25, the paper's example, and one that ends at the model's maximum."""
    assert [reserve(100, 25) for reserve in (reserve_max, reserve_pow2, reserve_oracle)] == [2048, 132, 125]
    assert [reserve(900, 1100) for reserve in (reserve_max, reserve_pow2, reserve_oracle)] == [2048, 2048, 2000]


THREE = [SimRequest("a", 0.0, 4, 4), SimRequest("b", 0.0, 3, 2), SimRequest("c", 0.0, 5, 3)]
OUTPUTS = {"a": 4, "b": 2, "c": 3}


def test_orca_oracle_by_hand() -> None:
    """16 slots. a reserves 8, b 8 (5 rounded up), c 8: c starts when b has ended, after its second step."""
    seen = []
    result = simulate(Orca(CONFIG, 16, OUTPUTS, reserve="oracle"), THREE, observe=lambda o: seen.append([*o.scheduled]))
    assert ends(result) == {"b": 2.0, "a": 4.0, "c": 5.0}
    assert ["".join(seq.group.request_id for seq, _ in batch) for batch in seen] == ["ab", "ab", "ac", "ac", "c"]


def test_orca_reserves_for_every_sample() -> None:
    """Two samples of 4 + 4 tokens take 2 x 8 slots of 16; the second request waits until both have ended."""
    requests = [SimRequest(name, 0.0, 4, 4, "samples", 2) for name in "ab"]
    loads: list[Load] = []
    policy = Orca(CONFIG, 16, {"a": 4, "b": 4}, reserve="oracle")
    price = policy.load
    policy.load = lambda output: loads.append(price(output)) or loads[-1]  # type: ignore[method-assign, func-returns-value]
    assert ends(simulate(policy, requests, jumps=False)) == {"a": 4.0, "b": 8.0}
    assert loads[:3] == [Load(1, 4, 4, 10, started=1), Load(2, 2, 10, 0, 4), Load(2, 2, 12)]  # K/V is copied once


def test_orca_refuses_what_never_fits() -> None:
    policy = Orca(CONFIG, 15_700, {"a": 10}, reserve="max")
    with pytest.raises(ValueError, match="8 x 2048 slots of 15700"):
        simulate(policy, [SimRequest("a", 0.0, 10, 10, "beams", 8)])


def test_orca_memory_by_kind() -> None:
    """Figure 2 by hand: Max, 4 slots of a prompt and one token to come, in 2,048 of 3,000."""
    policy = Orca(CONFIG, 3000, {"a": 2}, reserve="max")
    seen: list[Memory] = []
    simulate(policy, [SimRequest("a", 0.0, 4, 2)], observe=lambda _: seen.append(policy.memory()), jumps=False)
    assert seen == [Memory(4, 2, 2042, 952, 0), Memory(5, 1, 2042, 952, 0)]


def test_static_batches_by_hand() -> None:
    """Batches of two: a and b end together after the 4 steps of a; c, alone, takes 3 more."""
    policy = Static(CONFIG, 2 * 2048 + 100, OUTPUTS)
    loads: list[Load] = []
    price = policy.load
    policy.load = lambda output: loads.append(price(output)) or loads[-1]  # type: ignore[method-assign, func-returns-value]
    result = simulate(policy, THREE, jumps=False)
    assert ends(result) == {"a": 4.0, "b": 4.0, "c": 7.0}
    # Both rows are padded to the 4 tokens of a, and the row of b is computed until a has ended.
    assert loads[:4] == [Load(2, 8, 8, 20), Load(2, 2, 10), Load(2, 2, 12), Load(2, 2, 14)]
    assert loads[4:] == [Load(1, 5, 5, 15), Load(1, 1, 6), Load(1, 1, 7)]
