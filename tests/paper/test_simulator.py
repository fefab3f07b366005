"""The simulator: jumps against single steps, the clock by hand, sharing, beams, and the cost model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.paper.cost import CostModel
from benchmarks.paper.policies.interface import Load, Memory
from benchmarks.paper.policies.orca import Orca
from benchmarks.paper.policies.paged import Paged
from benchmarks.paper.policies.static import Static
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.simulator import Result, Simulator
from hf_paged.config import SchedulerConfig
from tests.paper.simulated import SECOND

CONFIG = SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=64, prefix_caching=False)
COST = CostModel(step=0.01, weights=0.02, token=0.001, kv_token=1e-4, pair=1e-6, row=1e-3, swap_call=1e-3)


def random_requests(seed: int, kinds: tuple[str, ...] = ("greedy", "samples", "beams")) -> list[SimRequest]:
    rng, arrival, requests = random.Random(seed), 0.0, []
    for i in range(40):
        kind = rng.choice(kinds)
        width = 1 if kind == "greedy" else rng.randint(2, 3)
        requests.append(SimRequest(f"r{i}", arrival, rng.randint(1, 40), rng.randint(1, 40), kind, width))  # type: ignore[arg-type]
        arrival += rng.expovariate(4.0)
    return requests


def policy_of(name: str, requests: list[SimRequest], capacity: int = 240, config: SchedulerConfig = CONFIG):
    outputs = {r.request_id: r.output_length for r in requests}
    if name == "static":
        return Static(config, 4 * 2048, outputs)
    if name in ("oracle", "pow2"):
        return Orca(config, 2 * capacity, outputs, reserve=name)
    preemption = "auto" if name == "ours" else name
    finals = {r.request_id: r.final_length for r in requests}
    return Paged(replace(config, preemption=preemption), capacity, finals, block_size=4)


def figures_of(result: Result) -> tuple[object, ...]:
    times = {c.request.request_id: (round(c.first_token, 6), round(c.end, 6)) for c in result.completed}
    return times, round(result.seconds, 6), result.num_steps, result.num_preemptions


@pytest.mark.parametrize("name", ["ours", "recompute", "swap", "oracle", "pow2", "static"])
def test_jumps_change_nothing(name: str) -> None:
    """Nor is a block left."""
    requests = random_requests(0)
    policies = [policy_of(name, requests) for _ in range(2)]
    single, jumping = (
        Simulator(policy, COST, requests, jumps=jumps, block_size=4).run()
        for policy, jumps in zip(policies, (False, True))
    )
    assert len(single.completed) == len(requests)
    assert figures_of(single) == figures_of(jumping)
    if name in ("recompute", "swap"):
        scheduler = policies[1].scheduler
        counts = {"recompute": scheduler.num_preemptions_recompute, "swap": scheduler.num_preemptions_swap}
        assert counts[name] > 0 and policies[1].manager.allocator.num_used == 0


def test_clock_by_hand() -> None:
    """b arrives during the first step of a and joins the second; each ends with its last token."""
    requests = [SimRequest("a", 0.0, 5, 3), SimRequest("b", 0.5, 5, 2)]
    result = Simulator(policy_of("ours", requests), SECOND, requests).run()
    times = {c.request.request_id: (c.first_token, c.end, c.normalized_latency) for c in result.completed}
    assert times == {"a": (1.0, 3.0, 1.0), "b": (2.0, 3.0, 1.25)}


def test_what_was_computed_before_is_found() -> None:
    """8 tokens of a shared prefix; in the second turn of a conversation 8 of 6 + 3, which are in full blocks."""
    turns = [SimRequest("a", 0.0, 6, 3, conversation="c"), SimRequest("b", 20.0, 14, 1, conversation="c")]
    turns += [SimRequest("c", 40.0, 14, 1, conversation="d")]
    prefixes = [SimRequest(f"r{i}", 10.0 * i, 14, 2, prefix_length=8) for i in range(2)]
    for requests, expected in ((prefixes, [14, 1, 6, 1]), (turns, [6, 2, 6, 14])):
        policy, seen = policy_of("ours", requests, 400, replace(CONFIG, prefix_caching=True)), []
        Simulator(policy, SECOND, requests, observe=seen.append).run()
        assert [sum(count for _, count in output.scheduled) for output in seen] == expected


def test_cost_of_a_step() -> None:
    cost = CostModel(1.0, 10.0, 0.5, 0.01, 0.001, 0.1, 0.2, 3.0, 0.25)
    assert cost.seconds(Load(2, 2, 50)) == pytest.approx(1 + 10 + 0.5 + 0.2), "the weights are the limit"
    assert cost.seconds(Load(1, 40, 40, 820)) == pytest.approx(1 + 20 + 0.4 + 0.82 + 0.1), "arithmetic is the limit"
    swap = cost.seconds(Load(0, 0, 0, 0, 5, 2), block_size=4) - cost.seconds(Load(0, 0, 0), block_size=4)
    assert swap == pytest.approx(5 * 0.2 + 2 * (3 + 4 * 0.25))
    assert cost.with_kv_factor(2).kv_token == 0.02
    cpu = CostModel(1.0, 0.0, 0.5, 0.0, several=2.0, few=0.25, start=3.0)
    seconds = [cpu.seconds(Load(1, count, 0)) for count in (1, 2, 40)]
    assert seconds == pytest.approx([1 + 0.5, 1 + 2 + 2 * 0.75, 1 + 2 + 40 * 0.5 + 16 * 0.25])
    assert cpu.seconds(Load(1, 1, 0, started=2)) == pytest.approx(1 + 0.5 + 6)


def test_memory_of_ours_by_hand() -> None:
    """5 + 3 tokens in blocks of 4: 3 slots of the second block are still to come, then 2, then 1."""
    requests = [SimRequest("a", 0.0, 5, 3)]
    policy, seen = policy_of("ours", requests, 40), []
    Simulator(policy, SECOND, requests, observe=lambda _: seen.append(policy.memory()), jumps=False).run()
    assert seen == [Memory(5, 3, 0, 0, 32), Memory(6, 2, 0, 0, 32), Memory(7, 1, 0, 0, 32)]
