"""The partition of a split attention step: the keys and rows of each program. Computed on the device,
once per step.

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

from hf_paged.kernels import buffers
from hf_paged.kernels.metadata import MIN_SHARED_KEYS, SHORT_QUERY, AttentionMetadata
from hf_paged.kernels.triton.launch import Launch
from hf_paged.kernels.triton.tile import Constants, lower_bound, tile_rows
from hf_paged.kernels.triton.tuning import Tile

# A program that processed fewer tiles than this would cost more than it saves.
MIN_TILES = 2


@dataclass(frozen=True, slots=True)
class Partition:
    """All tensors int32. num_units is num_seqs; with sharing it is twice that, shared units before private ones.

    units         [num_units, 4]: first sequence (of a shared unit, its place in `order`), number of tokens, first tile
                  of keys, number of tiles
    tile_starts   [num_units + 1]: number of tiles before each unit
    item_starts   [num_units + 1]: number of slots of the items before each unit; a slot holds BM rows
    token_starts  [num_seqs + 1]: number of new tokens of the divided sequences before each sequence
    schedule      [1 + num_programs]: tiles per program; then the unit in which each program starts
    groups        [num_seqs]: the shared unit of each sequence (only with sharing)
    order         [num_seqs]: the sequences, those of a shared unit one after the other (only with sharing)
    ranks         [num_seqs]: the place of each sequence in its shared unit (only with sharing)
    arrivals      [num_arrivals]: zeros, one for each KV head of each sequence if the split kernel combines the parts
    """

    units: torch.Tensor
    tile_starts: torch.Tensor
    item_starts: torch.Tensor
    token_starts: torch.Tensor
    schedule: torch.Tensor
    groups: torch.Tensor
    order: torch.Tensor
    ranks: torch.Tensor
    arrivals: torch.Tensor
    num_programs: int
    num_slots: int
    share: bool


@triton.jit
def _blocks_to_share(seq_lens, query_start_loc, seqs, valid, BLOCK_SIZE: tl.constexpr):
    """Count the blocks that each sequence may share: none if it has several new tokens. The block of the last key is
    never shared, so that every sequence keeps a private part."""
    start = tl.load(query_start_loc + seqs, mask=valid, other=0)
    count = tl.load(query_start_loc + seqs + 1, mask=valid, other=0) - start
    blocks = tl.maximum(tl.load(seq_lens + seqs, mask=valid, other=0) - 1, 0) // BLOCK_SIZE
    return tl.where(valid & (count == 1), blocks, 0)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def prefix_depth_kernel(
    block_tables, seq_lens, query_start_loc, depths, num_seqs, table_stride,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, FIRST: tl.constexpr, BM: tl.constexpr, MANY: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program i: depths[i] = number of leading blocks by which sequence i is grouped with others; 0: with none.

    Sequences share at several depths, a system prompt and a longer prompt for example. Of FIRST, 2 FIRST, 4 FIRST, ...
    blocks, the depth that saves the sequence the most is chosen: fewer keys with many others, or more with few.
    """
    seq = tl.program_id(0)
    blocks = _blocks_to_share(seq_lens, query_start_loc, seq, seq < num_seqs, BLOCK_SIZE)
    depth = seq * 0 + FIRST
    found = seq * 0
    most = 0.0
    while depth <= blocks:
        own = tl.load(block_tables + seq.to(tl.int64) * table_stride + depth - 1)
        count = seq * 0
        for start in tl.range(0, num_seqs, WIDTH):
            seqs = start + tl.arange(0, WIDTH)
            able = _blocks_to_share(seq_lens, query_start_loc, seqs, seqs < num_seqs, BLOCK_SIZE) >= depth
            ids = tl.load(block_tables + seqs.to(tl.int64) * table_stride + depth - 1, mask=able, other=0)
            count += tl.sum((able & (ids == own)).to(tl.int32))
        tiles = tl.cdiv(count * GROUP, tile_rows(count * GROUP, BM, MANY))
        # Each of `count` sequences then reads `tiles / count` of the prefix.
        saved = depth.to(tl.float32) * (count - tiles).to(tl.float32) / count.to(tl.float32)
        found = tl.where(saved > most, depth, found)
        most = tl.maximum(saved, most)
        # Whoever is alone here is alone at every greater depth.
        depth = tl.where(count > 1, depth * 2, blocks + 1)
    tl.store(depths + seq, found)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def common_prefix_kernel(
    block_tables, seq_lens, query_start_loc, depths, leaders, ranks, shared, members, group_tiles, num_seqs,
    table_stride, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr, IDS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program i finds the group of sequence i: those with the same depth, and there the same block.

    leaders[i]: the first of them; ranks[i]: the number of those before i; shared[i]: tiles of keys that i has in common
    with the first. Also clears the counters of the partition kernel.
    """
    seq = tl.program_id(0)
    tl.store(members + seq, 0)
    # Above any number of tiles: the partition kernel takes the minimum over the members.
    tl.store(group_tiles + seq, 2147483647)
    depth = tl.load(depths + seq)
    column = tl.maximum(depth - 1, 0)
    own = block_tables + seq.to(tl.int64) * table_stride
    leader, rank = seq, seq * 0
    if depth > 0:
        block = tl.load(own + column)
        for start in tl.range(0, seq, WIDTH):
            seqs = start + tl.arange(0, WIDTH)
            same = tl.load(depths + seqs, mask=seqs < seq, other=0) == depth
            ids = tl.load(block_tables + seqs.to(tl.int64) * table_stride + column, mask=same, other=0)
            same &= ids == block
            leader = tl.minimum(leader, tl.min(tl.where(same, seqs, seq)))
            rank += tl.sum(same.to(tl.int32))
    tl.store(leaders + seq, leader)
    tl.store(ranks + seq, rank)
    # Tables may differ before the block that they have in common.
    limit = tl.minimum(tl.load(seq_lens + seq), tl.load(seq_lens + leader))
    blocks = tl.where(leader < seq, tl.maximum(limit - 1, 0) // BLOCK_SIZE, 0)
    other = block_tables + leader.to(tl.int64) * table_stride
    equal = blocks * 0
    start = blocks * 0
    while start < blocks:
        index = start + tl.arange(0, IDS)
        inside = index < blocks
        differs = tl.load(own + index, mask=inside, other=0) != tl.load(other + index, mask=inside, other=1)
        equal = tl.min(tl.where(differs, index, 2147483647))
        start = tl.where(equal < 2147483647, blocks, start + IDS)
        equal = tl.minimum(equal, blocks)
    tl.store(shared + seq, equal * BLOCK_SIZE // BN)


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "num_arrivals"])
def partition_kernel(
    seq_lens, query_start_loc, leaders, ranks, shared, members, group_tiles, units, tile_starts, item_starts,
    token_starts, schedule, groups, order, arrivals, num_seqs, num_programs, num_arrivals,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    MAX_QUERY: tl.constexpr, SHARE: tl.constexpr, MIN_TILES: tl.constexpr, BM: tl.constexpr, MANY: tl.constexpr,
    BN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program fills the Partition. Sequences with more than MAX_QUERY new tokens are left to another launch."""
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
            leads = (valid & (tl.load(leaders + seqs, mask=valid, other=0) == seqs)).to(tl.int32)
            tl.store(groups + seqs, groups_before + tl.cumsum(leads, 0) - 1, mask=leads > 0)
            groups_before += tl.sum(leads)
        # Each loop reads what other threads have written in the one before.
        tl.debug_barrier()
        for start in tl.range(0, num_seqs, WIDTH):
            seqs = start + tl.arange(0, WIDTH)
            valid = seqs < num_seqs
            leader = tl.load(leaders + seqs, mask=valid, other=0)
            group = tl.load(groups + leader, mask=valid, other=0)
            tl.store(groups + seqs, group, mask=valid & (leader != seqs))
            tl.atomic_add(members + group, 1, mask=valid)
            tl.atomic_min(
                group_tiles + group, tl.load(shared + seqs, mask=valid, other=0), mask=valid & (leader != seqs)
            )
        tl.debug_barrier()
        places_before = num_seqs * 0
        for start in tl.range(0, num_seqs, WIDTH):
            unit = start + tl.arange(0, WIDTH)
            valid = unit < num_seqs
            count = tl.load(members + unit, mask=valid, other=0)
            tiles = tl.where(count > 1, tl.load(group_tiles + unit, mask=valid, other=0), 0)
            rows = tile_rows(count * GROUP, BM, MANY)
            items = tl.where(count > 1, tl.cdiv(count * GROUP, rows) * NUM_KV_HEADS, 0)
            slots = items * (rows // BM)
            tl.store(units + unit * 4, places_before + tl.cumsum(count, 0) - count, mask=valid)
            tl.store(units + unit * 4 + 1, count, mask=valid)
            tl.store(units + unit * 4 + 2, 0, mask=valid)
            tl.store(units + unit * 4 + 3, tiles, mask=valid)
            tl.store(tile_starts + 1 + unit, tiles_before + tl.cumsum(items * tiles, 0), mask=valid)
            tl.store(item_starts + 1 + unit, items_before + tl.cumsum(slots, 0), mask=valid)
            tiles_before += tl.sum(items * tiles)
            items_before += tl.sum(slots)
            places_before += tl.sum(count)
        tl.debug_barrier()
    for start in tl.range(0, num_arrivals, WIDTH):
        counters = start + tl.arange(0, WIDTH)
        tl.store(arrivals + counters, 0, mask=counters < num_arrivals)
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
            place = tl.load(units + group * 4, mask=valid, other=0) + tl.load(ranks + seqs, mask=valid, other=0)
            tl.store(order + place, seqs, mask=valid)
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


PARTITION_KERNELS = prefix_depth_kernel, common_prefix_kernel, partition_kernel


def _aligned_parts(sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """int32 tensors of these sizes in one allocation, each aligned to 16 bytes: Triton compiles a kernel anew for a
    pointer that is not."""
    padded = [-(-size // 4) * 4 for size in sizes]
    whole = buffers.empty((sum(padded),), torch.int32, device)
    return [part[:size] for part, size in zip(whole.split(padded), sizes)]


def max_slots(metadata: AttentionMetadata, sizes: Constants, tile: Tile, *, share: bool) -> int:
    """An upper bound of the slots of all items of a partition, from sizes that the host knows.

    A unit of r rows has one slot for each KV head if r <= bm, else those of ceil(r / many) tiles: fewer than
    r / bm + many / bm, and many / bm < r * many / bm^2.
    """
    num_seqs, group, bm = metadata.num_seqs, sizes.GROUP, tile.bm
    only_small = metadata.short_query_len == 1 and group <= bm
    slots = num_seqs if only_small else num_seqs + metadata.short_tokens * group * (bm + tile.many) // bm**2
    if share:  # of a sequence, one token at most
        slots += num_seqs // 2 + num_seqs * group * (bm + tile.many) // bm**2
    return slots * sizes.NUM_KV_HEADS


def make_partition(
    metadata: AttentionMetadata, sizes: Constants, tile: Tile, *, num_programs: int, share: bool, combine: bool
) -> tuple[Partition, list[Launch]]:
    """The partition's tensors and the launches that fill them, for the sequences with up to SHORT_QUERY new tokens.

    share: find common prefixes (not with a sliding window). combine: see `split.split_kernel`.
    """
    assert not share or not (sizes.WINDOW or sizes.CHUNK or combine)
    num_seqs, device = metadata.num_seqs, metadata.seq_lens.device
    num_units, num_arrivals = num_seqs * 2 if share else num_seqs, num_seqs * sizes.NUM_KV_HEADS if combine else 0
    counts = [num_units * 4, num_units + 1, num_units + 1, num_seqs + 1, 1 + num_programs, num_arrivals]
    parts = _aligned_parts(counts + [num_seqs if share else 0] * 8, device)
    units, tile_starts, item_starts, token_starts, schedule, arrivals, groups, order, ranks, *found = parts
    # A slot's number is the sum of a program's and an item's (see `split_kernel`), so the bounds add.
    slots = num_programs * (tile.many // tile.bm) + max_slots(metadata, sizes, tile, share=share)
    partition = Partition(
        units, tile_starts, item_starts, token_starts, schedule, groups, order, ranks, arrivals, num_programs, slots,
        share,
    )  # fmt: skip
    lengths = {"seq_lens": metadata.seq_lens, "query_start_loc": metadata.query_start_loc, "num_seqs": num_seqs}
    depths, leaders, shared, members, group_tiles = found
    groups_found = {
        "leaders": leaders, "ranks": ranks, "shared": shared, "members": members, "group_tiles": group_tiles,
    }  # fmt: skip
    launches = []
    if share:
        tables = lengths | {
            "block_tables": metadata.block_tables, "table_stride": metadata.block_tables.stride(0),
            "depths": depths, "BLOCK_SIZE": sizes.BLOCK_SIZE, "WIDTH": 256,
        }  # fmt: skip
        # A prefix shorter than a tile has no whole tile of keys to share.
        first = -(-max(MIN_SHARED_KEYS, tile.bn) // sizes.BLOCK_SIZE)
        args = tables | {"GROUP": sizes.GROUP, "FIRST": first, "BM": tile.bm, "MANY": tile.many}
        launches.append(Launch(prefix_depth_kernel, (num_seqs,), args, {"num_warps": 4}))
        args = tables | groups_found | {"BN": tile.bn, "IDS": 1024}
        launches.append(Launch(common_prefix_kernel, (num_seqs,), args, {"num_warps": 4}))
    args = lengths | groups_found | {
        "units": units, "tile_starts": tile_starts, "item_starts": item_starts, "token_starts": token_starts,
        "schedule": schedule, "groups": groups, "order": order, "arrivals": arrivals, "num_programs": num_programs,
        "num_arrivals": num_arrivals, "NUM_KV_HEADS": sizes.NUM_KV_HEADS, "GROUP": sizes.GROUP,
        "WINDOW": sizes.WINDOW, "CHUNK": sizes.CHUNK, "MAX_QUERY": SHORT_QUERY, "SHARE": share,
        "MIN_TILES": MIN_TILES, "BM": tile.bm, "MANY": tile.many, "BN": tile.bn, "WIDTH": 256,
    }  # fmt: skip
    launches.append(Launch(partition_kernel, (1,), args, {"num_warps": 4}))
    return partition, launches
