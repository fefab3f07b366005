"""PackedCache: what a model sees as `past_key_values` while one packed step `[1, num_tokens]` runs.

Each layer's update() attaches a handle to the key. Through it the attention function finds the step's new K/V and the
blocks to which it is written and from which all K/V is read. Knows the step's metadata; never sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_paged.cache.kv_pool import KVPool, LayerKV
from hf_paged.cache.memory import PagedMemory
from hf_paged.kernels.metadata import AttentionMetadata

HANDLE = "_hf_paged_handle"


@dataclass(slots=True)
class LayerHandle:
    """Where a layer's K/V is; an attribute of the key tensor that `update` returns to the layer.

    The first attention call of a step writes `new_kv`, this step's K and V [num_tokens, num_kv_heads, (v_)head_dim].
    `reads` counts the attention calls: 0 means that the layer bypassed the paged attention function.
    """

    layer_idx: int
    pool: KVPool  # not the tensors: a handle outlives its step, and must not keep them when the pool is released
    metadata: AttentionMetadata
    new_kv: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
    reads: int = 0
    sliding_window: int | None = None  # of the layer's last attention call
    chunk_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # arguments of that call other than tensors

    @property
    def kv(self) -> LayerKV:
        return self.pool.layers[self.layer_idx]


class _PackedLayer(CacheLayerMixin):
    """Provides the attributes that mask creation reads; holds no K/V."""

    is_sliding = False
    is_compileable = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError

    def update(self, key_states, value_states, *args, **kwargs):  # type: ignore[no-untyped-def]
        raise NotImplementedError("a packed step writes through PackedCache.update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


class PackedCache(Cache):
    """The `past_key_values` of packed steps over one PagedMemory. Set `step` before each forward."""

    def __init__(self, memory: PagedMemory, num_layers: int) -> None:
        super().__init__(layers=[_PackedLayer() for _ in range(num_layers)])
        self.memory = memory
        self.step: list[AttentionMetadata] = []  # one per group
        self.handles: list[LayerHandle] = []  # of this step, in order of update
        self._groups: dict[int, int] = {}
        self._positions = torch.zeros(0, dtype=torch.int64)
        self.numbers_tokens = False  # whether a layer has derived positions from the length of the cache

    def begin_step(self, metadata: list[AttentionMetadata], positions: torch.Tensor) -> None:
        """Set the step's metadata, one record per group, and its tokens' positions, int64 [num_tokens]."""
        self.step = metadata
        self.handles = []
        self._positions = positions

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0  # only masks use it, and a packed step's masks are patterns

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:  # type: ignore[override]
        """0 for the model, which receives `position_ids`.

        A layer that calls this derives positions as length + index. It gets, for each token of the step, the position
        minus the index: int64 [num_tokens].
        """
        if layer_idx is None:
            return 0
        self.numbers_tokens = True
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def group_of(self, layer_idx: int) -> int:
        """Index of the layer's group in the memory, and so of its metadata in `step`."""
        group_index = self._groups.get(layer_idx)
        if group_index is None:
            group_index = self._groups[layer_idx] = self.memory.group_index(layer_idx)
        return group_index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key_states [1, num_kv_heads, num_tokens, head_dim], value_states likewise, of this step's tokens only.

        Returns the same tensors, the key carrying a LayerHandle.
        """
        group_index = self.group_of(layer_idx)
        key, value = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        pool = self.memory.groups[group_index].pool
        if torch.is_autocast_enabled(key.device.type):  # K and V may have different dtypes; attention expects one
            dtype = pool[layer_idx].key.dtype if layer_idx in pool else torch.get_autocast_dtype(key.device.type)
            key, value = key.to(dtype), value.to(dtype)
        if layer_idx not in pool.layers:
            pool.layer_for(layer_idx, key, value)
        handle = LayerHandle(layer_idx, pool, self.step[group_index], (key, value))
        self.handles.append(handle)
        setattr(key_states, HANDLE, handle)
        return key_states, value_states
