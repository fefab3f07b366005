"""Experts, defined with torch's operations: each token goes through the gated MLPs of a few experts, chosen for it.

A pair is one token with one of its experts: pair t * top_k + j is token t with its expert j. The kernels in
`gpu/kernels/experts.py` compute the same in one launch for each function. Models are recognised by comparing their
experts with these definitions.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from hf_paged.fused.rows import ACTIVATIONS

SCALED_SILU = "scaled_silu"
"""The activation x * sigmoid(alpha * x)."""


class GateKind(NamedTuple):
    """A way to make an expert's inner row from the results of its first product, gates and ups.

    activation: of the gate: one of `rows.ACTIVATIONS`, or SCALED_SILU. is_interleaved: the product's columns are gate,
    up, gate, up, ...; else all gates, then all ups. is_limited: gates are at most `limit`, ups within +-limit.
    adds_one: the gate is multiplied by up + 1. rounds: every operation is rounded to the rows' dtype; else only the
    last one.
    """

    activation: str = "silu"
    is_interleaved: bool = False
    is_limited: bool = False
    adds_one: bool = False
    rounds: bool = True


class Gate(NamedTuple):
    """A kind with its numbers, which kinds without them ignore."""

    kind: GateKind
    alpha: float = 1.0
    limit: float = 0.0


class Projection(NamedTuple):
    """The products of all experts. weight [num_experts, outputs, inputs], or [num_experts, inputs, outputs] if
    is_transposed; bias [num_experts, outputs]. Both contiguous, of the rows' dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    is_transposed: bool

    @property
    def inputs(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 2]

    @property
    def outputs(self) -> int:
        return self.weight.shape[2 if self.is_transposed else 1]


class Assignment(NamedTuple):
    """pairs int32 [num_pairs]: all pairs, sorted by expert, those of one expert in their order. starts int32
    [num_experts + 1]: where the pairs of each expert start, and where the last ones end."""

    pairs: torch.Tensor
    starts: torch.Tensor


def assign(index: torch.Tensor, num_experts: int) -> Assignment:
    """index [num_tokens, top_k]: the experts of each token."""
    chosen, pairs = torch.sort(index.flatten(), stable=True)
    starts = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=index.device, dtype=chosen.dtype))
    return Assignment(pairs.int(), starts.int())


def product(
    rows: torch.Tensor, assignment: Assignment, projection: Projection, *, gate: Gate | None = None
) -> torch.Tensor:
    """The projection of each pair's row by its expert, with a gate the inner row that it gives: [num_pairs, n].

    rows [n, inputs], contiguous: one for each pair, or one for each token.
    """
    num_pairs = assignment.pairs.numel()
    out = rows.new_empty(num_pairs, projection.outputs // (1 if gate is None else 2))
    starts = assignment.starts.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        pairs = assignment.pairs[start:end].long()
        weight = projection.weight[expert]
        # The first product has a row for each token, the second one for each pair.
        result = rows[pairs * rows.shape[0] // num_pairs] @ (weight if projection.is_transposed else weight.T)
        if projection.bias is not None:
            result = result + projection.bias[expert]
        out[pairs] = result if gate is None else gated(result, gate)
    return out


def gated(both: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The inner rows [..., n / 2] that gates and ups [..., n] give."""
    kind, dtype = gate.kind, both.dtype
    both = both if kind.rounds else both.float()
    x, up = (both[..., ::2], both[..., 1::2]) if kind.is_interleaved else both.chunk(2, -1)
    if kind.is_limited:
        x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    x = x * torch.sigmoid(x * gate.alpha) if kind.activation == SCALED_SILU else ACTIVATIONS[kind.activation](x)
    return (x * (up + 1 if kind.adds_one else up)).to(dtype)


def combine(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of each token's results times their weights, added in fp32: [num_tokens, n] of the results' dtype.

    results [num_pairs, n], contiguous; weights [num_tokens, top_k].
    """
    weighted = results * weights.reshape(-1, 1)
    # `grouped_mm`, transformers' default, adds in fp32 too; its eager experts add in the model's dtype.
    return weighted.view(*weights.shape, -1).sum(1, dtype=torch.float32).to(results.dtype)


def experts(
    rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, up: Projection, down: Projection, gate: Gate
) -> torch.Tensor:
    """rows [num_tokens, n] -> the same shape; index, weights [num_tokens, top_k]."""
    assignment = assign(index, up.weight.shape[0])
    inner = product(rows, assignment, up, gate=gate)
    return combine(product(inner, assignment, down), weights)
