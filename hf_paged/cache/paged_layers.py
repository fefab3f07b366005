"""The layers of a PagedKVCache: transformers cache layers whose K/V lies in the rows' blocks.

Know one layer of the rows; never the cache that has the layers, or requests.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.cache.cache_rows import CacheRows
from hf_paged.kernels.quantised import read_back

PAGED = frozenset({"_rows", "index", "sliding_window", "length", "_apart"})
"""The attributes of a PagedLayer itself."""


class PagedLayer(CacheLayerMixin):
    """One layer's view of the rows of a PagedKVCache, with the length that it has written.

    With a `sliding_window`, `update` returns what transformers' sliding layer would hold, and the mask sizes cover the
    same: the window of the first new token, and the new tokens.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: CacheRows, index: int, *, sliding_window: int | None = None) -> None:
        self._rows = rows
        self.index = index
        self.sliding_window = sliding_window
        self.length = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedLayer:
        """Return a copy that shares the rows, unless their cache is copied too. Looped models copy single layers."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        rows = memo.get(id(self._rows), self._rows)
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items() if name != "_rows"})
        copied._rows = rows
        return copied

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, num_tokens, head_dim], gathered from the blocks at each access.

        The tokens are all, or those that the next one sees through the window.
        """
        return self._rows.dense(self.index, self._first_visible(), self.length)[0] if self.length else None

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, num_tokens, v_head_dim], gathered from the blocks at each access.

        The tokens are all, or those that the next one sees through the window.
        """
        return self._rows.dense(self.index, self._first_visible(), self.length)[1] if self.length else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool allocates a layer when it is first written."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows.attend is not None:
            self.length += key_states.shape[2]
            return self._rows.attend(key_states, value_states, self.index)
        start, is_first = self._first_visible(), self.length == 0
        self.length = self._rows.write(self.index, self.length, key_states, value_states)
        # The new K/V is all there is, and a window may have dropped blocks of a long prompt.
        if is_first and not any(self._rows.padding):
            key, value = read_back(key_states, value_states, self._rows.memory.pool.storage)
            return key.contiguous(), value.contiguous()
        return self._rows.dense(self.index, start, self.length)

    def _first_visible(self) -> int:
        """The first position that the next token attends to."""
        return 0 if self.sliding_window is None else max(self.length - self.sliding_window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = self._first_visible()
        return self.length - start + query_length, start

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    # transformers before 5.20 calls `get_max_length` by this name.
    get_max_cache_shape = get_max_length


class LayerList(list[Any]):
    """The layers of a PagedKVCache. The index of a PagedLayer is its place here.

    Looped models append copies of some layers, one for each further pass, and write to them by their places.
    """

    def append(self, layer: Any) -> None:
        if isinstance(layer, PagedLayer):
            layer.index = len(self)
        super().append(layer)

    def extend(self, layers: Iterable[Any]) -> None:
        for layer in layers:
            self.append(layer)

    def __iadd__(self, layers: Iterable[Any]) -> LayerList:  # type: ignore[misc]
        self.extend(layers)
        return self


def shows_tokens(kind: type[DynamicLayer]) -> bool:
    """Return True if this kind of layer returns the K/V of the last tokens in order, as a PagedLayer does."""
    return kind.get_mask_sizes in (DynamicLayer.get_mask_sizes, DynamicSlidingWindowLayer.get_mask_sizes)


class PagedStateLayer(PagedLayer):
    """A layer whose K/V is in blocks and whose other state stays in the attributes of its transformers class.

    Subclasses combine this class with a transformers layer class (see `adopt`). While the transformers class's methods
    change that state (reorder, crop, reset, ...), they see empty K/V; the block tables are changed separately.
    """

    kind: str  # name of the transformers class
    _apart = False  # whether the K/V currently looks empty

    @property
    def is_croppable(self) -> bool:
        return bool(self._rest().is_croppable)

    def _rest(self) -> Any:
        """The methods of this layer's transformers class, which follows PagedLayer in the MRO."""
        return super(PagedLayer, self)

    @staticmethod
    def adopt(layer: DynamicLayer, rows: CacheRows, index: int) -> PagedStateLayer:
        """Turn a fresh transformers layer into a paged one, in place."""
        layer.__class__ = _paged_class(type(layer))
        paged = cast(PagedStateLayer, layer)
        PagedLayer.__init__(paged, rows, index, sliding_window=getattr(layer, "sliding_window", None))
        return paged

    def _placeholder(self) -> torch.Tensor:
        pool, dtype, device = self._rows.memory.pool, torch.float32, torch.device("cpu")
        if self.length:
            dtype, device = pool.written_in(self.index)[0], pool[self.index].key.device
        return torch.empty(len(self._rows), 0, 0, 0, dtype=dtype, device=device)

    @property
    def keys(self) -> torch.Tensor | None:
        return self._placeholder() if self._apart else super().keys

    @keys.setter
    def keys(self, value: object) -> None:
        """Ignored: the transformers class's methods assign what they derived from the placeholder."""

    @property
    def values(self) -> torch.Tensor | None:
        return self._placeholder() if self._apart else super().values

    @values.setter
    def values(self, value: object) -> None: ...

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    @is_initialized.setter
    def is_initialized(self, value: bool) -> None: ...

    @contextlib.contextmanager
    def _kv_apart(self) -> Iterator[None]:
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        # Two positional tensors are K and V; other states are passed by keyword.
        if kwargs:
            self._rest().lazy_initialization(*args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        with self._kv_apart():
            self._rest().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        with self._kv_apart():
            self._rest().crop(tokens_to_remove)


@functools.cache
def _paged_class(kind: type[DynamicLayer]) -> type:
    # No `layer_type`: transformers would register a class that has one as the layer class of every cache.
    return type(f"Paged{kind.__name__}", (PagedStateLayer, kind), {"_layer_type": None, "kind": kind.__name__})
