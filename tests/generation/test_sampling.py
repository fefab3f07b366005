"""Tokens and log-probabilities from rows of logits."""

from __future__ import annotations

import pytest
import torch

from hf_paged.generation.sampling import choose, greedy, largest, logprobs_of


@pytest.mark.parametrize("size", [96, 1000, 128 * 64, 4 * 49152])
@pytest.mark.parametrize("count", [1, 8, 12])
def test_largest_is_topk(size: int, count: int) -> None:
    scores = torch.randn(size)
    assert largest(scores, count).tolist() == torch.topk(scores, count)[1].tolist()
    scores[5 : size // 2] = -float("inf")
    assert largest(scores, count).tolist() == torch.topk(scores, count)[1].tolist()


def test_greedy_uses_up_its_logits() -> None:
    logits = torch.randn(3, 50)
    kept = logits.clone()
    tokens, logprobs = greedy(logits)
    assert tokens.tolist() == kept.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(kept, -1).max(-1)[0])
    kept[1, 7] = float("nan")
    assert torch.isnan(greedy(kept)[1]).tolist() == [False, True, False]


def test_choice_follows_the_generator() -> None:
    scores = torch.randn(4, 20)
    expected = torch.multinomial(torch.softmax(scores, -1), 1, generator=torch.Generator().manual_seed(3))[:, 0]
    tokens = choose(scores, do_sample=True, generator=torch.Generator().manual_seed(3))
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs_of(scores, tokens), torch.log_softmax(scores, -1)[range(4), tokens])
