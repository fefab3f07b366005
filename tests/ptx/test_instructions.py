"""What the machine computes, instruction by instruction, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ptx.programs import computed, execute

N = 256
I16, I32, I64, F16, F32, BF16 = torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.bfloat16


def numbers(dtype: torch.dtype, seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = shape or (N,)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        found = torch.randint(max(limits.min, -(2**40)), min(limits.max, 2**40), shape, generator=generator)
        return found.to(dtype)
    found = torch.randn(shape, generator=generator) * 10
    found.flatten()[:4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    return found.to(dtype)


def unsigned(x: torch.Tensor) -> torch.Tensor:
    return x.long() & 0xFFFFFFFF


def high(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of a product of 64."""
    return a * (b >> 16) + (a * (b & 0xFFFF) >> 16) >> 16


BINARY: list[tuple[str, torch.dtype, Callable[..., Any]]] = [
    ("add.s32 {d}, {a}, {b}", I32, torch.add),
    ("sub.s64 {d}, {a}, {b}", I64, torch.sub),
    ("mul.lo.s32 {d}, {a}, {b}", I32, torch.mul),
    ("mul.hi.u32 {d}, {a}, {b}", I32, lambda a, b: high(unsigned(a), unsigned(b)).int()),
    ("div.s32 {d}, {a}, {b}", I32, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    ("min.s32 {d}, {a}, {b}", I32, torch.minimum),
    ("max.u32 {d}, {a}, {b}", I32, lambda a, b: torch.maximum(unsigned(a), unsigned(b)).int()),
    ("and.b32 {d}, {a}, {b}", I32, torch.bitwise_and),
    ("xor.b64 {d}, {a}, {b}", I64, torch.bitwise_xor),
    ("shl.b32 {d}, {a}, 7", I32, lambda a, b: a << 7),
    ("shr.s32 {d}, {a}, 40", I32, lambda a, b: a >> 31),
    ("shr.u32 {d}, {a}, 3", I32, lambda a, b: (unsigned(a) >> 3).int()),
    ("bfe.u32 {d}, {a}, 4, 14", I32, lambda a, b: (unsigned(a) >> 4 & 0x3FFF).int()),
    ("bfe.s32 {d}, {a}, 3, 1", I32, lambda a, b: -(a >> 3 & 1)),
    ("prmt.b32 {d}, {a}, {b}, 0x5410", I32, lambda a, b: a & 0xFFFF | b << 16),
    ("not.b32 {d}, {a}", I32, lambda a, b: ~a),
    ("popc.b32 {d}, {a}", I32, lambda a, b: sum(a >> i & 1 for i in range(32)).int()),
    ("add.f32 {d}, {a}, {b}", F32, torch.add),
    ("mul.f32 {d}, {a}, {b}", F32, torch.mul),
    ("div.full.f32 {d}, {a}, {b}", F32, torch.div),
    ("fma.rn.f32 {d}, {a}, {b}, {a}", F32, lambda a, b: (a.double() * b.double() + a.double()).float()),
    ("max.f32 {d}, {a}, {b}", F32, torch.fmax),
    ("min.NaN.f32 {d}, {a}, {b}", F32, torch.minimum),
    ("neg.f32 {d}, {a}", F32, lambda a, b: -a),
    ("abs.f32 {d}, {a}", F32, lambda a, b: a.abs()),
    *((f"{name}.{kind} {{d}}, {{a}}, {{b}}", dtype, getattr(torch, name))
      for name in ("add", "sub", "mul") for kind, dtype in (("bf16", BF16), ("f16", F16))),
    ("max.bf16 {d}, {a}, {b}", BF16, torch.fmax),
    ("fma.rn.bf16 {d}, {a}, {b}, {a}", BF16, lambda a, b: (a.double() * b.double() + a.double()).bfloat16()),
    ("fma.rn.f16 {d}, {a}, {b}, {b}", F16, lambda a, b: (a.double() * b.double() + b.double()).half()),
    ("setp.lt.f32 %p1, {a}, {b}; selp.f32 {d}, {a}, {b}, %p1", F32, lambda a, b: torch.where(a < b, a, b)),
    ("setp.geu.f32 %p1, {a}, {b}; selp.f32 {d}, {a}, {b}, %p1", F32, lambda a, b: torch.where(~(a < b), a, b)),
    ("setp.nan.f32 %p1, {a}, {b}; selp.f32 {d}, 0f3F800000, {b}, %p1", F32,
     lambda a, b: torch.where(a.isnan() | b.isnan(), 1.0, b)),
    ("setp.gt.s32 %p1, {a}, 0; setp.gt.and.s32 %p2, {b}, 0, %p1; selp.b32 {d}, {a}, {b}, %p2", I32,
     lambda a, b: torch.where((a > 0) & (b > 0), a, b)),
    ("setp.ne.s32 %p1, {a}, {b}; not.pred %p2, %p1; selp.b32 {d}, {a}, {b}, %p2", I32, lambda a, b: b),
    ("mov.b32 {d}, {a}; setp.lt.s32 %p1, {a}, {b}; @%p1 mov.b32 {d}, {b}", I32, torch.maximum),
    ("mov.b32 {d}, {a}; setp.lt.s32 %p1, {a}, {b}; @!%p1 bra $L_end; mov.b32 {d}, {b}; $L_end: add.s32 {d}, {d}, 1",
     I32, lambda a, b: torch.maximum(a, b) + 1),
]  # fmt: skip


def test_arithmetic() -> None:
    for text, dtype, function in BINARY:
        a, b = numbers(dtype, 0), numbers(dtype, 1)
        b[b == 0] = 1
        actual = computed(text, torch.empty_like(a), a, b)
        assert torch.equal(actual.nan_to_num(nan=77), function(a, b).to(dtype).nan_to_num(nan=77)), text


CONVERSIONS: list[tuple[str, torch.dtype, torch.dtype, Callable[..., Any]]] = [
    ("cvt.rn.bf16.f32 {d}, {a}", F32, BF16, lambda a: a.bfloat16()),
    ("cvt.rn.f16.f32 {d}, {a}", F32, F16, lambda a: a.half()),
    ("cvt.f32.bf16 {d}, {a}", BF16, F32, lambda a: a.float()),
    ("cvt.f32.f16 {d}, {a}", F16, F32, lambda a: a.float()),
    ("cvt.rzi.s32.f32 {d}, {a}", F32, I32, lambda a: a.double().nan_to_num(0).clamp(-(2**31), 2**31 - 1).int()),
    ("cvt.rn.f32.s32 {d}, {a}", I32, F32, lambda a: a.float()),
    ("cvt.s64.s32 {d}, {a}", I32, I64, lambda a: a.long()),
    ("cvt.u64.u32 {d}, {a}", I32, I64, unsigned),
    ("cvt.u32.u64 {d}, {a}", I64, I32, lambda a: a.int()),
    ("cvt.rmi.f32.f32 {d}, {a}", F32, F32, torch.floor),
    ("cvt.s32.s8 {d}, {a}", I32, I32, lambda a: a.to(torch.int8).int()),
    ("mul.wide.s32 {d}, {a}, {a}", I32, I64, lambda a: a.long() ** 2),
    ("mad.wide.u32 {d}, {a}, 3, 5", I32, I64, lambda a: unsigned(a) * 3 + 5),
    ("ex2.approx.ftz.f32 {d}, {a}", F32, F32, torch.exp2),
    ("lg2.approx.f32 {d}, {a}", F32, F32, torch.log2),
    ("rsqrt.approx.f32 {d}, {a}", F32, F32, torch.rsqrt),
    ("mov.b32 {{%rs1, %rs2}}, {a}; mov.b32 {d}, {{%rs2, %rs1}}", I32, I32, lambda a: a << 16 | a >> 16 & 0xFFFF),
    ("cvt.rn.bf16x2.f32 {d}, {a}, 0f40000000", F32, I32,
     lambda a: torch.stack([torch.full_like(a, 2), a], 1).bfloat16().view(I32)[:, 0]),
    ("cvt.rn.satfinite.e4m3x2.f32 %rs1, {a}, {a}; cvt.rn.f16x2.e4m3x2 %r9, %rs1; mov.b32 {{%rs2, %rs3}}, %r9; "
     "cvt.f32.f16 {d}, %rs3", F32, F32, lambda a: a.clamp(-448, 448).to(torch.float8_e4m3fn).float()),
]  # fmt: skip


def test_conversions() -> None:
    for text, source, to, function in CONVERSIONS:
        a = numbers(source, 0)
        actual, expected = computed(text, torch.empty(N, dtype=to), a), function(a).to(to)
        if "approx" in text:
            torch.testing.assert_close(actual, expected, equal_nan=True, rtol=2e-7, atol=0)
        else:
            same = (actual == expected) | a.isnan()  # there is more than one NaN
            assert same.all(), (text, a[~same], actual[~same], expected[~same])


def test_half_precision_is_rounded_once() -> None:
    """The exact sum lies just above the middle between two numbers of bf16; in fp32 it is the middle."""
    a, b, c = (torch.tensor([x] * 32, dtype=BF16) for x in (1 + 2**-7, 2**-8 + 2**-15, 2**-40))
    one = torch.ones(32, dtype=BF16)
    assert computed("fma.rn.bf16 {d}, {a}, {b}, {c}", torch.empty(32, dtype=BF16), a, b, one)[0] > 1
    middle = torch.tensor([2**-8] * 32, dtype=BF16)
    up = computed("fma.rn.bf16 {d}, {a}, {b}, {c}", torch.empty(32, dtype=BF16), middle, one, one)
    assert up[0] == 1  # to even
    assert computed("fma.rn.bf16 {d}, {a}, {b}, {c}", torch.empty(32, dtype=BF16), c, one, one)[0] == 1


SHUFFLES: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("shfl.sync.bfly.b32 {d}, {a}, 2, 31, -1", lambda x: x[:, torch.arange(32) ^ 2]),
    ("shfl.sync.idx.b32 {d}, {a}, 5, 31, -1", lambda x: x[:, 5:6].expand(-1, 32)),
    ("shfl.sync.up.b32 {d}, {a}, 3, 0, -1", lambda x: torch.cat([x[:, :3], x[:, :-3]], 1)),
    ("shfl.sync.down.b32 {d}, {a}, 4, 31, -1", lambda x: torch.cat([x[:, 4:], x[:, -4:]], 1)),
    ("redux.sync.max.s32 {d}, {a}, -1", lambda x: x.amax(1, keepdim=True).expand(-1, 32)),
]  # fmt: skip


def test_exchange_between_lanes() -> None:
    a = numbers(I32, 0)
    for text, function in SHUFFLES:
        assert torch.equal(computed(text, torch.empty_like(a), a), function(a.view(-1, 32)).to(I32).flatten()), text


def test_atomics() -> None:
    total, olds = torch.tensor([5], dtype=I32), torch.empty(32, dtype=I32)
    adds = "atom.global.gpu.acq_rel.add.u32 %r2, [%rd1], 2"
    execute(f"{adds}; mad.wide.s32 %rd3, %r1, 4, %rd2; st.global.b32 [%rd3], %r2", total, olds)
    assert int(total) == 69 and olds.tolist() == list(range(5, 69, 2))
    execute("atom.global.relaxed.gpu.min.s32 %r2, [%rd1], %r1", total)
    assert int(total) == 0
