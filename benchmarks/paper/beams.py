"""Which beams survive a step, drawn from random next-token probabilities: a simulation has no model."""

from __future__ import annotations

import functools
import random
from math import log

TOP_PROBABILITY = (1.5, 1.0)
"""Parameters of the Beta distribution of the share that each next most likely token takes of what is left."""
DRAWS = 4096


@functools.cache
def draws(width: int, shape: tuple[float, float] = TOP_PROBABILITY) -> list[list[float]]:
    """DRAWS sets of log-probabilities of the `width` most likely next tokens of a beam.

    A stick is broken: each token takes a Beta-distributed share of what the ones before it have left.
    """
    rng = random.Random(width)
    sets = []
    for _ in range(DRAWS):
        left, logs = 1.0, []
        for _ in range(width):
            share = min(max(rng.betavariate(*shape), 1e-9), 1 - 1e-9)
            logs.append(log(left * share))
            left *= 1 - share
        sets.append(logs)
    return sets


class BeamChoice:
    """The parents of the next beams of one request.

    The scores are sums of log-probabilities, as in beam search. Every beam draws one of the sets in every step.
    """

    def __init__(self, width: int, rng: random.Random) -> None:
        self.width = width
        self._rng = rng
        self._sets = draws(width)
        self._scores = [0.0]

    def parents(self) -> list[int]:
        """For each beam of the next step, best first, the index of the beam that it continues."""
        pick, sets = self._rng.random, self._sets
        candidates = [
            (score + logarithm, parent)
            for parent, score in enumerate(self._scores)
            for logarithm in sets[int(pick() * DRAWS)]
        ]
        candidates.sort(reverse=True)
        best = candidates[: self.width]
        self._scores = [score for score, _ in best]
        return [parent for _, parent in best]
