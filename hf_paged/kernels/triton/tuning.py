"""Tile shapes by chip, dtype and head size: a fixed table, no search at run time.

Check a change here by compiling offline (no register spills, shared memory within the chip's limit), then measure it on
a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.kernels.triton.launch import Target


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows (bm) and keys (bn) that one iteration of the inner loop processes, and how the kernel is compiled."""

    bm: int
    bn: int
    num_warps: int
    num_stages: int


def small_tile(target: Target, element_size: int, head_dim: int, rows: int) -> Tile:
    """For few rows (decode): as many keys as registers allow. head_dim: the larger of K's and V's, a power of two."""
    size = head_dim * element_size  # bytes of a key
    bm = 16 if rows <= 16 else 32 if rows <= 32 or size > 512 or element_size == 4 else 64
    if element_size == 4:
        bn = 64 if head_dim <= 64 else 16
    else:
        bn = 64 if size <= 256 else 32 if size <= 512 else 16
    if target.backend == "hip":
        return Tile(bm, bn, 4, 2 if size <= 256 else 1)
    # With 64 rows, mma.sync (before sm90) keeps the queries in registers, while wgmma reads them from shared memory.
    max_size = 128 if int(target.arch) < 90 else 256
    return Tile(bm, bn, 8 if bm == 64 and size > max_size else 4, 3)


def large_tile(target: Target, element_size: int, head_dim: int) -> Tile:
    """For many rows (prefill): 64 or 128 rows, and on sm90 two warp groups to keep its matrix units busy."""
    size = head_dim * element_size
    if target.backend == "hip":
        return Tile(128, 64, 4, 1) if size <= 256 else Tile(64, 32, 4, 1) if size <= 512 else Tile(32, 16, 4, 1)
    if element_size == 4:  # fp32 does not use the matrix units; small tiles fit into registers
        return Tile(32, 16, 8, 2) if head_dim <= 256 else Tile(16, 16, 8, 2)
    if not 90 <= int(target.arch) < 120:  # neither wgmma nor tcgen05; some have only 100 KB of shared memory
        shapes = {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 2), 512: Tile(32, 16, 8, 2)}
    else:
        shapes = {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 2), 256: Tile(64, 64, 8, 2), 512: Tile(32, 32, 8, 2)}
    return shapes[max(64, head_dim)]
