"""Methods that a call of a module goes through, or its forward calls, and modes of torch. Knows torch only."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

CALLING = "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__"
"""Methods that every call of a module goes through."""
OF_INSTANCE = "forward", "_call_impl", "_compiled_call_impl"
"""Where a call looks on the module itself before it looks in the class."""

_helpers: weakref.WeakKeyDictionary[type, tuple[Callable[[], Any], list[str]]] = weakref.WeakKeyDictionary()


def helpers(owner: type) -> list[str]:
    """The methods of a class of modules that its forward calls, directly or through one another."""
    forward = getattr(owner, "forward", None)
    known = _helpers.get(owner)
    # A class may have got another forward.
    if known is None or known[0]() is not forward:
        known = _helpers[owner] = _reference(forward), _find_helpers(owner, forward)
    return known[1]


def _reference(forward: Any) -> Callable[[], Any]:
    """Return a weak reference, if there can be one: a forward with `super()` keeps its class alive."""
    try:
        return weakref.ref(forward)
    except TypeError:
        return lambda: forward


def _find_helpers(owner: type, forward: Any) -> list[str]:
    found: dict[str, Any] = {}
    queue = [forward]
    for function in queue:
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        for name in code.co_names if code is not None else ():
            if name in found or hasattr(nn.Module, name):
                # A method of every module is one of tensors there.
                continue
            value = inspect.getattr_static(owner, name, None)
            if isinstance(value, FunctionType | staticmethod):
                found[name] = value
                queue.append(getattr(value, "__func__", value))
    return list(found)


def modes() -> list[type]:
    """The kinds of modes in this thread that see what torch is called with: others' than ours and a default device."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return []
    active = [*torch.overrides._get_current_function_mode_stack()]
    active += torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return [type(mode) for mode in active if not _is_trusted(mode)]


def _is_trusted(mode: object) -> bool:
    return type(mode) is DeviceContext or type(mode).__module__.startswith("hf_paged.")


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Within it this thread is in none of the modes that `modes` finds: each trial runs so, since a mode that counts or
    records what the caller computes must not see what hf_paged tries."""
    if not modes():
        yield
        return
    stack = torch.overrides._get_current_function_mode_stack()
    try:
        # A default device is such a mode too, and stays.
        _use(filter(_is_trusted, stack))
        with torch.utils._python_dispatch._disable_current_modes():
            yield
    finally:
        _use(stack)


def _use(stack: Iterable[Any]) -> None:
    """Replace the modes of this thread that see what torch is called with."""
    while torch._C._len_torch_function_stack():
        torch.overrides._pop_mode()
    for mode in stack:
        torch.overrides._push_mode(mode)
