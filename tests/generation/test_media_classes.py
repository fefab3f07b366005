"""Every class that generates text from media in the engine: what plain `generate` gives, also with cut media."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.features.media.media import MediaPart, check_heard, sound_overrides, step_arguments
from hf_paged.features.media.media_encoders import hear
from tests.architectures.media import CASES, TOKENS, Case, build, rows, takes_sizes
from tests.architectures.vision import Row, batch_of, doubled
from tests.generation.solo import ended

QUICK = ("llava-image", "qwen3_5-image", "voxtral-audio")
MECHANISMS = (
    "llava_onevision-video", "idefics2-image", "cohere2_vision-image", "qwen2_vl-video", "qwen2_5_vl-image",
    "qwen3_vl-video", "glm4v-video", "ernie4_5_vl_moe-image", "qwen3_asr-audio", "granite_speech-audio",
    "qwen2_5_omni_thinker-audio", "lfm2_vl-image", "llama4-image", "granite4_vision-image", "fuyu-image",
)  # fmt: skip
"""Each has one of its own; others are in `test_every_class`, which .ci/run leaves out."""
TOLERANCE = 2e-5
ROUNDED = (
    "cosmos3_edge-image", "deepseek_ocr2-image", "deepseek_vl_hybrid-image", "ernie4_5_vl_moe-image",
    "glm_ocr-video", "got_ocr2-image", "granite4_vision-image", "granite_speech-audio", "granite_speech_plus-audio",
    "hyperclovax_vision_v2-video", "llava-image", "llava_next-image", "llava_next_video-image", "minicpm_ocr-image",
    "minicpmv4_7-image", "ovis2-image", "qwen2_5_omni_thinker-video", "qwen3_5-image", "video_llama_3-video",
)  # fmt: skip
"""With these weights, plain `generate` in float32 differs from float64 by 2e-5 to 1e-2, and from us by up to 2.6e-4.
So these are compared in float64."""


FEW = ("glm46v-image", "voxtral-audio")
"""Of the tests with all options, these are quick."""


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
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: value + 0.5 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in row.inputs.items()
    }
    return Row(row.ids, changed)


def made(name: str, *, sizes: bool = False, in_double: bool = False) -> tuple[Any, list[Row]]:
    """The model and its prompts, in float64 where rounding needs it, or for all. sizes: see `rows`."""
    model = build(CASES[name])
    prompts = rows(model, CASES[name], sizes=sizes)
    if name not in ROUNDED and (not in_double or name.startswith("inkling2")):  # which takes no float64
        return model, prompts
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # others take no float64
    return model.double(), [doubled(row) for row in prompts]


@pytest.mark.quick_cases("[llava-image]", "[voxtral-audio]")
@pytest.mark.parametrize("name", [name for name in (*QUICK, *MECHANISMS) if name in CASES])
def test_equal_to_generate(name: str) -> None:
    model, prompts = made(name)
    expected = [plain(model, row) for row in prompts]
    changed = plain(model, other(prompts[0]))[1]
    assert (changed - expected[0][1]).abs().max() > 1e-3, "the model does not see its media"
    check_engine(model, prompts, expected)
    check_second_turn(model, name, prompts)
    batch = batch_of(prompts[:1] if name in ALONE else prompts)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with hf_paged.record_calls() as calls:
        paged = model.generate(**batch, **options, cache_implementation="paged")
    if route_of(name) == "hf_loop":
        assert calls[0].route == "hf_loop" and "it keeps a state per row" in calls[0].reason
    else:
        assert (calls[0].route, calls[0].reason) == ("packed", None)
    assert torch.equal(paged, model.generate(**batch, **options))


@pytest.mark.parametrize("name", ["mistral3-image"])
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


def check_engine(model: Any, prompts: list[Row], expected: list[tuple[list[int], torch.Tensor]]) -> None:
    for budget in (512, 5):
        with Engine(model, CacheConfig(memory="4MiB", block_size=4), {"max_num_batched_tokens": budget}) as engine:
            names = [engine.add_request(row.ids, config(), inputs=row.inputs) for row in prompts]
            finished = ended(engine)
        for request, (tokens, logprobs) in zip(names, expected):
            output = finished[request]
            assert output.error is None and output.outputs[0].token_ids == tokens
            torch.testing.assert_close(
                torch.tensor(output.outputs[0].logprobs), logprobs.float(), atol=TOLERANCE, rtol=0
            )


def check_second_turn(model: Any, name: str, prompts: list[Row]) -> None:
    """The second request begins with the first one and its answer, and shows another medium beside."""
    first, _, last = prompts
    with Engine(model, CacheConfig(memory="1MiB", block_size=4)) as engine:
        engine.add_request(first.ids, config(), inputs=first.inputs)
        (answer,) = ended(engine).values()
        tokens = [token if token < 90 else 7 for token in answer.outputs[0].token_ids]
        row = later(name, first, tokens, last)
        engine.add_request(row.ids, config(), inputs=row.inputs)
        (output,) = ended(engine).values()
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
    """Two of each prompt, with the random numbers of plain `generate`; log-probabilities of one sequence alone."""
    model, prompts = made(name, in_double=True)
    options = config()
    options.update(**WAYS[way])
    options.seed = 5
    runs = []
    for budget in (512, 5):
        with Engine(model, CacheConfig(memory="4MiB", block_size=4), {"max_num_batched_tokens": budget}) as engine:
            names = [engine.add_request(row.ids, options, inputs=row.inputs) for row in prompts]
            finished = ended(engine)
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


REASONS = ("it keeps a state per row", "several recordings")
"""Why transformers' loop is taken."""


def route_of(name: str) -> str:
    return "hf_loop" if name.split("-")[0] in STATES else "packed"


def chunks_of(name: str, route: str, *sizes: int) -> tuple[int | None, ...]:
    """For `prefill_chunk_size`: those with which a call is packed."""
    is_whole = route == "hf_loop" or name.split("-")[0] in ROWS
    return (None,) if is_whole else (None, *sizes)


ROWS = ("lfm2_vl", "lfm3_vl", "qwen3_5", "qwen3_5_moe", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
"""They keep states beside K/V: with `prefill_chunk_size`, paged calls take transformers' loop."""


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
            (output,) = ended(engine).values()
            assert output.outputs[0].token_ids == tokens
            torch.testing.assert_close(torch.tensor(output.outputs[0].logprobs), logprobs, atol=TOLERANCE, rtol=0)
            assert output.metrics.num_cached_tokens == cached  # 4: what stands before the second frame
    batch = batch_of(pair)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    own, paged = (
        model.generate(**batch, **options, **more, return_dict_in_generate=True)
        for more in ({}, {"cache_implementation": "paged"})
    )
    assert torch.equal(own.sequences, paged.sequences)
    torch.testing.assert_close(torch.stack(paged.logits), torch.stack(own.logits), atol=1e-4, rtol=0)


def test_sound_that_is_refused() -> None:
    """Its features depend on the prompt."""
    cls = "MusicFlamingoForConditionalGeneration"
    model = build(Case(cls, "musicflamingo", "audio", lambda *_: {}))
    message = f"inputs has 'input_features': {cls} takes no such inputs in the engine"
    with Engine(model, CacheConfig(memory="1MiB")) as engine, pytest.raises(ValueError, match=message):
        engine.add_request([5, TOKENS["audio"], 6], config(), inputs={"input_features": torch.zeros(1, 8, 8)})


def test_requests_with_the_image_token_for_images_and_for_videos() -> None:
    """GLM-4.1V writes one token for both, and one forward cannot tell them apart."""
    image, video = CASES["glm4v-image"], CASES["glm4v-video"]
    model = build(image)
    prompts = [rows(model, image)[0], rows(model, video)[0]]
    expected = [plain(model, row)[0] for row in prompts]
    with Engine(model, CacheConfig(memory="1MiB", block_size=4)) as engine:
        names = [engine.add_request(row.ids, config(), inputs=row.inputs) for row in prompts]
        finished = ended(engine)
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
        prompts = prompts[::2]  # the second one has two recordings
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


def text_like(row: Row) -> Row:
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


CHECKS: dict[str, Callable[[str], None]] = {
    "tokens": test_equal_to_generate,
    "sizes": test_several_sizes,
    **{way: partial(test_samples_and_beams, way=way) for way in WAYS},
    **{f"a batch, {beams} beams": partial(test_batches, beams=beams) for beams in (1, 2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_every_class(name: str, check: str) -> None:
    if check == "sizes" and not takes_sizes(CASES[name]):
        pytest.skip("all its media have one size")
    CHECKS[check](name)


def test_several_sounds_of_a_prompt_with_beams_take_the_loop() -> None:
    """Which repeats each sound as often as the prompt, so that a beam's second one is its first again."""
    case = CASES["voxtral-audio"]
    model = build(case)
    batch = batch_of(rows(model, case))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": 2}
    with hf_paged.record_calls() as calls:
        paged = model.generate(**batch, **options, cache_implementation="paged")
    assert calls[0].route == "hf_loop" and "several recordings" in calls[0].reason
    assert torch.equal(paged, model.generate(**batch, **options))


def test_a_forward_that_asks_for_no_sound_is_noticed() -> None:
    """Gemma 4 encodes sound with a mask beside it, which a step does not give: the placeholders would stay."""
    case = CASES["voxtral-audio"]
    model = build(case)
    sound = case.make(model.config, 1, torch.Generator().manual_seed(5))
    with torch.no_grad():
        features = hear(model, sound, 1)
    arguments = step_arguments([MediaPart(0, 4, features, None, {}, None)])
    with pytest.raises(hf_paged.UnsupportedModelError, match=r"Voxtral.* encodes audio in a way of its own"):
        check_heard(model, arguments)
