"""Time prompt attention with other tiles than those of kernels/triton/tuning.py, and check each against the reference.

    python scripts/gpu/tiles.py OUT.json [--device cpu] [--tokens 8192]

On a CPU the sizes are small and torch computes: it shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kernels import time_cpu, time_gpu

from hf_paged.kernels.triton import tuning
from hf_paged.kernels.triton.tuning import Tile
from tests.kernels.cases import Case, make_batch

# By head size. The first is the one in use on sm90.
TILES = {
    64: [Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 4, 3), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2)],
    128: [Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(64, 128, 4, 2)],
    256: [Tile(128, 32, 8, 3), Tile(64, 64, 8, 2), Tile(64, 32, 4, 3), Tile(128, 64, 8, 2)],
}


def measure(dim: int, tile: Tile, tokens: int, device: str) -> dict[str, Any]:
    """Microseconds and TFLOP/s of one causal prompt, and the largest difference from the reference at a short one."""
    found: dict[str, Any] = {"head_dim": dim, "tile": [tile.bm, tile.bn, tile.num_warps, tile.num_stages]}
    impl = "triton" if device == "cuda" else "torch"
    with mock.patch.object(tuning, "large_tile", lambda *args: tile):
        try:
            short = make_batch(Case(((300, 300),), (8, 2), dim, dtype=torch.bfloat16), device)
            apart = (short.run(impl).float() - short.run("reference").float()).abs().max()
            batch = make_batch(Case(((tokens, tokens),), (32, 8), dim, dtype=torch.bfloat16), device)
            (seconds,) = (time_gpu if device == "cuda" else time_cpu)({"ours": lambda: batch.run(impl)}, 20).values()
        except Exception as error:  # of the compiler, or of a launch that needs more than the chip has
            return found | {"error": f"{type(error).__name__}: {error}"[:200]}
    flop = 2 * 2 * 32 * dim * tokens * (tokens + 1) / 2
    return found | {"us": 1e6 * seconds, "TFLOP/s": flop / seconds / 1e12, "largest difference": float(apart)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dim, tiles in TILES.items():
        for tile in tiles:
            rows.append(measure(dim, tile, args.tokens, args.device))
            print(json.dumps(rows[-1]), flush=True)
            args.out.write_text(json.dumps({"tokens": args.tokens, "tiles": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
