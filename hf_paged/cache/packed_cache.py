"""PackedCache: what a model sees as `past_key_values` while one packed step `[1, num_tokens]` runs.

Each layer's update() hands the attention function a handle: to the step's K/V, and to the blocks where it is written to
and read back with what was there before.
Knows the step's metadata; never sequences.
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
    """Travels on the key tensor from `update` to the attention function: where this layer's K/V is.

    The first attention call of a step writes `new_kv`, this step's K and V [num_tokens, num_kv_heads, (v_)head_dim].
    `reads` counts the calls; a layer whose blocks nobody read computed attention its own way.
    """

    layer_idx: int
    pool: KVPool
    metadata: AttentionMetadata
    new_kv: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
    reads: int = 0
    sliding_window: int | None = None  # as the layer's attention last asked for
    chunk_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # what the layer passed to its attention beside tensors

    @property
    def kv(self) -> LayerKV:
        return self.pool[self.layer_idx]


class _PackedLayer(CacheLayerMixin):
    """Answers the questions that mask creation asks; holds nothing."""

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
        self.step: list[AttentionMetadata] = []  # one a group
        self.handles: list[LayerHandle] = []  # of this step, in order of update
        self._groups: dict[int, int] = {}
        self._positions = torch.zeros(0, dtype=torch.int64)
        self.numbers_tokens = False  # whether a layer has numbered its tokens by the length of the cache

    def begin_step(self, metadata: list[AttentionMetadata], positions: torch.Tensor) -> None:
        """positions int64 [num_tokens]: of the step's tokens in their sequences."""
        self.step = metadata
        self.handles = []
        self._positions = positions

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0  # for masks, which are patterns here

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:  # type: ignore[override]
        """0 for the model, which is given its positions. A layer that asks numbers the step's tokens itself, from
        this length on: it gets what to add to their index, int64 [num_tokens]."""
        if layer_idx is None:
            return 0
        self.numbers_tokens = True
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def group_of(self, layer_idx: int) -> int:
        """Which group of the memory, and so which metadata of the step, is the layer's."""
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
        if torch.is_autocast_enabled(key.device.type):  # gives K and V of several dtypes, and expects one to be chosen
            dtype = pool[layer_idx].key.dtype if layer_idx in pool else torch.get_autocast_dtype(key.device.type)
            key, value = key.to(dtype), value.to(dtype)
        pool.layer_for(layer_idx, key, value)
        handle = LayerHandle(layer_idx, pool, self.step[group_index], (key, value))
        self.handles.append(handle)
        setattr(key_states, HANDLE, handle)
        return key_states, value_states
