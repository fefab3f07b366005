"""Operations between the matrix products and the attention of a decoder layer, defined with torch's: norms, rotary
positions, activations of gates.

The kernels of `gpu/kernels/` compute the same in one launch each. Models are
recognised by comparing their parts with these definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional


class NormKind(NamedTuple):
    """A variant of norms of one size and dtype.

    is_centered: a layer norm; else an RMS norm. adds_one: multiplies by 1 + weight. rounds_first: to the rows' dtype
    before it multiplies by the weight. rounds_weight: 1 + weight to the weight's dtype.
    """

    is_centered: bool = False
    adds_one: bool = False
    rounds_first: bool = False
    rounds_weight: bool = False


NORM_KINDS = (
    NormKind(rounds_first=True),
    NormKind(),
    NormKind(adds_one=True),
    NormKind(is_centered=True),
    NormKind(is_centered=True, adds_one=True, rounds_weight=True),
)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of rows
# One program keeps a row to be normalised in registers.
MAX_SIZE = 32_768


class Norm(NamedTuple):
    """weight, bias: [size] or None, of the dtype of the rows."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    kind: NormKind


def normalise(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    """rows [..., size] -> the same shape and dtype; computed in fp32."""
    x = rows.float()
    if norm.kind.is_centered:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.kind.rounds_first:
        x = x.to(rows.dtype).float()
    if norm.weight is not None:
        weight = norm.weight if norm.kind.rounds_weight else norm.weight.float()
        x = x * (weight + 1 if norm.kind.adds_one else weight).float()
    if norm.bias is not None:
        x = x + norm.bias.float()
    return x.to(rows.dtype)


class RotaryKind(NamedTuple):
    """A way to rotate pairs of a head's elements.

    is_interleaved: the pairs are (0, 1), (2, 3), ...; else (0, n / 2), (1, n / 2 + 1), ... has_angle_of_pair: angle i
    belongs to pair i; else to element i. doubles: the head has two rotated elements for each angle; else one. rounds:
    both products are rounded to the heads' dtype before they are added. turns_back: by the negative angles.
    """

    is_interleaved: bool = False
    has_angle_of_pair: bool = False
    doubles: bool = False
    rounds: bool = True
    turns_back: bool = False


ROTARY_KINDS = (
    *(
        RotaryKind(interleaved, of_pair, doubles, rounds)
        for rounds in (True, False)
        for of_pair, doubles in ((False, False), (True, True), (True, False))
        for interleaved in (False, True)
    ),
    RotaryKind(turns_back=True),
)

Angles = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""Cosines and sines [num_tokens, n], or both in one complex tensor."""


def cos_and_sin(angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    return (angles.real, angles.imag) if isinstance(angles, torch.Tensor) else angles


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: RotaryKind) -> torch.Tensor:
    """heads [num_tokens, heads, dims]; cos, sin [num_tokens, n] -> the heads, of which n or 2n elements are rotated."""
    turned = cos.shape[1] * (2 if kind.doubles else 1)
    dims = torch.arange(turned, dtype=torch.int64, device=heads.device)
    if kind.is_interleaved:
        other, is_first, pair = dims ^ 1, dims % 2 == 0, dims // 2
    else:
        half = turned // 2
        other, is_first, pair = (dims + half) % turned, dims < half, dims % half
    angle = pair if kind.has_angle_of_pair else dims
    c, s = cos.float()[:, None, angle], sin.float()[:, None, angle]
    x = heads[..., :turned].float()
    y = x[..., other]
    own, cross = x * c, torch.where(is_first != kind.turns_back, -y, y) * s
    if kind.rounds:
        own, cross = own.to(heads.dtype).float(), cross.to(heads.dtype).float()
    return torch.cat([(own + cross).to(heads.dtype), heads[..., turned:]], -1)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
"""By name: what a gated MLP applies to its gate."""


def are_alike(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True if two results seem to come from the same operations, but for the order of sums. In half precision
    nearly all elements must be equal. False if `expected` is all zeros, which show nothing."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype or not expected.any():
        return False
    # Another order of sums leaves 99.8 % of elements or more equal, another formula 92 % at most. (Tried with 4,096
    # normal numbers: norms, rotations, products, exact and tanh GELU.)
    if expected.dtype in (torch.float16, torch.bfloat16) and not (actual == expected).float().mean() > 0.97:
        return False
    # One rounding to bf16 is up to 0.4 % of a number, so 0.02 allows for a few.
    return are_close(actual, expected, 1e-5 if expected.dtype == torch.float32 else 0.02)


def are_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Return True if the largest difference is at most `tolerance` of the largest expected value; never for NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    error, scale = (actual.float() - expected.float()).abs().max(), expected.float().abs().max()
    return bool(error <= tolerance * scale)
