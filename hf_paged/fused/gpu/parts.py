"""Parts of a model that our kernels compute in fewer launches: the contract, MLPs and activations.

A part is recognised by what its module computed in a recorded forward. It replaces the module's `forward` in packed
steps. It calls linear layers as modules, so that adapters, quantization and hooks stay in effect; the modules that it
passes over (norms, activations) must be free of hooks and of forwards that other code has set.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_paged.fused.gpu.packing import LinearGroup, Product, product_of
from hf_paged.fused.gpu.trace import Call, same_memory
from hf_paged.fused.rows import (
    ACTIVATIONS,
    are_alike,
    are_close,
)
from hf_paged.integration.attention import in_packed_step
from hf_paged.model.overrides import foreign_forward, is_unhooked, mark
from hf_paged.model.parameters import readable
from hf_paged.model.picture import ClassForwards


class Part:
    """A module whose forward is replaced. Subclasses define `compute`, with the arguments and results of the module.

    skipped: names of its children that are not called, nor what is inside them.
    modules: the module and all that are not called. classes: their classes when the part was recognised.

    Modules are referred to weakly: a part must not keep the weights of modules that are replaced, but it holds again
    when they are put back.
    """

    kind = "part"
    group: LinearGroup | None = None
    """Its linear layers that read the same rows, if there are any."""

    def __init__(self, module: nn.Module, skipped: Iterable[str] = ()) -> None:
        self._module = weakref.ref(module)
        self._skipped = _places_of(module, skipped)
        self.classes = [type(each) for each in self.modules]
        self._parameters = [list(each._parameters) for each in self.modules if each is not None]
        self._class_forwards = ClassForwards(self.classes)
        mark(type(self).forward)

    @property
    def module(self) -> nn.Module:
        return alive(self._module)

    @property
    def modules(self) -> list[nn.Module | None]:
        """The module and all that are not called; None for modules that are gone."""
        return [self._module(), *(child() for _, _, child in self._skipped)]

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @property
    def held(self) -> Any:
        """Return what the part took from its call. Several calls of a module share a part only if this is equal."""
        return None

    def trials(self, call: Call) -> Iterator[Any]:
        """Results for the call's arguments, by every way in which the part may compute them."""
        yield self.compute(*call.args, **call.kwargs)

    @staticmethod
    def compared(output: Any) -> list[torch.Tensor]:
        """Return the tensors of an output that must be close for a trial and for the module."""
        return [output[0] if isinstance(output, tuple) else output]

    def is_whole(self) -> bool:
        """Return True if the modules that are not called are where they were when the part was recognised."""
        places = ((parent(), name, child()) for parent, name, child in self._skipped)
        return self._module() is not None and all(
            parent is not None and child is not None and parent._modules.get(name) is child
            for parent, name, child in places
        )

    def is_ready(self) -> bool:
        """Return True if the part computes what its module would. Then nothing that it passes over was replaced,
        hooked or changed, and nothing is in training mode."""
        modules = [module for module in self.modules if module is not None]
        if not self.is_whole() or list(map(type, modules)) != self.classes or any(each.training for each in modules):
            return False
        # A parameter that is computed or of another class is not at its address.
        if any(readable(each, *names) is None for each, names in zip(modules, self._parameters, strict=True)):
            return False
        bare = all(map(is_unhooked, modules[1:]))
        return bare and not foreign_forward(self.module) and not self._class_forwards.changed()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs) if in_packed_step() else self.plain(*args, **kwargs)

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


Reference = weakref.ref[nn.Module]


def alive(reference: Reference) -> nn.Module:
    module = reference()
    assert module is not None
    return module


def _places_of(module: nn.Module, names: Iterable[str]) -> list[tuple[Reference, str, Reference]]:
    """These children and all modules inside them: the parent of each, its name there, and the module."""
    places: list[tuple[Reference, str, Reference]] = []
    for name in names:
        child = module._modules[name]
        if child is not None:
            places += [(weakref.ref(module), name, weakref.ref(child)), *_places_of(child, child._modules)]
    return places


def passes_through(module: nn.Module) -> bool:
    """Return True if the module returns its input unchanged outside of training mode."""
    return type(module) in (nn.Dropout, nn.Identity)


# -- MLPs ------------------------------------------------------------------------------------------------------------


class MLPPart(Part):
    """A module that ends with a linear layer, its child `down`."""

    kind = "MLP"

    def __init__(self, module: nn.Module, down: str, skipped: Iterable[str]) -> None:
        super().__init__(module, skipped)
        self._down = down

    def inner(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the input of the last layer."""
        raise NotImplementedError

    def compute(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._child(self._down)(self.inner(rows))
        return out

    def product(self) -> Product | None:
        """The last layer, if it may be added to a residual in place."""
        return product_of(self.module._modules[self._down])

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, scale: float | None) -> None:
        """residual += scale * (what the last layer is called with for `rows`) @ matrix. rows [num_rows, size]."""
        residual.addmm_(self.inner(rows), matrix, alpha=1.0 if scale is None else scale)

    def _child(self, name: str) -> Any:
        return self.module._modules[name]


class GatedPart(MLPPart):
    """down(activation(gate(x)) * up(x)), where one linear layer may compute both gate and up."""

    def __init__(self, call: Call, inputs: list[str], down: str, order: int, activation: str) -> None:
        super().__init__(call.module, down, {child.name for child in call.children} - {*inputs, down})
        self.group = LinearGroup(call.module, inputs)
        self._gate_is_second = order == 1
        self._activation = activation

    def inner(self, rows: torch.Tensor) -> torch.Tensor:
        from hf_paged.fused.gpu.kernels.gate import gated

        assert self.group is not None
        parts = self.group(rows)
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
        if self._gate_is_second:
            gate, up = up, gate
        size = gate.shape[-1]
        return gated(_as_rows(gate, size), _as_rows(up, size), self._activation).view(*rows.shape[:-1], size)


class ChainPart(MLPPart):
    """A chain of any modules, called in turn; the last is a linear layer.

    Alone it computes what the module does; a layer adds its last product to the residual.
    """

    def __init__(self, call: Call, names: list[str]) -> None:
        super().__init__(call.module, names[-1], {child.name for child in call.children} - set(names))
        self._first = names[:-1]

    def inner(self, rows: torch.Tensor) -> torch.Tensor:
        for name in self._first:
            rows = self._child(name)(rows)
        return rows


def chain_part(call: Call) -> ChainPart | None:
    """Make the part for a module that only called its children, each with the result of the last."""
    called = [child for child in call.children if not passes_through(child.module)]
    # An operation of its own between the children would be left out.
    if len(call.args) != 1 or call.kwargs or call.names or len(called) < 2 or product_of(called[-1].module) is None:
        return None
    if not all(child.name for child in call.children) or len({child.module for child in called}) < len(called):
        return None
    rows, last = call.input, called[-1]
    for child in called:
        if not _is_same(child.input, rows) or len(child.args) != 1 or child.kwargs:
            return None
        rows = child.output
    return ChainPart(call, [child.name for child in called]) if _is_same(last.output, call.output) else None


def _is_same(a: Any, b: Any) -> bool:
    return same_memory(a, b) and a.shape == b.shape and a.stride() == b.stride()


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
    """Return True if the call ran only products and the activation: no limit, say, that few values reach."""
    names = call.names_without({child.module for child in called})
    return set(names) <= _OPERATIONS[activation] | {"mul"}


# -- activations -----------------------------------------------------------------------------------------------------


class ActivationPart(Part):
    """An activation in one launch, for a module that runs several operations."""

    kind = "activation"

    def __init__(self, module: nn.Module, activation: str) -> None:
        super().__init__(module)
        self._activation = activation

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        from hf_paged.fused.gpu.kernels.gate import gated

        if self._activation != "relu_squared":
            return ACTIVATIONS[self._activation](x)
        return gated(_as_rows(x, x.shape[-1]), None, self._activation).view(x.shape)


def activation_part(call: Call) -> ActivationPart | None:
    """The part for a module without weights that computed a GELU or SiLU in several launches; else None."""
    x, result = call.input, call.output
    if len(call.args) != 1 or call.kwargs or call.module._parameters or not isinstance(result, torch.Tensor):
        return None
    known = {"mul", "pow", "add", "tanh", "erf", "sigmoid", "div", "relu"}
    # A single operation is one launch already.
    if len(call.names) < 2 or not set(call.names) <= known or call.children:
        return None
    names = ("gelu_tanh", "gelu", "silu", "relu_squared")
    close = (name for name in names if x.shape == result.shape and are_close(ACTIVATIONS[name](x), result, 0.01))
    found = next(close, None)
    return None if found is None or not _is_activation(call.module, found) else ActivationPart(call.module, found)


@torch.no_grad()
def _is_activation(module: nn.Module, name: str) -> bool:
    """Return True if the module's class computes the activation in fp32, over the range where activations differ."""
    x = torch.linspace(-8, 8, 513, dtype=torch.float32, device="cpu")
    return are_close(type(module).forward(module, x), ACTIVATIONS[name](x), 1e-6)
