"""Records which modules a packed forward calls, with their inputs and results, as a tree.

Models are recognised by this record: by what flows from one part to the next, never by names. Knows modules and
tensors; never kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hf_paged.integration.attention import packed_cache
from hf_paged.kernels import ops
from hf_paged.model.overrides import Overrides, Patch, mark
from hf_paged.model.packed_step import PackedCache

ALLOCATIONS = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}
)
"""Operations of torch that are no views and launch nothing."""


Operation = tuple[str, tuple[float, ...]]
"""The name of an operation of torch, and the numbers among its arguments."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module.

    key, value [1, heads, num_tokens, dims]: what it gave to the cache itself, if anything. query [num_tokens, heads,
    dims]: with which it then called our attention. reads: calls of our attention within it. operations: torch's in its
    own code, but views and allocations.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parent: Call | None
    output: Any = None
    children: list[Call] = field(default_factory=list)
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    query: torch.Tensor | None = None
    reads: int = 0
    operations: list[Operation] = field(default_factory=list)

    @property
    def has_one_result(self) -> bool:
        """Return True if all results beside `result` are None."""
        return not isinstance(self.output, tuple) or all(item is None for item in self.output[1:])

    @property
    def names(self) -> list[str]:
        """Return the names of its operations."""
        return [name for name, _ in self.operations]

    @property
    def input(self) -> Any:
        """Its first argument, or the only tensor that it got by name."""
        if self.args:
            return self.args[0]
        tensors = [value for value in self.kwargs.values() if isinstance(value, torch.Tensor)]
        return self.kwargs.get("hidden_states", tensors[0] if len(tensors) == 1 else None)

    @property
    def result(self) -> Any:
        """Its output, or the first item of an output of several."""
        return self.output[0] if isinstance(self.output, tuple) and self.output else self.output

    def inner(self) -> Iterator[Call]:
        for child in self.children:
            yield child
            yield from child.inner()

    def names_without(self, called: Collection[nn.Module]) -> list[str]:
        """Return the operations of the module and of the modules within it, except those in `called`."""
        inner = [child.names_without(called) for child in self.children if child.module not in called]
        return [*self.names, *(name for names in inner for name in names)]

    @property
    def name(self) -> str:
        """Its module's name in the module of the caller; "" if it is no child of it."""
        assert self.parent is not None
        names = [name for name, child in self.parent.module._modules.items() if child is self.module]
        return names[0] if names else ""


class Trace(TorchDispatchMode):
    """An override that records the calls of all modules of a model, and passes each call that ends to `finished`, while
    the forward continues. Calls that `finished` makes are not recorded, nor is what our attention computes.

    Run the forward `with` it, for the operations of torch. query: that of the last attention, recorded or not.
    """

    def __init__(self, model: nn.Module, cache: PackedCache, finished: Callable[[Call], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._finished = finished
        self._stack = [Call(model, (), {}, None)]
        self._paused = False
        self.query: torch.Tensor | None = None
        # The model's own forward is the one that calls the others.
        modules = [module for module in model.modules() if module is not model]
        patches = [Patch(vars(m), "forward", self._recorder(m)) for m in modules]
        attend = ops.paged_attention
        self._overrides = Overrides([*patches, Patch(vars(ops), "paged_attention", self._attention(attend), attend)])

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in ALLOCATIONS:
            numbers = tuple(arg for arg in args if isinstance(arg, int | float))
            self._stack[-1].operations.append((name, numbers))
        return func(*args, **(kwargs or {}))

    def apply(self, user: object) -> None:
        vars(self._cache)["update"] = self._update
        self._overrides.apply(user)

    def undo(self, user: object) -> None:
        self._overrides.undo(user)
        vars(self._cache).pop("update", None)

    def _update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._paused:
            self._stack[-1].key, self._stack[-1].value = key, value
        return PackedCache.update(self._cache, key, value, *args, **kwargs)

    def _attention(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def attend(query: torch.Tensor, *args: object, **kwargs: object) -> Any:
            if packed_cache.get() is self._cache:
                self.query = query
            # What our attention computes is no operation of the model.
            with _disable_current_modes():
                return function(query, *args, **kwargs)

        return attend

    def _recorder(self, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: object, **kwargs: object) -> Any:
            # Another thread may use the model meanwhile.
            if self._paused or packed_cache.get() is not self._cache:
                return type(module).forward(module, *args, **kwargs)
            call = Call(module, args, kwargs, self._stack[-1])
            self._stack[-1].children.append(call)
            self._stack.append(call)
            before = sum(handle.reads for handle in self._cache.handles)
            try:
                call.output = type(module).forward(module, *args, **kwargs)
            finally:
                self._stack.pop()
            call.reads = sum(handle.reads for handle in self._cache.handles) - before
            call.query = None if call.key is None else self.query
            self._paused = True
            try:
                with _disable_current_modes():
                    self._finished(call)
            finally:
                self._paused = False
            return call.output

        recorder: Callable[..., Any] = mark(forward)
        return recorder


def same_memory(a: object, b: object) -> bool:
    """Return True if two tensors are views of the same elements, in any shape."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel() and a.dtype == b.dtype


Place = int | str
"""Where an argument is: its index or its name."""


def place_of(call: Call, wanted: Callable[[Any], bool]) -> Place | None:
    """Find the first argument for which `wanted` is true."""
    places = [(i, x) for i, x in enumerate(call.args)] + list(call.kwargs.items())
    return next((place for place, value in places if wanted(value)), None)


def at(place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument at a place; None if the call has no such argument."""
    if isinstance(place, int):
        return args[place] if place < len(args) else None
    return kwargs.get(place)
