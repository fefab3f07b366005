"""One packed forward of a transformers model: ragged sequences in one row `[1, num_tokens]`, K/V in blocks.

Knows models, metadata and sequences by id; never requests or sampling.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import LayersChanged, UnsupportedModelError
from hf_paged.integration.attention import (
    HANDLE,
    LayerHandle,
    MaskLayer,
    configs_of,
    name_ours,
    name_own,
    names,
    packed_cache,
    token_rows,
)
from hf_paged.integration.names import CACHE
from hf_paged.integration.substitutes import substitute, substituted
from hf_paged.kernels.arguments import NewKV
from hf_paged.kernels.metadata import (
    AttentionMetadata,
    DecodeArrays,
    StepArrays,
    announce,
    metadata_on,
    step_arrays,
    to_device,
)
from hf_paged.model.devices import device_of, is_spread
from hf_paged.model.hidden import HiddenStates, hidden_states, no_hidden
from hf_paged.model.overrides import Override, Overrides, Patch, mark
from hf_paged.model.state import state_of
from hf_paged.sockets import Executor, Parts, Results


class PackedCache(Cache):
    """The cache that the model gets in packed steps, over one PagedMemory. Call `begin_step` before each forward.

    If the rows of a forward are sequences, the model gets a PagedKVCache, whose `update` calls that of this class.
    """

    reads_encoder = False

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


class PackedStep:
    """One packed forward: routes the attention of these configs to the paged kernels and applies the overrides.

    Other threads may use, copy or pickle the same model meanwhile. The configs name our functions for this thread only.
    In other threads, the functions that we put into the model behave like its own.

    Ctrl-C may arrive between any two instructions, and a partial change would break plain calls of the model too. So
    `leave` undoes any part of `enter`, and may be called again after an interrupt. A context manager cannot guarantee
    that, because its exit can be interrupted before its first instruction.
    """

    def __init__(self, cache: Any, configs: list[Any], overrides: Sequence[Override] = ()) -> None:
        """cache: the one that the forward gets; its `step` has the metadata of each group."""
        self._cache = cache
        self._configs = configs
        self._overrides = overrides
        # The state of this thread, which `leave` restores: a call may run in a signal handler within another step.
        self._outer = packed_cache.get()
        self._names = names.here.values

    def enter(self) -> None:
        name_ours(self, self._configs)
        for override in self._overrides:
            override.apply(self)
        # Last, because a signal handler may call the model meanwhile. Until then our functions behave like the model's.
        packed_cache.set(self._cache)
        announce(self._cache.step)

    def leave(self) -> None:
        announce(() if self._outer is None else self._outer.step)
        packed_cache.set(self._outer)
        names.here.values = self._names
        name_own(self)
        for override in self._overrides:
            override.undo(self)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return the output of `forward`, which begins and ends within this step."""
        try:
            self.enter()
            return forward()
        finally:
            try:
                self.leave()
            # Ctrl-C may have come within `leave`, or before its first instruction.
            except BaseException:
                self.leave()
                raise


class _NoStep(PackedStep):
    """A plain call of a model within a step of this thread, by a signal handler. The step is off while it runs."""

    def __init__(self) -> None:
        super().__init__(None, [])
        self._substituted = substituted()

    def enter(self) -> None:
        announce(())
        packed_cache.set(None)
        substitute(())

    def leave(self) -> None:
        substitute(self._substituted)
        packed_cache.set(self._outer)
        announce(() if self._outer is None else self._outer.step)


class Entrance:
    """An override for signal handlers that call the model within a step: they compute as if there were no step.

    The step itself calls what `uncompiled` returns.
    """

    def __init__(self, model: Model) -> None:
        self._namespace, self._call = vars(model), mark(partial(_enter, model))

    def apply(self, user: object) -> None:
        # Python runs signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._namespace.setdefault(_CALL, self._call)

    def undo(self, user: object) -> None:
        if self._namespace.get(_CALL) is self._call:
            del self._namespace[_CALL]


_CALL = "_compiled_call_impl"  # what a module calls in place of `_call_impl`
_MODULE_CALL = nn.Module.__call__  # torch's own, before third-party code may replace it


class _Calling(threading.local):
    is_step = False
    """True if a step makes the next call of a model in this thread."""


_calling = _Calling()


def _enter(model: Model, *args: object, **kwargs: object) -> Any:
    call = partial(model._call_impl, *args, **kwargs)
    is_step, _calling.is_step = _calling.is_step, False
    return call() if is_step or packed_cache.get() is None else _NoStep().run(call)


def _call_by_others(model: Model, *args: object, **kwargs: object) -> Any:
    """Call a model in its step, if third-party code has replaced `nn.Module.__call__`."""
    _calling.is_step = True
    try:
        return model(*args, **kwargs)
    finally:
        _calling.is_step = False


def latent_overrides(model: Model) -> tuple[Override, ...]:
    """Return an override for layers that cache latents: in a packed step, attention gets latents as they are."""
    layers = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    patches = (Patch(vars(layer), "expand_kv", functools.partial(_expand, layer)) for layer in layers)
    return (Overrides(patches),) if layers else ()


def _expand(layer: Any, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace a layer's `expand_kv`. Other threads may call it outside of a packed step."""
    handle = getattr(latents, HANDLE, None)
    if handle is None:
        expanded: tuple[torch.Tensor, torch.Tensor] = type(layer).expand_kv(layer, latents, rotary)
        return expanded
    handle.is_latent = True
    return latents, rotary


def own_forward(model: Model) -> Callable[..., Any] | None:
    """Return the original of a compiled `forward` on this model; None if its `forward` is not compiled."""
    return getattr(vars(model).get("forward"), "_torchdynamo_orig_callable", None)


def uncompiled(model: Model) -> Callable[..., Any]:
    """Return the model's forward without compilation, even if `model.compile()` or `model.forward =
    torch.compile(model.forward)` has compiled it. In that case, the first call for a model logs a warning.

    Lengths and the state of the cache differ from step to step, and each difference would compile the model again.
    Modules in the model that were compiled by themselves stay compiled.
    """
    own, compiled = own_forward(model), vars(model).get(_CALL)
    if own is None and (compiled is None or getattr(compiled, "func", None) is _enter):
        return model._call_impl if type(model).__call__ is _MODULE_CALL else partial(_call_by_others, model)
    if model not in _logged:
        _logged.add(model)
        log.warning("the compiled forward of %s runs uncompiled in paged steps", type(model).__name__)
    if own is not None:
        # A shallow copy, because the modules and hooks are the same.
        model = copy.copy(model)
        vars(model)["forward"] = own
    forward: Callable[..., Any] = model._call_impl
    return forward


log = logging.getLogger("hf_paged")
_logged: weakref.WeakSet[Any] = weakref.WeakSet()


def _parameters_of(model: PreTrainedModel) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's forward."""
    # Signatures of classes are remembered, because reading one takes a tenth of a millisecond.
    own = "forward" in vars(model)
    return inspect.signature(model.forward).parameters if own else _parameters(type(model).forward)


@functools.lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _takes_positions(model: Model) -> bool:
    """Return True if the model, or a transformers model in it, has a parameter `position_ids`."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return any("position_ids" in _parameters_of(module) for module in models)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One packed forward as arrays.

    tokens: int64 [num_tokens]. step: their positions, slots and block tables. wanted: int64 [num_rows], indices of the
    tokens whose logits are wanted; None: all, in a pure decode step. adapters: the description of an `AdapterChoice`;
    None for a model that has never had adapters.
    """

    tokens: np.ndarray
    step: StepArrays
    wanted: np.ndarray | None
    adapters: bytes | None = None


def decode_step(arrays: DecodeArrays, memory: PagedMemory, seq_ids: list[int], starts: list[int]) -> StepArrays:
    """Make the arrays of a step of one token for each sequence, from those of the last one if possible."""
    manager = memory.manager
    if (step := arrays.follow(seq_ids, starts, manager.rewrites)) is not None:
        return step
    tables = [partial(manager.block_table, group=group) for group in range(len(manager.groups))]
    return arrays.step(seq_ids, starts, tables, manager.rewrites, [group.kind.bounds for group in manager.groups])


class LateTokens:
    """Tokens of a step that only the device knows yet (see `Parts.late`)."""

    def __init__(self, known: torch.Tensor, where: list[tuple[int, int]] | None) -> None:
        self._known = known
        self._where = None if where is None else np.array(where, dtype=np.int64).T.copy()

    def __call__(self, ids: torch.Tensor) -> None:
        """Write them into ids int64 [at least num_tokens] without waiting for the device."""
        if self._where is None:
            ids[: len(self._known)].copy_(self._known)
        else:
            places, rows = to_device(self._where, ids.device)
            ids.index_copy_(0, places, self._known.index_select(0, rows))


class Beside(NamedTuple):
    """Arguments and overrides of a step besides its tokens.

    arguments: makes further arguments of the step's forward from its token ids [1, num_tokens]. reach: int32
    [num_tokens], the last position that each token attends to (None: its own). overrides: for this step.
    """

    arguments: Callable[[torch.Tensor], Mapping[str, Any]]
    reach: np.ndarray | None = None
    overrides: Sequence[Override] = ()


class PackedModel(Executor):
    """A model bound to a PagedMemory. `forward` runs one step and restores the model afterwards.

    `overrides` are applied in order during each forward. A forward notices changed weights, and follows replaced
    modules. With `is_fixed`, it does neither: the caller has to, and a forward raises LayersChanged if modules were
    replaced since the last `follow_structure`. `stand_in` makes the executor that takes over while third-party code is
    in the model.
    """

    model: Model
    memory: PagedMemory
    is_packed = True

    def __init__(self, model: Model, memory: PagedMemory, overrides: Sequence[Override] = ()) -> None:
        self.model = model
        self._overrides = overrides
        self.weights = state_of(model).weights
        self.memory = memory
        self._device = device_of(model)
        self._decode_arrays = DecodeArrays(memory.block_size)
        config = model.config.get_text_config(decoder=True)
        self.cache = PackedCache(memory, config.num_hidden_layers)
        self.is_fixed = False
        self.follow_structure()

    def follow_structure(self) -> None:
        """Derive again what depends on the model's modules."""
        model = self.model
        self._structure = self.weights.structure
        self._stand_in: Executor | None = None
        self._configs = configs_of(model)
        self._hooks = (Entrance(model), *latent_overrides(model))
        parameters = _parameters_of(model)
        self.no_hidden = no_hidden(model)
        self._keeps_logits = "logits_to_keep" in parameters
        self._is_spread = is_spread(model)
        self.cache.takes_positions = _takes_positions(model)
        # A composite model may take `position_ids` by **kwargs, for its language model.
        if "position_ids" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise UnsupportedModelError(
                f"{type(model).__name__}.forward takes no position_ids, so sequences cannot be packed in one row"
            )

    @property
    def verifies(self) -> bool:
        return True

    def drop_overrides(self) -> None:
        """Free packed weights. torch computes later steps."""
        self._overrides = ()

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
        if self._stand_in is not None:
            self._stand_in.close()

    def beside(self, reason: str | None) -> Executor:
        if reason is None:
            return self
        if self._stand_in is None:
            self._stand_in = self.stand_in(self, reason)
        return self._stand_in.beside(reason)

    def measure(self, tried: Model, num_tokens: int) -> None:
        memory = self.memory
        memory.hold(num_tokens)
        memory.append([(-1, num_tokens)])
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        metadata, positions = memory.step_metadata([-1], [num_tokens], self._device)
        packed = self if tried is self.model else PackedModel(tried, memory)
        packed.forward(ids, positions, metadata, ids[:1] + num_tokens - 1)
        memory.free(-1)

    # -- runs ---------------------------------------------------------------------------------------------------

    def pack(self, parts: Parts) -> Forward:
        manager, counts = self.memory.manager, parts.counts
        groups = range(len(manager.groups))
        if counts is None:
            # Most steps are decode steps, whose arrays are made from those of the step before.
            step = decode_step(self._decode_arrays, self.memory, parts.seq_ids, parts.starts)
        else:
            step = step_arrays(
                [[manager.block_table(seq_id, group) for seq_id in parts.seq_ids] for group in groups],
                [start + count for start, count in zip(parts.starts, counts)],
                counts,
                self.memory.block_size,
            )
        if any(deltas := parts.extra.get("delta", ())):
            moved = np.repeat(np.array(deltas, dtype=np.int64), np.diff(step.query_start_loc))
            step = replace(step, positions=step.positions + moved)
        wanted = None if parts.wanted is None else np.array(parts.wanted, dtype=np.int64)
        packed = parts.packed = Forward(np.array(parts.tokens, dtype=np.int64), step, wanted, parts.adapters)
        return packed

    def run(self, parts: Parts) -> Results:
        forward = parts.packed or self.pack(parts)
        hidden = hidden_states(self.model) if parts.hidden else None
        logits = self._run(parts, forward, hidden)
        if hidden is not None and (states := hidden.take()) is not None:
            places = to_device(np.array(parts.hidden, dtype=np.int64), states.device)
            parts.hidden_rows = states[0, places].to(logits.device)
        return logits, {}

    def _run(self, parts: Parts, forward: Forward, hidden: HiddenStates | None) -> torch.Tensor:
        late = None if parts.late is None else LateTokens(*parts.late)
        if (compute_with := parts.extra.get("beside")) is not None:
            computed: torch.Tensor = compute_with(self.model, partial(self.compute, forward, late, hidden=hidden))
            return computed
        return self.compute(forward, late, hidden=hidden)

    def compute(
        self,
        forward: Forward,
        late: LateTokens | None = None,
        beside: Beside | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor:
        """Return the logits [num_rows, vocab] of the wanted tokens. beside, hidden: see `forward`."""
        # Graphs are captured without further arguments and without hidden states.
        if self.graphs is not None and beside is None and hidden is None:
            replayed: torch.Tensor | None = self.graphs.forward(
                forward.tokens, forward.step, forward.adapters, late, forward.wanted
            )
            if replayed is not None:
                return replayed
        if beside is not None:
            forward = replace(forward, step=replace(forward.step, reach=beside.reach))
        ids, positions = (to_device(x, self._device) for x in (forward.tokens, forward.step.positions))
        if late is not None:
            late(ids)
        wanted = None if forward.wanted is None else to_device(forward.wanted, self._device)
        if self.one_order is None:
            metadata = self._decode_arrays.metadata(forward.step, self._device)
            return self.forward(ids, positions, metadata, wanted, beside, hidden)
        with self.one_order:
            metadata = self._decode_arrays.metadata(forward.step, self._device, one_order=True)
            return self.forward(ids, positions, metadata, wanted, beside, hidden)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        metadata: list[AttentionMetadata],
        logits_indices: torch.Tensor | None = None,
        beside: Beside | None = None,
        hidden: HiddenStates | None = None,
    ) -> torch.Tensor:
        """Compute tokens whose slots have been appended, and write their K/V to the blocks.

        input_ids, position_ids: int64 [num_tokens]. logits_indices: int64 [num_rows], the tokens whose logits are
        wanted; None: all. beside: further arguments of the model's forward; `position_ids` in them replace those given
        here, and its `reach` is in the metadata. hidden: takes the hidden states of all tokens. Returns logits
        [num_rows, vocab_size].
        """
        self.cache.begin_step(metadata, position_ids)
        kwargs: dict[str, Any] = {}
        if self._keeps_logits:
            # A model that gets a number of last rows may drop the others early. So it gets indices, even for all rows.
            wanted = logits_indices
            if wanted is None:
                wanted = torch.arange(len(input_ids), dtype=torch.int64, device=input_ids.device)
            # accelerate moves a tensor to a spread model's first device, but the last hidden states may be on another
            # one. It leaves a list as it is, and a list can index a tensor on any device.
            kwargs["logits_to_keep"] = wanted.tolist() if self._is_spread else wanted
        # Without a mask, a model that takes no positions would make one of the cache's length.
        if not self.cache.takes_positions:
            kwargs["attention_mask"] = torch.ones_like(input_ids)[None]
        if not self.is_fixed:
            # Before overrides are applied, because `look` would take them for changes of the model.
            self.weights.look()
        if self.weights.structure != self._structure:
            if self.is_fixed:
                raise LayersChanged(f"the modules of {type(self.model).__name__} have changed")
            self.follow_structure()
        given: Mapping[str, Any] = {} if beside is None else beside.arguments(input_ids.unsqueeze(0))
        of_step = (*(() if beside is None else beside.overrides), *(() if hidden is None else (hidden,)))
        output = PackedStep(self.cache, self._configs, (*self._hooks, *self._overrides, *of_step)).run(
            partial(
                uncompiled(self.model),
                input_ids=input_ids.unsqueeze(0),
                use_cache=True,
                return_dict=True,
                **{CACHE: self.cache, "position_ids": position_ids.unsqueeze(0), **kwargs, **given},
            )
        )
        # After the forward, because only then it is known whether every layer used our attention.
        self.cache.refuse_unread(self.model)
        logits: torch.Tensor = output.logits[0].to(input_ids.device)
        if logits_indices is not None and not self._keeps_logits:
            logits = logits[logits_indices]
        return logits
