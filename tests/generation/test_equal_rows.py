"""Equal rows of a batch, and rows that begin alike, are computed and stored once; the text stays plain generate's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_paged.generation import prefill
from tests import conftest, models
from tests.models import padded

pytestmark = pytest.mark.usefixtures("trusted_code")

Compare = Callable[..., Any]

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 3.0},
    "samples of rows": {"do_sample": True, "temperature": 3.0, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
    "beam sample": {"num_beams": 2, "do_sample": True, "temperature": 2.0},
}


def copies(*counts: int, lengths: tuple[int, ...] = (21, 9, 33)) -> list[torch.Tensor]:
    """`counts[i]` copies of prompt i, in turns."""
    prompts = models.prompts(*lengths[: len(counts)])
    return [prompt for turn in range(max(counts)) for prompt, count in zip(prompts, counts) if turn < count]


@contextlib.contextmanager
def computed_tokens(model: Any) -> Iterator[list[int]]:
    """The number of tokens in each forward of the model."""
    counts: list[int] = []

    def add(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        counts.append(args[0].numel())

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield counts
    finally:
        handle.remove()


few = pytest.mark.parametrize("family", models.FEW)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_outputs(family: str, mode: str, paged_equals_plain: Compare) -> None:
    options = {**MODES[mode], "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    result = paged_equals_plain(models.shared(family), **padded(copies(3, 1, 2)), **options)
    if mode == "sample":
        text = result.plain.sequences[:, 33:].tolist()
        assert text[0] != text[3], "equal rows draw their own random numbers"


def test_equal_rows_are_computed_once_and_share_their_blocks(paged_equals_plain: Compare) -> None:
    model, prompt = models.build("llama"), models.prompts(40)[0]
    options = {"max_new_tokens": 2, "do_sample": True, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.stack([prompt] * 16)
    equal = paged_equals_plain(model, ids, **options)
    forks = paged_equals_plain(model, prompt[None], num_return_sequences=16, **options)
    assert equal.record.peak_blocks_used == forks.record.peak_blocks_used
    assert equal.record.peak_blocks_shared == 3 and equal.record.cow_copies == 15
    with computed_tokens(model) as counts:
        model.generate(ids, **options, cache_implementation="paged")
    assert counts == [40, 16]


@few
def test_rows_that_begin_alike_share_full_blocks(family: str, paged_equals_plain: Compare) -> None:
    beginning, *ends = models.prompts(37, 5, 11, 1, 64)
    rows = [beginning, *(torch.cat([beginning, end]) for end in ends), beginning[:32], ends[3]]
    options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    config = {"block_size": 16}
    result = paged_equals_plain(models.shared(family), **padded(rows), **options, cache_config=config)
    assert result.record.peak_blocks_shared > 0
    with computed_tokens(models.shared(family)) as counts:
        models.shared(family).generate(**padded(rows), **options, cache_config=config, cache_implementation="paged")
    # Of the two blocks that all but the last begin with, one row computes the second and another the first.
    assert counts[0] == sum(map(len, rows)) - 4 * 32 - 16


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("chunk", [5, 16, 40])
def test_in_chunks(family: str, chunk: int, monkeypatch: pytest.MonkeyPatch, paged_equals_plain: Compare) -> None:
    """Prompts that are computed over several steps: a row starts when the beginning that it shares is there."""
    monkeypatch.setattr(prefill, "MAX_PREFILL_TOKENS", 24)
    beginning, *ends = models.prompts(37, 5, 11, 1)
    rows = [*(torch.cat([beginning, end]) for end in ends), *copies(2, 2)]
    options = {"do_sample": False, "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0}
    cache = {"block_size": 8}
    paged_equals_plain(models.shared(family), **padded(rows), **options, prefill_chunk_size=chunk, cache_config=cache)


def test_a_pool_that_holds_them_only_shared(paged_equals_plain: Compare) -> None:
    """What is needed is counted after sharing."""
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    config = {"block_size": 8, "num_blocks": 8 + 6}
    ids = torch.stack([models.prompts(60)[0]] * 6)
    model = models.shared("llama")
    paged_equals_plain(model, ids, **options, cache_config=config)
    ids[:, 0] = torch.arange(6) + 20
    with pytest.raises(ValueError, match="the prompts need 48 blocks of 8 tokens, the cache has num_blocks=14"):
        model.generate(ids, **options, cache_config=config, cache_implementation="paged")
    assert conftest.blocks_in_use() == 0


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(models.FAMILIES),
    st.sampled_from(sorted(MODES)),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=2, max_size=6),
    st.sampled_from([1, 4, 16]),
    st.sampled_from(
        [{}, {"repetition_penalty": 1.4}, {"top_p": 0.8, "min_new_tokens": 3}, {"no_repeat_ngram_size": 2}]
    ),
    st.booleans(),
)
def test_any_mix(
    paged_equals_plain: Compare,
    family: str,
    mode: str,
    rows: list[tuple[int, int]],
    block_size: int,
    options: dict[str, Any],
    returns_dict: bool,
) -> None:
    """Beginnings of three prompts, of any lengths, many of them equal."""
    prompts = models.prompts(30, 30, 30)
    inputs = padded([prompts[which][:length] for which, length in rows])
    if returns_dict:
        options = {**options, "return_dict_in_generate": True, "output_scores": True}
    settings_of_cache = {"cache_config": {"block_size": block_size}}
    limits = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": [5, 6, 7, 8]}
    paged_equals_plain(models.shared(family), **inputs, **MODES[mode], **options, **limits, **settings_of_cache)
