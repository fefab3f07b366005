"""The log-probabilities of a prompt's tokens, and the most likely ones in each place: `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import TopLogprobs
from hf_paged.generation.requests.top_tokens import TopTokens
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import raw_logprobs
from hf_paged.sockets import Task

# Processed at once: a row of fp32 scores is as long as the vocabulary, so that 256 of 128,000 take 130 MB.
_ROWS = 256


def task_of(options: RequestOptions) -> Task:
    """Return the task of a request with these options, which have `prompt_logprobs`."""
    assert options.prompt_logprobs is not None
    if options.task is not None:
        raise ValueError("task= beside prompt_logprobs=, which is a task itself; make two requests")
    return PromptScores(options.prompt_logprobs, options.prompt_logprobs_start)


class PromptScores(Task):
    """The log-probabilities of the tokens of a prompt, and the `num_top` most likely tokens at each position.

    The lists have one entry for each token, None where it is not known. The first token has none, and those before
    `known_from` have none.
    """

    def __init__(self, num_top: int, known_from: int = 0) -> None:
        self._num_top, self._known_from = num_top, known_from

    def begin(self, prompt: Sequence[int]) -> None:
        if self._known_from > len(prompt):
            raise ValueError(f"prompt_logprobs_start={self._known_from}: the prompt has {len(prompt)} tokens")
        self._of(prompt)

    def _of(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        # No token comes before the first one, so that nothing has given it a probability.
        self.start, self.stop = max(1, self._known_from) - 1, len(tokens) - 1
        self.logprobs: list[float | None] = [None] * len(tokens)
        self.top_logprobs: list[TopLogprobs | None] = [None] * len(tokens)

    def consume(self, first: int, rows: torch.Tensor) -> None:
        for start in range(0, len(rows), _ROWS):
            scores = rows[start : start + _ROWS]
            place = first + start + 1
            own = np.array(self._tokens[place : place + len(scores)], dtype=np.int64)
            top = TopTokens(scores, [self._num_top] * len(scores)).read()
            logprobs = raw_logprobs(scores, to_device(own, scores.device), torch.Tensor.float)
            self.logprobs[place : place + len(scores)] = logprobs.tolist()
            self.top_logprobs[place : place + len(scores)] = top

    def fill(self, output: Any) -> None:
        # The lists are the caller's own.
        output.prompt_logprobs, output.prompt_top_logprobs = self.logprobs[:], self.top_logprobs[:]
