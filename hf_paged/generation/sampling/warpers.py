"""Warpers: transformers' processors that treat every row of the scores on its own and ignore the tokens, so the rows of
several requests can share a call. Knows processors and scores; neither requests nor tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation import logits_process

from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import keep_largest, keep_nucleus

_NO_IDS = torch.zeros(0, 0, dtype=torch.int64, device="cpu")

# Their settings are numbers; rows with equal ones share a call of transformers' own.
_WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
# Settings in which the rows of one call may differ, on a CPU: there, a row gets the same bits with a tensor of settings
# as with a number. CUDA divides by a number in another way than by a tensor.
_OWN_TO_ROWS = {logits_process.TemperatureLogitsWarper: "temperature", logits_process.TopKLogitsWarper: "top_k"}
# These add up a row. torch may split a sum of one row among threads, and several rows otherwise: so row by row.
_SUMMING = (logits_process.TypicalLogitsWarper, logits_process.EtaLogitsWarper)
# These raise if any row has a NaN.
_CHECKING = (logits_process.EtaLogitsWarper, logits_process.TopHLogitsWarper)
# Where torch.sort returns equal scores in an order that only it knows. (On a GPU it sorts rows by a stable radix sort.)
_UNSTABLE = {"cpu"}


def warper_key(processor: Any, *, on_cpu: bool = False) -> object:
    """Equal for warpers that can share a call of `warp`; None if the processor is not one of the known warpers.

    on_cpu: the scores are on a CPU.
    """
    kind = type(processor)
    if kind not in _WARPERS:
        return None
    settings = vars(processor)
    if kind is logits_process.EtaLogitsWarper:
        settings = settings | {"epsilon": float(processor.epsilon)}
    if not all(isinstance(value, (int, float)) for value in settings.values()):
        return None
    free = _OWN_TO_ROWS.get(kind) if on_cpu else None
    return kind, *sorted((name, value) for name, value in settings.items() if name != free)


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
    return keep_nucleus(scores, [each.top_k for each in top_k], top_p[0].top_p)


def warp(warpers: Sequence[Any], scores: torch.Tensor) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], a warper for each row, all of one key -> the scores, bit-identical to
    transformers' own on each row alone. May change `scores` in place.

    A row with NaN, on which some warpers raise an error, becomes NaN.
    """
    warper = warpers[0]
    kind = type(warper)
    if kind is logits_process.TemperatureLogitsWarper:
        values = [each.temperature for each in warpers]
        if len(set(values)) == 1:
            return scores.div_(values[0])
        return scores.div_(to_device(np.array(values, dtype=np.float32)[:, None], scores.device))
    if kind is logits_process.TopKLogitsWarper:
        return keep_largest(scores, [min(each.top_k, scores.shape[1]) for each in warpers], warper.filter_value)
    if kind not in _CHECKING:
        return _called(warper, scores)
    bad = scores.isnan().any(dim=-1, keepdim=True)
    return _called(warper, scores.masked_fill_(bad, 0.0)).masked_fill_(bad, torch.nan)


def _called(warper: Any, scores: torch.Tensor) -> torch.Tensor:
    if type(warper) in _SUMMING and len(scores) > 1:
        return torch.cat([warper(_NO_IDS, row) for row in scores.split(1)])
    warped: torch.Tensor = warper(_NO_IDS, scores)
    return warped
