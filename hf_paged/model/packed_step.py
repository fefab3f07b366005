"""A step in a model: the cache that it gets, over blocks, and its entrance: attention is ours, and layers are replaced,
for one forward."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.attention import (
    HANDLE,
    LayerHandle,
    MaskLayer,
    name_ours,
    name_own,
    names,
    packed_cache,
    token_rows,
)
from hf_paged.integration.substitutes import substitute, substituted
from hf_paged.kernels.arguments import NewKV
from hf_paged.kernels.metadata import AttentionMetadata, announce, metadata_on
from hf_paged.model.overrides import Override, Overrides, Patch, mark


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
