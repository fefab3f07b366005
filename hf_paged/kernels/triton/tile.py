"""The inner part of both attention kernels: one tile of query rows against a range of keys, online softmax in base 2.

A row is one query head of one token. The heads of a GQA group are adjacent rows, so that a tile reads each K/V head
once. Knows positions and blocks; never which sequence a program works on.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Constants(NamedTuple):
    """Constants of compiled attention: sizes of a layer and of blocks, and the options of its calls."""

    NUM_KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    V_HEAD_DIM: int
    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_SIZE: int
    Q_UNIT: int
    WINDOW: int
    CHUNK: int
    SOFTCAP: bool
    ALIBI: bool
    SCALE_FIRST: bool
    SAME_STRIDES: bool
    UPCAST: bool


@triton.jit
def lower_bound(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first key that a query at `position` attends to. It never decreases with `position`."""
    bound = position * 0
    if WINDOW > 0:
        bound = tl.maximum(bound, position - WINDOW + 1)
    if CHUNK > 0:
        bound = tl.maximum(bound, position // CHUNK * CHUNK)
    return bound


@triton.jit
def tile_rows(num_rows, BM: tl.constexpr, MANY: tl.constexpr):
    """Return the rows of a tile of a unit with `num_rows` rows: BM if one tile has all, else MANY. So sequences with a
    common prefix, or several new tokens of a sequence, read each key once."""
    return tl.where(num_rows > BM, MANY, BM)


@triton.jit
def load_block_ids(table, start, lo, hi, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr):
    """Block ids of keys [start, start + BN): one id if they are in one block, else one per key. 0 outside [lo, hi)."""
    if BLOCK_SIZE % BN == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=(start < hi) & (start + BN > lo), other=0)
    else:
        keys = start + tl.arange(0, BN)
        return tl.load(table + keys // BLOCK_SIZE, mask=(keys >= lo) & (keys < hi), other=0)


@triton.jit
def load_scales(scales, ids, slots, keys, lo, hi, block_stride, slot_stride, MASKED: tl.constexpr):
    """The scales of these keys or values [BN]. 0 outside [lo, hi), where slots may hold NaN."""
    pointers = scales + ids.to(tl.int64) * block_stride + slots * slot_stride
    if MASKED:
        return tl.load(pointers, mask=(keys >= lo) & (keys < hi), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def attend(
    q, acc, peak, total, key_cache, value_cache, k_scales, v_scales, table, first, last, lo, hi, positions, reaches,
    slopes, qk_scale, softcap, strides, scale_strides,
    C: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Accumulate keys [first, last) in acc [BM, BLOCK_DV], peak [BM] (running maximum) and total [BM] (running sum).

    Row i is at positions[i] and attends to keys up to reaches[i]. first is a multiple of BN. Neither keys outside
    [lo, hi) nor their block ids are loaded. Without MASKED, every row attends to every key of the range. k_scales,
    v_scales: of keys and values in eight bits, else None. strides, scale_strides: of blocks and slots, first those of
    keys, then of values. Scores are exponents to base 2: qk_scale, softcap and slopes contain a factor log2(e).
    """
    kc_block_stride, kc_slot_stride, vc_block_stride, vc_slot_stride = strides
    ks_block_stride, ks_slot_stride, vs_block_stride, vs_slot_stride = scale_strides
    offsets = tl.arange(0, BN)
    k_dims, v_dims = tl.arange(0, C.BLOCK_D), tl.arange(0, C.BLOCK_DV)
    # The block ids of the next tile are loaded one iteration ahead: a load whose address depends on a load of the same
    # iteration costs the pipeline half of its buffers. They are carried over without a cast: a cast between the load
    # and the end of the loop body makes the compiler wait for every copy in the iteration that issues it.
    ids = load_block_ids(table, first, lo, hi, C.BLOCK_SIZE, BN)
    for start in tl.range(first, last, BN, num_stages=STAGES):
        keys = start + offsets
        slots = keys % C.BLOCK_SIZE
        k_rows = ids.to(tl.int64) * kc_block_stride + slots * kc_slot_stride
        v_rows = k_rows
        if not C.SAME_STRIDES:
            v_rows = ids.to(tl.int64) * vc_block_stride + slots * vc_slot_stride
        k_pointers = key_cache + k_rows[:, None] + k_dims[None, :]
        v_pointers = value_cache + v_rows[:, None] + v_dims[None, :]
        if MASKED:
            # Slots outside the range may hold NaN, and 0 * NaN would reach the output through V.
            inside = ((keys >= lo) & (keys < hi))[:, None]
            k = tl.load(k_pointers, mask=inside & (k_dims < C.HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_pointers, mask=inside & (v_dims < C.V_HEAD_DIM)[None, :], other=0.0)
        else:
            if C.HEAD_DIM == C.BLOCK_D:
                k = tl.load(k_pointers)
            else:
                k = tl.load(k_pointers, mask=(k_dims < C.HEAD_DIM)[None, :], other=0.0)
            if C.V_HEAD_DIM == C.BLOCK_DV:
                v = tl.load(v_pointers)
            else:
                v = tl.load(v_pointers, mask=(v_dims < C.V_HEAD_DIM)[None, :], other=0.0)
        if k_scales is not None:
            k_scale = load_scales(k_scales, ids, slots, keys, lo, hi, ks_block_stride, ks_slot_stride, MASKED)
        if v_scales is not None:
            v_scale = load_scales(v_scales, ids, slots, keys, lo, hi, vs_block_stride, vs_slot_stride, MASKED)
        ids = load_block_ids(table, start + BN, lo, hi, C.BLOCK_SIZE, BN)

        # "ieee", because tf32 would round fp32 elements to 10 bits.
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")  # [BM, BN]
        if k_scales is not None:
            scores *= k_scale[None, :]
        if C.SCALE_FIRST:
            scores *= qk_scale
        if C.SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1) is safe from overflow: e^2x = inf gives 1. qk_scale turns the product into
            # log2(e^2x).
            scores = softcap - 2.0 * softcap / (tl.exp2(scores) + 1.0)
        if C.ALIBI:
            scores += slopes[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            visible = keys[None, :] <= reaches[:, None]
            if C.WINDOW > 0 or C.CHUNK > 0:
                visible &= keys[None, :] >= lower_bound(positions, C.WINDOW, C.CHUNK)[:, None]
            scores = tl.where(visible, scores, float("-inf"))

        # Without options the scale is part of the exponent below: one fused operation a score.
        if C.SCALE_FIRST:
            new_peak = tl.maximum(peak, tl.max(scores, 1))
        else:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
        shift = new_peak
        if MASKED:  # a row that has seen no key yet
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        if C.SCALE_FIRST:
            weights = tl.exp2(scores - shift[:, None])
        else:
            weights = tl.exp2(scores * qk_scale - shift[:, None])
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, 1)
        if v_scales is not None:
            weights *= v_scale[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def load_rows(
    query, sinks, alibi_slopes, tokens, heads, valid, q_token_stride, q_head_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, with_sinks,
):  # fmt: skip
    """q [BM, BLOCK_D], and slopes, peak and total [BM] before the first key. A sink counts as a key without a value."""
    dims = tl.arange(0, BLOCK_D)
    rows = tokens * q_token_stride + heads * q_head_stride
    q = tl.load(query + rows[:, None] + dims[None, :], mask=valid[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    slopes = tl.zeros([tokens.shape[0]], tl.float32)
    if alibi_slopes is not None:
        # Times log2(e), as sinks below: scores are exponents to base 2.
        slopes = tl.load(alibi_slopes + heads, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
    peak = tl.full([tokens.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([tokens.shape[0]], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid & with_sinks, other=float("-inf")).to(tl.float32)
        peak = sink * 1.4426950408889634
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    return q, slopes, peak, total


@triton.jit
def finish(
    out, lse, acc, peak, total, tokens, heads, valid, out_token_stride, out_head_stride,
    NUM_HEADS: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write the final rows: the output, and the log-sum-exp (natural logarithm) if `lse` is given."""
    dims = tl.arange(0, BLOCK_DV)
    rows = tokens * out_token_stride + heads * out_head_stride
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] + dims[None, :], result, mask=valid[:, None] & (dims < V_HEAD_DIM)[None, :])
    if lse is not None:
        tl.store(lse + tokens * NUM_HEADS + heads, (peak + tl.log2(total)) * 0.6931471805599453, mask=valid)
