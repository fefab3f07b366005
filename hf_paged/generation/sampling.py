"""Logits to tokens and log-probabilities. Knows rows of logits; never requests or sequences."""

from __future__ import annotations

import torch


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits fp32 [num_rows, vocab] -> the most likely tokens int64 [num_rows], their log-probabilities [num_rows].

    A log-probability is NaN where the logits are. The logits are used up: what is left in them is no use to anyone.
    """
    # On a CPU max is 30 times faster than argmax.
    scores, tokens = logits.max(dim=-1)
    # score - logsumexp(logits), without a temporary as large as the logits.
    return tokens, -logits.sub_(scores[:, None]).exp_().sum(dim=-1).log_()


def choose(scores: torch.Tensor, *, do_sample: bool, generator: torch.Generator | None) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], after all processors -> tokens int64 [num_rows].

    Uses up random numbers exactly as transformers' sampling loop does.
    """
    if not do_sample:
        return scores.max(dim=-1)[1]
    return torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator).squeeze(1)


def largest(scores: torch.Tensor, count: int, *, run: int = 128) -> torch.Tensor:
    """scores fp32 [size] -> the indices int64 [count] of the largest, in descending order.

    They lie in the `count` runs with the largest maxima; looking only there takes a fifth of a topk over everything.
    """
    if scores.numel() % run or scores.numel() < 2 * count * run:
        return torch.topk(scores, count)[1]
    runs = scores.view(-1, run)
    # Runs in ascending order, so that ties are met in the order of the whole.
    best = torch.topk(runs.amax(dim=1), count)[1].sort()[0]
    chosen = torch.topk(runs[best].view(-1), count)[1]
    return best[chosen // run] * run + chosen % run


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [num_rows] of tokens int64 [num_rows] under the distributions of scores [num_rows, vocab]."""
    return scores.gather(1, tokens[:, None]).squeeze(1) - torch.logsumexp(scores, dim=-1)
