"""Norms and rotary embeddings of a model done by one kernel each in packed steps, where that gives the same bits.

Between the matrix products of a decode step torch spends longer on calling small operations than on computing them.
What a module or function computes is not guessed from its name: it is run beside the kernel on random numbers, and
left alone unless every bit agrees.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.integration.attention import in_packed_step
from hf_paged.model.state import Slot

_ROTARY = "apply_rotary_pos_emb"  # the name of transformers' function in every modeling module that has one

_native: Slot[NativeLayers] = Slot("native norms")
_lock = threading.RLock()


def native_layers(model: Any) -> NativeLayers | None:
    """What kernels can do of the model, found out once; None if there is nothing."""
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or not fused_ops.is_available():
        return None
    known = _native.get(model)
    if known is None or not known.is_of(model):
        known = NativeLayers(model)
        _native.put(model, known)
    return known


class NativeLayers:
    """Stand-ins for some modules and functions of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._norms = [_Norm(module) for module in _norms(model)]
        names = {type(module).__module__ for module in model.modules()}
        self._functions = [f for name in sorted(names) if (f := _rotary_function(sys.modules.get(name))) is not None]

    def is_of(self, model: nn.Module) -> bool:
        """False when norms of the model have been replaced since."""
        return [norm.module() for norm in self._norms] == _norms(model)

    def enter(self) -> None:
        """Until `leave`, kernels compute in packed steps of this thread; all else is as always."""
        for norm in self._norms:
            norm.attributes["forward"] = norm.forward
        for function in self._functions:
            function.enter(self)

    def leave(self) -> None:
        """Undo `enter`, or what there was of it; may be called again."""
        for norm in self._norms:
            norm.attributes.pop("forward", None)
        for function in self._functions:
            function.leave(self)


# -- norms -----------------------------------------------------------------------------------------------------------

_probed: dict[tuple[type, int, float], bool] = {}  # by class, size and epsilon: is it the kernel's norm?


def norm_of(module: nn.Module) -> fused_ops.Norm | None:
    """The kernel's norm that computes, bit for bit, what the module does; None if there is none."""
    return fused_ops.Norm(module._parameters["weight"], _epsilon(module)) if _is_norm(module) else None


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if _is_norm(module)]


def _is_norm(module: nn.Module) -> bool:
    weight, eps = module._parameters.get("weight"), _epsilon(module)
    if len(module._parameters) != 1 or weight is None or weight.dim() != 1 or math.isnan(eps):
        return False
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return False
    if weight.numel() % 16 or "forward" in module.__dict__:
        return False
    key = (type(module), weight.numel(), eps)
    if key not in _probed:
        _probed[key] = _probe_norm(module, weight.numel(), eps)
    return _probed[key]


def _epsilon(module: nn.Module) -> float:
    """NaN: it is no norm."""
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(found) if isinstance(found, float | int) else math.nan


@torch.no_grad()
def _probe_norm(module: nn.Module, size: int, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 24, size, generator=generator) * torch.logspace(-3, 3, 24)[:, None]
    rows = rows.bfloat16()
    try:
        probe = copy.deepcopy(module)
        weight = torch.randn(size, generator=generator).bfloat16()
        probe._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        return torch.equal(probe(rows), fused_ops.rms_norm(fused_ops.Norm(weight, eps), rows))
    except Exception:  # whatever a module of that shape may do with rows: it is none of ours
        return False


class _Norm:
    __slots__ = ("attributes", "forward", "module")

    def __init__(self, module: nn.Module) -> None:
        # By reference, the module would keep the model alive that is the key of its stand-ins.
        self.module = reference = weakref.ref(module)
        self.attributes = module.__dict__
        parameters, eps, plain = module._parameters, _epsilon(module), type(module).forward

        def forward(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            weight = parameters["weight"]
            bfloat16 = torch.bfloat16
            fits = rows.dtype == weight.dtype == bfloat16 and rows.shape[-1:] == weight.shape
            if args or kwargs or not fits or not in_packed_step():
                result: torch.Tensor = plain(reference(), rows, *args, **kwargs)
                return result
            return fused_ops.rms_norm(fused_ops.Norm(weight, eps), rows)

        self.forward = forward


# -- rotary embeddings -----------------------------------------------------------------------------------------------


class _RotaryFunction:
    """A modeling module's function, replaced while any packed step needs it."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._original = original = namespace[_ROTARY]
        self._users: set[int] = set()

        def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
            if args or kwargs or not in_packed_step() or not _fits(q, k, cos, sin):
                return original(q, k, cos, sin, *args, **kwargs)
            return fused_ops.rotate(q, k, cos, sin)

        self._stand_in = rotate

    def enter(self, user: object) -> None:
        with _lock:
            self._users.add(id(user))
            if self._namespace[_ROTARY] is self._original:
                self._namespace[_ROTARY] = self._stand_in

    def leave(self, user: object) -> None:
        with _lock:
            self._users.discard(id(user))
            if not self._users and self._namespace[_ROTARY] is self._stand_in:
                self._namespace[_ROTARY] = self._original


_functions: dict[Callable[..., Any], _RotaryFunction | None] = {}


def _rotary_function(module: Any) -> _RotaryFunction | None:
    original = getattr(module, _ROTARY, None)
    if original is None:
        return None
    with _lock:
        if original not in _functions:
            _functions[original] = _RotaryFunction(vars(module)) if _probe_rotary(original) else None
        return _functions[original]


@torch.no_grad()
def _probe_rotary(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    q, k = random(1, 7, 4, 64).transpose(1, 2), random(1, 7, 2, 64).transpose(1, 2)
    cos, sin = random(1, 7, 64), random(1, 7, 64)
    try:
        theirs = function(q, k, cos, sin)
        return all(map(torch.equal, theirs, fused_ops.rotate(q, k, cos, sin)))
    except Exception:  # another signature, other shapes
        return False


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    tokens, dim = q.shape[-2:]
    return (
        q.dtype == k.dtype == cos.dtype == sin.dtype == torch.bfloat16
        and q.dim() == 4
        and q.shape[0] == 1
        and k.shape == (1, k.shape[1], tokens, dim)
        and cos.shape == sin.shape == (1, tokens, dim)
        and dim % 32 == 0
        and q.stride(3) == k.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )
