"""Tile shapes by chip, dtype and head size: a fixed table, no search at run time.

Check a change here by compiling offline (no register spills, shared memory within the chip's limit), then measure it on
a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.kernels.triton.launch import Target


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows (bm) and keys (bn) that one iteration of the inner loop processes, and how the kernel is compiled.

    many: the split kernel's rows for units with more rows than bm (see `tile.tile_rows`).
    """

    bm: int
    bn: int
    num_warps: int
    num_stages: int
    many: int = 0


def small_tile(target: Target, element_size: int, head_dim: int, rows: int) -> Tile:
    """For few rows (decode): as many keys as registers allow. head_dim: the larger of K's and V's, a power of two."""
    size = head_dim * element_size  # bytes of a key
    is_wide = size > 512 or element_size == 4
    bm = 16 if rows <= 16 else 32 if rows <= 32 or is_wide else 64
    if element_size == 4:
        bn = 64 if head_dim <= 64 else 16
    else:
        bn = 64 if size <= 256 else 32 if size <= 512 else 16
    if target.backend == "hip":
        if not is_cdna(target):  # RDNA has half of CDNA's registers: keys of more than 256 bytes spill
            return Tile(bm, 16, 4 if bm == 16 else 8, 1, many=bm)
        return Tile(bm, bn, 4, 2 if size <= 256 else 1, many=bm if is_wide or bm == 64 else 32)
    if has_little_memory(target) and element_size == 2 and 128 < size <= 512:
        bn //= 2  # so that two programs fit a core
    # With 64 rows, mma.sync keeps the queries in registers, while wgmma and tcgen05 read them from shared memory.
    fits = size <= (256 if has_wide_products(target) else 128)
    return Tile(bm, bn, 4 if bm < 64 or fits else 8, 3, many=bm if is_wide else 64 if fits or bm == 64 else 32)


def has_wide_products(target: Target) -> bool:
    """Return True if a CUDA chip multiplies tiles of shared memory, by wgmma or tcgen05."""
    return 90 <= int(target.arch) < 120


def has_little_memory(target: Target) -> bool:
    """Return True if a core of a CUDA chip has 100 KB of shared memory; others have 164 or 228."""
    return int(target.arch) in (86, 89) or int(target.arch) >= 120


def is_cdna(target: Target) -> bool:
    return str(target.arch).startswith("gfx9")


def large_tile(target: Target, element_size: int, head_dim: int) -> Tile:
    """For many rows (prefill): 64 or 128 rows, and on sm90 two warp groups to keep its matrix units busy."""
    size = head_dim * element_size
    if target.backend == "hip":
        if not is_cdna(target):
            return Tile(64, 16, 8, 1) if size <= 256 else Tile(16, 16, 8, 1)
        return Tile(128, 64, 4, 1) if size <= 256 else Tile(64, 32, 4, 1) if size <= 512 else Tile(32, 16, 4, 1)
    if element_size == 4:  # fp32 does not use the matrix units; small tiles fit into registers
        return Tile(32, 16, 8, 2) if head_dim <= 256 else Tile(16, 16, 8, 2)
    # Three stages: K and V of the next tile are loaded while this one is multiplied.
    if not has_wide_products(target):  # some have only 100 KB of shared memory
        shapes = {64: Tile(128, 64, 8, 3), 128: Tile(128, 32, 8, 3), 256: Tile(64, 16, 8, 3), 512: Tile(32, 16, 8, 3)}
    else:
        shapes = {64: Tile(128, 128, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 32, 8, 3), 512: Tile(32, 32, 8, 3)}
    return shapes[max(64, head_dim)]
