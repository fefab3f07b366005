"""What `generate(cache_implementation="paged")` returns: classes, fields, scores; against plain generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer

import hf_paged
from tests import models

Compare = Callable[..., Any]

LENGTHS = (5, 19, 1, 16)
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 2.5, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
    "beam sample": {"num_beams": 2, "do_sample": True, "temperature": 2.5},
}


def _inputs(model: Any, new: int = 10) -> dict[str, Any]:
    inputs = models.batch(*LENGTHS)
    eos = models.ending(model, inputs)
    return {**inputs, "eos_token_id": eos, "pad_token_id": models.PAD, "max_new_tokens": new}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"output_scores": True},
        {"output_logits": True},
        {"output_scores": True, "output_logits": True},
    ],
    ids=["bare", "scores", "logits", "both"],
)
@pytest.mark.covering(2)
def test_return_dict(family: str, mode: str, wanted: dict[str, bool], paged_equals_plain: Compare) -> None:
    model = models.shared(family)
    result = paged_equals_plain(model, **_inputs(model), **MODES[mode], **wanted, return_dict_in_generate=True)
    assert (result.paged.scores is not None) == wanted.get("output_scores", False)


@pytest.mark.parametrize("mode", MODES)
def test_output_flags_without_a_dict_change_nothing(mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared("llama")
    paged_equals_plain(model, **_inputs(model), **MODES[mode], output_scores=True, output_logits=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
def test_attentions_and_hidden_states(family: str, mode: str, paged_equals_plain: Compare) -> None:
    model = models.shared(family, "eager")
    options = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    result = paged_equals_plain(model, **_inputs(model, 6), **MODES[mode], **options, route="hf_loop")
    assert result.paged.attentions[0][0].shape[-1] == max(LENGTHS)
    assert len(result.paged.hidden_states) == len(result.plain.hidden_states) > 1


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", MODES)
def test_transition_scores(family: str, mode: str) -> None:
    model = models.shared(family)
    options = {**_inputs(model), **MODES[mode], "return_dict_in_generate": True, "output_scores": True}
    scores = []
    for given in ({}, {"cache_implementation": "paged"}):
        torch.manual_seed(7)
        output = model.generate(**options, **given)
        beams = {"beam_indices": output.beam_indices} if "beam_indices" in output else {}
        scores.append(model.compute_transition_scores(output.sequences, output.scores, **beams, normalize_logits=True))
    assert torch.isfinite(scores[0]).any()
    torch.testing.assert_close(scores[1], scores[0], atol=1e-3, rtol=1e-3)


@pytest.mark.covering(1)
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
        kept = expected.keys.shape[2]  # a plain sliding layer keeps its window only
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("rows", [(12,), LENGTHS])
@pytest.mark.parametrize("do_sample", [False, True])
def test_streamer(family: str, rows: tuple[int, ...], do_sample: bool, paged_equals_plain: Compare) -> None:
    model, listeners = models.shared(family), []

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


def test_text_streamer_from_another_thread() -> None:
    import threading

    model, tokenizer = models.shared("llama"), models.tokenizer()
    inputs = {"input_ids": models.prompts(9)[0][None], "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = tokenizer.decode(model.generate(**inputs)[0, 9:])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(
        target=model.generate, kwargs={**inputs, "streamer": streamer, "cache_implementation": "paged"}
    )
    thread.start()
    assert "".join(streamer) == expected
    thread.join()
