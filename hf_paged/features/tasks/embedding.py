"""One vector for a whole prompt, pooled from the model's hidden states: `Engine.embed`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch.nn.functional import normalize

from hf_paged.generation.validation import is_integer, shown
from hf_paged.sockets import Task

_ROWS = 256
"""Rows that are converted at once: 256 of 8,192 elements take 17 MB in 64 bits, and a chunk has thousands."""

Pooling = Literal["last", "mean", "cls"]


def check_dimensions(model: Any, dimensions: int | None) -> None:
    """Raise ValueError for more elements than a vector of this model has; where its configuration does not tell, the
    task finds them in its step."""
    # A head may read a projection of the hidden states (OPT's).
    head, config = model.get_output_embeddings(), model.config.get_text_config(decoder=True)
    width = getattr(head, "in_features", None) or getattr(config, "hidden_size", None)
    if dimensions is not None and is_integer(dimensions) and width is not None and dimensions > width:
        raise ValueError(_too_many(dimensions, width))


def _too_many(dimensions: int, width: int) -> str:
    return f"dimensions={dimensions}: a vector of this model has {width}; give at most so many, or leave it out"


class Embedding(Task):
    """The hidden state of the last token or of the first one, or the mean of all."""

    generates = False

    def __init__(self, pooling: Pooling, dimensions: int | None, *, normalizes: bool, has_head: bool = True) -> None:
        """has_head: False: the model's rows are its hidden states."""
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling={shown(pooling)}: use 'last', 'mean' or 'cls'")
        if dimensions is not None and not (is_integer(dimensions) and dimensions > 0):
            raise ValueError(f"dimensions={shown(dimensions)}: a positive integer is needed, or None for all")
        if not isinstance(normalizes, bool):
            raise ValueError(f"normalize={shown(normalizes)}: use True or False")
        self._pooling, self._dimensions, self._normalizes = pooling, dimensions, normalizes
        self.keeps = "hidden" if has_head else "logits"
        self._total: Any = 0
        self._vector: torch.Tensor | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        self.start = len(prompt) - 1 if self._pooling == "last" else 0
        self.stop = 1 if self._pooling == "cls" else len(prompt)
        self._count = self.stop - self.start

    def consume(self, first: int, rows: torch.Tensor) -> None:
        if self._dimensions is not None and self._dimensions > rows.shape[1]:
            raise ValueError(_too_many(self._dimensions, rows.shape[1]))
        # In 64 bits, so that a sum does not show how the prompt was cut into chunks.
        for part in rows.split(_ROWS):
            self._total = self._total + part.double().sum(dim=0)
        if first + len(rows) == self.stop:
            vector = (self._total / self._count)[: self._dimensions].float().cpu()
            if not vector.isfinite().all():
                raise ValueError("the model's hidden states are NaN or infinite")
            self._vector = normalize(vector, dim=0) if self._normalizes else vector

    def fill(self, output: Any) -> None:
        output.result = self._vector
