"""Norms of models, recognised by what they compute, and their part."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.fused.gpu.parts import Part, alive
from hf_paged.fused.gpu.trace import ALLOCATIONS
from hf_paged.fused.rows import (
    DTYPES,
    MAX_SIZE,
    NORM_KINDS,
    Norm,
    NormKind,
    are_alike,
    normalise,
)
from hf_paged.model.overrides import is_unhooked
from hf_paged.model.parameters import readable
from hf_paged.model.trial import Refusal, attempt, random_numbers

# By class, forward, dtype, size, epsilon, parameters and other attributes: its kind.
_probed: dict[tuple[Any, ...], NormKind | None] = {}


class NormOf:
    """The norm that a module computes, with its current weight and epsilon. constant: the epsilon of a module that has
    it in its code."""

    def __init__(self, module: nn.Module, kind: NormKind, size: int, constant: float | None = None) -> None:
        self._module = weakref.ref(module)
        self.size = size
        self._kind = kind
        self._constant = constant

    @property
    def module(self) -> nn.Module:
        return alive(self._module)

    @property
    def held(self) -> Any:
        return id(self.module), self.size, self._kind, self._constant

    def __call__(self) -> Norm:
        parameters = self.module._parameters
        eps = _epsilon(self.module) if self._constant is None else self._constant
        return Norm(parameters.get("weight"), parameters.get("bias"), eps, self._kind)

    def takes(self, rows: torch.Tensor) -> bool:
        weight = self.module._parameters.get("weight")
        return rows.shape[-1] == self.size and (weight is None or weight.dtype == rows.dtype)


def norm_of(module: nn.Module, size: int, dtype: torch.dtype) -> NormOf | None:
    """The norm of rows of this size and dtype that the module computes; None if it is none, or has hooks."""
    if (
        module._modules
        or module._buffers
        or not is_unhooked(module)
        or not set(module._parameters) <= {"weight", "bias"}
    ):
        return None
    own = readable(module, *module._parameters)
    weights = [weight for weight in own or () if weight is not None]
    if own is None or dtype not in DTYPES or size > MAX_SIZE or any(w.shape != (size,) for w in weights):
        return None
    if any(weight.dtype != dtype or not weight.is_contiguous() for weight in weights):
        return None
    attributes = _attributes(module)
    if attributes is None:
        return None
    epsilon = _epsilon(module)
    # One of its numbers may be the epsilon, under a name that is not known.
    if math.isnan(epsilon) and any(isinstance(value, float) for value in vars(module).values()):
        return None  # it may be that number
    device = weights[0].device if weights else torch.device("cpu")
    for eps in USUAL_EPSILONS if math.isnan(epsilon) else (epsilon,):
        key = type(module), type(module).forward, dtype, size, eps, len(weights), device, *attributes
        if key not in _probed:
            _probed[key] = _probe_norm(module, size, dtype, eps, device)
        if (kind := _probed[key]) is not None:
            return NormOf(module, kind, size, eps if math.isnan(epsilon) else None)
    return None


USUAL_EPSILONS = 1e-5, 1e-6
"""Epsilons that modules have in their code."""


def _epsilon(module: nn.Module) -> float:
    for name in ("variance_epsilon", "eps", "epsilon", "norm_eps"):
        found = getattr(module, name, None)
        if isinstance(found, float | int):
            return float(found)
    return math.nan


_NORM_OPERATIONS = frozenset(
    {
        "_to_copy", "add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "mean",
        "sum", "var", "var_mean", "linalg_vector_norm", "ones_like", "layer_norm", "native_layer_norm", "rms_norm",
        "_fused_rms_norm",
    }
)  # fmt: skip


_BOOKKEEPING = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.Size, type(None))


def _attributes(module: nn.Module) -> list[tuple[str, str]] | None:
    """All that the module has beside its weights, in words; None if some of it is not told by words."""
    own = {name: value for name, value in list(vars(module).items()) if name not in _BOOKKEEPING | {"forward"}}
    values = list(own.values())
    for value in values:
        if type(value) in (list, tuple):
            values += value
        elif type(value) not in _PLAIN:
            return None
    return sorted((name, repr(value)) for name, value in own.items())


class _Operations(TorchDispatchMode):
    """Records the operations of torch: one that few values reach, such as a limit, makes no norm of ours."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in ALLOCATIONS:
            self.names.add(name.removesuffix("_"))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _probe_norm(module: nn.Module, size: int, dtype: torch.dtype, eps: float, device: torch.device) -> NormKind | None:
    random = random_numbers()
    # Only small rows show the epsilon.
    magnitudes = torch.logspace(-3, 1, 24, dtype=torch.float32, device="cpu")
    rows = (random(1, 24, size) * magnitudes[:, None]).to(device, dtype)

    def kind_of() -> NormKind | None:
        probe = copy.deepcopy(module)
        for name, weight in probe._parameters.items():
            if weight is not None:
                probe._parameters[name] = nn.Parameter(random(size).to(device, dtype), requires_grad=False)
        # A limit in the code may not show in any of these rows, but it is an operation.
        with _Operations() as operations:
            expected = type(probe).forward(probe, rows)
        if not operations.names <= _NORM_OPERATIONS:
            return None
        weight, bias = (probe._parameters.get(name) for name in ("weight", "bias"))
        kinds = (kind for kind in NORM_KINDS if are_alike(normalise(rows, Norm(weight, bias, eps, kind)), expected))
        return next(kinds, None)

    found = attempt(kind_of)
    return None if isinstance(found, Refusal) else found


class NormPart(Part):
    """A norm that is called alone."""

    kind = "norm"

    def __init__(self, norm: NormOf) -> None:
        super().__init__(norm.module)
        self.norm = norm

    def compute(self, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from hf_paged.fused.gpu.kernels.norm import add_norm

        if args or kwargs or not self.norm.takes(rows):
            return self.plain(rows, *args, **kwargs)  # type: ignore[no-any-return]
        out = add_norm(rows.reshape(-1, self.norm.size), after=self.norm()).out
        assert out is not None
        return out.view(rows.shape)
