"""Top-p without sorting: the scores of a row below a cut are removed, which is found by trying several at once.

Knows scores; never requests. Sums are rounded otherwise than transformers' warper rounds them, so that a token whose
sum is within rounding of the limit may be kept here and removed there, or the other way round.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from hf_paged.kernels.triton.launch import Launch

BLOCK, CUTS = 4096, 8  # scores loaded at once, and cuts tried in one pass: not measured


@triton.jit
def _ordered(x):
    """int32 numbers in the order of the fp32 numbers x; its own inverse on their bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def nucleus_kernel(scores, removed, row_stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, CUTS: tl.constexpr):
    """Program r: in row r, the smallest scores whose weights exp(score) make up at most a share removed[r] of all
    become -inf, of equal ones the first; at least one score stays. A row with NaN or without a finite largest score
    stays as it is."""
    row = scores + tl.program_id(0).to(tl.int64) * row_stride
    offsets = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        x = tl.load(row + start + offsets, mask=start + offsets < VOCAB, other=float("-inf"))
        largest = tl.maximum(largest, x)
    peak = tl.max(largest, 0)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, VOCAB, BLOCK):
        x = tl.load(row + start + offsets, mask=start + offsets < VOCAB, other=float("-inf"))
        weights += tl.exp(x - peak)
    total = tl.sum(weights, 0)
    if total == total:  # not NaN
        limit = tl.load(removed + tl.program_id(0)) * total
        # The cut is in (low, high]: the weights up to `low` are within the limit, those up to `high` are not. Scores
        # that are smaller by 104 have no weight in fp32.
        low, high = _ordered(peak - 104.0).to(tl.int64) - 1, _ordered(peak).to(tl.int64)
        below = 0.0
        while high - low > 1:
            step = tl.maximum((high - low) // CUTS, 1)
            cuts = low + step * (tl.arange(0, CUTS) + 1).to(tl.int64)
            inside = cuts < high
            tried = tl.where(inside, cuts, high).to(tl.int32)
            sums = tl.zeros([CUTS], tl.float32)
            for start in tl.range(0, VOCAB, BLOCK):
                x = tl.load(row + start + offsets, mask=start + offsets < VOCAB, other=float("-inf"))
                counted = _ordered(x)[None, :] <= tried[:, None]
                sums += tl.sum(tl.where(counted, tl.exp(x - peak)[None, :], 0.0), 1)
            over = inside & (sums > limit)
            under = inside & (sums <= limit)
            high = tl.min(tl.where(over, cuts, high))
            low = tl.max(tl.where(under, cuts, low))
            below = tl.maximum(below, tl.max(tl.where(under, sums, 0.0)))
        cut = high.to(tl.int32)
        equal = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, VOCAB, BLOCK):
            x = tl.load(row + start + offsets, mask=start + offsets < VOCAB, other=float("-inf"))
            equal += (_ordered(x) == cut).to(tl.int32)
        weight = tl.exp(tl.where(cut < 0, cut ^ 0x7FFFFFFF, cut).to(tl.float32, bitcast=True) - peak)
        num_removed = tl.minimum(tl.floor((limit - below) / weight), (tl.sum(equal, 0) - 1).to(tl.float32)).to(tl.int32)
        before = 0
        for start in tl.range(0, VOCAB, BLOCK):
            inside_row = start + offsets < VOCAB
            x = tl.load(row + start + offsets, mask=inside_row, other=float("-inf"))
            key = _ordered(x)
            tied = (key == cut).to(tl.int32)
            is_early = (tied > 0) & (before + tl.cumsum(tied, 0) <= num_removed)
            tl.store(row + start + offsets, float("-inf"), mask=inside_row & ((key < cut) | is_early))
            before += tl.sum(tied, 0)


def nucleus_launch(scores: torch.Tensor, removed: torch.Tensor) -> Launch:
    args = {
        "scores": scores, "removed": removed, "row_stride": scores.stride(0), "VOCAB": scores.shape[1], "BLOCK": BLOCK,
        "CUTS": CUTS,
    }  # fmt: skip
    return Launch(nucleus_kernel, (scores.shape[0],), args, {"num_warps": 8})


def keep_nucleus_unsorted(scores: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], contiguous in its last dimension, changed in place: of row i, the least likely
    tokens with a probability of removed[i] together (fp32 [num_rows], 1 - top_p) become -inf."""
    if len(scores):
        nucleus_launch(scores, removed).run(scores.device)
    return scores
