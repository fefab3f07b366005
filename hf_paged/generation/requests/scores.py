"""Log-probabilities for callers: the most likely tokens at each place, and those of a prompt's own tokens."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.generation.requests.outputs import TopLogprobs
from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import ToHost, raw_logprobs, top_logprobs

# Processed at once: a row of fp32 scores is as long as the vocabulary, so that 256 of 128,000 take 130 MB.
_ROWS = 256


class TopTokens:
    """The most likely tokens of some rows of logits, on their way to the host."""

    def __init__(self, logits: torch.Tensor, counts: list[int]) -> None:
        """logits [num_rows, vocab]. counts: how many tokens of each row are wanted."""
        self._counts = counts
        self._width = min(max(counts), logits.shape[1])
        ids, values = top_logprobs(logits, self._width)
        self._numbers = ToHost(ids.flatten(), values.flatten())

    def read(self) -> list[TopLogprobs]:
        """Wait for them; one list for each row."""
        tokens, values = self._numbers.lists()
        pairs = list(zip(tokens, values))
        starts = range(0, len(self._counts) * self._width, self._width) if self._width else [0] * len(self._counts)
        return [pairs[start : start + min(count, self._width)] for start, count in zip(starts, self._counts)]


class PromptScores:
    """The log-probabilities of a prompt's tokens, and the `num_top` most likely tokens at each position.

    The lists have one entry for each token of the prompt, None where it is not known. The first token has none, and
    those before `start` have none.
    """

    def __init__(self, prompt: list[int], num_top: int, start: int = 0) -> None:
        self._prompt = prompt
        self._num_top = num_top
        # No token comes before the first one, so that nothing has given it a probability.
        self._known = max(1, start)
        self.logprobs: list[float | None] = [None] * len(prompt)
        self.top_logprobs: list[TopLogprobs | None] = [None] * len(prompt)

    @property
    def next_position(self) -> int | None:
        """The first position of the prompt whose logits are still wanted; None when all are known."""
        return self._known - 1 if self._known < len(self._prompt) else None

    def add(self, first: int, logits: torch.Tensor) -> None:
        """logits [num_rows, vocab] after the tokens at positions `first`, `first` + 1 and so on. What is known already,
        because the prompt was computed before, is skipped."""
        for start in range(max(self._known - 1 - first, 0), len(logits), _ROWS):
            scores = logits[start : start + _ROWS]
            place = first + start + 1
            own = np.array(self._prompt[place : place + len(scores)], dtype=np.int64)
            tokens = to_device(own, scores.device)
            top = TopTokens(scores, [self._num_top] * len(scores)).read()
            self.logprobs[place : place + len(scores)] = raw_logprobs(scores, tokens, torch.Tensor.float).tolist()
            self.top_logprobs[place : place + len(scores)] = top
            self._known = place + len(scores)
