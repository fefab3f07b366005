"""One sequence at a time through the model's own attention: what serves models that cannot run packed.

K/V is in the same blocks as in a packed step, gathered for each layer (the dense view). Knows models and the ids of
sequences; never requests or sampling.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache, PagedLayer
from hf_paged.errors import UnsupportedModelError


class RowModel:
    """A model bound to a PagedMemory of one group. `forward` computes the next tokens of one sequence."""

    def __init__(self, model: Any, memory: PagedMemory) -> None:
        self.model = model
        self.memory = memory
        self.cache = PagedKVCache(model.config, memory=memory)
        beside = [layer for layer in self.cache.layers if type(layer) is not PagedLayer]
        if any(type(layer).__name__ != "DummyLayer" for layer in beside):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in beside}))
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps state beside its K/V ({kinds}), which the engine does not move between "
                "sequences; use model.generate(..., cache_implementation='paged')"
            )
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, seq_id: int, input_ids: torch.Tensor, num_computed: int) -> torch.Tensor:
        """input_ids int64 [num_new], after `num_computed` tokens in the cache -> logits [vocab_size] after the last.

        The tokens' slots must have been appended; their K/V is in the blocks afterwards.
        """
        self.cache.view_row(seq_id, num_computed)
        kwargs = {"logits_to_keep": 1} if self._keeps_logits else {}
        try:
            output = self.model(
                input_ids=input_ids[None], past_key_values=self.cache, use_cache=True, return_dict=True, **kwargs
            )
        finally:
            self.cache.release_row()
        logits: torch.Tensor = output.logits[0, -1]
        return logits
