"""Warpers: transformers' processors that treat every row of the scores on its own and ignore the tokens, so the rows of
several requests can share a call. Knows processors and scores; neither requests nor tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from transformers.generation import logits_process

from hf_paged.kernels.sampling import by_row, divide_, keep_largest, keep_nucleus, keep_top_p

_NO_IDS = torch.zeros(0, 0, dtype=torch.int64, device="cpu")

# Their settings are numbers, one of which may differ among the rows of one call; all others must be equal.
_WARPERS = {
    logits_process.TemperatureLogitsWarper: "temperature",
    logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p",
    logits_process.MinPLogitsWarper: "min_p",
    logits_process.TypicalLogitsWarper: "mass",
    logits_process.EpsilonLogitsWarper: "epsilon",
    logits_process.EtaLogitsWarper: "epsilon",
    logits_process.TopHLogitsWarper: "top_h",
    logits_process.InfNanRemoveLogitsProcessor: None,
    logits_process.LogitNormalization: None,
}
# These add up a row. On a CPU torch may split a sum of one row among threads, and several rows otherwise: they go
# row by row.
_SUMMING = (logits_process.TypicalLogitsWarper, logits_process.EtaLogitsWarper)
# Where torch.sort returns equal scores in an order that only it knows. (On a GPU it sorts rows by a stable radix sort.)
_UNSTABLE = {"cpu"}


def warper_key(processor: Any) -> object:
    """Equal for warpers that can share a call of `warp`; None if the processor is not one of the known warpers."""
    kind = type(processor)
    if kind not in _WARPERS:
        return None
    settings = dict(vars(processor))
    own = settings.pop(_WARPERS[kind], 0)
    is_number = isinstance(own, torch.Tensor if kind is logits_process.EtaLogitsWarper else int | float)
    if not is_number or not all(isinstance(value, int | float) for value in settings.values()):
        return None
    return kind, *sorted(settings.items())


def is_drawn_through(processor: Any) -> bool:
    """Return True if `kernels.sampling.sample_top_p` can draw from the tokens that this processor, the last, keeps."""
    return (
        type(processor) is logits_process.TopPLogitsWarper
        and processor.min_tokens_to_keep == 1
        and processor.filter_value == -torch.inf
        # 1 - top_p must be larger than the weight of scores whose exponential is left out, and not all.
        and 1e-6 <= 1 - processor.top_p <= 0.9999
    )


def is_nucleus(top_k: Sequence[Any], top_p: Sequence[Any], scores: torch.Tensor) -> bool:
    """Return True if `warp_nucleus` gives the results of these warpers, each for one row, in less time."""
    first, last = top_k[0], top_p[0]
    return (
        scores.device.type not in _UNSTABLE
        and type(first) is logits_process.TopKLogitsWarper
        and type(last) is logits_process.TopPLogitsWarper
        and first.filter_value == last.filter_value == -torch.inf
        and last.min_tokens_to_keep == 1
        and max(each.top_k for each in top_k) <= scores.shape[1] // 8
    )


def warp_nucleus(top_k: Sequence[Any], top_p: Sequence[Any], scores: torch.Tensor) -> torch.Tensor:
    """`warp` with the one and then the other, for rows of which `is_nucleus` is true."""
    return keep_nucleus(scores, [each.top_k for each in top_k], [each.top_p for each in top_p])


def warp(warpers: Sequence[Any], scores: torch.Tensor) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], a warper for each row, all of one key -> the scores, bit-identical to
    transformers' own on each row alone. May change `scores` in place.

    A row with NaN, on which some warpers raise an error, keeps it.
    """
    warper = warpers[0]
    kind, setting = type(warper), _WARPERS[type(warper)]
    if kind in _SUMMING and scores.device.type == "cpu" and len(scores) > 1:
        return torch.cat([warp([each], row) for each, row in zip(warpers, scores.split(1))])
    # One setting may differ among the rows, see `_WARPERS`.
    values = [getattr(each, setting) for each in warpers] if setting else []
    if kind is logits_process.TemperatureLogitsWarper:
        return divide_(scores, by_row(values, scores.device))
    if kind is logits_process.TopKLogitsWarper:
        return keep_largest(scores, [min(top_k, scores.shape[1]) for top_k in values], warper.filter_value)
    if kind is logits_process.EtaLogitsWarper:
        return _warp_eta(warper, scores, torch.stack(values))
    if kind is logits_process.TopHLogitsWarper:
        return _warp_top_h(warper, scores, by_row(values, scores.device))
    if setting and values.count(values[0]) < len(values):
        if kind is logits_process.TopPLogitsWarper:
            return keep_top_p(scores, values, warper.min_tokens_to_keep, warper.filter_value)
        warper = copy(warper)
        setattr(warper, setting, by_row(values, scores.device))
    warped: torch.Tensor = warper(_NO_IDS, scores)
    return warped


# Transformers' own of these two have torch check the distribution, for which the host waits.


def _warp_eta(warper: Any, scores: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """epsilon fp32 [num_rows]."""
    least = torch.min(epsilon, epsilon.sqrt() * torch.exp(-_entropy(scores)[1]))[:, None]
    kept = torch.topk(scores, min(warper.min_tokens_to_keep, scores.shape[1]))[0][:, -1:]
    return scores.masked_fill((scores.softmax(dim=-1) < least) & (scores < kept), warper.filter_value)


def _warp_top_h(warper: Any, scores: torch.Tensor, top_h: float | torch.Tensor) -> torch.Tensor:
    largest, tokens = torch.topk(scores, min(warper.top_n, scores.shape[1]))
    probs, entropy = _entropy(largest)
    is_kept = (-probs * probs.log()).cumsum(dim=-1) <= entropy[:, None] * top_h
    # As in transformers, the most likely token stays in any case.
    is_kept[:, 0] = True
    removed = torch.ones_like(scores, dtype=torch.bool).scatter_(1, tokens, ~is_kept)
    return scores.masked_fill_(removed, warper.filter_value)


def _entropy(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [num_rows, vocab] and entropies [num_rows], as torch's Categorical computes them."""
    logits = scores - scores.logsumexp(dim=-1, keepdim=True)
    probs = logits.softmax(dim=-1)
    return probs, -(logits.clamp(min=torch.finfo(logits.dtype).min) * probs).sum(dim=-1)
