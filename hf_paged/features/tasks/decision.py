"""The log-probability of each of some options after one prompt: `Engine.decide`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_paged.features.tasks.results import results_of
from hf_paged.features.tasks.scoring import CompletionScores, Scored
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import NOT_FINITE
from hf_paged.sockets import Task


class FirstTokens(Task):
    """The log-probabilities of some tokens after a prompt."""

    generates = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._logprobs = tokens, list[float]()

    def begin(self, prompt: Sequence[int]) -> None:
        self.start, self.stop = len(prompt) - 1, len(prompt)

    def consume(self, first: int, rows: torch.Tensor) -> None:
        if (token := max(self._tokens)) >= rows.shape[1]:
            raise ValueError(f"options: token {token} is not in the vocabulary of {rows.shape[1]}")
        logprobs = torch.log_softmax(rows[-1].float(), dim=-1)[self._tokens]
        if logprobs.isnan().any():
            raise ValueError(NOT_FINITE)
        self._logprobs = logprobs.tolist()

    def fill(self, output: Any) -> None:
        output.result = self._logprobs or None


def decide(
    generate: Callable[..., list[RequestOutput]], rows: Sequence[Scored], options: dict[str, Any]
) -> list[float]:
    """The log-probabilities of the completions of rows with one prompt. generate: `Engine.generate`. options: of
    requests.

    One row of logits has the first token of each. What follows them is scored on the prompt's blocks in the cache.
    """
    prompt = rows[0].prompt
    [logprobs] = results_of(generate, [prompt], [FirstTokens([row.completion[0] for row in rows])], options)
    longer = [row for row in rows if len(row.completion) > 1]
    rest = [Scored(row.place, [*prompt, row.completion[0]], row.completion[1:]) for row in longer]
    if rest:
        found = results_of(generate, [row.request for row in rest], [CompletionScores(row) for row in rest], options)
        for row, own in zip(rest, found):
            logprobs[row.place] += sum(own)
    return list(logprobs)
