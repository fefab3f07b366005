"""One packed forward of a transformers model: ragged sequences in one row `[1, num_tokens]`, K/V in blocks.

Knows models and metadata; never sequences, requests or sampling.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.packed_cache import PackedCache
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.attention import PackedStep, configs_of
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.model.state import state_of


class Override(Protocol):
    """Parts of a model replaced for the time of one packed forward."""

    def enter(self) -> None:
        """The model's `Weights` have just been looked at."""

    def leave(self) -> None:
        """Undo `enter`, or the part of it that was done; may be called again."""


def uncompiled(model: Any) -> Callable[..., Any]:
    """What to call for the model's forward: of one that `model.compile()` has compiled, the forward in Python.

    Lengths differ from step to step, and each new one would compile it again. Modules in it that were compiled by
    themselves stay so.
    """
    call: Callable[..., Any] = model if model._compiled_call_impl is None else model._call_impl
    return call


class PackedModel:
    """A model bound to a PagedMemory. `forward` runs one step; the model itself is left as it was.

    `overrides` are entered in their order for the time of each forward.
    """

    def __init__(self, model: Any, memory: PagedMemory, overrides: Sequence[Override] = ()) -> None:
        self.model = model
        self._overrides = overrides
        self._weights = state_of(model).weights
        self.memory = memory
        config = model.config.get_text_config(decoder=True)
        self.cache = PackedCache(memory, config.num_hidden_layers)
        self._configs = configs_of(model)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # A composite model hands what it does not name to the language model in it.
        if "position_ids" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise UnsupportedModelError(
                f"{type(model).__name__}.forward takes no position_ids, so sequences cannot be packed in one row"
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        metadata: list[AttentionMetadata],
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids int64 [num_tokens], position_ids int64 [num_tokens] -> logits [num_rows, vocab_size].

        `logits_indices` int64 [num_rows] names the token rows whose logits are wanted (None = all).
        The tokens' slots must have been appended; their K/V is in the blocks afterwards.
        """
        self.cache.begin_step(metadata, position_ids)
        kwargs: dict[str, Any] = {}
        if self._keeps_logits:
            # All rows as indices too: a model may drop rows early where it is told of a number of last ones.
            every = logits_indices is None
            kwargs["logits_to_keep"] = (
                torch.arange(len(input_ids), device=input_ids.device) if every else logits_indices
            )
        step = PackedStep(self.cache, self._configs)
        try:
            step.enter()
            if self._overrides:
                self._weights.look()  # once a step, before anything is overridden
            for override in self._overrides:
                override.enter()
            output = uncompiled(self.model)(
                input_ids=input_ids.unsqueeze(0),
                position_ids=position_ids.unsqueeze(0),
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **kwargs,
            )
        finally:
            try:
                self._leave(step)
            except BaseException:  # Ctrl-C within it, or as it began
                self._leave(step)
                raise
        unread = [h.layer_idx for h in self.cache.handles if h.reads == 0]
        if unread or not self.cache.handles:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} computes attention its own way in layer(s) {unread or 'all'}; "
                "this model needs the dense view"
            )
        logits: torch.Tensor = output.logits[0]
        if logits_indices is not None and not self._keeps_logits:
            logits = logits[logits_indices]
        return logits

    def _leave(self, step: PackedStep) -> None:
        step.leave()
        for override in self._overrides:
            override.leave()
