"""K/V in eight bits: how it is stored, and the conversions in torch that define what the write and read kernels do.

An element of eight bits is multiplied by a scale in fp32, of which each token and head has one: the largest magnitude
of the head becomes the largest number of the dtype. Knows tensors; never blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Names of `CacheConfig.key_dtype` and `value_dtype`."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# The size of fp32, the dtype of scales.
SCALE_BYTES = 4
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Storage:
    """Formats of the K and V of a pool. key, value: a dtype of eight bits, with a scale in fp32 for each token and
    head; None: the dtype that the model computes in, without scales."""

    key: torch.dtype | None = None
    value: torch.dtype | None = None

    @property
    def is_exact(self) -> bool:
        return self.key is None and self.value is None

    @property
    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        return self.key, self.value

    def bytes_per_token(self, num_heads: int, dims: tuple[int, int], itemsize: int) -> tuple[int, int]:
        """Bytes that a token's K and V take in one layer, scales included. itemsize: of the dtype that the model
        computes in. dims: sizes of a head."""
        sizes = [
            part_sizes(num_heads, dim, itemsize if dtype is None else dtype) for dim, dtype in zip(dims, self.dtypes)
        ]
        return sum(sizes[0]), sum(sizes[1])


EXACT = Storage()


def storage_of(key: str | None, value: str | None) -> Storage:
    """The storage of these names of dtypes."""
    return Storage(*(None if name is None else DTYPES[name] for name in (key, value)))


def part_sizes(num_heads: int, dim: int, kind: torch.dtype | int) -> tuple[int, int]:
    """Bytes of a token's elements in K or V, and of its scales. kind: a dtype of eight bits, or the size of an element
    that has no scale. Multiples of four, so that the scales that follow the elements of a block are aligned."""
    itemsize, scales = (kind, 0) if isinstance(kind, int) else (1, num_heads * SCALE_BYTES)
    return -(-num_heads * dim * itemsize // 4) * 4, scales


class Scales(NamedTuple):
    """The scales of a layer's K and V, fp32 [num_blocks, block_size, num_kv_heads]; None: its elements have none."""

    key: torch.Tensor | None = None
    value: torch.Tensor | None = None


NO_SCALES = Scales()


def quantised(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [..., dim] of a floating-point dtype -> the same in `dtype`, rounded to the nearest, and scales fp32 [...].

    A row with NaN or infinity has a scale that is not finite, and reads back as NaN.
    """
    rows = rows.to(torch.float32)
    largest = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(rows.shape[:-1])
    # With a scale of 0, a row of zeros would become 0 / 0.
    scales = (largest / LARGEST[dtype]).clamp(min=_TINY)
    parts = rows / scales.unsqueeze(-1)
    return (parts.round() if not dtype.is_floating_point else parts).to(dtype), scales


def read_back(key: torch.Tensor, value: torch.Tensor, storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
    """New K and V as attention reads them once they are written."""
    if storage.is_exact:
        return key, value
    return tuple(  # type: ignore[return-value]
        new if dtype is None else dequantised(*quantised(new, dtype), new.dtype)
        for new, dtype in zip((key, value), storage.dtypes)
    )


def dequantised(rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """rows [..., dim] with scales [...], or None -> their values in `dtype`."""
    if scales is None:
        return rows.to(dtype)
    # In fp32 at least, so that a product is rounded once; the reference asks for fp64.
    exact = torch.promote_types(dtype, torch.float32)
    return (rows.to(exact) * scales.unsqueeze(-1).to(exact)).to(dtype)
