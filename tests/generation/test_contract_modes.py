"""Decoding modes of `generate(cache_implementation="paged")` against plain generate, on every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging import version

import hf_paged
from hf_paged.integration.names import CACHE
from tests import conftest, models
from tests.generation.test_contract_processors import LENGTHS, Compare, few


def _ragged(model: Any) -> dict[str, Any]:
    inputs = models.batch(*LENGTHS)
    return {**inputs, "eos_token_id": models.ending(model, inputs), "pad_token_id": models.PAD}


def _one(model: Any, length: int = 21) -> dict[str, Any]:
    return {"input_ids": models.prompts(length, seed=3)[0][None], "pad_token_id": models.PAD}


@pytest.mark.smoke_cases("llama")
def test_greedy(family: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    result = paged_equals_plain(model, **_ragged(model), max_new_tokens=24, do_sample=False)
    text = result.plain[:, max(LENGTHS) :]
    assert len(set(text.flatten().tolist())) > 8, "the text is too monotonous for a meaningful comparison"
    assert (text[0] == models.PAD).any(), "row 0 ends early"


@pytest.mark.smoke_cases("llama")
def test_sampling(family: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    options = {"do_sample": True, "temperature": 3.0}
    result = paged_equals_plain(model, **_ragged(model), max_new_tokens=14, **options)
    torch.manual_seed(99)
    other = model.generate(**_ragged(model), max_new_tokens=14, **options)
    assert result.plain.tolist() != other.tolist(), "the seed must matter, or equal tokens prove nothing"


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.7, 4.0])
def test_parallel_sampling(family: str, temperature: float, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    options = {"do_sample": True, "temperature": temperature, "num_return_sequences": 3}
    result = paged_equals_plain(model, **_ragged(model), max_new_tokens=14, **options)
    assert result.record.cow_copies > 0
    assert result.record.peak_blocks_shared > 0


@pytest.mark.smoke_cases("llama")
@pytest.mark.covering(1)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("num_beams, num_return_sequences", [(2, 2), (3, 1), (5, 3)])
def test_beam_search(
    family: str,
    early_stopping: bool | str,
    length_penalty: float,
    num_beams: int,
    num_return_sequences: int,
    paged_equals_plain: Compare,
) -> None:
    model = models.shared(family)
    options = {"num_beams": num_beams, "num_return_sequences": num_return_sequences, "do_sample": False}
    options |= {"early_stopping": early_stopping, "length_penalty": length_penalty}
    result = paged_equals_plain(model, **_ragged(model), max_new_tokens=16, **options)
    record, length = result.record, result.paged.shape[1]
    assert record.cow_copies > 0 and len(result.paged) == len(LENGTHS) * num_return_sequences
    per_token = record.kv_bytes_used // (record.peak_blocks_used * record.block_size)
    assert record.kv_bytes_contiguous == len(LENGTHS) * num_beams * length * per_token


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_return_sequences", [1, 2])
def test_beam_sampling(family: str, num_return_sequences: int, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    options = {"num_beams": 3, "do_sample": True, "temperature": 2.0, "num_return_sequences": num_return_sequences}
    paged_equals_plain(model, **_ragged(model), max_new_tokens=14, **options)


@pytest.mark.covering(1)
@pytest.mark.parametrize("do_sample", [False, True])
def test_assisted_decoding(family: str, do_sample: bool, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    # The same model with slightly different weights: some drafts are accepted, some are not. (transformers 5.17 itself
    # fails where the assistant has sliding windows.)
    old = version.parse(transformers.__version__) < version.parse("5.23")
    assistant = models.build("llama" if old and family in ("mistral", "gemma3") else family)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.mul_(1.02)
    options = {"assistant_model": assistant, "do_sample": do_sample, "max_new_tokens": 16}
    paged_equals_plain(model, **_one(model), **options, route="hf_loop")


def test_assistant_with_a_paged_cache_of_its_own() -> None:
    model, assistant = models.shared("llama"), models.build("llama")
    assistant.generation_config.cache_implementation = "paged"
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**_one(model), **options)
    for given in ({}, {"cache_implementation": "paged"}):
        with hf_paged.record_calls() as records:
            drafted = model.generate(**_one(model), **options, assistant_model=assistant, **given)
        assert torch.equal(drafted, expected)
        assert len(records) > len(given)
    assert conftest.blocks_in_use() == 0


def test_early_exit_decoding(paged_equals_plain: Compare) -> None:
    model = models.shared("llama")
    options = {"assistant_early_exit": 1, "do_sample": False, "max_new_tokens": 10}
    paged_equals_plain(model, **_one(model), **options, route="hf_loop")


def test_token_healing(paged_equals_plain: Compare) -> None:
    model = models.shared("llama")
    options = {"token_healing": True, "do_sample": False, "max_new_tokens": 8}
    paged_equals_plain(model, **_one(model), **options, fresh=lambda: {"tokenizer": models.tokenizer()})


@pytest.mark.smoke_cases("llama")
@pytest.mark.covering(1)
@pytest.mark.parametrize("do_sample", [False, True])
def test_prompt_lookup_decoding(family: str, do_sample: bool, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    inputs = _one(model)
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 4, "do_sample": do_sample, "max_new_tokens": 16}
    paged_equals_plain(model, **inputs, **options, route="hf_loop")


def _decode(model: Any, input_ids: torch.Tensor, odd: int, **kwargs: Any) -> torch.Tensor:
    """A user's decoding method: greedy, with every second token banned."""
    cache, config = kwargs[CACHE], kwargs["generation_config"]
    tokens = input_ids
    while input_ids.shape[1] < config.max_length:
        mask = kwargs.get("attention_mask")
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), input_ids.shape[1] - mask.shape[1])], dim=1)
        output = model(tokens, attention_mask=mask, **{CACHE: cache}, use_cache=True)
        logits = output.logits[:, -1].clone()
        logits[:, odd::2] = -torch.inf
        tokens = logits.argmax(-1, keepdim=True)
        input_ids = torch.cat([input_ids, tokens], dim=1)
    return input_ids


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("num_return_sequences", [1, 2])
def test_custom_generate_callable(family: str, num_return_sequences: int, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    options = {"custom_generate": _decode, "odd": 1, "do_sample": True, "num_return_sequences": num_return_sequences}
    paged_equals_plain(model, **_ragged(model), max_new_tokens=8, **options, route="hf_loop")


@pytest.mark.covering(1)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(family: str, chunk: int, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    inputs = {"input_ids": torch.stack(models.prompts(23, 23)), "pad_token_id": models.PAD}
    paged_equals_plain(model, **inputs, max_new_tokens=8, prefill_chunk_size=chunk, do_sample=False)
