"""Every logits processor of transformers, custom ones, and what is returned: classes, fields, scores; against plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

import hf_paged
from tests import models

Compare = Callable[..., Any]

LENGTHS = (5, 19, 1, 16)
few = pytest.mark.parametrize("family", models.FEW)
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
    "temperature": ({"temperature": 5.0}, SAMPLING), "top_k": ({"top_k": 2}, SAMPLING),
    "top_p": ({"top_p": 0.5}, SAMPLING), "min_p": ({"min_p": 0.5}, SAMPLING), "top_h": ({"top_h": 0.3}, ("sample",)),
    "typical_p": ({"typical_p": 0.2}, SAMPLING), "epsilon_cutoff": ({"epsilon_cutoff": 0.3}, SAMPLING),
    "eta_cutoff": ({"eta_cutoff": 0.5}, SAMPLING), "repetition_penalty": ({"repetition_penalty": 3.0}, EVERY),
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
    "synth_id": ({"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=3)},
        ("sample",)),
    "renormalize_logits": ({"renormalize_logits": True, "top_k": 5}, SAMPLING),
    "remove_invalid_values": ({"remove_invalid_values": True}, EVERY),
    "everything": (
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "top_k": 20, "top_p": 0.95, "min_p": 0.01,
            "min_new_tokens": 4, "suppress_tokens": [7, 8, 9], "sequence_bias": [[[11], 2.0]],
            "renormalize_logits": True},
        SAMPLING,
    ),
}  # fmt: skip
SELDOM = {"remove_invalid_values"}
"""These change nothing here."""


def _inputs(model: Any, new: int = 10) -> dict[str, Any]:
    inputs = models.batch(*LENGTHS)
    eos = models.ending(model, inputs, step=5)
    return {**inputs, "eos_token_id": eos, "pad_token_id": models.PAD, "max_new_tokens": new}


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, (_, modes) in OPTIONS.items() for mode in modes])
def test_built_in_processor(family: str, name: str, mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    inputs, options = _inputs(model), {**MODES[mode], **OPTIONS[name][0]}
    result = paged_equals_plain(model, **inputs, **options)
    if name not in SELDOM:
        torch.manual_seed(1234)
        assert model.generate(**inputs, **MODES[mode]).tolist() != result.plain.tolist(), "the option must matter"


@pytest.mark.parametrize("mode", EVERY)
def test_forced_bos(mode: str, paged_equals_plain: Compare) -> None:
    """This processor acts only on a history of one token."""
    model, ids = models.shared("llama"), torch.tensor([[5], [9], [33]])
    options = {"forced_bos_token_id": 71, "begin_suppress_tokens": [4, 5], "max_new_tokens": 6, "pad_token_id": 0}
    result = paged_equals_plain(model, ids, **MODES[mode], **options)
    assert (result.paged[:, 1] == 71).all()


@pytest.mark.covering(1)
@few
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


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("others", [{}, {"repetition_penalty": 1.3, "top_k": 30}], ids=["alone", "among others"])
def test_user_processor(family: str, mode: str, others: dict[str, Any], paged_equals_plain: Compare) -> None:
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


@pytest.mark.parametrize("mode", MODES)
def test_prefix_allowed_tokens(mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared("llama")
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


@few
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wanted", ["", "scores", "logits", "scores, logits"])
@pytest.mark.covering(1)
def test_return_dict(family: str, mode: str, wanted: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    options = {f"output_{name}": name in wanted for name in ("scores", "logits")}
    result = paged_equals_plain(model, **_inputs(model), **MODES[mode], **options, return_dict_in_generate=True)
    assert (result.paged.scores is not None) == ("scores" in wanted)
    if "scores" in wanted:
        transitions = []
        for output in (result.paged, result.plain):
            beams = {"beam_indices": output.beam_indices} if "beam_indices" in output else {}
            transitions.append(
                model.compute_transition_scores(output.sequences, output.scores, **beams, normalize_logits=True)
            )
        assert torch.isfinite(transitions[0]).any()
        torch.testing.assert_close(*transitions, atol=1e-3, rtol=1e-3)
    without_a_dict = paged_equals_plain(model, **_inputs(model), **MODES[mode], **options)
    assert torch.equal(without_a_dict.paged, result.paged.sequences)


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("mode", MODES)
def test_attentions_and_hidden_states(family: str, mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family, "eager")
    options = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    result = paged_equals_plain(model, **_inputs(model, 6), **MODES[mode], **options, route="hf_loop")
    assert result.paged.attentions[0][0].shape[-1] == max(LENGTHS)
    assert len(result.paged.hidden_states) == len(result.plain.hidden_states) > 1


@pytest.mark.covering(1)
@few
@pytest.mark.parametrize("mode", ["greedy", "sample", "beams"])
def test_returned_cache_holds_the_rows(family: str, mode: str) -> None:
    """past_key_values: a PagedKVCache with the K/V that the plain cache holds, padding aside."""
    model = models.shared(family)
    options = {**_inputs(model), **MODES[mode], "return_dict_in_generate": True}
    torch.manual_seed(7)
    plain = model.generate(**options).past_key_values
    torch.manual_seed(7)
    paged = model.generate(**options, cache_implementation="paged").past_key_values
    assert isinstance(paged, hf_paged.PagedKVCache)
    assert paged.get_seq_length() == plain.get_seq_length()
    padding = (options["attention_mask"] == 0).sum(1).tolist()
    copies = paged.num_rows // len(padding)
    for expected, actual in zip(plain.layers, paged.layers):
        kept = expected.keys.shape[2]  # a sliding layer keeps its window only
        assert actual.keys.shape == actual.values.shape == expected.keys.shape
        for row in range(paged.num_rows):
            visible = min(kept, paged.get_seq_length() - padding[row // copies])
            for theirs, ours in ((expected.keys, actual.keys), (expected.values, actual.values)):
                torch.testing.assert_close(ours[row, :, -visible:], theirs[row, :, -visible:], atol=1e-3, rtol=1e-3)
    paged.check_integrity()
    paged.reset()


class _Listener(BaseStreamer):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append((value.device.type, value.dtype, value.tolist()))

    def end(self) -> None:
        self.events.append("end")


@pytest.mark.parametrize("rows", [(12,), LENGTHS])
@pytest.mark.parametrize("do_sample", [False, True])
def test_streamer(rows: tuple[int, ...], do_sample: bool, paged_equals_plain: Compare) -> None:
    model, listeners = models.shared("llama"), []

    def fresh() -> dict[str, Any]:
        listeners.append(_Listener())
        return {"streamer": listeners[-1]}

    inputs = models.batch(*rows)
    options = {"eos_token_id": models.ending(model, inputs), "pad_token_id": models.PAD, "max_new_tokens": 8}
    paged_equals_plain(model, **inputs, **options, do_sample=do_sample, fresh=fresh)
    assert listeners[0].events == listeners[1].events
    assert listeners[1].events[-1] == "end"


def test_streamer_with_beams_is_refused_as_by_plain_generate() -> None:
    model, inputs = models.shared("llama"), models.batch(5, 9)
    messages = []
    for given in ({}, {"cache_implementation": "paged"}):
        with pytest.raises(ValueError, match="streamer") as caught:
            model.generate(**inputs, num_beams=2, max_new_tokens=4, streamer=_Listener(), **given)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
