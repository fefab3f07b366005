"""RowDecoder: a PackedDecoder for models that keep states besides K/V.

The sequences of a step are the rows of a forward instead of one packed row (see `model.rows`). Prompts are computed as
wholes: equal ones share all blocks, and those that only begin alike share none, because a state has all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any, cast

import torch

from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.generation.decoder import PackedDecoder
from hf_paged.generation.shared_prompts import Prompt
from hf_paged.model.packed import CodeCheck
from hf_paged.model.rows import RowModel
from hf_paged.sockets import Parts


class RowDecoder(PackedDecoder):
    """Invariant between forwards: `row_model` has the state of each sequence in `rows`, after its tokens with K/V.

    check_code: see CodeCheck. It starts with no rows of another owner.
    """

    def __init__(self, row_model: RowModel, check_code: Callable[[], object], **options: Any) -> None:
        super().__init__(row_model, **options)
        self._row_model = row_model
        self._check_code = CodeCheck(row_model.weights, check_code)

    def _fit(self, prompts: list[Prompt]) -> list[Prompt]:
        return super()._fit([Prompt(prompt.tokens) for prompt in prompts])

    def _compute_prompts(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        return self._begin(seq_ids, [prompt.tokens.tolist() for prompt in prompts])

    def _begin(self, seq_ids: Sequence[int], prompts: list[list[int]], **extra: list[Any]) -> torch.Tensor:
        counts, tokens = list(map(len, prompts)), list(chain(*prompts))
        self.memory.append(list(zip(seq_ids, counts)))
        ends = [end - 1 for end in accumulate(counts)]
        return self._run(Parts(list(seq_ids), [0] * len(counts), tokens, counts, counts, ends, extra=extra))

    def _compute_next(self, seq_ids: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        starts = [self.memory.manager.num_tokens(seq_id) - 1 for seq_id in seq_ids]
        return self._run(
            Parts(list(seq_ids), starts, tokens.tolist(), extra={"delta": list(map(self._delta, seq_ids))})
        )

    def _delta(self, seq_id: int) -> int:
        """Return the offset from the index of a token of this sequence to its position."""
        return 0

    def _run(self, parts: Parts) -> torch.Tensor:
        self._packed.weights.look()
        self._check_code()
        return cast(torch.Tensor, self._packed.run(parts)[0])

    def reorder(self, parents: Sequence[int]) -> None:
        super().reorder(parents)
        self._row_model.states.reorder([row for row in self.rows if row is not None], parents)

    def give_rows(self, cache: PagedKVCache) -> None:
        super().give_rows(cache)
        rows = [row for row in self.rows if row is not None]
        cache.set_states(self._row_model.states.joined([(row, self.memory.manager.num_tokens(row)) for row in rows]))
