"""When the engine runs the encoders of images, and for how many of them at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from hf_paged import Engine, SchedulerConfig, tokenwise
from hf_paged.features.media import media_store
from hf_paged.features.media.media import Features, Media, Unit
from tests.architectures.vision import IMAGE, Row
from tests.generation.test_media import SMALL, config, model_and_rows, plain, serve


def llava_rows(count: int, images: int = 1) -> list[Row]:
    generator = torch.Generator().manual_seed(4)
    ids = [5, *([9, *[IMAGE] * 4, 7] * images), 8]
    return [
        Row([*ids, 20 + number], {"pixel_values": torch.randn(images, 3, 16, 16, generator=generator)})
        for number in range(count)
    ]


def watched(model: Any, change: Callable[[Any], None] | None = None) -> tuple[Any, list[int]]:
    """A patch under which the number of images of each call of the encoder is noted. change: what it returns."""
    own, calls = type(model.model).get_image_features, []

    @functools.wraps(own)
    def encode(self: Any, pixel_values: torch.Tensor, **options: Any) -> Any:
        calls.append(len(pixel_values))
        output = own(self, pixel_values=pixel_values, **options)
        if change is not None:
            change(output)
        return output

    return mock.patch.object(type(model.model), "get_image_features", tokenwise(encode)), calls


def check(rows: list[Row], expected: list[Any], outputs: list[Any]) -> None:
    for row, (tokens, logprobs), output in zip(rows, expected, outputs, strict=True):
        assert output.error is None and output.outputs[0].token_ids == tokens[0], row
        torch.testing.assert_close(torch.tensor(output.outputs[0].logprobs), logprobs, atol=2e-5, rtol=0)


def test_images_of_several_requests_share_a_call() -> None:
    model, _ = model_and_rows("llava")
    rows = llava_rows(7)
    expected = [plain(model, row) for row in rows]
    patch, calls = watched(model)
    with patch:
        with Engine(model, SMALL) as engine:
            check(rows, expected, serve(engine, rows))
        assert calls == [1, 1, 2, 5], "two are encoded alone and together first, which is compared"
        calls.clear()
        with Engine(model, SMALL) as engine:
            check(rows, expected, serve(engine, rows))
            assert engine.stats().encoder_inputs == 7
        assert calls == [7]
        calls.clear()
        with Engine(model, SMALL, {"batch_invariant": True}) as engine:
            check(rows, expected, serve(engine, rows))
        assert calls == [1] * 7


def test_sizes_of_images_that_share_a_call() -> None:
    model, (row, *_) = model_and_rows("qwen2_vl")
    generator = torch.Generator().manual_seed(6)
    rows = []
    for height, width in ((4, 6), (2, 4), (8, 2), (4, 6), (2, 2)):
        ids = [5, 6, 197, *[IMAGE] * (height * width // 4), 196, 8, 9]
        inputs = {
            "pixel_values": torch.randn(height * width, row.inputs["pixel_values"].shape[1], generator=generator),
            "image_grid_thw": torch.tensor([[1, height, width]]),
            "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).long(),
        }
        rows.append(Row(ids, inputs))
    expected = [plain(model, each) for each in rows]
    patch, calls = watched(model)
    with patch, Engine(model, SMALL) as engine:
        check(rows, expected, serve(engine, rows))
    assert len(calls) == 4, "two alone, both, and the other three"


def test_an_encoder_that_mixes_images_gets_one_at_a_time() -> None:
    model, _ = model_and_rows("llava")
    rows = llava_rows(5)

    def mix(output: Any) -> None:
        pooled = output.pooler_output
        together = pooled if torch.is_tensor(pooled) else torch.stack(list(pooled))
        mean = together.mean(dim=0)
        output.pooler_output = together + mean if torch.is_tensor(pooled) else [each + mean for each in pooled]

    patch, calls = watched(model, mix)
    with patch:
        expected = [plain(model, row) for row in rows]
        calls.clear()
        with Engine(model, SMALL) as engine:
            check(rows, expected, serve(engine, rows))
    assert calls == [1, 1, 2, 1, 1, 1]


def test_an_error_is_that_of_its_request() -> None:
    model, _ = model_and_rows("llava")
    rows = llava_rows(4)
    expected = [plain(model, row) for row in rows]
    with Engine(model, SMALL) as engine:
        check(rows, expected, serve(engine, rows))  # they may be joined from here on
    broken = Row(rows[1].ids, {"pixel_values": torch.randn(1, 3, 16, 16).half()})  # another dtype than the weights
    with (
        Engine(model, SMALL) as engine,
        mock.patch.object(type(model.model), "get_image_features", _failing(type(model.model).get_image_features)),
    ):
        outputs = serve(engine, [rows[0], broken, *rows[2:]])
    assert "half" in str(outputs[1].error)
    check([rows[0], *rows[2:]], [expected[0], *expected[2:]], [outputs[0], *outputs[2:]])


@pytest.mark.parametrize("count", [1, 48])
def test_inputs_that_cannot_be_divided_are_an_error_of_their_request(count: int) -> None:
    model, rows = model_and_rows("qwen2_vl")
    expected = plain(model, rows[0])
    broken = Row(rows[0].ids, {**rows[0].inputs, "image_grid_thw": torch.tensor([[count, 4, 6]])})
    broken.inputs["pixel_values"] = broken.inputs["pixel_values"][:20]
    with Engine(model, SMALL) as engine:
        outputs = serve(engine, [broken, rows[0]])
    assert "the encoder failed" in str(outputs[0].error)
    check(rows[:1], [expected], outputs[1:])


def test_requests_for_which_a_step_has_no_budget_wait() -> None:
    """The first one's images look larger than all of them are, because each counts as whole placeholders."""
    model, _ = model_and_rows("llava")
    rows = [llava_rows(1, images=2)[0], *llava_rows(5)[2:]]  # whose images are others
    expected = [plain(model, row) for row in rows]
    with (
        Engine(model, SMALL, {"max_num_batched_tokens": 24}) as engine,
        mock.patch.object(media_store, "_divided", lambda *args: [_larger(each) for each in DIVIDED(*args)]),
    ):
        check(rows, expected, serve(engine, rows))


def test_a_video_and_sound_have_other_keys_in_another_order() -> None:
    """They are encoded as one unit, and each has one placeholder: their K/V differs where they change places."""
    model, _ = model_and_rows("llava")
    features = Features(torch.ones(1, 32), None, "batch", dict)
    keys = []
    for places in ({"video": [1], "audio": [2]}, {"audio": [1], "video": [2]}):
        media = Media({"pixel_values_videos": torch.ones(1)}, places)
        media.units = [Unit({}, b"digest", 2, {"video": features, "audio": features})]
        keys.append(media_store.MediaStore().complete(model, [5, 6, 7], media).keys)
    assert keys[0][1] == keys[1][2] != keys[0][2] == keys[1][1]


DIVIDED = media_store._divided


def _larger(unit: Unit) -> Unit:
    return Unit(unit.inputs, unit.digest, 3 * unit.num_placeholders)


def _failing(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def encode(self: Any, pixel_values: torch.Tensor, **options: Any) -> Any:
        if pixel_values.dtype == torch.half:
            raise ValueError("no half precision")
        return own(self, pixel_values=pixel_values, **options)

    return encode


@pytest.mark.parametrize("budget", [8, 3])
def test_encoding_holds_up_no_other_request(budget: int) -> None:
    """Six images of four placeholders: a step encodes two of them, or one, and another request gets its token."""
    model, _ = model_and_rows("llava")
    (row,) = llava_rows(1, images=6)
    expected = plain(model, row)
    patch, calls = watched(model)
    with patch, Engine(model, SMALL, SchedulerConfig(max_num_batched_tokens=budget)) as engine:
        other = engine.add_request([5, 6, 7], config(max_new_tokens=40))
        engine.step()
        name = engine.add_request(row.ids, config(), inputs=row.inputs)
        steps, finished, encoded = 0, {}, 0
        while engine.has_unfinished_requests():
            before = len(calls)
            outputs = {output.request_id: output for output in engine.step()}
            finished.update({key: each for key, each in outputs.items() if each.finished})
            steps += len(calls) > before
            assert engine.stats().encoder_inputs - encoded <= max(budget // 4, 1)
            encoded = engine.stats().encoder_inputs
            assert other in outputs or other in finished, "it gets a token in each step"
    assert steps == 6 // max(budget // 4, 1)
    check([row], [expected], [finished[name]])


def test_code_of_others_in_the_model() -> None:
    """A hook changes what layers compute: prompts with images are computed one by one, as plain `generate` does."""
    model, rows = model_and_rows("llava")
    with Engine(model, SMALL) as engine:
        serve(engine, rows)
        layer = model.model.language_model.layers[0].mlp
        handle = layer.register_forward_hook(lambda module, inputs, output: output * 1.5)
        try:
            expected = [plain(model, row) for row in rows]
            check(rows, expected, serve(engine, rows))
        finally:
            handle.remove()
