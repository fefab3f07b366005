"""Linear layers of int8 weights in native kernels."""

from __future__ import annotations

import pytest
import torch

from hf_paged.fused.cpu import ops as fused_ops
from tests.fused.test_layers import in_one_order

pytestmark = pytest.mark.usefixtures("bf16_kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(32, 64), (50, 40), (7, 33), (200, 2100), (96, 1)]  # columns, depth
COUNTS = [1, 2, 3, 4, 5, 8, 9, 12, 13, 40, 70]  # of rows: each tile of the kernels, and more than one block


def layer(columns: int, depth: int, dtype: torch.dtype, *, biased: bool, rounds: bool) -> fused_ops.LinearWeight:
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randint(-128, 128, (columns, depth), generator=generator).to(torch.int8)
    scales = torch.rand(columns, generator=generator) * 0.01 + 0.001
    bias = torch.randn(columns, generator=generator).to(dtype) if biased else None
    return fused_ops.LinearWeight(
        weight, bias, columns, depth, is_packed=False, int8=fused_ops.Int8Scales(scales, dtype, rounds)
    )


def packed(weight: fused_ops.LinearWeight) -> fused_ops.LinearWeight:
    arena = fused_ops.WeightArena([(weight.columns, weight.depth)], torch.int8)
    fused_ops.pack(weight.memory, arena.parts[0])
    return weight._replace(memory=arena.parts[0], is_packed=True)


def expected(weight: fused_ops.LinearWeight, rows: torch.Tensor) -> torch.Tensor:
    """With sums in fp64, rounded where the kernels round."""
    assert weight.int8 is not None
    sums = rows.double() @ weight.memory.double().T
    if weight.int8.rounds:
        sums = sums.to(rows.dtype).double()
    found = (sums * weight.int8.scales.double()).to(rows.dtype)
    return found if weight.bias is None else found + weight.bias


@pytest.mark.parametrize("columns, depth", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased, rounds", [(False, True), (True, False), (True, True)])
@pytest.mark.covering(2)
def test_sums_times_scales(columns: int, depth: int, dtype: torch.dtype, biased: bool, rounds: bool) -> None:
    if not fused_ops.is_available(dtype):
        pytest.skip(f"no kernels for {dtype}")
    weight = layer(columns, depth, dtype, biased=biased, rounds=rounds)
    weights = [weight, packed(weight)] if dtype == torch.bfloat16 and fused_ops.packs() else [weight]
    rows = (torch.randn(max(COUNTS), depth, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)
    known = expected(weight, rows).double()
    bound = 3 * torch.finfo(dtype).eps * (known.abs() + (rows.double().abs() @ weight.memory.double().abs().T) * 0.01)
    alone = fused_ops.linear(weight, rows[:1])
    for each in weights:
        for count in COUNTS:
            found = fused_ops.linear(each, rows[:count])
            assert found.dtype == dtype and found.shape == (count, columns)
            assert ((found.double() - known[:count]).abs() <= bound[:count]).all()
            with in_one_order():  # the same bits in any batch, and whether the weight is packed or not
                found = fused_ops.linear(each, rows[:count])
                assert found[:1].equal(alone)
                assert found.equal(fused_ops.linear(weight, rows)[:count])
