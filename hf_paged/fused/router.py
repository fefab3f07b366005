"""Choice of each token's experts and their weights, defined with torch's operations.

The kernel in `gpu/kernels/router.py` computes the same in one launch. Routers are recognised by comparing them with
this definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RouterKind(NamedTuple):
    """A variant of routers of one size.

    scores: of all experts: the logits themselves ("none"), or their "softmax" or "sigmoid". The experts with the
    highest scores are chosen, with a bias (an argument) those with the highest sums of both. "mixer": the logits; the
    weight of a chosen expert is its softmax among those that are not chosen yet and not far below it: by at most
    2 * eps of the larger of both (SparseMixer, arXiv 2409.12136).
    weights: of the scores of the chosen experts: these themselves ("none"), divided by their sum plus eps ("sum") or by
    their sum, at least eps ("clamp"), their "softmax", "sigmoid", or sigmoid divided by the sum ("sigmoid_sum").
    is_low: every operation is rounded to the logits' dtype; else they are computed in fp32.
    groups: the experts are so many groups, of which only the `chosen_groups` whose two highest scores have the highest
    sums are used.
    """

    scores: str = "softmax"
    weights: str = "none"
    is_low: bool = False
    groups: int = 1
    chosen_groups: int = 1


class Router(NamedTuple):
    """A kind with its numbers. scale: of the weights, at last."""

    kind: RouterKind
    top_k: int
    eps: float = 0.0
    scale: float = 1.0


# One program keeps the scores of all experts in registers.
MAX_EXPERTS = 1024


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, router: Router, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_tokens, num_experts], bias [num_experts] -> weights [num_tokens, top_k] of `dtype`, experts int64.

    Of equal scores torch on a CPU takes any, and the kernel the first, as torch.topk does on CUDA.
    """
    kind, top_k = router.kind, router.top_k
    if kind.scores == "mixer":
        weights, index = _mix(logits, router)
        return (weights * router.scale).to(dtype), index
    x = logits if kind.is_low else logits.float()
    scores = x if kind.scores == "none" else x.softmax(-1) if kind.scores == "softmax" else x.sigmoid()
    choice = scores if bias is None else scores + bias
    if kind.groups > 1:
        each = choice.unflatten(-1, (kind.groups, -1))
        best = each.topk(2, -1)[0].sum(-1).topk(kind.chosen_groups, -1)[1]
        # An unused group must lose even if a bias makes all scores of the others negative.
        is_used = torch.zeros_like(each[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = each.masked_fill(~is_used[..., None], -torch.inf).flatten(-2)
    index = choice.topk(top_k, -1)[1]
    # A bias changes the choice alone, so weights are the scores without it.
    weights = scores.gather(-1, index)
    if kind.weights == "softmax":
        weights = weights.softmax(-1)
    elif kind.weights in ("sigmoid", "sigmoid_sum"):
        weights = weights.sigmoid()
    if kind.weights in ("sum", "sigmoid_sum"):
        weights = weights / (weights.sum(-1, keepdim=True) + router.eps)
    elif kind.weights == "clamp":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=router.eps)
    return (weights * router.scale if router.scale != 1 else weights).to(dtype), index


def _mix(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    free, weights, index = logits, [], []
    for _ in range(router.top_k):
        best, place = free.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > 2 * router.eps
        weights.append(free.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, place))
        index.append(place)
        free = free.scatter(-1, place, -torch.inf)
    return torch.cat(weights, -1), torch.cat(index, -1)
