"""Patches of methods of other packages: put in when their module is imported, taken out and put back together.

Knows nothing of what a patched method does: `plugin.py` says that.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hf_paged.annotations import Model

Entry = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Point:
    """A method that is wrapped: `owner.method` of `module`.

    entry: is called instead, with the original function, the object, the positional and the named arguments.
    parameters: those the method must have; None: any. remedy: what to do about another method, a sentence of the error.
    """

    module: str
    owner: str
    method: str
    entry: Entry
    parameters: tuple[str, ...] | None = None
    remedy: str = "Use another version of that package, or of hf_paged"

    def check(self) -> type:
        """The owner. Raises RuntimeError if the method is not the one that hf_paged knows."""
        place = f"{self.module}.{self.owner}.{self.method}"
        owner = getattr(sys.modules[self.module], self.owner, None)
        method = getattr(owner, self.method, None)
        if not isinstance(owner, type) or method is None:
            found = "is missing"
        elif self.parameters is None or tuple(inspect.signature(method).parameters) == self.parameters:
            return owner
        else:
            found = f"takes {inspect.signature(method)}"
        package = sys.modules[self.module.partition(".")[0]]
        version = f"{package.__name__} {getattr(package, '__version__', '')}"
        raise RuntimeError(
            f"{place} {found} in {version}, which this version of hf_paged does not know; nothing was patched. "
            f"{self.remedy}"
        )


class Patches:
    """Some points and callbacks that are installed and uninstalled together."""

    def __init__(self, points: Sequence[Point], on_import: Mapping[str, Callable[[], None]] | None = None) -> None:
        """on_import: what else to call after a module has been imported."""
        self._points = tuple(points)
        self._on_import = dict(on_import or {})
        self._wrappers: dict[Point, _Wrapper] = {}  # the newest one for each point
        self._made: list[_Wrapper] = []  # all, because other code may put an earlier one back
        self._finder: _PostImport | None = None

    @property
    def is_installed(self) -> bool:
        return self._finder is not None

    def install(self) -> None:
        """Patch what has been imported now, and the rest when it is imported. Idempotent."""
        if self._finder is not None:
            return
        modules = dict.fromkeys([*(point.module for point in self._points), *self._on_import])
        callbacks = {name: functools.partial(self._patch, name) for name in modules}
        present = [name for name in callbacks if _is_imported(name)]
        for point in self._points:
            if point.module in present:
                # All of them, before anything is changed.
                point.check()
        self._finder = _PostImport(callbacks)
        # First, so that no other finder loads a module unseen.
        sys.meta_path.insert(0, self._finder)
        for name in present:
            callbacks[name]()

    def uninstall(self) -> bool:
        """Restore the methods. False if nothing was installed."""
        if self._finder is None:
            return False
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        # From here on a wrapper passes calls on, also if it has to stay in its place.
        self._finder = None
        # The newest first: one that stays notes what is above it, which must not be what an earlier one leaves.
        for wrapper in reversed(self._made):
            wrapper.take_out()
        return True

    def is_in_use(self, wrapper: _Wrapper) -> bool:
        """Return True if each method has our wrapper: the newest, or an earlier wrapper that other code restored."""
        return self.is_installed and (self._wrappers[wrapper.point] is wrapper or wrapper.is_in_place)

    def _patch(self, module: str) -> None:
        points = [point for point in self._points if point.module == module]
        # All points of the module are checked before one is patched.
        owners = [point.check() for point in points]
        for point, owner in zip(points, owners):
            known = self._wrappers.get(point)
            if known is None or known.owner is not owner or not known.put_in():
                self._wrappers[point] = _newest[owner, point.method] = _Wrapper(self, point, owner)
                self._made.append(self._wrappers[point])
        if module in self._on_import:
            self._on_import[module]()


def _is_imported(name: str) -> bool:
    """A module that is still executing has not got its classes yet: the finder's callback patches it later."""
    return name in sys.modules and not getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False)


class _PostImport(importlib.abc.MetaPathFinder):
    """Runs a callback after one of the named modules has been executed. Leaves finding modules to other finders."""

    def __init__(self, callbacks: Mapping[str, Callable[[], None]]) -> None:
        self.callbacks = callbacks
        self._busy: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.callbacks or fullname in self._busy:
            return None
        # The look-up below asks this finder again.
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


class _Wrapper:
    """A method that calls our entry point with the original method.

    Other code may wrap this method in turn. Uninstalling hf_paged then leaves that code and this wrapper in place; the
    wrapper passes calls on unchanged until hf_paged is installed again.
    """

    def __init__(self, patches: Patches, point: Point, owner: type) -> None:
        self.point = point
        self.owner = owner
        self._patches = patches
        self._above: Any = None  # the method of other code that wrapped ours when this was last taken out
        self.function: Callable[..., Any] = getattr(owner, point.method)
        function = self.function

        @functools.wraps(function)
        def method(model: Model, *args: object, **kwargs: object) -> Any:
            # It may still be called after `uninstall`, by code that has wrapped it or kept a reference.
            if not patches.is_in_use(self):
                return function(model, *args, **kwargs)
            return point.entry(function, model, args, kwargs)

        self._method = method
        setattr(owner, point.method, method)

    @property
    def is_installed(self) -> bool:
        return self._patches.is_installed

    @property
    def is_in_place(self) -> bool:
        return getattr(self.owner, self.point.method) is self._method

    def take_out(self) -> None:
        current = getattr(self.owner, self.point.method)
        if current is self._method:
            setattr(self.owner, self.point.method, self.function)
            current = None
        # Whoever has wrapped ours keeps it: `put_in` finds it there again.
        self._above = current

    def put_in(self) -> bool:
        """Put this wrapper back where it was taken out. False if that is impossible and a new wrapper is needed."""
        current = getattr(self.owner, self.point.method)
        if current is self.function:
            setattr(self.owner, self.point.method, self._method)
            return True
        return current is self._method or (self._above is not None and current is self._above)


_newest: dict[tuple[type, str], _Wrapper] = {}  # for each method that has been patched


def own_method(owner: type, name: str) -> Callable[..., Any]:
    """The method without our wrapper: the package's own, unless other code had replaced it before."""
    wrapper = _newest.get((owner, name))
    method: Callable[..., Any] = getattr(owner, name)
    return wrapper.function if wrapper is not None and wrapper.is_installed else method
