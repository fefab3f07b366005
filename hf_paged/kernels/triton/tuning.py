"""Tile shapes for every chip, dtype and head size: one table, no search at run time.

A change here is checked by compiling offline (no spills, shared memory within the chip) and measured on a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.kernels.triton.launch import Target


@dataclass(frozen=True, slots=True)
class Tile:
    """rows x keys of one step of the inner loop, and how it is compiled."""

    bm: int
    bn: int
    num_warps: int
    num_stages: int


def small_tile(target: Target, element_size: int, head_dim: int, rows: int) -> Tile:
    """For few rows (decode): as wide in keys as registers allow. head_dim: the larger one, padded to a power of two."""
    size = head_dim * element_size  # bytes of a key
    bm = 16 if rows <= 16 else 32 if rows <= 32 or size > 512 or element_size == 4 else 64
    if element_size == 4:
        bn = 64 if head_dim <= 64 else 16
    else:
        bn = 64 if size <= 256 else 32 if size <= 512 else 16
    if target.backend == "hip":
        return Tile(bm, bn, 4, 2 if size <= 256 else 1)
    # 64 rows: mma.sync keeps the queries in registers, wgmma reads them from shared memory.
    most = 128 if int(target.arch) < 90 else 256
    return Tile(bm, bn, 8 if bm == 64 and size > most else 4, 3)


def large_tile(target: Target, element_size: int, head_dim: int) -> Tile:
    """For many rows (prefill): 64 or 128 rows, two warp groups on sm90 so that its matrix units are fed."""
    size = head_dim * element_size
    if target.backend == "hip":
        return Tile(128, 64, 4, 1) if size <= 256 else Tile(64, 32, 4, 1) if size <= 512 else Tile(32, 16, 4, 1)
    if element_size == 4:  # fp32 runs on the ordinary cores; small tiles keep it in registers
        return Tile(32, 16, 8, 2) if head_dim <= 256 else Tile(16, 16, 8, 2)
    if not 90 <= int(target.arch) < 120:  # no wgmma or tcgen05; 100 KB of shared memory on some
        shapes = {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 32, 8, 2), 512: Tile(32, 16, 8, 2)}
    else:
        shapes = {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 2), 256: Tile(64, 64, 8, 2), 512: Tile(32, 32, 8, 2)}
    return shapes[max(64, head_dim)]
