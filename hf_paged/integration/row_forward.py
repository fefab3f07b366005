"""One sequence at a time through the model's own attention: what serves models that cannot run packed.

K/V is in the same blocks as in a packed step, gathered for each layer (the dense view); what layers keep beside it
(recurrent states, convolutions) is kept here for each sequence. Knows models and the ids of sequences; never requests
or sampling.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache, PagedLayer


class RowModel:
    """A model bound to a PagedMemory of one group. `forward` computes the next tokens of one sequence.

    Invariant: a sequence that has been computed at all has its states in `_caches`, as they are after its computed
    tokens; `fork` and `free` follow what happens to its block table.
    """

    def __init__(self, model: Any, memory: PagedMemory) -> None:
        self.model = model
        self.memory = memory
        self._blank = PagedKVCache(model.config, memory=memory)
        beside = [layer for layer in self._blank.layers if type(layer) is not PagedLayer]
        # Layers that read another layer's K/V, or none, keep a placeholder.
        self.has_states = any(type(layer).__name__ != "DummyLayer" for layer in beside)
        self._caches: dict[int, PagedKVCache] = {}
        self._parameters = inspect.signature(model.forward).parameters

    def fork(self, parent_id: int, child_id: int) -> None:
        """`child_id` has computed what `parent_id` has."""
        if self.has_states:
            self._caches[child_id] = self._caches[parent_id].copy_states()

    def free(self, seq_id: int) -> None:
        self._caches.pop(seq_id, None)

    def forward(self, seq_id: int, input_ids: torch.Tensor, num_computed: int) -> torch.Tensor:
        """input_ids int64 [num_new], after `num_computed` tokens in the cache -> logits [vocab_size] after the last.

        The tokens' slots must have been appended; their K/V is in the blocks afterwards.
        """
        cache = self._blank
        if self.has_states:
            if num_computed == 0:
                self._caches[seq_id] = self._blank.copy_states()
            cache = self._caches[seq_id]
            if num_computed:
                # Recurrent layers take up a state for one token only.
                for done, token in enumerate(input_ids.split(1)):
                    logits = self._run(cache, seq_id, token, num_computed + done)
                return logits
        return self._run(cache, seq_id, input_ids, num_computed)

    def _run(self, cache: PagedKVCache, seq_id: int, input_ids: torch.Tensor, num_computed: int) -> torch.Tensor:
        cache.view_row(seq_id, num_computed)
        kwargs: dict[str, Any] = {}
        if "logits_to_keep" in self._parameters:
            kwargs["logits_to_keep"] = 1
        if "position_ids" in self._parameters:
            # As generate does: not every model asks its cache where it is.
            end = num_computed + input_ids.shape[0]
            kwargs["position_ids"] = torch.arange(num_computed, end, device=input_ids.device)[None]
        try:
            output = self.model(
                input_ids=input_ids[None], past_key_values=cache, use_cache=True, return_dict=True, **kwargs
            )
        finally:
            cache.release_row()
        logits: torch.Tensor = output.logits[0, -1]
        return logits
