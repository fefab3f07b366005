"""What the paper's figures show (`published.json`), and what its text and bars print."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

Data = dict[str, Any]
FIGURES: Data = json.loads(Path(__file__).with_name("published.json").read_text())
"""By figure; curves are {"x": [...], "y": [...]}, by panel and system as in ours."""

MEANS = {"sharegpt": {"in": 161.31, "out": 337.99}, "alpaca": {"in": 19.31, "out": 58.45}}
"""Tokens, printed in Figure 11."""
MEMORY = {
    "ours": {"tokens": 96.3},
    "orca-oracle": {"tokens": 38.2, "reserved": 25.2, "external": 36.6},
    "orca-pow2": {"tokens": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "orca-max": {"tokens": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
}
"""% of the K/V memory, printed in Figure 2."""
BATCHED = {
    "sharegpt": {"ours": 30.42, "orca-oracle": 13.62, "orca-pow2": 9.81, "orca-max": 7.00},
    "alpaca": {"ours": 132.44, "orca-oracle": 72.75, "orca-pow2": 43.24, "orca-max": 7.00},
}
"""Requests, printed in Figure 13."""
_KINDS = [(kind, width) for kind in ("samples", "beams") for width in (2, 4, 6)]
SAVED = {("alpaca", *case): value for case, value in zip(_KINDS, (6.09, 8.53, 9.79, 37.56, 53.13, 55.16))}
"""% of the blocks: printed in Figure 15; for ShareGPT, ends of the ranges in section 6.3."""
SAVED |= {("sharegpt", "samples", 2): 16.2, ("sharegpt", "samples", 6): 30.5}
SAVED |= {("sharegpt", "beams", 2): 44.3, ("sharegpt", "beams", 6): 66.3}

Side = Literal["in", "out"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """Lengths of Figure 11, in tokens. Bin i begins at `first + i * width`; `density` is a share for each token."""

    first: float
    width: float
    density: tuple[float, ...]

    def sample(self, count: int, rng: random.Random) -> list[int]:
        """Lengths, uniform within each bin."""
        bins = rng.choices(range(len(self.density)), cum_weights=list(accumulate(self.density)), k=count)
        return [max(1, int(self.first + (index + rng.random()) * self.width)) for index in bins]


@cache
def lengths(workload: str, side: Side) -> Histogram:
    """Of the prompts ("in") or outputs ("out") of ShareGPT or Alpaca."""
    read = FIGURES["11"][workload][side]
    return Histogram(read["first"], read["width"], tuple(read["density"]))


def pairs(workload: str, count: int, rng: random.Random, longest: int) -> list[tuple[int, int]]:
    """`count` lengths of a prompt and its output, drawn independently; again if they exceed `longest` together."""
    drawn: list[tuple[int, int]] = []
    while len(drawn) < count:
        sides = (lengths(workload, side).sample(count - len(drawn), rng) for side in ("in", "out"))
        drawn += [pair for pair in zip(*sides) if sum(pair) <= longest]
    return drawn
