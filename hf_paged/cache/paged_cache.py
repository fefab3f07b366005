"""PagedKVCache: a transformers Cache whose K/V lives in blocks.

Rows of a batch are sequences of one PagedMemory; reorder and repeat fork and free block tables. `update` returns
tensors gathered from the blocks (the dense view), so that every model's own attention runs unchanged. Knows rows; never
requests or generation settings.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from hf_paged.cache.memory import MemoryStats, PagedMemory
from hf_paged.config import CacheConfig
from hf_paged.errors import OutOfBlocks
from hf_paged.kernels import ops


class PagedKVCache(Cache):
    """A drop-in `past_key_values` for generate and for hand-written loops.

    `config` is the model's config. `block_size` is in tokens. `num_blocks` bounds the memory; with None it grows with
    the number of tokens. When a bounded cache is full, OutOfBlocks is raised and nothing has changed.

    Invariants: all rows have the same logical length, `get_seq_length()`. Row r stores its last `length - padding[r]`
    positions; its first `padding[r]` are left padding, which takes no memory and reads as zeros.
    Besides the Cache interface: `fork(row)`, `append(num_tokens)`, `free(row)`, `stats()`.
    """

    def __init__(
        self,
        config: Any = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory: PagedMemory | None = None,
    ) -> None:
        CacheConfig(block_size=block_size, num_blocks=num_blocks)  # validates both
        self.memory = memory or PagedMemory(block_size, growable=True, max_blocks=num_blocks)
        if len(self.memory.groups) != 1:
            raise ValueError("a PagedKVCache keeps all layers in one group of blocks")
        self._manager = self.memory.groups[0].manager
        self._pool = self.memory.groups[0].pool
        self._ids = itertools.count()
        self._rows: list[int] = []  # sequence id of each row
        self._padding: list[int] = []
        self._length = 0
        layers: list[Any] = []
        if config is not None:
            layers = [self._own_layer(i, layer) for i, layer in enumerate(_layers_of(config))]
        # Without a config, layers are added as `update` names them.
        self._grows = not layers
        super().__init__(layers=layers)

    def _own_layer(self, index: int, layer: Any) -> Any:
        # Exactly these two hold K/V and nothing else.
        if type(layer) is DynamicSlidingWindowLayer:
            return PagedLayer(self, index, sliding_window=layer.sliding_window)
        if type(layer) is DynamicLayer:
            return PagedLayer(self, index)
        # K/V and another state (recurrent, an indexer, compressed entries): only the K/V goes into blocks.
        if isinstance(layer, DynamicLayer) and _shows_tokens(type(layer)):
            return PagedStateLayer.adopt(layer, self, index)
        return layer  # no K/V that grows with the tokens

    # -- rows ---------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def batch_size(self) -> int:
        return len(self._rows) or -1

    @property
    def padding(self) -> list[int]:
        """Left padding of each row in tokens; it takes no memory."""
        return list(self._padding)

    def start_rows(self, padding: Sequence[int], length: int = 0) -> list[int]:
        """Make `len(padding)` empty rows of logical length `length`; returns their sequence ids."""
        if self._rows:
            raise ValueError(f"the cache already has {len(self._rows)} rows; call reset() first")
        self._rows = [next(self._ids) for _ in padding]
        self._padding = list(padding)
        self._length = length
        self.memory.append([(row, 0) for row in self._rows])
        return list(self._rows)

    def take_rows(self, seq_ids: Sequence[int], padding: Sequence[int]) -> None:
        """Take ownership of sequences that `memory` holds already, whose K/V is complete in every layer."""
        if self._rows:
            raise ValueError(f"the cache already has {len(self._rows)} rows; call reset() first")
        self._rows, self._padding = list(seq_ids), list(padding)
        self._ids = itertools.count(max(seq_ids, default=-1) + 1)
        self._length = max((self._manager.num_tokens(r) + p for r, p in zip(seq_ids, padding)), default=0)
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.length = self._length

    def view_row(self, seq_id: int, num_written: int) -> None:
        """Present a sequence that another owner keeps in `memory` as the only row; its slots are appended already.

        Updates write after its first `num_written` tokens. `release_row` ends the view.
        """
        if self._rows:
            raise ValueError(f"the cache already has {len(self._rows)} rows; call release_row() first")
        self._rows, self._padding, self._length = [seq_id], [0], self._manager.num_tokens(seq_id)
        for layer in self.layers:
            # A layer to which no sequence has written (cross-attention without images) is empty here too.
            if isinstance(layer, PagedLayer):
                layer.length = num_written if layer.index in self._pool else 0

    def release_row(self) -> None:
        """End the view of `view_row`; the blocks stay with their owner."""
        self._forget()

    def copy_states(self) -> PagedKVCache:
        """A cache over the same memory, without rows, with copies of the state that its layers keep outside blocks."""
        if self._rows:
            raise ValueError(f"the cache has {len(self._rows)} rows; call release_row() first")
        shared = (self.memory, self._manager, self._pool, self._ids)
        return copy.deepcopy(self, {id(thing): thing for thing in shared})

    def fork(self, row: int) -> int:
        """A new last row that shares all blocks of `row`; returns its index. Copies no K/V (copy-on-write later)."""
        self._check_row(row)
        child = next(self._ids)
        self.memory.fork(self._rows[row], child)
        self._rows.append(child)
        self._padding.append(self._padding[row])
        self._select_states([*range(len(self._rows) - 1), row])
        return len(self._rows) - 1

    def append(self, num_tokens: int) -> None:
        """Make room for `num_tokens` more tokens in every row; `update` also does this itself.

        Raises OutOfBlocks, and then changes nothing.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: must not be negative; use crop to remove tokens")
        self.memory.append([(row, num_tokens) for row in self._rows])
        self._length += num_tokens

    def free(self, row: int) -> None:
        """Remove a row; the rows after it move up by one. Blocks that no other row shares are freed."""
        self._check_row(row)
        self.memory.free(self._rows.pop(row))
        self._padding.pop(row)
        self._select_states([r for r in range(len(self._rows) + 1) if r != row])
        if not self._rows:
            self._forget()

    def _check_row(self, row: int) -> None:
        if not 0 <= row < len(self._rows):
            raise IndexError(f"row {row}: the cache has {len(self._rows)} rows")

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes a fork of the former row `rows[i]`; rows that are not in `rows` are freed."""
        old_rows, old_padding = self._rows, self._padding
        self._rows = [next(self._ids) for _ in rows]
        self._padding = [old_padding[r] for r in rows]
        for source, child in zip(rows, self._rows):
            self.memory.fork(old_rows[source], child)
        for row in old_rows:
            self.memory.free(row)

    def _select_states(self, rows: Sequence[int]) -> None:
        """Apply the selection to the per-row states that layers keep outside blocks."""
        index = None
        for layer in self._state_layers():
            if index is None:
                index = torch.tensor(rows)
            layer.reorder_cache(index)

    def _state_layers(self) -> list[Any]:
        """Layers that hold a state outside blocks."""
        return [layer for layer in self.layers if type(layer) is not PagedLayer]

    # -- the Cache interface ------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write key_states [batch, num_kv_heads, num_new, head_dim] and value_states [..., v_head_dim] into blocks.

        Returns the dense view of all of this layer's K and V: [batch, num_kv_heads, length, head_dim] and
        [batch, num_kv_heads, length, v_head_dim].
        """
        if self._grows:
            while len(self.layers) <= layer_idx:
                self.layers.append(PagedLayer(self, len(self.layers)))
        elif layer_idx >= len(self.layers):
            raise ValueError(
                f"the model writes layer {layer_idx}, but this PagedKVCache was made for {len(self.layers)} layers: it "
                "belongs to another model; make one with PagedKVCache(model.config)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if layer_idx >= len(self.layers):
            return 0
        layer = self.layers[layer_idx]
        return layer.get_seq_length() if isinstance(layer, PagedLayer) else super().get_seq_length(layer_idx)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes a fork of row `beam_idx[i]`; unused rows are freed (SOSP'23 section 4.4)."""
        rows = beam_idx.tolist()
        if self._rows and rows != list(range(len(self._rows))):
            self.select_rows(rows)
        for layer in self._state_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = [r for r in range(len(self._rows)) for _ in range(repeats)]
        if rows:
            self.select_rows(rows)
            self._select_states(rows)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._rows:
            rows = torch.arange(len(self._rows))[indices.cpu()].tolist()
            self.select_rows(rows)
            self._select_states(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove `-tokens_to_remove` tokens from the end of every row (a positive value is the length to keep)."""
        tokens_to_remove = int(tokens_to_remove)  # transformers may pass a tensor, which += would change in place
        keep = self._length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, self._length)
        if keep < 0:
            raise ValueError(f"cannot crop {-tokens_to_remove} tokens from a cache of length {self._length}")
        for row, padding in zip(self._rows, self._padding):
            self.memory.crop(row, max(keep - padding, 0))
        self._length = keep
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.length = min(layer.length, keep)
            if type(layer) is not PagedLayer:
                layer.crop(min(tokens_to_remove, 0))

    def reset(self) -> None:
        """Remove every row and free its blocks; the pool keeps its memory."""
        for row in self._rows:
            self.memory.free(row)
        for layer in self._state_layers():
            layer.reset()
        self._forget()

    def _forget(self) -> None:
        self._rows, self._padding, self._length = [], [], 0
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.length = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, None]]:
        for layer in self.layers:
            yield getattr(layer, "keys", None), getattr(layer, "values", None), None

    def stats(self) -> MemoryStats:
        return self.memory.stats()

    @property
    def num_layers(self) -> int | None:
        """Number of layers that the config specifies; None if the cache was made without a config."""
        return None if self._grows else len(self.layers)

    def sizes_of(self, layer_idx: int) -> tuple[int, int, int] | None:
        """(num_kv_heads, head_dim, v_head_dim) of the layer's K/V; None if the layer has stored nothing."""
        if layer_idx not in self._pool:
            return None
        key, value = self._pool[layer_idx]
        return key.shape[2], key.shape[3], value.shape[3]

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of this class or of its memory does not hold."""
        self.memory.check_integrity()
        for row, padding in zip(self._rows, self._padding):
            assert self._manager.num_tokens(row) == max(self._length - padding, 0)

    # -- for the layers -----------------------------------------------------------------------------------------

    def _write(self, layer: PagedLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        batch, _, num_new, _ = key.shape
        if not self._rows:
            self.start_rows([0] * batch)
        if batch != len(self._rows):
            raise ValueError(f"update with a batch of {batch} on a cache of {len(self._rows)} rows")
        start, stop = layer.length, layer.length + num_new
        # The first layer of a forward appends the slots for all layers.
        if stop > self._length:
            try:
                self.append(stop - self._length)
            except OutOfBlocks as error:
                raise OutOfBlocks(error.needed, error.available, "the PagedKVCache is full; raise num_blocks") from None
        kv = self._pool.layer_for(layer.index, key.transpose(1, 2), value.transpose(1, 2))
        mapping = self._slots(start, stop, hole=-1).flatten().to(key.device, non_blocking=True)
        flat_key = key.transpose(1, 2).reshape(batch * num_new, *kv.key.shape[2:])
        flat_value = value.transpose(1, 2).reshape(batch * num_new, *kv.value.shape[2:])
        ops.write_kv(flat_key, flat_value, kv.key, kv.value, mapping, in_bounds=True)
        layer.length = stop

    def _slots(self, start: int, stop: int, *, hole: int) -> torch.Tensor:
        """Slots of positions `start` to `stop - 1` of every row, int64 [num_rows, stop - start]; `hole` at padding."""
        slots = torch.full((len(self._rows), stop - start), hole, dtype=torch.int64)
        for i, (row, padding) in enumerate(zip(self._rows, self._padding)):
            first = min(max(start, padding), stop)
            slots[i, first - start :] = torch.tensor(self._manager.slots(row, first - padding, stop - padding))
        return slots

    def _dense(self, layer: PagedLayer, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's K and V from position `start` on as [batch, num_kv_heads, length - start, head size], gathered.

        Padding reads as zeros.
        """
        kv = self._pool[layer.index]
        length, size = layer.length, self.memory.block_size
        if any(self._padding):
            index = self._slots(start, length, hole=-1).to(kv.key.device, non_blocking=True)
            hole = (index < 0)[..., None, None]
            index = index.clamp(min=0)
            dense_key, dense_value = (
                tensor.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).masked_fill_(hole, 0)
                for tensor in kv
            )
            return dense_key.transpose(1, 2).contiguous(), dense_value.transpose(1, 2).contiguous()
        first, last = start // size, -(-length // size)
        table = torch.tensor([list(self._manager.block_table(row)[first:last]) for row in self._rows])
        table = table.to(kv.key.device, non_blocking=True).flatten().long()
        span = slice(start - first * size, length - first * size)
        dense_key, dense_value = (
            tensor.index_select(0, table)
            .view(len(self._rows), (last - first) * size, *tensor.shape[2:])[:, span]
            .transpose(1, 2)
            .contiguous()  # like transformers' caches: some models call .view on it
            for tensor in kv
        )
        return dense_key, dense_value


class PagedLayer(CacheLayerMixin):
    """One layer's view of a PagedKVCache, with the length that it has written. The blocks belong to the cache.

    With a `sliding_window`, `update` returns what transformers' sliding layer would hold, and the mask sizes cover the
    same: the window of the first new token, and the new tokens.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedKVCache, index: int, *, sliding_window: int | None = None) -> None:
        self._cache = cache
        self.index = index
        self.sliding_window = sliding_window
        self.length = 0

    @property
    def is_sliding(self) -> bool:
        return self.sliding_window is not None

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    @property
    def keys(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, length, head_dim], gathered from the blocks at each access."""
        return self._cache._dense(self)[0] if self.length else None

    @property
    def values(self) -> torch.Tensor | None:
        """[batch, num_kv_heads, length, v_head_dim], gathered from the blocks at each access."""
        return self._cache._dense(self)[1] if self.length else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool allocates a layer when it is first written."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self._first_visible()
        self._cache._write(self, key_states, value_states)
        return self._cache._dense(self, start)

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


def _shows_tokens(kind: type[DynamicLayer]) -> bool:
    """Whether this kind of layer returns the K/V of the last tokens in order, as a PagedLayer does."""
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
    def adopt(layer: DynamicLayer, cache: PagedKVCache, index: int) -> PagedStateLayer:
        """Turn a fresh transformers layer into a paged one, in place."""
        layer.__class__ = _paged_class(type(layer))
        paged = cast(PagedStateLayer, layer)
        PagedLayer.__init__(paged, cache, index, sliding_window=getattr(layer, "sliding_window", None))
        return paged

    def _placeholder(self) -> torch.Tensor:
        device = self._cache._pool[self.index].key.device if self.length else None
        return torch.empty(self._cache.num_rows, 0, 0, 0, device=device)

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

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        # Two positional tensors are K and V; other states are passed by keyword.
        if kwargs:
            self._rest().lazy_initialization(*args, **kwargs)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        with self._kv_apart():
            self._rest().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        with self._kv_apart():
            self._rest().crop(tokens_to_remove)

    def reset(self) -> None:
        with self._kv_apart():
            self._rest().reset()


@functools.cache
def _paged_class(kind: type[DynamicLayer]) -> type:
    # No `layer_type`: transformers would register a class that has one as the layer class of every cache.
    return type(f"Paged{kind.__name__}", (PagedStateLayer, kind), {"_layer_type": None, "kind": kind.__name__})


def _layers_of(config: Any) -> list[Any]:
    """The cache layers that transformers itself would use for this config: full, sliding, recurrent or none."""
    decoder = config.get_text_config(decoder=True)
    return DynamicCache(config=decoder).layers
