"""Linear layers of a model that drafts: rows rounded to int16 times int8 weights, against exact products."""

from __future__ import annotations

import ctypes

import pytest
import torch

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu import structs

pytestmark = pytest.mark.skipif(
    not (fused_ops.is_available(torch.bfloat16) and fused_ops.packs()), reason="AVX-512 with BF16 is needed"
)
ROUGH = 2
"""`Linear.packed` of a packed weight whose products may be rough."""


def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x bf16 [rows, depth], weight int8 [columns, depth] -> bf16 [rows, columns]; writes in its workspace only."""
    (rows, depth), columns = x.shape, len(weight)
    arena = fused_ops.WeightArena([(columns, depth)], torch.int8)
    fused_ops.pack(weight, arena.parts[0])
    out = torch.full((rows, columns), 7.0, dtype=torch.bfloat16)
    size = fused_ops.entry("linear_workspace", torch.bfloat16)(rows, depth, 1)
    workspace = torch.full((size + 256,), 90, dtype=torch.uint8)
    start = -workspace.data_ptr() % 64
    pointers = arena.parts[0].data_ptr(), 0 if bias is None else bias.data_ptr()
    call = structs.Linear(
        x.data_ptr(), rows, columns, depth, *pointers, ROUGH, out.data_ptr(), workspace.data_ptr() + start, 1,
        scales.data_ptr(), False,
    )  # fmt: skip
    fused_ops.entry("linear", torch.bfloat16)(ctypes.byref(call))
    assert workspace[start + size + 64 :].eq(90).all()
    return out


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 12, 13])
@pytest.mark.parametrize("depth", [32, 96, 512, 896, 8960])
@pytest.mark.parametrize("outlier", [0.0, 300.0])
@pytest.mark.covering(1)
def test_close_to_exact_products(depth: int, rows: int, outlier: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=generator)
    if outlier:
        x[:, 5] = outlier
    x = x.to(torch.bfloat16)
    weight = torch.randint(-128, 128, (33, depth), generator=generator, dtype=torch.int8)
    scales, bias = torch.rand(33, generator=generator) * 0.01, torch.randn(33, generator=generator).to(torch.bfloat16)
    expected = x.double() @ weight.double().T * scales.double() + bias.double()
    assert (product(x, weight, scales, bias).double() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("depth", [512, 4864])
def test_the_largest_sums(depth: int) -> None:
    weight, scales = torch.full((32, depth), -128, dtype=torch.int8), torch.ones(32)
    x = torch.tensor([[1.0], [-1.0]]).expand(2, depth).to(torch.bfloat16).contiguous()
    expected = torch.tensor([[-128.0 * depth], [128.0 * depth]]).expand(2, 32)
    torch.testing.assert_close(product(x, weight, scales, None).float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_or_tiny(value: float) -> None:
    x = (torch.randn(4, 64) * torch.tensor([[1], [1], [0], [1e-36]])).to(torch.bfloat16)
    x[1, 20] = value
    found = product(x, torch.randint(1, 128, (32, 64), dtype=torch.int8), torch.ones(32), None)
    assert found[0].isfinite().all() and found[1].isnan().all() and found[2:].eq(0).all()
