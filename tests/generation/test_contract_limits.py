"""Where generation stops: lengths, time, EOS, stop strings, criteria; against plain generate, on every family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import StoppingCriteria, StoppingCriteriaList

from tests import models

Compare = Callable[..., Any]

LENGTHS = (5, 19, 1, 16)
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": models.PAD}
MODES = {
    "greedy": GREEDY,
    "sample": {**GREEDY, "do_sample": True, "temperature": 3.0, "num_return_sequences": 2},
    "beams": {**GREEDY, "num_beams": 3},
}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(MODES[request.param])


@pytest.mark.covering(1)
def test_max_new_tokens(family: str, mode: dict[str, Any], paged_equals_plain: Compare) -> None:
    inputs = models.batch(*LENGTHS)
    for limit in (1, 2, 17):
        paged_equals_plain(models.shared(family), **inputs, **mode, max_new_tokens=limit)


@pytest.mark.covering(1)
def test_max_length(family: str, mode: dict[str, Any], paged_equals_plain: Compare) -> None:
    result = paged_equals_plain(models.shared(family), **models.batch(*LENGTHS), **mode, max_length=27)
    assert result.paged.shape[1] <= 27


@pytest.mark.covering(1)
def test_no_limit_at_all_is_20_new_tokens(family: str, mode: dict[str, Any], paged_equals_plain: Compare) -> None:
    mode["eos_token_id"] = None
    result = paged_equals_plain(models.shared(family), **models.batch(*LENGTHS), **mode)
    assert result.paged.shape[1] == max(LENGTHS) + 20


@pytest.mark.quick_cases("llama", "gemma3")
@pytest.mark.parametrize("limit", [{"min_length": 30}, {"min_new_tokens": 9}])
@pytest.mark.covering(2)
def test_minima(family: str, mode: dict[str, Any], limit: dict[str, int], paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    eos = models.ending(model, inputs)
    free = model.generate(**inputs, **GREEDY, eos_token_id=eos, max_new_tokens=16)
    held = model.generate(**inputs, **GREEDY, eos_token_id=eos, max_new_tokens=16, **limit)
    assert free.tolist() != held.tolist(), "the limit must matter"
    paged_equals_plain(model, **inputs, **mode, eos_token_id=eos, max_new_tokens=16, **limit)


@pytest.mark.covering(1)
def test_several_eos(family: str, mode: dict[str, Any], paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    text = model.generate(**inputs, **GREEDY, eos_token_id=None, max_new_tokens=8)[:, max(LENGTHS) :]
    eos = [int(text[0, 2]), int(text[1, 4]), int(text[3, 6])]
    paged_equals_plain(model, **inputs, **mode, eos_token_id=eos, max_new_tokens=12)


def test_all_rows_end_at_once(family: str, mode: dict[str, Any], paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    eos = list(range(0 if mode.get("num_beams", 1) == 1 else 2, models.VOCAB))
    result = paged_equals_plain(model, **inputs, **mode, eos_token_id=eos, max_new_tokens=12)
    assert result.paged.shape[1] <= max(LENGTHS) + 2


@pytest.mark.covering(1)
def test_max_time(family: str, mode: dict[str, Any], paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    mode["eos_token_id"] = None
    # The time is up at the start: both calls stop after the first token.
    result = paged_equals_plain(model, **inputs, **mode, max_new_tokens=12, max_time=-1.0)
    assert result.paged.shape[1] == max(LENGTHS) + 1
    paged_equals_plain(model, **inputs, **mode, max_new_tokens=12, max_time=3600.0)


@pytest.mark.quick_cases("llama", "gemma3")
@pytest.mark.parametrize("with_eos", [True, False])
@pytest.mark.covering(2)
def test_stop_strings(family: str, mode: dict[str, Any], with_eos: bool, paged_equals_plain: Compare) -> None:
    """Without an EOS id, plain generate continues the rows that have stopped until all rows have."""
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    mode["eos_token_id"] = models.EOS if with_eos else None
    tokenizer = models.tokenizer()
    text = model.generate(**inputs, **GREEDY, eos_token_id=None, max_new_tokens=12)[:, max(LENGTHS) :]
    stops = [tokenizer.decode(text[0, 2:4]), tokenizer.decode(text[1, 5])]
    free = model.generate(**inputs, **mode, max_new_tokens=12)
    result = paged_equals_plain(
        model, **inputs, **mode, max_new_tokens=12, stop_strings=stops, fresh=lambda: {"tokenizer": tokenizer}
    )
    if with_eos and not mode["do_sample"]:
        assert result.paged.tolist() != free.tolist(), "the strings must occur"


class _Recorder(StoppingCriteria):
    """Stops a row at a token and records its arguments."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((input_ids.clone(), type(scores), None if scores is None else len(scores), sorted(kwargs)))
        return input_ids[:, -1] % self.stop == 0


@pytest.mark.quick_cases("llama", "gemma3")
@pytest.mark.parametrize("with_eos", [True, False])
@pytest.mark.parametrize("given", [{}, {"return_dict_in_generate": True, "output_scores": True}])
@pytest.mark.covering(2)
def test_stopping_criteria(
    family: str, mode: dict[str, Any], with_eos: bool, given: dict[str, Any], paged_equals_plain: Compare
) -> None:
    """Each criterion gets the rows and the history that plain generate passes."""
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    mode["eos_token_id"] = models.ending(model, inputs) if with_eos else None
    recorders: list[_Recorder] = []

    def fresh() -> dict[str, Any]:
        recorders.append(_Recorder(5))
        return {"stopping_criteria": StoppingCriteriaList([recorders[-1]])}

    paged_equals_plain(model, **inputs, **mode, max_new_tokens=14, **given, fresh=fresh)
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


@pytest.mark.covering(1)
def test_synced_gpus(family: str, mode: dict[str, Any], process_group: None, paged_equals_plain: Compare) -> None:
    model, inputs = models.shared(family), models.batch(*LENGTHS)
    eos = models.ending(model, inputs)
    paged_equals_plain(model, **inputs, **mode, eos_token_id=eos, max_new_tokens=10, synced_gpus=True)
