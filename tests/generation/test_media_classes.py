"""Every class that generates text from images, videos or sound in the engine: tokens and log-probabilities of plain
`generate`, with whole prompts and with chunks that cut media."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.model.media import MediaPart, check_heard, placeholders, sound_overrides, step_arguments
from hf_paged.model.media_encoders import hear
from tests.architectures.media import CASES, TOKENS, Case, build, rows, takes_sizes
from tests.architectures.vision import Row, batch_of, doubled

QUICK = (
    "llava-image", "llava_onevision-image", "llava_onevision-video", "llava_next_video-video", "idefics2-image",
    "smolvlm-image", "cohere2_vision-image", "qwen2_vl-video", "qwen2_5_vl-image", "qwen2_5_vl-video", "qwen3_vl-video",
    "qwen3_vl_moe-image", "glm4v-video", "ernie4_5_vl_moe-image", "video_llava-video", "qwen3_asr-audio",
    "voxtral-audio", "qwen2_audio-audio", "audioflamingo3-audio", "granite_speech-audio", "qwen2_5_omni_thinker-audio",
    "qwen2_5_omni_thinker-image", "lfm2_vl-image", "qwen3_5-image", "lfm3_vl-video", "llama4-image",
    "granite4_vision-image", "fuyu-image", "emu3-image",
)  # fmt: skip
TOLERANCE = 2e-5
ROUNDED = (
    "cosmos3_edge-image", "deepseek_ocr2-image", "deepseek_vl_hybrid-image", "ernie4_5_vl_moe-image",
    "glm_ocr-video", "got_ocr2-image", "granite4_vision-image", "granite_speech-audio", "granite_speech_plus-audio",
    "hyperclovax_vision_v2-video", "llava-image", "llava_next-image", "llava_next_video-image", "minicpm_ocr-image",
    "minicpmv4_7-image", "ovis2-image", "qwen2_5_omni_thinker-video", "qwen3_5-image", "video_llama_3-video",
)  # fmt: skip
"""With these weights, plain `generate` in float32 differs from float64 by 2e-5 to 1e-2, and from us by up to 2.6e-4.
So these are compared in float64."""


SIZED = ("mistral3-image", "qwen3_vl-video", "qwen3_asr-audio")
"""Of the media of several sizes, these are quick."""
FEW = ("llava-image", "glm46v-image", "voxtral-audio")
"""Of the tests with all options, these are quick; the others are in `test_every_...`, which .ci/run leaves out."""
OTHERS = tuple(name for name in CASES if name not in FEW)


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]


def later(name: str, row: Row, answer: list[int], more: Row) -> Row:
    """A second turn: the first one's prompt, its answer, and another prompt with a medium."""
    inputs = {}
    for key, own in row.inputs.items():
        if key.endswith("type_ids"):
            own, dim = torch.cat([own, torch.zeros(1, len(answer), dtype=own.dtype)], 1), 1
        elif name.startswith("minicpm"):
            dim = -1 if key == "pixel_values" else 0
        else:
            dim = 1 if name in IN_A_ROW else 0
        inputs[key] = torch.cat([own, more.inputs[key]], dim)
    return Row([*row.ids, *answer, *more.ids], inputs)


IN_A_ROW = ("idefics2-image", "idefics3-image", "smolvlm-image", "granite_docling-image")
"""Whose processors give a prompt one row of images."""


def config() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)


def plain(model: Any, row: Row, forced: list[int] | None = None) -> tuple[list[int], torch.Tensor]:
    """forced: the new tokens, whose log-probabilities are returned."""
    ids = torch.tensor([row.ids])
    processors = [] if forced is None else [Forced(len(row.ids), forced)]
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **row.inputs, generation_config=config(),
        output_logits=True, return_dict_in_generate=True, logits_processor=processors,
    )  # fmt: skip
    tokens = output.sequences[0, len(row.ids) :]
    logprobs = torch.stack(output.logits)[:, 0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs


class Forced(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, start: int, tokens: list[int]) -> None:
        self._start, self._tokens = start, tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._start]] = 0
        return forced


def other(row: Row) -> Row:
    """The same prompt with other media."""
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: value + 0.5 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in row.inputs.items()
    }
    return Row(row.ids, changed)


def made(name: str, *, sizes: bool = False, in_double: bool = False) -> tuple[Any, list[Row]]:
    """The model and its prompts, in float64 where that is needed, or for all: padding, and unlikely tokens, whose
    log-probabilities are large, come with more rounding. sizes: see `rows`."""
    model = build(CASES[name])
    prompts = rows(model, CASES[name], sizes=sizes)
    if name not in ROUNDED and (not in_double or name.startswith("inkling2")):  # which takes no float64
        return model, prompts
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # others take no float64
    return model.double(), [doubled(row) for row in prompts]


@pytest.mark.quick_cases("[llava-", "qwen3_5-image", "voxtral")
@pytest.mark.parametrize("name", cases())
def test_equal_to_generate(name: str) -> None:
    model, prompts = made(name)
    expected = [plain(model, row) for row in prompts]
    changed = plain(model, other(prompts[0]))[1]
    assert (changed - expected[0][1]).abs().max() > 1e-3, "the model does not see its media"
    check_engine(model, prompts, expected)


@pytest.mark.quick_cases("image")
@pytest.mark.parametrize("name", SIZED)
def test_several_sizes(name: str) -> None:
    """A prompt with a large and a small medium, beside others with one of them."""
    model, prompts = made(name, sizes=True, in_double=True)
    expected = [plain(model, row) for row in prompts]
    check_engine(model, prompts, expected)
    for row, (tokens, logprobs) in zip(prompts, expected):
        output = generated(model, [row], route_of(name), cache_implementation="paged")
        assert output.sequences[0, len(row.ids) :].tolist() == tokens
        found = torch.stack(output.logits)[:, 0].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(found, logprobs, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if takes_sizes(CASES[name]) and name not in SIZED])
def test_every_class_of_several_sizes(name: str) -> None:
    test_several_sizes(name)


def check_engine(model: Any, prompts: list[Row], expected: list[tuple[list[int], torch.Tensor]]) -> None:
    for budget in (512, 16, 5):
        with Engine(model, CacheConfig(memory="4MiB", block_size=4), {"max_num_batched_tokens": budget}) as engine:
            names = [engine.add_request(row.ids, config(), inputs=row.inputs) for row in prompts]
            finished = {}
            while engine.has_unfinished_requests():
                finished.update({output.request_id: output for output in engine.step() if output.finished})
        for request, (tokens, logprobs) in zip(names, expected):
            output = finished[request]
            assert output.error is None and output.outputs[0].token_ids == tokens
            torch.testing.assert_close(
                torch.tensor(output.outputs[0].logprobs), logprobs.float(), atol=TOLERANCE, rtol=0
            )


@pytest.mark.quick_cases("[llava-", "qwen3_5-image", "voxtral")
@pytest.mark.parametrize("name", cases())
def test_two_turns(name: str) -> None:
    """The second request begins with the first one and its answer, and shows another medium beside."""
    model, (first, _, last) = made(name)
    with Engine(model, CacheConfig(memory="1MiB", block_size=4)) as engine:
        engine.add_request(first.ids, config(), inputs=first.inputs)
        (answer,) = [output for output in _run(engine) if output.finished]
        tokens = [token if token < 90 else 7 for token in answer.outputs[0].token_ids]
        row = later(name, first, tokens, last)
        engine.add_request(row.ids, config(), inputs=row.inputs)
        (output,) = [output for output in _run(engine) if output.finished]
    expected, logprobs = plain(model, row)
    assert output.error is None and output.outputs[0].token_ids == expected
    torch.testing.assert_close(torch.tensor(output.outputs[0].logprobs), logprobs.float(), atol=TOLERANCE, rtol=0)


MIXED = (
    "glm4v-image", "glm46v-image", "glm4v_moe-image", "glm_ocr-image", "glm5_next-image", "granite4_vision-image",
    *(name for name in CASES if name.endswith("-audio")),
)  # fmt: skip
"""transformers gives the samples and beams of a prompt with two media other features than those of the prompt."""
WAYS: dict[str, dict[str, Any]] = {
    "samples": {"do_sample": True, "num_return_sequences": 2, "temperature": 0.8},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FEW)
def test_samples_and_beams(name: str, way: str) -> None:
    """Two of each prompt, in the engine and in `generate`, with the random numbers of plain `generate`. The engine's
    log-probabilities are those of one sequence alone, also where transformers mixes up the media of several."""
    model, prompts = made(name, in_double=True)
    options = config()
    options.update(**WAYS[way])
    options.seed = 5
    runs = []
    for budget in (512, 5):
        with Engine(model, CacheConfig(memory="4MiB", block_size=4), {"max_num_batched_tokens": budget}) as engine:
            names = [engine.add_request(row.ids, options, inputs=row.inputs) for row in prompts]
            finished = {output.request_id: output for output in _run(engine) if output.finished}
        assert not any(output.error for output in finished.values())
        runs.append([finished[request].outputs for request in names])
    found = [[each.token_ids for each in outputs] for outputs in runs[0]]
    assert [[each.token_ids for each in outputs] for outputs in runs[1]] == found
    for row, whole, in_chunks in zip(prompts, *runs):
        for pair in zip(whole, in_chunks):
            if name == "janus-image":  # whose `generate` leaves processors out
                continue
            _, logprobs = plain(model, row, pair[0].token_ids)
            for each in pair:
                torch.testing.assert_close(torch.tensor(each.logprobs), logprobs.float(), atol=TOLERANCE, rtol=0)
    if name in PLAIN_FAILS:
        pytest.skip("transformers fails: it repeats the features of a prompt's media wrongly, or not at all")
    for number, row in enumerate(prompts):
        is_mixed = name in MIXED and number == 1
        expected = generated(model, [row], **WAYS[way])
        if not is_mixed:
            assert found[number] == expected.sequences[:, len(row.ids) :].tolist()
        route = "hf_loop" if is_mixed and name.endswith("-audio") else route_of(name)
        for chunk in chunks_of(name, route, 5):
            paged = generated(model, [row], route, **WAYS[way], cache_implementation="paged", prefill_chunk_size=chunk)
            check_equal(paged, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OTHERS)
def test_every_class_of_samples_and_beams(name: str, way: str) -> None:
    test_samples_and_beams(name, way)


def generated(model: Any, prompts: list[Row], route: str | None = None, **options: Any) -> Any:
    """What `generate` returns for a batch. route: that of a paged call."""
    torch.manual_seed(5)
    with hf_paged.record_calls() as calls:
        output = model.generate(
            **batch_of(prompts), max_new_tokens=8, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            **{"do_sample": False, **options},
        )  # fmt: skip
    if route is not None:
        assert calls[0].route == route, calls[0].reason
        assert route == "packed" or any(reason in calls[0].reason for reason in REASONS)
    return output


def check_equal(paged: Any, expected: Any) -> None:
    assert torch.equal(paged.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(paged.logits), torch.stack(expected.logits), atol=TOLERANCE, rtol=0)


REASONS = ("it keeps a state per row", "several sounds")
"""Why transformers' loop is taken."""


def route_of(name: str) -> str:
    return "hf_loop" if name.split("-")[0] in STATES else "packed"


def chunks_of(name: str, route: str, *sizes: int) -> tuple[int | None, ...]:
    """For `prefill_chunk_size`: those with which a call is packed."""
    is_whole = route == "hf_loop" or name.split("-")[0] in ROWS
    return (None,) if is_whole else (None, *sizes)


ROWS = ("lfm2_vl", "lfm3_vl", "qwen3_5", "qwen3_5_moe", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
"""They keep states beside K/V: with `prefill_chunk_size`, paged calls take transformers' loop."""


@pytest.mark.parametrize("name", FEW)
def test_pairs(name: str) -> None:
    """The second request with the same medium finds all full blocks, and no encoder runs. One with a medium of which
    one number differs finds nothing beyond the text before it."""
    model, (*_, row) = made(name)
    before = [5 + number % 80 for number in range(24)]  # states are kept after 32 tokens
    inputs = {
        key: torch.cat([torch.zeros(1, len(before), dtype=value.dtype), value], 1)
        if key.endswith("type_ids")
        else value
        for key, value in row.inputs.items()
    }
    row = Row([*before, *row.ids], inputs)
    first = min(place for places in placeholders(model, row.ids).values() for place in places)
    generator = torch.Generator().manual_seed(7)
    with Engine(model, CacheConfig(memory="8MiB", block_size=4)) as engine:

        def cached(row: Row) -> tuple[int, int]:
            """And how many media were encoded."""
            encoded = engine.stats().encoder_inputs
            engine.add_request(row.ids, config(), inputs=row.inputs)
            (output,) = [each for each in _run(engine) if each.finished]
            assert output.error is None
            return output.metrics.num_cached_tokens, engine.stats().encoder_inputs - encoded

        cached(row)  # which may leave hooks in the model
        for _ in range(3):
            pair = [dict(row.inputs), dict(row.inputs)]
            key = next(key for key, value in row.inputs.items() if value.is_floating_point())
            pair[0][key] = torch.randn(row.inputs[key].shape, generator=generator, dtype=row.inputs[key].dtype)
            pair[1][key] = pair[0][key].clone()
            pair[1][key].view(-1)[int(torch.randint(pair[1][key].numel(), (), generator=generator))] += 0.5
            one, other = (Row(row.ids, each) for each in pair)
            assert cached(one) <= (first // 4 * 4, 1)
            if name.split("-")[0] in STATES:  # of which no prefix can be kept
                assert (cached(one), cached(other)) == ((0, 0), (0, 1))
            else:
                assert cached(one) == ((len(row.ids) - 1) // 4 * 4, 0)
                assert cached(other) == (first // 4 * 4, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_class_of_pairs(name: str) -> None:
    test_pairs(name)


def _run(engine: Engine) -> Iterator[Any]:
    while engine.has_unfinished_requests():
        yield from engine.step()


def at_rates(row: Row) -> list[Row]:
    """A video of so many seconds for two frames: equal frames, and text after them whose positions go on otherwise."""
    return [Row(row.ids, {**row.inputs, "second_per_grid_ts": torch.tensor([rate])}) for rate in (1.0, 5.0)]


def test_equal_frames_at_another_rate() -> None:
    """Their positions in time are others: no prefix is shared, and later tokens go on as in `generate`."""
    case = CASES["qwen2_5_vl-video"]
    model = build(case)
    pair = at_rates(rows(model, case)[0])
    expected = [plain(model, row) for row in pair]
    assert (expected[0][1] - expected[1][1]).abs().max() > 1e-3
    with Engine(model, CacheConfig(memory="1MiB", block_size=4)) as engine:
        for row, (tokens, logprobs), cached in zip([*pair, *pair], expected * 2, [0, 4, 16, 16]):
            engine.add_request(row.ids, config(), inputs=row.inputs)
            while engine.has_unfinished_requests():
                outputs = engine.step()
            assert outputs[0].outputs[0].token_ids == tokens
            torch.testing.assert_close(torch.tensor(outputs[0].outputs[0].logprobs), logprobs, atol=TOLERANCE, rtol=0)
            assert outputs[0].metrics.num_cached_tokens == cached  # 4: what stands before the second frame
    batch = batch_of(pair)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    own, paged = (
        model.generate(**batch, **options, **more, return_dict_in_generate=True)
        for more in ({}, {"cache_implementation": "paged"})
    )
    assert torch.equal(own.sequences, paged.sequences)
    torch.testing.assert_close(torch.stack(paged.logits), torch.stack(own.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("cls", "model_type", "name"),
    [
        ("MusicFlamingoForConditionalGeneration", "musicflamingo", "input_features"),  # features depend on the prompt
        pytest.param(  # features are drawn; a large encoder
            "VibeVoiceAsrForConditionalGeneration", "vibevoice_asr", "input_values", marks=pytest.mark.slow
        ),
    ],
)
def test_sound_that_is_refused(cls: str, model_type: str, name: str) -> None:
    model = build(Case(cls, model_type, "audio", lambda *_: {}))
    message = f"inputs has '{name}': {cls} takes no such inputs in the engine"
    with Engine(model, CacheConfig(memory="1MiB")) as engine, pytest.raises(ValueError, match=message):
        engine.add_request([5, TOKENS["audio"], 6], config(), inputs={name: torch.zeros(1, 8, 8)})


def test_requests_with_the_image_token_for_images_and_for_videos() -> None:
    """GLM-4.1V writes one token for both, and one forward cannot tell them apart."""
    image, video = CASES["glm4v-image"], CASES["glm4v-video"]
    model = build(image)
    prompts = [rows(model, image)[0], rows(model, video)[0]]
    expected = [plain(model, row)[0] for row in prompts]
    with Engine(model, CacheConfig(memory="1MiB", block_size=4)) as engine:
        names = [engine.add_request(row.ids, config(), inputs=row.inputs) for row in prompts]
        finished = {}
        while engine.has_unfinished_requests():
            finished.update({output.request_id: output for output in engine.step() if output.finished})
    assert [finished[name].outputs[0].token_ids for name in names] == expected


def test_sound_of_others_is_encoded_while_the_function_is_replaced() -> None:
    """Another thread may use the model during a step."""
    case = CASES["voxtral-audio"]
    model = build(case)
    sound = case.make(model.config, 1, torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model.get_audio_features(**sound, return_dict=True).pooler_output
        (override,) = sound_overrides(model)
        override.apply(test_sound_of_others_is_encoded_while_the_function_is_replaced)
        try:
            assert "get_audio_features" in vars(model.model)
            assert torch.equal(model.get_audio_features(**sound, return_dict=True).pooler_output, expected)
        finally:
            override.undo(test_sound_of_others_is_encoded_while_the_function_is_replaced)
    assert "get_audio_features" not in vars(model.model)


ALONE = (
    "idefics2-image", "idefics3-image", "smolvlm-image", "granite_docling-image",  # processors pad images of a batch
    "llama4-image",  # counts the padding of a batch
)  # fmt: skip
STATES = ("qwen4_exp", "inkling2", "mistral_large4", "dots3_note", "glm5_next", "minimax_m3_vl, sparse")
"""Text takes transformers' loop too: they keep more than K/V and states."""
PLAIN_FAILS = ("glm4v-video", "glm46v-video", "glm_ocr-video", "llama4-image", "fuyu-image")
"""With beams or samples: transformers repeats the features of these wrongly, or not at all (`ValueError: torch.cat():
expected a non-empty list`, or `Image features and image tokens do not match`)."""


@pytest.mark.quick_cases("[llava-", "qwen3_5-image", "voxtral")
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", cases())
@pytest.mark.covering(1)
def test_generate_runs_packed(name: str, beams: int) -> None:
    model = build(CASES[name])
    prompts = rows(model, CASES[name])
    if name in ALONE:
        prompts = prompts[:1]
    elif beams > 1 and name.endswith("-audio"):
        prompts = prompts[::2]  # the second one has two sounds
    batch = batch_of(prompts)
    if beams > 1 and name in PLAIN_FAILS:
        pytest.skip("transformers fails")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    plain = model.generate(**batch, **options)
    with hf_paged.record_calls() as calls:
        paged = model.generate(**batch, **options, cache_implementation="paged")
    if name.split("-")[0] in STATES:
        assert calls[0].route == "hf_loop" and "it keeps a state per row" in calls[0].reason
    else:
        assert (calls[0].route, calls[0].reason) == ("packed", None)
    assert torch.equal(paged, plain)


@pytest.mark.covering(1)
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", FEW)
def test_batches(name: str, beams: int) -> None:
    """A batch of prompts with one medium, two, and none. The logits are those of plain `generate` for the batch, or for
    the prompt alone. Some layers compute in float32 in a model in float64 too (states, rotations), and padding changes
    how they round: seen were 8e-5 between plain's batch and float64 throughout, 3.3e-5 between a prompt alone and that,
    and no difference between ours and a prompt alone."""
    model, prompts = made(name, in_double=True)
    if name in ALONE:
        prompts = prompts[:1]
    elif beams > 1 and name.endswith("-audio"):
        prompts = prompts[::2]  # the second one has two sounds
    else:
        prompts = [*prompts, text_like(prompts[0])]
    if beams > 1 and name in PLAIN_FAILS:
        pytest.skip("transformers fails: it repeats the features of a prompt's media wrongly, or not at all")
    expected = generated(model, prompts, num_beams=beams)
    route = route_of(name)
    for chunk in chunks_of(name, route, 16, 5):
        paged = generated(
            model, prompts, route, num_beams=beams, cache_implementation="paged", prefill_chunk_size=chunk
        )
        assert torch.equal(paged.sequences, expected.sequences)
        found, logits = (torch.stack(each.logits).unflatten(1, (-1, beams)) for each in (paged, expected))
        for number, row in enumerate(prompts):
            theirs = logits[:, number]
            if (found[:, number] - theirs).abs().max() > TOLERANCE:  # where padding makes plain's rounding worse
                theirs = torch.stack(generated(model, [without_empty(row)], num_beams=beams).logits)
            torch.testing.assert_close(found[:, number], theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", OTHERS)
def test_every_class_in_batches(name: str, beams: int) -> None:
    test_batches(name, beams)


def text_like(row: Row) -> Row:
    """A prompt without media for the same batch."""
    ids = [5, 6, 7, 8, 9, 10, 11]
    inputs = {
        key: torch.zeros(1, len(ids), dtype=value.dtype) if key.endswith("type_ids") else none_of(key, value, row)
        for key, value in row.inputs.items()
    }
    return Row(ids, inputs)


def without_empty(row: Row) -> Row:
    """The prompt for a call of its own, in which inputs without an item are left out."""
    inputs = {key: value for key, value in row.inputs.items() if value.numel()}
    return Row(row.ids, {} if all(key.endswith("type_ids") for key in inputs) else inputs)


def none_of(key: str, value: torch.Tensor, row: Row) -> torch.Tensor:
    return value[..., :0] if key == "pixel_values" and "target_sizes" in row.inputs else value[:0]


def test_several_sounds_of_a_prompt_with_beams_take_the_loop() -> None:
    """Which repeats each sound as often as the prompt, so that a beam's second one is its first again."""
    case = CASES["voxtral-audio"]
    model = build(case)
    batch = batch_of(rows(model, case))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
    with hf_paged.record_calls() as calls:
        paged = model.generate(**batch, **options, cache_implementation="paged")
    assert calls[0].route == "hf_loop" and "several sounds" in calls[0].reason
    assert torch.equal(paged, model.generate(**batch, **options))


def test_a_forward_that_asks_for_no_sound_is_noticed() -> None:
    """Gemma 4 encodes sound with a mask beside it, which a step does not give: the placeholders would stay."""
    case = CASES["voxtral-audio"]
    model = build(case)
    sound = case.make(model.config, 1, torch.Generator().manual_seed(5))
    with torch.no_grad():
        features = hear(model, sound, 1)
    arguments = step_arguments([MediaPart(0, 4, features, None, {}, None)])
    with pytest.raises(hf_paged.UnsupportedModelError, match=r"Voxtral.* encodes sound in a way of its own"):
        check_heard(model, arguments)
