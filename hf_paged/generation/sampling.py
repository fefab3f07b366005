"""Logits to tokens and log-probabilities. Knows rows of logits; never requests or sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_paged.kernels import cpu_native, ops


def greedy(
    logits: torch.Tensor, to_fp32: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits.float().clone()
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_rows, vocab] -> the most likely tokens int64 [num_rows], their log-probabilities fp32 [num_rows].

    A log-probability is NaN where the logits are. to_fp32: makes a copy to use up, where one is needed.
    """
    if ops.default_impl(logits.device) == "native" and cpu_native.supports(logits.dtype) and logits.stride(1) == 1:
        return cpu_native.greedy(logits)
    wide = to_fp32(logits)
    scores, tokens = most_likely(wide)
    # score - logsumexp(logits), without a temporary as large as the logits.
    return tokens, -wide.sub_(scores[:, None]).exp_().sum(dim=-1).log_()


def most_likely(scores: torch.Tensor, *, run: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """scores fp32 [num_rows, vocab] -> the largest of each row and its (first) index int64, both [num_rows].

    On a CPU max is 30 times faster than argmax, and looking for the run with the maximum first halves that again.
    """
    if scores.device.type != "cpu" or scores.shape[1] % run:
        return scores.max(dim=-1)
    runs = scores.view(len(scores), -1, run)
    best = runs.amax(dim=-1).max(dim=-1)[1]
    values, index = runs[torch.arange(len(scores)), best].max(dim=-1)
    return values, best * run + index


def to_host(tokens: torch.Tensor, *values: torch.Tensor) -> tuple[list[int], *tuple[list[float], ...]]:
    """Tokens int64 [n] and some fp32 [n] of theirs, as lists."""
    if tokens.device.type == "cpu":
        return tokens.tolist(), *(row.tolist() for row in values)
    return _in_one_transfer(tokens, *values)


def _in_one_transfer(tokens: torch.Tensor, *values: torch.Tensor) -> tuple[list[int], *tuple[list[float], ...]]:
    """The host waits for the device once. fp64 holds ids up to 2**53 and every fp32 as they are."""
    first, *others = torch.stack([row.double() for row in (tokens, *values)]).tolist()
    return list(map(int, first)), *others


def choose(scores: torch.Tensor, *, do_sample: bool, generator: torch.Generator | None) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], after all processors -> tokens int64 [num_rows].

    Uses up random numbers exactly as transformers' sampling loop does.
    """
    if not do_sample:
        return most_likely(scores)[1]
    return torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator).squeeze(1)


def largest(
    scores: torch.Tensor, offsets: torch.Tensor, count: int, *, run: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of scores fp32 [num_rows, vocab] + offsets [num_rows], in descending order: their indices in the
    flattened scores int64 [count], and their values [count].

    They lie in the `count` runs with the largest maxima; looking only there takes a fifth of a topk over everything.
    """
    num_rows, vocab = scores.shape
    offsets = offsets[:, None]
    if vocab % run or scores.numel() < 2 * count * run:
        values, index = torch.topk((scores + offsets).view(-1), count)
        return index, values
    runs = scores.view(num_rows, -1, run)
    # Rounding keeps the order: the maximum plus the offset is the maximum of what the sums would be.
    maxima = runs.amax(dim=2) + offsets
    # Runs in ascending order, so that ties are met in the order of the whole.
    best = torch.topk(maxima.view(-1), count)[1].sort()[0]
    rows = best // maxima.shape[1]
    values, chosen = torch.topk((runs[rows, best % maxima.shape[1]] + offsets[rows]).view(-1), count)
    return best[chosen // run] * run + chosen % run, values


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [num_rows] of tokens int64 [num_rows] under the distributions of scores [num_rows, vocab]."""
    return scores.gather(1, tokens[:, None]).squeeze(1) - torch.logsumexp(scores, dim=-1)
