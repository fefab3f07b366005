"""Sizes of an engine's K/V memory, measured on the model itself and never guessed from its config."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.host_memory import host_memory
from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.swap import HostPool, bytes_per_host_block
from hf_paged.config import CacheConfig, SchedulerConfig, Switches
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.executors import Beside, Ranks, in_one_order, measured, ranks_of
from hf_paged.generation.engine.room import RETAINED_FRACTION, DeviceBytes, blocks_in_memory, is_default_size
from hf_paged.model.devices import device_of
from hf_paged.model.heads import with_head
from hf_paged.model.report import SupportReport
from hf_paged.model.state import unwrapped
from hf_paged.model.support import draws_dropout, drops_cache, refuse_unsupported
from hf_paged.sockets import Executor

# The share that a pool on a CPU takes by default (`room.DEFAULT_FRACTION`). Chosen without a measurement.
SWAP_FRACTION = 0.3
"""Share of the free host memory for swapped blocks, at most, when the caller gives no size."""

# 256 sequences of 16,384 tokens. Configs name lengths of a million tokens and more, which no batch reaches. Chosen
# without a measurement.
MAX_DEFAULT_TOKENS = 1 << 22
"""Tokens, at most, for which a pool of the default size has blocks."""

log = logging.getLogger("hf_paged")


@dataclass(frozen=True, slots=True)
class OpenedMemory:
    """The executor of a model with its memory, and the swap space: all that an engine needs to run.

    no_prefixes: why prefixes cannot be cached, "" if they can. beside: what sequences keep besides K/V. ranks: the
    other processes with parts of the model, if it is tensor-parallel.
    """

    executor: Executor
    host_manager: BlockManager | None
    host_pool: HostPool | None
    no_prefixes: str
    beside: Beside
    report: SupportReport
    ranks: Ranks | None = None

    def fits(self, report: SupportReport) -> bool:
        """Return True if a packed model of this report can continue with this executor and its memory."""
        return self.executor.is_packed and _kept_by(report) == _kept_by(self.report)

    def seats(self, asked: SchedulerConfig) -> int | None:
        """`max_num_seqs`, if that is less than the caller asked for."""
        most = self.beside.max_num_seqs
        return most if most < asked.max_num_seqs else None

    def usable(self, asked: SchedulerConfig, config: SchedulerConfig) -> SchedulerConfig:
        """`config` without what this model cannot do. Raises ValueError if `asked`, the caller's, insists on it."""
        if self.no_prefixes:
            if asked.prefix_caching or asked.prefix_eviction != "lru":
                given = "caching=True" if asked.prefix_caching else f"eviction={asked.prefix_eviction!r}"
                raise ValueError(f"prefix_{given}: {self.no_prefixes}, so that no prefix can be kept; leave it out")
            config = replace(config, prefix_caching=False)
        config = self.beside.limited(config)
        if asked.async_scheduling and not self.executor.is_packed:
            raise ValueError(
                "async_scheduling=True: the model does not run packed (hf_paged.check says why); leave it out"
            )
        if not self.executor.is_packed or self.ranks is not None:
            config = replace(config, async_scheduling=False)
        return config


def open_memory(
    model: Model,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    switches: Switches,
) -> OpenedMemory:
    """Bind the model to a memory of the configured size.

    Raises UnsupportedModelError, or ValueError if the memory holds no block.
    """
    model = generating_model(model)
    if drops_cache(model):
        raise ValueError(
            "gradient checkpointing is on in training mode, where a model may keep no K/V; call model.eval() first"
        )
    refuse_unsupported(model, by_engine=True)
    if model.training and draws_dropout(model):
        raise ValueError("the model is in training mode, where dropout makes results random; call model.eval() first")
    executor, report, tried = measured(model, cache_config, scheduler_config, switches)
    if scheduler_config.batch_invariant:
        executor.one_order = in_one_order(executor, scheduler_config, tried)
    # Ranks start threads, which only `close` ends. So everything that needs no ranks and may raise comes before.
    ranks = ranks_of(model)
    try:
        shares = Shares(executor, cache_config, scheduler_config)
        host_blocks = shares.give(ranks) if executor.memory.groups else 0
    except BaseException:
        if ranks is not None:
            ranks.close(is_done=False)
        raise
    memory = executor.memory
    host_manager, host_pool = None, None
    if host_blocks:
        host_manager = BlockManager(BlockAllocator(host_blocks), cache_config.block_size, groups=memory.groups)
        host_pool = HostPool(memory.pool, host_blocks)
    no_prefixes = "" if executor.one_order is not None else executor.no_prefixes
    if not no_prefixes:
        shares.beside.choose_rules()
    executor.is_fixed = ranks is None  # ranks cannot agree on a step once it has begun
    return OpenedMemory(executor, host_manager, host_pool, no_prefixes, shares.beside, report, ranks)


def _kept_by(report: SupportReport) -> tuple[object, ...]:
    """Return all that the memory of a model depends on."""
    return report.native, report.gathers, report.native_length, [replace(layer, reason="") for layer in report.layers]


class Shares:
    """Shares of the memory of an executor for K/V, and for what sequences keep besides."""

    def __init__(self, executor: Executor, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        self._model, self._memory, self._pool = executor.model, executor.memory, executor.memory.pool
        self._viewed_tokens = executor.viewed_tokens
        self._cache, self._scheduler = cache, scheduler
        self.beside = Beside(executor, cache, scheduler)

    def give(self, ranks: Ranks | None) -> int:
        """Give the memory as many blocks as fit on every rank; returns the number of host blocks."""
        cache, preemption, allocator = self._cache, self._scheduler.preemption, self._memory.manager.allocator
        smallest: Callable[[Callable[[], int]], int] = (lambda call: call()) if ranks is None else ranks.smallest
        sizes = self._pool.bytes_per_block_by_device
        bytes_per_block = sum(sizes.values())
        num_blocks = smallest(self.num_blocks)
        self.beside.check(num_blocks, bytes_per_block)
        host_blocks = smallest(lambda: self._num_host_blocks(num_blocks))
        # Reported first, because a pool that is too large may get the process killed.
        _report_size(cache, num_blocks, sizes)
        _resize(self._pool, num_blocks, bytes_per_block)
        allocator.restart(num_blocks)  # the forward that was measured may have needed more
        if is_default_size(cache) and device_of(self._model).type == "cpu":
            allocator.touch_limit = int(num_blocks * RETAINED_FRACTION)
        swaps = preemption == "swap" or (cache.swap_bytes and preemption == "auto")
        if swaps and not host_blocks:
            raise ValueError(
                f"swap_memory={cache.swap_memory!r} holds no block of {bytes_per_block} bytes, so that "
                f"preemption={preemption!r} has no room to swap to; give it more, or use preemption='recompute'"
            )
        return host_blocks

    def num_blocks(self) -> int:
        cache, num_groups = self._cache, len(self._memory.groups)
        if cache.num_blocks is not None:
            return cache.num_blocks * num_groups
        taken = self.beside.taken
        if cache.memory_bytes is None:  # a size that is given is for what stays
            views = self._view_sizes()
            taken = {device: taken.get(device, 0) + views.get(device, 0) for device in {**taken, **views}}
        num_blocks = blocks_in_memory(cache, self.beside.block_sizes, taken=taken)
        if cache.memory is None and cache.memory_fraction is None:
            seqs = self._scheduler.max_num_seqs  # a full batch of sequences of the maximum length needs no more
            most = (-(-min(self._most_tokens(), MAX_DEFAULT_TOKENS) // self._memory.block_size) + seqs) * num_groups
            num_blocks = min(num_blocks, most + self.beside.most_blocks)
        return num_blocks

    def _view_sizes(self) -> DeviceBytes:
        """Bytes on each GPU of the K/V that a decode forward gathers for the attention of one layer, and of its copy in
        another order. Layers gather in turn. The measured forward was a prompt's, which gathers nothing.
        """
        sizes: dict[torch.device, int] = {}
        for index, (key, value, _) in self._pool.layers.items() if self._viewed_tokens else ():
            if key.device.type == "cuda":
                elements = zip((key, value), self._pool.written_in(index))
                size = 2 * sum(each[0, 0].numel() * dtype.itemsize for each, dtype in elements)
                positions = min(self._most_tokens(), self._viewed_tokens)
                sizes[key.device] = max(sizes.get(key.device, 0), size * positions)
        return sizes

    def _most_tokens(self) -> int:
        """Tokens of a full batch of sequences of the maximum length."""
        config = self._model.config.get_text_config(decoder=True)
        return self._scheduler.max_num_seqs * int(getattr(config, "max_position_embeddings", None) or 1 << 16)

    def _num_host_blocks(self, num_blocks: int) -> int:
        if self._scheduler.preemption == "recompute":
            return 0
        bytes_per_block = bytes_per_host_block(self._pool)
        if self._cache.swap_bytes is not None:
            return self._cache.swap_bytes // bytes_per_block
        return min(num_blocks, int(host_memory().available * SWAP_FRACTION) // bytes_per_block)


def _resize(pool: KVPool, num_blocks: int, bytes_per_block: int) -> None:
    try:
        pool.resize(num_blocks)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's, from the host's allocator or for sizes beyond 64 bits
        raise ValueError(
            f"num_blocks={num_blocks}: a K/V pool of {_gib(num_blocks * bytes_per_block)} cannot be allocated; give "
            "the cache a smaller num_blocks or memory"
        ) from error


def generating_model(model: Model) -> Any:
    """Return the transformers model that a PEFT wrapper generates through, or labels with a head of its own."""
    base = unwrapped(model)
    if base is not model and getattr(model.active_peft_config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            "prompt-learning adapters change the inputs of generate; merge or unload the adapter"
        )
    return with_head(base)


def _report_size(cache_config: CacheConfig, num_blocks: int, sizes: DeviceBytes) -> None:
    """Log the size of the pool. Warn if the host cannot hold it, because the allocation itself does not fail."""
    parts = ", ".join(f"{_gib(num_blocks * size)} on {device}" for device, size in sizes.items())
    log.info("K/V pool of %d blocks of %d tokens: %s", num_blocks, cache_config.block_size, parts)
    size = num_blocks * sizes.get(torch.device("cpu"), 0)
    if size > (available := host_memory().available):
        warnings.warn(
            f"the K/V pool of {_gib(size)} is larger than the {_gib(available)} of memory that this process may still "
            "take; it may be killed as the pool fills: give a smaller num_blocks or memory",
            RuntimeWarning,
            stacklevel=2,
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
