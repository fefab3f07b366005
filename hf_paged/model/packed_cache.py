"""PackedCache: what a model gets as its cache in packed steps, over blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.attention import HANDLE, LayerHandle, MaskLayer, token_rows
from hf_paged.kernels.arguments import NewKV
from hf_paged.kernels.metadata import AttentionMetadata, metadata_on


class PackedCache(Cache):
    """The cache that the model gets in packed steps, over one PagedMemory. Call `begin_step` before each forward.

    If the rows of a forward are sequences, the model gets a PagedKVCache, whose `update` calls that of this class.
    """

    reads_other_tables = False

    def __init__(self, memory: PagedMemory, num_layers: int) -> None:
        super().__init__(layers=[MaskLayer() for _ in range(num_layers)])
        self.memory = memory
        self.step: list[AttentionMetadata] = []  # one per group, on the device of the inputs
        self._elsewhere: dict[torch.device, list[AttentionMetadata]] = {}  # the same for layers on other devices
        self.handles: list[LayerHandle] = []  # of this step's updates, in their order
        self._groups: dict[int, int] = {}
        self._shared: dict[Any, torch.Tensor] = {}
        self.positions = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._places: torch.Tensor | None = None
        self.numbers_tokens = False  # True once the model has derived positions from the length of the cache
        self.takes_positions = True  # the model's forward has a parameter for positions

    def begin_step(
        self, metadata: list[AttentionMetadata], positions: torch.Tensor, places: torch.Tensor | None = None
    ) -> None:
        """Set the step's metadata, one record per group, and its tokens' positions, int64 [num_tokens]. places: see
        `token_rows`."""
        self.step = metadata
        self._elsewhere = {}
        self._shared = {}
        self.handles = []
        self.positions, self._places = positions, places

    def get_query_offset(self, layer_idx: int = 0) -> int:
        # Only masks depend on it, and in a packed step a MaskPattern, which needs no offset, replaces each mask.
        return 0

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:  # type: ignore[override]
        """Return 0 to a model that receives `position_ids`.

        Other models, and single layers, compute a token's position as this length plus the token's index in the input.
        They get the position of each token of the step minus its index: int64 [num_tokens].
        """
        if layer_idx is None and self.takes_positions:
            return 0
        self.numbers_tokens = True
        return self.positions - torch.arange(len(self.positions), dtype=torch.int64, device=self.positions.device)

    def once(self, key: Hashable, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the value of `key` in this step, computed for the first layer that asks and shared by the rest."""
        if key not in self._shared:
            self._shared[key] = compute()
        return self._shared[key]

    def group_of(self, layer_idx: int) -> int:
        """Index of the layer's group in the memory, and so of its metadata in `step`."""
        group_index = self._groups.get(layer_idx)
        if group_index is None:
            group_index = self._groups[layer_idx] = self.memory.group_index(layer_idx)
        return group_index

    def _metadata_for(self, group_index: int, device: torch.device) -> AttentionMetadata:
        """Return the group's metadata on the device of a layer. Each device gets the step's metadata once."""
        own = self.step[group_index]
        if own.seq_lens.device == device:
            return own
        if device not in self._elsewhere:
            self._elsewhere[device] = metadata_on(self.step, device)
        return self._elsewhere[device][group_index]

    def handle_for(self, layer_idx: int, device: torch.device) -> LayerHandle:
        """Return a handle for a layer whose K and V of this step are already in its blocks."""
        group_index = self.group_of(layer_idx)
        pool, metadata = self.memory.pool, self._metadata_for(group_index, device)
        handle = LayerHandle(layer_idx, pool, metadata, None)
        self.handles.append(handle)
        return handle

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attach a LayerHandle to the keys, by which our attention function finds the layer's blocks.

        key_states, value_states: of this step's tokens only, [1, num_kv_heads, num_tokens, head_dim], or [num_rows,
        num_kv_heads, length, head_dim] if the rows are sequences. Returns both tensors.
        """
        group_index = self.group_of(layer_idx)
        key, value = token_rows(key_states, self._places), token_rows(value_states, self._places)
        pool = self.memory.pool
        # Under autocast K and V may have different dtypes, and attention expects one.
        if torch.is_autocast_enabled(key.device.type):
            dtype = pool.written_in(layer_idx)[0] if layer_idx in pool else torch.get_autocast_dtype(key.device.type)
            key, value = key.to(dtype), value.to(dtype)
        if layer_idx not in pool.layers:
            pool.layer_for(layer_idx, key, value)
        metadata = self._metadata_for(group_index, key.device)
        handle = LayerHandle(layer_idx, pool, metadata, NewKV(key, value), places=self._places)
        self.handles.append(handle)
        setattr(key_states, HANDLE, handle)
        return key_states, value_states

    def refuse_unread(self, model: Model) -> None:
        """Raises UnsupportedModelError, after a forward, if a layer has not attended through our functions."""
        unread = [handle.layer_idx for handle in self.handles if handle.reads == 0]
        if unread or not self.handles:
            raise UnsupportedModelError(
                f"{type(model).__name__} computes attention with code of its own in layer(s) {unread or 'all'}; "
                "this model needs the dense view"
            )
