"""PagedKVCache: a transformers Cache whose K/V lives in blocks.

Rows of a batch are sequences of one PagedMemory; reorder and repeat fork and free block tables. `update` returns
tensors gathered from the blocks (the dense view), so that every model's own attention runs unchanged. Knows rows; never
requests or generation settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache

from hf_paged.cache.cache_of_calls import CacheOfCalls, copied
from hf_paged.cache.memory import MemoryStats, PagedMemory
from hf_paged.cache.paged_layers import PagedLayer
from hf_paged.config import CacheConfig, KVDtype
from hf_paged.kernels.quantised import storage_of


class PagedKVCache(CacheOfCalls):
    """Keep the K/V of a batch in blocks: a drop-in cache of transformers for `generate` and for hand-written loops.

    Rows share blocks until they differ (PagedAttention, sections 4.3 and 4.4). Besides the Cache interface it has
    `fork(row)`, `append(num_tokens)`, `free(row)` and `stats()`. When a bounded cache is full, OutOfBlocks is raised
    and nothing has changed.

    Invariants: all rows have the same logical length, `get_seq_length()`. Row r stores its last `length - padding[r]`
    positions; its first `padding[r]` are left padding, which takes no memory and reads as zeros.

    Args:
        config: The model's config, which says what its layers keep. None = layers are added as the model writes them.
        block_size: Tokens in a block.
        num_blocks: Blocks at most. None = as many as the tokens need.
        key_dtype: "int8" or "fp8" stores K in eight bits (see `CacheConfig`). None = as the model computes it.
        value_dtype: The same for V.
        memory: For hf_paged itself: blocks that already exist, in place of those that the arguments before describe.

    Raises:
        ValueError: If a size or dtype is out of its range, or `config` is no config of a model.

    Example:
        For a model, make it with `PagedKVCache(model.config)` and pass it as the model's cache.

        ```python
        import torch
        from hf_paged import PagedKVCache

        cache = PagedKVCache(num_blocks=32)
        prompt = torch.rand(1, 2, 40, 64)  # [batch, num_kv_heads, num_new, head_dim]
        cache.update(prompt, prompt, layer_idx=0)
        cache.fork(0)  # a second row with the same three blocks
        token = torch.rand(2, 2, 1, 64)
        keys, values = cache.update(token, token, layer_idx=0)  # copies the last block, which both rows now write to
        assert keys.shape == (2, 2, 41, 64)
        assert (cache.stats().blocks_shared, cache.stats().cow_copies) == (2, 1)
        ```
    """

    own_positions = ""
    """A reason in words why positions of the rows are not numbers of tokens; "" if they are."""

    def __init__(
        self,
        config: Any = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        key_dtype: KVDtype | None = None,
        value_dtype: KVDtype | None = None,
        memory: PagedMemory | None = None,
    ) -> None:
        CacheConfig(
            block_size=block_size, num_blocks=num_blocks, key_dtype=key_dtype, value_dtype=value_dtype
        )  # checks
        if config is not None and not hasattr(config, "get_text_config"):
            kind = type(config).__name__
            raise ValueError(f"config is a {kind}; the config of a model is needed: PagedKVCache(model.config)")
        storage = storage_of(key_dtype, value_dtype)
        memory = memory or PagedMemory(block_size, storage=storage, growable=True, max_blocks=num_blocks)
        super().__init__(memory, None if config is None else _layers_of(config))

    # -- rows ---------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows of the batch; 0 for an empty cache, and while a call has them."""
        return len(self._rows)

    @property
    def batch_size(self) -> int:
        """Rows of the batch as transformers asks for them; -1 for an empty cache."""
        return len(self._rows) or -1

    @property
    def padding(self) -> list[int]:
        """Left padding of each row in tokens; it takes no memory."""
        return list(self._rows.padding)

    def fork(self, row: int) -> int:
        """Add a last row that shares all blocks of another one (PagedAttention, section 4.4).

        It copies no K/V. A block is copied when one of its rows writes to it.

        Args:
            row: Index of the row to share.

        Returns:
            The index of the new row.

        Raises:
            IndexError: If there is no such row.

        Example:
            ```python
            row = cache.fork(0)
            assert row == 2 and cache.num_rows == 3
            ```
        """
        self._rows.check(row)
        # The states first: they may fail, a fork of blocks does not.
        with self._all_or_nothing():
            self._select_states([*range(len(self._rows)), row])
            self._rows.fork(row)
        return len(self._rows) - 1

    def append(self, num_tokens: int) -> None:
        """Make room for more tokens in every row; `update` also does this itself.

        Args:
            num_tokens: Tokens for each row, 0 or more.

        Raises:
            OutOfBlocks: If a bounded cache has too few blocks. Nothing has changed then.
            ValueError: If `num_tokens` is negative; use `crop` to remove tokens.

        Example:
            ```python
            cache.append(1)  # slots for the next update
            token = torch.rand(3, 2, 1, 64)
            cache.update(token, token, layer_idx=0)
            ```
        """
        self._rows.append(num_tokens)

    def free(self, row: int) -> None:
        """Remove a row; the rows after it move up by one. Blocks that no other row shares are freed.

        Args:
            row: Index of the row.

        Raises:
            IndexError: If there is no such row.

        Example:
            ```python
            cache.free(2)
            assert cache.num_rows == 2
            ```
        """
        self._rows.check(row)
        self.select_rows([r for r in range(len(self._rows)) if r != row])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Make row i a fork of the former row `rows[i]`; rows that are not named are freed.

        Args:
            rows: Indices of former rows, each any number of times. Empty = remove all rows.

        Raises:
            IndexError: If there is no such row.

        Example:
            ```python
            cache.select_rows([1, 1])  # both rows continue the former row 1
            ```
        """
        for row in rows:
            self._rows.check(row)
        if not rows:
            self.reset()
            return
        with self._all_or_nothing():
            self._select_states(rows)
            self._rows.select(rows)

    # -- the Cache interface ------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new K and V of a layer into blocks, and return all of its K and V.

        Args:
            key_states: New K, [batch, num_kv_heads, num_new, head_dim].
            value_states: New V, [batch, num_kv_heads, num_new, v_head_dim].
            layer_idx: Index of the layer.
            *args: What transformers passes to a layer's own `update`.
            **kwargs: The same, by name.

        Returns:
            The dense view of the layer, gathered from its blocks, as two tensors [batch, num_kv_heads, length,
            head_dim] and [batch, num_kv_heads, length, v_head_dim].

        Raises:
            ValueError: If the model has more layers than the config that the cache was made for.
            OutOfBlocks: If a bounded cache is full. Nothing has changed then; raise `num_blocks`.
        """
        # Without a config, the model's first forward shows how many layers there are.
        if self._grows:
            self._add_layers(layer_idx + 1)
        elif layer_idx >= len(self.layers):
            raise ValueError(
                f"the model writes layer {layer_idx}, but this PagedKVCache was made for {len(self.layers)} layers: it "
                "belongs to another model; make one with PagedKVCache(model.config)"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the logical length of all rows, padding included.

        Args:
            layer_idx: The layer that is asked. Layers differ only within a forward.

        Returns:
            Tokens; 0 for a layer that has stored nothing.

        Example:
            ```python
            assert cache.get_seq_length() == 42
            ```
        """
        if layer_idx >= len(self.layers):
            return 0
        layer = self.layers[layer_idx]
        return layer.get_seq_length() if isinstance(layer, PagedLayer) else super().get_seq_length(layer_idx)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row i a fork of row `beam_idx[i]`, and free unused rows, as beam search does (PagedAttention, section
        4.4).

        Args:
            beam_idx: Int tensor [num_rows] of former rows.

        Example:
            ```python
            cache.reorder_cache(torch.tensor([0, 0]))
            ```
        """
        rows = beam_idx.tolist()
        if self.has_only_states:
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        elif self._rows and rows != list(range(len(self._rows))):
            self.select_rows(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make each row into several rows beside each other, which share its blocks.

        Args:
            repeats: Rows for each row, at least 1.

        Raises:
            ValueError: If `repeats` is less than 1; `reset` removes all rows.

        Example:
            ```python
            cache.batch_repeat_interleave(2)
            assert cache.num_rows == 4
            ```
        """
        if repeats < 1:
            raise ValueError(f"repeats={repeats}: at least 1 is needed; use reset() to remove all rows")
        if self.has_only_states:
            super().batch_repeat_interleave(repeats)
        elif self._rows:
            self.select_rows([r for r in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows and free the others.

        Args:
            indices: Tensor of numbers of rows, or bool [num_rows].

        Example:
            ```python
            cache.batch_select_indices(torch.tensor([0, 2]))
            assert cache.num_rows == 2
            ```
        """
        if self.has_only_states:
            super().batch_select_indices(indices)
        elif self._rows:
            rows = torch.arange(len(self._rows), dtype=torch.int64, device="cpu")
            self.select_rows(rows[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of every row.

        Args:
            tokens_to_remove: 0 or less: minus the number of tokens to remove. Positive: the length to keep, as older
                transformers have it.

        Raises:
            ValueError: If there are fewer tokens.

        Example:
            ```python
            cache.crop(-10)
            assert cache.get_seq_length() == 32
            ```
        """
        # transformers may pass a tensor, which += would change in place.
        tokens_to_remove = int(tokens_to_remove)
        length = self._rows.length
        keep = length + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, length)
        if keep < 0:
            raise ValueError(f"cannot crop {-tokens_to_remove} tokens from a cache of length {length}")
        with self._all_or_nothing():
            # First, because a recurrent layer that does not record its past raises.
            for layer in self._state_layers():
                layer.crop(keep - length)
            self._rows.crop(keep)
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.length = min(layer.length, keep)

    def reset(self) -> None:
        """Remove every row and free its blocks; the pool keeps its memory. The next rows may be any number.

        Example:
            ```python
            cache.reset()
            assert cache.num_rows == 0
            ```
        """
        self._drop_copies()
        layers = self._state_layers()
        recording = [layer for layer in layers if getattr(layer, "record_past", False)]
        # transformers' layers would keep tensors of the former number of rows.
        self._restore([copied(state) for state in self._fresh])
        for layer in recording:
            layer.activate_past_recording()
        self._rows.clear()
        self._forget()

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, None]]:
        for layer in self.layers:
            yield getattr(layer, "keys", None), getattr(layer, "values", None), None

    def stats(self) -> MemoryStats:
        """Return what the cache holds at this moment.

        Returns:
            A record with `num_blocks`, `blocks_used`, `blocks_shared`, `cow_copies`, `bytes_reserved`, `bytes_used` and
            `bytes_filled`, among others.

        Example:
            ```python
            print(cache.stats().blocks_used, cache.stats().bytes_reserved)
            ```
        """
        return self.memory.stats()

    @property
    def num_layers(self) -> int | None:
        """Number of layers that the config specifies; None if the cache was made without a config."""
        return None if self._grows else self._num_configured

    def sizes_of(self, layer_idx: int) -> tuple[int, int, int] | None:
        """Return (num_kv_heads, head_dim, v_head_dim) of a layer; None if it has stored nothing."""
        if not self._rows.has(layer_idx):
            return None
        kv = self._rows.memory.pool[layer_idx]
        return kv.key.shape[2], kv.key.shape[3], kv.value.shape[3]

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of this class or of its memory does not hold."""
        self._rows.check_integrity()


_UPDATES: dict[type, Any] = {
    kind: vars(kind)["update"]
    for kind in vars(cache_utils).values()
    if isinstance(kind, type) and "update" in vars(kind)
}


def plain_cache(config: Any) -> Any:
    """The cache of plain `generate` with the methods that transformers has defined: blocks do without those that others
    have put in their place, so a trial compares without them too."""
    cache: Any = DynamicCache(config=config)
    for each in (cache, *cache.layers):
        owner = next((kind for kind in type(each).__mro__ if kind in _UPDATES), None)
        if owner is not None and type(each).update is not _UPDATES[owner]:
            vars(each)["update"] = MethodType(_UPDATES[owner], each)
    return cache


def _layers_of(config: Any) -> list[Any]:
    """The cache layers that transformers itself would use for this config: full, sliding, recurrent or none."""
    decoder = config.get_text_config(decoder=True)
    return DynamicCache(config=decoder).layers
