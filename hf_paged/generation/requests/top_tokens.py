"""The most likely tokens of rows of logits, for callers."""

from __future__ import annotations

import torch

from hf_paged.generation.requests.outputs import TopLogprobs
from hf_paged.kernels.sampling import ToHost, top_logprobs


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
