"""RowDecoder: a PackedDecoder for models that keep states besides K/V.

The sequences of a step are the rows of a forward instead of one packed row (see `model.rows`). Prompts are computed as
wholes: equal ones share all blocks, and those that only begin alike share none, because a state has all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.generation.decoder import PackedDecoder
from hf_paged.generation.shared_prompts import Prompt
from hf_paged.model.packed import CodeCheck
from hf_paged.model.rows import Part, RowModel
from hf_paged.model.state import state_of


class RowDecoder(PackedDecoder):
    """Invariant between forwards: `row_model` has the state of each sequence in `rows`, after its tokens with K/V.

    check_code: see CodeCheck. It starts with no rows of another owner.
    """

    def __init__(self, row_model: RowModel, check_code: Callable[[], object], **options: Any) -> None:
        super().__init__(row_model, **options)
        self._row_model = row_model
        self._weights = state_of(row_model.model).weights
        self._check_code = CodeCheck(self._weights, check_code)

    def _fit(self, prompts: list[Prompt]) -> list[Prompt]:
        return super()._fit([Prompt(prompt.tokens) for prompt in prompts])

    def _compute_prompts(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        parts = [Part(seq_id, prompt.tokens.tolist(), 0) for seq_id, prompt in zip(seq_ids, prompts)]
        self.memory.append([(part.seq_id, part.end) for part in parts])
        return self._compute(parts)

    def _compute_next(self, seq_ids: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        return self._compute(
            [
                Part(seq_id, [token], self.memory.manager.num_tokens(seq_id) - 1, delta=self._delta(seq_id))
                for seq_id, token in zip(seq_ids, tokens.tolist())
            ]
        )

    def _delta(self, seq_id: int) -> int:
        """Return the offset from the index of a token of this sequence to its position."""
        return 0

    def _compute(self, parts: Sequence[Part]) -> torch.Tensor:
        self._weights.look()
        self._check_code()
        return torch.stack([logits[-1] for logits in self._row_model.forward(parts)])

    def _fork(self, parent_id: int, child_id: int) -> None:
        super()._fork(parent_id, child_id)
        self._row_model.states.fork(parent_id, child_id)

    def _free(self, seq_id: int) -> None:
        super()._free(seq_id)
        self._row_model.free(seq_id)

    def reorder(self, parents: Sequence[int]) -> None:
        super().reorder(parents)
        self._row_model.states.reorder([row for row in self.rows if row is not None], parents)

    def give_rows(self, cache: PagedKVCache) -> None:
        super().give_rows(cache)
        rows = [row for row in self.rows if row is not None]
        cache.set_states(self._row_model.states.joined([(row, self.memory.manager.num_tokens(row)) for row in rows]))

    def free(self) -> None:
        super().free()
        self._row_model.states.clear()
