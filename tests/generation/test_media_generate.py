"""Images in paged calls of `generate`: packed, with the tokens and logits of plain calls."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import hf_paged
from hf_paged import PagedKVCache
from hf_paged.integration.names import CACHE
from tests.architectures.vision import IMAGE, MODELS, Row, batch_of, build, doubled

OWN_LOOP = ("paligemma",)  # its attention has no mask where nothing is masked, and attends both ways
NOISY = ("gemma4",)  # in float32 plain logits are 5e-5 from those in float64, in which we compare
PACKED = [name for name in MODELS if name not in OWN_LOOP]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 5},
    "samples": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
}


def model_and_rows(name: str) -> tuple[Any, list[Row]]:
    make, rows = MODELS[name]
    model, prompts = build(make), rows(torch.Generator().manual_seed(1))
    return (model.double(), [doubled(row) for row in prompts]) if name in NOISY else (model, prompts)


def call(model: Any, batch: dict[str, Any], *, paged: bool, **options: Any) -> Any:
    torch.manual_seed(0)
    given = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    if paged:
        given["cache_implementation"] = "paged"
    else:
        given.pop("prefill_chunk_size", None)  # which changes nothing, but for runs that attend both ways
    return model.generate(**batch, return_dict_in_generate=True, output_logits=True, **given)


def check(model: Any, batch: dict[str, Any], route: str = "packed", **options: Any) -> None:
    plain = call(model, batch, paged=False, **options)
    with hf_paged.record_calls() as calls:
        paged = call(model, batch, paged=True, **options)
    assert (calls[0].route, calls[0].reason is None) == (route, route == "packed"), calls[0].reason
    assert torch.equal(paged.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(paged.logits), torch.stack(plain.logits), atol=2e-5, rtol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", PACKED)
def test_equal_to_plain(name: str, options: str) -> None:
    if (name, options) == ("paligemma2", "chunks"):
        pytest.skip("all tokens of a prompt attend to one another")
    model, rows = model_and_rows(name)
    batches = [rows[:1]]
    if name not in ("idefics3", "smolvlm"):  # whose processors pad images too
        batches += [rows, [rows[0], rows[0], rows[1]]]
    for each in batches:
        check(model, batch_of(each), **OPTIONS[options])


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_rows_with_and_without_images(name: str) -> None:
    model, rows = model_and_rows(name)
    text = Row([5, 6, 7, 8, 9, 10], {key: value[:0] for key, value in rows[0].inputs.items()})
    types = [key for key in text.inputs if key.endswith("type_ids")]
    text.inputs.update({key: torch.zeros(1, 6, dtype=torch.int64) for key in types})
    for options in OPTIONS.values():
        check(model, batch_of([rows[1], text, rows[0]]), **options)


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_rows_that_differ_in_their_images_alone(name: str) -> None:
    """Equal tokens, other images: nothing that depends on the image is shared, and what stands before it is."""
    model, rows = model_and_rows(name)
    other = {**rows[2].inputs, "pixel_values": rows[2].inputs["pixel_values"] + 1}
    pair = [rows[2], Row(rows[2].ids, other), rows[2]]
    plain = call(model, batch_of(pair), paged=False)
    assert not torch.equal(plain.logits[0][0], plain.logits[0][1])
    check(model, batch_of(pair))
    with hf_paged.record_calls() as calls:
        call(model, batch_of(pair), paged=True, cache_config={"block_size": 4})
    blocks = -(-(len(pair[0].ids) + 9) // 4)
    first = pair[0].ids.index(IMAGE) // 4
    if name == "llava":  # layers with windows share no beginnings
        assert calls[0].peak_blocks_used <= 3 * blocks - 2 * first


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_a_returned_cache_goes_on(name: str) -> None:
    """After images, positions are counted by the model: the call goes through transformers' loop."""
    model, rows = model_and_rows(name)
    batch = batch_of(rows[:1])
    ends = []
    for paged in (False, True):
        first = call(model, batch, paged=paged)
        ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        again = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: first.past_key_values}
        assert isinstance(first.past_key_values, PagedKVCache) == paged
        with hf_paged.record_calls() as calls:
            ends.append(call(model, again, paged=paged).sequences)
        if paged:
            assert calls[0].route == "hf_loop" and "counts positions" in calls[0].reason
    assert torch.equal(*ends)


def test_models_that_prepare_steps_otherwise_take_the_loop() -> None:
    for name in OWN_LOOP:
        model, rows = model_and_rows(name)
        check(model, batch_of(rows), route="hf_loop")


def test_a_model_that_goes_on_in_its_own_way_takes_the_loop() -> None:
    """One that makes other positions, or wants to see more; other types of generated tokens change nothing."""
    model, rows = model_and_rows("llava")
    name = "_update_model_kwargs_for_generation"
    own = getattr(type(model), name)

    def changed(*args: Any, **options: Any) -> dict[str, Any]:
        made: dict[str, Any] = own(*args, **options)
        return {**made, "position_ids": made["position_ids"] * 2}

    def typed(*args: Any, **options: Any) -> dict[str, Any]:
        return {**own(*args, **options), "token_type_ids": None}

    def greedy(model: Any, outputs: Any, *args: Any, **options: Any) -> dict[str, Any]:
        assert outputs.past_key_values is not None
        made: dict[str, Any] = own(model, outputs, *args, **options)
        return made

    for function, route in ((changed, "hf_loop"), (typed, "packed"), (greedy, "hf_loop")):
        with mock.patch.object(type(model), name, function):
            check(model, batch_of(rows[:1]), route=route)


def test_runs_are_not_divided() -> None:
    model, rows = model_and_rows("gemma3")
    with pytest.raises(ValueError, match="4 tokens of a prompt attend to one another both ways"):
        call(model, batch_of(rows), paged=True, prefill_chunk_size=3)
