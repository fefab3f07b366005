"""The kernels for decoder layers: linear layers, norms, rotation, and the two parts of a layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels.native import build as native_build

pytestmark = pytest.mark.usefixtures("bf16_kernels")

ROWS = (1, 2, 3, 4, 5, 9, 12, 13, 16, 17, 33, 49, 205)
SHAPES = ((64, 64), (32, 32), (96, 192), (200, 576), (7, 33), (100, 40), (1, 1), (40, 1101))  # columns, depth
# How far a rounded result may be from the exact one: half a unit in the last place, and that of subnormal numbers.
UNITS = {torch.float32: (2**-24, 0.0), torch.bfloat16: (2**-9, 0.0), torch.float16: (2**-12, 2**-26)}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))
    return request.param


def weights_of(*linears: nn.Linear, is_packed: bool = True) -> list[fused_ops.LinearWeight]:
    if not is_packed or not fused_ops.packs() or linears[0].weight.dtype != torch.bfloat16:
        return [fused_ops.LinearWeight(x.weight, x.bias, *x.weight.shape, is_packed=False) for x in linears]
    arena = fused_ops.WeightArena([(linear.out_features, linear.in_features) for linear in linears])
    for linear, part in zip(linears, arena.parts, strict=True):
        fused_ops.pack(linear.weight, part)
    parts = zip(linears, arena.parts, strict=True)
    return [fused_ops.LinearWeight(part, linear.bias, *linear.weight.shape, is_packed=True) for linear, part in parts]


@contextmanager
def in_one_order() -> Iterator[None]:
    before = fused_ops.in_one_order(True)
    try:
        yield
    finally:
        fused_ops.in_one_order(before)


def random_norm(size: int, dtype: torch.dtype = torch.bfloat16) -> fused_ops.Norm:
    return fused_ops.Norm(torch.randn(size).to(dtype), 1e-5)


def torch_norm(norm: fused_ops.Norm, rows: torch.Tensor) -> torch.Tensor:
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * wide.to(norm.weight.dtype)


def torch_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.covering(2)
def test_linear(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    columns, depth = shape
    linear = nn.Linear(depth, columns, bias=bias).to(dtype)
    unit, subnormal = UNITS[dtype]
    (layer,), (in_place,) = weights_of(linear), weights_of(linear, is_packed=False)
    every = torch.randn(1, max(ROWS), depth).to(dtype)
    alone = torch.cat([fused_ops.linear(layer, row) for row in every.split(1, dim=1)], dim=1)
    with torch.no_grad():
        exact = nn.functional.linear(every.double(), linear.weight.double(), None if not bias else linear.bias.double())
        # fp32 sums, rounded once: half a unit in the last place, plus cancellation in the sum.
        bound = subnormal + exact.abs() * 2 * unit + every.double().abs() @ linear.weight.double().abs().T * 2**-20
    for rows in ROWS:
        got = fused_ops.linear(layer, every[:, :rows])
        assert ((got.double() - exact[:, :rows]).abs() <= bound[:, :rows]).all(), rows
        assert got.equal(fused_ops.linear(in_place, every[:, :rows])), f"{rows} rows: packing changes bits"
        if rows > 48:  # of which many in fp32 have an order of their own with AMX
            with in_one_order():
                got = fused_ops.linear(layer, every[:, :rows])
        assert got.equal(alone[:, :rows]), f"of {rows} rows, one depends on the others"


def sums_of_the_matrix_unit(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, depth] times weight [columns, depth], summed as TDPBF16PS is defined: of each 32 elements, the products
    of even and of odd ones separately, in order. Products of bf16 are exact in fp32."""
    rows, depth = x.shape
    total = torch.zeros(rows, len(weight))
    for start in range(0, depth, 32):
        parts = [torch.zeros_like(total) for _ in range(2)]
        for k in range(start, min(start + 32, depth)):
            parts[k % 2] += x[:, k, None].float() * weight[None, :, k].float()
        total += parts[0] + parts[1]
    return total


def sums_of_dot_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same, summed with VDPBF16PS: of each pair of elements, the product of the odd one first. Longer rows are
    summed in parts of 512 elements, or of 1,024 if they have more than that."""
    rows, depth = x.shape
    total = torch.zeros(rows, len(weight))
    size = 1024 if depth > 1024 else 512
    for start in range(0, depth, size):
        part = torch.zeros_like(total)
        for pair in range(start, min(start + size, depth), 2):
            for k in (pair + 1, pair):
                if k < depth:
                    part += x[:, k, None].float() * weight[None, :, k].float()
        total += part
    return total


@pytest.mark.usefixtures("packed_weights")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_sums_as_the_instruction_is_defined(shape: tuple[int, int]) -> None:
    columns, depth = shape
    linear = nn.Linear(depth, columns, bias=False).bfloat16()
    (layer,) = weights_of(linear)
    x = torch.randn(35, depth).bfloat16()
    sums = sums_of_the_matrix_unit if "AMX" in native_build.status() else sums_of_dot_products
    with torch.no_grad():
        assert fused_ops.linear(layer, x).equal(sums(x, linear.weight).bfloat16())


@pytest.mark.usefixtures("packed_weights")
def test_linear_takes_subnormal_numbers_for_zero() -> None:
    linear = nn.Linear(32, 32, bias=False).bfloat16()
    linear.weight.data = torch.eye(32).bfloat16()
    (layer,) = weights_of(linear)
    tiny = torch.finfo(torch.bfloat16).tiny
    x = torch.tensor([tiny, tiny / 2, -tiny / 4, 1.0]).bfloat16().repeat(8)[None]
    assert fused_ops.linear(layer, x).equal(torch.tensor([tiny, 0.0, 0.0, 1.0]).bfloat16().repeat(8)[None])


def test_linear_takes_any_strides_and_shapes(dtype: torch.dtype) -> None:
    linear = nn.Linear(64, 96, bias=False).to(dtype)
    (layer,) = weights_of(linear)
    x = torch.randn(2, 64, 5).to(dtype).transpose(1, 2)
    flat = fused_ops.linear(layer, x.reshape(10, 64))
    assert fused_ops.linear(layer, x).equal(flat.view(2, 5, 96))
    assert fused_ops.linear(layer, x[:0]).shape == (0, 5, 96)


def test_linear_refuses_other_rows() -> None:
    (layer,) = weights_of(nn.Linear(64, 96).bfloat16())
    for rows in (torch.randn(1, 2, 63).bfloat16(), torch.randn(1, 2, 64)):
        with pytest.raises(ValueError, match="depth 64"):
            fused_ops.linear(layer, rows)


@pytest.mark.parametrize("place", [5, 66])
@pytest.mark.parametrize("rows", [3, 20])
def test_linear_carries_what_is_not_finite(rows: int, place: int, dtype: torch.dtype) -> None:
    linear = nn.Linear(67, 40, bias=False).to(dtype)
    (layer,) = weights_of(linear)
    x = torch.randn(1, rows, 67).to(dtype)
    x[0, 1, place] = torch.nan
    x[0, 2, place] = torch.inf
    got = fused_ops.linear(layer, x)
    assert got[0, 0].isfinite().all() and got[0, 1].isnan().all() and not got[0, 2].isfinite().any()
    linear.weight.data[3, place] = torch.nan
    (layer,) = weights_of(linear)
    got = fused_ops.linear(layer, x)
    assert got[0, :, 3].isnan().all() and got[0, 3:, 4:].isfinite().all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [16, 48, 80, 576, 4096, 16384])
@pytest.mark.covering(2)
def test_norm_is_torchs_bit_for_bit(size: int, dtype: torch.dtype) -> None:
    far = (-22, 30) if dtype == torch.float32 else (-3, 3)  # subnormal squares, and infinite ones
    rows = (torch.randn(1, 90, size) * torch.logspace(*far, 90)[:, None]).to(dtype)
    rows[0, 0, 3] = -0.0
    norm = random_norm(size, dtype)
    assert fused_ops.rms_norm(norm, rows).equal(torch_norm(norm, rows))
    rows[0, 3, 5], rows[0, 4, 6] = torch.nan, torch.inf
    theirs, ours = torch_norm(norm, rows), fused_ops.rms_norm(norm, rows)
    assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@pytest.mark.covering(1)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_rotation_is_torchs_bit_for_bit(heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    query, key = (torch.randn(1, 33, n, dim).to(dtype).transpose(1, 2) for n in heads)
    cos, sin = torch.randn(2, 1, 33, dim).to(dtype)
    for q, k in ((query, key), (query.contiguous(), key.contiguous())):
        rotated = fused_ops.rotate(q, k, cos, sin)
        for ours, x in zip(rotated, (q, k), strict=True):
            assert ours.equal(torch_rotate(x, cos, sin))


@pytest.mark.covering(1)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("head_norms", "bias"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 130])
def test_parts_of_a_layer_are_their_operations(rows: int, head_norms: bool, bias: bool, dtype: torch.dtype) -> None:
    depth, heads, kv_heads, dim, inner = 96, 4, 2, 32, 160
    sizes = {
        "q": (depth, heads * dim), "k": (depth, kv_heads * dim), "v": (depth, kv_heads * dim),
        "o": (heads * dim, depth), "gate": (depth, inner), "up": (depth, inner), "down": (inner, depth),
    }  # fmt: skip
    is_packed = bias == head_norms  # two of the four combinations
    linears = weights_of(*(nn.Linear(*size, bias=bias).to(dtype) for size in sizes.values()), is_packed=is_packed)
    q, k, v, o, gate, up, down = linears
    x = torch.randn(1, rows, depth).to(dtype)
    cos, sin = torch.randn(2, 1, rows, dim).to(dtype)
    before = fused_ops.LayerIn(
        random_norm(depth, dtype), q, k, v,
        *((random_norm(dim, dtype), random_norm(dim, dtype)) if head_norms else (None, None)), dim,
    )  # fmt: skip
    after = fused_ops.LayerOut(o, random_norm(depth, dtype), gate, up, down)

    normed = torch_norm(before.norm, x)
    expected = []
    for linear, norm in ((q, before.query_norm), (k, before.key_norm), (v, None)):
        of_heads = fused_ops.linear(linear, normed).view(1, rows, -1, dim)
        expected.append((of_heads if norm is None else torch_norm(norm, of_heads)).transpose(1, 2))
    expected[:2] = [torch_rotate(part, cos, sin) for part in expected[:2]]
    for ours, theirs in zip(fused_ops.layer_in(before, x, cos, sin), expected, strict=True):
        assert ours.equal(theirs)

    attended = torch.randn(1, rows, heads * dim).to(dtype) * 4
    middle = x + fused_ops.linear(o, attended)
    normed = torch_norm(after.norm, middle)
    product = nn.functional.silu(fused_ops.linear(gate, normed)) * fused_ops.linear(up, normed)
    assert fused_ops.layer_out(after, attended, x).equal(middle + fused_ops.linear(down, product))


def silu_values(dtype: torch.dtype) -> torch.Tensor:
    """All of 16 bits; in fp32 some of every size."""
    if dtype == torch.float32:
        return torch.cat([torch.randn(1 << 13) * scale for scale in (0.1, 1, 10, 60)])
    return torch.arange(1 << 16).to(torch.uint16).view(dtype)


def test_every_value_of_silu(dtype: torch.dtype) -> None:
    """Through the MLP of a layer whose gate gives its bias, whose up gives 1, and whose down passes on what it gets."""
    values = silu_values(dtype)
    silu = nn.functional.silu(values)
    # The products of AVX-512 take subnormal numbers for zero.
    values = values[(silu.abs() >= torch.finfo(dtype).tiny) & silu.isfinite()]
    values = nn.functional.pad(values, (0, -len(values) % 32))
    nothing, identity = (nn.Linear(32, 32, bias=False).to(dtype) for _ in range(2))
    nothing.weight.data.zero_()
    identity.weight.data = torch.eye(32).to(dtype)
    zero, one = weights_of(nothing, identity)
    up = zero._replace(bias=torch.ones(32).to(dtype))
    x = torch.zeros(1, 1, 32).to(dtype)
    norm = random_norm(32, dtype)
    ours = [
        fused_ops.layer_out(fused_ops.LayerOut(zero, norm, zero._replace(bias=gate), up, one), x, x)
        for gate in values.split(32)
    ]
    assert torch.cat(ours, dim=2).flatten().equal(nn.functional.silu(values))
