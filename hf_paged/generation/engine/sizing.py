"""Sizes of an engine's K/V memory, measured on the model itself and never guessed from its config."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.checkpoints import UNPINNED, CheckpointRules
from hf_paged.cache.host_memory import host_memory
from hf_paged.cache.kv_pool import KVPool
from hf_paged.cache.layers import FULL, NOTHING, WHOLE, Kind, LayerSize, Layout, layout_of
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.swap import HostPool, bytes_per_host_block
from hf_paged.config import CacheConfig, SchedulerConfig, Switches
from hf_paged.errors import UnsupportedModelError
from hf_paged.fused.cpu.one_order import OneOrder
from hf_paged.fused.overrides import TRIAL_TOKENS, overrides_for_engine, overrides_for_rows
from hf_paged.generation.engine.encoders import EncoderTables
from hf_paged.generation.engine.media_memory import MediaMemory
from hf_paged.generation.engine.ranks import Ranks, num_ranks, ranks_of
from hf_paged.generation.engine.state_memory import StateMemory
from hf_paged.kernels import ops
from hf_paged.kernels.quantised import storage_of
from hf_paged.model.adapters import without_adapters
from hf_paged.model.devices import device_of
from hf_paged.model.encoder_rows import EncoderRows, EngineModel
from hf_paged.model.foreign import bare_copy, foreign_code
from hf_paged.model.media import takes_media
from hf_paged.model.packed import PackedModel
from hf_paged.model.row_trial import bind_rows, is_other_by_token, rows_that_differ
from hf_paged.model.rows import VIEWED_TOKENS, Part, RowModel
from hf_paged.model.state import unwrapped
from hf_paged.model.stood_in_for import without_modes
from hf_paged.model.support import (
    LayerSupport,
    SupportReport,
    draws_dropout,
    drops_cache,
    examine,
    refuse_unsupported,
    rotary_limit,
)
from hf_paged.sockets import SideMemory

DEFAULT_FRACTION = {"cuda": 0.9, "cpu": 0.3}
"""Share of the free memory for K/V when the caller gives no size. Host memory is shared with other programs; pages
that no sequence has used cost nothing there."""

SWAP_FRACTION = 0.3
"""Share of the free host memory for swapped blocks, at most, when the caller gives no size."""

RETAINED_FRACTION = 1 / 8
"""Share of a pool of the default size that cached prefixes may fill on a CPU. Beyond it they are evicted before a block
is touched for the first time, so that a server takes little more memory than its running requests need. In a pool whose
size the caller gave, cached prefixes may fill all of it."""

CHECKPOINTS = 1
"""Checkpoints for each sequence of a step that there is always room for, with prefix caching, beside UNPINNED."""

log = logging.getLogger("hf_paged")

MAX_DEFAULT_TOKENS = 1 << 22

DeviceBytes = Mapping[torch.device, int]

_FORWARDS = 16
"""Most forwards in a step, where each token of a prompt is one."""


@dataclass(frozen=True, slots=True)
class OpenedMemory:
    """The model bound to its memory, with the swap space: all that an engine needs to run.

    max_length: longer sequences would depend on other sequences of the batch (None: no limit). no_prefixes: why
    prefixes cannot be cached, "" if they can. checkpoints: of a model that keeps states, what may be kept of them.
    max_num_seqs: sequences of a step, at most, whose states the memory holds. ranks: the other processes with parts of
    the model, if it is tensor-parallel. one_order: with `batch_invariant`, what its forwards run in. state_blocks: the
    memory of a sequence's states, in blocks, if both are in the same memory.
    """

    model: EngineModel
    memory: PagedMemory
    host_manager: BlockManager | None
    host_pool: HostPool | None
    max_length: int | None
    no_prefixes: str
    checkpoints: CheckpointRules | None
    report: SupportReport
    max_num_seqs: int
    ranks: Ranks | None = None
    one_order: OneOrder | None = None
    state_blocks: float = 0.0

    def fits(self, report: SupportReport) -> bool:
        """Return True if a packed model of this report can continue with this model and its memory."""
        return isinstance(self.model, PackedModel) and _kept_by(report) == _kept_by(self.report)

    @property
    def verifies(self) -> bool:
        """Return True if a step can verify drafts: several tokens of a sequence in one forward."""
        if isinstance(self.model, RowModel):
            return self.ranks is None and not self.model.depends_on_split
        return isinstance(self.model, PackedModel)

    @property
    def has_states(self) -> bool:
        """Return True if sequences have recurrent states."""
        return isinstance(self.model, RowModel) and self.model.has_states

    def side_memories(self, former: Iterable[SideMemory] = ()) -> list[SideMemory]:
        """Return the memories that requests of this model need besides block tables. Those of `former` that have no
        size of their own, and so were made for any memory, continue."""
        if isinstance(self.model, EncoderRows):
            return [next((side for side in former if isinstance(side, EncoderTables)), EncoderTables())]
        sides: list[SideMemory] = [StateMemory(self.checkpoints, self.state_blocks)] if self.has_states else []
        return [MediaMemory(), *sides] if takes_media(self.model.model) else sides

    @property
    def chunk(self) -> int | None:
        """Tokens of a prompt in a step, at most: where each is a forward, those of several prompts share forwards."""
        return None if self.one_order is None or isinstance(self.model, PackedModel) else _FORWARDS

    def seats(self, asked: SchedulerConfig) -> int | None:
        """`max_num_seqs`, if that is less than the caller asked for."""
        return self.max_num_seqs if self.max_num_seqs < asked.max_num_seqs else None

    def usable(self, asked: SchedulerConfig, config: SchedulerConfig) -> SchedulerConfig:
        """`config` without what this model cannot do. Raises ValueError if `asked`, the caller's, insists on it."""
        if self.no_prefixes:
            if asked.prefix_caching:
                raise ValueError(
                    f"prefix_caching=True: {self.no_prefixes}, so that no prefix can be kept; leave it out"
                )
            config = replace(config, prefix_caching=False)
        if self.max_num_seqs < config.max_num_seqs:
            log.info("the memory holds the recurrent states of %d sequences at once", self.max_num_seqs)
            config = replace(config, max_num_seqs=self.max_num_seqs)
        is_packed = isinstance(self.model, PackedModel)
        if asked.async_scheduling and not is_packed:
            raise ValueError(
                "async_scheduling=True: the model does not run packed (hf_paged.check says why); leave it out"
            )
        if not is_packed or self.ranks is not None:
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
    model = _generating_model(model)
    with without_adapters(model):  # another engine on it may be in a step, with those of its requests switched on
        opened = _open(model, cache_config, scheduler_config, switches)
    return opened


def _open(
    model: Model,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    switches: Switches,
) -> OpenedMemory:
    if drops_cache(model):
        raise ValueError(
            "gradient checkpointing is on in training mode, where a model may keep no K/V; call model.eval() first"
        )
    refuse_unsupported(model, by_engine=True)
    examined = examine(model)
    if model.training and draws_dropout(model):
        raise ValueError("the model is in training mode, where dropout makes results random; call model.eval() first")
    # Code of others that is in the model now may be taken out later.
    report = examined.bare if examined.bare.native else examined.present
    tried = model if foreign_code(model).inside is None else bare_copy(model)
    bound = _bind(model, report, cache_config, scheduler_config, switches, tried)
    _measure(bound, scheduler_config, tried)
    one_order = _in_one_order(bound, scheduler_config, tried) if scheduler_config.batch_invariant else None
    ranks = ranks_of(model)
    try:
        shares = _Shares(bound, cache_config, scheduler_config)
        host_blocks = shares.give(ranks) if bound.memory.groups else 0
    except BaseException:
        if ranks is not None:
            ranks.close(is_done=False)
        raise
    memory = bound.memory
    host_manager, host_pool = None, None
    if host_blocks:
        host_manager = BlockManager(BlockAllocator(host_blocks), cache_config.block_size, groups=memory.groups)
        host_pool = HostPool(memory.pool, host_blocks)
    max_length = report.native_length if isinstance(bound, PackedModel) else rotary_limit(model, ["dynamic"])
    no_prefixes = "" if isinstance(bound, PackedModel) or one_order is not None else bound.no_prefixes
    checkpoints = None
    if isinstance(bound, RowModel) and bound.has_states and not no_prefixes:
        # As blocks, states that nothing needs now take memory that was not given only for them.
        spare = 0 if _is_default_size(cache_config) or cache_config.num_blocks is not None else 1
        in_pieces = one_order is not None or not bound.is_incremental
        checkpoints = CheckpointRules(
            shares.num_checkpoints(), spare, shares.max_num_seqs, in_pieces, shares.state_blocks
        )
    if isinstance(bound, PackedModel) and ranks is None:  # ranks cannot agree on a step once it has begun
        bound.is_fixed = True  # the runner looks before each step
    return OpenedMemory(
        bound,
        memory,
        host_manager,
        host_pool,
        max_length,
        no_prefixes,
        checkpoints,
        report,
        shares.max_num_seqs,
        ranks,
        one_order,
        shares.state_blocks,
    )


def _kept_by(report: SupportReport) -> tuple[object, ...]:
    """Return all that the memory of a model depends on."""
    return report.native, report.gathers, report.native_length, [replace(layer, reason="") for layer in report.layers]


def _bind(
    model: Model,
    report: SupportReport,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    switches: Switches,
    tried: Any,
) -> EngineModel:
    """tried: the model or its `bare_copy`, on which things are tried."""
    storage = storage_of(cache_config.key_dtype, cache_config.value_dtype)
    if report.native and not report.has_encoder:
        layout = layout_for(report, cache_config)
        memory = PagedMemory(cache_config.block_size, len(layout.groups), layout=layout, storage=storage)
        return PackedModel(model, memory, overrides_for_engine(model, switches))
    for name, switch in (("fuse", switches.fuse), ("prepack", switches.prepack)):
        if switch:
            raise ValueError(f"{name}=True: the model does not run packed (hf_paged.check says why); leave it out")
    if (size := num_ranks(model)) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run packed (hf_paged.check says why): the engine computes such models "
            f"on one rank, not on {size}; use model.generate(..., cache_implementation='paged') on every rank"
        )
    if report.has_encoder:
        memory = PagedMemory(cache_config.block_size, 1, storage=storage)
        return EncoderRows(model, memory, gathers=report.gathers, overrides=overrides_for_rows(model, is_call=False))
    if report.engine_only:
        _refuse_blocks(model, cache_config, scheduler_config)
    layout = NOTHING if report.engine_only else WHOLE
    memory = PagedMemory(cache_config.block_size, len(layout.groups), layout=layout, storage=storage)
    # In one order, all operators are torch's, or what replaces them there.
    overrides = [] if scheduler_config.batch_invariant else overrides_for_rows(model, is_call=False)
    return bind_rows(model, memory, tried, overrides)


def _refuse_blocks(model: Model, cache_config: CacheConfig, scheduler_config: SchedulerConfig) -> None:
    """Raises ValueError for what has no meaning for a model without K/V."""
    why = f"{type(model).__name__} keeps states of a fixed size and no K/V, so that"
    if cache_config.num_blocks is not None:
        raise ValueError(
            f"num_blocks={cache_config.num_blocks}: {why} there are no blocks; leave it out, or give memory="
        )
    if cache_config.swap_bytes:
        raise ValueError(f"swap_memory={cache_config.swap_memory!r}: {why} no request is ever preempted; leave it out")
    if scheduler_config.preemption == "swap":
        raise ValueError(f"preemption='swap': {why} no request is ever preempted; leave it out")


class _Shares:
    """Shares of the memory for K/V, states and checkpoints of a bound model.

    state_blocks: the memory of a sequence's states in blocks, if what is free of one can be used for the other; 0: it
    cannot, or there are no states. max_num_seqs: sequences of a step, at most.
    """

    def __init__(self, bound: EngineModel, cache: CacheConfig, scheduler: SchedulerConfig) -> None:
        self._model, self._memory, self._pool = bound.model, bound.memory, bound.memory.pool
        self._rows = bound if isinstance(bound, RowModel) else None
        self._cache, self._scheduler = cache, scheduler
        self.state_blocks = self._state_blocks()
        self.max_num_seqs = self._max_num_seqs()

    def _state_blocks(self) -> float:
        """Both must be on the CPU, where memory that is not used takes no room; a number of blocks says nothing about
        states."""
        rows = self._rows
        if rows is None or not self._memory.groups or self._cache.num_blocks is not None:
            return 0.0
        blocks = self._block_sizes()
        if any(device.type != "cpu" for device in (*blocks, *rows.state_bytes)):
            return 0.0
        size = sum(rows.state_bytes.values())
        if self._cache.memory_bytes is None:  # a size that is given is for what stays
            size += sum(rows.tensor_bytes.values())  # while a step joins rows, one tensor of each state is there twice
        return size / sum(blocks.values())

    def _block_sizes(self) -> DeviceBytes:
        """Bytes of a block on each device, with those of states that have grown by the block's tokens."""
        sizes = self._pool.bytes_per_block_by_device
        growth = {} if self._rows is None else self._rows.state_bytes_per_token
        own = {device: size * self._memory.block_size for device, size in growth.items()}
        return {device: sizes.get(device, 0) + own.get(device, 0) for device in {**sizes, **own}}

    def _max_num_seqs(self) -> int:
        """With K/V besides, their states take half of the memory, unless they are in the same one. (A number of blocks
        says nothing about states.)"""
        most = self._scheduler.max_num_seqs
        if self.state_blocks:
            return most
        fixed, of_one = (self._state_sizes(count) for count in (0, 1))
        if not any(of_one.values()) or self._cache.num_blocks is not None:
            return most
        shares = 2 if self._memory.groups else 1
        sizes = {device: shares * (size - fixed[device]) for device, size in of_one.items()}
        taken = {device: shares * size for device, size in fixed.items()}
        return min(most, blocks_in_memory(self._cache, sizes, taken=taken, what="states of a sequence"))

    def _state_sizes(self, num_seqs: int) -> DeviceBytes:
        """Bytes of the states of `num_seqs` sequences on each device, and of their checkpoints. While a step joins
        rows, one tensor of each state is in memory twice."""
        rows = self._rows
        if rows is None:
            return {}
        keeps = self._scheduler.prefix_caching is not False and not rows.no_prefixes
        checkpoints = (CHECKPOINTS * num_seqs + UNPINNED) * keeps
        return {
            device: (num_seqs + checkpoints) * size + num_seqs * rows.tensor_bytes[device]
            for device, size in rows.state_bytes.items()
        }

    def num_checkpoints(self) -> int:
        """Checkpoints that there is always room for. A number of blocks says nothing about them: they are then as many
        as fit, beside the blocks and the states of all sequences, into the default share of the free memory.

        With `state_blocks`, there are as many at most. They share the memory of cached blocks then."""
        assert self._rows is not None
        if self.state_blocks:
            share = RETAINED_FRACTION if _is_default_size(self._cache) else 1 / 2
            return max(int(self._pool.num_blocks * share / self.state_blocks), UNPINNED + 1)
        count = CHECKPOINTS * self.max_num_seqs + UNPINNED
        if self._cache.num_blocks is not None:
            for device, size in self._rows.state_bytes.items():
                taken = self.max_num_seqs * (size + self._rows.tensor_bytes[device])
                if device.type == "cpu":  # pages of the pool are provided when blocks are first written
                    taken += self._pool.num_blocks * self._pool.bytes_per_block_by_device.get(device, 0)
                count = min(count, _room_on(device, size, self._cache, 0, taken)[0] // size)
        return max(count, UNPINNED + 1)

    # -- blocks -------------------------------------------------------------------------------------------------

    def give(self, ranks: Ranks | None) -> int:
        """Give the memory as many blocks as fit on every rank; returns the number of host blocks."""
        cache, preemption, allocator = self._cache, self._scheduler.preemption, self._memory.manager.allocator
        smallest: Callable[[Callable[[], int]], int] = (lambda call: call()) if ranks is None else ranks.smallest
        sizes = self._pool.bytes_per_block_by_device
        bytes_per_block = sum(sizes.values())
        num_blocks = smallest(self._num_blocks)
        if num_blocks <= self.state_blocks:
            raise ValueError(
                f"the memory of {num_blocks * bytes_per_block} bytes holds no states of a sequence: they take "
                f"{int(self.state_blocks * bytes_per_block)} bytes, and its K/V takes more; give the cache more memory"
            )
        host_blocks = smallest(lambda: self._num_host_blocks(num_blocks))
        _report_size(cache, num_blocks, sizes)
        _resize(self._pool, num_blocks, bytes_per_block)
        allocator.restart(num_blocks)  # the forward that was measured may have needed more
        if _is_default_size(cache) and device_of(self._model).type == "cpu":
            allocator.touch_limit = int(num_blocks * RETAINED_FRACTION)
        swaps = preemption == "swap" or (cache.swap_bytes and preemption == "auto")
        if swaps and not host_blocks:
            raise ValueError(
                f"swap_memory={cache.swap_memory!r} holds no block of {bytes_per_block} bytes, so that "
                f"preemption={preemption!r} has no room to swap to; give it more, or use preemption='recompute'"
            )
        return host_blocks

    def _num_blocks(self) -> int:
        cache, num_groups = self._cache, len(self._memory.groups)
        if cache.num_blocks is not None:
            return cache.num_blocks * num_groups
        taken = {} if self.state_blocks else self._state_sizes(self.max_num_seqs)
        if cache.memory_bytes is None:  # a size that is given is for what stays
            views = self._view_sizes()
            taken = {device: taken.get(device, 0) + views.get(device, 0) for device in {**taken, **views}}
        num_blocks = blocks_in_memory(cache, self._block_sizes(), taken=taken)
        if cache.memory is None and cache.memory_fraction is None:
            seqs = self._scheduler.max_num_seqs  # a full batch of sequences of the maximum length needs no more
            most = (-(-min(self._most_tokens(), MAX_DEFAULT_TOKENS) // self._memory.block_size) + seqs) * num_groups
            most_states = (1 + CHECKPOINTS) * seqs + UNPINNED
            num_blocks = min(num_blocks, most + int(most_states * self.state_blocks))
        return num_blocks

    def _view_sizes(self) -> DeviceBytes:
        """Bytes on each GPU of the K/V that one layer gathers for the attention of a decode forward, and of its copy in
        another order. Layers do so in turn. The forward that was measured was a prompt, of which nothing is gathered.
        """
        sizes: dict[torch.device, int] = {}
        for index, (key, value, _) in self._pool.layers.items() if self._rows is not None else ():
            if key.device.type == "cuda":
                elements = zip((key, value), self._pool.written_in(index))
                size = 2 * sum(each[0, 0].numel() * dtype.itemsize for each, dtype in elements)
                positions = min(self._most_tokens(), VIEWED_TOKENS)
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


def _generating_model(model: Model) -> Any:
    """The transformers model that a PEFT wrapper generates through."""
    base = unwrapped(model)
    if base is not model and getattr(model.active_peft_config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            "prompt-learning adapters change the inputs of generate; merge or unload the adapter"
        )
    return base


def layout_for(report: SupportReport, config: CacheConfig, max_length: int | None = None) -> Layout:
    """Return the groups in which the layers of a native model share blocks. A window or chunk of `max_length` or more
    is none.

    Sizes are in elements, or in bytes for K or V in eight bits.
    """
    layers: list[tuple[int, Kind, LayerSize]] = []
    for layer in report.layers:
        if layer.num_kv_heads is None:
            continue  # it reads another layer's K/V, or keeps none
        kind = layer.kind
        if max_length is not None and (kind.bounds.most or 0) >= max_length:
            kind = FULL
        layers.append((layer.index, kind, _layer_size(layer, config)))
    return layout_of(tuple(layers), config.block_size)


def _layer_size(layer: LayerSupport, config: CacheConfig) -> LayerSize:
    heads, dims = layer.num_kv_heads or 0, (layer.head_dim or 0, layer.v_head_dim or 0)
    key, value = (heads * dim for dim in dims)
    storage = storage_of(config.key_dtype, config.value_dtype)
    if not storage.is_exact and key + value:
        key, value = storage.bytes_per_token(heads, dims, layer.bytes_per_token // (key + value))
    return LayerSize(key, value, layer.device)


def token_sizes(report: SupportReport, config: CacheConfig, itemsize: int) -> DeviceBytes:
    """Bytes on each device of a token's K/V in all layers. itemsize: of an element that is not in eight bits."""
    unit = itemsize if config.key_dtype is None and config.value_dtype is None else 1
    sizes: dict[torch.device, int] = {}
    for layer in report.layers:
        if layer.device is not None:
            sizes[layer.device] = sizes.get(layer.device, 0) + _layer_size(layer, config).total * unit
    return sizes


@torch.no_grad()
@without_modes()
def _measure(bound: EngineModel, scheduler_config: SchedulerConfig, tried: Any) -> None:
    """Run one forward, in which every layer allocates its K/V. On a GPU the forward is as large as a step may be, so
    that memory that is free afterwards is free in every step.
    """
    if isinstance(bound, EncoderRows):
        bound.measure(tried)
        return
    memory, device = bound.memory, device_of(bound.model)
    count = 1 if isinstance(bound, RowModel) else TRIAL_TOKENS
    if device.type == "cuda":
        limit = getattr(bound.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2048
        count = min(scheduler_config.token_budget, limit)
    if count > memory.block_size:
        blocks = -(-count // memory.block_size) * len(memory.groups)
        memory.pool.resize(blocks)
        memory.manager.allocator.grow(blocks)
    memory.append([(-1, count)])
    ids = torch.zeros(count, dtype=torch.int64, device=device)
    if isinstance(bound, PackedModel):
        metadata, positions = memory.step_metadata([-1], [count], device)
        packed = bound if tried is bound.model else PackedModel(tried, memory)
        packed.forward(ids, positions, metadata, ids[:1] + count - 1)
    else:
        bound.forward([Part(-1, ids.tolist(), 0)], tried=tried)
        bound.free(-1)
    memory.free(-1)


def _in_one_order(bound: EngineModel, scheduler_config: SchedulerConfig, tried: Any) -> OneOrder:
    """Return the context in which a forward's sums have one order, whatever else is in the step. The faster parts of
    the model have been tried before. Raises ValueError if that cannot be had."""
    if isinstance(bound, EncoderRows):
        reason = "the model has an encoder, which torch computes"
    elif not isinstance(bound, PackedModel) and not bound.reads_blocks:
        reason = f"the model reads a dense view of its K/V ({examine(bound.model).present.reason})"
    elif num_ranks(bound.model) > 1:
        reason = "parts of the model are on several ranks"
    elif (used := ops.default_impl(device_of(bound.model))) != "native":
        reason = f"attention is computed by the implementation {used!r}, which has no such kernels"
    elif torch.is_autocast_enabled(device_of(bound.model).type):
        reason = "autocast is on"
    else:
        products = OneOrder(by_token=not isinstance(bound, PackedModel))
        with products:
            _measure(bound, scheduler_config, tried)
            by_rows = not isinstance(bound, PackedModel)
            differing = rows_that_differ(bound.model, tried) if by_rows else 0
            is_other = by_rows and is_other_by_token(bound.model, tried)
        if is_other:
            raise ValueError(
                f"batch_invariant=True: {type(bound.model).__name__} gives other results when its prompt is computed "
                "token by token, as it would be; leave it out"
            )
        if not products.left and not differing:
            products.is_strict = True
            return products
        if differing:
            reason = f"{type(bound.model).__name__} gives other logits in a batch of {differing} rows"
        else:
            reason = f"torch computes a part of {type(bound.model).__name__} itself ({', '.join(products.left)})"
    raise ValueError(f"batch_invariant=True: {reason}, so that the order of sums may depend on the batch; leave it out")


def blocks_in_memory(
    cache_config: CacheConfig,
    sizes: DeviceBytes,
    *,
    idle: DeviceBytes | None = None,
    taken: DeviceBytes | None = None,
    what: str = "block",
) -> int:
    """Blocks that `memory` (of all devices together), or `memory_fraction` or the default share of what is free on each
    device, holds: at least one.

    sizes: bytes of one block on each device. idle: bytes of a pool that will be reused, which
    count as free memory. taken: bytes that something else gets. Raises ValueError if not even one fits; `what` it is.
    """
    idle, taken = idle or {}, taken or {}
    if cache_config.memory_bytes is not None:
        free = cache_config.memory_bytes - sum(taken.values())
        room = [(free, sum(sizes.values()), f"memory={cache_config.memory!r}")]
    else:
        room = [
            _room_on(device, size, cache_config, idle.get(device, 0), taken.get(device, 0))
            for device, size in sizes.items()
        ]
    num_bytes, size, source = min(room, key=lambda each: each[0] // each[1])
    if num_bytes < size:
        raise ValueError(f"{source} holds no {what}: one takes {size} bytes; give the cache more memory")
    return num_bytes // size


def _room_on(device: torch.device, size: int, cache_config: CacheConfig, idle: int, taken: int) -> tuple[int, int, str]:
    """Bytes for K/V on a device, bytes of one block there, and where the former come from, in words."""
    fraction = cache_config.memory_fraction
    free = _free_bytes(device) + idle
    share = DEFAULT_FRACTION.get(device.type, 0.3) if fraction is None else fraction
    return int(free * share) - taken, size, f"{share:g} of {free} free bytes on {device}"


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return host_memory().available


def _is_default_size(cache_config: CacheConfig) -> bool:
    return cache_config.num_blocks is None and cache_config.memory is None and cache_config.memory_fraction is None


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
