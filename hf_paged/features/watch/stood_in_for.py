"""Find replaced functions of torch: native code, which may compute any torch function, must not run then.

Whole namespaces are compared, so that no native path can forget to enter what it goes around, and no function of others
is missed that depends on how tokens are laid out. Knows torch only.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from hf_paged.model.calls import CALLING

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
