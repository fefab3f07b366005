"""Random blocks of GGUF files: any codes and factors, scales as large as those of weights."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

# Where a block has its values in fp16.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,),
}  # fmt: skip
KINDS = tuple(_HALVES)


def blocks(kind: str, rows: int, depth: int, seed: int = 0) -> Any:
    """Bytes of a weight: uint8 [rows, bytes]."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    found = generator.integers(0, 256, (rows, depth // elements, size), dtype=np.uint8)
    # Weights are about as large as 1 / 8: codes, and beside them factors of 6 or 8 bits, are larger.
    largest = 2.0 ** (int(kind[1]) + 2) * (64 if kind.endswith("K") else 1)
    for at in _HALVES[kind]:
        scales = (generator.standard_normal(found.shape[:2]) / largest).astype(np.float16)
        found[..., at : at + 2] = scales[..., None].view(np.uint8)
    return found.reshape(rows, -1)


def values(kind: str, found: Any) -> Any:
    """What the package gguf reads from them: fp32 [rows, depth]."""
    return gguf.dequantize(found, gguf.GGMLQuantizationType[kind])
