"""Where generation stops: lengths, time, EOS, stop strings, criteria; against plain generate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import StoppingCriteria, StoppingCriteriaList

from tests import models
from tests.generation.test_contract_processors import LENGTHS, Compare, few

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": models.PAD}
MODES = {
    "greedy": GREEDY,
    "sample": {**GREEDY, "do_sample": True, "temperature": 3.0, "num_return_sequences": 2},
    "beams": {**GREEDY, "num_beams": 3},
}
LIMITS: dict[str, dict[str, Any]] = {
    "one token": {"max_new_tokens": 1}, "max_length": {"max_length": 27}, "none at all": {"eos_token_id": None},
    "time is up": {"eos_token_id": None, "max_new_tokens": 12, "max_time": -1.0},
    "much time": {"eos_token_id": None, "max_new_tokens": 12, "max_time": 3600.0},
    "min_length": {"max_new_tokens": 16, "min_length": 30},
    "min_new_tokens": {"max_new_tokens": 16, "min_new_tokens": 9}, "several eos": {"max_new_tokens": 12},
    "all end at once": {"max_new_tokens": 12},
}  # fmt: skip
NEW_TOKENS = {"one token": 1, "none at all": 20, "time is up": 1, "much time": 12}

modes = pytest.mark.parametrize("mode", MODES)


@pytest.mark.covering(1)
@few
@modes
@pytest.mark.parametrize("limit", LIMITS)
def test_limits(family: str, mode: str, limit: str, paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    eos: Any = models.ending(model, inputs)
    if limit == "several eos":
        text = model.generate(**inputs, **GREEDY, eos_token_id=None, max_new_tokens=8)[:, max(LENGTHS) :]
        eos = [int(text[0, 2]), int(text[1, 4]), int(text[3, 6])]
    elif limit == "all end at once":
        eos = list(range(2 if mode == "beams" else 0, models.VOCAB))
    result = paged_equals_plain(model, **inputs, **MODES[mode], **{"eos_token_id": eos, **LIMITS[limit]})
    new_tokens = result.paged.shape[1] - max(LENGTHS)
    assert new_tokens == NEW_TOKENS.get(limit, new_tokens)
    assert limit != "all end at once" or new_tokens <= 2
    if limit.startswith("min"):
        free = model.generate(**inputs, **GREEDY, eos_token_id=eos, max_new_tokens=16)
        held = model.generate(**inputs, **GREEDY, eos_token_id=eos, **LIMITS[limit])
        assert free.tolist() != held.tolist(), "the limit must matter"


@pytest.mark.covering(1)
@few
@modes
@pytest.mark.parametrize("with_eos", [True, False])
def test_stop_strings(family: str, mode: str, with_eos: bool, paged_equals_plain: Compare) -> None:
    """Without an EOS id, plain generate continues the rows that have stopped until all rows have."""
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    options = {**MODES[mode], "eos_token_id": models.EOS if with_eos else None, "max_new_tokens": 12}
    tokenizer = models.tokenizer()
    text = model.generate(**inputs, **GREEDY, eos_token_id=None, max_new_tokens=12)[:, max(LENGTHS) :]
    stops = [tokenizer.decode(text[0, 2:4]), tokenizer.decode(text[1, 5])]
    result = paged_equals_plain(model, **inputs, **options, stop_strings=stops, fresh=lambda: {"tokenizer": tokenizer})
    if with_eos and mode != "sample":
        assert result.paged.tolist() != model.generate(**inputs, **options).tolist(), "the strings must occur"


class _Recorder(StoppingCriteria):
    """Stops a row at a token and records its arguments."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.clone(), type(scores), None if scores is None else len(scores), sorted(kwargs)))
        return input_ids[:, -1] % 5 == 0


@pytest.mark.covering(1)
@few
@modes
@pytest.mark.parametrize("with_eos", [True, False])
@pytest.mark.parametrize("given", [{}, {"return_dict_in_generate": True, "output_scores": True}])
def test_stopping_criteria(family: str, mode: str, with_eos: bool, given: Any, paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    eos = models.ending(model, inputs) if with_eos else None
    recorders: list[_Recorder] = []

    def fresh() -> dict[str, Any]:
        recorders.append(_Recorder())
        return {"stopping_criteria": StoppingCriteriaList([recorders[-1]])}

    paged_equals_plain(model, **inputs, **MODES[mode], eos_token_id=eos, max_new_tokens=14, **given, fresh=fresh)
    plain, paged = recorders
    assert len(plain.seen) == len(paged.seen) > 0
    for expected, actual in zip(plain.seen, paged.seen):
        assert torch.equal(actual[0], expected[0])
        assert actual[1:] == expected[1:]


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone, for synced_gpus."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@modes
def test_synced_gpus(mode: str, process_group: None, paged_equals_plain: Compare) -> None:
    model, inputs = models.shared("llama"), models.batch(*LENGTHS)
    eos = models.ending(model, inputs)
    paged_equals_plain(model, **inputs, **MODES[mode], eos_token_id=eos, max_new_tokens=10, synced_gpus=True)
