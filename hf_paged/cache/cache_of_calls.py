"""CacheOfCalls: what calls of hf_paged do with the rows of a PagedKVCache, and with the states that layers keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.cache.cache_rows import Attend, CacheRows
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_layers import PAGED, LayerList, PagedLayer, PagedStateLayer, shows_tokens


class CacheOfCalls(Cache):
    """Rows of blocks that calls take, lend and show, and what the layers keep besides K/V.

    memory: the blocks. layers: transformers' own, in whose place layers over blocks are put; None: layers are added as
    the model writes them.
    """

    def __init__(self, memory: PagedMemory, layers: Sequence[Any] | None) -> None:
        self.memory = memory
        self._rows = CacheRows(memory)
        own = LayerList()
        own.extend(self._own_layer(i, layer) for i, layer in enumerate(layers or ()))
        # Without a config, layers are added as `update` names them.
        self._grows = not own
        self._num_configured = len(own)
        self._copies: list[Any] = []  # the layers that `_drop_copies` has removed
        super().__init__(layers=own)
        self._fresh = [_state_of(layer) for layer in self._state_layers()]

    def _own_layer(self, index: int, layer: Any) -> Any:
        # Exactly these two hold K/V and nothing else.
        if type(layer) is DynamicSlidingWindowLayer:
            return PagedLayer(self._rows, index, sliding_window=layer.sliding_window)
        if type(layer) is DynamicLayer:
            return PagedLayer(self._rows, index)
        # K/V and another state (recurrent, an indexer, compressed entries): only the K/V goes into blocks.
        if isinstance(layer, DynamicLayer) and shows_tokens(type(layer)):
            return PagedStateLayer.adopt(layer, self._rows, index)
        return layer  # no K/V that grows with the tokens

    def take_rows(self, seq_ids: Sequence[int], padding: Sequence[int]) -> None:
        """Take ownership of sequences that `memory` holds already, whose K/V is complete in every layer. padding: left
        of each, in tokens. Raises ValueError if the cache has rows, or they are lent."""
        self._rows.take(seq_ids, padding)
        if self._grows:
            self._add_layers(self._rows.num_layers)
        self._set_lengths(self._rows.length)

    def lend_rows(self) -> tuple[list[int], list[int]]:
        """Give the rows, as ids in `memory`, and their padding to a call that appends to them. Until `return_rows`, the
        cache has no rows and takes none. Raises ValueError if they are lent already."""
        if self._rows.lent:
            raise ValueError("this cache is in use by another call of generate; give each call a cache of its own")
        seq_ids, padding = self._rows.seq_ids, self._rows.padding
        self._rows.lent = True
        self._forget()
        return seq_ids, padding

    def return_rows(self, seq_ids: Sequence[int], padding: Sequence[int]) -> None:
        """End `lend_rows`. The rows may be others, as many as there are, with complete K/V in every layer."""
        self._rows.lent = False
        self.take_rows(seq_ids, padding)

    @property
    def is_even(self) -> bool:
        """Return True if every layer has K/V for the same tokens; False after a forward that failed on its way."""
        lengths = {
            layer.length for layer in self.layers if isinstance(layer, PagedLayer) and self._rows.has(layer.index)
        }
        return lengths <= {self._rows.length}

    def view_rows(
        self,
        seq_ids: Sequence[int],
        padding: Sequence[int],
        num_written: int,
        length: int,
        attend: Attend | None = None,
    ) -> None:
        """Present sequences that another owner keeps in `memory` as the rows; their slots are appended already.

        `release_rows` ends the view. The layers' other states are those of `set_states`. padding: left of each row, in
        tokens. num_written: position from which updates write. length: of each row, with its padding. attend: computes
        attention from the block tables, in place of writing and gathering K/V; None: gather.
        """
        self._rows.view(seq_ids, padding, length, attend)
        self._set_lengths(num_written)

    def _set_lengths(self, length: int) -> None:
        for layer in self.layers:
            # A layer to which no sequence has written (cross-attention without images) is empty here too.
            if isinstance(layer, PagedLayer):
                layer.length = length if self._rows.has(layer.index) else 0

    def release_rows(self) -> None:
        """End the view of `view_rows`; the blocks stay with their owner."""
        self._forget()

    @property
    def keeps_states(self) -> bool:
        """Return True if layers keep anything outside blocks. (A layer that reads another's K/V has a placeholder.)"""
        return any(type(layer).__name__ != "DummyLayer" for layer in self._state_layers())

    @property
    def states(self) -> list[dict[str, Any]]:
        """Copy each layer's state outside blocks, by the name of its attribute. Tensors have the rows along dim 0."""
        return [_turned(copied(_own_state(layer))) for layer in self._state_layers()]

    def set_states(self, states: Sequence[dict[str, Any]] | None) -> None:
        """Replace what the layers keep outside blocks by what `states` has returned; None: by those of no rows."""
        if states is None:
            self._drop_copies()
        # The forward that would have appended these layers has failed.
        elif len(states) > len(self._state_layers()):
            self.layers += self._copies
        for layer, given in zip(self._state_layers(), self._fresh if states is None else states, strict=True):
            for name in _own_state(layer):
                del vars(layer)[name]
            own = {name: copied(value) for name, value in given.items() if name not in PAGED}
            vars(layer).update(own if states is None else _turned(own))

    def _select_states(self, rows: Sequence[int]) -> None:
        """Apply the selection to the per-row states that layers keep outside blocks. Needs the former rows."""
        if layers := self._state_layers():
            index = torch.tensor(rows, dtype=torch.int64, device="cpu")
            for layer in layers:
                layer.reorder_cache(index)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """If the block fails, the states of all layers are as before. It writes into no tensor, and changes the block
        tables last, which does not fail."""
        kept = [_state_of(layer) for layer in self._state_layers()]
        try:
            yield
        except BaseException:
            self._restore(kept)
            raise

    def _restore(self, states: Sequence[dict[str, Any]]) -> None:
        for layer, state in zip(self._state_layers(), states):
            vars(layer).clear()
            vars(layer).update(state)

    def _state_layers(self) -> list[Any]:
        """Layers that hold a state outside blocks."""
        return [layer for layer in self.layers if type(layer) is not PagedLayer]

    def _add_layers(self, count: int) -> None:
        while len(self.layers) < count:
            self.layers.append(PagedLayer(self._rows, len(self.layers)))

    @property
    def has_only_states(self) -> bool:
        """Return True if the model has no K/V: there are no blocks, and only the layers know the rows."""
        return bool(self.layers) and not any(isinstance(layer, PagedLayer) for layer in self.layers)

    def _drop_copies(self) -> None:
        """Remove the layers that a looped model has appended; it appends empty ones in the next forward."""
        if not self._grows and (copies := self.layers[self._num_configured :]):
            self._copies = copies
            del self.layers[self._num_configured :]

    def _forget(self) -> None:
        self._rows.forget()
        self._set_lengths(0)


def _state_of(layer: Any) -> dict[str, Any]:
    """The attributes of a layer, with its tensors themselves and copies of its lists."""
    state: dict[str, Any] = copied(vars(layer))
    return state


def _own_state(layer: Any) -> dict[str, Any]:
    """The attributes of a layer that its transformers class has."""
    return {name: value for name, value in vars(layer).items() if name not in PAGED}


def _turned(state: dict[str, Any]) -> dict[str, Any]:
    """Exchange the first two dims of the one attribute of transformers' layers that has the rows along dim 1."""
    if state.get("indexer_position_ids") is not None:
        state["indexer_position_ids"] = state["indexer_position_ids"].transpose(0, 1)
    return state


def copied(value: object) -> Any:
    if isinstance(value, list):
        return [copied(each) for each in value]
    return {key: copied(each) for key, each in value.items()} if isinstance(value, dict) else value
