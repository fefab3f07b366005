"""The baselines on random small traces, against simulations that look at every slot in every second."""

from __future__ import annotations

import random

import pytest

from benchmarks.paper.policies.orca import Orca, reserve_oracle, reserve_pow2
from benchmarks.paper.policies.static import Static
from benchmarks.paper.requests import SimRequest
from hf_paged.config import SchedulerConfig
from tests.paper.simulated import ends, simulate

CONFIG = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=4096, prefix_caching=False)
ROOTS = ((0, 64), (64, 16), (80, 4))
CAPACITY = 84
RESERVATIONS = {"oracle": reserve_oracle, "pow2": reserve_pow2}


def trace(seed: int) -> list[SimRequest]:
    """Arrivals lie between the seconds, at which steps begin."""
    rng, arrival, requests = random.Random(seed), 0.25, []
    for i in range(40):
        requests.append(SimRequest(f"r{i}", arrival, rng.randint(1, 20), rng.randint(1, 12)))
        arrival += rng.randint(0, 5)
    return requests


def place(slots: list[str | None], size: int) -> int | None:
    """The lowest aligned free place of `size` slots in the smallest free chunk of a buddy system."""
    found: list[tuple[int, int]] = []
    for root, length in ROOTS:
        for offset in range(root, root + length - size + 1, size):
            start, chunk = offset, size
            if any(slots[offset : offset + size]):
                continue
            while chunk < length and not any(slots[(buddy := start ^ chunk) : buddy + chunk]):
                start, chunk = min(start, buddy), 2 * chunk
            found.append((chunk, offset))
    return min(found)[1] if found else None


def orca_ends(requests: list[SimRequest], reserve: str) -> dict[str, float]:
    slots: list[str | None] = [None] * CAPACITY
    waiting, queue, left, done = [*requests], [], {}, {}
    now = 0.0
    while waiting or queue or left:
        while waiting and waiting[0].arrival <= now:
            queue.append(waiting.pop(0))
        while queue and len(left) < CONFIG.max_num_seqs:
            first = queue[0]
            asked, size = RESERVATIONS[reserve](first.input_length, first.output_length), 1
            while size < asked:
                size *= 2
            offset = place(slots, size)
            if offset is None:
                break
            slots[offset : offset + size] = [first.request_id] * size
            left[first.request_id] = first.output_length
            queue.pop(0)
        if not left:
            now = waiting[0].arrival
            continue
        now += 1
        for name in [*left]:
            left[name] -= 1
            if not left[name]:
                del left[name]
                done[name] = now
                slots = [None if owner == name else owner for owner in slots]
    return done


@pytest.mark.parametrize("reserve", RESERVATIONS)
@pytest.mark.parametrize("seed", range(6))
def test_orca(seed: int, reserve: str) -> None:
    requests = trace(seed)
    policy = Orca(CONFIG, CAPACITY, {r.request_id: r.output_length for r in requests}, reserve=reserve)
    expected = orca_ends(requests, reserve)
    assert ends(simulate(policy, requests)) == pytest.approx(expected)
    assert max(expected[r.request_id] - r.arrival - r.output_length for r in requests) > 1, "nothing had to wait"


@pytest.mark.parametrize("seed", range(6))
def test_static(seed: int) -> None:
    requests, places = trace(seed), 3
    policy = Static(CONFIG, places * 2048, {r.request_id: r.output_length for r in requests})
    now, waiting, expected = 0.0, [*requests], {}
    while waiting:
        now = max(now, waiting[0].arrival)
        batch = [r for r in waiting[:places] if r.arrival <= now]
        waiting = waiting[len(batch) :]
        now += max(r.output_length for r in batch)
        expected |= {r.request_id: now for r in batch}
    assert ends(simulate(policy, requests)) == pytest.approx(expected)
