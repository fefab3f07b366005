"""Scores of labels: what the head of a classifier gives for a prompt (`Engine.classify`, `reward` and `rank`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_paged.generation.requests.request import NOT_FINITE
from hf_paged.sockets import Task


class Labels(Task):
    """The head's row of the token that stands for the prompt, or the rows of all tokens."""

    generates = False

    def __init__(self, pad_token_id: int | None, *, of_each_token: bool, types: Sequence[int] | None = None) -> None:
        """types: of the prompt's tokens, for encoders that tell the texts of a pair apart by them."""
        self.types = types
        self._pad, self._is_of_each = pad_token_id, of_each_token
        self._rows: list[torch.Tensor] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.start, self.stop = 0, len(prompt)
        if not self._is_of_each:
            # As in transformers: the last token that is not padding, even in a prompt without padding; else the first.
            ends = (place for place in range(len(prompt) - 1, -1, -1) if prompt[place] != self._pad)
            self.start = next(ends, 0)
            self.stop = self.start + 1

    def consume(self, first: int, rows: torch.Tensor) -> None:
        own = rows.to("cpu", torch.float32, copy=True)
        if own.isnan().any():
            raise ValueError(NOT_FINITE)
        self._rows.append(own)

    def fill(self, output: Any) -> None:
        if self.start >= self.stop:
            rows = torch.cat(self._rows)
            output.result = rows if self._is_of_each else rows[0]
