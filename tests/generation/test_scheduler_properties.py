"""Scheduler under random load: under any sequence of events, every request gets the result that it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_paged.cache.prefix_cache import root_digest
from hf_paged.config import SchedulerConfig
from hf_paged.generation.requests.sequence import FinishReason
from tests.generation.fake_engine import VOCAB, FakeEngine, Request, Result, solo

ROOTS = (None, root_digest("model"), root_digest("model", "adapter"))
KINDS = ("greedy", "samples", "beams")
MODES = ("recompute", "swap")
WINDOWS = ((None,), (5,), (None, 6))
SYSTEM_PROMPT = tuple(range(20, 40))


def request_of(kind: str) -> Request:
    return Request(tuple(range(10, 23)), 7, kind, 1 if kind == "greedy" else 3, root=ROOTS[1], num_eos=0)


def engine_for(windows: tuple[int | None, ...], **changes: Any) -> FakeEngine:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 6, "watermark": 0.0, **changes}
    return FakeEngine(SchedulerConfig(**options), num_blocks=40, windows=windows)


def num_steps_of(request: Request, windows: tuple[int | None, ...]) -> int:
    engine = engine_for(windows)
    engine.add(request)
    engine.run()
    return engine.num_steps


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.covering(2)
def test_preemption_at_any_step_changes_nothing(kind: str, mode: Any, windows: tuple[int | None, ...]) -> None:
    request = request_of(kind)
    expected = solo(request, windows)
    for caching in (False, True):
        for at in range(num_steps_of(request, windows) + 1):
            engine = engine_for(windows, prefix_caching=caching)
            name = engine.add(request)
            while engine.scheduler.has_unfinished():
                if engine.num_steps == at:
                    engine.force_preempt(name, mode)
                engine.step()
            engine.check_empty()
            assert engine.results[name] == expected, f"preempted before step {at}"


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.covering(2)
def test_an_abort_in_any_state_leaves_nothing(kind: str, mode: Any, windows: tuple[int | None, ...]) -> None:
    request, other = request_of(kind), Request((7, 8, 9), 12, root=ROOTS[1], num_eos=0)
    for at in range(num_steps_of(request, windows) + 1):
        for steps_after_preemption in range(3):
            engine = engine_for(windows)
            name, neighbour = engine.add(request), engine.add(other)
            for _ in range(at):
                engine.step()
            if mode is not None:
                engine.force_preempt(name, mode)
                for _ in range(steps_after_preemption):
                    engine.step()
            finished = engine.scheduler.get(name) is None
            engine.abort(name)
            results = engine.run()
            assert (results[name].reason is FinishReason.ABORT) is not finished
            assert results[neighbour] == solo(other, windows)


def random_request(rng: random.Random, **options: Any) -> Request:
    kind = rng.choice(("greedy", "greedy", "samples", "beams"))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14))]
    if rng.random() < 0.5:
        prompt = [*SYSTEM_PROMPT[: rng.randrange(21)], *prompt]
    return Request(
        tuple(prompt), rng.randrange(1, 16), kind, 1 if kind == "greedy" else rng.randrange(1, 5),
        rng.choice((0, 0, 1)), rng.choice(ROOTS), **options,
    )  # fmt: skip


def test_the_output_depends_on_no_setting() -> None:
    rng = random.Random(0)
    requests = [random_request(rng, request_id=str(index)) for index in range(30)]
    expected = {request.request_id: solo(request) for request in requests}
    preemptions = {"recompute": 0, "swap": 0}
    for num_blocks, mode in product((30, 400), ("auto", "recompute", "swap")):
        for budget, caching in ((5, True), (17, False), (1000, True)):
            config = SchedulerConfig(
                max_num_seqs=12, max_num_batched_tokens=budget, preemption=mode, prefix_caching=caching
            )
            engine = FakeEngine(config, num_blocks=num_blocks, num_host_blocks=40)
            for request in requests:
                engine.add(request)
            assert engine.run() == expected
            preemptions["recompute"] += engine.scheduler.num_preemptions_recompute
            preemptions["swap"] += engine.scheduler.num_preemptions_swap
    assert min(preemptions.values()) > 8, "the pools are too large to show anything"


@st.composite
def requests(draw: st.DrawFn) -> Request:
    kind = draw(st.sampled_from(KINDS))
    shared = draw(st.integers(0, len(SYSTEM_PROMPT)))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10))
    return Request(
        (*SYSTEM_PROMPT[:shared], *own), draw(st.integers(1, 10)), kind,
        1 if kind == "greedy" else draw(st.integers(1, 4)), draw(st.integers(0, 1)), draw(st.sampled_from(ROOTS)),
    )  # fmt: skip


configs = st.builds(
    SchedulerConfig, max_num_seqs=st.integers(4, 10), max_num_batched_tokens=st.integers(4, 40),
    preemption=st.sampled_from(("auto", "recompute", "swap")), prefix_caching=st.booleans(),
    watermark=st.sampled_from((0.0, 0.1, 0.5)),
)  # fmt: skip
engines = st.builds(
    FakeEngine, configs, num_blocks=st.integers(6, 30), num_host_blocks=st.integers(0, 20),
    block_size=st.integers(1, 5), windows=st.sampled_from(WINDOWS),
)  # fmt: skip
EVENTS = ("step", "step", "step", "add", "add", "abort", "recompute", "swap", "fail", "pin", "unpin")


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engine=engines, waiting=st.lists(requests(), min_size=1, max_size=8), data=st.data())
def test_whatever_happens(engine: FakeEngine, waiting: list[Request], data: st.DataObject) -> None:
    events = data.draw(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7)), max_size=60))
    refused, scheduler, cache = set(), engine.scheduler, engine.scheduler.prefix_cache
    everything = waiting[:]
    for event, number in events:
        name = f"r{number}"
        if event == "step" or event == "fail":
            engine.step(fail=event == "fail")
        elif event == "add" and waiting:
            try:
                engine.add(waiting.pop(0))
            except ValueError:
                refused.add(len(everything) - len(waiting) - 1)
                engine.requests[f"r{len(engine.requests)}"] = everything[len(everything) - len(waiting) - 1]
        elif event == "abort":
            engine.abort(name)
        elif event in ("recompute", "swap"):
            engine.force_preempt(name, "swap" if event == "swap" else "recompute")
        elif cache is not None:
            change: Callable[..., object] = cache.pin if event == "pin" else cache.unpin
            change(SYSTEM_PROMPT[: 4 * number], ROOTS[1])
            scheduler.check_integrity()
    engine.run()
    check_results(engine)
    if cache is not None:
        cache.clear()
        assert engine.manager.allocator.num_free == engine.manager.allocator.num_blocks


def check_results(engine: FakeEngine) -> None:
    """Whole answers are those of the request alone; what was cut short is the beginning of one."""
    for name, result in engine.results.items():
        expected = solo(engine.requests[name], engine.windows)
        if result.reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert is_beginning(result, expected, engine.requests[name])
        else:
            assert result == expected, name


def is_beginning(result: Result, expected: Result, request: Request) -> bool:
    if request.kind == "beams":
        return True  # a beam of the middle may have lost in the end
    return all(whole[: len(part)] == part for part, whole in zip(result.outputs, expected.outputs))


@pytest.mark.parametrize(("mode", "num_host_blocks"), [("auto", 30), ("swap", 8), ("recompute", 0)])
def test_soak(mode: Any, num_host_blocks: int) -> None:
    rng = random.Random(mode)
    config = SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=48, preemption=mode)
    engine = FakeEngine(config, num_blocks=60, num_host_blocks=num_host_blocks)
    scheduler = engine.scheduler
    for _ in range(200):
        engine.add(replace(random_request(rng), max_new_tokens=rng.randrange(1, 30)))
        while scheduler.num_waiting > 12 or rng.random() < 0.3:
            engine.step()
            if not scheduler.has_unfinished():
                break
        if scheduler.has_unfinished() and rng.random() < 0.05:
            engine.abort(rng.choice(scheduler.groups).request_id)
    assert len(engine.run()) == 200
    check_results(engine)
    assert scheduler.num_preemptions_recompute > 4
    assert scheduler.num_preemptions_swap > 4 or mode == "recompute"
    assert scheduler.prefix_cache is not None
    assert scheduler.prefix_cache.hit_tokens > 150
    assert len(scheduler.prefix_cache) <= 60
    assert not scheduler.groups and not scheduler.schedule().scheduled
