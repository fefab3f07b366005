"""Attention whose work a partition cuts into equal runs of tiles: decode, and verification of a few speculative tokens.

A run with all keys of its rows writes the output. Other runs write partial results, to be combined by their
log-sum-exp: by the last program that has a part of them, or by a second kernel. Knows a step's tensors and its
Partition; never layers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

import triton
import triton.language as tl

from hf_paged.kernels.triton.tile import attend, finish, load_rows, lower_bound, tile_rows


@triton.jit
def _attend_item(
    query, key_cache, value_cache, k_scales, v_scales,
    block_tables, seq_lens, query_start_loc, sinks, alibi_slopes, out, lse,
    order, partial_out, partial_lse, qk_scale, softcap,
    q_strides, out_strides, table_stride, strides, scale_strides, head_strides,
    first, num_tokens, first_tile, num_tiles, private, item, skipped, length, slot,
    C: tl.constexpr, SHARE: tl.constexpr, LINES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`length` tiles of one item, from tile `skipped` on, with BM rows in a tile. A partial result goes to `slot`,
    counted in LINES rows. Returns whether it is partial.

    first: the sequence of a private unit; the place in `order` of a shared unit's first sequence. q_strides,
    out_strides: of a token and a head. strides, scale_strides: see `attend`. head_strides: of keys, values, and their
    scales.
    """
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    row_tiles = tl.cdiv(num_tokens * C.GROUP, BM)
    head = item // row_tiles
    rows = (item % row_tiles) * BM + tl.arange(0, BM)
    valid = rows < num_tokens * C.GROUP
    index = tl.where(valid, rows // C.GROUP, num_tokens - 1)
    heads = head * C.GROUP + rows % C.GROUP
    lead = first
    if SHARE:  # a shared unit has one token from each of its sequences
        lead = tl.where(private, first, tl.load(order + first))
        seqs = tl.load(order + first + index, mask=(index * 0 == 0) & (not private), other=0)
        seqs = tl.where(private, first, seqs)
        index = tl.where(private, index, 0)
        tokens = (tl.load(query_start_loc + seqs) + index).to(tl.int64)
        positions = tl.load(seq_lens + seqs) - tl.where(private, num_tokens, 1) + index
        hi = tl.load(seq_lens + lead)
    else:
        tokens = (tl.load(query_start_loc + first) + index).to(tl.int64)
        hi = tl.load(seq_lens + first)
        positions = hi - num_tokens + index
    # A sink counts once for a row: in the part with the first private tile.
    q, slopes, peak, total = load_rows(
        query, sinks, alibi_slopes, tokens, heads, valid, q_strides[0] * C.Q_UNIT, q_strides[1] * C.Q_UNIT, C.HEAD_DIM,
        C.BLOCK_D, C.UPCAST, private & (skipped == 0),
    )  # fmt: skip
    start = (first_tile + skipped) * BN
    lo = start
    if C.WINDOW > 0 or C.CHUNK > 0:
        lo = tl.maximum(start, lower_bound(hi - num_tokens, C.WINDOW, C.CHUNK))
    hi = tl.minimum(hi, start + length * BN)
    if k_scales is not None:
        k_scales += head * head_strides[2]
    if v_scales is not None:
        v_scales += head * head_strides[3]
    acc, peak, total = attend(
        q, tl.zeros([BM, BLOCK_DV], tl.float32), peak, total,
        key_cache + head * head_strides[0], value_cache + head * head_strides[1],
        k_scales, v_scales, block_tables + lead.to(tl.int64) * table_stride, start, hi, lo, hi, positions, positions,
        slopes, qk_scale, softcap, strides, scale_strides, C, True, BN, STAGES,
    )  # fmt: skip
    # A private unit that starts after a shared prefix is partial as well.
    whole = private & (length == num_tiles) & ((first_tile == 0) | (not SHARE))
    if whole:
        finish(
            out, lse, acc, peak, total, tokens, heads, valid, out_strides[0], out_strides[1],
            C.NUM_KV_HEADS * C.GROUP, C.V_HEAD_DIM, C.BLOCK_DV,
        )  # fmt: skip
    else:
        lines = slot.to(tl.int64) * LINES + tl.arange(0, BM)
        dims = tl.arange(0, C.BLOCK_DV)
        # A part without visible keys has no weight; dividing by its sum of 0 would make it NaN.
        seen = total > 0.0
        total = tl.where(seen, total, 1.0)
        result = acc / total[:, None]
        tl.store(
            partial_out + lines[:, None] * C.V_HEAD_DIM + dims[None, :], result,
            mask=valid[:, None] & (dims < C.V_HEAD_DIM)[None, :],
        )  # fmt: skip
        tl.store(partial_lse + lines, tl.where(seen, peak + tl.log2(total), float("-inf")), mask=valid)
    return not whole


@triton.jit
def _combine_item(
    query_start_loc, out, lse, partial_out, partial_lse, arrivals, seq, head, start, num_tiles, per_program, number,
    out_token_stride, out_head_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of an item (a KV head of a sequence with one new token) in the program that finishes last.

    The order of the parts is that of the programs, whichever is the last, so that the result has the same bits.
    start: number of the item's first tile. number: of the item; `arrivals` counts its parts, and is 0 afterwards.
    ROWS: a power of two from GROUP on. PARTS: how many are loaded at once.
    """
    first, last = start // per_program, (start + num_tiles - 1) // per_program
    # All threads must have written their share of the part before one of them counts it.
    tl.debug_barrier()
    # Release: what this program has written comes first. Acquire: the last one sees what the others wrote.
    if tl.atomic_add(arrivals + number, 1, sem="acq_rel", scope="gpu") == last - first:
        tl.debug_barrier()
        # For the next layer, whose attention uses the same partition.
        tl.store(arrivals + number, 0)
        rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_DV)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for base in tl.range(first, last + 1, PARTS):
            programs = base + tl.arange(0, PARTS)
            lines = (programs + number).to(tl.int64)[:, None] * BM + rows[None, :]
            inside = (programs <= last)[:, None] & (rows < GROUP)[None, :]
            # Not from the first-level cache, which other cores do not write.
            lses = tl.load(partial_lse + lines, mask=inside, other=float("-inf"), cache_modifier=".cg")
            parts = tl.load(
                partial_out + lines[:, :, None] * V_HEAD_DIM + dims[None, None, :],
                mask=inside[:, :, None] & (dims < V_HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_peak = tl.maximum(peak, tl.max(lses, 0))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(lses - shift[None, :])
            decay = tl.exp2(peak - shift)
            acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * parts, 0)
            total = total * decay + tl.sum(weights, 0)
            peak = new_peak
        tokens = tl.load(query_start_loc + seq).to(tl.int64) + rows * 0
        finish(
            out, lse, acc, peak, total, tokens, head * GROUP + rows, rows < GROUP, out_token_stride, out_head_stride,
            NUM_KV_HEADS * GROUP, V_HEAD_DIM, BLOCK_DV,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_units", "num_seqs", "table_stride", "q_token_stride", "q_head_stride"])
def split_kernel(
    query, key_cache, value_cache, k_scales, v_scales,
    block_tables, seq_lens, query_start_loc, sinks, alibi_slopes, out, lse,
    units, tile_starts, item_starts, schedule, order, arrivals, partial_out, partial_lse, qk_scale, softcap,
    q_token_stride, q_head_stride, out_token_stride, out_head_stride, table_stride,
    kc_block_stride, kc_slot_stride, kc_head_stride, vc_block_stride, vc_slot_stride, vc_head_stride,
    ks_block_stride, ks_slot_stride, ks_head_stride, vs_block_stride, vs_slot_stride, vs_head_stride,
    num_units, num_seqs,
    C: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    MANY: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p processes its run of tiles, item by item, with BM or MANY rows in a tile (see `tile.tile_rows`).

    Its partial result of an item goes to slot p * MANY / BM + s, where s is the number of slots of all items before.
    No two partial results overlap, because p and s never decrease along the tiles.
    partial_out fp32 [slots, BM, V_HEAD_DIM], partial_lse fp32 [slots, BM] to base 2.

    PARTS: partial results are combined here, so many at once; 0: by the reduce kernel. Here it is possible if no
    sequence has more than one new token and none shares.
    """
    q_strides = (q_token_stride, q_head_stride)
    out_strides = (out_token_stride, out_head_stride)
    strides = (kc_block_stride, kc_slot_stride, vc_block_stride, vc_slot_stride)
    scale_strides = (ks_block_stride, ks_slot_stride, vs_block_stride, vs_slot_stride)
    head_strides = (kc_head_stride, vc_head_stride, ks_head_stride, vs_head_stride)
    program = tl.program_id(0)
    per_program = tl.load(schedule)
    tile = program * per_program
    stop = tl.minimum(tile + per_program, tl.load(tile_starts + num_units))
    unit = tl.load(schedule + 1 + program)
    while tile < stop:
        while tl.load(tile_starts + unit + 1) <= tile:
            unit += 1
        first = tl.load(units + unit * 4)
        num_tokens = tl.load(units + unit * 4 + 1)
        first_tile = tl.load(units + unit * 4 + 2)
        num_tiles = tl.load(units + unit * 4 + 3)
        offset = tile - tl.load(tile_starts + unit)
        item = offset // num_tiles
        skipped = offset % num_tiles
        length = tl.minimum(num_tiles - skipped, stop - tile)
        private = unit >= num_units - num_seqs
        slot = program * (MANY // BM) + tl.load(item_starts + unit)
        # The number of rows is a constant of compiled code, so each of the two has a call.
        if (MANY > BM) & (num_tokens * C.GROUP > BM):
            _attend_item(
                query, key_cache, value_cache, k_scales, v_scales, block_tables, seq_lens, query_start_loc, sinks,
                alibi_slopes, out, lse, order, partial_out, partial_lse, qk_scale, softcap, q_strides, out_strides,
                table_stride, strides, scale_strides, head_strides, first, num_tokens, first_tile, num_tiles, private,
                item, skipped, length, slot + item * (MANY // BM), C, SHARE, BM, MANY, BN, STAGES,
            )  # fmt: skip
        else:
            partial = _attend_item(
                query, key_cache, value_cache, k_scales, v_scales, block_tables, seq_lens, query_start_loc, sinks,
                alibi_slopes, out, lse, order, partial_out, partial_lse, qk_scale, softcap, q_strides, out_strides,
                table_stride, strides, scale_strides, head_strides, first, num_tokens, first_tile, num_tiles, private,
                item, skipped, length, slot + item, C, SHARE, BM, BM, BN, STAGES,
            )  # fmt: skip
            if PARTS > 0 and partial:
                _combine_item(
                    query_start_loc, out, lse, partial_out, partial_lse, arrivals, first, item, tile - skipped,
                    num_tiles, per_program, slot + item - program, out_token_stride, out_head_stride,
                    C.NUM_KV_HEADS, C.GROUP, C.V_HEAD_DIM, C.BLOCK_DV, BM, ROWS, PARTS,
                )  # fmt: skip
        tile += length


@triton.jit
def _add_partials(
    acc, peak, total, partial_out, partial_lse, tile_starts, item_starts, units, per_program, unit, row, head,
    GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, MANY: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Accumulate the partial results of one row of a unit in acc [BLOCK_DV], peak and total."""
    num_rows = tl.load(units + unit * 4 + 1) * GROUP
    rows = tile_rows(num_rows, BM, MANY)
    item = head * tl.cdiv(num_rows, rows) + row // rows
    num_tiles = tl.load(units + unit * 4 + 3)
    start = tl.load(tile_starts + unit) + item * num_tiles
    first, last = start // per_program, (start + num_tiles - 1) // per_program
    line = (tl.load(item_starts + unit) + item * (rows // BM)).to(tl.int64) * BM + row % rows
    dims = tl.arange(0, BLOCK_DV)
    for base in tl.range(first, last + 1, SPLITS):
        programs = base + tl.arange(0, SPLITS)
        inside = programs <= last
        lines = programs.to(tl.int64) * MANY + line
        lses = tl.load(partial_lse + lines, mask=inside, other=float("-inf"))
        mask = inside[:, None] & (dims < V_HEAD_DIM)[None, :]
        parts = tl.load(partial_out + lines[:, None] * V_HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lses))
        # A part without visible keys has -inf, and -inf - -inf would be NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(lses - shift)
        decay = tl.exp2(peak - shift)
        acc = acc * decay + tl.sum(weights[:, None] * parts, 0)
        total = total * decay + tl.sum(weights)
        peak = new_peak
    return acc, peak, total


@triton.jit(do_not_specialize=["num_units", "num_seqs", "max_query"])
def reduce_kernel(
    query_start_loc, out, lse, units, tile_starts, item_starts, schedule, groups, ranks, token_starts, partial_out,
    partial_lse, out_token_stride, out_head_stride, num_units, num_seqs, max_query,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    SHARE: tl.constexpr, BM: tl.constexpr, MANY: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (i, h): combine head h of new token i of the divided sequences, if its keys were split; of sequence i if
    max_query is 1, so that none of them has more tokens than one."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    seq = index
    token = index * 0
    if max_query > 1:
        seq = index * 0
        above = num_seqs
        # The grid is an upper bound, because the host reads no lengths.
        if tl.load(token_starts + num_seqs) <= index:
            return
        while above - seq > 1:
            middle = (seq + above) // 2
            if tl.load(token_starts + middle) <= index:
                seq = middle
            else:
                above = middle
        token = index - tl.load(token_starts + seq)
    unit = num_units - num_seqs + seq
    num_tiles = tl.load(units + unit * 4 + 3)
    num_rows = tl.load(units + unit * 4 + 1) * GROUP
    if (num_tiles == 0) | (token * GROUP >= num_rows):
        return
    per_program = tl.load(schedule)
    row = token * GROUP + head % GROUP
    rows = tile_rows(num_rows, BM, MANY)
    start = tl.load(tile_starts + unit) + (head // GROUP * tl.cdiv(num_rows, rows) + row // rows) * num_tiles
    shared = SHARE and tl.load(units + unit * 4 + 2) > 0
    # One program had all keys of the row, and has written it.
    if (start // per_program == (start + num_tiles - 1) // per_program) & (not shared):
        return
    acc = tl.zeros([BLOCK_DV], tl.float32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if SHARE and shared:
        group = tl.load(groups + seq)
        member = tl.load(ranks + seq)
        acc, peak, total = _add_partials(
            acc, peak, total, partial_out, partial_lse, tile_starts, item_starts, units, per_program, group,
            member * GROUP + head % GROUP, head // GROUP, GROUP, V_HEAD_DIM, BLOCK_DV, BM, MANY, SPLITS,
        )  # fmt: skip
    acc, peak, total = _add_partials(
        acc, peak, total, partial_out, partial_lse, tile_starts, item_starts, units, per_program, unit,
        row, head // GROUP, GROUP, V_HEAD_DIM, BLOCK_DV, BM, MANY, SPLITS,
    )  # fmt: skip
    position = (tl.load(query_start_loc + seq) + token).to(tl.int64)
    dims = tl.arange(0, BLOCK_DV)
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + position * out_token_stride + head * out_head_stride + dims, result, mask=dims < V_HEAD_DIM)
    if lse is not None:
        tl.store(lse + position * NUM_KV_HEADS * GROUP + head, (peak + tl.log2(total)) * 0.6931471805599453)
