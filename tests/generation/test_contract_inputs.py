"""Prompts of `generate(cache_implementation="paged")`, against plain generate."""

from __future__ import annotations

import logging
from itertools import cycle
from typing import Any

import pytest
import torch

from tests import models
from tests.generation.test_contract_processors import Compare, few

BLOCK = 16
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": models.PAD}
BEAMS: dict[str, Any] = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}

modes = pytest.mark.parametrize("options", [GREEDY, BEAMS], ids=["greedy", "beams"])


@modes
@pytest.mark.parametrize(
    ("length", "family"), [*zip([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5], cycle(models.FAMILIES))]
)
def test_prompt_lengths(family: str, length: int, options: dict[str, Any], paged_equals_plain: Compare) -> None:
    ids = models.prompts(length)[0][None]
    paged_equals_plain(models.shared(family), ids, **options)


@few
def test_many_rows(family: str, paged_equals_plain: Compare) -> None:
    lengths = [1 + (7 * i) % 37 for i in range(24)]
    result = paged_equals_plain(models.shared(family), **models.batch(*lengths), **GREEDY)
    assert len({tuple(row) for row in result.plain[:, max(lengths) :].tolist()}) > 12


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", torch.int64), ("gemma3", torch.bool), ("opt", torch.float32), ("gpt2", torch.int64)]
)
def test_attention_mask_matters(family: str, dtype: torch.dtype, paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(3, 21, 8)
    inputs["input_ids"][inputs["attention_mask"] == 0] = 7
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    masked = paged_equals_plain(model, **inputs, **GREEDY).plain
    unmasked = paged_equals_plain(model, inputs["input_ids"], **GREEDY).plain
    assert masked[0].tolist() != unmasked[0].tolist()


def test_pad_tokens_without_a_mask(paged_equals_plain: Compare) -> None:
    inputs = models.batch(3, 21, 8, padding=models.PAD)
    result = paged_equals_plain(models.shared("llama"), inputs["input_ids"], **GREEDY)
    assert torch.equal(result.paged, models.shared("llama").generate(**inputs, **GREEDY))


@pytest.mark.covering(1)
@few
@modes
@pytest.mark.parametrize("mask", ["right padding", "holes"])
def test_other_masks(family: str, options: dict[str, Any], mask: str, paged_equals_plain: Compare) -> None:
    inputs = models.batch(9, 21, 12, side="right" if mask == "right padding" else "left")
    if mask == "holes":
        inputs["attention_mask"][1, 5:8] = 0
    paged_equals_plain(models.shared(family), **inputs, **options, route="hf_loop")


def test_right_padding_warns_as_plain_generate_does(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = models.shared("llama"), models.batch(3, 21, 8, side="right")
    logger = logging.getLogger("transformers")
    logger.propagate = True
    try:
        with caplog.at_level(logging.WARNING, logger.name):
            model.generate(**inputs, **GREEDY, cache_implementation="paged")
    finally:
        logger.propagate = False
    assert "right-padding was detected" in caplog.text


@pytest.mark.covering(1)
@few
@modes
@pytest.mark.parametrize("given", ["embeddings", "embeddings and ids", "position_ids"])
def test_other_inputs(family: str, options: dict[str, Any], given: str, paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(9, 21, 12)
    if given == "position_ids":
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) + 3
    else:
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs["input_ids"]).detach() * 1.1
    if given == "embeddings":
        del inputs["input_ids"]
    result = paged_equals_plain(model, **inputs, **options, route="hf_loop")
    assert result.paged.shape[1] == (10 if given == "embeddings" else 31)


@pytest.mark.parametrize(
    ("family", "given"), [*zip(models.FEW, [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 3}])]
)
def test_empty_input_starts_with_bos(family: str, given: dict[str, Any], paged_equals_plain: Compare) -> None:
    options = {**GREEDY, **given, "bos_token_id": models.BOS}
    result = paged_equals_plain(models.shared(family), **options)
    assert (result.paged[:, 0] == models.BOS).all()


def test_inputs_argument_spellings(paged_equals_plain: Compare) -> None:
    ids = models.prompts(11)[0][None]
    paged_equals_plain(models.shared("llama"), inputs=ids, **GREEDY)
    paged_equals_plain(models.shared("llama"), ids.int(), **GREEDY)


def test_token_type_ids_reach_the_model(paged_equals_plain: Compare) -> None:
    """A model argument that packed rows cannot carry sends the call through the dense view; it is not dropped."""
    model, inputs = models.shared("gpt2"), models.batch(9, 21)
    types = torch.full_like(inputs["input_ids"], 5)
    with_types = paged_equals_plain(model, **inputs, token_type_ids=types, **GREEDY, route="hf_loop").plain
    without = paged_equals_plain(model, **inputs, **GREEDY).plain
    assert with_types.tolist() != without.tolist()
