"""Logits processors and stopping criteria in the engine: what they may do, and which requests their failures affect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import CacheConfig, Engine
from tests import models
from tests.generation.solo import assert_as_solo, assert_idle, config, ended, solo

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"do_sample": True, "top_k": 0, "seed": 1},
    "samples": {"do_sample": True, "top_k": 0, "seed": 1, "num_return_sequences": 3}, "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "top_k": 0, "seed": 1},
}  # fmt: skip


def with_gradient(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Moves the scores along the gradient of a loss, as guided decoding does."""
    assert not scores.is_inference() and not ids.is_inference()
    with torch.enable_grad():
        shift = torch.zeros_like(scores, requires_grad=True)
        ((scores + shift).softmax(-1)[:, ::3].sum() ** 2).backward()
    assert shift.grad is not None
    return scores + 4000 * shift.grad


def never(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    with torch.enable_grad():
        weight = torch.ones(1, requires_grad=True)
        (ids.float().sum() * weight).backward()
    return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize("kind", KINDS)
def test_processors_and_criteria_may_compute_gradients(kind: str) -> None:
    model = models.shared("llama")
    prompts, made = models.prompts(5, 9), config("greedy", max_new_tokens=6, **KINDS[kind])
    with Engine(model) as engine:
        key = engine.add_request(prompts[0], made, logits_processor=[with_gradient], stopping_criteria=[never])
        other = engine.add_request(prompts[1], made)
        outputs = ended(engine)
        assert_idle(engine)
    assert outputs[key].error is None
    assert_as_solo(model, [outputs[other]], [(prompts[1], made)])
    expected = solo(model, prompts[0], made, logits_processor=[with_gradient])[0]
    assert [c.token_ids for c in outputs[key].outputs] == expected
    assert expected != solo(model, prompts[0], made)[0]


def test_a_criterion_beside_a_penalty_sees_every_token() -> None:
    """A penalty changes other scores in each step, so that nothing is kept of the last step's rows."""
    (prompt,), made = models.prompts(5), config("greedy", repetition_penalty=1.3, eos_token_id=None)
    seen: list[int] = []

    def third(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.shape[1] - len(prompt))
        return torch.full((len(ids),), seen[-1] == 3)

    with Engine(models.shared("llama")) as engine:
        (output,) = engine.generate([prompt], made, stopping_criteria=[[third]])
    assert seen == [1, 2, 3] and output.outputs[0].finish_reason == "stop"
    expected = solo(models.shared("llama"), prompt, made)[0][0]
    assert output.outputs[0].token_ids == expected[:3]


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", [4, -100])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_another_width_fail_their_request_alone(kind: str, change: int) -> None:
    """On a GPU an index beyond the vocabulary ends the process, so the host checks the shape first."""
    model = models.shared("llama")
    vocab = model.config.vocab_size

    def resized(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        more = torch.full((len(scores), max(change, 0)), 99.0)
        return torch.cat([scores, more], dim=1)[:, : max(vocab + change, 0)]

    prompts, made = models.prompts(5, 9), config("greedy", **KINDS[kind])
    with Engine(model, CacheConfig(num_blocks=100)) as engine:
        key = engine.add_request(prompts[0], made, logits_processor=[resized])
        other = engine.add_request(prompts[1], made)
        outputs = ended(engine)
        assert_idle(engine)
    rows = 1 if KINDS[kind].keys() <= {"do_sample", "top_k", "seed"} else 3
    error = f"ValueError: the logits processors returned scores of shape ({rows}, {max(vocab + change, 0)})"
    assert outputs[key].error == f"{error} for ({rows}, {vocab})"
    assert_as_solo(model, [outputs[other]], [(prompts[1], made)])
