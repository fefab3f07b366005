"""The Triton implementation of the operations in `ops`: chooses kernels and tiles, launches them.

Runs on GPUs, and on a CPU under TRITON_INTERPRET=1. Reads no tensor on the host: sizes come from shapes and from the
upper bounds in the metadata.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.kernels import triton_tuning
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.triton_launch import INTERPRET, Launch, Target, next_power_of_2, target_of
from hf_paged.kernels.triton_tuning import Tile
from hf_paged.kernels.triton_whole import whole_kernel
from hf_paged.kernels.triton_write import copy_blocks, write_kv

__all__ = ["copy_blocks", "paged_attention", "write_kv"]

# Query lengths up to this are decode (a token, or speculative tokens to verify), longer ones prefill.
MAX_DECODE_QUERY = 16
_LOG2E = 1.4426950408889634


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `ops.paged_attention`. Tensors need a contiguous last dimension."""
    if out is None:
        out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[-1])
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if return_lse else None
    launches = attention_launches(
        query, key_cache, value_cache, metadata, scale, sliding_window, chunk_size, softcap, sinks, alibi_slopes,
        out, lse, target_of(query.device),
    )  # fmt: skip
    for launch in launches:
        launch.run()
    return out if lse is None else (out, lse)


def attention_launches(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    chunk_size: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    target: Target,
) -> list[Launch]:
    """What `paged_attention` runs on `target`, in order."""
    for name, tensor in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache), ("out", out)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
    if metadata.num_seqs == 0 or query.shape[0] == 0:
        return []
    group = query.shape[1] // key_cache.shape[2]
    head_dim, v_head_dim = query.shape[2], value_cache.shape[3]
    block_d, block_dv = (max(16, next_power_of_2(n)) for n in (head_dim, v_head_dim))
    qk_scale, soft = scale * _LOG2E, 0.0
    if softcap is not None:  # see triton_tile: the scaled score is log2(e^2x) with x the argument of tanh
        qk_scale, soft = scale * 2 * _LOG2E / softcap, softcap * _LOG2E
    common: dict[str, Any] = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_tables": metadata.block_tables,
        "seq_lens": metadata.seq_lens, "query_start_loc": metadata.query_start_loc, "sinks": sinks,
        "alibi_slopes": alibi_slopes, "out": out, "lse": lse, "num_seqs": metadata.num_seqs,
        "qk_scale": qk_scale, "softcap": soft,
        "q_token_stride": query.stride(0), "q_head_stride": query.stride(1),
        "out_token_stride": out.stride(0), "out_head_stride": out.stride(1),
        "table_stride": metadata.block_tables.stride(0),
        "kc_block_stride": key_cache.stride(0), "kc_slot_stride": key_cache.stride(1),
        "kc_head_stride": key_cache.stride(2), "vc_block_stride": value_cache.stride(0),
        "vc_slot_stride": value_cache.stride(1), "vc_head_stride": value_cache.stride(2),
        "NUM_KV_HEADS": key_cache.shape[2], "GROUP": group, "HEAD_DIM": head_dim, "V_HEAD_DIM": v_head_dim,
        "BLOCK_D": block_d, "BLOCK_DV": block_dv, "BLOCK_SIZE": key_cache.shape[1],
        "WINDOW": sliding_window or 0, "CHUNK": chunk_size or 0, "SOFTCAP": softcap is not None,
        # A negative scale turns the largest product into the smallest score: scale before the maximum then.
        "SCALE_FIRST": softcap is not None or alibi_slopes is not None or scale <= 0,
        "SAME_STRIDES": key_cache.stride()[:2] == value_cache.stride()[:2],
        # The interpreter multiplies the bits of bf16 as integers.
        "UPCAST": INTERPRET and query.dtype != torch.float32,
    }  # fmt: skip
    element_size, largest = query.element_size(), max(block_d, block_dv)
    rows = metadata.max_query_len * group
    if metadata.max_query_len <= MAX_DECODE_QUERY:
        tile = triton_tuning.small_tile(target, element_size, largest, rows)
        return [_whole(common, metadata, query.shape[0], tile, min_query=0, full_tiles=False)]
    tile = triton_tuning.large_tile(target, element_size, largest)
    return [_whole(common, metadata, query.shape[0], tile, min_query=0, full_tiles=True)]


def _whole(
    common: dict[str, Any],
    metadata: AttentionMetadata,
    num_tokens: int,
    tile: Tile,
    *,
    min_query: int,
    full_tiles: bool,
) -> Launch:
    one_tile = metadata.max_query_len * common["GROUP"] <= tile.bm
    num_tiles = metadata.num_seqs if one_tile else num_tokens * common["GROUP"] // tile.bm + metadata.num_seqs
    args = common | {
        "num_tiles": num_tiles, "MIN_QUERY": min_query, "ONE_TILE": one_tile, "FULL_TILES": full_tiles,
        "BM": tile.bm, "BN": tile.bn, "STAGES": tile.num_stages,
    }  # fmt: skip
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return Launch(whole_kernel, (num_tiles, common["NUM_KV_HEADS"]), args, options)
