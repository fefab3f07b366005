"""The simulator takes the same steps as the engine: batches, blocks, copies and preemptions, step by step."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers import GenerationConfig

from benchmarks.paper.policies.paged import Paged
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.simulator import Simulator
from benchmarks.paper.watch import watched
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.generation.engine.scheduler import Scheduler, SchedulerOutput
from tests import models
from tests.paper.simulated import SECOND

Step = dict[str, Any]
CASES: dict[str, list[SimRequest]] = {
    "greedy": [SimRequest(f"r{i}", float(i // 3), 3 + 7 * i % 31, 2 + 5 * i % 23) for i in range(14)],
    "samples": [SimRequest(f"r{i}", float(i), 5 + 3 * i, 14 + 2 * i, "samples", 3) for i in range(4)],
    "beams": [SimRequest(f"r{i}", float(2 * i), 5 + 3 * i, 12, "beams", 3) for i in range(4)],
    "mixed": [SimRequest("a", 0.0, 9, 14), SimRequest("b", 0.0, 7, 12, "samples", 2),
        SimRequest("c", 1.0, 12, 12, "beams", 4), SimRequest("d", 3.0, 30, 16),
        SimRequest("e", 4.0, 5, 16, "samples", 2)],
}  # fmt: skip


@functools.cache
def endless() -> Any:
    """A model without an EOS token: every request generates all of its tokens."""
    return models.build("llama", eos_token_id=None)


def look(scheduler: Scheduler, output: SchedulerOutput) -> Step:
    allocator = scheduler.manager.allocator
    return {
        "batch": [(seq.group.request_id, count) for seq, count in output.scheduled], "blocks used": allocator.num_used,
        "blocks free": allocator.num_free, "copies": sorted(output.block_copies), "swapped out": len(output.swap_out),
        "swapped in": len(output.swap_in), "preempted": [group.request_id for group, _ in output.preempted],
        "waiting": scheduler.num_waiting,
        "preemptions": (scheduler.num_preemptions_recompute, scheduler.num_preemptions_swap),
    }  # fmt: skip


def engine_steps(requests: list[SimRequest], cache: CacheConfig, config: SchedulerConfig) -> tuple[list[Step], Any]:
    """What the engine does in each step, and which beams continued which."""
    steps: list[Step] = []
    parents: dict[str, list[list[int]]] = {}

    def on_step(scheduler: Scheduler, output: SchedulerOutput) -> None:
        steps.append(look(scheduler, output))

    def on_reorder(group: Any, chosen: list[int]) -> None:
        parents.setdefault(group.request_id, []).append(chosen)

    with watched(on_step, on_reorder), Engine(endless(), cache, config) as engine:
        waiting = [*requests]
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0].arrival <= len(steps):
                add(engine, waiting.pop(0))
            engine.step()
    return steps, parents


def add(engine: Engine, request: SimRequest) -> None:
    # Samples must differ in their first token, hence the temperature: equal ones share a sequence.
    options = GenerationConfig(
        max_new_tokens=request.output_length, num_beams=request.width if request.kind == "beams" else 1,
        num_return_sequences=request.width, do_sample=request.kind == "samples", temperature=20.0, top_k=0,
        eos_token_id=None, pad_token_id=models.PAD, seed=2,
    )  # fmt: skip
    prompt = models.prompts(request.input_length, seed=hash(request.arrival) + request.input_length)[0]
    engine.add_request(prompt, options, request_id=request.request_id)


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:the swap memory:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_steps(case: str, mode: Any) -> None:
    requests, block_size, num_blocks = CASES[case], 4, 26
    limits = {"max_num_seqs": 12, "max_num_batched_tokens": 24, "watermark": 0.05}
    config = SchedulerConfig(**limits, prefix_caching=False, preemption=mode)  # type: ignore[arg-type]
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, swap_memory=f"{num_blocks * 4096} B")
    real, parents = engine_steps(requests, cache, config)
    policy = Paged(config, num_blocks * block_size, {}, block_size=block_size)
    simulated: list[Step] = []
    Simulator(
        policy, SECOND, requests, block_size=block_size, jumps=False,
        observe=lambda output: simulated.append(look(policy.scheduler, output)),
        choose=lambda group: parents[group.request_id].pop(0),
    ).run()  # fmt: skip
    for index, (expected, actual) in enumerate(zip(real, simulated)):
        assert actual == expected, f"step {index}"
    assert len(simulated) == len(real)
    assert sum(real[-1]["preemptions"]) > 0, "the load must preempt"
