"""The types of PTX as numpy's, and half precision, which numpy lacks or computes otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "pred": np.bool_, "f32": np.float32, "f64": np.float64,
    **{f"{sign}{bits}": np.dtype(f"{kind}{bits // 8}") for sign, kind in (("u", "u"), ("b", "u"), ("s", "i"))
       for bits in (8, 16, 32, 64)},
}  # fmt: skip
HALVES = ("bf16", "f16")


def widened(bits: Array, kind: str) -> Array:
    """Half-precision numbers, given as uint16, in fp32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def narrowed(values: Array, kind: str) -> Array:
    """fp64 or fp32 numbers rounded once, to nearest even, as uint16."""
    if values.dtype == np.float64:
        values = _to_odd(values)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = ((bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _to_odd(values: Array) -> Array:
    """fp64 to fp32 such that a second rounding, to fewer bits, gives what one would have given: numbers that fp32 does
    not have become the odd one of both neighbours."""
    near = values.astype(np.float32)
    inexact = near.astype(np.float64) != values
    bits = near.view(np.uint32).copy()
    bits -= (inexact & (np.abs(near.astype(np.float64)) > np.abs(values))).astype(np.uint32)
    bits |= (inexact & np.isfinite(values)).astype(np.uint32)
    return bits.view(np.float32)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp64. The product of fp32 numbers is exact there; the sum is rounded to 53 bits, so that an fma of
    fp32 is rounded twice: one in 2^28 results may be the other neighbour."""
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def from_e4m3(codes: Array) -> Array:
    """Eight-bit floating-point numbers, given as uint8, in fp32."""
    return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).float().numpy()


def to_e4m3(values: Array) -> Array:
    """fp32 numbers, of which those beyond 448 become 448, as uint8."""
    limited = torch.from_numpy(values.copy()).clamp(-448, 448)
    return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
