"""write_kv and copy_blocks as Triton kernels: fused reshape and block write, fused block copy (SOSP'23 section 5.1).

Each is a single launch for any number of tokens, layers and copies. Knows tensors and slots; never metadata.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from hf_paged.kernels.arguments import LayerKV, NewKV
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.quantised import LARGEST, NO_SCALES, Scales
from hf_paged.kernels.triton.launch import Launch, next_power_of_2, stride_unit


@triton.jit
def _write_rows(
    source, cache, slots, tokens, valid, elements,
    source_token_stride, source_head_stride, block_stride, slot_stride, head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    head, dim = elements // HEAD_DIM, elements % HEAD_DIM
    mask = valid[:, None] & (elements < NUM_HEADS * HEAD_DIM)[None, :]
    rows = tokens.to(tl.int64)[:, None] * source_token_stride + (head * source_head_stride + dim)[None, :]
    x = tl.load(source + rows, mask=mask)
    start = (slots // BLOCK_SIZE) * block_stride + (slots % BLOCK_SIZE) * slot_stride
    tl.store(cache + start[:, None] + (head * head_stride + dim)[None, :], x, mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"])
def write_kv_kernel(
    key, value, key_cache, value_cache, slot_mapping, num_tokens,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    kc_block_stride, kc_slot_stride, kc_head_stride, vc_block_stride, vc_slot_stride, vc_head_stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, TOKENS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Program (i, j): elements [j * ELEMENTS, ...) of the flattened heads of tokens [i * TOKENS, ...)."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    valid = slots >= 0
    slots = tl.where(valid, slots, 0)
    elements = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    _write_rows(
        key, key_cache, slots, tokens, valid, elements, k_token_stride * K_UNIT, k_head_stride * K_UNIT,
        kc_block_stride, kc_slot_stride, kc_head_stride, NUM_HEADS, HEAD_DIM, BLOCK_SIZE,
    )  # fmt: skip
    _write_rows(
        value, value_cache, slots, tokens, valid, elements, v_token_stride * V_UNIT, v_head_stride * V_UNIT,
        vc_block_stride, vc_slot_stride, vc_head_stride, NUM_HEADS, V_HEAD_DIM, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def _write_heads(
    source, cache, scales, block, offset, tokens, valid, head, source_token_stride, source_head_stride,
    block_stride, slot_stride, head_stride, s_block_stride, s_slot_stride, s_head_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One head of K or V of `tokens`. With scales, it is rounded to eight bits, whose largest number is LARGEST."""
    dims = tl.arange(0, BLOCK)
    mask = valid[:, None] & (dims < DIM)[None, :]
    rows = tokens.to(tl.int64) * source_token_stride + head * source_head_stride
    x = tl.load(source + rows[:, None] + dims[None, :], mask=mask, other=0.0)
    targets = cache + (block * block_stride + offset * slot_stride + head * head_stride)[:, None] + dims[None, :]
    if scales is None:
        tl.store(targets, x.to(cache.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        # With a scale of 0, a row of zeros would become 0 / 0.
        scale = tl.maximum(
            tl.div_rn(tl.max(tl.abs(x), 1), tl.full([tokens.shape[0]], LARGEST, tl.float32)), 1.1754943508222875e-38
        )
        parts = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        if cache.dtype.element_ty == tl.int8:
            # Adding 1.5 * 2^23 rounds to an integer, halves to the even one, as torch.round does.
            parts = (parts + 12582912.0) - 12582912.0
        tl.store(targets, parts.to(cache.dtype.element_ty), mask=mask)
        # An element that is not finite makes the scale NaN.
        scale += tl.sum(x * 0.0, 1)
        tl.store(scales + block * s_block_stride + offset * s_slot_stride + head * s_head_stride, scale, mask=valid)


@triton.jit(do_not_specialize=["num_tokens", "k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"])
def quantise_kv_kernel(
    key, value, key_cache, value_cache, k_scales, v_scales, slot_mapping, num_tokens,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    kc_block_stride, kc_slot_stride, kc_head_stride, vc_block_stride, vc_slot_stride, vc_head_stride,
    ks_block_stride, ks_slot_stride, ks_head_stride, vs_block_stride, vs_slot_stride, vs_head_stride,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, K_UNIT: tl.constexpr, V_UNIT: tl.constexpr, K_LARGEST: tl.constexpr,
    V_LARGEST: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (i, h): head h of K and V of tokens [i * TOKENS, ...)."""
    tokens, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    slots = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1)
    valid = slots >= 0
    slots = tl.where(valid, slots, 0)
    block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    _write_heads(
        key, key_cache, k_scales, block, offset, tokens, valid, head, k_token_stride * K_UNIT, k_head_stride * K_UNIT,
        kc_block_stride, kc_slot_stride, kc_head_stride, ks_block_stride, ks_slot_stride, ks_head_stride,
        HEAD_DIM, BLOCK_D, K_LARGEST,
    )  # fmt: skip
    _write_heads(
        value, value_cache, v_scales, block, offset, tokens, valid, head, v_token_stride * V_UNIT,
        v_head_stride * V_UNIT, vc_block_stride, vc_slot_stride, vc_head_stride, vs_block_stride, vs_slot_stride,
        vs_head_stride, V_HEAD_DIM, BLOCK_DV, V_LARGEST,
    )  # fmt: skip


def scale_strides(scales: Scales) -> dict[str, int]:
    """The arguments of kernels for the strides of scales; 0 for those that do not exist."""
    names = ("block", "slot", "head")
    return {
        f"{which}_{name}_stride": 0 if own is None else own.stride(dim)
        for which, own in zip(("ks", "vs"), scales)
        for dim, name in enumerate(names)
    }


def write_kv_launch(new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor) -> Launch:
    """Shapes as in `ops.write_kv`. Raises ValueError if the last dimension of a tensor is not contiguous."""
    (key, value), (key_cache, value_cache, scales) = new, kv
    for name, tensor in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
    num_tokens, num_heads, head_dim = key.shape
    row = num_heads * max(head_dim, value.shape[2])
    elements = min(2048, next_power_of_2(row))
    # Many tokens: 2,048 elements per program, for throughput. Few tokens: one program per token, for latency.
    tokens = max(1, 2048 // elements) if num_tokens >= 512 else 1
    k_unit, v_unit = (stride_unit(*rows.stride()[:2]) for rows in (key, value))
    args: dict[str, Any] = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slot_mapping,
        "num_tokens": num_tokens,
        "k_token_stride": key.stride(0) // k_unit, "k_head_stride": key.stride(1) // k_unit,
        "v_token_stride": value.stride(0) // v_unit, "v_head_stride": value.stride(1) // v_unit,
        "kc_block_stride": key_cache.stride(0), "kc_slot_stride": key_cache.stride(1),
        "kc_head_stride": key_cache.stride(2), "vc_block_stride": value_cache.stride(0),
        "vc_slot_stride": value_cache.stride(1), "vc_head_stride": value_cache.stride(2),
        "HEAD_DIM": head_dim, "V_HEAD_DIM": value.shape[2], "BLOCK_SIZE": key_cache.shape[1], "K_UNIT": k_unit,
        "V_UNIT": v_unit,
    }  # fmt: skip
    if scales != NO_SCALES:
        return _quantise_launch(args, scales)
    args |= {"NUM_HEADS": num_heads, "TOKENS": tokens, "ELEMENTS": elements}
    grid = (triton.cdiv(num_tokens, tokens), triton.cdiv(row, elements))
    return Launch(write_kv_kernel, grid, args, {"num_warps": 4})


def _quantise_launch(args: dict[str, Any], scales: Scales) -> Launch:
    """args: of both kernels that write."""
    num_tokens, num_heads, head_dim = args["key"].shape
    block_d, block_dv = (max(16, next_power_of_2(n)) for n in (head_dim, args["V_HEAD_DIM"]))
    tokens = max(1, 2048 // max(block_d, block_dv)) if num_tokens >= 512 else 1
    args = args | scale_strides(scales) | {
        "k_scales": scales.key, "v_scales": scales.value, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "TOKENS": tokens,
        "K_LARGEST": LARGEST.get(args["key_cache"].dtype, 0.0),
        "V_LARGEST": LARGEST.get(args["value_cache"].dtype, 0.0),
    }  # fmt: skip
    grid = (triton.cdiv(num_tokens, tokens), num_heads)
    # A single token's head has too few elements for more than one warp.
    return Launch(quantise_kv_kernel, grid, args, {"num_warps": 4 if tokens > 1 else 1})


def write_kv(new: NewKV, kv: LayerKV, slot_mapping: torch.Tensor) -> None:
    """See `ops.write_kv`."""
    if new.key.shape[0]:
        write_kv_launch(new, kv, slot_mapping).run(new.key.device)


@triton.jit
def copy_blocks_kernel(
    caches, copies, WORD: tl.constexpr, ALIGNED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (i, j, k): words [k * WORDS, ...) of copy i in cache j.

    caches int64 [num_caches, 5]: address and block stride of the source, address and block stride of the target, block
    size (addresses in bytes, the rest in words). copies int64 [n, 2]: (source, target) block ids.
    """
    row = caches + tl.program_id(1) * 5
    src, dst = tl.load(copies + tl.program_id(0) * 2), tl.load(copies + tl.program_id(0) * 2 + 1)
    source = tl.load(row).to(tl.pointer_type(WORD)) + src * tl.load(row + 1)
    target = tl.load(row + 2).to(tl.pointer_type(WORD)) + dst * tl.load(row + 3)
    size = tl.load(row + 4)
    words = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    if ALIGNED:  # WORD is int64, and each access moves two words
        source, target, size = tl.multiple_of(source, 16), tl.multiple_of(target, 16), tl.multiple_of(size, 2)
    tl.store(target + words, tl.load(source + words, mask=words < size), mask=words < size)


_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
# Words of a program: at 8 bytes, four accesses of 16 bytes for each of 128 threads.
_COPY_WORDS = 1024


@functools.lru_cache(maxsize=64)
def _cache_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    # A pool's tensors keep their addresses, so their table is sent to the device once, not every step.
    return to_device(np.array(rows, dtype=np.int64), device)


def _spans(caches: list[torch.Tensor], device: torch.device) -> list[tuple[int, int, int]]:
    """(address, block stride, block size) of each cache, in bytes. Raises ValueError if a block is not contiguous."""
    spans = []
    for cache in caches:
        if cache.device != device or not cache[0].is_contiguous():
            raise ValueError(
                f"a cache of shape {tuple(cache.shape)}, strides {cache.stride()} on {cache.device}: all must lie on "
                "one device, each block contiguous"
            )
        size = cache.element_size()
        spans.append((cache.data_ptr(), cache.stride(0) * size, cache[0].numel() * size))
    return spans


def copy_blocks_launch(caches: list[torch.Tensor], copies: torch.Tensor, into: list[torch.Tensor]) -> Launch:
    """See `ops.copy_blocks`. Raises ValueError if a block of a tensor is not contiguous."""
    device = caches[0].device
    sources = _spans(caches, device)
    targets = sources if into is caches else _spans(into, device)
    spans = [(*source[:2], *target) for source, target in zip(sources, targets)]
    # The widest word that divides all addresses and sizes moves most bytes by one access.
    width = next(w for w in _WORDS if all(n % w == 0 for span in spans for n in span))
    # Strides and sizes in words; addresses stay in bytes.
    rows = tuple((s, s_step // width, t, t_step // width, size // width) for s, s_step, t, t_step, size in spans)
    args = {
        "caches": _cache_table(rows, device),
        "copies": copies,
        "WORD": _WORDS[width],
        "ALIGNED": all(n % 16 == 0 for span in spans for n in span),
        "WORDS": _COPY_WORDS,
    }
    longest = max(row[-1] for row in rows)
    grid = (copies.shape[0], len(caches), triton.cdiv(longest, _COPY_WORDS))
    return Launch(copy_blocks_kernel, grid, args, {"num_warps": 4})


def copy_blocks(caches: list[torch.Tensor], copies: torch.Tensor, into: list[torch.Tensor]) -> None:
    """See `ops.copy_blocks`."""
    if caches and copies.shape[0] and caches[0].shape[0]:
        copy_blocks_launch(caches, copies.contiguous(), into).run(caches[0].device)
