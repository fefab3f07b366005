"""`generate` with drafts for several prompts: what the call without drafts returns, in fewer forwards."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import hf_paged
from hf_paged import CacheConfig
from hf_paged.features.speculation import draft_model, drafting_decoder
from hf_paged.features.speculation.draft_model import ModelDrafter
from hf_paged.integration.names import CACHE
from hf_paged.model.packed import PackedModel
from tests import conftest, models
from tests.architectures.tiny import tiny_model
from tests.noted import note_calls

IDS = torch.tensor([[0, 0, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [5, 6, 7, 8] * 3, [0, 9, 3, 4, 9, 3, 4, 9, 3, 4, 9, 3]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "pad_token_id": 0, "max_new_tokens": 20}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "eos_token_id": [44, 31, 7]},
    "sample": {"do_sample": True, "temperature": 1.5, "top_k": 5, "eos_token_id": [44, 31]},
    "processors": {"do_sample": True, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "eos_token_id": None},
}


def assistant(family: str, **options: Any) -> Any:
    model = models.build(family, **options)
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def run(model: Any, **options: Any) -> tuple[Any, torch.Tensor, int]:
    """What the call returns, the state of the random numbers after it, and its forwards."""
    torch.manual_seed(3)
    with hf_paged.record_calls() as calls:
        found = model.generate(**{**INPUTS, **options})
    assert all(call.route == "packed" for call in calls)
    return found, torch.random.get_rng_state(), sum(call.steps for call in calls)


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", list(OPTIONS))
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_tokens_and_random_numbers(family: str, case: str) -> None:
    model = models.shared(family)
    expected, state, _ = run(model, **OPTIONS[case])
    plain, _, steps = run(model, cache_implementation="paged", **OPTIONS[case])
    assert torch.equal(plain, expected)
    for drafts in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": assistant(family, seed=1)}):
        found, after, fewer = run(model, cache_implementation="paged", **OPTIONS[case], **drafts)
        assert torch.equal(found, expected) and torch.equal(after, state) and fewer <= steps
    assert conftest.blocks_in_use() == 0


def test_perfect_drafts_need_fewer_forwards() -> None:
    model, small = models.shared("llama"), assistant("llama")
    small.generation_config.num_assistant_tokens = 4
    options = {"cache_implementation": "paged", "do_sample": False, "eos_token_id": None}
    expected, _, steps = run(model, **options)
    found, _, fewer = run(model, assistant_model=small, **options)
    assert torch.equal(found, expected) and (steps, fewer) == (20, 1 + 4)  # 19 tokens, by fives


def test_scores_and_the_cache_are_returned() -> None:
    model = models.shared("llama")
    options = {**OPTIONS["processors"], "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, _, _ = run(model, **options)
    found, _, _ = run(model, cache_implementation="paged", assistant_model=assistant("llama", seed=1), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    cache = found.past_key_values
    assert cache.get_seq_length() == expected.past_key_values.get_seq_length()
    more = {"input_ids": found.sequences, "attention_mask": torch.cat([INPUTS["attention_mask"], torch.ones(3, 20)], 1)}
    again = model.generate(**{**INPUTS, **more}, **{CACHE: cache}, do_sample=False)
    plain = model.generate(**{**INPUTS, **more}, **{CACHE: expected.past_key_values}, do_sample=False)
    assert torch.equal(again, plain)


def test_the_memory_of_drafts_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = note_calls(monkeypatch, ModelDrafter, "close", lambda drafter: drafter)
    options = {"return_dict_in_generate": True, "cache_implementation": "paged", **OPTIONS["greedy"]}
    found, _, _ = run(models.shared("llama"), assistant_model=assistant("llama", seed=1), **options)
    assert len(closed) == 1 and not len(closed[0]._manager) and len(found)


def test_an_interrupt_of_drafts_frees_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # After the manager has got the sequence.
    monkeypatch.setattr(draft_model, "_Followed", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(models.shared("llama"), assistant_model=assistant("llama"), cache_implementation="paged", do_sample=False)
    assert conftest.blocks_in_use() == 0


def test_drafts_give_way_when_blocks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.shared("llama")
    cache = {"cache_config": CacheConfig(num_blocks=24, block_size=4), "cache_implementation": "paged"}
    expected, _, steps = run(model, **cache, **OPTIONS["processors"])
    counts = note_calls(monkeypatch, PackedModel, "run", lambda _, parts: parts.counts)
    found, _, more = run(model, prompt_lookup_num_tokens=20, **cache, **OPTIONS["processors"])
    assert torch.equal(found, expected) and more <= steps
    assert None in counts and all(each is None or max(each) > 1 for each in counts)  # steps without drafts: None


def test_own_tokens_have_precedence_over_a_model_as_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = note_calls(monkeypatch, drafting_decoder, "ModelDrafter", lambda *_: None)
    drafts = {"assistant_model": assistant("llama"), "prompt_lookup_num_tokens": 3}
    run(models.shared("llama"), cache_implementation="paged", do_sample=False, **drafts)
    assert not made


def test_refusals() -> None:
    model = models.shared("llama")
    paged: dict[str, Any] = {"cache_implementation": "paged", "do_sample": False}
    wrong = assistant("llama")
    wrong.generation_config.num_assistant_tokens = 0
    for options, message in (
        (
            {"assistant_model": models.build("llama", vocab_size=40), "tokenizer": None, "assistant_tokenizer": "x"},
            "different tokenizers",
        ),
        ({"assistant_early_exit": 1}, "assistant_early_exit=1: not for several prompts at once"),
        (
            {"assistant_model": models.build("llama"), "assistant_ensemble_weight": 0.5},
            "assistant_ensemble_weight=0.5: not for several prompts",
        ),
        ({"prompt_lookup_num_tokens": 3, "dola_layers": "low"}, "dola_layers='low': not for several prompts"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens=0: an integer from 1 to"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1}, "max_matching_ngram_size=-1: an integer"),
        ({"assistant_model": wrong}, "num_assistant_tokens=0: an integer from 1 to"),
    ):
        with pytest.raises(ValueError, match=message):
            run(model, **paged, **options)
    with pytest.raises(ValueError, match="so that several prompts cannot draft at once; give one prompt"):
        run(tiny_model("lfm2"), prompt_lookup_num_tokens=3, **paged)
    with pytest.raises(ValueError, match="assisted generate is only supported for batch_size = 1"):
        model.generate(**INPUTS, prompt_lookup_num_tokens=3, do_sample=False)
    assert conftest.blocks_in_use() == 0
