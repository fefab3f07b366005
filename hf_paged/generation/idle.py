"""Idle K/V memory of paged generate calls on one model, kept for later calls within bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.cache.layers import Layout
from hf_paged.cache.memory import PagedMemory
from hf_paged.config import CacheConfig
from hf_paged.kernels.quantised import storage_of
from hf_paged.locks import usable_after_fork
from hf_paged.model.devices import device_of
from hf_paged.model.state import state_of

Kind = tuple[Any, ...]  # what the model's K/V is made of
MemoryKey = tuple[Kind, CacheConfig, Layout]
"""Kind, config, layout: memories of one key may serve one another's calls."""

# Pools of one model differ by config and layout only, of which a program uses few.
MAX_POOLS = 4
# This memory stays taken between calls, so it is less than most models' weights. Chosen without a measurement.
MAX_BYTES = 1 << 30
"""Limit of the pools that are kept besides the one used last. That one is always kept, because the next call is most
likely of the same kind."""


def kind_of(model: Model) -> Kind:
    device = device_of(model)
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return model.dtype, device, autocast, state_of(model).weights.structure


class IdlePools:
    """At most MAX_POOLS pools, and MAX_BYTES besides the one used last; least recently used ones go first.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._pools: dict[MemoryKey, PagedMemory] = {}  # by last use, the last one at the end
        self._lock = usable_after_fork(threading.Lock())

    def __iter__(self) -> Iterator[PagedMemory]:
        """Least recently used first."""
        return iter(list(self._pools.values()))

    def take(self, key: MemoryKey) -> PagedMemory:
        """An idle pool of that key, now the caller's, or a new one without a limit. Pools of another kind are
        forgotten."""
        with self._lock:
            memory = self._pools.pop(key, None)
            for other in [other for other in self._pools if other[0] != key[0]]:
                del self._pools[other]  # made for the model's former dtype, device or layers
        if memory is not None:
            return memory
        _, config, layout = key
        storage = storage_of(config.key_dtype, config.value_dtype)
        return PagedMemory(config.block_size, layout=layout, storage=storage, growable=True)

    def num_bytes(self, key: MemoryKey) -> dict[torch.device, int]:
        """Size on each device of the idle pool of that key, which `take` would return; empty if there is none."""
        with self._lock:
            memory = self._pools.get(key)
        return {} if memory is None else memory.nbytes_by_device

    def give_back(self, key: MemoryKey, memory: PagedMemory) -> None:
        """Keep a pool that no sequence uses any more."""
        with self._lock:
            self._pools.pop(key, None)
            self._pools[key] = memory
            # The pool of this call does not count, or one larger than MAX_BYTES would be made anew for each call.
            others = sum(other.nbytes for other in self._pools.values()) - memory.nbytes
            while len(self._pools) > MAX_POOLS or others > MAX_BYTES:
                others -= self._pools.pop(next(iter(self._pools))).nbytes
