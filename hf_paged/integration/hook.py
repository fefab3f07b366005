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

_originals: dict[str, Any] = {}
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
    sys.meta_path.remove(_finder)
    _finder = None
    if _originals:
        mixin = sys.modules[_TARGET].GenerationMixin  # type: ignore[attr-defined]
        for name, original in _originals.items():
            setattr(mixin, name, original)
        _originals.clear()
    if _MODELING in sys.modules:
        from hf_paged.integration import attention

        attention.unregister()


def is_installed() -> bool:
    return _finder is not None


def original(name: str) -> Callable[..., Any]:
    """transformers' own GenerationMixin method of that name."""
    return _originals[name]


def _register() -> None:
    from hf_paged.integration import attention

    attention.register()


def _patch() -> None:
    mixin = sys.modules[_TARGET].GenerationMixin  # type: ignore[attr-defined]
    for name in ("generate", "_prepare_cache_for_generation", "_sample", "_beam_search"):
        _originals[name] = getattr(mixin, name)
        setattr(mixin, name, _through_door(name, _originals[name]))


def _through_door(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        door = importlib.import_module(_DOOR)
        return getattr(door, name.lstrip("_"))(function, self, args, kwargs)

    return method
