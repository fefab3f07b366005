"""Scheduler: single decisions. Whole runs under random load are in test_scheduler_properties.py."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.layers import LayerGroup, Window
from hf_paged.cache.prefix_cache import root_digest
from hf_paged.config import SchedulerConfig
from hf_paged.features.encoder_decoder.encoders import EncoderInput, EncoderTables
from hf_paged.features.rows.checkpoints import CheckpointRules
from hf_paged.features.rows.state_memory import StateMemory
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus, SequenceGroup
from hf_paged.sockets import Executor
from tests.generation.fake_engine import FakeEngine, Request, solo

pytestmark = pytest.mark.smoke

ROOT = root_digest("model")


def prompt(length: int, first: int = 10) -> tuple[int, ...]:
    return tuple(first + i % 7 for i in range(length))


def config(**changes: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, "watermark": 0.0, **changes})


def counts(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(seq.group.request_id, count) for seq, count in output.scheduled]


def num_tokens(output: SchedulerOutput) -> int:
    return sum(count for _, count in output.scheduled)


def endless(prompt: tuple[int, ...], max_new_tokens: int, **options: Any) -> Request:
    return Request(prompt, max_new_tokens, num_eos=0, **options)


def long(length: int, **options: Any) -> Request:
    """A request that runs until it is aborted."""
    return endless(prompt(length), 10_000, **options)


def test_what_can_never_run_is_refused_on_arrival() -> None:
    engine = FakeEngine(num_blocks=4)
    with pytest.raises(ValueError, match="a prompt of 17 tokens needs 5 blocks of 4, but the cache has 4"):
        engine.add(Request(prompt(17)))
    with pytest.raises(ValueError, match="9 sequences in one request, but max_num_seqs=8"):
        engine.add(Request(prompt(1), kind="samples", width=9))
    with pytest.raises(ValueError, match="5 sequences in one request, but max_num_batched_tokens=4"):
        FakeEngine(config(max_num_batched_tokens=4)).add(Request(prompt(1), kind="samples", width=5))
    with pytest.raises(ValueError, match="'empty' has an empty prompt"):
        engine.add(Request((), request_id="empty"))
    with pytest.raises(ValueError, match="width=0"):
        engine.add(Request(prompt(1), width=0))
    assert not engine.scheduler.has_unfinished()


# -- the order of things --------------------------------------------------------------------------------------------


def test_priority_goes_before_arrival() -> None:
    engine = FakeEngine(config(max_num_seqs=1))
    for priority, name in [(1, "d"), (0, "b"), (-1, "a"), (0, "c")]:
        engine.add(Request(prompt(4), 3, priority=priority, request_id=name))
    assert list(engine.run()) == ["a", "b", "c", "d"]


def test_a_line_is_as_long_as_there_are_places_and_as_before_after_an_interrupt() -> None:
    scheduler = Scheduler(config(max_num_seqs=3), BlockManager(BlockAllocator(9), 4))
    for name, width, priority in [("b", 2, 1), ("a", 1, 0), ("c", 1, 2)]:
        scheduler.enqueue(SequenceGroup(name, [1, 2], width=width, priority=priority))
    for _ in range(2):
        assert [group.request_id for group in scheduler.next_in_line()] == ["a", "b"]
        scheduler.discard_plan()


def test_arrival_is_the_callers_clock() -> None:
    scheduler = Scheduler(config(max_num_seqs=1), BlockManager(BlockAllocator(9), 4))
    for name, arrival in [("late", 2.0), ("early", 1.0)]:
        scheduler.enqueue(SequenceGroup(name, [1, 2], arrival=arrival))
    assert counts(scheduler.schedule()) == [("early", 2)]


def test_a_long_prompt_is_computed_in_chunks_beside_the_others() -> None:
    engine = FakeEngine()
    engine.add(long(3, request_id="a"))
    assert counts(engine.step()) == [("a", 3)]
    engine.add(long(40, request_id="b"))
    engine.add(long(3, request_id="c"))
    assert counts(engine.step()) == [("a", 1), ("b", 15)]
    assert counts(engine.step()) == [("a", 1), ("b", 15)]
    assert engine.group("b").live[0].output_token_ids == []
    assert counts(engine.step()) == [("a", 1), ("b", 10), ("c", 3)]
    assert len(engine.group("b").live[0].output_token_ids) == 1
    assert counts(engine.step()) == [("a", 1), ("b", 1), ("c", 1)]


def test_prompts_that_are_computed_in_part_begin_anew() -> None:
    engine = FakeEngine()
    engine.add(long(3, request_id="whole"))
    engine.add(long(40, request_id="part"))
    assert counts(engine.step()) == [("whole", 3), ("part", 13)]
    engine.scheduler.begin_anew(shares_prefixes=True)
    assert engine.group("whole").status is SeqStatus.RUNNING
    assert engine.group("part").status is SeqStatus.WAITING and engine.group("part").live[0].num_computed_tokens == 0


def test_places_are_kept_for_samples_to_come() -> None:
    engine = FakeEngine(config(max_num_seqs=4))
    engine.add(long(3, kind="samples", width=3, request_id="a"))
    engine.add(long(3, kind="samples", width=2, request_id="b"))
    engine.add(long(3, request_id="c"))
    assert counts(engine.step()) == [("a", 3)]  # b does not fit, and c does not overtake it
    assert counts(engine.step()) == [("a", 1)] * 3
    engine.scheduler.finish(engine.group("a").live[1], FinishReason.STOP)
    assert counts(engine.step()) == [("a", 1)] * 2 + [("b", 3)]


def test_samples_go_together_or_not_at_all() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=4))
    for name in "ab":
        engine.add(long(1, request_id=name))
    engine.add(long(1, kind="samples", width=3, request_id="c"))
    engine.step()
    assert counts(engine.step()) == [("a", 1), ("b", 1)]  # two are left, three are needed
    engine.abort("a")
    assert counts(engine.step()) == [("b", 1), *[("c", 1)] * 3]


def test_the_watermark_keeps_blocks_for_those_that_run() -> None:
    engine = FakeEngine(config(watermark=0.25), num_blocks=8)
    engine.add(long(15, request_id="a"))
    assert counts(engine.step()) == [("a", 15)]
    engine.add(long(12, request_id="b"))  # 3 of 4 blocks: only 1 of 8 would stay free
    assert counts(engine.step()) == [("a", 1)]
    engine.add(long(8, request_id="c"))
    assert counts(engine.step()) == [("a", 1)]
    engine.abort("a")
    assert counts(engine.step())[0] == ("b", 12)


def test_blocks_of_one_token_are_counted_one_by_one() -> None:
    engine = FakeEngine(config(max_num_batched_tokens=4, prefix_caching=False), block_size=1, num_blocks=7)
    engine.add(long(3, request_id="a"))
    engine.step()
    engine.add(long(4, request_id="b"))
    assert counts(engine.step()) == [("a", 1)]


def test_alone_a_request_gets_the_whole_pool() -> None:
    engine = FakeEngine(config(watermark=0.5), num_blocks=4)
    request = endless(prompt(9), 7)
    name = engine.add(request)
    assert engine.run()[name] == solo(request)


# -- running out of blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_the_latest_arrival_gives_way_and_comes_back(mode: str) -> None:
    engine = FakeEngine(config(preemption=mode, prefix_caching=False), num_blocks=6)
    requests = {name: endless(prompt(7, first), 9, request_id=name) for name, first in [("a", 10), ("b", 20)]}
    for request in requests.values():
        engine.add(request)
    while not (output := engine.step()).preempted:
        pass
    assert output.preempted == [(engine.group("b"), mode)]
    assert counts(output) == [("a", 1)]
    state = {"recompute": SeqStatus.WAITING, "swap": SeqStatus.SWAPPED}[mode]
    assert engine.group("b").status is engine.group("b").live[0].status is state
    assert engine.host.allocator.num_used == (3 if mode == "swap" else 0)
    assert len(output.swap_out) == engine.host.allocator.num_used
    results = engine.run()
    assert results == {name: solo(request) for name, request in requests.items()}
    scheduler = engine.scheduler
    done = (scheduler.num_preemptions_recompute, scheduler.num_preemptions_swap)
    assert done == ((1, 0) if mode == "recompute" else (0, 1))


def test_who_is_urgent_keeps_its_blocks() -> None:
    engine = FakeEngine(num_blocks=6)
    engine.add(long(7, priority=1, request_id="first"))
    engine.add(long(7, priority=0, request_id="urgent"))
    while not (output := engine.step()).preempted:
        pass
    assert [group for group, _ in output.preempted] == [engine.group("first")]


def test_a_swapped_group_comes_back_before_new_ones_start() -> None:
    engine = FakeEngine(config(preemption="swap", prefix_caching=False), num_blocks=6)
    engine.add(long(7, request_id="a"))
    engine.add(long(7, request_id="b"))
    while not engine.step().preempted:
        pass
    engine.add(long(1, request_id="c"))
    assert [name for name, _ in counts(engine.step())] == ["a"]
    engine.abort("a")
    output = engine.step()
    assert counts(output) == [("b", 1), ("c", 1)]
    assert len(output.swap_in) == 3


def test_a_swapped_group_stays_there_while_no_token_of_it_would_be_computed() -> None:
    engine = FakeEngine(config(preemption="swap", prefix_caching=False, max_num_batched_tokens=2))
    engine.add(endless(prompt(1), 9, kind="samples", width=2, request_id="two"))
    engine.add(long(1, request_id="one"))
    engine.step()
    assert engine.force_preempt("one", "swap") and engine.force_preempt("two", "swap")
    assert engine.step().resumed == [engine.group("two")]


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_without_room_in_the_swap_space_it_is_recomputed(num_host_blocks: int) -> None:
    engine = FakeEngine(config(preemption="swap"), num_host_blocks=num_host_blocks)
    engine.add(long(7, request_id="a"))
    engine.step()
    assert engine.force_preempt("a", "swap")
    assert engine.group("a").status is SeqStatus.WAITING
    assert (engine.scheduler.num_preemptions_recompute, engine.scheduler.num_preemptions_swap) == (1, 0)


def test_a_full_swap_space_is_reported_once() -> None:
    engine = FakeEngine(config(preemption="swap"), num_host_blocks=1)
    engine.add(long(7, request_id="a"))
    engine.add(long(7, request_id="b"))
    engine.step()
    with pytest.warns(
        RuntimeWarning, match=r"swap memory of 1 blocks has no room for request 'b'.*swap_memory"
    ) as told:
        assert engine.force_preempt("b", "swap") and engine.force_preempt("a", "swap")
    assert len(told) == 1


def test_auto_recomputes_what_fits_in_a_step_and_swaps_the_rest() -> None:
    def after_preemption(request: Request) -> SeqStatus:
        engine = FakeEngine(config(preemption="auto", prefix_caching=False), num_blocks=20)
        engine.add(Request(prompt(4), 1, kind="greedy", priority=-1, request_id="first"))
        name = engine.add(request)
        for _ in range(8):
            engine.step()
        group = engine.group(name)
        assert group.status is SeqStatus.RUNNING
        engine.scheduler._preempt(group, engine.scheduler._cheaper_way(group))
        return group.status

    assert after_preemption(long(8)) is SeqStatus.WAITING
    assert after_preemption(long(30)) is SeqStatus.SWAPPED
    assert after_preemption(long(3, kind="samples", width=2)) is SeqStatus.SWAPPED
    engine = FakeEngine(config(preemption="auto", prefix_caching=False), num_blocks=20)
    group = engine.group(engine.add(long(8)))
    engine.step()
    for budget, way in ((8, "recompute"), (7, "swap")):
        engine.scheduler._token_budget = budget
        assert group.live[0].num_computed_tokens == 8 and engine.scheduler._cheaper_way(group) == way


def test_a_request_that_outgrows_the_pool_fails_alone() -> None:
    engine = FakeEngine(num_blocks=8)
    engine.add(long(5, request_id="big"))
    small = {name: endless(prompt(3, first), 6, request_id=name) for name, first in [("b", 20), ("c", 30)]}
    for request in small.values():
        engine.add(request)
    group = engine.group("big")
    results = engine.run()
    assert results["big"].reason is FinishReason.ERROR
    assert group.error is not None
    assert "'big'" in group.error and "33 tokens" in group.error and "more memory" in group.error
    assert {name: results[name] for name in small} == {name: solo(request) for name, request in small.items()}


def test_pinned_blocks_do_not_leave_a_swapped_group_waiting_for_ever() -> None:
    engine = FakeEngine(config(preemption="swap"), num_blocks=8)
    engine.add(Request(prompt(12), 1, root=ROOT, request_id="system"))
    engine.run()
    cache = engine.scheduler.prefix_cache
    assert cache is not None
    assert cache.pin(prompt(12), ROOT) == 12
    request = endless((*prompt(12), 40, 41, 42), 12, root=ROOT, request_id="a")
    engine.add(request)
    for _ in range(6):
        engine.step()
    assert engine.force_preempt("a", "swap")  # in host memory it has its own copy of the prefix: 6 blocks, 5 are free
    assert engine.run()["a"] == solo(request)


def test_other_weights_reach_swapped_groups_too() -> None:
    engine = FakeEngine(config())
    requests = [endless(prompt(9, 10 * i), 8, root=ROOT, request_id=str(i)) for i in range(3)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    assert engine.force_preempt("1", "swap")
    scheduler = engine.scheduler
    assert (scheduler.num_running, scheduler.num_swapped) == (2, 1) and len(scheduler.prefix_cache or ()) > 0
    scheduler.forget_prefixes()
    assert [group.cache_root for group in scheduler.groups] == [None] * 3 and len(scheduler.prefix_cache or ()) == 0
    engine.forced += [engine.group(name) for name in ("0", "2", "1")]
    scheduler.recompute_all()
    assert (scheduler.num_running, scheduler.num_swapped, scheduler.num_waiting) == (0, 0, 3)
    assert all(seq.num_computed_tokens == 0 for group in scheduler.groups for seq in group.live)
    scheduler.check_integrity()
    assert engine.run() == {request.request_id: solo(request) for request in requests}


# -- sharing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "mode"), [(k, m) for k in ("samples", "beams") for m in ("recompute", "swap")])
def test_sharing_survives_a_preemption(kind: str, mode: str) -> None:
    """The common prefix is stored once: before the preemption, in host memory, and afterwards."""
    engine = FakeEngine(config(prefix_caching=False))
    name = engine.add(long(14, kind=kind, width=4))
    for _ in range(4):
        engine.step()
    group, manager, host = engine.group(name), engine.manager, engine.host
    used, logical = manager.allocator.num_used, manager.num_logical_blocks
    assert used < logical or len(group.live) == 1
    assert engine.force_preempt(name, mode)  # type: ignore[arg-type]
    if mode == "swap":
        assert (host.allocator.num_used, host.num_logical_blocks) == (used, logical)
        output = engine.step()
        assert len(output.swap_out) == len(output.swap_in) == used
    else:
        computed = sum(count for _, count in engine.step().scheduled)
        while len({seq.num_uncomputed_tokens for seq in group.live}) > 1 or group.has_branches:
            computed += sum(count for _, count in engine.step().scheduled)
        assert computed < sum(seq.num_tokens for seq in group.live) or len(group.live) == 1
    assert manager.num_shared_blocks >= 3 or len(group.live) == 1


def test_beams_are_recomputed_once_for_each_common_prefix() -> None:
    """The numbers of computed tokens and of blocks equal the number of nodes in the tree of the beams."""
    engine = FakeEngine(config(prefix_caching=False, max_num_batched_tokens=64))
    name = engine.add(long(8, kind="beams", width=4))
    group, scheduler = engine.group(name), engine.scheduler

    def step() -> int:
        output = scheduler.schedule()
        engine.forced.clear()
        scheduler.update(output)
        scheduler.check_integrity()
        return num_tokens(output)

    step()
    scheduler.reorder(group, [0, 0], [1, 2])
    for token in range(10, 17):
        step()
        scheduler.reorder(group, [0, 1], [token, token])
    step()
    scheduler.reorder(group, [0, 1, 0, 1], [20, 21, 22, 23])  # beams 0 and 2 have most in common, and 1 and 3
    step()
    used = engine.manager.allocator.num_used
    engine.force_preempt(name, "recompute")
    computed = 0
    while group.has_branches or group.live[0].num_uncomputed_tokens:
        computed += step()
    assert computed == 8 + 2 * 8 + 4
    assert engine.manager.allocator.num_used == used == 2 + 2 * 2 + 4


def test_a_finished_sample_frees_its_own_blocks_only() -> None:
    engine = FakeEngine(config(prefix_caching=False))
    name = engine.add(long(14, kind="samples", width=3))
    for _ in range(2):
        engine.step()
    group = engine.group(name)
    first, middle, last = group.live
    engine.scheduler.finish(middle, FinishReason.STOP)
    engine.scheduler.finish(middle, FinishReason.EOS)  # once is enough
    assert middle.finish_reason is FinishReason.STOP and middle.status is SeqStatus.FINISHED
    assert group.live == [first, last] and group.width == 2 and not group.is_finished
    assert engine.manager.allocator.num_used == 3 + 2
    assert middle.seq_id in engine.step().finished_seq_ids
    engine.scheduler.check_integrity()


@pytest.mark.covering(1)
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("num_steps", range(4))
def test_a_sample_may_finish_while_others_wait_to_branch_from_it(index: int, num_steps: int) -> None:
    """After a recomputation, sequences fork from each other; one of them finishes before all have."""
    engine = FakeEngine(config(max_num_batched_tokens=6, prefix_caching=False))
    request = endless(prompt(10), 9, kind="samples", width=4)
    name = engine.add(request)
    for _ in range(5):
        engine.step()
    engine.force_preempt(name, "recompute")
    for _ in range(num_steps):
        engine.step()
    group = engine.group(name)
    leaver = group.sequences[index]
    kept = leaver.output_token_ids
    engine.scheduler.finish(leaver, FinishReason.STOP)
    engine.scheduler.check_integrity()
    outputs = engine.run()[name].outputs
    expected = solo(request).outputs
    expected[index] = kept
    assert outputs == expected


def test_beams_may_become_fewer_and_more() -> None:
    engine = FakeEngine()
    name = engine.add(long(6, kind="beams", width=3))
    scheduler, group = engine.scheduler, engine.group(name)

    def step() -> None:
        output = scheduler.schedule()
        scheduler.update(output)

    step()
    first = group.live[0]
    beams = scheduler.reorder(group, [0, 0, 0], [21, 22, 23])
    assert beams[0] is first and [seq.output_token_ids for seq in beams] == [[21], [22], [23]]
    step()
    losers = [group.live[0].seq_id, group.live[1].seq_id]
    scheduler.reorder(group, [2], [31])
    assert [seq.output_token_ids for seq in group.live] == [[23, 31]]
    output = scheduler.schedule()
    assert output.finished_seq_ids == losers
    scheduler.update(output)
    scheduler.reorder(group, [0, 0], [41, 42])
    assert [seq.output_token_ids for seq in group.sequences] == [[23, 31, 41], [23, 31, 42]]
    scheduler.check_integrity()
    step()
    with pytest.raises(ValueError, match="4 parents and 4 tokens for a group of width 3"):
        scheduler.reorder(group, [0] * 4, [1] * 4)
    with pytest.raises(ValueError, match="2 parents and 1 tokens"):
        scheduler.reorder(group, [0, 1], [1])
    with pytest.raises(ValueError, match="0 parents"):
        scheduler.reorder(group, [], [])
    scheduler.finish_group(engine.group(name), FinishReason.ABORT)
    engine.check_empty()


def test_a_group_may_branch_later_and_keeps_its_places_until_then() -> None:
    engine = FakeEngine()
    name = engine.add(long(6, kind="samples", width=4))
    group, scheduler = engine.group(name), engine.scheduler
    scheduler.update(scheduler.schedule())
    first, second = scheduler.fork(group.live[0], [1, 2])
    assert (group.width, group.live) == (4, [first, second])
    scheduler.finish(first, FinishReason.STOP)
    assert (group.width, group.live) == (3, [second])
    scheduler.update(scheduler.schedule())
    assert len(scheduler.fork(second, [3, 4, 5])) == len(group.live) == group.width == 3
    scheduler.finish_group(engine.group(name), FinishReason.ABORT)
    assert (group.width, group.live) == (0, [])
    engine.check_empty()


def test_no_more_forks_than_announced() -> None:
    engine = FakeEngine()
    name = engine.add(long(6, kind="samples", width=2))
    output = engine.scheduler.schedule()
    engine.scheduler.update(output)
    (seq,) = engine.group(name).live
    with pytest.raises(ValueError, match=r"1 \+ 3 - 1 sequences in a group of width 2"):
        engine.scheduler.fork(seq, [1, 2, 3])
    with pytest.raises(ValueError, match="width 2"):
        engine.scheduler.fork(seq, [])
    assert [s.output_token_ids for s in engine.scheduler.fork(seq, [1, 2])] == [[1], [2]]


# -- the prefix cache -----------------------------------------------------------------------------------------------


def scheduled_tokens(engine: FakeEngine, request: Request) -> int:
    """Number of prompt tokens that had to be computed."""
    engine.add(request)
    total = 0
    while engine.scheduler.has_unfinished():
        total += num_tokens(engine.step())
    return total


def test_a_known_prefix_is_not_computed_again() -> None:
    engine = FakeEngine()
    request = endless(prompt(14), 1, root=ROOT)
    assert scheduled_tokens(engine, request) == 14
    assert scheduled_tokens(engine, request) == 2
    assert scheduled_tokens(engine, endless(prompt(12), 1, root=ROOT)) == 4  # one token must be computed
    assert scheduled_tokens(engine, endless((*prompt(8), 40), 1, root=ROOT)) == 1
    assert scheduled_tokens(engine, endless(prompt(14), 1, root=root_digest("model", None, "salt"))) == 14
    assert scheduled_tokens(engine, endless(prompt(14), 1)) == 14
    cache = engine.scheduler.prefix_cache
    assert cache is not None
    assert (cache.query_tokens, cache.hit_tokens) == (14 + 14 + 12 + 9 + 14, 12 + 8 + 8)
    assert {str(result) for name, result in engine.results.items() if name in ("r0", "r1")} == {str(solo(request))}


@pytest.mark.parametrize("windows", [(8,), (None, 8), (None, None, 5)])
def test_windowed_layers_find_prefixes_too(windows: tuple[int | None, ...]) -> None:
    engine = FakeEngine(windows=windows)
    for tokens in (prompt(30), prompt(30), prompt(40), (*prompt(21), *range(60, 70)), prompt(12)):
        request = endless(tokens, 4, root=ROOT)
        name = engine.add(request)
        assert engine.run()[name] == solo(request, windows)
    cache = engine.scheduler.prefix_cache
    assert cache is not None and cache.hit_tokens == 0 + 28 + 28 + 20 + 8


def test_a_preempted_request_finds_its_own_blocks() -> None:
    engine = FakeEngine()
    request = endless(prompt(14), 6, root=ROOT)
    name = engine.add(request)
    for _ in range(4):
        engine.step()
    engine.force_preempt(name, "recompute")
    assert counts(engine.step()) == [(name, 2)]  # 18 tokens, 4 full blocks of them known
    cache = engine.scheduler.prefix_cache
    assert cache is not None
    assert (cache.query_tokens, cache.hit_tokens) == (14, 0), "counted once a request"
    assert engine.run()[name] == solo(request)


def test_found_blocks_that_nobody_uses_count_as_taken() -> None:
    engine = FakeEngine(num_blocks=6)
    engine.add(endless(prompt(12), 1, root=ROOT))
    engine.run()
    engine.add(long(7, request_id="a"))
    engine.step()
    engine.add(endless((*prompt(12), *range(30, 35)), 1, root=ROOT, request_id="b"))  # 3 found + 2; 4 are not in use
    assert counts(engine.step()) == [("a", 1)]
    engine.abort("a")
    assert counts(engine.step()) == [("b", 5)]


def test_blocks_that_were_swapped_are_found_again() -> None:
    engine = FakeEngine(num_blocks=6)
    request = endless(prompt(14), 4, root=ROOT, request_id="a")
    engine.add(request)
    engine.step()
    assert engine.force_preempt("a", "swap")
    cache = engine.scheduler.prefix_cache
    assert cache is not None
    cache.clear()
    engine.step()
    engine.step()
    assert cache.match(prompt(14), ROOT).num_blocks == 3
    assert engine.run()["a"] == solo(request)


def test_an_aborted_swap_is_not_copied() -> None:
    """Its host blocks may belong to another request when the copies run."""
    engine = FakeEngine(config(prefix_caching=False), num_host_blocks=2)
    for name, first in [("a", 10), ("b", 20)]:
        engine.add(endless(prompt(7, first), 5, request_id=name))
    engine.step()
    assert engine.force_preempt("b", "swap")
    engine.abort("b")
    assert engine.force_preempt("a", "swap")
    output = engine.step()
    assert len(output.swap_out) == 2
    assert engine.run()["a"] == solo(endless(prompt(7), 5))


def test_an_aborted_step_is_not_applied() -> None:
    engine = FakeEngine()
    name = engine.add(long(6, root=ROOT))
    scheduler, (seq,) = engine.scheduler, engine.group(name).live
    output = scheduler.schedule()
    scheduler.finish_group(engine.group(name), FinishReason.ABORT)
    scheduler.update(output)
    assert seq.num_computed_tokens == 0 and seq.finish_reason is FinishReason.ABORT
    engine.check_empty()


def reader(name: str, encoder: bytes, length: int = 4, **options: Any) -> SequenceGroup:
    return SequenceGroup(name, prompt(length), beside={"encoder": EncoderInput(encoder)}, **options)


def tables_of(scheduler: Scheduler) -> EncoderTables:
    tables = scheduler.side(EncoderTables)
    assert tables is not None
    return tables


def encoding(scheduler: Scheduler, num_states: int) -> list[str]:
    """Run the encoders that have to run."""
    groups = tables_of(scheduler).unready()
    for group in groups:
        tables_of(scheduler).ran(group, num_states)
    return [group.request_id for group in groups]


class Encoders(Executor):
    """The test itself says which states are written."""

    written: frozenset[Hashable] = frozenset()


def with_encoders(executor: Executor, manager: BlockManager, **options: Any) -> Scheduler:
    tables = EncoderTables()
    tables.use(executor)
    return Scheduler(config(**options), manager, side_memories=[tables])


def test_what_a_table_without_contents_needs_is_kept() -> None:
    """A step may leave out the adapters of a request that has begun."""
    executor = Encoders()
    scheduler = with_encoders(executor, BlockManager(BlockAllocator(9), 4))
    scheduler.enqueue(reader("a", b"a"))
    assert encoding(scheduler, 5) == ["a"]
    ((write,),) = scheduler.schedule().moves.values()
    scheduler.enqueue(reader("b", b"b"))
    assert encoding(scheduler, 5) == ["b"]
    tables_of(scheduler).wrote([write.seq_id])
    assert set(tables_of(scheduler).encoded) == {b"b"}


def test_states_of_encoders_stay_if_a_request_cannot_start_without_them() -> None:
    executor = Encoders()
    scheduler = with_encoders(executor, BlockManager(BlockAllocator(16), 4), max_num_batched_tokens=64)
    scheduler.enqueue(reader("idle", b"a"))
    encoding(scheduler, 4)
    output = scheduler.schedule()
    tables_of(scheduler).wrote(each.seq_id for each in output.moves[tables_of(scheduler)])
    scheduler.update(output)
    group = output.scheduled[0][0].group
    scheduler.finish_group(group, FinishReason.STOP)
    scheduler.enqueue(reader("runs", b"b", 40))
    scheduler.enqueue(reader("waits", b"c", 12))
    encoding(scheduler, 8)
    assert [each.request_id for each in scheduler.schedule().admitted] == ["runs"]
    assert tables_of(scheduler).num_idle_blocks() == 1


# -- states ---------------------------------------------------------------------------------------------------------


def stateful(num_blocks: int, *groups: LayerGroup, state_blocks: float = 0.0) -> Scheduler:
    rules = CheckpointRules(8, 0, 8, in_pieces=True, num_blocks=state_blocks)
    manager = BlockManager(BlockAllocator(num_blocks), 4, groups=groups or (LayerGroup(),))
    return Scheduler(config(max_num_batched_tokens=64), manager, side_memories=[StateMemory(rules, state_blocks)])


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update(output)
    scheduler.check_integrity()
    return output


def test_the_end_of_a_prompt_that_has_stopped_takes_no_more_than_a_window() -> None:
    scheduler = stateful(24, LayerGroup(Window(8)))
    scheduler.enqueue(SequenceGroup("first", prompt(48), cache_root=ROOT))
    scheduler.finish_group(step(scheduler).admitted[0], FinishReason.STOP)
    scheduler.enqueue(SequenceGroup("long", [*prompt(40), *range(200, 368)], cache_root=ROOT))
    scheduler.enqueue(SequenceGroup("short", range(400, 412), cache_root=ROOT))
    assert counts(step(scheduler))[:1] == [("long", 40)]  # where its prompt leaves the first one
    assert scheduler.num_running == 2


def test_checkpoints_stay_if_a_request_cannot_start_without_them() -> None:
    scheduler = stateful(30, state_blocks=2.0)
    scheduler.enqueue(SequenceGroup("first", prompt(41), cache_root=ROOT))
    scheduler.finish_group(step(scheduler).admitted[0], FinishReason.STOP)
    states = scheduler.side(StateMemory)
    assert states is not None and states.num_blocks == (0, 2)
    scheduler.enqueue(SequenceGroup("runs", range(100, 130), cache_root=ROOT))
    scheduler.enqueue(SequenceGroup("waits", range(200, 280), cache_root=ROOT))
    assert [group.request_id for group in step(scheduler).admitted] == ["runs"]
    assert states.num_blocks[1] >= 2


@pytest.mark.parametrize(("num_blocks", "drafted", "admitted"), [(20, 2, 13), (5, 14, 0)])
def test_drafts_leave_waiting_prompts_their_tokens(num_blocks: int, drafted: int, admitted: int) -> None:
    """Unless there is no room for the first one."""
    engine = FakeEngine(config(), num_blocks=num_blocks)
    engine.add(long(5))
    engine.step()
    (group,) = engine.scheduler.running
    engine.add(long(13, request_id="next"))
    output = engine.scheduler.schedule({group.live[0]: [1] * 14})
    assert [len(draft) for draft in output.drafts.values()] == [drafted]
    assert dict(counts(output)).get("next", 0) == admitted
