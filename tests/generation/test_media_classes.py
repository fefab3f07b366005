"""Every class that generates text from images, videos or sound in the engine: tokens and log-probabilities of plain
`generate`, with whole prompts and with chunks that cut media."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.model.media import MediaPart, check_heard, sound_overrides, step_arguments
from hf_paged.model.media_encoders import hear
from tests.architectures.media import CASES, TOKENS, Case, build, rows
from tests.architectures.vision import Row, batch_of, doubled

QUICK = (
    "llava-image", "llava_onevision-image", "llava_onevision-video", "llava_next_video-video", "idefics2-image",
    "smolvlm-image", "cohere2_vision-image", "qwen2_vl-video", "qwen2_5_vl-image", "qwen2_5_vl-video", "qwen3_vl-video",
    "qwen3_vl_moe-image", "glm4v-video", "ernie4_5_vl_moe-image", "video_llava-video", "qwen3_asr-audio",
    "voxtral-audio", "audioflamingo3-audio", "granite_speech-audio", "qwen2_5_omni_thinker-audio",
    "qwen2_5_omni_thinker-image", "lfm2_vl-image", "qwen3_5-image", "lfm3_vl-video", "llama4-image",
    "granite4_vision-image", "fuyu-image", "emu3-image",
)  # fmt: skip
TOLERANCE = 2e-5
ROUNDED = (
    "deepseek_ocr2-image", "deepseek_vl_hybrid-image", "glm_ocr-video", "granite4_vision-image", "granite_speech-audio",
    "granite_speech_plus-audio", "hyperclovax_vision_v2-video", "llava_next-image", "llava_next_video-image",
    "minicpm_ocr-image", "ovis2-image",
    "qwen2_5_omni_thinker-video", "qwen3_5-image", "video_llama_3-video",
)  # fmt: skip
"""With these weights, plain `generate` in float32 differs from float64 by 2e-5 to 1e-2, and from us by up to 2.6e-4.
So these are compared in float64."""


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


def plain(model: Any, row: Row) -> tuple[list[int], torch.Tensor]:
    ids = torch.tensor([row.ids])
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **row.inputs, generation_config=config(),
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens = output.sequences[0, len(row.ids) :]
    logprobs = torch.stack(output.logits)[:, 0].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs


def other(row: Row) -> Row:
    """The same prompt with other media."""
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: value + 0.5 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in row.inputs.items()
    }
    return Row(row.ids, changed)


def made(name: str) -> tuple[Any, list[Row]]:
    """The model and its prompts, in float64 where that is needed."""
    model = build(CASES[name])
    prompts = rows(model, CASES[name])
    if name not in ROUNDED:
        return model, prompts
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # others take no float64
    return model.double(), [doubled(row) for row in prompts]


@pytest.mark.parametrize("name", cases())
def test_equal_to_generate(name: str) -> None:
    model, prompts = made(name)
    expected = [plain(model, row) for row in prompts]
    changed = plain(model, other(prompts[0]))[1]
    assert (changed - expected[0][1]).abs().max() > 1e-3, "the model does not see its media"
    for budget in (512, 16, 5):
        with Engine(model, CacheConfig(memory="1MiB", block_size=4), {"max_num_batched_tokens": budget}) as engine:
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


MIXED = ("glm46v-image", "voxtral-audio")
"""transformers gives the samples of a prompt with two media other features than those of the prompt."""


@pytest.mark.parametrize("name", ["llava-image", "qwen2_vl-video", *MIXED])
def test_samples(name: str) -> None:
    """Two samples of each prompt, in the engine and in `generate`, with the random numbers of plain `generate`."""
    model, prompts = made(name)
    options = config()
    options.update(do_sample=True, num_return_sequences=2, temperature=0.8)
    options.seed = 5

    def sampled(row: Row, **more: Any) -> list[list[int]]:
        ids = torch.tensor([row.ids])
        torch.manual_seed(5)
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **row.inputs, generation_config=options, **more
        )
        return [tokens[len(row.ids) :] for tokens in output.tolist()]

    expected = [sampled(row) for row in prompts]
    assert [sampled(row, cache_implementation="paged") for row in prompts] == expected
    with Engine(model, CacheConfig(memory="1MiB", block_size=4)) as engine:
        names = [engine.add_request(row.ids, options, inputs=row.inputs) for row in prompts]
        finished = {output.request_id: output for output in _run(engine) if output.finished}
    found = [[each.token_ids for each in finished[request].outputs] for request in names]
    one, two, other = range(3)
    assert [found[one], found[other]] == [expected[one], expected[other]]
    assert found[two] == expected[two] or name in MIXED


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
        ("Qwen2AudioForConditionalGeneration", "qwen2_audio", "input_features"),  # has no `get_audio_features`
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
"""With beams: transformers repeats the features of these wrongly, or not at all."""


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", cases())
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
