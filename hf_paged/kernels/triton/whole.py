"""Attention where one program processes all keys of a tile of rows: prefill, chunked prefill and short decode steps.

Each program finds its own sequence, so that no partition is needed and the host reads no lengths. Knows a step's
tensors; never layers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.triton.tile import attend, finish, load_rows, lower_bound


@triton.jit(do_not_specialize=["num_seqs", "num_tiles", "min_query", "table_stride", "q_token_stride", "q_head_stride"])
def whole_kernel(
    query, key_cache, value_cache, k_scales, v_scales,
    block_tables, seq_lens, query_start_loc, reach, sinks, alibi_slopes, out, lse,
    num_seqs, num_tiles, min_query, qk_scale, softcap,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride,
    kc_block_stride, kc_slot_stride, kc_head_stride, vc_block_stride, vc_slot_stride, vc_head_stride,
    ks_block_stride, ks_slot_stride, ks_head_stride, vs_block_stride, vs_slot_stride, vs_head_stride,
    C: tl.constexpr, ONE_TILE: tl.constexpr, FULL_TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (i, h): tile num_tiles - 1 - i of the rows of KV head h. The last tiles have most keys and start first.

    The tiles of sequence s start at query_start_loc[s] * GROUP // BM + s, an upper bound of the number of tiles before
    it that needs no prefix sum. Programs between the last tile of a sequence and the first of the next one return.
    ONE_TILE: tile i is sequence i. Sequences with fewer than min_query new tokens are done by another launch.
    FULL_TILES: tiles of keys that every row attends to have a loop without masks; otherwise one loop handles all keys
    (better for few keys or few rows).
    """
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    if ONE_TILE:
        seq = tile
        row_tile = tile * 0
    else:
        seq = tile * 0
        above = num_seqs
        while above - seq > 1:
            middle = (seq + above) // 2
            if tl.load(query_start_loc + middle) * C.GROUP // BM + middle <= tile:
                seq = middle
            else:
                above = middle
        row_tile = tile - (tl.load(query_start_loc + seq) * C.GROUP // BM + seq)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    if (row_tile * BM >= query_len * C.GROUP) | (query_len < min_query):
        return

    rows = row_tile * BM + tl.arange(0, BM)
    valid = rows < query_len * C.GROUP
    # Rows beyond the last token compute this token again, so that no address is out of bounds.
    tokens = tl.where(valid, rows // C.GROUP, query_len - 1)
    heads = head * C.GROUP + rows % C.GROUP
    positions = seq_len - query_len + tokens
    # In int64: a row's offset may exceed 2^31 elements.
    tokens = (query_start + tokens).to(tl.int64)
    q, slopes, peak, total = load_rows(
        query, sinks, alibi_slopes, tokens, heads, valid, q_token_stride * C.Q_UNIT, q_head_stride * C.Q_UNIT,
        C.HEAD_DIM, C.BLOCK_D, C.UPCAST, True,
    )  # fmt: skip
    acc = tl.zeros([BM, BLOCK_DV], tl.float32)

    first_position = seq_len - query_len + row_tile * BM // C.GROUP
    last_position = seq_len - query_len + tl.minimum((row_tile * BM + BM - 1) // C.GROUP, query_len - 1)
    lo = lower_bound(first_position, C.WINDOW, C.CHUNK)
    reaches = positions
    hi = last_position + 1
    if reach is not None:
        reaches = tl.load(reach + tokens, mask=valid, other=0)
        hi = tl.max(reaches, 0) + 1
    table = block_tables + seq.to(tl.int64) * table_stride
    keys = key_cache + head * kc_head_stride
    values = value_cache + head * vc_head_stride
    if k_scales is not None:
        k_scales += head * ks_head_stride
    if v_scales is not None:
        v_scales += head * vs_head_stride
    strides = (kc_block_stride, kc_slot_stride, vc_block_stride, vc_slot_stride)
    scale_strides = (ks_block_stride, ks_slot_stride, vs_block_stride, vs_slot_stride)
    start = lo // BN * BN
    full_start = start
    full_end = start
    if FULL_TILES:
        # Only tiles at the edges of what the rows see pay for masks.
        if C.WINDOW > 0 or C.CHUNK > 0:
            full_start = tl.cdiv(lower_bound(last_position, C.WINDOW, C.CHUNK), BN) * BN
            acc, peak, total = attend(
                q, acc, peak, total, keys, values, k_scales, v_scales, table, start, tl.minimum(full_start, hi), lo, hi,
                positions, reaches, slopes, qk_scale, softcap, strides, scale_strides, C, True, BN, STAGES,
            )  # fmt: skip
        full_end = tl.maximum(full_start, (first_position + 1) // BN * BN)
        acc, peak, total = attend(
            q, acc, peak, total, keys, values, k_scales, v_scales, table, full_start, full_end, lo, hi, positions,
            reaches, slopes, qk_scale, softcap, strides, scale_strides, C, False, BN, STAGES,
        )  # fmt: skip
    acc, peak, total = attend(
        q, acc, peak, total, keys, values, k_scales, v_scales, table, full_end, hi, lo, hi, positions, reaches, slopes,
        qk_scale, softcap, strides, scale_strides, C, True, BN, STAGES,
    )  # fmt: skip
    finish(
        out, lse, acc, peak, total, tokens, heads, valid, out_token_stride, out_head_stride, C.NUM_KV_HEADS * C.GROUP,
        C.V_HEAD_DIM, C.BLOCK_DV,
    )  # fmt: skip
