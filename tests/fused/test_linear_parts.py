"""Linear layers of many rows in fp32 on the matrix unit: each number as three of bf16 (linear_parts.inc.c)."""

from __future__ import annotations

import pytest
import torch

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels.native import build as native_build
from tests.fused.test_layers import in_one_order, threads, weights_of  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("bf16_kernels"),
    pytest.mark.skipif(
        not native_build.has_compiler() or "AMX" not in native_build.status(), reason="no AMX, also not emulated"
    ),
]

SHAPES = ((64, 64), (200, 576), (7, 33), (100, 40), (1, 1), (40, 1101), (33, 2080), (150, 3000))  # columns, depth
ROWS = (49, 64, 65, 100, 131, 200)


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> fused_ops.LinearWeight:
    """A bf16 weight is a copy of one in fp32."""
    return fused_ops.LinearWeight(weight, bias, *weight.shape, is_packed=weight.dtype == torch.bfloat16)


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-80])
@pytest.mark.covering(2)
def test_as_precise_as_fp32(shape: tuple[int, int], scale: float) -> None:
    columns, depth = shape
    weight, bias = torch.randn(columns, depth) / scale, torch.randn(columns)
    x = torch.randn(200, depth) * scale
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    error = rms(fused_ops.linear(layer_of(weight, bias), x).double() - exact)
    theirs = rms(torch.nn.functional.linear(x, weight, bias).double() - exact)
    assert error <= 2 * theirs + 2**-26 * rms(exact)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.covering(2)
def test_rows_do_not_depend_on_others(shape: tuple[int, int], bias: bool) -> None:
    columns, depth = shape
    layer = layer_of(torch.randn(columns, depth), torch.randn(columns) if bias else None)
    x = torch.randn(700, depth)
    whole = fused_ops.linear(layer, x)
    for rows in ROWS:
        assert fused_ops.linear(layer, x[700 - rows :]).equal(whole[700 - rows :]), rows
    with in_one_order():
        one_order = fused_ops.linear(layer, x)
        assert one_order[:3].equal(fused_ops.linear(layer, x[:3]))
    assert one_order[:3].equal(fused_ops.linear(layer, x[:3]))
    assert fused_ops.linear(layer, x).equal(whole)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_that_are_zero_change_no_bit(shape: tuple[int, int]) -> None:
    """A copy in bf16 of a weight in fp32, and int8 with scales of 1."""
    exact = torch.randint(-127, 128, shape).float()
    x = torch.randn(100, shape[1])
    expected = fused_ops.linear(layer_of(exact), x)
    assert fused_ops.linear(layer_of(exact.bfloat16()), x).equal(expected)
    int8 = fused_ops.Int8Scales(torch.ones(shape[0]), torch.float32, rounds=False)
    layer = fused_ops.LinearWeight(exact.to(torch.int8), None, *shape, is_packed=False, int8=int8)
    assert fused_ops.linear(layer, x).equal(expected)


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_rows_that_are_not_finite(odd: float) -> None:
    """They are what they are alone, and no other row changes."""
    layer = layer_of(torch.randn(40, 67), torch.randn(40))
    x = torch.randn(130, 67)
    expected = fused_ops.linear(layer, x)
    for row, place in ((2, 5), (64, 66), (129, 0)):
        x[row, place] = odd
        expected[row] = fused_ops.linear(layer, x[row : row + 1])[0]
    got = fused_ops.linear(layer, x)
    assert got.isnan().equal(expected.isnan()) and got.nan_to_num(7).equal(expected.nan_to_num(7))


def test_the_largest_numbers() -> None:
    largest = torch.finfo(torch.float32).max
    layer = layer_of(torch.eye(64))
    x = torch.full((64, 64), largest)
    assert fused_ops.linear(layer, x).equal(x)
    assert fused_ops.linear(layer_of(torch.eye(64) * largest), torch.ones(64, 64)).equal(x)


def test_workspaces_of_layers_that_share_one() -> None:
    """A greater depth never needs less; layers of a decoder ask for the greatest."""
    of = fused_ops.entry("linear_workspace", torch.float32)
    for rows in (49, 100, 160, 250, 700, 3000):
        sizes = [of(rows, depth, 1) for depth in range(1, 3000)]
        assert sizes == sorted(sizes), rows
