"""Prefixes of recurrent states: requests begin with copies of the states that others left, and get plain's tokens."""

from __future__ import annotations

import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.cache.layers import NOTHING, WHOLE
from hf_paged.cache.memory import PagedMemory
from hf_paged.features.rows.row_trial import bind_rows
from hf_paged.features.rows.rows import VIEWED_TOKENS, RowModel
from hf_paged.features.rows.states import States
from hf_paged.generation.engine import prefixes, room
from hf_paged.model.support import examine
from tests.architectures.tiny import tiny_model
from tests.fake_cuda import DEVICE, fake_cuda
from tests.forwards import bound_model, runner_of, states_of
from tests.generation.solo import ended
from tests.logical_devices import in_child
from tests.preempting import force_preempt

BLOCK = 4
SLOW = ("mamba2", "jamba")
WITHOUT_KV = ("mamba", "mamba2")


def types(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


def bound_in_bf16(name: str) -> RowModel:
    model = tiny_model(name).to(torch.bfloat16)
    has_kv = not examine(model).bare.engine_only
    return bind_rows(model, PagedMemory(BLOCK, int(has_kv), layout=WHOLE if has_kv else NOTHING))


@functools.cache
def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(6, 90, (600,), generator=generator).tolist()


def config(new: int = 6, **options: Any) -> GenerationConfig:
    fixed = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return GenerationConfig(**{**fixed, **options})


def plain(name: str, prompt: list[int], new: int = 6, **options: Any) -> list[list[int]]:
    torch.manual_seed(options.pop("seed", 0))
    ids = torch.tensor([prompt])
    made = config(new, **options)
    result = model_of(name).generate(ids, attention_mask=torch.ones_like(ids), generation_config=made)
    return [row[len(prompt) :].tolist() for row in result]


def engine_of(name: str, num_blocks: int | None = None, **scheduler: Any) -> Engine:
    blocks = None if name in WITHOUT_KV else num_blocks
    return Engine(model_of(name), CacheConfig(block_size=BLOCK, num_blocks=blocks), SchedulerConfig(**scheduler))


def run(engine: Engine, name: str, prompt: list[int], new: int = 6, **options: Any) -> tuple[int, list[int]]:
    """The number of cached tokens and the tokens of the first answer, after a comparison with plain's."""
    adapters = {key: options.pop(key) for key in ("cache_salt",) if key in options}
    (output,) = engine.generate([prompt], config(new, **options), **adapters)
    assert [each.token_ids for each in output.outputs] == plain(name, prompt, new, **options)
    engine.check_integrity()
    return output.metrics.num_cached_tokens, output.outputs[0].token_ids


def checkpoints_of(engine: Engine) -> Any:
    cache = engine._scheduler.prefix_cache
    assert cache is not None
    return cache.checkpoints


def assert_same_checkpoints(engine: Engine) -> None:
    """The runner has those that the scheduler believes in, once it has been told."""
    engine.generate([tokens()[:2]], config(1))
    engine.generate([tokens()[:2]], config(1))
    assert set(states_of(engine).checkpoints) == set(checkpoints_of(engine)._ids.values())


@pytest.mark.parametrize("name", types("lfm2", "mamba2"))
def test_a_second_request_begins_where_the_first_one_was(name: str) -> None:
    text = tokens()
    with engine_of(name) as engine:
        assert run(engine, name, text[:101])[0] == 0
        cached, answer = run(engine, name, text[:101])
        assert cached == 100  # all full blocks
        assert run(engine, name, text[:101] + text[300:320])[0] == 100  # longer
        assert run(engine, name, text[:61] + text[200:240])[0] == 0  # diverges: no state was kept there
        assert run(engine, name, text[:61] + text[400:440])[0] == 60  # and now there is one
        assert run(engine, name, text[:61])[0] == 60
        assert run(engine, name, text[:101] + answer + text[500:510])[0] >= 104  # the next turn of a chat
        stats = engine.stats()
        assert stats.prefix_cache_hit_rate > 0.5
        assert_same_checkpoints(engine)


@pytest.mark.parametrize(("name", "by_one"), [("lfm2", False), ("mamba", True), ("jamba", True)])
def test_what_is_found_by_trial_in_bf16(name: str, by_one: bool) -> None:
    """Some models drop their state when a prompt goes on by more than one token."""
    bound = bound_in_bf16(name)
    assert bound.is_incremental is by_one and not bound.no_prefixes


@pytest.mark.parametrize("name", types("mamba", "jamba"))
def test_by_single_tokens(name: str) -> None:
    """These models resume for one token at a time: the third request finds its prompt, and a chat its last turn."""
    text = tokens()
    with engine_of(name) as engine:
        assert [run(engine, name, text[:101])[0] for _ in range(3)] == [0, 0, 100]
        answer = run(engine, name, text[:101])[1]
        assert run(engine, name, text[:101] + answer + text[500:503])[0] == 104
        assert run(engine, name, text[:101] + text[300:330])[0] == 0  # thirty single tokens cost more
        assert_same_checkpoints(engine)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_rests_of_prompts_share_forwards(name: str) -> None:
    """What follows the last full blocks of prompts, if it has as many tokens."""
    text = tokens()
    given = [text[start : start + length] for start, length in ((0, 39), (100, 39), (200, 39), (300, 63), (400, 63))]
    with engine_of(name) as engine:
        rows = bound_model(engine)._rows
        with mock.patch.object(rows, "compute", side_effect=rows.compute) as compute:
            outputs = engine.generate(given, config(1))
        forwards = [[(len(part.ids), part.start > 0) for part in call.args[1]] for call in compute.call_args_list]
    assert [o.outputs[0].token_ids for o in outputs] == [plain(name, prompt, 1)[0] for prompt in given]
    assert forwards[-1] == [(3, True)] * 5
    assert sum(own[0][1] for own in forwards) == 1


@pytest.mark.parametrize("name", types("lfm2", "mamba2", "jamba"))
def test_beams_samples_and_parallel_requests(name: str) -> None:
    text = tokens()
    with engine_of(name) as engine:
        run(engine, name, text[:70])
        for length in (70, 70, 74):
            run(engine, name, text[:length], num_beams=3, num_return_sequences=2)
            run(engine, name, text[:length], do_sample=True, num_return_sequences=3, top_k=8, seed=2)
        given = [text[:length] for length in (70, 50, 70, 33, 90, 64, 68)]
        for _ in range(2):
            outputs = engine.generate(given, config())
            assert [o.outputs[0].token_ids for o in outputs] == [plain(name, prompt)[0] for prompt in given]
        assert_same_checkpoints(engine)


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("name", types("lfm2", "qwen3_next", "jamba"))
def test_preempted(name: str, way: Any) -> None:
    text = tokens()
    given = [text[:length] for length in (50, 46, 61, 38)]
    options: list[dict[str, Any]] = [{}, {"num_beams": 3}, {}, {"do_sample": True, "top_k": 5, "seed": 3}]
    with engine_of(name, preemption=way, max_num_batched_tokens=24) as engine:
        for _ in range(2):
            ids = [engine.add_request(prompt, config(12, **own)) for prompt, own in zip(given, options)]
            done, rng = {}, random.Random(1)
            while engine.has_unfinished_requests():
                done.update({o.request_id: o for o in engine.step() if o.finished})
                if rng.random() < 0.3 and (running := [key for key in ids if key not in done]):
                    force_preempt(engine._scheduler, rng.choice(running), way)
                engine.check_integrity()
            for key, prompt, own in zip(ids, given, options):
                expected = plain(name, prompt, 12, **own)
                assert [each.token_ids for each in done[key].outputs] == expected[: len(done[key].outputs)]
        assert_same_checkpoints(engine)


@pytest.mark.parametrize("name", types("lfm2", "mamba2"))
def test_salts_weights_and_kept_prefixes(name: str) -> None:
    text = tokens()
    model = model_of(name)
    with engine_of(name) as engine:
        assert engine.cache_prefix(text[:66]) == 64
        assert run(engine, name, text[:67])[0] == 64
        assert run(engine, name, text[:67], cache_salt="a")[0] == 0
        checkpoints = checkpoints_of(engine)
        for digest in list(checkpoints):
            checkpoints.drop(digest)
        assert run(engine, name, text[:67])[0] == 64  # it was kept
        assert engine.release_prefix(text[:66]) and not engine.release_prefix(text[:66])
        with torch.no_grad():
            weight = model.get_input_embeddings().weight
            before = weight.clone()
            weight.mul_(1.5)
        try:
            assert run(engine, name, text[:67])[0] == 0
            assert_same_checkpoints(engine)
        finally:
            with torch.no_grad():
                weight.copy_(before)


def test_a_prefix_is_kept_while_others_run() -> None:
    """Their tails do not take the place of its end."""
    text = tokens()
    with engine_of("lfm2", num_blocks=800, max_num_seqs=14) as engine:
        for start in range(0, 240, 20):
            engine.add_request(text[start : start + 21], config(60))
        for start in range(300, 304):
            engine.step()
            assert engine.cache_prefix(text[start : start + 64]) == 64


def test_more_prefixes_are_kept_than_fit() -> None:
    text = tokens()
    with engine_of("lfm2", num_blocks=400, max_num_seqs=2) as engine:
        assert [engine.cache_prefix(text[start : start + 64]) for start in (0, 100)] == [64, 64]
        with pytest.raises(ValueError, match="2 prefixes are kept"):
            engine.cache_prefix(text[200:264])
        assert engine.cache_prefix(text[:64]) == 64  # again
        assert [run(engine, "lfm2", text[300:370])[0] for _ in range(2)] == [0, 68]  # others find theirs
        assert engine.release_prefix(text[:64]) and engine.cache_prefix(text[200:264]) == 64


class _BrokenOff:
    """Raises KeyboardInterrupt once, before or after a call of a method."""

    def __init__(self, owner: Any, name: str, *, is_after: bool) -> None:
        self.owner, self.name, self.is_after, self.real = owner, name, is_after, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        delattr(self.owner, self.name)
        if self.is_after:
            self.real(*args, **kwargs)
        raise KeyboardInterrupt


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "where", ["take_moves", "_schedule_others", "_follow_last_step", "keep", "free", "restore", "drop", "update"]
)
def test_an_interrupt_loses_no_checkpoint(where: str, is_after: bool) -> None:
    """Kept prefixes keep their states, and states of ended sequences do not stay."""
    text = tokens()
    with engine_of("lfm2", num_blocks=400, max_num_seqs=4) as engine:
        scheduler, runner = engine._scheduler, runner_of(engine)
        owners = [scheduler, runner, runner._executor, runner._executor.states, checkpoints_of(engine)]
        owner = next(each for each in owners if hasattr(each, where))
        assert run(engine, "lfm2", text[100:170])[0] == 0
        assert engine.cache_prefix(text[:64]) == 64  # its copy is due in the next step
        engine.add_request(text[300:340], config(30))
        for start in (0, 100):
            broken = _BrokenOff(owner, where, is_after=is_after)
            engine.add_request(text[start : start + 70], config())
            with pytest.raises(KeyboardInterrupt):
                for _ in range(30):
                    engine.step()
                checkpoints_of(engine).drop(next(iter(checkpoints_of(engine))))
                engine.step()
            assert getattr(owner, where) is not broken
            ended(engine)
        assert run(engine, "lfm2", text[:67])[0] == 64
        assert run(engine, "lfm2", text[100:170])[0] == 68
        assert_same_checkpoints(engine)
        assert len(runner._executor._rows.states) == 1  # of the last request
        assert engine.release_prefix(text[:64])


def test_a_number_of_blocks_does_not_count_checkpoints() -> None:
    """They may take a share of what is free beside the blocks and the states of sequences."""
    with engine_of("lfm2", num_blocks=100, max_num_seqs=32) as engine:
        assert checkpoints_of(engine).rules.count == 32 + 3
        bound = bound_model(engine)
        state, joined = (sum(sizes.values()) for sizes in (bound.state_bytes, bound.tensor_bytes))
        pool = engine._memory.pool.nbytes
    for spare, count in ((10, 10), (1, 4)):
        free = (32 * (state + joined) + pool + spare * state) / room.DEFAULT_FRACTION["cpu"]
        with (
            mock.patch.object(room, "_free_bytes", lambda device, free=free: int(free) + 1),
            engine_of("lfm2", num_blocks=100, max_num_seqs=32) as engine,
        ):
            assert checkpoints_of(engine).rules.count == checkpoints_of(engine).capacity == count


def test_a_checkpoint_without_memory_is_not_made() -> None:
    text = tokens()
    with engine_of("lfm2", num_blocks=100) as engine:
        states = states_of(engine)
        with mock.patch.object(states, "keep", side_effect=torch.OutOfMemoryError("full")) as keep:
            assert run(engine, "lfm2", text[:70], 12)[0] == 0
            assert run(engine, "lfm2", text[:70])[0] == 0
            assert keep.called
        assert [run(engine, "lfm2", text[:70])[0] for _ in range(2)] == [0, 68]
        assert_same_checkpoints(engine)


def engine_in(name: str, size: int, **scheduler: Any) -> Engine:
    return Engine(model_of(name), {"block_size": BLOCK, "memory": size}, scheduler)


@pytest.mark.covering(1)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("lengths", [(24,), (100,), (12, 180)], ids=["short", "long", "mixed"])
@pytest.mark.parametrize("name", types("qwen3_next", "lfm2", "jamba"))
def test_states_and_blocks_share_a_memory(name: str, lengths: tuple[int, ...], prefix_caching: bool) -> None:
    """As many sequences run at once as there are bytes for their states and their K/V."""
    size, new, text = 1 << 19, 8, tokens()
    with engine_in(name, size, prefix_caching=prefix_caching, watermark=0.0, max_num_seqs=400) as engine:
        of_block = engine._memory.pool.bytes_per_block
        of_state = sum(bound_model(engine).state_bytes.values())
        left, count = size, 0
        while (left := left - of_state - lengths[count % len(lengths)] // BLOCK * of_block) >= 0:
            count += 1
        run(engine, name, text[:50])  # its checkpoints give way
        for index in range(count + 3):
            prompt = [index % 80 + 6, *text[index : index + lengths[index % len(lengths)] - new - 1]]
            engine.add_request(prompt, config(new))
        most = 0
        while engine.has_unfinished_requests():
            engine.step()
            engine.check_integrity()
            stats = engine.stats()
            assert stats.blocks_free >= 0
            assert stats.blocks_free + stats.blocks_used + stats.blocks_cached == stats.num_blocks
            states = states_of(engine)
            assert states.nbytes + stats.kv_bytes_touched <= size + 2 * of_state  # of a sequence that ends, of a copy
            most = max(most, stats.num_running)
        assert most >= 0.95 * count >= 2, (most, count)
        assert engine.stats().blocks_used == 0


def test_a_memory_without_room_for_a_state() -> None:
    with pytest.raises(ValueError, match="holds no states of a sequence"):
        engine_in("qwen3_next", 4096)
    with engine_in("lfm2", 1 << 15) as engine, pytest.raises(ValueError, match=r"need \d+ blocks of 4 \(1 for states"):
        engine.add_request(tokens()[:240], config())


PROMPT = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 2), st.integers(1, 9))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", ["lfm2", "jamba"])
def test_any_blocks_and_checkpoints_may_be_gone(name: str, data: st.DataObject) -> None:
    """Between prompts that share prefixes any blocks and checkpoints go: the longest prefix with both left is found."""
    text = tokens()
    with pytest.MonkeyPatch.context() as patch, engine_of(name, num_blocks=60) as engine:
        patch.setattr(prefixes, "LEAST_PREFIX", BLOCK)
        patch.setattr(prefixes, "SINGLES", 1)
        cache, checkpoints = engine._scheduler.prefix_cache, checkpoints_of(engine)
        assert cache is not None
        root = engine._admission.cache_root(engine._adapters.choose(None), None)
        for _ in range(5):
            first, one, second, two = data.draw(PROMPT)
            start, middle = 100 * first, 300 + 100 * second
            prompt = text[start : start + 3 * one] + text[middle : middle + 2 * two]
            digests: list[bytes] = []
            cache.extend_digests(digests, prompt, root, (len(prompt) - 1) // BLOCK)
            found = 0
            for count in range(len(digests), 0, -1):
                is_whole = name in WITHOUT_KV or all(each in cache._blocks[0] for each in digests[:count])
                if is_whole and digests[count - 1] in checkpoints:
                    found = count * BLOCK
                    break
            if name == "jamba" and len(prompt) - found > found:
                found = 0
            assert run(engine, name, prompt, data.draw(st.integers(1, 9)))[0] == found
            for digest in list(checkpoints):
                if data.draw(st.integers(0, 3)) == 0:
                    checkpoints.drop(digest)
            allocator = engine._memory.manager.allocator
            for block_id in allocator.cached_blocks:
                if allocator.is_cached(block_id) and data.draw(st.integers(0, 5)) == 0:
                    cache._forget(block_id)
                    allocator.drop_cached(block_id)
        assert_same_checkpoints(engine)


@pytest.mark.parametrize(("name", "settings", "words"), [
    ("deepseek_v32", [{}, {"prefix_caching": True}], "prefix_caching=True: .* states that grow"),
    ("mamba", [{}, {"preemption": "swap"}], "preemption='swap': .* is ever preempted"),
    ("mamba", [{"swap_memory": "1MiB"}], r"swap_memory='1MiB': .* is ever preempted"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused(name: str, settings: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(model_of(name), *settings)


def test_too_little_memory_for_the_states_of_a_request() -> None:
    with Engine(model_of("mamba"), {"memory": "1MiB"}) as engine:
        seats = engine.scheduler_config.max_num_seqs
        assert 0 < seats < 64
        with pytest.raises(ValueError, match=f"the memory holds the recurrent states of {seats}; .* more memory"):
            engine.add_request(tokens()[:5], config(num_beams=seats + 1))


def test_states_that_grow_are_counted_with_the_blocks() -> None:
    """An indexer keeps keys of every token outside blocks."""
    with Engine(model_of("deepseek_v32"), {"memory": "4MiB", "block_size": BLOCK}) as engine:
        bound = bound_model(engine)
        growth = sum(bound.state_bytes_per_token.values())
        blocks = engine.stats().num_blocks
        assert growth > 0
        assert blocks * (engine._memory.pool.bytes_per_block + growth * BLOCK) <= 4 * 2**20
        engine.generate([tokens()[:40]], config(2))
        states = bound._rows.states
        for row in states._rows.values():
            assert abs(row.batch.nbytes - growth * row.num_tokens) <= sum(bound.state_bytes.values()) + growth


def test_states_of_a_swapped_sequence_are_in_host_memory() -> None:
    def check() -> None:
        with fake_cuda():
            states, made = States(), torch.arange(6.0).view(2, 3)
            states.put([(0, 4), (1, 4)], {"state": made.to(DEVICE), "flag": True})
            states.to_host(1, 4)
            assert states._rows[1].batch.tensors[0].device.type == "cpu"
            joined = states.joined([(1, 4), (0, 4)])
            assert joined["state"].device == DEVICE and joined["flag"] is True
            assert joined["state"].cpu().tolist() == made[[1, 0]].tolist()

    in_child(check)


@pytest.mark.slow
def test_the_dense_view_is_counted_on_a_gpu() -> None:
    """Each layer with an attention of the model's own gathers K/V for a forward, in memory that blocks leave free."""

    def check() -> None:
        free, model = 1 << 28, tiny_model("bloom")
        with fake_cuda(), mock.patch.object(room, "_free_bytes", lambda device: free):
            sizes: Any = {"memory_fraction": 1.0}, {"max_num_seqs": 64}
            engine = Engine(model.to(DEVICE), *sizes, cuda_graphs=False, warmup=False)
            pool = engine._memory.pool
            layers = len(pool.layers)
            tokens = 64 * (getattr(model.config, "max_position_embeddings", None) or 1 << 16)
            view = 2 * min(tokens, VIEWED_TOKENS) * (pool.bytes_per_block // 16 // layers)
            assert 0 < view < free
            assert free - view - pool.bytes_per_block < pool.nbytes <= free - view
            engine.close()

    in_child(check)


@pytest.mark.slow
def test_swapped_states_take_the_memory_of_host_blocks() -> None:
    """Blocks that were swapped earlier give their pages back, so that both stay within `swap_memory`."""
    cache = CacheConfig(block_size=4, memory="1MiB", swap_memory="128KiB")
    with Engine(model_of("qwen3_next"), cache, SchedulerConfig(watermark=0.0, preemption="swap")) as engine:
        scheduler = engine._scheduler
        host = scheduler.host_manager.allocator
        expected = [
            engine.generate([tokens()[k * 9 : k * 9 + 6]], config(30))[0].outputs[0].token_ids for k in range(8)
        ]
        long = engine.add_request(tokens()[:220], config(30))
        for _ in range(2):
            engine.step()
        assert force_preempt(scheduler, long, "swap")
        ended(engine)
        names = [engine.add_request(tokens()[k * 9 : k * 9 + 6], config(30)) for k in range(8)]
        for _ in range(3):
            engine.step()
        for name in names:
            force_preempt(scheduler, name, "swap")
        with mock.patch.object(scheduler, "_resume_swapped", return_value=0):
            engine.step()
        assert host.num_withheld > host.num_blocks // 2  # and the long request had touched most of them
        assert host.num_touched + host.num_withheld <= host.num_blocks
        finished = {}
        while engine.has_unfinished_requests():
            finished.update({output.request_id: output for output in engine.step() if output.finished})
            assert host.num_touched + host.num_withheld <= host.num_blocks
        assert [finished[name].outputs[0].token_ids for name in names] == expected
        engine.check_integrity()
