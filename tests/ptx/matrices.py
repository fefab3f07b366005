"""Matrix instructions: fragments of warps in registers (`ldmatrix`, `stmatrix`, `mma`) and products of warp groups
whose operands lie in shared memory (`wgmma`). The layouts are those of NVIDIA's PTX ISA.

Sums are taken in numpy's order, in fp32.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptx.formats import HALVES, Array, widened
from tests.ptx.machine import Machine, instruction
from tests.ptx.memory import Fault
from tests.ptx.reader import Instruction

LANE = np.arange(32)
ROW, COLUMN = LANE // 4, 2 * (LANE % 4)
"""Where in a matrix of 8 x 8 the two elements of a lane's register are: at (ROW, COLUMN) and right of it."""


def _count_of(i: Instruction) -> int:
    return next(int(each[1:]) for each in i.modifiers if each in ("x1", "x2", "x4"))


def _pairs(values: Array) -> Array:
    """Registers [threads] -> the two halves of each, uint16 [warps, 32, 2]."""
    return np.ascontiguousarray(values).view(np.uint16).reshape(-1, 32, 2)


@instruction("ldmatrix")
def _load_matrix(m: Machine, i: Instruction, on: Array | None) -> None:
    """Lanes 8k to 8k + 7 give the addresses of the rows of matrix k."""
    _all_of(m, i, on)
    who = np.flatnonzero(np.arange(m.threads) % 32 < 8 * _count_of(i))
    rows = np.zeros((m.threads, 16), np.uint8)
    rows[who] = m.shared.load(m.shared_address(i.operands[1], who), 16, m.warp_of[who])
    matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)  # warp, matrix, row, column
    if "trans" in i.modifiers:
        matrices = matrices.transpose(0, 1, 3, 2)
    assert isinstance(i.operands[0], tuple)
    for k, register in enumerate(i.operands[0]):
        pair = np.stack([matrices[:, k, ROW, COLUMN], matrices[:, k, ROW, COLUMN + 1]], -1)
        m.put(register, np.ascontiguousarray(pair).view(np.uint32).ravel(), None)


@instruction("stmatrix")
def _store_matrix(m: Machine, i: Instruction, on: Array | None) -> None:
    _all_of(m, i, on)
    matrices = np.zeros((m.threads // 32, 4, 8, 8), np.uint16)
    assert isinstance(i.operands[1], tuple)
    for k, register in enumerate(i.operands[1]):
        pair = _pairs(m.get(register, "u32"))
        matrices[:, k, ROW, COLUMN], matrices[:, k, ROW, COLUMN + 1] = pair[..., 0], pair[..., 1]
    if "trans" in i.modifiers:
        matrices = matrices.transpose(0, 1, 3, 2)
    rows = np.ascontiguousarray(matrices).view(np.uint8).reshape(m.threads, 16)
    who = np.flatnonzero(np.arange(m.threads) % 32 < 8 * _count_of(i))
    m.shared.store(m.shared_address(i.operands[0], who), rows[who], m.warp_of[who])


def _all_of(m: Machine, i: Instruction, on: Array | None) -> None:
    if on is not None:
        raise Fault(f"a matrix instruction that not all threads execute: {i.text}")


@instruction("mma")
def _mma(m: Machine, i: Instruction, on: Array | None) -> None:
    """m16n8k16 and m16n8k8 of half precision, summed in fp32."""
    _all_of(m, i, on)
    shape, kind = next(each for each in i.modifiers if re.fullmatch(r"m\d+n\d+k\d+", each)), i.modifiers[-3]
    if shape not in ("m16n8k16", "m16n8k8") or kind not in HALVES or i.kind != "f32":
        raise Fault(f"a product that the machine does not know: {i.text}")
    depth, warps = int(shape.rpartition("k")[2]), m.threads // 32
    to, left, right, added = i.operands
    assert isinstance(to, tuple) and isinstance(left, tuple) and isinstance(right, tuple) and isinstance(added, tuple)
    a, b = np.zeros((warps, 16, depth), np.float32), np.zeros((warps, depth, 8), np.float32)
    for k, register in enumerate(left):
        pair = widened(_pairs(m.get(register, "u32")), kind)
        for element in range(2):
            a[:, ROW + 8 * (k % 2), COLUMN + element + 8 * (k // 2)] = pair[..., element]
    for k, register in enumerate(right):
        pair = widened(_pairs(m.get(register, "u32")), kind)
        for element in range(2):
            b[:, COLUMN + element + 8 * k, ROW] = pair[..., element]
    c = np.zeros((warps, 16, 8), np.float32)
    for k, register in enumerate(added):
        c[:, ROW + 8 * (k // 2), COLUMN + k % 2] = m.get(register, "f32").reshape(warps, 32)
    d = c + a @ b
    for k, register in enumerate(to):
        m.put(register, np.ascontiguousarray(d[:, ROW + 8 * (k // 2), COLUMN + k % 2]).ravel(), None)


@dataclass(frozen=True)
class Tile:
    """A matrix of half precision in shared memory, as its descriptor says. Byte offsets.

    swizzle: 0, or the bytes of a row of the pattern in which units of 16 bytes change places, 32, 64 or 128.
    """

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def of(cls, descriptor: int, text: str) -> Tile:
        start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
        if descriptor >> 49 & 7:
            raise Fault(f"a descriptor with a base offset, which the machine does not know: {text}")
        return cls(start, leading, stride, (0, 128, 64, 32)[descriptor >> 62])

    def addresses(self, rows: int, depth: int, *, transposed: bool) -> Array:
        """Byte addresses [rows, depth] of the elements of a matrix whose products are summed along `depth`. transposed:
        elements of equal depth lie side by side, else those of a row."""
        row, k = np.arange(rows)[:, None], np.arange(depth)[None]
        width = self.swizzle // 2  # elements of a row of the pattern
        if transposed:
            if not width:
                place = self.start + row % 8 * 2 + k % 8 * 16 + row // 8 * self.stride + k // 8 * self.leading
            else:
                place = self.start + row % width * 2 + k % 8 * 2 * width
                place = place + row // width * self.leading + k // 8 * self.stride
        elif not width:
            place = self.start + row % 8 * 16 + k % 8 * 2 + row // 8 * self.stride + k // 8 * self.leading
        else:
            place = self.start + row % 8 * 2 * width + k * 2 + row // 8 * self.stride
        if not width:
            return place
        # In the pattern, which begins at multiples of its size, the unit's number is changed by that of its row.
        return place ^ ((place >> 7) & (self.swizzle // 16 - 1)) << 4


@dataclass
class Product:
    """A product that has not been waited for: the registers that it writes and reads, and words of shared memory that
    it reads, by warp."""

    written: tuple[Any, ...]
    read: tuple[Any, ...]
    words: list[tuple[Array, int]]


@instruction("wgmma")
def _wgmma(m: Machine, i: Instruction, on: Array | None) -> None:
    _all_of(m, i, on)
    if "fence" in i.modifiers:
        return
    if "commit_group" in i.modifiers:
        m.products.append(m.open_products)
        m.open_products = []
        return
    if "wait_group" in i.modifiers:
        left = m.uniform(i.operands[0], "u32")
        while len(m.products) > left:
            for product in m.products.pop(0):
                m.in_flight -= Counter(product.written)
                m.held -= Counter(product.read)
                for words, warp in product.words:
                    m.shared.release(words, warp)
        return
    _multiply(m, i)


def _multiply(m: Machine, i: Instruction) -> None:
    shape, kind = next(each for each in i.modifiers if re.fullmatch(r"m64n\d+k16", each)), i.kind
    if kind not in HALVES or "f32" not in i.modifiers:
        raise Fault(f"a product that the machine does not know: {i.text}")
    columns = int(shape[4:-3])
    to, left, right, scale, sign_a, sign_b, *transposed = i.operands
    assert isinstance(to, tuple)
    flags = [m.uniform(each, "u32") for each in transposed]
    if m.uniform(sign_a, "u32") != 1 or m.uniform(sign_b, "u32") != 1:
        raise Fault(f"a product with negative operands, which the machine does not know: {i.text}")
    words: list[tuple[Array, int]] = []

    def matrix(operand: Any, group: int, rows: int, *, is_transposed: bool) -> Array:
        descriptors = m.get(operand, "u64")[128 * group : 128 * group + 128]
        if (descriptors != descriptors[0]).any():
            raise Fault(f"the descriptor differs between the threads of a warp group: {i.text}")
        tile = Tile.of(int(descriptors[0]), i.text)
        warp = int(m.warp_of[128 * group])
        places = tile.addresses(rows, 16, transposed=is_transposed)
        found, used = m.shared.matrix(m.in_shared(places, m.number[128 * group]), warp)
        words.append((used, warp))
        return widened(found, kind)

    # Row of a thread's elements 0, 1 (and 2, 3, which are 8 rows below), and their column.
    thread = np.arange(128)
    row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
    adds = m.get(scale, "pred")
    results = [np.zeros(m.threads, np.float32) for _ in to]
    for group in range(m.threads // 128):
        mine = slice(128 * group, 128 * group + 128)
        if isinstance(left, tuple):
            a = np.zeros((64, 16), np.float32)
            for k, register in enumerate(left):
                pair = widened(m.get(register, "u32")[mine].copy().view(np.uint16), kind).reshape(128, 2)
                for element in range(2):
                    a[row + 8 * (k % 2), column + element + 8 * (k // 2)] = pair[:, element]
            b = matrix(right, group, columns, is_transposed=bool(flags[-1]) if flags else False)
        else:
            a = matrix(left, group, 64, is_transposed=bool(flags[0]) if flags else False)
            b = matrix(right, group, columns, is_transposed=bool(flags[1]) if flags else False)
        result = a @ b.T
        for k in range(len(to)):
            results[k][mine] = result[row + 8 * (k // 2 % 2), column + k % 2 + 8 * (k // 4)]
    for register, result in zip(to, results):
        if adds.any():
            result = result + np.where(adds, m.registers[register].view(np.float32), np.float32(0))
        m.registers[register] = result.view(np.uint32)
    product = Product(to, left if isinstance(left, tuple) else (), words)
    m.in_flight.update(product.written)
    m.held.update(product.read)
    m.open_products.append(product)
