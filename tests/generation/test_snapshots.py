"""Snapshots of an engine: true between two steps, without waiting for one, and free while nothing asks."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from transformers import GenerationConfig, LogitsProcessor

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.generation.engine import snapshots
from hf_paged.generation.engine.snapshots import EngineSnapshot
from tests import models
from tests.preempting import force_preempt

KINDS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3})


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 12, "eos_token_id": -1, "pad_token_id": models.PAD, **options})


def add_all(engine: Engine, count: int) -> None:
    common = models.prompts(9)[0].tolist()
    for index, prompt in enumerate(models.prompts(*range(6, 6 + count), seed=1)):
        engine.add_request([*common, *prompt.tolist()], config(**KINDS[index % 3]), request_id=f"r{index}")


def assert_true(engine: Engine, snapshot: EngineSnapshot) -> None:
    scheduler, pool = engine._scheduler, snapshot.pool
    manager, stats = scheduler.manager, engine.stats()
    assert {v.id: v.status for v in snapshot.requests} == {g.request_id: g.status.value for g in scheduler.groups}
    references: Counter[int] = Counter()
    for view in snapshot.requests:
        group = scheduler.get(view.id)
        assert group is not None and view.prompt == group.num_prompt_tokens
        assert view.limit == view.prompt + 12
        assert [seq.id for seq in view.sequences] == [seq.seq_id for seq in group.live]
        for seen, seq in zip(view.sequences, group.live):
            assert (seen.tokens, seen.computed) == (seq.num_tokens, seq.num_computed_tokens)
            if view.status == "waiting":
                assert seen.tables == []
            if view.status == "swapped":
                assert seen.tables == scheduler.host_manager.block_tables(seq.seq_id)
            for table in seen.tables:
                if view.status == "running":
                    references.update(table)
                assert len(table) == -(-seen.computed // pool.block_size)
    counts = manager.allocator.ref_counts
    assert references == {block: count for block, count in enumerate(counts) if count}
    assert pool.cached == manager.allocator.cached_blocks
    assert len(references) + len(pool.cached) == stats.blocks_used + stats.blocks_cached
    assert snapshot.counters["generated_tokens"] == stats.generated_tokens > 0
    assert (snapshot.counters["cow_copies"], snapshot.waiting) == (stats.cow_copies, stats.num_waiting)
    assert pool.bytes * pool.blocks == stats.kv_bytes_reserved


def tables(snapshot: EngineSnapshot | None) -> list[list[int]] | None:
    if snapshot is None:
        return None
    return [list(table) for view in snapshot.requests for seq in view.sequences for table in seq.tables]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_it_is_what_the_step_left(every_step: None, preemption: Any) -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=24, preemption=preemption)
    with Engine(models.shared("llama"), CacheConfig(num_blocks=30, block_size=4), scheduler) as engine:
        assert engine.snapshot() is not None
        add_all(engine, 9)
        kinds: Counter[str] = Counter()
        last, copied = 0, 0
        earlier: tuple[Any, Any] = (None, None)
        while engine.has_unfinished_requests():
            engine.step()
            assert tables(earlier[0]) == earlier[1], "a snapshot changes with the engine"
            snapshot = engine._watch.latest  # made at the end of the step
            assert snapshot is not None
            assert_true(engine, snapshot)
            earlier = snapshot, tables(snapshot)
            new = [event for event in snapshot.events if event.number > last]
            last = max([last, *(event.number for event in new)])
            kinds.update(event.kind for event in new)
            copied += sum(len(event.blocks) // 2 for event in new if event.kind == "copy")
        stats = engine.stats()
    assert copied == stats.cow_copies > 0
    assert kinds["recompute"] == stats.preemptions_recompute
    assert kinds["swap_out"] == stats.preemptions_swap
    assert stats.preemptions_swap + stats.preemptions_recompute > 0
    assert kinds["admit"] == 9 + kinds["recompute"]
    assert kinds["swap_in"] == kinds["swap_out"] and kinds["evict"] > 0
    assert (stats.blocks_swapped_out > 0) == (stats.blocks_swapped_in > 0) == (preemption == "swap")


def test_evictions_are_named(every_step: None) -> None:
    with Engine(models.shared("llama"), CacheConfig(num_blocks=16, block_size=4)) as engine:
        engine.snapshot()
        for seed in range(4):
            engine.generate(models.prompts(20, seed=seed), config(max_new_tokens=4))
        snapshot, stats = engine.snapshot(), engine.stats()
    assert snapshot is not None
    evicted = [block for event in snapshot.events if event.kind == "evict" for block in event.blocks]
    assert len(evicted) == stats.prefix_cache_evictions == snapshot.counters["prefix_cache_evictions"] > 0


class Blocked(LogitsProcessor):
    def __init__(self) -> None:
        self.reached, self.release = threading.Event(), threading.Event()

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.reached.set()
        assert self.release.wait(120)
        return scores


def test_it_waits_for_no_step(every_step: None) -> None:
    with Engine(models.shared("llama"), CacheConfig(num_blocks=30, block_size=4)) as engine:
        blocked = Blocked()
        engine.add_request([5, 6, 7], config(max_new_tokens=2), logits_processor=[blocked], request_id="r")
        stepping = threading.Thread(target=engine.step)
        stepping.start()
        assert blocked.reached.wait(120)
        assert engine.snapshot() is None  # there has been no step since the first call
        blocked.release.set()
        stepping.join(60)
        snapshot = engine.snapshot()
        assert snapshot is not None and [view.id for view in snapshot.requests] == ["r"]


@pytest.mark.parametrize("change", ["swap", "abort"])
def test_steps_between_two_snapshots_are_told_once(change: str, every_step: None) -> None:
    """A step that only delivers what has ended leaves the last step's events alone."""
    with Engine(models.shared("llama"), CacheConfig(num_blocks=30, block_size=4)) as engine:
        engine.snapshot()
        engine.add_request([5, 6, 7], config(), request_id="r")
        engine.step()
        assert engine.abort("r") if change == "abort" else force_preempt(engine._scheduler, "r", "swap")
        assert any(output.finished for output in engine.step()) == (change == "abort")
        snapshot = engine.snapshot()
    later = ["swap_out", "swap_in"] if change == "swap" else []
    assert snapshot is not None and [event.kind for event in snapshot.events] == ["admit", *later]


def test_an_idle_engine_repeats_its_snapshot(every_step: None) -> None:
    with Engine(models.shared("llama"), CacheConfig(num_blocks=30, block_size=4)) as engine:
        engine.generate(models.prompts(9), config())
        first = engine.snapshot()
        assert first is not None and engine.snapshot() is first and first.requests == []
        engine.clear_prefix_cache()
        second = engine.snapshot()
        assert second is not None and second.number > first.number and second.pool.cached == []


def test_nothing_is_made_while_nothing_asks(every_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(snapshots.Watch, "_snapshot", lambda self, tokens: made.append(tokens))
    with Engine(models.shared("llama"), CacheConfig(num_blocks=30, block_size=4)) as engine:
        engine.generate(models.prompts(9), config())
        cache = engine._scheduler.prefix_cache
        assert not made and not engine._watch.is_on and cache is not None and cache.evicted is None
        engine.snapshot()
        assert made and engine._watch.is_on and cache.evicted == []
        monkeypatch.setattr(snapshots, "PATIENCE", -1.0)
        engine.snapshot()
        count = len(made)
        engine.generate(models.prompts(9), config())
        assert len(made) == count and not engine._watch.is_on and cache.evicted is None


def test_every_layer_group_has_its_tables(every_step: None) -> None:
    """A model with sliding windows and full attention: blocks that have left their window are in no table."""
    with Engine(models.shared("gemma3"), CacheConfig(num_blocks=80, block_size=4)) as engine:
        engine.snapshot()
        engine.add_request(models.prompts(40)[0], config(), request_id="r")
        for _ in range(6):
            engine.step()
        snapshot = engine._watch.latest
        assert snapshot is not None
        manager = engine._memory.manager
        assert snapshot.pool.kinds == [str(group.kind) for group in manager.groups] and len(manager.groups) >= 2
        ((view,),) = [request.sequences for request in snapshot.requests]
        assert view.tables == manager.block_tables(view.id)
        assert any(-1 in table for table in view.tables)
        engine.abort("r")
