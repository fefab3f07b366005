"""The bookkeeping of one beam search: which candidates continue, which are finished, when the search ends.

Knows scores, tokens and row numbers; never a tensor, a block or a model. Standard library only. Scores are rounded to
fp32 where transformers' beam search rounds, so that both rank candidates in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

NEVER_CHOSEN = -1.0e9
"""Added to a score that must lose against every real one; the start score of all beams but the first."""

EarlyStopping = bool | Literal["never"]


def fp32(value: float) -> float:
    """The fp32 number nearest to `value`."""
    return array("f", (value,))[0]


class Candidate(NamedTuple):
    """Beam `parent` continued with `token`; `score` is the sum of log-probabilities, fp32."""

    parent: int
    token: int
    score: float


class Hypothesis(NamedTuple):
    """A finished beam; `score` is its length-penalised score. `payload` belongs to the caller."""

    score: float
    payload: Any


@dataclass(slots=True)
class BeamSearch:
    """State of one search between steps: scores of the running beams, the best finished ones.

    Lengths count generated tokens only. `max_new_tokens` is the limit that early_stopping="never" assumes.
    """

    num_beams: int
    max_new_tokens: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    num_generated: int = 0
    running_scores: list[float] = field(init=False)
    finished: list[Hypothesis] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        # All beams start as the same prompt: only the first may be continued.
        self.running_scores = [0.0] + [NEVER_CHOSEN] * (self.num_beams - 1)

    @property
    def is_full(self) -> bool:
        return len(self.finished) == self.num_beams

    def finishing(self, stopped: Sequence[bool]) -> list[int]:
        """List the candidates that become hypotheses: the stopped ones among the `num_beams` best, best first."""
        return [index for index in range(self.num_beams) if stopped[index]]

    def step(
        self, candidates: Sequence[Candidate], stopped: Sequence[bool], payloads: dict[int, Any]
    ) -> list[Candidate] | None:
        """Take the candidates of one step, best first, and whether each met a stopping criterion.

        `payloads` has an entry for every index that `finishing` named. Returns the beams that continue (with their
        parents), best first; None when the search is over and `finished` holds the result, best first.
        """
        length = self.num_generated + 1
        for index, payload in payloads.items():
            score = fp32(candidates[index].score / fp32(length**self.length_penalty))
            self.finished.append(Hypothesis(score, payload))
        if payloads:
            self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: the earlier one wins a tie
            del self.finished[self.num_beams :]
        # They stay candidates, as in transformers, but come after all others.
        ranked = [
            candidate._replace(score=fp32(candidate.score + NEVER_CHOSEN)) if stop else candidate
            for candidate, stop in zip(candidates, stopped)
        ]
        ranked.sort(key=lambda candidate: -candidate.score)
        running = ranked[: self.num_beams]
        self.num_generated = length
        self.running_scores = [candidate.score for candidate in running]
        over = not self._can_improve() or (self.early_stopping is True and self.is_full) or all(stopped)
        return None if over else running

    def _can_improve(self) -> bool:
        """Could the best running beam still beat the worst finished one? (transformers' heuristic)"""
        # Any beam that ends may still take a free place.
        if not self.is_full:
            return True
        penalty_grows = self.early_stopping == "never" and self.length_penalty > 0.0
        length = self.max_new_tokens if penalty_grows else self.num_generated
        best_possible = fp32(self.running_scores[0] / fp32(length**self.length_penalty))
        return best_possible > self.finished[-1].score
