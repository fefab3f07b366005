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

SHAPES = ((64, 64), (200, 576), (67, 33), (100, 40), (65, 1), (80, 1101), (97, 2080), (150, 3000))  # columns, depth
ROWS = (49, 64, 65, 100, 131, 200)


def layer_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> fused_ops.LinearWeight:
    """A bf16 weight is a copy of one in fp32."""
    return fused_ops.LinearWeight(weight, bias, *weight.shape, is_packed=weight.dtype == torch.bfloat16)


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-80])
@pytest.mark.covering(1)
def test_as_precise_as_fp32(shape: tuple[int, int], scale: float) -> None:
    columns, depth = shape
    weight, bias = torch.randn(columns, depth) / scale, torch.randn(columns)
    x = torch.randn(200, depth) * scale
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    errors = fused_ops.linear(layer_of(weight, bias), x).double() - exact
    theirs = rms(torch.nn.functional.linear(x, weight, bias).double() - exact)
    assert rms(errors) <= 2 * theirs + 2**-26 * rms(exact)


def test_errors_have_both_signs() -> None:
    weight, x = torch.rand(64, 64), torch.rand(400, 64)
    errors = fused_ops.linear(layer_of(weight), x).double() / (x.double() @ weight.double().T) - 1
    assert errors.mean().abs() < 1e-8


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.covering(1)
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
    layer = layer_of(torch.randn(70, 67), torch.randn(70))
    x = torch.randn(130, 67)
    expected = fused_ops.linear(layer, x)
    for row, place in ((2, 5), (64, 66), (129, 0)):
        x[row, place] = odd
        expected[row] = fused_ops.linear(layer, x[row : row + 1])[0]
    got = fused_ops.linear(layer, x)
    assert got.isnan().equal(expected.isnan()) and got.nan_to_num(7).equal(expected.nan_to_num(7))


def test_nan_with_any_bits() -> None:
    """Those that rounding would turn into a zero."""
    layer, x = layer_of(torch.randn(70, 67)), torch.randn(60, 67)
    x.view(torch.int32)[7, 5], x.view(torch.int32)[8, 6] = 0x7FFFFFFF, 0x7F800001
    rows = fused_ops.linear(layer, x).isnan().any(1)
    assert rows.nonzero().flatten().tolist() == [7, 8]


def test_weights_that_are_not_finite() -> None:
    layer = layer_of(torch.randn(70, 67))
    layer.memory[3, 5], layer.memory[4, 6], layer.memory[5, 7] = torch.inf, -torch.inf, torch.nan
    x = torch.randn(60, 67)
    with in_one_order():
        expected = fused_ops.linear(layer, x)
    got = fused_ops.linear(layer, x)
    assert got.isnan().equal(expected.isnan()) and got.nan_to_num(7).equal(expected.nan_to_num(7))


def test_sums_that_overflow_on_the_way() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.zeros(64, 64)
    x[:, :4] = torch.tensor([largest, largest, -largest, -largest])
    layer = layer_of(torch.ones(64, 64))
    assert fused_ops.linear(layer, x).equal(fused_ops.linear(layer, x[:1]).repeat(64, 1))


def test_few_columns_are_computed_in_lanes() -> None:
    layer, x = layer_of(torch.randn(63, 40)), torch.randn(100, 40)
    assert fused_ops.linear(layer, x)[:1].equal(fused_ops.linear(layer, x[:1]))


def test_the_largest_numbers() -> None:
    largest = torch.finfo(torch.float32).max
    layer = layer_of(torch.eye(64))
    x = torch.full((64, 64), largest)
    assert fused_ops.linear(layer, x).equal(x)
    assert fused_ops.linear(layer_of(torch.eye(64) * largest), torch.ones(64, 64)).equal(x)


def test_workspaces_of_layers_that_share_one() -> None:
    """A greater depth never needs less; layers of a decoder ask for the greatest."""
    of = fused_ops.entry("linear_workspace", torch.float32)
    for count in (1, 16):  # threads
        for rows in (49, 100, 160, 161, 250, 700, 3000):
            sizes = [of(rows, depth, count) for depth in range(1, 3000)]
            assert sizes == sorted(sizes), rows
