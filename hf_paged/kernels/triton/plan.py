"""The plan of a split attention step: which program processes which keys of which rows. Computed on the device, once
per step.

A unit is a range of keys with the tokens that attend to it: either the new tokens of one sequence and its keys, or
several sequences with one new token each and the keys of their common prefix. A unit consists of items, one for each KV
head and tile of rows; an item consists of tiles of BN keys. The tiles of all items are numbered consecutively and cut
into equal runs: program p processes tiles [p * per_program, (p + 1) * per_program). This balances the work for any
sequence lengths. Knows lengths and tables; never K or V.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hf_paged.kernels.metadata import SHORT_QUERY, AttentionMetadata
from hf_paged.kernels.triton.launch import Launch
from hf_paged.kernels.triton.tile import lower_bound, tile_rows

# Sharing a shorter prefix saves less than writing and reading its partial results costs.
MIN_SHARED_KEYS = 256
# A program that processed fewer tiles than this would cost more than it saves.
MIN_TILES = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """All tensors int32. num_units is num_seqs; with sharing it is twice that, shared units before private ones.

    units         [num_units, 4]: first sequence, number of tokens, first tile of keys, number of tiles
    tile_starts   [num_units + 1]: number of tiles before each unit
    item_starts   [num_units + 1]: number of slots of the items before each unit; a slot holds BM rows
    token_starts  [num_seqs + 1]: number of new tokens of the planned sequences before each sequence
    schedule      [1 + num_programs]: tiles per program; then the unit in which each program starts
    groups        [num_seqs]: the shared unit of each sequence (only with sharing)
    """

    units: torch.Tensor
    tile_starts: torch.Tensor
    item_starts: torch.Tensor
    token_starts: torch.Tensor
    schedule: torch.Tensor
    groups: torch.Tensor
    num_programs: int
    num_slots: int
    share: bool


@triton.jit(do_not_specialize=["table_stride"])
def common_prefix_kernel(
    block_tables, seq_lens, query_start_loc, shared, members, group_tiles, table_stride,
    BLOCK_SIZE: tl.constexpr, BN: tl.constexpr, MIN_SHARED: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Program i: shared[i] = tiles of keys that sequence i has in common with sequence i - 1, or 0 if too few to share.

    Only sequences with one new token share. Also clears the counters of the plan kernel.
    """
    seq = tl.program_id(0)
    tl.store(members + seq, 0)
    tl.store(group_tiles + seq, 2147483647)
    before = tl.maximum(seq - 1, 0)
    start = tl.load(query_start_loc + seq)
    alone = (seq == 0) | (tl.load(query_start_loc + seq + 1) - start != 1)
    alone |= start - tl.load(query_start_loc + before) != 1
    limit = tl.minimum(tl.load(seq_lens + seq), tl.load(seq_lens + before))
    limit = tl.where(alone, 0, limit)
    # The last key is never shared, so that every sequence keeps a private part.
    blocks = tl.maximum(limit - 1, 0) // BLOCK_SIZE
    own = block_tables + seq.to(tl.int64) * table_stride
    other = own - table_stride
    equal = blocks * 0
    start = blocks * 0
    while start < blocks:
        index = start + tl.arange(0, IDS)
        inside = index < blocks
        differs = tl.load(own + index, mask=inside, other=0) != tl.load(other + index, mask=inside, other=1)
        equal = tl.min(tl.where(differs, index, 2147483647))
        start = tl.where(equal < 2147483647, blocks, start + IDS)
        equal = tl.minimum(equal, blocks)
    keys = equal * BLOCK_SIZE
    tl.store(shared + seq, tl.where(keys >= MIN_SHARED, keys // BN, 0))


@triton.jit(do_not_specialize=["num_seqs", "num_programs"])
def plan_kernel(
    seq_lens, query_start_loc, shared, members, group_tiles, units, tile_starts, item_starts, token_starts, schedule,
    groups, num_seqs, num_programs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    MAX_QUERY: tl.constexpr, SHARE: tl.constexpr, MIN_TILES: tl.constexpr, BM: tl.constexpr, MANY: tl.constexpr,
    BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program fills the Plan. Sequences with more than MAX_QUERY new tokens are left to another launch."""
    tiles_before = num_seqs * 0
    items_before = num_seqs * 0
    tokens_before = num_seqs * 0
    num_units = num_seqs
    tl.store(tile_starts, 0)
    tl.store(item_starts, 0)
    tl.store(token_starts, 0)
    if SHARE:
        num_units = num_seqs * 2
        groups_before = num_seqs * 0
        for start in tl.range(0, num_seqs, WIDTH):
            seqs = start + tl.arange(0, WIDTH)
            valid = seqs < num_seqs
            common = tl.load(shared + seqs, mask=valid, other=0)
            leads = (valid & (common == 0)).to(tl.int32)
            group = groups_before + tl.cumsum(leads, 0) - 1
            tl.store(groups + seqs, group, mask=valid)
            tl.store(units + group * 4, seqs, mask=leads > 0)
            tl.atomic_add(members + group, 1, mask=valid)
            tl.atomic_min(group_tiles + group, common, mask=valid & (leads == 0))
            groups_before += tl.sum(leads)
        tl.debug_barrier()
        for start in tl.range(0, num_seqs, WIDTH):
            unit = start + tl.arange(0, WIDTH)
            valid = unit < num_seqs
            count = tl.load(members + unit, mask=valid, other=0)
            tiles = tl.where(count > 1, tl.load(group_tiles + unit, mask=valid, other=0), 0)
            rows = tile_rows(count * GROUP, BM, MANY)
            items = tl.where(count > 1, tl.cdiv(count * GROUP, rows) * NUM_KV_HEADS, 0)
            slots = items * (rows // BM)
            tl.store(units + unit * 4 + 1, count, mask=valid)
            tl.store(units + unit * 4 + 2, 0, mask=valid)
            tl.store(units + unit * 4 + 3, tiles, mask=valid)
            tl.store(tile_starts + 1 + unit, tiles_before + tl.cumsum(items * tiles, 0), mask=valid)
            tl.store(item_starts + 1 + unit, items_before + tl.cumsum(slots, 0), mask=valid)
            tiles_before += tl.sum(items * tiles)
            items_before += tl.sum(slots)
        tl.debug_barrier()
    for start in tl.range(0, num_seqs, WIDTH):
        seqs = start + tl.arange(0, WIDTH)
        valid = seqs < num_seqs
        seq_len = tl.load(seq_lens + seqs, mask=valid, other=0)
        query_len = tl.load(query_start_loc + 1 + seqs, mask=valid, other=0)
        query_len -= tl.load(query_start_loc + seqs, mask=valid, other=0)
        active = (query_len > 0) & (query_len <= MAX_QUERY)
        first = lower_bound(tl.maximum(seq_len - query_len, 0), WINDOW, CHUNK) // BN
        if SHARE:
            group = tl.load(groups + seqs, mask=valid, other=0)
            first = tl.load(units + group * 4 + 3, mask=valid, other=0)
        tiles = tl.where(active, tl.cdiv(seq_len, BN) - first, 0)
        rows = tile_rows(query_len * GROUP, BM, MANY)
        items = tl.where(active, tl.cdiv(query_len * GROUP, rows) * NUM_KV_HEADS, 0)
        slots = items * (rows // BM)
        tokens = tl.where(active, query_len, 0)
        unit = num_units - num_seqs + seqs
        tl.store(units + unit * 4, seqs, mask=valid)
        tl.store(units + unit * 4 + 1, query_len, mask=valid)
        tl.store(units + unit * 4 + 2, first, mask=valid)
        tl.store(units + unit * 4 + 3, tiles, mask=valid)
        tl.store(tile_starts + 1 + unit, tiles_before + tl.cumsum(items * tiles, 0), mask=valid)
        tl.store(item_starts + 1 + unit, items_before + tl.cumsum(slots, 0), mask=valid)
        tl.store(token_starts + 1 + seqs, tokens_before + tl.cumsum(tokens, 0), mask=valid)
        tiles_before += tl.sum(items * tiles)
        items_before += tl.sum(slots)
        tokens_before += tl.sum(tokens)
    tl.debug_barrier()

    per_program = tl.maximum(tl.cdiv(tiles_before, num_programs), MIN_TILES)
    tl.store(schedule, per_program)
    for start in tl.range(0, num_programs, WIDTH):
        program = start + tl.arange(0, WIDTH)
        below = program * 0
        above = below + num_units
        width = num_units
        while width > 0:
            middle = (below + above) // 2
            end = tl.load(tile_starts + 1 + middle, mask=below < above, other=0)
            past = (below < above) & (end <= program * per_program)
            above = tl.where((below < above) & (end > program * per_program), middle, above)
            below = tl.where(past, middle + 1, below)
            width = width // 2
        tl.store(schedule + 1 + program, below, mask=program < num_programs)


def _aligned_parts(sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """int32 tensors of these sizes in one allocation, each aligned to 16 bytes: Triton compiles a kernel anew for a
    pointer that is not."""
    padded = [-(-size // 4) * 4 for size in sizes]
    whole = torch.empty(sum(padded), dtype=torch.int32, device=device)
    return [part[:size] for part, size in zip(whole.split(padded), sizes)]


def max_slots(metadata: AttentionMetadata, num_kv_heads: int, group: int, bm: int, many: int, *, share: bool) -> int:
    """An upper bound of the slots of all items of a plan, from sizes that the host knows.

    A unit of r rows has one slot for each KV head if r <= bm, else those of ceil(r / many) tiles: fewer than
    r / bm + many / bm, and many / bm < r * many / bm^2.
    """
    num_seqs, only_small = metadata.num_seqs, metadata.short_query_len == 1 and group <= bm
    slots = num_seqs if only_small else num_seqs + metadata.short_tokens * group * (bm + many) // bm**2
    if share:  # of a sequence, one token at most
        slots += num_seqs // 2 + num_seqs * group * (bm + many) // bm**2
    return slots * num_kv_heads


def make_plan(
    metadata: AttentionMetadata,
    *,
    num_programs: int,
    num_kv_heads: int,
    group: int,
    block_size: int,
    sliding_window: int,
    chunk_size: int,
    share: bool,
    bm: int,
    many: int,
    bn: int,
) -> tuple[Plan, list[Launch]]:
    """The plan's tensors and the launches that fill them, for the sequences with up to SHORT_QUERY new tokens.

    share: find common prefixes (not with a sliding window). bm, many: rows in a tile, see `tile.tile_rows`.
    """
    assert not share or not (sliding_window or chunk_size)
    num_seqs, device = metadata.num_seqs, metadata.seq_lens.device
    num_units = num_seqs * 2 if share else num_seqs
    units, tile_starts, item_starts, token_starts, schedule, groups, shared, members, group_tiles = _aligned_parts(
        [num_units * 4, num_units + 1, num_units + 1, num_seqs + 1, 1 + num_programs, *[num_seqs] * 4], device
    )
    slots = num_programs * (many // bm) + max_slots(metadata, num_kv_heads, group, bm, many, share=share)
    plan = Plan(units, tile_starts, item_starts, token_starts, schedule, groups, num_programs, slots, share)
    launches = []
    if share:
        args = {
            "block_tables": metadata.block_tables, "seq_lens": metadata.seq_lens,
            "query_start_loc": metadata.query_start_loc, "shared": shared, "members": members,
            "group_tiles": group_tiles, "table_stride": metadata.block_tables.stride(0), "BLOCK_SIZE": block_size,
            "BN": bn, "MIN_SHARED": MIN_SHARED_KEYS, "IDS": 1024,
        }  # fmt: skip
        launches.append(Launch(common_prefix_kernel, (num_seqs,), args, {"num_warps": 4}))
    args = {
        "seq_lens": metadata.seq_lens, "query_start_loc": metadata.query_start_loc, "shared": shared,
        "members": members, "group_tiles": group_tiles, "units": units, "tile_starts": tile_starts,
        "item_starts": item_starts, "token_starts": token_starts, "schedule": schedule, "groups": groups,
        "num_seqs": num_seqs, "num_programs": num_programs, "NUM_KV_HEADS": num_kv_heads, "GROUP": group,
        "WINDOW": sliding_window, "CHUNK": chunk_size, "MAX_QUERY": SHORT_QUERY, "SHARE": share,
        "MIN_TILES": MIN_TILES, "BM": bm, "MANY": many, "BN": bn, "WIDTH": 256,
    }  # fmt: skip
    launches.append(Launch(plan_kernel, (1,), args, {"num_warps": 4}))
    return plan, launches
