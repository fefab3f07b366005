"""Norms of heads, rotary positions, factors of the query, and the write of K and V to their slots, in one launch.

Knows rows of heads and slots; never modules.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hf_paged.fused.gpu.kernels.norm import scaled
from hf_paged.fused.rows import Angles, Norm, NormKind, RotaryKind
from hf_paged.kernels import buffers
from hf_paged.kernels.triton.launch import UNFUSED, Launch, RowLaunches, next_power_of_2


@triton.jit
def _statistics(x, eps, dims, NORM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The mean of each head, which only a layer norm subtracts, and the factor that normalises it: [heads, 1]."""
    mean = tl.sum(x, 1)[:, None] / HEAD_DIM
    if NORM[0]:
        x = tl.where(dims < HEAD_DIM, x - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]


@triton.jit
def _normalised(x, mean, scale, weight, bias, columns, inside, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """Elements `columns` of heads, normalised; fp32, rounded to DTYPE."""
    if NORM[0]:
        x -= mean
    y = scaled(x, scale, weight, columns, inside, NORM, DTYPE)
    if bias is not None:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return y.to(DTYPE).to(tl.float32)


@triton.jit
def _rotated(
    source, cos, sin, weight, bias, eps, dims, inside, NORM: tl.constexpr, NORM_IS_LAST: tl.constexpr,
    ROTARY: tl.constexpr, HEAD_DIM: tl.constexpr, TURNED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """source: pointers [heads, 1] to heads; dims [1, dims]; cos, sin: pointers to the token's angles, or without `sin`
    to pairs of cosine and sine. The heads, normalised and rotated (or the other way round), in fp32, rounded."""
    x = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    if NORM is not None and not NORM_IS_LAST:
        mean, scale = _statistics(x, eps, dims, NORM, HEAD_DIM)
        x = _normalised(x, mean, scale, weight, bias, dims, dims < HEAD_DIM, NORM, DTYPE)
    if ROTARY is not None:
        half: tl.constexpr = TURNED // 2
        if ROTARY[0]:
            other, is_first, pair = dims ^ 1, dims % 2 == 0, dims // 2
        else:
            other, is_first, pair = tl.where(dims < half, dims + half, dims - half), dims < half, dims % half
        turned = dims < TURNED
        y = tl.load(source + other, mask=inside & turned, other=0.0).to(tl.float32)
        if NORM is not None and not NORM_IS_LAST:
            y = _normalised(y, mean, scale, weight, bias, other, turned, NORM, DTYPE)
        angle = pair if ROTARY[1] else dims
        if sin is None:
            c = tl.load(cos + 2 * angle, mask=turned, other=0.0).to(tl.float32)
            s = tl.load(cos + 2 * angle + 1, mask=turned, other=0.0).to(tl.float32)
        else:
            c = tl.load(cos + angle, mask=turned, other=0.0).to(tl.float32)
            s = tl.load(sin + angle, mask=turned, other=0.0).to(tl.float32)
        own, cross = x * c, tl.where(is_first != ROTARY[4], -y, y) * s
        # Such models multiply in the heads' dtype, which rounds both products before they are added.
        if ROTARY[3]:
            own, cross = own.to(DTYPE).to(tl.float32), cross.to(DTYPE).to(tl.float32)
        x = tl.where(turned, own + cross, x).to(DTYPE).to(tl.float32)
    if NORM is not None and NORM_IS_LAST:
        mean, scale = _statistics(x, eps, dims, NORM, HEAD_DIM)
        x = _normalised(x, mean, scale, weight, bias, dims, dims < HEAD_DIM, NORM, DTYPE)
    return x


@triton.jit
def rotate_kernel(
    query, key, value, query_out, key_out, value_out, slots, cos, sin, factor,
    query_weight, query_bias, query_eps, key_weight, key_bias, key_eps,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, angle_stride,
    k_block_stride, k_slot_stride, k_out_head_stride, v_block_stride, v_slot_stride, v_out_head_stride,
    QUERY_NORM: tl.constexpr, KEY_NORM: tl.constexpr, NORM_IS_LAST: tl.constexpr, ROTARY: tl.constexpr,
    TURNED: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, DIMS: tl.constexpr, V_DIMS: tl.constexpr,
):  # fmt: skip
    """Program (t, j): HEADS heads of token t; those of the query first, then those of the key, then of the value.

    With `slots`, the key and value of a token go to its slot of the caches [blocks, slots, heads, dims], and those of
    slot -1 nowhere. Without, token t is slot t of one long block.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    dims = tl.arange(0, DIMS)[None, :]
    dtype: tl.constexpr = query.dtype.element_ty
    if ROTARY is not None:
        cos += token * angle_stride
        if sin is not None:
            sin += token * angle_stride
    if part < query_parts:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        source = query + token * q_token_stride + heads * q_head_stride
        x = _rotated(source, cos, sin, query_weight, query_bias, query_eps, dims, inside, QUERY_NORM, NORM_IS_LAST,
                     ROTARY, HEAD_DIM, TURNED, dtype)  # fmt: skip
        if factor is not None:
            x *= tl.load(factor + token).to(tl.float32)
        tl.store(query_out + (token * NUM_HEADS + heads) * HEAD_DIM + dims, x.to(dtype), mask=inside)
    else:
        slot = token
        if slots is not None:
            slot = tl.load(slots + token)
        # A slot of -1 is padding; its address is computed, but never written.
        written = slot >= 0
        block, place = tl.where(written, slot // BLOCK_SIZE, 0), tl.where(written, slot % BLOCK_SIZE, 0)
        if part < query_parts + kv_parts:
            heads = (part - query_parts) * HEADS + tl.arange(0, HEADS)[:, None]
            inside = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
            source = key + token * k_token_stride + heads * k_head_stride
            x = _rotated(source, cos, sin, key_weight, key_bias, key_eps, dims, inside, KEY_NORM, NORM_IS_LAST,
                         ROTARY, HEAD_DIM, TURNED, dtype)  # fmt: skip
            target = key_out + block * k_block_stride + place * k_slot_stride + heads * k_out_head_stride
            tl.store(target + dims, x.to(dtype), mask=inside & written)
        elif value is not None:
            # Names of their own: the compiler refuses a variable whose shape depends on the branch.
            v_dims = tl.arange(0, V_DIMS)[None, :]
            heads = (part - query_parts - kv_parts) * HEADS + tl.arange(0, HEADS)[:, None]
            v_inside = (heads < NUM_KV_HEADS) & (v_dims < V_HEAD_DIM)
            copied = tl.load(value + token * v_token_stride + heads * v_head_stride + v_dims, mask=v_inside)
            target = value_out + block * v_block_stride + place * v_slot_stride + heads * v_out_head_stride
            tl.store(target + v_dims, copied, mask=v_inside & written)


_NO_NORM = Norm(None, None, 0.0, NormKind())
_launches = RowLaunches()


def rotate_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    slots: torch.Tensor | None,
    angles: Angles | None,
    kind: RotaryKind,
    norms: tuple[Norm | None, Norm | None] = (None, None),
    norm_is_last: bool = False,
    factor: torch.Tensor | None = None,
) -> Launch:
    """Heads [num_tokens, heads, dims], contiguous in their last dimension, all of one dtype.

    outs: the query's [num_tokens, heads, dims], contiguous; the key's and value's caches [blocks, slots, heads, dims]
    with `slots` int64 [num_tokens], else as the query's. value: None where it needs nothing. angles: cos and sin
    [num_tokens, n], contiguous in their last dimension, with equal strides, or one complex tensor. norms: those of the
    query's and the key's heads, before the rotation or, with `norm_is_last`, after it. factor [num_tokens]: of the
    query at last, in the heads' dtype or fp32.
    """
    num_tokens, num_heads, head_dim = query.shape
    v_head_dim = 1 if value is None else value.shape[2]
    query_out, key_out, value_out = outs
    cos, sin = _tensors_of(angles)
    dims, v_dims = next_power_of_2(head_dim), next_power_of_2(v_head_dim)
    # A program has about 1,024 elements. Not measured.
    heads = max(1, min(1024 // max(dims, v_dims), next_power_of_2(num_heads)))
    query_norm, key_norm = (norm or _NO_NORM for norm in norms)
    args: dict[str, Any] = {
        "query": query, "key": key, "value": value, "query_out": query_out, "key_out": key_out, "value_out": value_out,
        "slots": slots, "cos": cos, "sin": sin, "factor": factor,
        "query_weight": query_norm.weight, "query_bias": query_norm.bias, "query_eps": query_norm.eps,
        "key_weight": key_norm.weight, "key_bias": key_norm.bias, "key_eps": key_norm.eps,
        "angle_stride": 0 if cos is None else cos[0].numel() if num_tokens == 1 else cos.stride(0),
        "QUERY_NORM": None if norms[0] is None else tuple(query_norm.kind),
        "KEY_NORM": None if norms[1] is None else tuple(key_norm.kind), "NORM_IS_LAST": norm_is_last,
        "ROTARY": None if cos is None else tuple(kind),
        "TURNED": 0 if cos is None else cos.shape[1] * (2 if kind.doubles else 1),
        "NUM_HEADS": num_heads, "NUM_KV_HEADS": key.shape[1], "HEAD_DIM": head_dim, "V_HEAD_DIM": v_head_dim,
        "BLOCK_SIZE": 1 if slots is None else key_out.shape[1], "HEADS": heads, "DIMS": dims, "V_DIMS": v_dims,
    }  # fmt: skip
    for name, rows in (("q", query), ("k", key), ("v", value)):
        head_stride = 1 if rows is None else rows.stride(1)
        # The stride of a single token is arbitrary; a kernel must not be compiled for each.
        token_stride = 1 if rows is None else rows.shape[1] * head_stride if num_tokens == 1 else rows.stride(0)
        args |= {f"{name}_token_stride": token_stride, f"{name}_head_stride": head_stride}
    for name, out in (("k", key_out), ("v", value_out)):
        strides = (1, 1, 1) if out is None else (out.stride(0), 0, out.stride(1)) if slots is None else out.stride()
        args |= {f"{name}_block_stride": strides[0], f"{name}_slot_stride": strides[1]}
        args[f"{name}_out_head_stride"] = strides[2]
    parts = triton.cdiv(num_heads, heads) + triton.cdiv(key.shape[1], heads) * (1 if value is None else 2)
    return Launch(rotate_kernel, (num_tokens, parts), args, {"num_warps": 4, **UNFUSED})


def _tensors_of(angles: Angles | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cosines and sines; of complex angles one tensor [num_tokens, n, 2] of both, which keeps its alignment."""
    if isinstance(angles, torch.Tensor):
        return torch.view_as_real(angles), None
    return angles or (None, None)


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    angles: Angles | None,
    kind: RotaryKind,
    norms: tuple[Norm | None, Norm | None] = (None, None),
    norm_is_last: bool = False,
    factor: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The query and the key, normalised, rotated and multiplied, in one launch: contiguous [num_tokens, heads, dims].

    into: key cache, value cache and slots. Then the key and the value are written there instead, and the key that is
    returned is None. Other shapes as in `rotate_launch`.
    """
    query_out = buffers.empty(query.shape, query.dtype, query.device)
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    if into is None:
        outs = query_out, buffers.empty(key.shape, key.dtype, key.device), None
    else:
        outs = query_out, into[0], into[1]
    if query.shape[0]:
        slots = None if into is None else into[2]
        cos, sin = _tensors_of(angles)
        first, second = norms[0] or _NO_NORM, norms[1] or _NO_NORM
        tensors = {
            "query": query, "key": key, "value": value, "query_out": outs[0], "key_out": outs[1], "value_out": outs[2],
            "slots": slots, "cos": cos, "sin": sin, "factor": factor, "query_weight": first.weight,
            "query_bias": first.bias, "key_weight": second.weight, "key_bias": second.bias,
        }  # fmt: skip
        # Epsilon and kind: arguments of the launch that are no tensors.
        of_norms = norms[0] and norms[0][2:], norms[1] and norms[1][2:], norm_is_last
        # All sizes that the launch depends on.
        sizes = query.shape[1:], key.shape[1], value is None or value.shape[2], outs[1].shape[1]
        num_angles = cos is None or cos.shape[1]
        _launches.run(
            query.shape[0], query.device, tensors, (sizes, num_angles, kind, of_norms),
            lambda: rotate_launch(query, key, value, outs, slots, angles, kind, norms, norm_is_last, factor),
        )  # fmt: skip
    return query_out, outs[1] if into is None else None
