"""The Triton kernels between two attentions against their definitions: in the interpreter on a CPU, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged.fused import rows as definitions
from hf_paged.fused.gpu.kernels.gate import gated
from hf_paged.fused.gpu.kernels.norm import add_norm
from hf_paged.fused.gpu.kernels.rotary import rotate
from hf_paged.fused.rows import ACTIVATIONS, NORM_KINDS, ROTARY_KINDS, Norm, NormKind, RotaryKind
from tests.kernels.on_triton import DEVICE, DTYPES, LAYERS, random

pytestmark = LAYERS  # the interpreter truncates to bf16 where a GPU rounds: results differ by an ulp


def check(actual: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert actual is not None and actual.dtype == expected.dtype
    bits = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 5e-2}[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=bits, atol=bits)


def make_norm(size: int, kind: NormKind, dtype: torch.dtype, *, plain: bool = False) -> Norm:
    if plain:
        return Norm(None, None, 1e-5, kind)
    return Norm(random(size, dtype=dtype), random(size, dtype=dtype) if kind.is_centered else None, 1e-5, kind)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORM_KINDS, ids=str)
def test_norms(kind: NormKind, dtype: torch.dtype) -> None:
    for size, plain in ((40, False), (64, True)):
        norm = make_norm(size, kind, dtype, plain=plain)
        x = random(2, 2 * size, dtype=dtype)[:, size:]  # strided rows
        residual = random(2, size, dtype=dtype)
        check(add_norm(x, after=norm).out, definitions.normalise(x, norm))
        both = add_norm(x, residual, after=norm)
        check(both.total, x + residual)
        check(both.out, definitions.normalise(x + residual, norm))
        both = add_norm(x, residual, before=norm, after=make_norm(size, NormKind(), dtype, plain=True))
        check(both.total, residual + definitions.normalise(x, norm))
        both = add_norm(x, residual, after=norm, scale=0.3)
        check(both.total, residual + x * 0.3)
        check(both.out, definitions.normalise(residual + x * 0.3, norm))
        bias = random(size, dtype=dtype)
        both = add_norm(x, residual, after=norm, bias=bias)
        check(both.total, x + residual + bias)
        check(both.out, definitions.normalise(x + residual, norm))
        only = add_norm(x, residual, before=norm)
        check(only.total, residual + definitions.normalise(x, norm))
        assert only.out is None


def test_rows_of_zeros_and_no_rows() -> None:
    norm = make_norm(40, NormKind(), torch.float32)
    assert add_norm(torch.zeros(2, 40, device=DEVICE), after=norm).out.eq(0).all()
    empty = torch.empty(0, 40, device=DEVICE)
    assert add_norm(empty, empty, after=norm).out.shape == gated(empty, empty, "silu").shape == (0, 40)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(activation: str, dtype: torch.dtype) -> None:
    both = random(2, 2 * 1100, dtype=dtype) * 3
    gate, up = both.chunk(2, -1)
    expected = ACTIVATIONS[activation](gate) * up
    check(gated(gate, up, activation), expected)
    actual = gated(gate, up.clone(), activation)  # rows of other distances
    check(actual, expected)
    if dtype == torch.float16:  # without the rounding of the activation, every fifth product is an ulp off
        assert (actual != expected).float().mean() < 0.08
    check(gated(gate, None, activation), ACTIVATIONS[activation](gate))
    gate[0, 0], up[0, 1] = torch.nan, torch.inf
    actual = gated(gate, up, activation)
    assert actual[0, 0].isnan() and not actual[0, 2:].isnan().any()


def test_rotary_without_keys() -> None:
    query, angles = random(3, 4, 24), (random(3, 24), random(3, 24))
    out, none = rotate(query, query[:, :0], angles=angles, kind=RotaryKind())
    check(out, definitions.rotate(query, *angles, RotaryKind()))
    assert none is not None and none.shape == (3, 0, 24)


def heads_of(packed: torch.Tensor, sizes: list[int], dim: int) -> list[torch.Tensor]:
    return [part.unflatten(-1, (-1, dim)) for part in packed.split([size * dim for size in sizes], -1)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ROTARY_KINDS, ids=str)
@pytest.mark.parametrize("dims,angles", [(24, 24), (40, 16)], ids=["whole", "partial"])
def test_rotary(kind: RotaryKind, dims: int, angles: int) -> None:
    angles = angles // 2 if kind.doubles else angles
    for dtype in (torch.float16, torch.float32):
        query, key = heads_of(random(2, 8 * dims, dtype=dtype), [5, 3], dims)
        cos, sin = random(2, angles, dtype=dtype), random(2, angles, dtype=dtype)
        outs = rotate(query, key, angles=(cos, sin), kind=kind)
        for actual, x in zip(outs, (query, key), strict=True):
            assert actual.is_contiguous()
            check(actual, definitions.rotate(x, cos, sin, kind))


WRITES: list[dict[str, Any]] = [
    {"kind": NormKind(rounds_first=True)}, {"kind": NormKind(adds_one=True), "heads": (3, 3), "dims": 72},
    {"kind": NormKind(is_centered=False), "dims": 40, "v_dims": 24, "block_size": 1},
    {"kind": None, "heads": (1, 1), "dims": 20, "v_dims": 40}, {"kind": None, "heads": (17, 1), "angles": None},
    {"kind": NormKind(is_centered=True), "heads": (3, 2), "dims": 40, "turned": 16},
    {"kind": NormKind(is_centered=True), "dims": 24, "is_last": True, "factor": True},
    {"kind": NormKind(), "dims": 40, "is_last": True, "rotary": RotaryKind(turns_back=True)},
    {"kind": NormKind(), "rotary": RotaryKind(True, True, True, False), "is_complex": True, "is_last": True},
    {"kind": None, "dims": 40, "rotary": RotaryKind(False, True, True), "is_complex": True, "factor": True},
    {"kind": NormKind(rounds_first=True), "angles": None, "factor": True},
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("case", WRITES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_rotation_and_write(dtype: torch.dtype, case: dict[str, Any]) -> None:
    """Norms before and after rotations, complex angles, factors of the query; padding, and NaN in all other slots."""
    (heads, kv_heads), dims = case.get("heads", (4, 2)), case.get("dims", 32)
    v_dims, block_size, kind = case.get("v_dims", dims), case.get("block_size", 4), case["kind"]
    packed = random(4, heads * dims + kv_heads * (dims + v_dims), dtype=dtype)
    query, key = heads_of(packed[:, : (heads + kv_heads) * dims], [heads, kv_heads], dims)
    value = packed[:, (heads + kv_heads) * dims :].unflatten(-1, (kv_heads, v_dims))
    # K and V in one tensor: strided caches.
    caches = torch.full((5, block_size, kv_heads, dims + v_dims), torch.nan, dtype=dtype, device=DEVICE)
    key_cache, value_cache = caches[..., :dims], caches[..., dims:]
    slots = torch.tensor([3, -1, 4, 2], device=DEVICE)
    norms = tuple(None if kind is None else make_norm(dims, kind, dtype) for _ in range(2))
    rotary, is_last = case.get("rotary", RotaryKind()), case.get("is_last", False)
    cos, sin = (random(4, case.get("turned", dims) // (2 if rotary.doubles else 1), dtype=dtype) for _ in range(2))
    angles: Any = (cos, sin)
    if "is_complex" in case:
        angles = torch.complex(cos.float(), sin.float())
    if "angles" in case:
        angles = None
    factor = random(4) if "factor" in case else None
    outs = rotate(
        query, key, angles=angles, kind=rotary, norms=norms, norm_is_last=is_last, factor=factor, value=value,
        into=(key_cache, value_cache, slots),
    )  # fmt: skip
    assert outs[1] is None

    def expected(x: torch.Tensor, norm: Norm | None, factor: torch.Tensor | None = None) -> torch.Tensor:
        x = x if norm is None or is_last else definitions.normalise(x, norm)
        x = x if angles is None else definitions.rotate(x, *definitions.cos_and_sin(angles), rotary)
        x = definitions.normalise(x, norm) if norm is not None and is_last else x
        return x if factor is None else (x * factor[:, None, None]).to(dtype)

    check(outs[0], expected(query, norms[0], factor))
    written = slots >= 0
    flat_key, flat_value = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    check(flat_key[slots[written]], expected(key, norms[1])[written])
    assert torch.equal(flat_value[slots[written]], value[written])
    others = [slot for slot in range(5 * block_size) if slot not in slots.tolist()]
    assert flat_key[others].isnan().all() and flat_value[others].isnan().all()
