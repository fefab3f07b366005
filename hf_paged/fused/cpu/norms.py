"""Native kernels for a model's norms and rotary embeddings during packed steps, where they give the same bits.

Between the matrix products of a decode step, calling torch's small operations takes longer than computing them, so one
kernel replaces several operations. Modules and functions are recognised by their code (`known_code`), and are replaced
only if every bit is equal for random numbers too: torch may round otherwise here.
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

from hf_paged.features.watch.known_code import is_known, is_known_module, settings_of
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.integration.attention import in_packed_step
from hf_paged.locks import usable_after_fork
from hf_paged.model.overrides import Overrides, Patch, mark, uncompiled_modules, without_override
from hf_paged.model.parameters import readable_weight
from hf_paged.model.picture import ClassForwards, differ
from hf_paged.model.state import Slot, state_of
from hf_paged.model.trial import attempt, random_numbers

_EPSILONS = ("variance_epsilon", "eps")  # the attribute's names
_ROTARY = "apply_rotary_pos_emb"  # the name of transformers' function in every modeling module that has one

_native: Slot[NativeLayers] = Slot("native norms")
_lock = usable_after_fork(threading.RLock())


def native_layers(model: Any) -> NativeLayers | None:
    """Overrides for the parts of the model that kernels can compute, determined once; None if there are none."""
    if model.device.type != "cpu" or not fused_ops.is_available(model.dtype):
        return None
    state_of(model).weights.look()
    known = _native.get(model)
    if known is None or not known.is_of(model):
        known = NativeLayers(model)
        _native.put(model, known)
    return known


class NativeLayers:
    """Overrides for some modules and functions of a model."""

    def __init__(self, model: nn.Module) -> None:
        modules = _norms(model)
        self._norms = [NativeNorm(module) for module in modules]
        self._weights = state_of(model).weights
        self._seen = self._found = self._weights.layout, self._weights.all_moved
        # One list per class: it is not applied after the class's forward has been replaced.
        self._lists: list[tuple[ClassForwards, Overrides]] = []
        for owner in dict.fromkeys(map(type, modules)):
            patches = [
                Patch(vars(m), "forward", norm.forward) for m, norm in zip(modules, self._norms) if type(m) is owner
            ]
            self._lists.append((ClassForwards([owner]), Overrides(patches)))
        names = {type(module).__module__ for module in model.modules()}
        self._functions = [f for name in sorted(names) if (f := rotary_override(sys.modules.get(name))) is not None]

    def is_of(self, model: nn.Module) -> bool:
        """False if norms of the model have been replaced since this was made, as of the last look at the weights."""
        seen = self._weights.layout, self._weights.all_moved
        # To look for norms again takes milliseconds, in each call of `generate`.
        if seen != self._found and [norm.module() for norm in self._norms] == _norms(model):
            self._found = seen
        return seen == self._found

    def apply(self, user: object) -> None:
        """Until `undo`, kernels compute these parts in packed steps of this thread; other calls are unaffected."""
        seen = self._weights.layout, self._weights.all_moved
        if seen != self._seen:
            for norm in self._norms:
                norm.renew()
            self._seen = seen
        for classes, norms in self._lists:
            if classes.changed_at(self._weights.layout):
                norms.withdraw()
            else:
                norms.apply(user)
        for function in self._functions:
            function.apply(user)

    def undo(self, user: object) -> None:
        """Undo `apply`, even if it was interrupted. Idempotent."""
        for _, norms in self._lists:
            norms.undo(user)
        for function in self._functions:
            function.undo(user)


# -- norms -----------------------------------------------------------------------------------------------------------

# By class, forward, dtype, size and settings: does the kernel give its bits?
_probed: dict[tuple[Any, ...], bool] = {}


def norm_of(module: nn.Module) -> fused_ops.Norm | None:
    """The kernel's norm that gives the same bits as the module's class; None if there is none."""
    weight = readable_weight(module) if _is_norm(module) else None
    return None if weight is None else fused_ops.Norm(weight, _epsilon(module))


def _norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in uncompiled_modules(model) if _is_norm(module)]


def _is_norm(module: nn.Module) -> bool:
    weight, eps = readable_weight(module), _epsilon(module)
    if len(module._parameters) != 1 or weight is None or weight.dim() != 1 or math.isnan(eps):
        return False
    # The kernel has no code for a rest of less than a vector.
    if weight.device.type != "cpu" or not fused_ops.is_available(weight.dtype) or weight.numel() % 16:
        return False
    if not is_known_module(module, "norm"):
        return False
    settings = tuple((name, value) for _, name, value in settings_of(module))
    # Everything that a forward reads, so that a verdict holds for each module with it.
    key = (type(module), type(module).forward, weight.dtype, weight.numel(), *settings)
    if key not in _probed:
        _probed[key] = _probe_norm(module, weight.dtype, weight.numel(), eps)
    return _probed[key]


def _epsilon(module: nn.Module) -> float:
    """The epsilon of a norm; NaN if the module is not a norm."""
    found = next((vars(module)[name] for name in _EPSILONS if name in vars(module)), None)
    return float(found) if isinstance(found, float | int) else math.nan


@torch.no_grad()
def _probe_norm(module: nn.Module, dtype: torch.dtype, size: int, eps: float) -> bool:
    random = random_numbers()
    # Only small rows show the epsilon.
    magnitudes = torch.logspace(-3, 3, 24, dtype=torch.float32, device="cpu")
    rows = (random(1, 24, size) * magnitudes[:, None]).to(dtype)

    def agrees() -> bool:
        probe = copy.deepcopy(module)
        norm = fused_ops.Norm(random(size).to(dtype), eps)
        probe._parameters["weight"] = nn.Parameter(norm.weight, requires_grad=False)
        # A decode step has a single row, which torch might add up in another order.
        each = (rows, *rows.split(1, dim=1))
        return all(torch.equal(type(probe).forward(probe, x), fused_ops.rms_norm(norm, x)) for x in each)

    return attempt(agrees) is True


class NativeNorm:
    """One norm. `forward` replaces its own; while the weight is none that the kernel may read, it computes the same."""

    __slots__ = ("_found", "_kind", "forward", "module")

    def __init__(self, module: nn.Module) -> None:
        # A weak reference: a strong one would keep the model alive, which is the key of its overrides.
        self.module = reference = weakref.ref(module)
        self._kind = module._parameters["weight"].dtype, _epsilon(module)  # type: ignore[union-attr]
        self._found = found = [norm_of(module)]
        parameters, attributes = module._parameters, vars(module)
        names, values = map(list, zip(*((name, value) for _, name, value in settings_of(module)), strict=True))

        def forward(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            norm, own = found[0], reference()
            # A hook may replace the weight for the time of a call, and anyone the epsilon.
            is_known = norm is not None and parameters.get("weight") is norm.weight and not args and not kwargs
            is_known = is_known and not differ(list(map(attributes.get, names)), values)
            if norm is None or not is_known or not _takes(norm.weight, rows) or not in_packed_step():
                result: torch.Tensor = type(own).forward(own, rows, *args, **kwargs)  # type: ignore[union-attr]
                return result
            return fused_ops.rms_norm(norm, rows)

        self.forward: Callable[..., torch.Tensor] = mark(forward)

    def renew(self) -> None:
        """Look at the weight again, which may be another one, or computed."""
        module, (dtype, eps) = self.module(), self._kind
        weight = readable_weight(module) if module is not None and is_known_module(module, "norm") else None
        fits = weight is not None and weight.dtype == dtype and weight.device.type == "cpu"
        self._found[0] = fused_ops.Norm(weight, eps) if weight is not None and fits else None


def _takes(weight: torch.Tensor, rows: torch.Tensor) -> bool:
    plain = type(rows) is torch.Tensor and rows.dtype == weight.dtype and rows.is_cpu
    return plain and rows.shape[-1:] == weight.shape and weight.is_contiguous()


# -- rotary embeddings -----------------------------------------------------------------------------------------------

_rotations: dict[tuple[str, Callable[..., Any]], Overrides | None] = {}  # by the name of a module and its function


def own_rotary(namespace: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the rotary function of a modeling module; None if there is none, or if it was replaced."""
    function: Callable[..., Any] | None = without_override(namespace.get(_ROTARY))
    home = getattr(function, "__globals__", {})  # of the module that defines it
    return function if function is not None and without_override(home.get(_ROTARY)) is function else None


def rotary_override(module: Any) -> Overrides | None:
    """The override of a modeling module's rotary function; None if the kernel does not give the same bits."""
    if module is None or (function := own_rotary(vars(module))) is None or not is_known(function, "rotary"):
        return None
    key = module.__name__, function
    # Two threads that probe at once would make two overrides of one function.
    with _lock:
        if key not in _rotations:
            dtypes = {
                dtype for dtype in (torch.bfloat16, torch.float32, torch.float16) if _probe_rotary(function, dtype)
            }
            _rotations[key] = _make_rotary(vars(module), function, dtypes) if dtypes else None
        return _rotations[key]


def _make_rotary(namespace: dict[str, Any], plain: Callable[..., Any], dtypes: set[torch.dtype]) -> Overrides:
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs or q.dtype not in dtypes or not in_packed_step() or not _fits(q, k, cos, sin):
            return plain(q, k, cos, sin, *args, **kwargs)
        return fused_ops.rotate(q, k, cos, sin)

    return Overrides([Patch(namespace, _ROTARY, mark(rotate, plain), plain)])


@torch.no_grad()
def _probe_rotary(function: Callable[..., Any], dtype: torch.dtype) -> bool:
    if not fused_ops.is_available(dtype):
        return False
    random = random_numbers()
    # Strides and numbers of heads as models give them.
    q, k = (random(1, 7, count, 64).to(dtype).transpose(1, 2) for count in (4, 2))
    cos, sin = (random(1, 7, 64).to(dtype) for _ in range(2))
    # A foreign function may have another signature, or other shapes.
    return attempt(lambda: all(map(torch.equal, function(q, k, cos, sin), fused_ops.rotate(q, k, cos, sin)))) is True


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    tokens, dim = q.shape[-2:]
    return (
        all(type(x) is torch.Tensor and x.is_cpu for x in (q, k, cos, sin))
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.dim() == 4
        and q.shape[0] == 1
        and k.shape == (1, k.shape[1], tokens, dim)
        and cos.shape == sin.shape == (1, tokens, dim)
        and dim % 32 == 0
        and q.stride(3) == k.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
    )
