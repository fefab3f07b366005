"""How many positions encoder-decoder models have: what the trial finds is what the model's own forward can compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from tests import encoder_models
from tests.architectures.tiny import tiny_model

FIXED = {"bart": 80, "marian": 80}
GROWING = ("m2m100", "t5")
OF_DECODER = {"whisper": 64, "vision-gpt2": 64}


def computes(model: Any, given: dict[str, torch.Tensor], length: int) -> bool:
    """Whether the model's own forward takes a decoder prompt of so many tokens."""
    try:
        model(**given, decoder_input_ids=torch.full((1, length), 5))
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("name", [*FIXED, *OF_DECODER])
@torch.no_grad()
def test_fixed_tables(name: str) -> None:
    model = encoder_models.model(name)
    found, given = hf_paged.check(model).positions, encoder_models.inputs(name, 1)
    most = {**FIXED, **OF_DECODER}[name]
    assert found == (most, FIXED.get(name))
    assert computes(model, given, most) and not computes(model, given, most + 1)


@pytest.mark.parametrize("name", GROWING)
def test_tables_that_grow_have_no_limit_and_stay_as_they_are(name: str) -> None:
    model = encoder_models.model(name)
    before = {name: tensor.shape for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert hf_paged.check(model).positions == (None, None)
    assert before == {name: tensor.shape for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def test_a_table_that_grows_with_prompts_only() -> None:
    """It has two rows for padding, of which a step of one token needs one."""
    assert hf_paged.check(encoder_models.model("speech2text")).positions == (65, None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "decoder", "text"), [
    ("LEDForConditionalGeneration", 128, 512),  # whose encoder fills up its text
    ("ProphetNetForConditionalGeneration", 254, None),  # which reads the next position too
])  # fmt: skip
def test_tables_of_other_kinds(name: str, decoder: int | None, text: int | None) -> None:
    assert hf_paged.check(tiny_model(name)).positions == (decoder, text)
