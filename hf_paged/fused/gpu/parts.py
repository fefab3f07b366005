"""Parts of a model that our kernels compute in fewer launches: the contract, norms, and gated MLPs.

A part is recognised by what its module computed in a recorded forward. It replaces the module's `forward` in packed
steps. It calls linear layers as modules, so that adapters, quantization and hooks stay in effect; the modules that it
passes over (norms, activations) must be free of hooks and of forwards that other code has set.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_paged.fused.gpu.packing import LinearGroup, is_linear
from hf_paged.fused.gpu.trace import Call, same_memory
from hf_paged.integration.attention import in_packed_step
from hf_paged.kernels.rows import ACTIVATIONS, MAX_SIZE, NORM_KINDS, Norm, NormKind, are_alike, are_close, normalise
from hf_paged.model.overrides import ClassForwards, foreign_forward, mark

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Part:
    """A module whose forward is replaced. Subclasses define `compute`, with the arguments and results of the module.

    skipped: names of its children that are not called, nor what is inside them.
    modules: the module and all that are not called. classes: their classes when the part was recognised.
    """

    kind = "part"
    group: LinearGroup | None = None
    """Its linear layers that read the same rows, if there are any."""

    def __init__(self, module: nn.Module, skipped: Iterable[str] = ()) -> None:
        self.module = module
        self._skipped = _places_of(module, skipped)
        self.modules = [module, *(child for _, _, child in self._skipped)]
        self.classes = [type(each) for each in self.modules]
        self._class_forwards = ClassForwards(self.classes)
        mark(type(self).forward)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def trials(self, call: Call) -> Iterator[Any]:
        """Results for the call's arguments, by every way in which the part may compute them."""
        yield self.compute(*call.args, **call.kwargs)

    @staticmethod
    def compared(output: Any) -> list[torch.Tensor]:
        """What must be equal in the output of a trial and that of the module."""
        return [output[0] if isinstance(output, tuple) else output]

    def is_whole(self) -> bool:
        """Whether the modules that are not called are where they were when it was recognised."""
        return all(children.get(name) is child for children, name, child in self._skipped)

    def is_ready(self) -> bool:
        """Whether it computes what its module would: other code has hooked or changed nothing that it passes over, and
        nothing is in training mode."""
        if list(map(type, self.modules)) != self.classes or any(each.training for each in self.modules):
            return False
        bare = all(is_bare(child) for _, _, child in self._skipped)
        return bare and not foreign_forward(self.module) and not self._class_forwards.changed()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs) if in_packed_step() else self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def _places_of(module: nn.Module, names: Iterable[str]) -> list[tuple[dict[str, Any], str, nn.Module]]:
    """These children and all modules inside them: the dictionary that has each, its name there, and the module."""
    places: list[tuple[dict[str, Any], str, nn.Module]] = []
    for name in names:
        child = module._modules[name]
        if child is not None:
            places += [(module._modules, name, child), *_places_of(child, child._modules)]
    return places


def passes_through(module: nn.Module) -> bool:
    """Whether the module returns what it gets, outside of training mode."""
    return type(module) in (nn.Dropout, nn.Identity)


def is_bare(module: nn.Module) -> bool:
    """Whether calling the module would run its class's forward and nothing else."""
    return not (module._forward_hooks or module._forward_pre_hooks or foreign_forward(module))


# -- norms -----------------------------------------------------------------------------------------------------------

# By class, forward, dtype, size, epsilon and parameters: its kind.
_probed: dict[tuple[Any, ...], NormKind | None] = {}


class NormOf:
    """The norm that a module computes, with its current weight and epsilon."""

    def __init__(self, module: nn.Module, kind: NormKind, size: int) -> None:
        self.module = module
        self.size = size
        self._kind = kind

    def __call__(self) -> Norm:
        parameters = self.module._parameters
        return Norm(parameters.get("weight"), parameters.get("bias"), _epsilon(self.module), self._kind)

    def takes(self, rows: torch.Tensor) -> bool:
        weight = self.module._parameters.get("weight")
        return rows.shape[-1] == self.size and (weight is None or weight.dtype == rows.dtype)


def norm_of(module: nn.Module, size: int, dtype: torch.dtype) -> NormOf | None:
    """The norm of rows of this size and dtype that the module computes; None if it is none, or has hooks."""
    if module._modules or not is_bare(module) or not set(module._parameters) <= {"weight", "bias"}:
        return None
    weights = [weight for weight in module._parameters.values() if weight is not None]
    if (
        dtype not in DTYPES
        or size > MAX_SIZE
        or any(type(w) is not nn.Parameter or w.shape != (size,) for w in weights)
    ):
        return None
    if any(weight.dtype != dtype or not weight.is_contiguous() for weight in weights):
        return None
    eps = _epsilon(module)
    if math.isnan(eps):
        return None
    device = weights[0].device if weights else torch.device("cpu")
    key = type(module), type(module).forward, dtype, size, eps, len(weights), device
    if key not in _probed:
        _probed[key] = _probe_norm(module, size, dtype, eps, device)
    kind = _probed[key]
    return None if kind is None else NormOf(module, kind, size)


def _epsilon(module: nn.Module) -> float:
    for name in ("variance_epsilon", "eps", "epsilon", "norm_eps"):
        found = getattr(module, name, None)
        if isinstance(found, float | int):
            return float(found)
    return math.nan


@torch.no_grad()
def _probe_norm(module: nn.Module, size: int, dtype: torch.dtype, eps: float, device: torch.device) -> NormKind | None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rows = (random(1, 24, size) * torch.logspace(-3, 1, 24)[:, None]).to(device, dtype)
    try:
        probe = copy.deepcopy(module)
        for name, weight in probe._parameters.items():
            if weight is not None:
                probe._parameters[name] = nn.Parameter(random(size).to(device, dtype), requires_grad=False)
        expected = type(probe).forward(probe, rows)
        weight, bias = (probe._parameters.get(name) for name in ("weight", "bias"))
        kinds = (kind for kind in NORM_KINDS if are_alike(normalise(rows, Norm(weight, bias, eps, kind)), expected))
        return next(kinds, None)
    except Exception:  # a foreign module may raise anything on such rows; then it is not a norm that we know
        return None


class NormPart(Part):
    """A norm that is called alone."""

    kind = "norm"

    def __init__(self, norm: NormOf) -> None:
        super().__init__(norm.module)
        self.norm = norm

    def compute(self, rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        from hf_paged.kernels.triton.norm import add_norm

        if args or kwargs or not self.norm.takes(rows):
            return self.plain(rows, *args, **kwargs)  # type: ignore[no-any-return]
        out = add_norm(rows.reshape(-1, self.norm.size), after=self.norm()).out
        assert out is not None
        return out.view(rows.shape)


# -- gated MLPs ------------------------------------------------------------------------------------------------------


class GatedPart(Part):
    """down(activation(gate(x)) * up(x)), where one linear layer may compute both gate and up."""

    kind = "MLP"

    def __init__(self, call: Call, inputs: list[str], down: str, order: int, activation: str) -> None:
        skipped = {child.name for child in call.children} - {*inputs, down}
        super().__init__(call.module, skipped)
        self.group, self._down = LinearGroup(call.module, inputs), down
        self._gate_is_second = order == 1
        self._activation = activation

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._child(self._down)(self._inner(rows))
        return out

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, scale: float | None) -> torch.Tensor:
        """residual + scale * the MLP's result for `rows`; may write it into `residual`."""
        inner, down = self._inner(rows), self._child(self._down)
        weight = down._parameters.get("weight")
        if is_linear(down) and type(weight) is nn.Parameter and down.bias is None:
            flat, alpha = residual.view(-1, residual.shape[-1]), 1.0 if scale is None else scale
            flat.addmm_(inner.view(-1, inner.shape[-1]), weight.t(), alpha=alpha)
            return residual
        result: torch.Tensor = down(inner)
        return residual + (result if scale is None else result * scale)

    def _child(self, name: str) -> Any:
        return self.module._modules[name]

    def _inner(self, rows: torch.Tensor) -> torch.Tensor:
        from hf_paged.kernels.triton.gate import gated

        assert self.group is not None
        parts = self.group(rows)
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        if self._gate_is_second:
            gate, up = up, gate
        size = gate.shape[-1]
        return gated(_as_rows(gate, size), _as_rows(up, size), self._activation).view(*rows.shape[:-1], size)


def _as_rows(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(-1, size)


def gated_part(call: Call) -> GatedPart | None:
    """The part for a module that computed a gated MLP; None if it computed anything else."""
    rows, children = call.input, call.children
    if not isinstance(rows, torch.Tensor) or not isinstance(call.output, torch.Tensor) or len(call.args) != 1:
        return None
    if call.kwargs or not 2 <= len(children) <= 4 or not all(child.name for child in children):
        return None
    # A linear layer's result has other sizes than an activation's, and comes straight from the input.
    first = [c for c in children if c.input is rows and isinstance(c.output, torch.Tensor)]
    last = children[-1]
    if not same_memory(last.output, call.output) or last in first or not isinstance(last.input, torch.Tensor):
        return None
    outputs = [child.output for child in first]
    if len(first) == 1:
        outputs = list(outputs[0].chunk(2, -1))
    if len(outputs) != 2 or any(part.shape != last.input.shape for part in outputs):
        return None
    for order in (0, 1):
        gate, up = outputs[order], outputs[1 - order]
        for name, activation in ACTIVATIONS.items():
            if are_alike(activation(gate) * up, last.input) and _computes(call, {*first, last}, name):
                return GatedPart(call, [child.name for child in first], last.name, order, name)
    return None


_OPERATIONS = {
    "silu": {"silu", "sigmoid"}, "gelu_tanh": {"gelu"}, "gelu": {"gelu"}, "relu": {"relu"}, "sigmoid": {"sigmoid"},
    "relu_squared": {"relu", "pow", "square"},
}  # fmt: skip


def _computes(call: Call, called: set[Call], activation: str) -> bool:
    """Whether it computed nothing else, such as a limit that few values reach."""
    names = call.names_without({child.module for child in called})
    return set(names) <= _OPERATIONS[activation] | {"mul"}


# -- activations -----------------------------------------------------------------------------------------------------


class ActivationPart(Part):
    """An activation that torch has as one operation, of a module that computes it by several."""

    kind = "activation"

    def __init__(self, module: nn.Module, activation: str) -> None:
        super().__init__(module)
        self._function = ACTIVATIONS[activation]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def activation_part(call: Call) -> ActivationPart | None:
    """The part for a module without weights that computed a GELU or SiLU in several launches; else None."""
    x, result = call.input, call.output
    if len(call.args) != 1 or call.kwargs or call.module._parameters or not isinstance(result, torch.Tensor):
        return None
    if len(call.names) < 2 or not set(call.names) <= {"mul", "pow", "add", "tanh", "erf", "sigmoid", "div"}:
        return None
    names = ("gelu_tanh", "gelu", "silu")
    close = (name for name in names if x.shape == result.shape and are_close(ACTIVATIONS[name](x), result, 0.01))
    found = next(close, None)
    return None if found is None or not _is_activation(call.module, found) else ActivationPart(call.module, found)


@torch.no_grad()
def _is_activation(module: nn.Module, name: str) -> bool:
    """Whether the module's class computes the activation in fp32, over the range where activations differ."""
    x = torch.linspace(-8, 8, 513)
    return are_close(type(module).forward(module, x), ACTIVATIONS[name](x), 1e-6)
