"""Encoder-decoder models in the engine: each request has the tokens of plain `generate` for its row alone."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.features.encoder_decoder.encoders import EncoderTables
from tests import encoder_models
from tests.architectures.encoder_inputs import encoder_rows
from tests.architectures.tiny import tiny_model
from tests.generation.solo import ended
from tests.generation.test_encoder_decoder import MODES, OPTIONS
from tests.preempting import force_preempt

Row = dict[str, torch.Tensor]


@functools.cache
def model_of(name: str) -> Any:
    if name in encoder_models.NAMES:
        return encoder_models.model(name)
    model = tiny_model(name)
    model.generation_config.decoder_start_token_id = 1
    return model


def rows_of(name: str, count: int = 4) -> list[Row]:
    """Inputs of one row each, without padding."""
    if name not in encoder_models.NAMES:
        generator = torch.Generator().manual_seed(0)
        return [{"input_ids": torch.randint(6, 90, (1, size), generator=generator)} for size in (5, 19, 12, 26)]
    given = encoder_models.inputs(name, count)
    rows = []
    for row in range(count):
        own = {key: value[row : row + 1] for key, value in given.items()}
        length = int(own["attention_mask"].sum()) if "attention_mask" in own else None
        rows.append({key: value[:, :length] for key, value in own.items()})
        if name == "whisper":  # its own `generate` is another one
            rows[-1]["decoder_input_ids"] = torch.tensor([[3, 11 + row][: 1 + row % 2]])
    return rows


def request(row: Row) -> tuple[list[int], Row]:
    """The prompt, and the `inputs`."""
    inputs = dict(row)
    ids = inputs.pop("input_ids", None)
    return ([] if ids is None else ids[0].tolist()), inputs


def config(seed: int | None = None, **options: Any) -> Any:
    options |= {} if seed is None else {"seed": seed}
    return transformers.GenerationConfig(**{"max_new_tokens": 12, "pad_token_id": encoder_models.PAD, **options})


def solo(name: str, row: Row, made: Any) -> list[list[int]]:
    """The tokens of plain `generate` for this row alone, after the decoder's prompt."""
    model, begin = model_of(name), row.get("decoder_input_ids", torch.zeros(1, 1)).shape[1]
    if (seed := getattr(made, "seed", None)) is not None:
        torch.manual_seed(seed)
    plain = transformers.GenerationMixin.generate(model, **copy.deepcopy(row), generation_config=made)
    eos = made.eos_token_id or model.generation_config.eos_token_id
    ends = eos if isinstance(eos, list) else [eos]
    found = []
    for tokens in plain[:, begin:].tolist():
        end = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        found.append(tokens[:end])
    return found


def skip_if_forwards_draw(name: str, row: Row) -> None:
    """transformers before 5.18 draws a number for each layer that training might leave out, in evaluation too."""
    model_of(name)
    state = torch.get_rng_state()
    solo(name, row, config(max_new_tokens=1))
    if not torch.equal(state, torch.get_rng_state()):
        pytest.skip("forwards draw random numbers: the tokens of a seed depend on the forwards before")


def tokens_of(output: Any) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


def engine_of(name: str, num_blocks: int = 200, **options: Any) -> Engine:
    return Engine(model_of(name), CacheConfig(num_blocks=num_blocks, block_size=4), SchedulerConfig(**options))


def assert_idle(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.stats().blocks_used == 0
    engine.clear_prefix_cache()
    assert engine.stats().blocks_free == engine.stats().num_blocks


@pytest.mark.quick_cases("[bart", "[t5", "[whisper")
@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "m2m100", "moonshine", "trocr"])
def test_tokens_are_those_of_plain_generate(name: str) -> None:
    given = [(row, config(seed, **options)) for options in MODES.values() for seed, row in enumerate(rows_of(name))]
    asked, configs = [request(row) for row, _ in given], [made for _, made in given]
    with engine_of(name, 600) as engine:
        outputs = engine.generate([prompt for prompt, _ in asked], configs, inputs=[inputs for _, inputs in asked])
        assert_idle(engine)
    distinct: dict[str, set[int]] = {mode: set() for mode in MODES}
    modes = [mode for mode in MODES for _ in rows_of(name)]
    for mode, (row, made), output in zip(modes, given, outputs, strict=True):
        assert tokens_of(output) == solo(name, row, made), mode
        distinct[mode].update(token for own in tokens_of(output) for token in own)
    assert min(map(len, distinct.values())) > 2


GATHERED = tuple(f"{kind}ForConditionalGeneration" for kind in ("FSMT", "LED", "Mvp", "ProphetNet", "T5Gemma2"))
"""Decoders with attention of their own."""


@pytest.mark.quick_cases("[bart", "[t5", "[whisper")
@pytest.mark.parametrize("name", ["bart", "t5", "whisper", *GATHERED, "T5GemmaForConditionalGeneration"])
def test_rows_of_different_lengths(name: str) -> None:
    """Each request begins some steps after the one before it."""
    rows = rows_of(name)
    made = config(max_new_tokens=9, eos_token_id=[98])
    with engine_of(name) as engine:
        ids, done = [], {}
        for row in (*rows, *rows):
            prompt, inputs = request(row)
            ids.append(engine.add_request(prompt, made, inputs=inputs))
            for output in [*engine.step(), *engine.step()]:
                done[output.request_id] = output
        done |= ended(engine)
        assert_idle(engine)
    expected = [solo(name, row, made) for row in rows]
    assert [tokens_of(done[each]) for each in ids] == [*expected, *expected]


def test_a_model_without_input_embeddings() -> None:
    name = "PPFormulaNetForConditionalGeneration"
    model, made = model_of(name), config(max_new_tokens=4, eos_token_id=[98])
    with pytest.raises(NotImplementedError):
        model.get_input_embeddings()
    rows = encoder_rows(model)[:1]
    with engine_of(name) as engine:
        outputs = engine.generate([[]], made, inputs=rows)
    assert [tokens_of(output) for output in outputs] == [solo(name, row, made) for row in rows]


def test_gathered_keys_and_values_in_eight_bits() -> None:
    """The engine reads what a call of `generate` reads."""
    name = "trocr"
    rows, dtypes = rows_of(name), {"key_dtype": "int8", "value_dtype": "int8"}
    made = config(eos_token_id=[98])
    asked = [request(row) for row in rows]
    with Engine(model_of(name), CacheConfig(num_blocks=200, block_size=4, **dtypes)) as engine:
        outputs = engine.generate([prompt for prompt, _ in asked], made, inputs=[inputs for _, inputs in asked])
        assert_idle(engine)
    for output, row in zip(outputs, rows):
        paged = model_of(name).generate(
            **row, generation_config=made, cache_implementation="paged", cache_config=dtypes
        )
        assert tokens_of(output) == paged[:, 1:].tolist()


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "prompt"])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_options(name: str, options: str) -> None:
    rows, made = rows_of(name)[:2], config(5, **OPTIONS[options])
    with engine_of(name) as engine:
        for row in rows:
            prompt, inputs = request(row)
            (output,) = engine.generate([prompt], made, inputs=inputs)
            assert tokens_of(output) == solo(name, row, made)


# -- what is shared ---------------------------------------------------------------------------------------------------


def test_beams_share_the_encoders_blocks() -> None:
    row = rows_of("whisper")[0]
    used = {}
    for beams in (1, 8):
        with engine_of("whisper") as engine:
            prompt, inputs = request(row)
            engine.add_request(prompt, config(num_beams=beams, eos_token_id=[98], max_new_tokens=3), inputs=inputs)
            engine.step()
            engine.step()
            (table,) = engine._scheduler.side(EncoderTables)._tables.values()
            used[beams] = table.num_blocks
            assert engine.stats().blocks_used <= table.num_blocks + 2 * beams
    assert used[8] <= 1.1 * used[1] and used[1] > 10


def test_equal_inputs_are_encoded_once_now_and_later() -> None:
    rows = rows_of("whisper")
    first, other = request(rows[0])[1], request(rows[1])[1]
    first["decoder_input_ids"] = other["decoder_input_ids"] = torch.tensor([[3, 11, 12, 13, 14, 15]])
    with engine_of("whisper", 400) as engine:
        asked = [first, {name: tensor.clone() for name, tensor in first.items()}, other]
        outputs = engine.generate([[]] * 3, config(), inputs=asked)
        assert engine.stats().encoder_inputs == 2
        again = engine.generate([[]], config(num_beams=3), inputs=first)
        assert engine.stats().encoder_inputs == 2 and engine.stats().encoder_hits == 2
        salted = engine.generate([[]], config(), inputs=first, cache_salt="mine")
        assert engine.stats().encoder_inputs == 3
        # Equal prompts of the decoder, and other K/V.
        assert outputs[2].metrics.num_cached_tokens == 0 and again[0].metrics.num_cached_tokens > 0
        assert_idle(engine)
    expected = solo("whisper", first, config())
    assert tokens_of(outputs[0]) == tokens_of(outputs[1]) == tokens_of(salted[0]) == expected
    assert tokens_of(outputs[2]) == solo("whisper", other, config()) != expected
    assert tokens_of(again[0]) == solo("whisper", first, config(num_beams=3))


def test_inputs_that_the_caller_changes_later() -> None:
    """The encoder computes what was given, which requests with equal inputs find."""
    row = rows_of("whisper")[0]
    with engine_of("whisper") as engine:
        _prompt, inputs = request({name: tensor.clone() for name, tensor in row.items()})
        engine.add_request([], config(), inputs=inputs)
        for tensor in inputs.values():
            tensor.zero_()
        outputs = [*ended(engine).values()]
        outputs += engine.generate([[]], config(), inputs=request(row)[1])
        assert engine.stats().encoder_inputs == 1
    assert [tokens_of(output) for output in outputs] == [solo("whisper", row, config())] * 2


@pytest.mark.parametrize(("name", "targets"), [("bart", ["q_proj", "fc1"]), ("whisper", ["q_proj", "fc2"])])
def test_adapters_of_both_parts(name: str, targets: list[str]) -> None:
    """Requests with different adapters in one step; the encoder runs once for each input and adapter."""
    adapted = pytest.importorskip("tests.model.adapted")
    model = copy.deepcopy(encoder_models.model(name))
    for adapter in ("x", "y"):
        adapted.add(model, adapted.lora(targets), adapter)
    made, rows = config(num_beams=3, eos_token_id=[98]), rows_of(name, 2)
    asked = [(adapter, row) for adapter in ("x", "y", "x") for row in rows]
    with Engine(model.eval(), CacheConfig(num_blocks=300, block_size=4)) as engine:
        prompts, inputs = zip(*(request(row) for _, row in asked))
        names = [adapter for adapter, _ in asked]
        outputs = engine.generate(list(prompts), made, inputs=list(inputs), adapter=names, progress=False)
        assert engine.stats().encoder_inputs == 4
        assert_idle(engine)
    for output, (adapter, row) in zip(outputs, asked):
        adapted.activate(model, adapter)
        begin = row.get("decoder_input_ids", torch.zeros(1, 1)).shape[1]
        plain = transformers.GenerationMixin.generate(model, **copy.deepcopy(row), generation_config=made)
        assert tokens_of(output) == plain[:, begin:].tolist()
    assert len({str(tokens_of(output)) for output in outputs}) == 4


def test_a_language_is_heard_with_the_adapter_of_the_request() -> None:
    adapted = pytest.importorskip("tests.model.adapted")
    model = encoder_models.whisper()
    torch.manual_seed(0)
    for adapter in ("x", "y"):
        adapted.add(model, adapted.peft.LoraConfig(target_modules=["q_proj", "fc2"], init_lora_weights=False), adapter)
    recordings = torch.randn(6, 1, 8, 100, generator=torch.Generator().manual_seed(1))
    asked = [(adapter, sound) for adapter in ("x", "y") for sound in recordings]
    with Engine(model.eval(), CacheConfig(num_blocks=400, block_size=4)) as engine:
        outputs = engine.generate(
            [[]] * 12,
            config(max_new_tokens=1),
            inputs=[{"input_features": sound} for _, sound in asked],
            adapter=[adapter for adapter, _ in asked],
        )
        with pytest.raises(ValueError, match="its language cannot be heard"):
            engine.add_request([], inputs={"input_features": recordings[0].double()})
    heard = [output.prompt_token_ids[1] for output in outputs]
    expected = []
    for adapter, sound in asked:
        adapted.activate(model, adapter)
        expected.append(int(model.detect_language(sound)))
    assert heard == expected and heard[:6] != heard[6:]


def test_changed_weights_are_not_mixed_with_kept_states() -> None:
    model = copy.deepcopy(encoder_models.model("bart"))
    prompt = rows_of("bart")[0]["input_ids"][0].tolist()
    with Engine(model, CacheConfig(num_blocks=100, block_size=4)) as engine:
        engine.generate([prompt], config())
        with torch.no_grad():
            model.model.encoder.layers[0].fc1.weight.mul_(-2)
        (output,) = engine.generate([prompt], config())
        assert engine.stats().encoder_inputs == 2
    plain = model.generate(torch.tensor([prompt]), generation_config=config())
    assert tokens_of(output) == [plain[0, 1:].tolist()]


def test_sleep_goes_on_with_the_figures_and_the_tokens() -> None:
    rows, made = rows_of("bart"), config(max_new_tokens=20, eos_token_id=[98])
    with engine_of("bart") as engine:
        prompts = [request(row)[0] for row in (*rows, rows[0])]
        for prompt in prompts:
            engine.add_request(prompt, made)
        for _ in range(4):
            engine.step()
        before = engine.stats()
        assert (before.encoder_inputs, before.encoder_hits) == (4, 1)
        engine.sleep()
        engine.wake()
        after = engine.stats()
        assert (after.encoder_inputs, after.encoder_hits) == (4, 1)
        done = ended(engine)
        assert engine.stats().encoder_inputs == 8
        assert_idle(engine)
    assert [tokens_of(done[each]) for each in sorted(done)] == [solo("bart", row, made) for row in (*rows, rows[0])]


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.quick_cases("[t5", "[LED")
@pytest.mark.covering(1)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["t5", "whisper", "LEDForConditionalGeneration"])
def test_mixed_requests_with_preemption_and_aborts(name: str, preemption: Any) -> None:
    rng = random.Random(f"{name} {preemption}")
    rows = rows_of(name)
    skip_if_forwards_draw(name, rows[0])
    modes = list(MODES.values())
    asked: dict[str, tuple[int, Any]] = {}
    done: dict[str, Any] = {}
    aborted: set[str] = set()
    num_blocks = 60 if name == "whisper" else 34
    with engine_of(name, num_blocks, preemption=preemption, max_num_seqs=12, max_num_batched_tokens=16) as engine:
        while len(done) < 12:
            if len(asked) < 12 and rng.random() < 0.5:
                number = len(asked)
                seed = number % 7
                row, made = rng.randrange(4), config(seed, **modes[seed % 4], max_new_tokens=3 + 3 * (seed % 5))
                prompt, inputs = request(rows[row])
                asked[engine.add_request(prompt, made, inputs=inputs, priority=number % 2)] = row, made
            running = [group.request_id for group in engine._scheduler.running]
            if running and rng.random() < 0.2:
                force_preempt(engine._scheduler, rng.choice(running), preemption)
            if asked and rng.random() < 0.05:
                chosen = rng.choice(list(asked))
                if chosen not in done and engine.abort(chosen):
                    aborted.add(chosen)
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output
            engine.check_integrity()
        stats = engine.stats()
        assert (stats.preemptions_recompute if preemption == "recompute" else stats.preemptions_swap) > 1
        assert_idle(engine)
    known = functools.cache(
        lambda row, seed: solo(name, rows[row], next(m for r, m in asked.values() if m.seed == seed))
    )
    for request_id, (row, made) in asked.items():
        assert done[request_id].error is None
        if request_id not in aborted:
            assert tokens_of(done[request_id]) == known(row, made.seed), (request_id, row, made.seed)


def test_a_request_without_room_for_its_encoder_ends_alone() -> None:
    row = rows_of("whisper")[0]
    with engine_of("whisper", 9) as engine:
        prompt, inputs = request(row)
        (output,) = engine.generate([prompt], config(), inputs=inputs, raise_on_error=False)
        assert "too small" in output.error
        assert_idle(engine)


def test_a_failing_encoder_ends_its_request_alone() -> None:
    good, bad = rows_of("whisper")[:2]
    _prompt, inputs = request(bad)
    inputs["input_features"] = inputs["input_features"][..., :50]
    with engine_of("whisper") as engine:
        asked = [request(good)[1], inputs]
        outputs = engine.generate([[], []], config(), inputs=asked, raise_on_error=False)
        assert outputs[1].error is not None and "encoder failed" in outputs[1].error
        assert tokens_of(outputs[0]) == solo("whisper", good, config())
        assert_idle(engine)


def test_equal_inputs_that_the_decoder_cannot_read_end_their_requests_alone() -> None:
    good, bad = rows_of("moonshine")[:2]
    bad["attention_mask"] = torch.zeros_like(bad["attention_mask"])
    with engine_of("moonshine") as engine:
        outputs = engine.generate([[]] * 3, config(), inputs=[bad, dict(bad), good], raise_on_error=False)
        assert_idle(engine)
    assert all("is masked entirely" in output.error for output in outputs[:2])
    assert tokens_of(outputs[2]) == solo("moonshine", good, config())


@pytest.mark.parametrize("name", ["bart", "m2m100"])
def test_requests_go_as_far_as_the_models_positions(name: str) -> None:
    """The last token is not computed, so it needs no position."""
    row, most = rows_of(name)[0], hf_paged.check(model_of(name)).positions.decoder
    with engine_of(name, 400) as engine:
        prompt, inputs = request(row)
        made = config(max_new_tokens=most or 120, min_new_tokens=most or 120)
        (output,) = engine.generate([prompt], made, inputs=[inputs])
        assert tokens_of(output) == solo(name, row, made)
        if most is not None:
            with pytest.raises(ValueError, match=f"decoder has {most} positions"):
                engine.add_request(prompt, config(max_new_tokens=most + 1), inputs=inputs)
            long = {**inputs, "decoder_input_ids": torch.full((1, most + 1), 5)}
            with pytest.raises(ValueError, match=f"decoder_input_ids has .* decoder has {most} positions"):
                engine.add_request(prompt, config(), inputs=long)
        assert engine.longest_request() == (most or engine.longest_request())


def test_texts_go_as_far_as_the_encoders_positions() -> None:
    texts = [[5 + number % 90 for number in range(count)] for count in (80, 81)]
    with engine_of("bart") as engine:
        (output,) = engine.generate(texts[:1], config())
        assert tokens_of(output) == solo("bart", {"input_ids": torch.tensor(texts[:1])}, config())
        with pytest.raises(ValueError, match="encoder has 80 positions"):
            engine.add_request(texts[1], config())
    with pytest.raises(ValueError, match="encoder has 80 positions"):
        model_of("bart").generate(torch.tensor(texts[1:]), cache_implementation="paged")


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "prompt", "inputs", "message"), [
    ("whisper", [5, 6], {}, "reads input_features, no text"), ("whisper", [], {}, "inputs has no 'input_features'"),
    ("whisper", [], {"input_features": [[0.0]]}, "a list; a tensor of one row"),
    ("whisper", [], {"input_features": torch.zeros(2, 8, 100)}, r"of shape \(2, 8, 100\)"),
    ("t5", [5, 6], {"pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values"),
    ("t5", [5, 6], {"encoder_outputs": torch.zeros(1, 3, 4)}, "encoder_outputs"),
    ("t5", [5, 6], {"decoder_input_ids": torch.tensor([[1000]])}, "outside the vocabulary"), ("t5", [], {}, "empty"),
    ("t5", [5, 6], [torch.zeros(1)], "inputs=.*a dict of tensors by name"),
    ("whisper", [], {"input_features": torch.zeros(1, 8, 100).to_sparse()}, "layout torch.sparse_coo"),
])  # fmt: skip
def test_wrong_inputs_are_refused_by_name(name: str, prompt: Any, inputs: Any, message: str) -> None:
    with engine_of(name) as engine:
        with pytest.raises(ValueError, match=message):
            engine.add_request(prompt, config(), inputs=inputs)
        assert_idle(engine)


def test_a_mask_that_is_given_twice_is_refused() -> None:
    with engine_of("t5") as engine, pytest.raises(ValueError, match="attention_mask is given twice"):
        engine.add_request([5, 6], attention_mask=[1, 1], inputs={"attention_mask": torch.tensor([[1, 0]])})


@pytest.mark.parametrize("method", ["score", "cache_prefix"])
def test_methods_without_an_encoders_input_are_refused(method: str) -> None:
    arguments = ([[5, 6]], [[7]]) if method == "score" else ([5, 6],)
    with engine_of("t5") as engine, pytest.raises(hf_paged.UnsupportedModelError, match=method):
        getattr(engine, method)(*arguments)
