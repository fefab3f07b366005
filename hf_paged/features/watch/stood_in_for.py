"""Find replaced functions of torch: native code, which may compute any torch function, must not run then.

Whole namespaces are compared, so that no native path can forget to enter what it goes around, and no function of others
is missed that depends on how tokens are laid out. Knows torch only.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

CALLING = "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__"
"""Methods that every call of a module goes through."""
OF_INSTANCE = "forward", "_call_impl", "_compiled_call_impl"
"""Where a call looks on the module itself before it looks in the class."""
OF_CHOICE = frozenset(f"torch.{name}" for name in ("argmax", "log_softmax", "multinomial", "softmax", "topk")) | {
    "torch.nn.functional.log_softmax", "torch.nn.functional.softmax",
}  # fmt: skip
"""Functions with which transformers chooses tokens. An engine does not call these, `generate` does."""

_OF_TORCH, _OF_FUNCTIONAL, _OF_TENSOR, _OF_MODULE = map(vars, (torch, nn.functional, torch.Tensor, nn.Module))
# Methods of tensors that compute nothing for a forward; libraries replace some.
_NO_NUMBERS = frozenset(
    {"__deepcopy__", "__dir__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "backward", "register_hook"}
)
# No forward computes with what these leave in a tensor. Debuggers replace them, to fill it.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def _every() -> dict[str, Any]:
    """Return the current contents of torch's namespaces by their full names."""
    tensors = {name: value for kind in reversed(torch.Tensor.__mro__) for name, value in vars(kind).items()}
    return {
        **{f"torch.{name}": value for name, value in list(_OF_TORCH.items())},
        **{f"torch.nn.functional.{name}": value for name, value in list(_OF_FUNCTIONAL.items())},
        **{f"torch.Tensor.{name}": value for name, value in tensors.items() if name not in _NO_NUMBERS},
        **{f"torch.nn.Module.{name}": getattr(nn.Module, name) for name in CALLING},
    }


def _computes(name: str, value: Any) -> bool:
    """Return True if a forward can compute with this value.

    Python functions of `torch` itself cannot: they save, load, seed and compile.
    """
    if name.rpartition(".")[2] in _UNWRITTEN:
        return False
    if isinstance(value, FunctionType) and name.count(".") == 1:
        return value.__module__ == "torch.functional"
    if isinstance(value, type) or type(value).__module__ in ("typing", "typing_extensions"):
        return False
    return callable(value) or inspect.isdatadescriptor(value)


_ORIGINALS = {name: value for name, value in _every().items() if _computes(name, value)}


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


def namespaces() -> list[Mapping[str, Any]]:
    """Where torch's functions and methods are: what is put into one of these is heard."""
    return [_OF_TORCH, _OF_FUNCTIONAL, _OF_TENSOR, _OF_MODULE]


def originals() -> Mapping[str, Any]:
    """Return the functions and descriptors of torch, by full name, as they were when hf_paged was imported."""
    return _ORIGINALS


def replaced() -> dict[str, Any]:
    """Return the replaced functions of torch: by full name, the object there now, or None if there is none."""
    now = _every()
    return {name: now.get(name) for name, own in _ORIGINALS.items() if now.get(name) is not own}


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
