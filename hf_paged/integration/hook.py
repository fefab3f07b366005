"""The patches on transformers' GenerationMixin: four methods, replaced together and restored together.

They are applied when `transformers.generation.utils` is imported, or at once if it has been imported, so that importing
hf_paged imports nothing heavy. What a paged call does is decided in `hf_paged.generation.paged_generate`.
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

_ENTRY_POINTS = "hf_paged.generation.paged_generate"  # by name, because integration must not import generation
_TARGET = "transformers.generation.utils"
_MODELING = "transformers.modeling_utils"

_METHODS = ("generate", "_prepare_cache_for_generation", "_sample", "_beam_search")

_wrappers: dict[str, _Wrapper] = {}  # the newest one for each method
_finder: _PostImport | None = None


class _PostImport(importlib.abc.MetaPathFinder):
    """Runs a callback after one of the named modules has been executed. Leaves finding modules to other finders."""

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
    """Register the backend: at once if transformers has been imported, else when it is imported. Idempotent."""
    global _finder
    if _finder is not None:
        return
    callbacks = {_TARGET: _patch, _MODELING: _register}
    _finder = _PostImport(callbacks)
    sys.meta_path.insert(0, _finder)
    for name, callback in callbacks.items():
        # A module that is still executing has no such class yet: the finder's callback patches it later.
        if name in sys.modules and not getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False):
            callback()


def uninstall() -> None:
    """Restore everything that install changed. Idempotent."""
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
    """The method that our wrapper replaced: transformers' own, unless other code had replaced it before."""
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
    """A method of GenerationMixin that calls our entry point of the same name with the original method.

    Other code may wrap this method in turn. Uninstalling hf_paged then leaves that code and this wrapper in place; the
    wrapper passes calls on unchanged until hf_paged is installed again.
    """

    def __init__(self, mixin: type, name: str) -> None:
        self.mixin = mixin
        self._name = name
        self._above: Any = None  # the method of other code that wrapped ours when this was last taken out
        self.function: Callable[..., Any] = getattr(mixin, name)
        function = self.function

        @functools.wraps(function)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_in_use():
                return function(model, *args, **kwargs)
            entry_points = importlib.import_module(_ENTRY_POINTS)
            return getattr(entry_points, name.lstrip("_"))(function, model, args, kwargs)

        self._method = method
        setattr(mixin, name, method)

    def _is_in_use(self) -> bool:
        """One wrapper per method is in use: the newest one, or an earlier one that other code has restored."""
        return is_installed() and (_wrappers[self._name] is self or getattr(self.mixin, self._name) is self._method)

    def take_out(self) -> None:
        current = getattr(self.mixin, self._name)
        if current is self._method:
            setattr(self.mixin, self._name, self.function)
            current = None
        self._above = current

    def put_in(self) -> bool:
        """Put this wrapper back where it was taken out. False if that is impossible and a new wrapper is needed."""
        current = getattr(self.mixin, self._name)
        if current is self.function:
            setattr(self.mixin, self._name, self._method)
            return True
        return current is self._method or (self._above is not None and current is self._above)
