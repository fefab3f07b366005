"""The patches on transformers' GenerationMixin: four methods, replaced together and put back together.

Applied when `transformers.generation.utils` is imported (or at once if it is already), so that importing hf_paged
imports nothing heavy. What a paged call does is not decided here: see `hf_paged.generation.paged_generate`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_DOOR = "hf_paged.generation.paged_generate"  # named, not imported: integration does not depend on generation
_TARGET = "transformers.generation.utils"
_MODELING = "transformers.modeling_utils"

_METHODS = ("generate", "_prepare_cache_for_generation", "_sample", "_beam_search")

_wrappers: dict[str, _Wrapper] = {}  # the last one made for each method
_finder: _PostImport | None = None


class _PostImport(importlib.abc.MetaPathFinder):
    """Calls back when one of the named modules has been executed; finds nothing by itself."""

    def __init__(self, callbacks: dict[str, Callable[[], None]]) -> None:
        self.callbacks = callbacks
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.callbacks or fullname in self._busy:
            return None
        self._busy.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        callback, execute = self.callbacks[fullname], spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            callback()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register the backend: now if transformers is imported, else when it is. Idempotent."""
    global _finder
    if _finder is not None:
        return
    callbacks = {_TARGET: _patch, _MODELING: _register}
    _finder = _PostImport(callbacks)
    sys.meta_path.insert(0, _finder)
    for name, callback in callbacks.items():
        # A module that is being imported right now (half executed) calls back through the finder's next chance:
        # its class is not there yet.
        if name in sys.modules and not getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False):
            callback()


def uninstall() -> None:
    """Put back everything that install changed. Idempotent."""
    global _finder
    if _finder is None:
        return
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder = None
    for wrapper in _wrappers.values():
        wrapper.take_out()
    if _MODELING in sys.modules:
        from hf_paged.integration import attention

        attention.unregister()


def is_installed() -> bool:
    return _finder is not None


def original(name: str) -> Callable[..., Any]:
    """The GenerationMixin method below ours: transformers' own, unless other code had replaced it before."""
    return _wrappers[name].function


def _register() -> None:
    from hf_paged.integration import attention

    attention.register()


def _patch() -> None:
    mixin = sys.modules[_TARGET].GenerationMixin  # type: ignore[attr-defined]
    for name in _METHODS:
        known = _wrappers.get(name)
        if known is None or known.mixin is not mixin or not known.put_in():
            _wrappers[name] = _Wrapper(mixin, name)


class _Wrapper:
    """A method of GenerationMixin that asks the door first.

    Other code may wrap the method in turn. It then stays where it is when hf_paged is uninstalled, with this wrapper
    below it, which passes calls straight on until hf_paged is installed again.
    """

    def __init__(self, mixin: type, name: str) -> None:
        self.mixin = mixin
        self._name = name
        self._above: Any = None  # what other code had put over the method when this was last taken out
        self.function: Callable[..., Any] = getattr(mixin, name)
        function = self.function

        @functools.wraps(function)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_in_use():
                return function(model, *args, **kwargs)
            door = importlib.import_module(_DOOR)
            return getattr(door, name.lstrip("_"))(function, model, args, kwargs)

        self._method = method
        setattr(mixin, name, method)

    def _is_in_use(self) -> bool:
        """One wrapper of a method is in use: the last one, or an earlier one if other code has put that back."""
        return is_installed() and (_wrappers[self._name] is self or getattr(self.mixin, self._name) is self._method)

    def take_out(self) -> None:
        current = getattr(self.mixin, self._name)
        if current is self._method:
            setattr(self.mixin, self._name, self.function)
            current = None
        self._above = current

    def put_in(self) -> bool:
        """Whether this is in the mixin again, where it was taken out; else another wrapper has to be made."""
        current = getattr(self.mixin, self._name)
        if current is self.function:
            setattr(self.mixin, self._name, self._method)
            return True
        return current is self._method or (self._above is not None and current is self._above)
