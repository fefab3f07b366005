"""Weights in codes of 4 or 8 bits, in groups along the depth: weight = code * scale + least, with a scale and a least
value in fp16 for each group, or, in nested groups, for 256 elements, and factors of them in int8 for each group; or
weight = table[code] * scale, with a scale in fp32. Makes them from other weights, or takes such codes, and gives their
values back.

The memory layout is that of native/portable/groups.c, whose products read it as it is. Knows tensors, not modules.
"""

from __future__ import annotations

from enum import IntEnum
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from hf_paged.kernels import buffers

SIZES = (32, 64, 128)
"""Lengths of a group that weights can be rounded in."""
NESTED = 256
"""Elements of the depth whose groups are nested: 8 of 32, or 16 of 16."""
MIDDLE = 32
"""The code of zero in groups of 16, which have no least values."""
LARGEST = torch.finfo(torch.float16).max
"""No larger value can be rounded: the least value of its group is in fp16."""

# As native/portable/groups.c has them: columns of a panel, and bytes of their scales and least values in a group.
_COLUMNS, _HEAD = 16, 64
# Elements of the depth in the 32 bits of a column: where native/portable/groups.c reads code k of the line.
_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
TOGETHER = 2048
"""Columns that are computed together: those of a large vocabulary would take several times their memory."""
# Shares of a group's range that the codes may span: few elements beyond it cost less than a wider step for all.
_SHARES = (1.0, 0.9)


class Kind(IntEnum):
    """A group has beside its codes a scale and a least value, factors of those of nested groups, a scale and the code
    of zero, or a scale in fp32 of values in a table."""

    PLAIN = 0
    NESTED = 1
    ZEROS = 2
    TABLE = 3


class Form(NamedTuple):
    """The form of codes. bits: of a code. size: elements of a group. activations: bits that kernels round the rows to,
    8, or 16 (in fp32, to 15 and a sign), or 32: as exactly as rows in fp32 need it. table: the values in fp32 of 16
    codes, if they have one."""

    bits: int
    size: int
    kind: Kind = Kind.PLAIN
    activations: int = 32
    table: tuple[float, ...] = ()

    def num_bytes(self, columns: int, depth: int) -> int:
        """Return the bytes of the codes of a weight."""
        return prod(self.shape(columns, depth))

    def shape(self, columns: int, depth: int) -> tuple[int, int, int]:
        """Return the shape of its memory: [panels, groups or nested groups, bytes]."""
        together, head = (NESTED, _HEAD + NESTED) if self.kind is Kind.NESTED else (self.size, _HEAD)
        return -(-columns // _COLUMNS), -(-depth // together), head + _COLUMNS * together * self.bits // 8


class Heads(NamedTuple):
    """The scales and least values, or codes of zero, of some columns: fp16 [columns, groups or nested groups]. Beside a
    table, scales are in fp32, and nothing else. factors: int8 [columns, nested groups, 16], for each group of the
    scale, then of the least value if there is one."""

    scale: torch.Tensor
    least: torch.Tensor | None = None
    factors: torch.Tensor | None = None


class Codes(NamedTuple):
    """memory: uint8, contiguous, of the form's shape, of a weight [columns, depth]."""

    memory: torch.Tensor
    columns: int
    depth: int
    form: Form

    def values(self) -> torch.Tensor:
        """Return the weight: fp32 [columns, depth]."""
        out = buffers.empty((self.columns, self.depth), torch.float32)
        for first in range(0, self.columns, TOGETHER):
            out[first : first + TOGETHER] = self.values_from(first)
        return out

    def values_from(self, first: int) -> torch.Tensor:
        """Return `TOGETHER` columns of the weight, from this multiple of 16 on, or fewer at its end."""
        panels = self._at(slice(first // _COLUMNS, (first + TOGETHER) // _COLUMNS))
        return panels.flatten(0, 1)[: self.columns - first, : self.depth]

    def columns_at(self, index: torch.Tensor) -> torch.Tensor:
        """Return some columns of the weight: index int64 [...] -> fp32 [..., depth]. Raises IndexError for others."""
        flat = index.flatten()
        # The last panel is padded: it has columns that do not exist.
        if len(beyond := flat[(flat < 0) | (flat >= self.columns)].unique()):
            raise IndexError(
                f"ids {beyond[:8].tolist()} are not in a weight of {self.columns} rows; give ids from 0 to "
                f"{self.columns - 1}"
            )
        values = self._at((flat // _COLUMNS, flat % _COLUMNS))[:, : self.depth]
        return values.contiguous().view(*index.shape, self.depth)

    def _at(self, places: slice | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Some panels, fp32 [panels, 16 columns, groups * size], or columns of them, fp32 [columns, groups * size]."""
        bits, size, kind, _, table = self.form
        first = _HEAD + NESTED if kind is Kind.NESTED else _HEAD
        dtype = torch.float32 if table else torch.float16
        heads = self.memory[..., :_HEAD].view(dtype).unflatten(2, (-1, _COLUMNS)).permute(0, 3, 1, 2)
        codes = self.memory[..., first:].unflatten(2, (-1, _COLUMNS, 4)).permute(0, 3, 1, 2, 4)
        # Chosen before they are widened to several times their memory.
        scale, *others = heads[places].float().unsqueeze(-1).unbind(-2)
        codes = codes[places]
        if bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        order = torch.tensor(_ORDER[bits], dtype=torch.int64, device="cpu").argsort()
        codes = codes[..., order].flatten(-2).unflatten(-1, (-1, size))
        values: torch.Tensor
        if table:
            known = torch.tensor(table, dtype=torch.float32, device="cpu")
            values = known[codes.int()] * scale[..., None]
            return values.flatten(-3)
        (least,) = others
        if kind is Kind.ZEROS:
            least = -least * scale
        if kind is Kind.NESTED:
            inner = self.memory[..., _HEAD:first].view(torch.int8).unflatten(2, (NESTED // size, -1, _COLUMNS))
            factors = inner.permute(0, 4, 1, 2, 3)[places].float()
            scale, least = scale * factors[..., 0], least * factors[..., -1]
        if kind is Kind.NESTED and size == 16:
            # The product is exact. One with the code itself has a bit too many.
            values = (codes.float() - MIDDLE) * scale[..., None]
        else:
            values = codes * scale[..., None] + least[..., None]
        return values.flatten(-3)


def rounded(weight: torch.Tensor, form: Form, memory: torch.Tensor | None = None) -> Codes:
    """Round a weight [columns, depth] within `LARGEST` to codes, in this memory of `num_bytes`, or in memory of their
    own. Groups are not nested."""
    made = empty(weight.shape[0], weight.shape[1], form, memory)
    for first in range(0, made.columns, TOGETHER):
        own = weight[first : first + TOGETHER].detach().float()
        # Groups at the end repeat their last value, which widens no range.
        groups = nn.functional.pad(own[None], (0, -made.depth % form.size), mode="replicate")[0]
        groups = groups.unflatten(1, (-1, form.size))
        scale, least = _fitted(groups, form.bits)
        codes = _codes(groups, scale.float(), least.float(), form.bits).to(torch.uint8)
        store(made, first, codes.flatten(1), Heads(scale, least))
    return made


def empty(columns: int, depth: int, form: Form, memory: torch.Tensor | None = None) -> Codes:
    """Return codes that `store` has yet to write, in this memory, or in memory of their own."""
    shape = form.shape(columns, depth)
    # In large pages, because a step reads all weights once, and address translation would cost time.
    memory = buffers.in_large_pages(prod(shape)) if memory is None else memory
    return Codes(memory.view(shape), columns, depth, form)


def store(made: Codes, first: int, codes: torch.Tensor, heads: Heads) -> None:
    """Write the codes uint8 [columns, depth of whole groups] of some columns, from column `first` on, a multiple of 16.

    Columns that do not exist, which fill a panel, are zeros.
    """
    missing = -len(codes) % _COLUMNS
    codes, *own = (
        nn.functional.pad(each, (0, 0, 0, missing)).unflatten(0, (-1, _COLUMNS))
        for each in (codes, heads.scale, heads.least)
        if each is not None
    )
    panels = made.memory[first // _COLUMNS :][: len(codes)]
    both = torch.stack(own, 2).permute(0, 3, 2, 1)  # [panels, units, scales and the rest, columns]
    panels[..., :_HEAD] = both.flatten(2).contiguous().view(torch.uint8)
    lines_from = _HEAD
    if heads.factors is not None:
        factors = nn.functional.pad(heads.factors, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, _COLUMNS))
        lines_from += NESTED
        panels[..., _HEAD:lines_from] = factors.permute(0, 2, 3, 1).flatten(2).view(torch.uint8)
    # [panels, columns, units, lines] -> [panels, units, lines, columns]
    lines = _words(codes.contiguous(), made.form.bits).unflatten(2, (panels.shape[1], -1)).permute(0, 2, 3, 1)
    panels[..., lines_from:].view(torch.int32).unflatten(2, lines.shape[2:]).copy_(lines)


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The 32 bits of lines for codes uint8 [..., depth], in `_ORDER`."""
    words = codes.view(torch.int32)
    if bits == 8:
        return (words & -0xFFFF01) | (words >> 8 & 0xFF00) | (words << 8 & 0xFF0000)
    # Of four codes, the first and the third come into the low byte, the others into the next one.
    pairs = words | words >> 12
    first, second = pairs[..., ::2], pairs[..., 1::2]
    low, high = (first & 0xFF) | (second & 0xFF) << 8, (first & 0xFF00) | (second & 0xFF00) << 8
    return low | high << 8


def _fitted(groups: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and least value of each group [columns, groups, size], in fp16, with the least sum of squared errors of
    some choices."""
    low, high = groups.aminmax(dim=2)
    best = _in_fp16((high - low) / (2**bits - 1), low)
    error = _error(groups, *best, bits)
    choices = [_around_zero(low, high, bits)]
    # Eight bits are fine enough.
    choices += [_by_least_squares(groups, low, high, bits, share) for share in _SHARES if bits == 4]
    for choice in choices:
        found = _in_fp16(*choice)
        less = (now := _error(groups, *found, bits)) < error
        error = torch.where(less, now, error)
        best = torch.where(less, found[0], best[0]), torch.where(less, found[1], best[1])
    return best


def _around_zero(low: torch.Tensor, high: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of GGUF's Q4_0 and Q8_0, so that weights from such files keep their values."""
    middle = 2 ** (bits - 1)
    step = torch.maximum(-low, high) / (middle if bits == 4 else middle - 1)
    return step, -step * torch.where(-low >= high, middle, middle - 1)


def _by_least_squares(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The line of least squares through the values, over their codes in this share of the range."""
    last = 2**bits - 1
    step = (high - low) / last * share
    codes = _codes(groups, step, (high + low) / 2 - step * last / 2, bits)
    mean, center = codes.mean(2), groups.mean(2)
    apart = codes - mean[..., None]
    step = (apart * groups).sum(2) / (apart * apart).sum(2).clamp_min(1e-30)
    return step, center - step * mean


def _in_fp16(scale: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scale.half(), least.half()


def _codes(groups: torch.Tensor, scale: torch.Tensor, least: torch.Tensor, bits: int) -> torch.Tensor:
    # Groups of equal values have no step.
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((groups - least[..., None]) * inverse[..., None]).round_().clamp_(0, 2**bits - 1)


def _error(groups: torch.Tensor, scale: torch.Tensor, least: torch.Tensor, bits: int) -> torch.Tensor:
    scale, least = scale.float(), least.float()
    apart = _codes(groups, scale, least, bits).mul_(scale[..., None]).add_(least[..., None]).sub_(groups)
    return apart.square_().sum(2)
