"""Computes one sequence at a time with the model's own attention, for models that cannot run packed.

K/V is in the same blocks as in a packed step and is gathered for each layer (the dense view). Other states of layers
(recurrent, convolution) are kept here per sequence. Knows models and the ids of sequences; never requests or sampling.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers import GenerationConfig

from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.paged_layers import PagedLayer
from hf_paged.errors import LayersChanged, UnsupportedModelError
from hf_paged.model.devices import device_of
from hf_paged.model.inputs import step_positions
from hf_paged.model.packed import own_forward, uncompiled
from hf_paged.model.state import state_of
from hf_paged.model.support import first_line, logits_tolerance


class RowModel:
    """A model bound to a PagedMemory. `forward` computes the next tokens of one sequence.

    Invariant: `_caches` has the states of every sequence with computed tokens, as of the last computed token. `fork`
    and `free` must be called together with those of the block tables.

    `depends_on_split`: results depend on how a sequence is split into forwards. (A recurrent layer may resume its state
    for one token only, a windowed cache returns what it holds at that time, and some models cannot continue a prompt.)
    `is_incremental`: a sequence must be computed as generate does: the whole prompt, then one token at a time. So it is
    if results depend on the split, and the caller sets it while code of others in the model may depend on it.
    """

    def __init__(self, model: Any, memory: PagedMemory, tried: Any = None) -> None:
        """tried: the model, or its `bare_copy`, for a trial on a few tokens."""
        self.model = model
        self.memory = memory
        self._blank = PagedKVCache(model.config, memory=memory)
        beside = [layer for layer in self._blank.layers if type(layer) is not PagedLayer]
        # Layers that read another layer's K/V, or none, keep a placeholder.
        self._has_states = any(type(layer).__name__ != "DummyLayer" for layer in beside)
        windows = any(isinstance(layer, PagedLayer) and layer.is_sliding for layer in self._blank.layers)
        self._caches: dict[int, PagedKVCache] = {}
        self._parameters = inspect.signature(model.forward).parameters
        self.depends_on_split = not self._probe(model if tried is None else tried) or self._has_states or windows
        self.is_incremental = self.depends_on_split
        self._weights = state_of(model).weights
        self._weights.look()
        self._structure = self._weights.structure

    @torch.no_grad()
    def _probe(self, model: Any) -> bool:
        """Whether a prompt in two pieces gives the same logits as in one.

        Raises UnsupportedModelError if even generate's own split does not give the logits of generate.
        """
        tokens, expected = self._generated(model)
        try:
            same = self._close(self._logits(model, tokens, (5, 1, 1)), expected)
        except UnsupportedModelError:
            raise
        except Exception as error:  # of the model, or of what others have put into it
            raise self._unsupported(first_line(error)) from error
        if not same:
            raise self._unsupported("its logits are not those of generate")
        try:
            return self._close(self._logits(model, tokens, (2, 3, 1, 1))[1:], expected)
        except Exception:  # some models assert that a prompt is not split
            return False

    def _generated(self, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [1, 7] of plain generate, and its logits fp32 [3, vocab] after the last three of them."""
        ids = torch.arange(5, dtype=torch.int64, device=device_of(self.model))[None]
        without_defaults = copy.copy(model)  # the modules are the same
        if (own := own_forward(model)) is not None:
            vars(without_defaults)["forward"] = own
        # The model's own options may end the call early, or need more than a model, as stop strings do.
        without_defaults.generation_config = GenerationConfig()
        try:
            plain = without_defaults.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=3,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        except Exception as error:  # of the model, or of what others have put into it
            raise UnsupportedModelError(
                f"plain generate of {type(self.model).__name__} fails ({first_line(error)}); mend that first"
            ) from error
        return plain.sequences[:, : ids.shape[1] + 2], torch.cat(plain.logits).float()

    def _logits(self, model: Any, tokens: torch.Tensor, cuts: tuple[int, ...]) -> torch.Tensor:
        """Logits fp32 [len(cuts), vocab] after each piece of tokens int64 [1, sum(cuts)].

        Another sequence is computed between the pieces, to detect models that keep a state in their modules.
        """
        cache, done, logits = PagedKVCache(self.model.config), 0, []
        other, others = PagedKVCache(self.model.config), tokens.flip(1)
        for count in cuts:
            logits.append(self._call(model, cache, tokens[:, done : done + count], done)[-1].float())
            self._call(model, other, others[:, done : done + count], done)
            done += count
            if cache.get_seq_length() != done:
                raise self._unsupported(f"it keeps {cache.get_seq_length()} entries for {done} tokens")
        return torch.stack(logits)

    def _close(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        finite = torch.isfinite(right)
        difference = (left - right)[finite].abs().max()
        return bool(difference <= logits_tolerance(self.model.dtype) * right[finite].abs().max())

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{type(self.model).__name__} cannot be computed one sequence at a time ({reason}); "
            "use model.generate(..., cache_implementation='paged')"
        )

    @property
    def can_repeat(self) -> bool:
        """Whether tokens can be computed again: states outside blocks cannot be rolled back."""
        return not self._has_states

    def fork(self, parent_id: int, child_id: int) -> None:
        """Copy the states of `parent_id` to `child_id`."""
        if self._has_states:
            self._caches[child_id] = self._caches[parent_id].copy_states()

    def free(self, seq_id: int) -> None:
        self._caches.pop(seq_id, None)

    def clear(self) -> None:
        """Drop the states of all sequences."""
        self._caches.clear()

    def forward(
        self, seq_id: int, input_ids: torch.Tensor, num_computed: int, *, keep: int = 1, tried: Any = None
    ) -> torch.Tensor:
        """input_ids int64 [num_new], after `num_computed` tokens in the cache -> logits [keep, vocab_size] after the
        last `keep` of them. tried: computes it in place of the model.

        The tokens' slots must have been appended; their K/V is in the blocks afterwards. Raises LayersChanged if the
        model has other modules than when this object was made; the states of all sequences are then of no use.
        """
        self._weights.look()
        if self._weights.structure != self._structure:
            raise LayersChanged(f"the modules of {type(self.model).__name__} have changed")
        cache = self._blank
        if self._has_states:
            if num_computed == 0:
                self._caches[seq_id] = self._blank.copy_states()
            cache = self._caches[seq_id]
        cache.view_row(seq_id, num_computed)
        try:
            return self._call(self.model if tried is None else tried, cache, input_ids[None], num_computed, keep)
        finally:
            cache.release_row()

    def _call(
        self, model: Any, cache: PagedKVCache, input_ids: torch.Tensor, num_computed: int, keep: int = 1
    ) -> torch.Tensor:
        kwargs: dict[str, Any] = {}
        if "logits_to_keep" in self._parameters:
            kwargs["logits_to_keep"] = keep
        # Pass positions as generate does: not every model derives them from its cache.
        end = num_computed + input_ids.shape[1]
        positions = torch.arange(num_computed, end, dtype=torch.int64, device=input_ids.device)[None]
        given = step_positions(model, input_ids, positions, is_first=num_computed == 0)
        if given is not None:
            kwargs["position_ids"] = given
        output = uncompiled(model)(
            input_ids=input_ids, past_key_values=cache, use_cache=True, return_dict=True, **kwargs
        )
        logits: torch.Tensor = output.logits[0, -keep:]
        return logits
