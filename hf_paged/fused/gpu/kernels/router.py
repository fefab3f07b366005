"""The experts of each token and their weights, from the logits of all experts, in one launch.

Knows tensors; never modules. The definition is in `hf_paged/fused/router.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_paged.fused.gpu.kernels.gate import sigmoid
from hf_paged.fused.router import Router
from hf_paged.kernels import buffers
from hf_paged.kernels.triton.launch import Launch, RowLaunches, next_power_of_2


@triton.jit
def _rounded(x, LOW: tl.constexpr, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32) if LOW else x


@triton.jit
def _first_best(x, free, each, BLOCK: tl.constexpr):
    """Where the highest x is, of those that are free; the first of equal ones."""
    best = tl.max(tl.where(free, x, -float("inf")), 0)
    return tl.min(tl.where(free & (x == best), each, BLOCK - 1), 0)


@triton.jit
def _in_best_groups(x, inside, each, NUM: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """Return True for experts in the CHOSEN groups whose two highest x have the highest sums."""
    size: tl.constexpr = NUM // GROUPS
    sums = tl.zeros([BLOCK], tl.float32)
    for group in tl.static_range(GROUPS):
        mine = inside & (each // size == group)
        first = _first_best(x, mine, each, BLOCK)
        second = _first_best(x, mine & (each != first), each, BLOCK)
        both = tl.sum(tl.where((each == first) | (each == second), x, 0.0), 0)
        sums = tl.where(mine, both, sums)
    free = inside
    for _ in tl.static_range(CHOSEN):
        best = _first_best(sums, free, each, BLOCK) // size
        free = free & (each // size != best)
    return inside & (free == 0)


@triton.jit
def _is_far(x, best, eps, inside, DTYPE: tl.constexpr):
    """Return True for logits too far below the best to count in its softmax (see `RouterKind`, "mixer")."""
    size = tl.where(inside, tl.abs(x), 1.0)
    gap = _rounded(best - x, True, DTYPE) / tl.where(size < best, best, size)
    return _rounded(gap, True, DTYPE) > _rounded(tl.zeros_like(gap) + 2.0 * eps, True, DTYPE)


@triton.jit
def route_kernel(
    logits, bias, weights, index, eps, scale, SCORES: tl.constexpr, WEIGHTS: tl.constexpr, LOW: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Program t: token t. SLOTS: a power of two, at least TOP_K."""
    token = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK)
    inside = each < NUM_EXPERTS
    dtype: tl.constexpr = logits.dtype.element_ty
    x = tl.load(logits + token * NUM_EXPERTS + each, mask=inside, other=-float("inf")).to(tl.float32)
    if SCORES == "softmax":
        x = tl.exp(x - tl.max(x, 0))
        x = _rounded(x / tl.sum(x, 0), LOW, dtype)
    elif SCORES == "sigmoid":
        x = _rounded(sigmoid(x), LOW, dtype)
    choice = x
    if bias is not None:
        choice = x + tl.load(bias + each, mask=inside, other=0.0).to(tl.float32)
    # NaN is the highest, as in torch.topk.
    choice = tl.where(choice != choice, float("inf"), choice)
    free = inside
    if GROUPS > 1:
        used = _in_best_groups(choice, inside, each, NUM_EXPERTS, GROUPS, CHOSEN_GROUPS, BLOCK)
        choice = tl.where(used, choice, -float("inf"))

    slots = tl.arange(0, SLOTS)
    valid = slots < TOP_K
    chosen = tl.zeros([SLOTS], tl.int32)
    w = tl.zeros([SLOTS], tl.float32)
    for slot in range(TOP_K):
        best = _first_best(choice, free, each, BLOCK)
        score = tl.sum(tl.where(each == best, x, 0.0), 0)
        if SCORES == "mixer":
            is_far = _is_far(x, score, eps, inside, dtype)
            score = 1.0 / tl.sum(tl.where(free & (is_far == 0), tl.exp(x - score), 0.0), 0)
        free = free & (each != best)
        chosen = tl.where(slots == slot, best, chosen)
        w = tl.where(slots == slot, score, w)

    if WEIGHTS == "softmax":
        # Places beyond TOP_K must not count in the sum.
        w = tl.where(valid, w, -float("inf"))
        w = tl.exp(w - tl.max(w, 0))
        w = _rounded(w / tl.sum(w, 0), LOW, dtype)
    elif WEIGHTS == "sigmoid" or WEIGHTS == "sigmoid_sum":
        w = tl.where(valid, _rounded(sigmoid(w), LOW, dtype), 0.0)
    if WEIGHTS == "sum" or WEIGHTS == "sigmoid_sum":
        total = _rounded(_rounded(tl.sum(w, 0), LOW, dtype) + eps, LOW, dtype)
        w = _rounded(w / total, LOW, dtype)
    elif WEIGHTS == "clamp":
        total = tl.sum(w, 0)
        w = w / tl.where(total < eps, eps, total)
    w = w * scale
    tl.store(weights + token * TOP_K + slots, w.to(weights.dtype.element_ty), mask=valid)
    tl.store(index + token * TOP_K + slots, chosen.to(tl.int64), mask=valid)


_launches = RowLaunches()


def route_launch(
    logits: torch.Tensor, bias: torch.Tensor | None, router: Router, weights: torch.Tensor, index: torch.Tensor
) -> Launch:
    """See `route`; weights and index [num_tokens, top_k], contiguous."""
    num_tokens, num_experts = logits.shape
    kind = router.kind
    args = {
        "logits": logits, "bias": bias, "weights": weights, "index": index, "eps": router.eps, "scale": router.scale,
        "SCORES": kind.scores, "WEIGHTS": kind.weights, "LOW": kind.is_low, "GROUPS": kind.groups,
        "CHOSEN_GROUPS": kind.chosen_groups, "NUM_EXPERTS": num_experts, "TOP_K": router.top_k,
        "BLOCK": next_power_of_2(num_experts), "SLOTS": next_power_of_2(router.top_k),
    }  # fmt: skip
    # One warp, so that sums and maxima need no shared memory.
    return Launch(route_kernel, (num_tokens,), args, {"num_warps": 1})


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, router: Router, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [num_tokens, num_experts], bias [num_experts], both contiguous -> weights [num_tokens, top_k] of `dtype`,
    and experts int64 [num_tokens, top_k], by falling scores. Of equal scores, the first expert's counts as higher."""
    weights = buffers.empty((logits.shape[0], router.top_k), dtype, logits.device)
    index = buffers.empty(weights.shape, torch.int64, logits.device)
    if logits.shape[0]:
        tensors: dict[str, torch.Tensor | None] = {"logits": logits, "bias": bias, "weights": weights, "index": index}
        _launches.run(
            len(logits), logits.device, tensors, (router, logits.shape[1]),
            lambda: route_launch(logits, bias, router, weights, index),
        )  # fmt: skip
    return weights, index
