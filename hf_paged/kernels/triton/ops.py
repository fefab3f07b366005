"""The Triton implementation of the operations in `kernels.ops`: chooses kernels and tiles and launches them.

Runs on GPUs, and on a CPU under TRITON_INTERPRET=1. No tensor is read on the host: sizes follow from shapes and from
the upper bounds in the metadata.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_paged.kernels import buffers
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV, Result
from hf_paged.kernels.metadata import REPEATABLE, SHORT_QUERY, AttentionMetadata
from hf_paged.kernels.triton import tuning as triton_tuning
from hf_paged.kernels.triton.launch import INTERPRET, Launch, Target, next_power_of_2, stride_unit, target_of
from hf_paged.kernels.triton.partition import PARTITION_KERNELS, make_partition
from hf_paged.kernels.triton.repeat import Repeated
from hf_paged.kernels.triton.split import reduce_kernel, split_kernel
from hf_paged.kernels.triton.tile import Constants
from hf_paged.kernels.triton.tuning import Tile
from hf_paged.kernels.triton.whole import whole_kernel
from hf_paged.kernels.triton.write import copy_blocks, scale_strides, write_kv, write_kv_launch

__all__ = ["copy_blocks", "paged_attention", "write_kv"]

# A decode step over at most this many tiles of keys uses the whole kernel: no partition and no reduction.
MAX_WHOLE_TILES = 4
# Programs of the split kernel per core: one wave, with enough loads in flight to use the memory bandwidth.
PROGRAMS_PER_CORE = 2
# Elements of partial results that are loaded at once to be combined: 32 registers of a thread of four warps.
COMBINED = 4096
# Exponents are to base 2, for which GPUs have an instruction.
_LOG2E = 1.4426950408889634


def paged_attention(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    options: Attention,
    new: NewKV | None = None,
    out: torch.Tensor | None = None,
) -> Result:
    """See `ops.paged_attention`. Raises ValueError if the last dimension of a tensor is not contiguous."""
    is_ordinary = out is None and options.has_numbers_only
    if out is None:
        out = buffers.empty((*query.shape[:2], kv.value.shape[-1]), query.dtype, query.device)
    lse = buffers.empty(query.shape[:2], torch.float32, query.device) if options.return_lse else None
    launches = attention_launches(query, kv, metadata, options, out, lse, target_of(query.device))
    if new is not None and new.key.shape[0]:
        launches.insert(0, write_kv_launch(new, kv, metadata.slot_mapping))
    compiled = [launch.run(query.device) for launch in launches]
    if is_ordinary and launches and None not in compiled and REPEATABLE not in metadata.scratch:
        # The partition belongs to the step, not to a layer, and is there by now.
        again = [each for each in zip(launches, compiled) if each[0].kernel not in PARTITION_KERNELS]
        metadata.scratch[REPEATABLE] = Repeated(again, query, kv, new, options, out)
    return out if lse is None else (out, lse)


def attention_launches(
    query: torch.Tensor,
    kv: LayerKV,
    metadata: AttentionMetadata,
    options: Attention,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    target: Target,
) -> list[Launch]:
    """The launches that `paged_attention` runs on `target`, in order."""
    (key_cache, value_cache, scales), scale, softcap = kv, options.scale, options.softcap
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
    if metadata.num_seqs == 0 or query.shape[0] == 0:
        return []
    group = query.shape[1] // key_cache.shape[2]
    head_dim, v_head_dim = query.shape[2], value_cache.shape[3]
    block_d, block_dv = (max(16, next_power_of_2(n)) for n in (head_dim, v_head_dim))
    if max(block_d, block_dv) > 512:
        raise ValueError(f"head sizes {head_dim} and {v_head_dim}: the Triton kernels go up to 512; use impl='torch'")
    qk_scale, soft = scale * _LOG2E, 0.0
    if softcap is not None:  # see `tile.attend`: the scaled score is log2(e^2x), where x is the argument of tanh
        qk_scale, soft = scale * 2 * _LOG2E / softcap, softcap * _LOG2E
    q_unit = stride_unit(query.stride(0), query.stride(1))
    common: dict[str, Any] = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "k_scales": scales.key,
        "v_scales": scales.value, "block_tables": metadata.block_tables,
        "seq_lens": metadata.seq_lens, "query_start_loc": metadata.query_start_loc, "sinks": options.sinks,
        "alibi_slopes": options.alibi_slopes, "out": out, "lse": lse, "num_seqs": metadata.num_seqs,
        "qk_scale": qk_scale, "softcap": soft,
        "q_token_stride": query.stride(0) // q_unit, "q_head_stride": query.stride(1) // q_unit,
        "out_token_stride": out.stride(0), "out_head_stride": out.stride(1),
        "table_stride": metadata.block_tables.stride(0),
        "kc_block_stride": key_cache.stride(0), "kc_slot_stride": key_cache.stride(1),
        "kc_head_stride": key_cache.stride(2), "vc_block_stride": value_cache.stride(0),
        "vc_slot_stride": value_cache.stride(1), "vc_head_stride": value_cache.stride(2),
        **scale_strides(scales),
        "C": Constants(
            NUM_KV_HEADS=key_cache.shape[2], GROUP=group, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, BLOCK_D=block_d,
            BLOCK_DV=block_dv, BLOCK_SIZE=key_cache.shape[1], Q_UNIT=q_unit, WINDOW=options.bounds.sliding_window or 0,
            CHUNK=options.bounds.chunk_size or 0, SOFTCAP=softcap is not None, ALIBI=options.alibi_slopes is not None,
            # With a negative scale the largest product is the smallest score: scale before taking the maximum.
            SCALE_FIRST=softcap is not None or options.alibi_slopes is not None or scale <= 0,
            SAME_STRIDES=key_cache.stride()[:2] == value_cache.stride()[:2],
            # The interpreter would multiply bf16 values as integers.
            UPCAST=INTERPRET and query.dtype != torch.float32,
        ),
    }  # fmt: skip
    if metadata.one_order:  # one kernel with one tile, which takes keys in the same tiles for every row
        rows = group * SHORT_QUERY
        tile = triton_tuning.small_tile(target, query.element_size(), max(block_d, block_dv), rows)
        return [_whole(common, metadata, query.shape[0], tile, min_query=0, full_tiles=False)]
    if metadata.max_query_len > SHORT_QUERY or metadata.reach is not None:
        return _prefill(common, metadata, query, target)
    return _decode(common, metadata, query, target)


def _prefill(common: dict[str, Any], metadata: AttentionMetadata, query: torch.Tensor, target: Target) -> list[Launch]:
    """A step with long queries. Short queries in the same step get their own launches, if tokens see no later ones."""
    sizes: Constants = common["C"]
    num_tokens, element_size = query.shape[0], query.element_size()
    head_dim = max(sizes.BLOCK_D, sizes.BLOCK_DV)
    large = triton_tuning.large_tile(target, element_size, head_dim)
    # If all sequences have equally many new tokens, these are more than SHORT_QUERY.
    no_short = metadata.max_short_query_len == 0 or num_tokens == metadata.num_seqs * metadata.max_query_len
    if no_short or metadata.reach is not None:
        return [_whole(common, metadata, num_tokens, large, min_query=0, full_tiles=True)]
    tile = triton_tuning.small_tile(target, element_size, head_dim, sizes.GROUP)
    return [
        *_split(common, metadata, tile, target),
        _whole(common, metadata, num_tokens, large, min_query=SHORT_QUERY + 1, full_tiles=True),
    ]


def _decode(common: dict[str, Any], metadata: AttentionMetadata, query: torch.Tensor, target: Target) -> list[Launch]:
    """A step with short queries only: long contexts are split, short ones are not."""
    # Two shapes of tiles for all query lengths, because each shape is another kernel to compile.
    sizes: Constants = common["C"]
    head_dim, few = max(sizes.BLOCK_D, sizes.BLOCK_DV), sizes.GROUP
    rows = few if metadata.max_query_len == 1 else few * SHORT_QUERY
    tile = triton_tuning.small_tile(target, query.element_size(), head_dim, rows)
    max_keys = metadata.max_seq_len
    for size in (sizes.WINDOW, sizes.CHUNK):
        if size:
            # The first of SHORT_QUERY new tokens sees keys that the last one does not.
            max_keys = min(max_keys, size + SHORT_QUERY)
    if max_keys <= MAX_WHOLE_TILES * tile.bn:
        return [_whole(common, metadata, query.shape[0], tile, min_query=0, full_tiles=False)]
    return _split(common, metadata, triton_tuning.small_tile(target, query.element_size(), head_dim, few), target)


def _whole(
    common: dict[str, Any],
    metadata: AttentionMetadata,
    num_tokens: int,
    tile: Tile,
    *,
    min_query: int,
    full_tiles: bool,
) -> Launch:
    sizes: Constants = common["C"]
    one_tile = metadata.max_query_len == 1 and tile.bm >= sizes.GROUP  # tile i is sequence i: no search
    one_tile = one_tile and not metadata.one_order
    num_tiles = metadata.num_seqs if one_tile else num_tokens * sizes.GROUP // tile.bm + metadata.num_seqs
    args = common | {
        "reach": metadata.reach, "num_tiles": num_tiles, "min_query": min_query, "ONE_TILE": one_tile,
        "FULL_TILES": full_tiles, "BM": tile.bm, "BN": tile.bn, "STAGES": tile.num_stages,
    }  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Launch(whole_kernel, (num_tiles, sizes.NUM_KV_HEADS), args, options)


def _split(common: dict[str, Any], metadata: AttentionMetadata, tile: Tile, target: Target) -> list[Launch]:
    """Return the launches of the lean variant (one new token each, no common prefix) or of the full variant."""
    sizes: Constants = common["C"]
    group, heads, window, chunk = sizes.GROUP, sizes.NUM_KV_HEADS, sizes.WINDOW, sizes.CHUNK
    num_seqs, max_query = metadata.num_seqs, metadata.short_query_len
    # Rows of two sequences fit into one tile, so that keys of a common prefix can be read once for both.
    share = 2 * group <= tile.many and not (window or chunk)
    if max_query == 1 and group <= tile.bm and not (share and metadata.shares and num_seqs > 1):
        share, tile = False, replace(tile, many=tile.bm)
    # AMD's barrier does not order other threads' writes before the count of a part.
    combine = tile.many == tile.bm and max_query == 1 and not share and target.backend == "cuda"
    key = ("triton_partition", heads, group, sizes.BLOCK_SIZE, window, chunk, sizes.V_HEAD_DIM, tile)
    launches: list[Launch] = []
    if key not in metadata.scratch:
        num_programs = target.num_cores * PROGRAMS_PER_CORE
        partition, launches = make_partition(
            metadata, sizes, tile, num_programs=num_programs, share=share, combine=combine
        )
        device = metadata.seq_lens.device
        partial_out = buffers.empty((partition.num_slots * tile.bm * sizes.V_HEAD_DIM,), torch.float32, device)
        partial_lse = buffers.empty((partition.num_slots * tile.bm,), torch.float32, device)
        metadata.scratch[key] = partition, partial_out, partial_lse
    partition, partial_out, partial_lse = metadata.scratch[key]
    divided = {
        "units": partition.units, "tile_starts": partition.tile_starts, "item_starts": partition.item_starts,
        "schedule": partition.schedule, "partial_out": partial_out, "partial_lse": partial_lse,
        "num_units": num_seqs * 2 if share else num_seqs, "SHARE": share, "BM": tile.bm, "MANY": tile.many,
    }  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    rows = next_power_of_2(group)
    args = common | divided | {
        "order": partition.order, "arrivals": partition.arrivals, "BN": tile.bn, "STAGES": tile.num_stages,
        "ROWS": rows, "PARTS": max(1, COMBINED // (rows * sizes.BLOCK_DV)) if combine else 0,
    }  # fmt: skip
    launches.append(Launch(split_kernel, (partition.num_programs,), args, options))
    if combine:
        return launches
    names = ("query_start_loc", "out", "lse", "out_token_stride", "out_head_stride", "num_seqs")
    args = {name: common[name] for name in names} | divided
    args |= {"NUM_KV_HEADS": heads, "GROUP": group, "V_HEAD_DIM": sizes.V_HEAD_DIM, "BLOCK_DV": sizes.BLOCK_DV,
             "groups": partition.groups, "ranks": partition.ranks, "token_starts": partition.token_starts,
             "max_query": max_query, "SPLITS": max(4, 4096 // sizes.BLOCK_DV)}  # fmt: skip
    grid = (num_seqs if max_query == 1 else metadata.short_tokens, heads * group)
    launches.append(Launch(reduce_kernel, grid, args, {"num_warps": 4}))
    return launches
