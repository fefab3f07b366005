"""Weights in codes of 4 or 8 bits, in groups along the depth: weight = code * scale + least, with a scale and a least
value in fp16 for each group. Makes them from other weights, and gives their values back.

The memory layout is that of native/portable/groups.c, whose products read it as it is. Knows tensors, not modules.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import nn

from hf_paged.kernels import buffers

SIZES = (32, 64, 128)
"""Lengths of a group."""
LARGEST = torch.finfo(torch.float16).max
"""No larger value can be rounded: the least value of its group is in fp16."""

# As native/portable/groups.c has them: columns of a panel, and bytes of their scales and least values in a group.
_COLUMNS, _HEAD = 16, 64
# Elements of the depth in the 32 bits of a column: where native/portable/groups.c reads code k of the line.
_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
# Columns that are computed together: those of a large vocabulary would take several times their memory.
_TOGETHER = 2048
# Shares of a group's range that the codes may span: few elements beyond it cost less than a wider step for all.
_SHARES = (1.0, 0.9)


class Codes(NamedTuple):
    """memory: uint8 [panels, groups, bytes], contiguous, of a weight [columns, depth]. bits: of a code. size: elements
    of a group."""

    memory: torch.Tensor
    columns: int
    depth: int
    bits: int
    size: int

    def values(self) -> torch.Tensor:
        """Return the weight: fp32 [columns, depth]."""
        out = buffers.empty((self.columns, self.depth), torch.float32)
        for first in range(0, self.columns, _TOGETHER):
            panels = slice(first // _COLUMNS, (first + _TOGETHER) // _COLUMNS)
            own = out[first : first + _TOGETHER]
            own.copy_(self._at(panels).flatten(0, 1)[: len(own), : self.depth])
        return out

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
        heads = self.memory[..., :_HEAD].view(torch.float16).unflatten(2, (2, _COLUMNS)).permute(0, 3, 1, 2)
        codes = self.memory[..., _HEAD:].unflatten(2, (-1, _COLUMNS, 4)).permute(0, 3, 1, 2, 4)
        # Chosen before they are widened to several times their memory.
        scale, least = heads[places].float().unbind(-1)
        codes = codes[places]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        order = torch.tensor(_ORDER[self.bits], dtype=torch.int64, device="cpu").argsort()
        values: torch.Tensor = codes[..., order].flatten(-2) * scale[..., None] + least[..., None]
        return values.flatten(-2)


def rounded(weight: torch.Tensor, bits: int, size: int, memory: torch.Tensor | None = None) -> Codes:
    """Round a weight [columns, depth] within `LARGEST` to codes, in this memory of `num_bytes`, or in memory of their
    own."""
    columns, depth = weight.shape
    made = _empty(columns, depth, bits, size, memory)
    for first in range(0, columns, _TOGETHER):
        own = weight[first : first + _TOGETHER].detach().float()
        # Groups at the end repeat their last value, which widens no range.
        groups = nn.functional.pad(own[None], (0, -depth % size), mode="replicate")[0].unflatten(1, (-1, size))
        scale, least = _fitted(groups, bits)
        _store(made, first, _codes(groups, scale.float(), least.float(), bits).to(torch.uint8), scale, least)
    return made


def num_bytes(columns: int, depth: int, bits: int, size: int) -> int:
    """Return the bytes of the codes of a weight."""
    return prod(_shape(columns, depth, bits, size))


def _shape(columns: int, depth: int, bits: int, size: int) -> tuple[int, int, int]:
    return -(-columns // _COLUMNS), -(-depth // size), _HEAD + _COLUMNS * size * bits // 8


def _empty(columns: int, depth: int, bits: int, size: int, memory: torch.Tensor | None = None) -> Codes:
    shape = _shape(columns, depth, bits, size)
    # In large pages, because a step reads all weights once, and address translation would cost time.
    memory = buffers.in_large_pages(prod(shape)) if memory is None else memory
    return Codes(memory.view(shape), columns, depth, bits, size)


def _store(made: Codes, first: int, codes: torch.Tensor, scale: torch.Tensor, least: torch.Tensor) -> None:
    """Write whole panels, from column `first` on; columns that do not exist are zeros."""
    missing = -len(codes) % _COLUMNS
    codes, scale, least = (
        nn.functional.pad(each, (0, 0) * (each.ndim - 1) + (0, missing)).unflatten(0, (-1, _COLUMNS))
        for each in (codes, scale, least)
    )
    panels = made.memory[first // _COLUMNS :][: len(codes)]
    heads = torch.stack([scale, least], 2).permute(0, 3, 2, 1)  # [panels, groups, 2, columns]
    panels[..., :_HEAD] = heads.reshape(*heads.shape[:2], 32).view(torch.uint8)
    order = torch.tensor(_ORDER[made.bits], dtype=torch.int64, device="cpu")
    # [panels, columns, groups, lines, elements] -> [panels, groups, lines, columns, elements]
    lines = codes.unflatten(3, (-1, len(order)))[..., order].permute(0, 2, 3, 1, 4)
    if made.bits == 4:
        lines = lines[..., ::2] | lines[..., 1::2] << 4
    panels[..., _HEAD:] = lines.flatten(2)


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
