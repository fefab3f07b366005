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

_NO_IDS = torch.zeros(0, 0, dtype=torch.int64)

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
# These raise if any row has a NaN. Their setting is multiplied by a number of each row, that of others by the row.
_CHECKING = (logits_process.EtaLogitsWarper, logits_process.TopHLogitsWarper)
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
    """Whether `kernels.sampling.sample_top_p` can draw from what this processor keeps, if it is the last one."""
    return (
        type(processor) is logits_process.TopPLogitsWarper
        and processor.min_tokens_to_keep == 1
        and processor.filter_value == -torch.inf
        # 1 - top_p must be larger than the weight of scores whose exponential is left out, and not all.
        and 1e-6 <= 1 - processor.top_p <= 0.9999
    )


def is_nucleus(top_k: Sequence[Any], top_p: Sequence[Any], scores: torch.Tensor) -> bool:
    """Whether `warp_nucleus` does what these warpers, each for one row, do one after the other, and in less time."""
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

    A row with NaN, on which some warpers raise an error, becomes NaN.
    """
    warper, name = warpers[0], _WARPERS[type(warpers[0])]
    kind, values = type(warper), [getattr(each, name) for each in warpers] if name else []
    if kind is logits_process.TemperatureLogitsWarper:
        return divide_(scores, by_row(values, scores.device))
    if kind is logits_process.TopKLogitsWarper:
        return keep_largest(scores, [min(top_k, scores.shape[1]) for top_k in values], warper.filter_value)
    if kind is logits_process.TopPLogitsWarper and len(set(values)) > 1:
        return keep_top_p(scores, values, warper.min_tokens_to_keep, warper.filter_value)
    if kind not in _CHECKING:
        return _called(warpers, values, scores)
    bad = scores.isnan().any(dim=-1, keepdim=True)
    return _called(warpers, values, scores.masked_fill_(bad, 0.0)).masked_fill_(bad, torch.nan)


def _called(warpers: Sequence[Any], values: Sequence[Any], scores: torch.Tensor) -> torch.Tensor:
    """values: the setting of each warper that may differ."""
    if type(warpers[0]) in _SUMMING and scores.device.type == "cpu":
        return torch.cat([warper(_NO_IDS, row) for warper, row in zip(warpers, scores.split(1))])
    warper = warpers[0]
    if len(warpers) > 1 and values:
        own = torch.stack(values) if isinstance(values[0], torch.Tensor) else by_row(values, scores.device)
        if isinstance(own, torch.Tensor):
            warper = copy(warper)
            setattr(warper, str(_WARPERS[type(warper)]), own.flatten() if type(warper) in _CHECKING else own)
    warped: torch.Tensor = warper(_NO_IDS, scores)
    return warped
