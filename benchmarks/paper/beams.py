"""Which beams survive a step, drawn from random next-token probabilities: a simulation has no model."""

from __future__ import annotations

import heapq
import random
from math import log

TOP_PROBABILITY = (1.5, 1.0)
"""Parameters of the Beta distribution of the share that each next most likely token takes of what is left."""


class BeamChoice:
    """The parents of the next beams of one request.

    The scores are sums of log-probabilities, as in beam search. The probabilities of each beam's most likely tokens are
    drawn by breaking a stick: each takes a Beta-distributed share of what the ones before it have left.
    """

    def __init__(self, width: int, rng: random.Random, shape: tuple[float, float] = TOP_PROBABILITY) -> None:
        self.width = width
        self._rng = rng
        self._shape = shape
        self._scores = [0.0]

    def parents(self) -> list[int]:
        """For each beam of the next step, best first, the index of the beam that it continues."""
        candidates = []
        for parent, score in enumerate(self._scores):
            left = 1.0
            for _ in range(self.width):
                share = min(max(self._rng.betavariate(*self._shape), 1e-9), 1 - 1e-9)
                candidates.append((score + log(left * share), parent))
                left *= 1 - share
        best = heapq.nlargest(self.width, candidates)
        self._scores = [score for score, _ in best]
        return [parent for _, parent in best]
