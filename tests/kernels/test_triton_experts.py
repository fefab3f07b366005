"""The Triton kernels of experts and routers against their definitions: in the interpreter on a CPU, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.fused import experts as definitions
from hf_paged.fused import router as router_definition
from hf_paged.fused.experts import SCALED_SILU, Gate, GateKind, Projection
from hf_paged.fused.gpu.kernels import experts as triton_experts
from hf_paged.fused.gpu.kernels.experts import SIZES, assign, combine, product
from hf_paged.fused.gpu.kernels.router import route
from hf_paged.fused.router import Router, RouterKind
from hf_paged.fused.rows import ACTIVATIONS, are_close
from hf_paged.kernels.triton import launch as triton_launch
from tests.kernels.on_triton import DEVICE, DTYPES, LAYERS, random

pytestmark = LAYERS  # the interpreter truncates to bf16 where a GPU rounds: results differ by an ulp

OSS = Gate(GateKind(SCALED_SILU, is_interleaved=True, is_limited=True, adds_one=True), 1.702, 1.5)


def choices(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """Different experts for each token."""
    return torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)]).to(DEVICE)


def projections(
    num_experts: int, size: int, inner: int, dtype: torch.dtype, *, transposed: bool = False, bias: bool = False
) -> tuple[Projection, Projection]:
    """Up to gates and ups of `inner`, and down."""
    found = []
    for inputs, outputs in ((size, 2 * inner), (inner, size)):
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        weight = random(num_experts, *shape, dtype=dtype) * inputs**-0.5
        found.append(Projection(weight, random(num_experts, outputs, dtype=dtype) if bias else None, transposed))
    return found[0], found[1]


def compute(rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, both: Any, gate: Gate, size: Any) -> Any:
    up, down = both
    assignment = assign(index, up.weight.shape[0])
    return combine(product(product(rows, assignment, up, gate=gate, size=size), assignment, down, size=size), weights)


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert are_close(actual, expected, {torch.float32: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[expected.dtype])


# Tokens, experts of each, all experts, size, inner size: no power of two, one token, many experts without a token.
SHAPES = [(5, 2, 4, 40, 24), (1, 4, 33, 24, 40), (37, 1, 3, 72, 16)]


@pytest.mark.quick_cases("[(5, 2")
@pytest.mark.parametrize("shape,dtype", [*zip(SHAPES, DTYPES), (SHAPES[2], torch.float32)], ids=str)
def test_experts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    num_tokens, top_k, num_experts, size, inner = shape
    rows, index = random(num_tokens, size, dtype=dtype), choices(num_tokens, top_k, num_experts)
    for transposed, gate, weights_dtype in ((False, Gate(GateKind()), torch.float32), (True, OSS, dtype)):
        weights = random(num_tokens, top_k, dtype=weights_dtype)
        both = projections(num_experts, size, inner, dtype, transposed=transposed, bias=transposed)
        expected = definitions.experts(rows, index, weights, *both, gate)
        for tiles in SIZES:
            check(compute(rows, index, weights, both, gate, tiles), expected)


def test_the_order_of_tiles_changes_no_bit() -> None:
    """More tiles than are computed together, the last ones not as many, and several columns."""
    both, index = projections(3, 16, 72, torch.float32), choices(270, 1, 3)
    rows, assignment, gate = random(270, 16), assign(index, 3), Gate(GateKind())
    large, wide = (product(rows, assignment, both[0], gate=gate, size=size) for size in ("large", "wide"))
    assert torch.equal(large, wide)
    check(wide, definitions.product(rows, definitions.assign(index, 3), both[0], gate=gate))


def test_experts_with_many_rows_have_wide_tiles() -> None:
    assert [triton_experts.size_for(n * 8, 8) for n in (1, 16, 17, 255, 256, 9999)] == [
        "small", "small", "large", "large", "wide", "wide",
    ]  # fmt: skip
    for arch, flops in ((80, 64), (89, 64), (90, 85), (100, 85), (103, 85), (120, 64)):
        tile = triton_experts.tile_of(triton_launch.Target("cuda", arch, 132), 2, "wide")
        assert tile.bm * tile.bn // (tile.bm + tile.bn) == flops  # a byte of 16-bit rows and weights
        assert tile.group is not None


@pytest.mark.parametrize("rounds", [True, False])
def test_gates(rounds: bool) -> None:
    kinds = [GateKind(name, rounds=rounds) for name in ACTIVATIONS]
    kinds += [GateKind("silu", is_limited=True, rounds=rounds), GateKind("gelu", True, False, True, rounds)]
    both, index = projections(2, 16, 24, torch.float16), choices(3, 1, 2)
    rows = random(3, 16, dtype=torch.float16) * 3
    for kind in kinds:
        gate, assignment = Gate(kind, 1.3, 0.7), assign(index, 2)
        expected = definitions.product(rows, definitions.assign(index, 2), both[0], gate=gate)
        check(product(rows, assignment, both[0], gate=gate), expected)


def test_pairs_are_sorted_by_expert() -> None:
    everything = [choices(700, 4, 9), torch.full((5, 1), 3, device=DEVICE), torch.tensor([[8], [0]], device=DEVICE)]
    for index in everything:
        for each in (index, index.int()):
            actual, expected = assign(each, 9), definitions.assign(each, 9)
            assert torch.equal(actual.pairs, expected.pairs) and torch.equal(actual.starts, expected.starts)


@pytest.mark.parametrize("size", ["small", "wide"])
def test_a_token_does_not_depend_on_others(size: str) -> None:
    """Bit for bit, whatever experts the others have, or if they are NaN."""
    both = projections(3, 24, 16, torch.float32)
    rows, index, weights = random(20, 24), choices(20, 2, 3), random(20, 2)
    alone = compute(rows[:1], index[:1], weights[:1], both, Gate(GateKind()), size)
    assert torch.equal(compute(rows, index, weights, both, Gate(GateKind()), size)[:1], alone)
    rows[1:], index[1:] = torch.nan, index[:1]
    together = compute(rows, index, weights, both, Gate(GateKind()), size)
    assert torch.equal(together[:1], alone) and together[1:].isnan().all()


KINDS = [
    RouterKind("softmax", "sum"), RouterKind("softmax", "none"), RouterKind("none", "softmax", is_low=True),
    RouterKind("sigmoid", "sum"), RouterKind("none", "sigmoid_sum"), RouterKind("none", "sigmoid"),
    RouterKind("softmax", "clamp"), RouterKind("softmax", "none", is_low=True),
    RouterKind("sigmoid", "sum", groups=4, chosen_groups=2), RouterKind("softmax", "none", groups=5, chosen_groups=3),
    RouterKind("mixer", is_low=True),
]  # fmt: skip


def logits_of(num_tokens: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct, exact in bf16."""
    rows = [torch.randperm(num_experts) for _ in range(num_tokens)]
    return ((torch.stack(rows) - num_experts // 2) / 16).to(DEVICE, dtype)


@pytest.mark.quick_cases("groups=4", "none', weights='softmax'")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_routers(kind: RouterKind) -> None:
    for (num_experts, top_k), dtype in (((20, 3), torch.float32), ((60, 7), torch.bfloat16)):
        logits = logits_of(2, num_experts, dtype)
        for bias in (None, None if kind.is_low else random(num_experts)):
            router = Router(kind, top_k, 0.1 if kind.scores == "mixer" else 1e-3, 1.7)
            actual, expected = (each(logits, bias, router, dtype) for each in (route, router_definition.route))
            if kind.groups == 1 or bias is not None:  # sums of two logits may be equal otherwise
                assert torch.equal(actual[1], expected[1])
                torch.testing.assert_close(
                    actual[0], expected[0], rtol=1e-5 if dtype == torch.float32 else 0.02, atol=0
                )


def test_equal_and_impossible_scores() -> None:
    """Of equal ones the first; NaN counts as highest, as in torch.topk; each expert once, whatever the scores."""
    router, low = Router(RouterKind("none", "none"), 3), float("-inf")
    rows = torch.tensor([[1.0, 2, 1, 2, 2], [low] * 5, [0, torch.nan, 1, 2, 3], [1, low, low, low, low]], device=DEVICE)
    assert route(rows, None, router, torch.float32)[1].tolist() == [[1, 3, 4], [0, 1, 2], [1, 4, 3], [0, 1, 2]]
    grouped = Router(RouterKind("none", "none", groups=2, chosen_groups=1), 3)
    rows = torch.tensor([[1.0, 1, 1, 1], [low, low, 1, 2], [5, 0, 3, 1]], device=DEVICE)
    assert route(rows, None, grouped, torch.float32)[1].tolist() == [[0, 1, 2], [3, 2, 0], [0, 1, 2]]
