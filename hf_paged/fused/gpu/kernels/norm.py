"""Norms of rows, with the residual addition before them, in one launch.

A decoder layer adds what a part computed to its residual and normalises the sum for the next part; in some models it
normalises the result of the part first. Knows rows; never modules.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-untyped"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from hf_paged.fused.rows import Norm, NormKind
from hf_paged.kernels import buffers
from hf_paged.kernels.triton.launch import UNFUSED, Launch, RowLaunches, next_power_of_2


class NormedSum(NamedTuple):
    """The results of `add_norm`, each [num_rows, size]: the sum, and its norm."""

    total: torch.Tensor | None
    out: torch.Tensor | None


@triton.jit
def scaled(x, scale, weight, columns, inside, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The normalised x * scale times the weights of its columns, fp32. KIND: a NormKind. x broadcasts to `columns`."""
    y = x * scale
    if KIND[2]:
        y = y.to(DTYPE).to(tl.float32)
    if weight is not None:
        w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        if KIND[1]:
            w += 1.0
        if KIND[3]:
            w = w.to(DTYPE).to(tl.float32)
        y *= w
    return y


@triton.jit
def _normalised(
    x, weight, bias, eps, columns, inside, KIND: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    if KIND[0]:
        # Columns beyond the row must stay 0, or they would count in the sum of squares.
        x = tl.where(inside, x - tl.sum(x, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    y = scaled(x, scale, weight, columns, inside, KIND, DTYPE)
    if bias is not None:
        y += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    return y.to(DTYPE)


@triton.jit
def add_norm_kernel(
    rows, residual, total, out, bias, before, before_bias, before_eps, after, after_bias, after_eps, scale,
    row_stride, residual_stride, SCALES: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r: row r. BEFORE, AFTER: the kinds of the norms before and after the addition, or None. Every result is
    rounded to the rows' dtype, as torch rounds it between operations."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype: tl.constexpr = rows.dtype.element_ty
    x = tl.load(rows + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if BEFORE is not None:
        x = _normalised(x, before, before_bias, before_eps, columns, inside, BEFORE, SIZE, dtype).to(tl.float32)
    if SCALES:
        x = (x * scale).to(dtype).to(tl.float32)
    if residual is not None:
        x += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)
        # The bias belongs to the product that comes last, so it is not in what is normalised before it.
        sums = x
        if bias is not None:
            sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * SIZE + columns, sums.to(dtype), mask=inside)
    if AFTER is not None:
        y = _normalised(x, after, after_bias, after_eps, columns, inside, AFTER, SIZE, dtype)
        tl.store(out + row * SIZE + columns, y, mask=inside)


_NONE = Norm(None, None, 0.0, NormKind())
_launches = RowLaunches()


def add_norm_launch(
    rows: torch.Tensor,
    residual: torch.Tensor | None,
    results: NormedSum,
    before: Norm | None,
    after: Norm | None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> Launch:
    """See `add_norm`."""
    size = rows.shape[1]
    block = next_power_of_2(size)
    first, last = before or _NONE, after or _NONE
    # The stride of a single row is arbitrary; a kernel must not be compiled for each.
    strides = [size if x is None or len(x) == 1 else x.stride(0) for x in (rows, residual)]
    args = {
        "rows": rows, "residual": residual, "total": results.total,
        "out": results.out, "bias": bias, "before": first.weight, "before_bias": first.bias, "before_eps": first.eps,
        "after": last.weight, "after_bias": last.bias, "after_eps": last.eps,
        "scale": 1.0 if scale is None else scale, "SCALES": scale is not None,
        "row_stride": strides[0], "residual_stride": strides[1],
        "BEFORE": None if before is None else tuple(before.kind), "AFTER": None if after is None else tuple(after.kind),
        "SIZE": size, "BLOCK": block,
    }  # fmt: skip
    return Launch(add_norm_kernel, (rows.shape[0],), args, {"num_warps": min(16, max(1, block // 512)), **UNFUSED})


def add_norm(
    rows: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    before: Norm | None = None,
    after: Norm | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> NormedSum:
    """sum = residual + scale * before(rows), and after(sum), in one launch; without a norm the rows themselves.

    rows, residual [num_rows, size], contiguous in their last dimension, of one dtype, which is that of the weights too.
    size: at most `rows.MAX_SIZE`. bias [size]: added to the sum that is returned, not to what is normalised: the sum is
    going to be added to by a product whose bias it is.
    """
    total = None if residual is None else buffers.empty(rows.shape, rows.dtype, rows.device)
    out = None if after is None else buffers.empty(rows.shape, rows.dtype, rows.device)
    results = NormedSum(total, out)
    if rows.shape[0]:
        first, last = before or _NONE, after or _NONE
        tensors = {
            "rows": rows, "residual": residual, "total": total, "out": out, "bias": bias, "before": first.weight,
            "before_bias": first.bias, "after": last.weight, "after_bias": last.bias,
        }  # fmt: skip
        # Epsilon and kind: arguments of the launch that are no tensors.
        kinds = before and before[2:], after and after[2:]
        _launches.run(
            rows.shape[0], rows.device, tensors, (rows.shape[1], scale, kinds),
            lambda: add_norm_launch(rows, residual, results, before, after, scale, bias),
        )  # fmt: skip
    return results
