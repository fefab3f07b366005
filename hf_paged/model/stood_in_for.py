"""The one list of what native code of hf_paged computes in place of torch. Whoever replaces any of it must be heard.

`ForeignCode` watches the list; a forward that calls what is not in it is not known (`known_code`), so no native path
can forget to enter what it goes around. Knows torch only.
"""

from __future__ import annotations

import inspect
import weakref
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

_FORWARD: list[tuple[Any, str, tuple[str, ...]]] = [
    (nn.functional, "torch.nn.functional", (
        "linear", "silu", "gelu", "relu", "sigmoid", "tanh", "softmax", "dropout", "layer_norm", "rms_norm",
        "scaled_dot_product_attention", "grouped_mm",
    )),
    (torch, "torch", (
        "cat", "chunk", "matmul", "mean", "mul", "pow", "reshape", "rsqrt", "sigmoid", "softmax", "square", "stack",
        "tanh", "topk", "transpose", "unsqueeze", "dropout", "_grouped_mm",
    )),
    (torch.Tensor, "torch.Tensor", (
        "chunk", "clamp", "contiguous", "dtype", "float", "mean", "pow", "reshape", "rsqrt", "shape", "size", "softmax",
        "to", "topk", "transpose", "type_as", "unsqueeze", "view", "__add__", "__getitem__", "__matmul__", "__mul__",
        "__neg__", "__radd__", "__rmul__",
    )),
    (nn.Module, "torch.nn.Module", (
        "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__",
    )),
]  # fmt: skip
_CHOICE: list[tuple[Any, str, tuple[str, ...]]] = [
    (torch, "torch", ("argmax", "log_softmax", "multinomial", "softmax", "topk")),
    (nn.functional, "torch.nn.functional", ("log_softmax", "softmax")),
]
"""What transformers chooses tokens with. An engine chooses them itself, a call of `generate` does not."""

CALLING = _FORWARD[-1][2]
"""What a call of a module goes through."""
OF_INSTANCE = "forward", "_call_impl", "_compiled_call_impl"
"""Where a call looks on the module itself before it looks in the class."""
_NAMES = frozenset(name for _, _, names in _FORWARD for name in names)
_PLACES = [(owner, name) for owner, _, names in _FORWARD + _CHOICE for name in names if hasattr(owner, name)]
_OWNERS, _EACH = [owner for owner, _ in _PLACES], [name for _, name in _PLACES]
_LABELS = [f"{label}.{name}" for owner, label, names in _FORWARD + _CHOICE for name in names if hasattr(owner, name)]
_NUM_FORWARD = sum(hasattr(owner, name) for owner, _, names in _FORWARD for name in names)
_ORIGINALS = list(map(getattr, _OWNERS, _EACH))


_helpers: weakref.WeakKeyDictionary[type, tuple[object, list[str]]] = weakref.WeakKeyDictionary()


def helpers(owner: type) -> list[str]:
    """The methods of a class of modules that its forward calls, directly or through one another."""
    forward = getattr(owner, "forward", None)
    known = _helpers.get(owner)
    if known is None or known[0] is not forward:
        known = _helpers[owner] = forward, _find_helpers(owner, forward)
    return known[1]


def _find_helpers(owner: type, forward: Any) -> list[str]:
    found: dict[str, Any] = {}
    queue = [forward]
    for function in queue:
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        for name in code.co_names if code is not None else ():
            if name in found or hasattr(nn.Module, name):
                continue  # a method of every module is one of tensors there
            value = inspect.getattr_static(owner, name, None)
            if isinstance(value, FunctionType | staticmethod):
                found[name] = value
                queue.append(getattr(value, "__func__", value))
    return list(found)


def present() -> list[Any]:
    """What is there now. Called in every step, so it must be fast."""
    return list(map(getattr, _OWNERS, _EACH))


def places(*, of_choice: bool = False) -> list[tuple[str, Any, bool]]:
    """Each name in words, its present value, and whether it is the one that was there when hf_paged was imported."""
    part = slice(_NUM_FORWARD, None) if of_choice else slice(_NUM_FORWARD)
    values = present()[part]
    return [(label, value, value is own) for label, value, own in zip(_LABELS[part], values, _ORIGINALS[part])]


def modes() -> list[type]:
    """The kinds of modes in this thread that see what torch is called with: others' than ours and a default device."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return []
    active = [*torch.overrides._get_current_function_mode_stack()]
    active += torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    kinds = [type(mode) for mode in active]
    return [kind for kind in kinds if kind is not DeviceContext and not kind.__module__.startswith("hf_paged.")]


def is_watched(name: str) -> bool:
    """Whether replacing what code calls by this name would be noticed, if it is torch's."""
    values = (getattr(owner, name, None) for owner in (torch, nn.functional, torch.Tensor))
    return name in _NAMES or not any(callable(value) and not isinstance(value, type) for value in values)
