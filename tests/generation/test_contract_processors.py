"""Every logits processor of transformers, and custom ones, against plain generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig

from tests import models

Compare = Callable[..., Any]

LENGTHS = (5, 19, 1, 16)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 2.5, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
    "beam sample": {"num_beams": 2, "do_sample": True, "temperature": 2.5},
}
EVERY = ("greedy", "sample", "beams")
SAMPLING = ("sample", "beam sample")

# name -> (options, modes they act in)
OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "temperature": ({"temperature": 5.0}, SAMPLING),
    "top_k": ({"top_k": 2}, SAMPLING),
    "top_p": ({"top_p": 0.5}, SAMPLING),
    "min_p": ({"min_p": 0.5}, SAMPLING),
    "top_h": ({"top_h": 0.3}, ("sample",)),
    "typical_p": ({"typical_p": 0.2}, SAMPLING),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.3}, SAMPLING),
    "eta_cutoff": ({"eta_cutoff": 0.5}, SAMPLING),
    "repetition_penalty": ({"repetition_penalty": 3.0}, EVERY),
    "encoder_repetition_penalty": ({"encoder_repetition_penalty": 0.2}, EVERY),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, EVERY),
    "encoder_no_repeat_ngram_size": ({"encoder_no_repeat_ngram_size": 1}, EVERY),
    "bad_words_ids": ({"bad_words_ids": [[i] for i in range(3, 60)] + [[61, 62]]}, EVERY),
    "sequence_bias": ({"sequence_bias": [[[i], 8.0] for i in range(5, 40, 3)] + [[[50, 8], 9.0]]}, EVERY),
    "suppress_tokens": ({"suppress_tokens": list(range(10, 70))}, EVERY),
    "begin_suppress_tokens": ({"begin_suppress_tokens": list(range(3, 90))}, EVERY),
    "forced_eos_token_id": ({"forced_eos_token_id": 44}, EVERY),
    "exponential_decay_length_penalty": ({"exponential_decay_length_penalty": (2, 1.5)}, EVERY),
    "guidance_scale": ({"guidance_scale": 2.5}, EVERY),
    "watermarking_config": ({"watermarking_config": WatermarkingConfig(bias=8.0, seeding_scheme="lefthash")}, EVERY),
    "synth_id": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=3)},
        ("sample",),
    ),
    "renormalize_logits": ({"renormalize_logits": True, "top_k": 5}, SAMPLING),
    "remove_invalid_values": ({"remove_invalid_values": True}, EVERY),
    "everything": (
        {
            "repetition_penalty": 1.5,
            "no_repeat_ngram_size": 2,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": 0.01,
            "min_new_tokens": 4,
            "suppress_tokens": [7, 8, 9],
            "sequence_bias": [[[11], 2.0]],
            "renormalize_logits": True,
        },
        SAMPLING,
    ),
}
CHANGES_NOTHING = {"remove_invalid_values"}
CASES = [(name, mode) for name, (_, modes) in OPTIONS.items() for mode in modes]


def _inputs(model: Any) -> dict[str, Any]:
    inputs = models.batch(*LENGTHS)
    eos = models.ending(model, inputs, step=5)
    return {**inputs, "eos_token_id": eos, "pad_token_id": models.PAD, "max_new_tokens": 10}


@pytest.mark.quick_cases("llama", "gemma3")
@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.covering(2)
def test_built_in_processor(family: str, name: str, mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    inputs = _inputs(model)
    options = {**MODES[mode], **OPTIONS[name][0]}
    paged_equals_plain(model, **inputs, **options)


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - CHANGES_NOTHING))
def test_option_changes_the_text(name: str) -> None:
    """The comparison above is meaningful only if the option changes the output of plain generate."""
    model = models.shared("llama")
    inputs = _inputs(model)
    changed = False
    for mode in OPTIONS[name][1]:
        torch.manual_seed(1234)
        without = model.generate(**inputs, **MODES[mode])
        torch.manual_seed(1234)
        changed |= model.generate(**inputs, **{**MODES[mode], **OPTIONS[name][0]}).tolist() != without.tolist()
    assert changed


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", EVERY)
def test_forced_bos(family: str, mode: str, paged_equals_plain: Compare) -> None:
    """This processor acts only on a history of one token."""
    model, ids = models.shared(family), torch.tensor([[5], [9], [33]])
    options = {"forced_bos_token_id": 71, "begin_suppress_tokens": [4, 5], "max_new_tokens": 6, "pad_token_id": 0}
    result = paged_equals_plain(model, ids, **MODES[mode], **options)
    assert (result.paged[:, 1] == 71).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", EVERY)
def test_negative_prompt(family: str, mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    inputs = {**models.batch(5, 9), "pad_token_id": models.PAD, "max_new_tokens": 8, "eos_token_id": None}
    expand = MODES[mode].get("num_return_sequences", 1)
    expand = max(expand, MODES[mode].get("num_beams", 1))
    negative = models.batch(*[7] * 2 * expand, seed=9)
    options = {
        "guidance_scale": 1.8,
        "negative_prompt_ids": negative["input_ids"],
        "negative_prompt_attention_mask": negative["attention_mask"],
    }
    paged_equals_plain(model, **inputs, **MODES[mode], **options)


class _Recorder(LogitsProcessor):
    """Raises the score of a token that depends on the whole history and on the other rows; records its arguments."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.seen.append((input_ids.clone(), scores.clone()))
        scores = scores + 0.05 * scores.roll(1, dims=0)
        pushed = (input_ids.sum(1) % models.VOCAB)[:, None]
        return scores.scatter_add(1, pushed, torch.full_like(pushed, 2, dtype=scores.dtype))


@pytest.mark.quick_cases("llama", "gemma3")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.3, "top_k": 30}], ids=["alone", "among others"])
@pytest.mark.covering(2)
def test_user_processor(family: str, mode: str, others: dict[str, Any], paged_equals_plain: Compare) -> None:
    """It gets the rows, the history and the scores that plain generate passes, finished rows included."""
    model = models.shared(family)
    recorders: list[_Recorder] = []

    def fresh() -> dict[str, Any]:
        recorders.append(_Recorder())
        return {"logits_processor": LogitsProcessorList([recorders[-1]])}

    paged_equals_plain(model, **_inputs(model), **MODES[mode], **others, fresh=fresh)
    plain, paged = recorders
    assert len(plain.seen) == len(paged.seen) > 1
    for (expected_ids, expected_scores), (ids, scores) in zip(plain.seen, paged.seen):
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(scores, expected_scores, atol=1e-3, rtol=1e-3)


def test_user_processor_as_a_plain_list_or_function(family: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)

    def ban_even(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -torch.inf
        return scores

    result = paged_equals_plain(model, **_inputs(model), do_sample=False, logits_processor=[ban_even])
    assert (result.paged[:, max(LENGTHS)] % 2 == 1).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
def test_prefix_allowed_tokens(family: str, mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    logs: list[list[tuple[int, list[int]]]] = []

    def fresh() -> dict[str, Any]:
        log: list[tuple[int, list[int]]] = []
        logs.append(log)

        def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
            log.append((batch_id, ids.tolist()))
            return [t for t in range(models.VOCAB) if (t + int(ids[-1]) + batch_id) % 3]

        return {"prefix_allowed_tokens_fn": allowed}

    paged_equals_plain(model, **_inputs(model), **MODES[mode], fresh=fresh)
    assert logs[0] == logs[1]
