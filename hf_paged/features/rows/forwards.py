"""The forwards of a model whose rows are sequences: makes the inputs, the cache and the attention of each."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.paged_layers import PagedLayer
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.media.media import check_heard, embedded, sound_overrides, step_arguments
from hf_paged.features.rows.pieces import Part
from hf_paged.features.rows.states import States, is_tree
from hf_paged.integration.attention import configs_of
from hf_paged.integration.names import CACHE, cache_argument
from hf_paged.kernels.metadata import AttentionMetadata, DecodeArrays, to_device
from hf_paged.model.devices import device_of
from hf_paged.model.hidden import hidden_states
from hf_paged.model.inputs import makes_own_state, step_positions
from hf_paged.model.overrides import Override
from hf_paged.model.packed import decode_step
from hf_paged.model.packed_step import Entrance, PackedCache, PackedStep, latent_overrides, uncompiled


class _OwnCache:
    """The state of a model that keeps it in a list, or in a class of its own: it makes one where it is given None, and
    returns it. The interface is that of a PagedKVCache without rows."""

    keeps_states = True
    layers: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.value: Any = None
        self._like: Any = None  # an object of the model's class, for what is no state in it

    @property
    def states(self) -> Any:
        if is_tree(self.value):
            return self.value
        self._like = self.value
        return {name: part for name, part in vars(self.value).items() if is_tree(part)}

    def set_states(self, states: object) -> None:
        self.value = states
        if states is not None and self._like is not None:
            self.value = copy.copy(self._like)
            vars(self.value).update(states)

    def release_rows(self) -> None:
        self.value = None


class Rows:
    """The forwards of a model over a memory, and the states of sequences.

    by_tables: its attention reads K/V through the block tables, in our kernels. overrides: of such forwards.
    """

    def __init__(
        self, model: Model, memory: PagedMemory, *, by_tables: bool = False, overrides: Sequence[Override] = ()
    ) -> None:
        self._memory = memory
        self.by_tables = by_tables
        self._configs = configs_of(model)
        self._sound = sound_overrides(model)
        self._overrides = (Entrance(model), *latent_overrides(model), *self._sound, *overrides)
        self._packed = PackedCache(memory, model.config.get_text_config(decoder=True).num_hidden_layers)
        self._decode_arrays = DecodeArrays(memory.block_size)
        self._cache_name = cache_argument(model) or CACHE
        self.cache: Any = _OwnCache() if makes_own_state(model) else PagedKVCache(model.config, memory=memory)
        self.states = States()
        self.has_states = self.cache.keeps_states
        self.has_kv = any(isinstance(layer, PagedLayer) for layer in self.cache.layers)
        self._device = device_of(model)
        self._makes_inputs = (
            type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
        )
        self._parameters = inspect.signature(model.forward).parameters

    def compute(self, model: Model, parts: Sequence[Part]) -> torch.Tensor:
        """Logits [len(parts), keep, vocab_size] of one forward. The parts begin their sequences, or have one token
        each, or continue by as many tokens, or there is one part, as with media. The tokens' slots must have been
        appended."""
        width, end = max(len(part.ids) for part in parts), max(part.end for part in parts)
        is_first = parts[0].start == 0
        by_tables = self.by_tables
        if (media := parts[0].media) is not None and media.attends_both_ways:
            # The model makes the mask.
            by_tables = False
            if not is_first:
                raise UnsupportedModelError("tokens that attend both ways must be computed with the first ones")
        # Rows without K/V in a dense view have padding in their first forward alone.
        is_padded = is_first or (self.has_kv and not by_tables)
        padding = [end - part.end if is_padded else 0 for part in parts]
        tokens, positions = np.zeros((2, len(parts), width), dtype=np.int64)
        for row, part in enumerate(parts):
            first = width - len(part.ids)
            tokens[row, first:] = part.ids
            positions[row, first:] = range(part.start + part.delta, part.end + part.delta)
        mask = np.arange(end) >= np.array(padding)[:, None] if any(padding) else None
        starts = [(part.seq_id, part.start) for part in parts]
        # Taken before the forward, which changes them in place; put back only if it has ended.
        self.cache.set_states(self.states.take(starts) if self.has_states and not is_first else None)
        if self.has_kv:
            attend = self._packed.update if by_tables else None
            self.cache.view_rows([part.seq_id for part in parts], padding, end - width, end, attend)
        try:
            call = partial(self._call, model, tokens, positions, mask, parts[0], is_first=is_first)
            if any(part.note for part in parts):
                call = partial(self._noting, model, parts, call)
            if by_tables:
                logits = self._attending(model, parts, mask, call)
            else:
                logits = call() if media is None else self._hearing(call)
            if self.has_kv and (kept := self.cache.get_seq_length()) != end:
                raise UnsupportedModelError(f"it keeps {kept} entries for {end} tokens")
            if self.has_states:
                self.states.put([(part.seq_id, part.end) for part in parts], self.cache.states)
        finally:
            # Even after an error: the rows belong to the engine.
            self.cache.release_rows()
        return logits

    def _noting(self, model: Model, parts: Sequence[Part], call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a forward whose hidden states some parts want."""
        logits: torch.Tensor
        logits, states = hidden_states(model).of(call)
        for part, own in zip(parts, () if states is None else states):
            if part.note is not None:
                part.note(own[-len(part.ids) :])
        return logits

    def _attending(
        self, model: Model, parts: Sequence[Part], mask: np.ndarray | None, call: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The result of a forward in which attention reads K/V through the block tables."""
        metadata, positions = self._step(parts)
        # A prompt starts at 0, so that the mask has the shape of the forward.
        places = None if mask is None else to_device(np.flatnonzero(mask), self._device)
        self._packed.begin_step(metadata, positions, places)
        logits: torch.Tensor = PackedStep(self._packed, self._configs, self._overrides).run(call)
        self._packed.refuse_unread(model)
        return logits

    def _hearing(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a forward that may ask for the features of audio. If Ctrl-C leaves the functions replaced, they
        still do for others what the model's own do."""
        try:
            for override in self._sound:
                override.apply(self)
            return call()
        finally:
            for override in self._sound:
                override.undo(self)

    def refuse_windows(self) -> None:
        """After a forward by tables: raises UnsupportedModelError if a layer keeps fewer tokens than it attends to."""
        for handle in self._packed.handles:
            kept = self.cache.layers[handle.layer_idx].sliding_window
            if kept is not None and kept != handle.bounds.most:
                raise UnsupportedModelError(f"layer {handle.layer_idx} keeps a window that its attention does not name")

    def _step(self, parts: Sequence[Part]) -> tuple[list[AttentionMetadata], torch.Tensor]:
        """Metadata for each group of layers, and the positions int64 [num_tokens] of the tokens."""
        seq_ids, manager = [part.seq_id for part in parts], self._memory.manager
        if any(len(part.ids) > 1 or part.end < manager.num_tokens(part.seq_id) for part in parts):
            lengths, ends = [len(part.ids) for part in parts], [part.end for part in parts]
            return self._memory.step_metadata(seq_ids, lengths, self._device, ends)
        step = decode_step(self._decode_arrays, self._memory, seq_ids, [part.start for part in parts])
        return self._decode_arrays.metadata(step, self._device), to_device(step.positions, self._device)

    def _call(
        self,
        model: Model,
        tokens: np.ndarray,
        positions: np.ndarray,
        mask: np.ndarray | None,
        part: Part,
        *,
        is_first: bool,
    ) -> torch.Tensor:
        is_own = isinstance(self.cache, _OwnCache)
        kwargs: dict[str, Any] = {self._cache_name: self.cache.value if is_own else self.cache}
        if "logits_to_keep" in self._parameters:
            kwargs["logits_to_keep"] = part.keep
        if mask is not None:
            kwargs["attention_mask"] = to_device(mask.astype(np.int64), self._device)
        ids = to_device(tokens, self._device)
        if "position_ids" in self._parameters:
            # Pass positions as generate does: not every model derives them from its cache.
            kwargs["position_ids"] = to_device(positions, self._device)
            if self._makes_inputs:
                kwargs["position_ids"] = step_positions(model, ids, kwargs["position_ids"], is_first=is_first)
        beside = {} if part.media is None else step_arguments([part.media])
        given = embedded(model, ids, beside) if beside else {}
        output = uncompiled(model)(input_ids=ids, use_cache=True, return_dict=True, **{**kwargs, **given})
        check_heard(model, beside)
        if is_own:
            self.cache.value = output[self._cache_name]
        logits: torch.Tensor = output.logits[:, -part.keep :]
        return logits
