"""What instructions on registers and memory do: arithmetic, conversions, exchange between lanes, loads and stores.

The semantics are those of NVIDIA's PTX ISA. Approximations (`ex2.approx`, `rsqrt.approx`, `div.full`) are numpy's,
which are closer than the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.formats import DTYPES, HALVES, Array, from_e4m3, fused, narrowed, to_e4m3, widened
from tests.ptx.machine import Machine, instruction
from tests.ptx.memory import Fault
from tests.ptx.reader import Address, Instruction

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax, "div": np.divide,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
UNARY: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2, "lg2": np.log2, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "rcp": lambda x: 1 / x,
    "neg": np.negative, "abs": np.abs, "not": np.invert, "tanh": np.tanh,
}  # fmt: skip


def _number(m: Machine, operand: Any, kind: str) -> Array:
    """Half precision in fp32; two of them as [threads, 2]."""
    if kind in HALVES:
        return widened(m.get(operand, kind), kind)
    if kind in ("bf16x2", "f16x2"):
        return widened(m.get(operand, "u32").view(np.uint16), kind[:-2]).reshape(-1, 2)
    return m.get(operand, kind)


def _put(m: Machine, operand: Any, value: Array, kind: str, on: Array | None) -> None:
    if kind in HALVES:
        value = narrowed(value, kind)
    elif kind in ("bf16x2", "f16x2"):
        value = narrowed(value, kind[:-2]).reshape(-1, 2).view(np.uint32)[:, 0]
    elif kind in ("f32", "f64"):
        value = value.astype(DTYPES[kind])
    m.put(operand, value, on)


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


@instruction("add", "sub", "mul", "min", "max", "div", "and", "or", "xor")
def _binary(m: Machine, i: Instruction, on: Array | None) -> None:
    kind, function = i.kind, BINARY[i.name]
    a, b = (_number(m, operand, kind) for operand in i.operands[1:])
    if kind[0] in "su" and kind != "f32":
        if "wide" in i.modifiers or "hi" in i.modifiers:
            product = a.astype(DTYPES[_wide(kind)]) * b.astype(DTYPES[_wide(kind)])
            value = product if "wide" in i.modifiers else (product >> 8 * a.dtype.itemsize).astype(a.dtype)
        elif i.name == "div":
            value = _quotient(a, b)
        else:
            value = {"min": np.minimum, "max": np.maximum}.get(i.name, function)(a, b)
    else:
        if "NaN" in i.modifiers:
            function = {"min": np.minimum, "max": np.maximum}[i.name]
        value = function(a, b)
    _put(m, i.operands[0], value, kind, on)


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards zero; of a division by zero undefined, and here 0."""
    safe = np.where(b == 0, 1, b)
    return np.where(b == 0, 0, np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))).astype(a.dtype)


@instruction("fma", "mad")
def _fma(m: Machine, i: Instruction, on: Array | None) -> None:
    kind = i.kind
    if kind in ("f32", "f64", *HALVES, "bf16x2", "f16x2"):
        a, b, c = (_number(m, operand, kind) for operand in i.operands[1:])
        _put(m, i.operands[0], fused(a, b, c), kind, on)
        return
    to = _wide(kind) if "wide" in i.modifiers else kind
    a, b = (m.get(operand, kind).astype(DTYPES[to]) for operand in i.operands[1:3])
    if "hi" in i.modifiers:
        raise Fault(f"unknown: {i.text}")
    m.put(i.operands[0], a * b + m.get(i.operands[3], to), on)


@instruction("ex2", "lg2", "rsqrt", "sqrt", "rcp", "neg", "abs", "not", "tanh")
def _unary(m: Machine, i: Instruction, on: Array | None) -> None:
    _put(m, i.operands[0], UNARY[i.name](_number(m, i.operands[1], i.kind)), i.kind, on)


@instruction("shl", "shr")
def _shift(m: Machine, i: Instruction, on: Array | None) -> None:
    a, count = m.get(i.operands[1], i.kind), m.get(i.operands[2], "u32")
    bits = 8 * a.dtype.itemsize
    by = np.minimum(count, bits - 1).astype(a.dtype)
    value = a << by if i.name == "shl" else a >> by
    if i.name == "shl" or a.dtype.kind == "u":
        value = np.where(count >= bits, np.zeros_like(value), value)
    m.put(i.operands[0], value, on)


@instruction("bfe")
def _extract(m: Machine, i: Instruction, on: Array | None) -> None:
    a, bits = m.get(i.operands[1], i.kind), 8 * DTYPES[i.kind].itemsize
    start, length = m.uniform(i.operands[2], "u32"), m.uniform(i.operands[3], "u32")
    m.put(i.operands[0], (a << a.dtype.type(bits - start - length)) >> a.dtype.type(bits - length), on)


@instruction("prmt")
def _permute(m: Machine, i: Instruction, on: Array | None) -> None:
    a, b, selector = (m.get(operand, "u32").astype(np.uint64) for operand in i.operands[1:4])
    both, value = a | (b << np.uint64(32)), np.zeros(m.threads, np.uint64)
    for place in range(4):
        chosen = (selector >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (chosen & np.uint64(7)))) & np.uint64(255)
        signs = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        value |= np.where(chosen >= 8, signs, byte) << np.uint64(8 * place)
    m.put(i.operands[0], value.astype(np.uint32), on)


@instruction("popc")
def _count(m: Machine, i: Instruction, on: Array | None) -> None:
    bits = np.unpackbits(m.get(i.operands[1], i.kind).view(np.uint8).reshape(m.threads, -1), axis=1)
    m.put(i.operands[0], bits.sum(1).astype(np.uint32), on)


# -- moves, conversions, comparisons ---------------------------------------------------------------------------------


@instruction("mov")
def _move(m: Machine, i: Instruction, on: Array | None) -> None:
    to, source = i.operands
    if isinstance(source, tuple):
        dtype = np.dtype(f"u{DTYPES[i.kind].itemsize // len(source)}")
        parts = np.stack([m.get(part, f"u{8 * dtype.itemsize}") for part in source], 1)
        m.put(to, np.ascontiguousarray(parts).view(f"u{DTYPES[i.kind].itemsize}")[:, 0], on)
    elif isinstance(to, tuple):
        whole = m.get(source, i.kind)
        parts = whole.view(f"u{whole.dtype.itemsize // len(to)}").reshape(m.threads, len(to))
        for part, column in zip(to, parts.T):
            m.put(part, column.copy(), on)
    else:
        m.put(to, m.get(source, i.kind), on)


ROUNDINGS: dict[str, Callable[[Any], Any]] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
PAIRS = {"bf16x2": "bf16", "f16x2": "f16"}


@instruction("cvt")
def _convert(m: Machine, i: Instruction, on: Array | None) -> None:
    to, source = i.modifiers[-2:]
    if source == "e4m3x2":
        codes = m.get(i.operands[1], "u16").view(np.uint8).reshape(-1, 2)
        _put(m, i.operands[0], from_e4m3(codes), to, on)
    elif to == "e4m3x2":
        high, low = (m.get(operand, "f32") for operand in i.operands[1:])
        m.put(i.operands[0], np.stack([to_e4m3(low), to_e4m3(high)], 1).view(np.uint16)[:, 0], on)
    elif to in PAIRS:
        high, low = (m.get(operand, "f32") for operand in i.operands[1:])
        _put(m, i.operands[0], np.stack([low, high], 1), to, on)
    else:
        value = _number(m, i.operands[1], source)
        if to in HALVES:
            _put(m, i.operands[0], value.astype(np.float32) if value.dtype.kind != "f" else value, to, on)
            return
        rounding = next((ROUNDINGS[each] for each in i.modifiers if each in ROUNDINGS), None)
        if rounding is not None:
            value = rounding(value)
        if value.dtype.kind == "f" and to[0] in "su":
            value = _integer(value, DTYPES[to])
        m.put(i.operands[0], value.astype(DTYPES[to]), on)


def _integer(values: Array, dtype: Any) -> Array:
    """What does not fit becomes the nearest number that does; NaN becomes 0."""
    limits = np.iinfo(dtype)
    return np.clip(np.nan_to_num(values.astype(np.float64)), limits.min, limits.max)


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@instruction("setp")
def _compare(m: Machine, i: Instruction, on: Array | None) -> None:
    a, b = (_number(m, operand, i.kind) for operand in i.operands[1:3])
    comparison = i.modifiers[0]
    nan = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(a.shape, np.bool_)
    if comparison in ("num", "nan"):
        value = nan if comparison == "nan" else ~nan
    elif comparison in COMPARISONS:
        value = COMPARISONS[comparison](a, b) & ~nan
    else:
        value = COMPARISONS[comparison.removesuffix("u")](a, b) | nan
    if len(i.operands) > 3:
        other = m.get(i.operands[3], "pred")
        value = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[i.modifiers[1]](value, other)
    assert isinstance(i.operands[0], str)
    first, _, second = i.operands[0].partition("|")
    pair = value.T if value.ndim == 2 else (value, ~value)  # of two halves, or the result and its opposite
    m.put(first, pair[0], on)
    if second:
        m.put(second, pair[1], on)


@instruction("selp")
def _select(m: Machine, i: Instruction, on: Array | None) -> None:
    a, b = (m.get(operand, i.kind) for operand in i.operands[1:3])
    m.put(i.operands[0], np.where(m.get(i.operands[3], "pred"), a, b), on)


# -- between the lanes of a warp -------------------------------------------------------------------------------------


def _warps(m: Machine, values: Array, on: Array | None, text: str) -> Array:
    """values as [warps, 32]. All lanes of a warp must take part, or none."""
    if on is not None and (on.reshape(-1, 32).any(1) != on.reshape(-1, 32).all(1)).any():
        raise Fault(f"not all lanes of a warp take part: {text}")
    return values.reshape(-1, 32)


@instruction("shfl")
def _shuffle(m: Machine, i: Instruction, on: Array | None) -> None:
    to, source, count, clamp = i.operands[:4]
    values = _warps(m, m.get(source, "u32"), on, i.text)
    by = m.get(count, "u32").astype(np.int64).reshape(-1, 32)
    bounds = m.get(clamp, "u32").astype(np.int64).reshape(-1, 32)
    lane, segment = np.arange(32)[None], bounds >> 8 & 31
    last = (lane & segment) | (bounds & 31 & ~segment)
    first = lane & segment
    if "up" in i.modifiers:
        chosen = lane - by
        valid = chosen >= last
    elif "down" in i.modifiers:
        chosen = lane + by
        valid = chosen <= last
    else:
        chosen = lane ^ by if "bfly" in i.modifiers else first | (by & 31 & ~segment)
        valid = chosen <= last
    chosen = np.where(valid, chosen, lane)
    assert isinstance(to, str)
    target, _, flag = to.partition("|")
    m.put(target, np.take_along_axis(values, chosen, 1).ravel(), on)
    if flag:
        m.put(flag, valid.ravel(), on)


@instruction("redux")
def _reduce(m: Machine, i: Instruction, on: Array | None) -> None:
    values = _warps(m, m.get(i.operands[1], i.kind), on, i.text)
    functions: dict[str, Any] = {
        "add": np.sum, "min": np.min, "max": np.max, "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce,
    }  # fmt: skip
    function = next(functions[each] for each in i.modifiers if each in functions)
    m.put(i.operands[0], np.repeat(function(values, axis=1).astype(values.dtype), 32), on)


@instruction("bar")
def _barrier(m: Machine, i: Instruction, on: Array | None) -> None:
    if "warp" in i.modifiers:
        return
    if on is not None:
        raise Fault(f"a barrier that not all threads reach: {i.text}")
    if len(i.operands) > 1 and m.uniform(i.operands[1], "u32") != m.kernel.threads:
        raise Fault(f"a barrier of a part of the threads, which the machine does not know: {i.text}")
    m.shared.barrier()
    m.memory.epoch += 1


@instruction("fence")
def _fence(m: Machine, i: Instruction, on: Array | None) -> None:
    if "proxy" in i.modifiers:
        m.shared.fence()


def _count_of(i: Instruction) -> int:
    return next((int(each[1:]) for each in i.modifiers if each in ("v2", "v4", "v8")), 1)


def _registers(operand: Any) -> tuple[Any, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


@instruction("ld")
def _load(m: Machine, i: Instruction, on: Array | None) -> None:
    to, source = i.operands[:2]
    assert isinstance(source, Address)
    if "param" in i.modifiers:
        m.put(to, np.full(m.threads, m.parameters[source.base]), on)
        return
    size = DTYPES[i.kind].itemsize
    who = m.who(on)
    if "global" in i.modifiers:
        raw = m.memory.load(m.address(source), size * _count_of(i), who, i.text)
    else:
        raw = np.zeros((m.threads, size * _count_of(i)), np.uint8)
        raw[who] = m.shared.load(m.shared_address(source, who), raw.shape[1], m.warp_of[who])
    for register, column in zip(_registers(to), raw.view(DTYPES[i.kind]).T):
        m.put(register, column.copy(), on)


@instruction("st")
def _store(m: Machine, i: Instruction, on: Array | None) -> None:
    to, source = i.operands[:2]
    parts = [m.get(register, i.kind) for register in _registers(source)]
    raw = np.ascontiguousarray(np.stack(parts, 1)).view(np.uint8).reshape(m.threads, -1)
    who = m.who(on)
    if "global" in i.modifiers:
        m.memory.store(m.address(to), raw, who, i.text)
    else:
        m.shared.store(m.shared_address(to, who), raw[who], m.warp_of[who])


@instruction("atom")
def _atomic(m: Machine, i: Instruction, on: Array | None) -> None:
    """Thread after thread. Only of global memory."""
    to, target, source = i.operands
    addresses, values = m.address(target), m.get(source, i.kind)
    if "global" not in i.modifiers:
        raise Fault(f"an atomic operation that the machine does not know: {i.text}")
    functions: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum, "exch": lambda old, new: new}
    function = next(functions[each] for each in i.modifiers if each in functions)
    olds = np.zeros_like(values)
    for thread in m.who(on):
        one = np.array([thread])
        old = m.memory.load(addresses, values.dtype.itemsize, one, i.text, is_atomic=True).view(values.dtype)[:, 0]
        olds[thread] = old[thread]
        new = function(old, values).astype(values.dtype)
        m.memory.store(addresses, new.view(np.uint8).reshape(m.threads, -1), one, i.text)
    m.put(to, olds, on)


@instruction("cp")
def _copy(m: Machine, i: Instruction, on: Array | None) -> None:
    """cp.async: of `size` bytes, those beyond the source's size are 0."""
    if "commit_group" in i.modifiers:
        m.shared.commit()
        return
    if "wait_group" in i.modifiers:
        m.shared.wait(m.uniform(i.operands[0], "u32"))
        return
    if "async" not in i.modifiers or "bulk" in i.modifiers:
        raise Fault(f"a copy that the machine does not know: {i.text}")
    size = m.uniform(i.operands[2], "u32")
    given = m.get(i.operands[3], "u32") if len(i.operands) > 3 else np.full(m.threads, size)
    if ((given != 0) & (given != size)).any():
        raise Fault(f"a copy of a part, which the machine does not know: {i.text}")
    who = m.who(on)
    reads = who[given[who] == size]
    values = m.memory.load(m.address(i.operands[1]), size, reads, i.text)
    m.shared.copy(m.shared_address(i.operands[0], who), values[who], m.warp_of[who])
