"""When the engine runs the encoders of images, and for how many of them at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from hf_paged import Engine, SchedulerConfig
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

    return mock.patch.object(type(model.model), "get_image_features", encode), calls


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
