"""The executors of an engine: which one computes a model, and the side memories that go with it. Knows all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.cache.layers import NOTHING, WHOLE
from hf_paged.cache.memory import PagedMemory
from hf_paged.config import CacheConfig, SchedulerConfig, Switches
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.adapters.adapters import without_adapters
from hf_paged.features.encoder_decoder.encoder_rows import EncoderRows
from hf_paged.features.encoder_decoder.encoders import EncoderTables
from hf_paged.features.encoders.both_ways import PromptRows, TokenTypes
from hf_paged.features.media.media import takes_media
from hf_paged.features.media.media_memory import MediaMemory
from hf_paged.features.media.media_store import MediaStore
from hf_paged.features.ranks.ranks import Ranks as Ranks
from hf_paged.features.ranks.ranks import num_ranks
from hf_paged.features.ranks.ranks import ranks_of as ranks_of
from hf_paged.features.rows.row_trial import bind_rows, is_other_by_token, rows_that_differ
from hf_paged.features.rows.state_memory import StateMemory
from hf_paged.features.rows.state_sizes import StateSizes
from hf_paged.features.watch.foreign import bare_copy, foreign_code
from hf_paged.fused.cpu.one_order import OneOrder
from hf_paged.fused.overrides import TRIAL_TOKENS, overrides_for_engine, overrides_for_rows
from hf_paged.generation.engine.room import layout_for
from hf_paged.kernels import ops
from hf_paged.kernels.quantised import storage_of
from hf_paged.model.calls import without_modes
from hf_paged.model.devices import device_of
from hf_paged.model.packed import PackedModel
from hf_paged.model.report import SupportReport
from hf_paged.model.support import examine
from hf_paged.sockets import Executor, SideMemory

Beside = StateSizes
"""Sizes of what sequences keep besides K/V, of any executor."""


def bind(
    model: Model,
    report: SupportReport,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    switches: Switches,
    tried: Any,
) -> Executor:
    """Bind the model to a memory, as its report says. tried: the model, or its `bare_copy`, for trials."""
    storage = storage_of(cache_config.key_dtype, cache_config.value_dtype)
    if report.native and not report.has_encoder:
        layout = layout_for(report, cache_config)
        memory = PagedMemory(cache_config.block_size, len(layout.groups), layout=layout, storage=storage)
        packed = PackedModel(model, memory, overrides_for_engine(model, switches))
        packed.stand_in, packed.max_length = _stand_in, report.native_length
        return packed
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
        overrides = overrides_for_rows(model, is_call=False, prepack=switches.prepack)
        return EncoderRows(model, memory, gathers=report.gathers, overrides=overrides)
    if report.engine_only:
        kept = "keeps no K/V" if report.encodes else "keeps states of a fixed size and no K/V"
        _refuse_blocks(f"{type(model).__name__} {kept}, so that", cache_config, scheduler_config)
    if report.encodes:
        _refuse_memory(model, cache_config)
        return PromptRows(model, PagedMemory(cache_config.block_size, 0, layout=NOTHING, storage=storage))
    layout = NOTHING if report.engine_only else WHOLE
    memory = PagedMemory(cache_config.block_size, len(layout.groups), layout=layout, storage=storage)
    # With batch_invariant, `OneOrder` replaces operators of torch, which overrides would hide from it.
    is_invariant, prepack = scheduler_config.batch_invariant, switches.prepack
    overrides = [] if is_invariant else overrides_for_rows(model, is_call=False, prepack=prepack)
    return bind_rows(model, memory, tried, overrides)


def measured(
    model: Model, cache_config: CacheConfig, scheduler_config: SchedulerConfig, switches: Switches
) -> tuple[Executor, SupportReport, Any]:
    """Bind the model to a memory without blocks, whose sizes are known. Also returns the report by which it runs, and
    the model or its `bare_copy`, on which things are tried."""
    examined = examine(model)
    # Third-party code that is in the model now may be taken out later.
    report = examined.bare if examined.bare.native else examined.present
    tried = model if foreign_code(model).inside is None else bare_copy(model)
    with without_adapters(model):  # another engine on it may be in a step, with those of its requests switched on
        executor = bind(model, report, cache_config, scheduler_config, switches, tried)
        _measure(executor, scheduler_config, tried)
    return executor, report, tried


@torch.no_grad()
@without_modes()
def _measure(executor: Executor, scheduler_config: SchedulerConfig, tried: Any) -> None:
    """Run one forward, in which every layer allocates its K/V. On a GPU, it is as large as a step may be, so that the
    memory which is free afterwards is free in every step.
    """
    count = TRIAL_TOKENS
    if device_of(executor.model).type == "cuda":
        limit = getattr(executor.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 2048
        count = min(scheduler_config.token_budget, limit)
    executor.measure(tried, count)


def _stand_in(packed: PackedModel, reason: str) -> Executor:
    """Return the executor that computes the model, over the same memory, while third-party code is in it."""
    model, foreign = packed.model, foreign_code(packed.model)
    if packed.graphs is not None and packed.graphs.required:
        raise UnsupportedModelError(f"cuda_graphs=True: {reason}; leave it out, and such steps run without graphs")
    with without_adapters(model):
        rows = bind_rows(model, packed.memory, bare_copy(model) if foreign.inside else None)
    return rows


SIDE_MEMORIES: dict[type[SideMemory], Callable[[Executor, StateSizes], SideMemory | None]] = {
    EncoderTables: lambda executor, sizes: EncoderTables() if isinstance(executor, EncoderRows) else None,
    MediaMemory: lambda executor, sizes: (
        MediaMemory(MediaStore()) if takes_media(executor.model) and not isinstance(executor, EncoderRows) else None
    ),
    TokenTypes: lambda executor, sizes: TokenTypes() if isinstance(executor, PromptRows) else None,
    StateMemory: lambda executor, sizes: StateMemory(sizes.rules, sizes.blocks) if executor.has_states else None,
}
"""Memories that requests need besides block tables, in order: each makes its own for an executor, or returns None."""


def side_memories(executor: Executor, sizes: StateSizes, former: Iterable[SideMemory] = ()) -> list[SideMemory]:
    """Return the side memories of an engine. Those of `former` that stay are used again."""
    kept = {type(side): side for side in former if side.stays}
    made = ((kind, make(executor, sizes)) for kind, make in SIDE_MEMORIES.items())
    sides = [kept.get(kind, side) for kind, side in made if side is not None]
    for side in sides:
        # Only the first rank has side memories: the blocks of the others would stay empty.
        if type(side).recall is not SideMemory.recall and num_ranks(executor.model) > 1:
            raise UnsupportedModelError(f"{type(side).__name__} recalls prefixes, and the engine runs on several ranks")
        side.use(executor)
    return sides


def _refuse_blocks(why: str, cache_config: CacheConfig, scheduler_config: SchedulerConfig) -> None:
    """Raises ValueError for settings that mean nothing to a model without K/V."""
    if cache_config.num_blocks is not None:
        raise ValueError(
            f"num_blocks={cache_config.num_blocks}: {why} there are no blocks; leave it out, or give memory="
        )
    if cache_config.swap_bytes:
        raise ValueError(f"swap_memory={cache_config.swap_memory!r}: {why} no request is ever preempted; leave it out")
    if scheduler_config.preemption == "swap":
        raise ValueError(f"preemption='swap': {why} no request is ever preempted; leave it out")
    if (evict := scheduler_config.prefix_eviction) != "lru":
        raise ValueError(f"prefix_eviction={evict!r}: {why} there are no blocks to evict; leave it out")


def _refuse_memory(model: Model, cache_config: CacheConfig) -> None:
    """Raises ValueError for settings of memory, which an encoder's prompts take none of after their step."""
    for name in ("memory", "memory_fraction", "key_dtype", "value_dtype"):
        if (value := getattr(cache_config, name)) is not None:
            raise ValueError(f"{name}={value!r}: {type(model).__name__} is an encoder and keeps no K/V; leave it out")


def in_one_order(executor: Executor, scheduler_config: SchedulerConfig, tried: Any) -> OneOrder:
    """Return the context in which a forward's sums have one order, whatever else is in the step. Raises ValueError if
    that is impossible. Before, the faster parts of the model have been tried."""
    model, by_rows = executor.model, not executor.is_packed
    if executor.order_obstacle:
        reason = executor.order_obstacle
    elif num_ranks(model) > 1:
        reason = "parts of the model are on several ranks"
    elif (used := ops.default_impl(device_of(model))) != "native":
        reason = f"attention is computed by the implementation {used!r}, which has no such kernels"
    elif torch.is_autocast_enabled(device_of(model).type):
        reason = "autocast is on"
    else:
        products = OneOrder(by_token=by_rows)
        # `products.left` names what torch has computed itself, and is filled by a forward only.
        with without_adapters(model), products:
            _measure(executor, scheduler_config, tried)
            differing = rows_that_differ(model, tried) if by_rows else 0
            is_other = by_rows and is_other_by_token(model, tried)
        if is_other:
            raise ValueError(
                f"batch_invariant=True: {type(model).__name__} gives other results when its prompt is computed "
                "token by token, as it would be; leave it out"
            )
        if not products.left and not differing:
            products.is_strict = True
            return products
        if differing:
            reason = f"{type(model).__name__} gives other logits in a batch of {differing} rows"
        else:
            reason = f"torch computes a part of {type(model).__name__} itself ({', '.join(products.left)})"
    raise ValueError(f"batch_invariant=True: {reason}, so that the order of sums may depend on the batch; leave it out")
