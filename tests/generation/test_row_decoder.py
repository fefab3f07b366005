"""`generate` of models that keep states besides K/V: their rows decode by block tables, as in plain generate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.integration.names import CACHE
from tests.architectures.tiny import tiny_model
from tests.poison import poison

TYPES = ("lfm2", "falcon_h1")
EOS = 17

CALLS: dict[str, dict[str, Any]] = {
    "ends": {"eos_token_id": [EOS, 40, 41, 42, 43, 44]},
    "samples": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": [EOS, 40, 41], "length_penalty": 0.5},
    "beam samples": {"num_beams": 2, "do_sample": True},
    "scores": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "processors": {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[7, 8]], "min_new_tokens": 4},
}  # fmt: skip


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    """Left-padded rows; the last one is there twice."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(6, 90, (length,), generator=generator) for length in lengths]
    width = max(lengths)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in [*rows, rows[-1]]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("call", CALLS)
def test_calls_run_packed(paged_equals_plain: Callable[..., Any], name: str, call: str) -> None:
    given = {"max_new_tokens": 9, "do_sample": False, **batch(9, 21, 4), **CALLS[call]}
    paged_equals_plain(model_of(name), **given)


@pytest.mark.parametrize("name", TYPES)
def test_a_returned_cache_is_continued(name: str) -> None:
    """By transformers' loop, from the states and K/V of the packed rows."""
    model = model_of(name)
    given = batch(11, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected, first = (
        model.generate(**given, **options),
        model.generate(**given, **options, cache_implementation="paged"),
    )
    assert first.sequences.equal(expected.sequences)
    assert first.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    ids = first.sequences
    mask = torch.cat([given["attention_mask"], torch.ones(len(ids), 6, dtype=torch.int64)], 1)
    further = {"input_ids": ids, "attention_mask": mask, **options}
    with hf_paged.record_calls() as records:
        paged = model.generate(**further, **{CACHE: first.past_key_values})
    plain = model.generate(**further, **{CACHE: expected.past_key_values})
    assert paged.sequences.equal(plain.sequences)
    assert records[0].route == "hf_loop"


def test_equal_prompts_are_computed_once() -> None:
    ids = batch(24)["input_ids"]
    with hf_paged.record_calls() as records:
        model_of("lfm2").generate(
            ids.repeat(3, 1), attention_mask=torch.ones(6, 24), max_new_tokens=2, do_sample=False,
            cache_config={"block_size": 4}, cache_implementation="paged",
        )  # fmt: skip
    assert records[0].peak_blocks_used <= 6 + 6  # of the prompt, and a block for each row


@pytest.mark.parametrize("name", TYPES)
def test_memory_that_nobody_has_written_is_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = model_of(name), batch(9, 21, 4)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**given, **options)
    poison(monkeypatch)
    paged = model.generate(**given, **options, cache_config={"block_size": 4}, cache_implementation="paged")
    assert paged.sequences.equal(expected.sequences)
    for found, wanted in zip(paged.logits, expected.logits, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
