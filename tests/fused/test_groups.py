"""Linear layers of weights in codes of 4 or 8 bits, in native kernels, beside their values in fp64."""

from __future__ import annotations

import pytest
import torch

from hf_paged.fused.cpu import groups
from hf_paged.fused.cpu import ops as fused_ops

pytestmark = pytest.mark.usefixtures("bf16_kernels")

COUNTS = [1, 2, 3, 5, 8, 9, 40, 65]  # of rows: each tile of the kernels, and more than are computed together


def coded(columns: int, depth: int, bits: int, size: int) -> groups.Codes:
    generator = torch.Generator().manual_seed(columns)
    return groups.rounded(torch.randn(columns, depth, generator=generator) * 0.1, bits, size)


def layer(codes: groups.Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> fused_ops.LinearWeight:
    how = fused_ops.InGroups(codes.bits, codes.size, dtype)
    return fused_ops.LinearWeight(codes.memory, bias, codes.columns, codes.depth, True, None, how)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns, depth", [(32, 64), (50, 40), (7, 33), (200, 2100), (96, 1)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", groups.SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_sums(dtype: torch.dtype, columns: int, depth: int, bits: int, size: int, biased: bool) -> None:
    if not fused_ops.is_available(dtype):
        pytest.skip(f"no kernels for {dtype}")
    codes = coded(columns, depth, bits, size)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(max(COUNTS), depth, generator=generator) * torch.logspace(-1.5, 1, max(COUNTS))[:, None]
    # Most elements are small beside a few, as in models.
    rows[:, ::37] *= 1000
    rows, bias = rows.to(dtype), torch.randn(columns, generator=generator).to(dtype)
    weight = codes.values().double()
    known = rows.double() @ weight.T + (bias.double() if biased else 0)
    # A large element may have a small weight, which is the difference of larger numbers.
    terms = rows.double().abs().sum(1, keepdim=True) * weight.abs().amax(1) + bias.double().abs()
    native = layer(codes, bias if biased else None, dtype)
    all_rows = fused_ops.linear(native, rows)
    for count in COUNTS:  # the same bits in any batch
        assert fused_ops.linear(native, rows[:count]).equal(all_rows[:count])
    # Of rows in 16 bits, each element of a group is rounded to 2**-15 of the largest one.
    bound = torch.finfo(dtype).eps * known.abs() + (2**-12 if dtype.itemsize == 2 else 3e-7) * terms + 1e-7
    assert ((all_rows.double() - known).abs() <= bound).all()


def test_what_is_not_finite_is_seen() -> None:
    rows = torch.ones(2, 64)
    rows[0, 40] = torch.inf
    found = fused_ops.linear(layer(coded(32, 64, 4, 32), None, torch.float32), rows)
    assert not found[0].isfinite().any() and found[1].isfinite().all()


@pytest.mark.parametrize("bits, most", [(4, 0.076), (8, 0.0048)])
def test_rounding(bits: int, most: float) -> None:
    """Least squares leave 0.074 of normal numbers; the range of a group alone, 0.078."""
    weight = torch.randn(300, 2050, generator=torch.Generator().manual_seed(0))
    codes = groups.rounded(weight, bits, 32)
    assert (codes.values() - weight).square().mean().sqrt() < most
    index = torch.tensor([[299, 0], [17, 299]])
    assert codes.columns_at(index).equal(codes.values()[index])
    with pytest.raises(ValueError, match="which fp16 cannot span"):
        groups.rounded(weight * 1e6, bits, 32)
    equal = torch.full((16, 32), 0.5)
    assert groups.rounded(equal, bits, 32).values().equal(equal)
