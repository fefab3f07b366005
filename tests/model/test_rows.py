"""Models that cannot run packed: many requests as rows of one forward, each with the tokens that it has alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.cache.cache_rows import CacheRows
from hf_paged.features.rows import rows
from hf_paged.features.rows.row_trial import way_of
from hf_paged.features.rows.states import States
from hf_paged.integration.names import CACHE, cache_argument
from tests.architectures.tiny import redraw, tiny_config, tiny_model
from tests.forwards import bound_model, states_of
from tests.noted import note_calls
from tests.preempting import force_preempt

NEW = 8
FAST = ("bloom", "lfm2", "falcon_h1", "mamba")
SLOW = ("qwen3_next", "rwkv", "mvp")
WITHOUT_KV = ("mamba", "rwkv")


def _types(but: tuple[str, ...] = ()) -> list[Any]:
    slow = (pytest.param(name, marks=pytest.mark.slow) for name in SLOW if name not in but)
    return [*(name for name in FAST if name not in but), *slow]


TYPES = _types()

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 8, "seed": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


def options_of(name: str, *options: str) -> list[str]:
    """The options of requests; greedy for RWKV, whose forward in transformers mixes the rows of a batch, beams too."""
    return ["greedy" if name == "rwkv" else option for option in options]


def config(name: str, new: int = NEW) -> GenerationConfig:
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **OPTIONS[name]}
    return GenerationConfig(**options)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(6, 90, (length,), generator=generator).tolist() for length in lengths]


@functools.cache
def solo(name: str, prompt: tuple[int, ...], option: str, new: int = NEW) -> list[list[int]]:
    """The new tokens of plain generate for this request alone."""
    torch.manual_seed(OPTIONS[option].get("seed", 0))
    ids = torch.tensor([prompt])
    result = model_of(name).generate(ids, attention_mask=torch.ones_like(ids), generation_config=config(option, new))
    return [row[len(prompt) :].tolist() for row in result]


def engine_of(name: str, num_blocks: int | None = None, **scheduler: Any) -> Engine:
    blocks = None if name in WITHOUT_KV else num_blocks
    return Engine(model_of(name), CacheConfig(block_size=4, num_blocks=blocks), SchedulerConfig(**scheduler))


def assert_idle(engine: Engine) -> None:
    """No block and, once the next step has told the runner who has ended, no state is left."""
    engine.check_integrity()
    assert engine.stats().blocks_used == engine.stats().blocks_swapped == 0
    engine.generate([prompts(3)[0]], config("greedy", 1))
    assert len(states_of(engine)) <= 1  # of that request


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each forward."""
    return note_calls(monkeypatch, rows.Rows, "compute", lambda own, model, parts: len(parts))


@pytest.mark.quick_cases("[bloom", "[lfm2")
@pytest.mark.parametrize("name", TYPES)
def test_requests_of_any_length_share_forwards(name: str, forwards: list[int]) -> None:
    given = prompts(5, 19, 1, 12)
    with engine_of(name) as engine:
        forwards.clear()
        outputs = engine.generate(given, config("greedy"))
        counted = forwards[:]
        assert_idle(engine)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [solo(name, tuple(p), "greedy") for p in given]
    if name in ("rwkv", "mvp"):  # their logits depend on the batch, or on padding
        assert max(counted) == 1
    else:
        assert len(counted) <= NEW + 1 and max(counted) == len(given)


@pytest.mark.quick_cases("[lfm2", "[mamba")
@pytest.mark.parametrize("name", TYPES)
def test_arrivals_beams_samples_and_aborts(name: str) -> None:
    names = options_of(name, "greedy", "beams", "samples", "greedy", "samples")
    given = prompts(9, 14, 4, 21, 9)
    done: dict[str, list[list[int]]] = {}
    with engine_of(name) as engine:
        ids: list[str] = []
        while len(ids) < len(given) or engine.has_unfinished_requests():
            if len(ids) < len(given):
                ids.append(engine.add_request(given[len(ids)], config(names[len(ids)])))
            if len(ids) == 5:
                engine.abort(ids[3])
            for output in engine.step():
                if output.finished:
                    assert output.error is None
                    done[output.request_id] = [c.token_ids for c in output.outputs]
        assert_idle(engine)
    for index, (key, prompt) in enumerate(zip(ids, given)):
        expected = solo(name, tuple(prompt), names[index])
        if index == 3:
            assert done[key] != expected and done[key][0] == expected[0][: len(done[key][0])]
        else:
            assert done[key] == expected, names[index]


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("name", _types(but=WITHOUT_KV))
def test_preempted_requests_go_on(name: str, way: Any) -> None:
    names = ["greedy", "samples", "beams", "greedy", "greedy"]
    given = prompts(12, 9, 11, 17, 6)
    with engine_of(name, num_blocks=20, preemption=way) as engine:
        outputs = engine.generate(given, [config(each) for each in names])
        stats = engine.stats()
        assert_idle(engine)
    assert stats.preemptions_recompute + stats.preemptions_swap > 0
    for output, prompt, each in zip(outputs, given, names):
        assert [c.token_ids for c in output.outputs] == solo(name, tuple(prompt), each)


@pytest.mark.covering(1)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", _types(but=("bloom", "mvp")))
def test_an_interrupted_step_is_computed_again(name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C before and after the states of a step are put: sequences whose states are lost are computed again."""
    put, rng = States.put, random.Random(1)
    struck: list[int] = []

    def interrupted(self: States, *args: Any) -> None:
        if when == "after":
            put(self, *args)
        if len(struck) < 6 and rng.random() < 0.5:
            struck.append(0)
            raise KeyboardInterrupt
        if when == "before":
            put(self, *args)

    names = options_of(name, "greedy", "samples", "beams")
    given = prompts(5, 12, 8)
    with engine_of(name) as engine:
        monkeypatch.setattr(States, "put", interrupted)
        ids = [engine.add_request(prompt, config(each)) for prompt, each in zip(given, names)]
        done, strikes = {}, 0
        while engine.has_unfinished_requests():
            try:
                done.update({o.request_id: o for o in engine.step() if o.finished})
            except KeyboardInterrupt:
                strikes += 1
        monkeypatch.setattr(States, "put", put)
        assert_idle(engine)
    assert strikes > 2
    for key, prompt, each in zip(ids, given, names):
        assert done[key].error is None
        assert [c.token_ids for c in done[key].outputs] == solo(name, tuple(prompt), each)


def test_prompt_logprobs_of_a_row() -> None:
    given = prompts(6, 9)
    with engine_of("bloom") as engine:
        outputs = engine.generate(given, config("greedy"), prompt_logprobs=[1, None])
    ids = torch.tensor([given[0]])
    expected = model_of("bloom")(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    found = [value for value in outputs[0].prompt_logprobs if value is not None]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(("name", "words"), [
    ("bloom", "many sequences in one forward"), ("lfm2", "many sequences in one forward"),
    ("mvp", "sequences of equal length"), ("mamba", "many sequences in one forward"),
    ("rwkv", "one sequence at a time"), ("llama", None),
])  # fmt: skip
def test_check_says_how_the_engine_computes(name: str, words: str | None) -> None:
    report = hf_paged.check(model_of(name))
    assert (words in str(report)) if words else not report.together
    assert report.engine_only == (name in WITHOUT_KV)


def test_check_names_the_kinds_of_memory() -> None:
    def kinds(name: str) -> list[tuple[str, int | None]]:
        return [(kind.name, kind.size) for kind in hf_paged.check(model_of(name)).memory]

    assert kinds("llama") == [("full", None)]
    assert sorted(kinds("llama4_text")) == [("chunk", 8), ("full", None)]
    assert kinds("lfm2") == [("full", None), ("state", None)]
    assert kinds("mamba") == [("state", None)]
    with Engine(model_of("lfm2"), {"block_size": 4, "num_blocks": 8}) as engine:
        full, state = hf_paged.check(model_of("lfm2")).memory
        assert 4 * full.bytes_per_token == engine._memory.pool.bytes_per_block
        assert state.bytes_per_sequence == sum(bound_model(engine).state_bytes.values())
        engine.generate([[5, 6]], config("greedy", 1))
        (row,) = states_of(engine)._rows.values()
        assert state.bytes_per_sequence == row.batch.nbytes
    growing = hf_paged.check(model_of("deepseek_v32")).memory[-1]
    assert growing.name == "state" and growing.bytes_per_token > 0


def test_generate_has_nothing_to_page_without_kv() -> None:
    with pytest.raises(hf_paged.UnsupportedModelError, match="no K/V"):
        model_of("mamba").generate(torch.tensor([[7, 8]]), cache_implementation="paged")
    with pytest.raises(ValueError, match=r"num_blocks=9: MambaForCausalLM keeps states .* no blocks"):
        Engine(model_of("mamba"), CacheConfig(num_blocks=9))


def test_states_take_their_share_of_the_memory() -> None:
    with Engine(model_of("lfm2"), CacheConfig(block_size=4, memory="1MiB")) as engine:
        assert engine.scheduler_config.max_num_seqs == SchedulerConfig().max_num_seqs
        pool = engine._memory.pool
        assert (1 << 20) - pool.bytes_per_block < pool.nbytes <= 1 << 20  # of which states take what they need
    for caching, copies, more in ((None, 2, 3), (False, 1, 0)):  # one and three more for checkpoints
        with Engine(model_of("mamba"), CacheConfig(memory="1MiB"), {"prefix_caching": caching}) as engine:
            bound = bound_model(engine)
            size, joined = (sum(sizes.values()) for sizes in (bound.state_bytes, bound.tensor_bytes))
            expected = ((1 << 20) - more * size) // (copies * size + joined)
            assert engine.scheduler_config.max_num_seqs == min(expected, SchedulerConfig().max_num_seqs)
    with pytest.raises(ValueError, match="holds no states of a sequence"):
        Engine(model_of("mamba"), CacheConfig(memory="1KiB"))


def tree(*values: float) -> Any:
    """A state whose rows have these values."""
    return [{"a": {0: torch.tensor(values)[:, None].expand(-1, 3).clone(), 1: None}, "n": 2}, {"b": torch.tensor(7)}]


def values(state: Any) -> list[float]:
    return state[0]["a"][0][:, 0].tolist()


def test_states_are_copied_joined_and_forked() -> None:
    states = States()
    states.put([(1, 5), (2, 3)], tree(1.0, 2.0))
    states.put([(3, 4)], tree(3.0))
    joined = states.joined([(2, 3), (3, 4), (1, 5)])
    assert values(joined) == [2.0, 3.0, 1.0] and joined[1]["b"] == 7 and joined[0]["a"][1] is None
    joined[0]["a"][0].zero_()
    assert values(states.joined([(2, 3), (3, 4), (1, 5)])) == [2.0, 3.0, 1.0]
    states.fork(2, 9)
    taken = states.take([(2, 3)])
    taken[0]["a"][0].zero_()
    assert not states.has(2, 3) and states.has(9, 3)
    assert values(states.joined([(9, 3), (1, 5)])) == [2.0, 1.0]
    states.put([(2, 4)], taken)
    with pytest.raises(KeyError):
        states.joined([(2, 3)])
    assert values(states.joined([(2, 4), (9, 3)])) == [0.0, 2.0]


def test_states_of_the_same_rows_stay_where_they_are() -> None:
    """A batch that decodes again is not copied; one that others use, or that is a checkpoint, is."""
    states = States()
    given = tree(1.0, 2.0)
    states.put([(1, 5), (2, 3)], given)
    taken = states.take([(1, 5), (2, 3)])
    assert taken[0]["a"][0] is given[0]["a"][0]
    states.put([(1, 6), (2, 4)], taken)
    row = states.nbytes // 2
    assert states.take([(2, 4), (1, 6)])[0]["a"][0] is not given[0]["a"][0]  # in another order
    assert states.nbytes == 0
    states.put([(1, 6), (2, 4)], given)
    states.keep(1, 6, 7)
    states.fork(1, 3)
    given[0]["a"][0] = states.take([(1, 6), (2, 4)])[0]["a"][0].zero_()
    states.put([(1, 7), (2, 5)], given)
    states.restore(7, 4, 6)
    assert values(states.joined([(3, 6), (4, 6), (1, 7)])) == [1.0, 1.0, 0.0]
    states.take([(4, 6)])[0]["a"][0].zero_()
    states.restore(7, 4, 6)
    assert values(states.joined([(4, 6)])) == [1.0]
    assert states.nbytes <= 4 * row + 16  # of 1 and 2, of 3, and the checkpoint


def test_states_of_other_shapes_are_told_apart() -> None:
    states = States()
    states.put([(1, 1)], tree(1.0))
    states.put([(2, 1)], tree(2.0))
    for key, other in enumerate((3, torch.zeros(1, 4), "x"), 3):
        changed = tree(1.0)
        changed[0]["n"] = other
        states.put([(key, 1)], changed)
    numbers = [states.shape_number(key, 1) for key in range(1, 6)]
    assert numbers[0] == numbers[1] and len(set(numbers)) == 4


def test_few_rows_do_not_keep_a_large_batch() -> None:
    states = States()
    row = torch.zeros(1, 3).nbytes + torch.tensor(7).nbytes
    for first in range(0, 40, 10):
        states.put([(key, 1) for key in range(first, first + 10)], tree(*map(float, range(first, first + 10))))
    for key in range(40):
        if key % 10:
            states.free(key)
    states.put([(99, 1)], tree(99.0))
    assert states.nbytes < 12 * row
    assert values(states.joined([(key, 1) for key in (0, 30, 10, 99)])) == [0.0, 30.0, 10.0, 99.0]


def test_what_cannot_be_copied_is_refused() -> None:
    made: Callable[[], object] = object
    with pytest.raises(TypeError, match="object"):
        States().put([(1, 1)], [{"a": made()}])


# -- positions, states and limits ----------------------------------------------------------------------------------


def hybrid_with_rope(**rope: Any) -> Any:
    """A model with states whose rotary frequencies depend on the longest sequence from 32 tokens on."""
    made = tiny_config("lfm2")
    parameters = {"rope_theta": 1e4, **rope}
    if rope["rope_type"] == "longrope":
        half = made.hidden_size // made.num_attention_heads // 2
        factors = {"short_factor": [1.0] * half, "long_factor": [3.0] * half, "factor": 8.0}
        parameters |= {**factors, "original_max_position_embeddings": 32}
    else:
        made.max_position_embeddings = 32
    made.rope_parameters = parameters
    torch.manual_seed(0)
    model = transformers.Lfm2ForCausalLM(made).float().eval()
    redraw(model, 0)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def test_prompts_in_chunks_beyond_the_short_factors() -> None:
    texts = prompts(45, 20, 60, 28)
    chunks = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8)
    with Engine(hybrid_with_rope(rope_type="longrope"), CacheConfig(block_size=4, num_blocks=100), chunks) as engine:
        outputs = engine.generate(texts, config("greedy"))
    for text, output in zip(texts, outputs):
        assert output.outputs[0].token_ids == expected(hybrid_with_rope(rope_type="longrope"), text, NEW)


def test_lengths_that_would_change_other_requests_are_refused() -> None:
    model = hybrid_with_rope(rope_type="dynamic", factor=4.0)
    with Engine(model, CacheConfig(num_blocks=20)) as engine, pytest.raises(ValueError, match="32"):
        engine.add_request(*prompts(45), config("greedy"))


def test_a_recomputation_keeps_no_state_of_each_token() -> None:
    model = model_of("lfm2")
    with Engine(model, CacheConfig(num_blocks=40), SchedulerConfig(max_num_seqs=4)) as engine:
        (text,) = prompts(4)
        name = engine.add_request(text, config("greedy", 60))
        for _ in range(50):
            engine.step()
        assert force_preempt(engine._scheduler, name, "recompute")
        engine.step()
        row_model = bound_model(engine)
        kept = row_model._rows.states.nbytes
        assert kept <= 2 * sum(row_model.state_bytes.values())  # with a checkpoint
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0].token_ids == expected(model, text, 60)


def expected(model: Any, text: list[int], new: int) -> list[int]:
    ids = torch.tensor([text])
    result = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config("greedy", new))
    return result[0, len(text) :].tolist()


def test_the_longest_request_of_a_model_without_blocks() -> None:
    with Engine(model_of("mamba")) as engine:
        assert engine.longest_request() > 1000


def test_a_cache_without_kv_follows_beams() -> None:
    model, options = model_of("mamba"), config("beams")
    ids = torch.tensor(prompts(9))
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
    cache, name = hf_paged.PagedKVCache(model.config), cache_argument(model)
    paged = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options, **{name: cache})
    assert torch.equal(paged, plain)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_attention_reads_blocks_where_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with prompts in the same step, forks, and preempted requests, which compute several tokens in one step."""

    given = prompts(5, 19, 1, 12)
    assert "block tables" in hf_paged.check(model_of(name)).together
    with engine_of(name) as engine:
        monkeypatch.setattr(CacheRows, "dense", mock.Mock(side_effect=AssertionError("a dense view was gathered")))
        outputs = engine.generate(given, config("greedy"))
        beams = engine.generate(given[:2], config("beams"))
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [solo(name, tuple(p), "greedy") for p in given]
    assert [[c.token_ids for c in o.outputs] for o in beams] == [solo(name, tuple(p), "beams") for p in given[:2]]


def test_positions_by_the_length_of_the_cache_are_packed() -> None:
    """BART's decoder numbers tokens from the length of its cache, and makes a mask of an encoder that is not there."""
    given = prompts(5, 19, 1, 12)
    assert hf_paged.check(model_of("bart")).native
    with engine_of("bart") as engine:
        outputs = engine.generate(given, config("greedy"))
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [solo("bart", tuple(p), "greedy") for p in given]


@pytest.mark.parametrize(("owner", "name"), [(rows.Rows, "_step"), (States, "take")])
def test_a_mistake_of_this_package_is_not_the_models(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """A method that does not exist would else turn models back to slower ways without a word."""
    model = tiny_model("lfm2")
    monkeypatch.delattr(owner, name)
    with pytest.raises(AttributeError, match=name):
        Engine(model)


def test_a_missing_attribute_that_the_model_asks_for_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("lfm2")
    own = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs[CACHE].something_else  # noqa: B018
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(hf_paged.UnsupportedModelError):
        Engine(model)


def test_states_that_grow_in_leaps() -> None:
    """A state that grew by several tokens at once when it was tried is not smaller than nothing."""
    assert all(size >= 0 for size in way_of(model_of("deepseek_v4")).state_bytes.values())


@pytest.mark.parametrize("token", [0, 3])
@pytest.mark.parametrize("name", ["bloom", "qwen3_next"])
@pytest.mark.covering(1)
def test_a_token_whose_embedding_is_nan(name: str, token: int) -> None:
    """No prompt has it, so it says nothing of the model."""
    model = tiny_model(name)
    model.get_input_embeddings().weight.data[token] = torch.nan
    assert "in one forward" in hf_paged.check(model).together


@pytest.mark.parametrize("name", ["bloom", "qwen3_next"])
def test_weights_that_are_nan(name: str) -> None:
    """Nothing is known of the model until they have been mended."""
    model = tiny_model(name)
    weight, own = model.lm_head.weight.data, model.lm_head.weight.data.clone()
    weight.fill_(torch.nan)
    assert "logits are NaN" in hf_paged.check(model).reason
    weight.copy_(own)
    assert hf_paged.check(model).supported and "refused" not in hf_paged.check(model).together
