"""Blocks of GGUF files as codes in groups, with the values that the package gguf gives them, to the last bit.

Codes of 5 and 6 bits become codes of 8 bits. A nested block keeps its own factors, so that nothing is rounded. Knows
bytes and tensors, no files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_paged.fused.cpu.groups import Form, Heads, Kind

_Codes = tuple[torch.Tensor, Heads]


class Block(NamedTuple):
    """A type of blocks. elements, num_bytes: of a block. read: uint8 [columns, blocks, num_bytes] -> codes uint8
    [columns, depth], and heads."""

    elements: int
    num_bytes: int
    form: Form
    read: Callable[[torch.Tensor], _Codes]


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    return _copy(blocks[..., first : first + 2]).view(torch.float16)[..., 0]


def _copy(part: torch.Tensor) -> torch.Tensor:
    # `contiguous` leaves the strides of a single block, which need not be multiples of another dtype's size.
    return part.clone(memory_format=torch.contiguous_format)


def _fields(part: torch.Tensor, shifts: tuple[int, ...], bits: int, width: int) -> torch.Tensor:
    """Fields of bytes [..., n * width], first those of `width` bytes at the first shift: [..., elements]."""
    # Four bytes at once: no field lies in two of them.
    words = _copy(part).view(torch.int32).unflatten(-1, (-1, 1, width // 4))
    by = torch.tensor(shifts, dtype=torch.int32, device="cpu")[:, None]
    fields: torch.Tensor = (words >> by) & (2**bits - 1) * 0x01010101
    return fields.flatten(-3).view(torch.uint8)


def _nibbles(blocks: torch.Tensor, first: int) -> torch.Tensor:
    return _fields(blocks[..., first : first + 16], (0, 4), 4, 16)


def _fifth_bits(blocks: torch.Tensor, first: int) -> torch.Tensor:
    by = torch.arange(8, dtype=torch.uint8, device="cpu")
    return ((blocks[..., first : first + 4, None] >> by & 1) << 4).flatten(-2)


def _around(codes: torch.Tensor, scale: torch.Tensor, zero: int) -> _Codes:
    """Codes of which one is zero: the product is exact, because a power of two multiplies the scale."""
    return codes.flatten(1), Heads(scale, scale * -zero)


def _q4_0(blocks: torch.Tensor) -> _Codes:
    return _around(_nibbles(blocks, 2), _halves(blocks, 0), 8)


def _q4_1(blocks: torch.Tensor) -> _Codes:
    return _nibbles(blocks, 4).flatten(1), Heads(_halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> _Codes:
    return _around(_nibbles(blocks, 6) | _fifth_bits(blocks, 2), _halves(blocks, 0), 16)


def _q5_1(blocks: torch.Tensor) -> _Codes:
    codes = _nibbles(blocks, 8) | _fifth_bits(blocks, 4)
    return codes.flatten(1), Heads(_halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> _Codes:
    return _around(blocks[..., 2:] ^ 128, _halves(blocks, 0), 128)


def _nested_heads(blocks: torch.Tensor) -> Heads:
    """The factors have six bits: two of those of the last four groups lie above those of the first four."""
    first, second, low = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (low & 15) | (first >> 6 << 4)], -1)
    least = torch.cat([second & 63, (low >> 4) | (second >> 6 << 4)], -1)
    factors = torch.stack([scales, least], -1).flatten(-2).view(torch.int8)
    return Heads(_halves(blocks, 0), -_halves(blocks, 2), factors)


def _q4_k(blocks: torch.Tensor) -> _Codes:
    return _fields(blocks[..., 16:], (0, 4), 4, 32).flatten(1), _nested_heads(blocks)


def _q5_k(blocks: torch.Tensor) -> _Codes:
    high = _fields(blocks[..., 16:48], tuple(range(8)), 1, 32) << 4
    return (_fields(blocks[..., 48:], (0, 4), 4, 32) | high).flatten(1), _nested_heads(blocks)


def _q6_k(blocks: torch.Tensor) -> _Codes:
    codes = _fields(blocks[..., :128], (0, 4), 4, 64) | _fields(blocks[..., 128:192], (0, 2, 4, 6), 2, 32) << 4
    scale = _halves(blocks, 208)
    # Readers compute with the middle themselves: a product with it would not fit into fp16.
    return codes.flatten(1), Heads(scale, scale, _copy(blocks[..., 192:208]).view(torch.int8))


_NESTED4, _NESTED8 = Form(4, 32, Kind.NESTED), Form(8, 32, Kind.NESTED)
BLOCKS: dict[str, Block] = {
    "Q4_0": Block(32, 18, Form(4, 32), _q4_0),
    "Q4_1": Block(32, 20, Form(4, 32), _q4_1),
    "Q5_0": Block(32, 22, Form(8, 32), _q5_0),
    "Q5_1": Block(32, 24, Form(8, 32), _q5_1),
    "Q8_0": Block(32, 34, Form(8, 32), _q8_0),
    "Q4_K": Block(256, 144, _NESTED4, _q4_k),
    "Q5_K": Block(256, 176, _NESTED8, _q5_k),
    "Q6_K": Block(256, 210, Form(8, 16, Kind.NESTED), _q6_k),
}
"""The types by gguf's names."""


def read(rows: torch.Tensor, kind: str) -> _Codes:
    """Codes and heads of some rows of a weight: uint8 [rows, bytes]. Raises ValueError for values beyond fp16."""
    block = BLOCKS[kind]
    codes, heads = block.read(rows.unflatten(1, (-1, block.num_bytes)))
    if heads.least is not None and not heads.least.isfinite().all():
        raise ValueError("least values of groups are beyond fp16")
    return codes, heads
