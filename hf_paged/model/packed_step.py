"""The entrance of a step into a model: attention is ours, and layers are replaced, for one forward."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_paged.annotations import Model
from hf_paged.integration.attention import HANDLE, name_ours, name_own, names, packed_cache
from hf_paged.integration.substitutes import substitute, substituted
from hf_paged.kernels.metadata import announce
from hf_paged.model.overrides import Override, Overrides, Patch, mark


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
