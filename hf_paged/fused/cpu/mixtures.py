"""The experts of mixtures in one native call each during packed steps, in bf16 on a CPU with AVX-512 and BF16.

torch sorts the tokens, gathers them, and calls a matrix product for each expert twice; in a decode step that takes two
to three times as long as reading the weights. The results are torch's, bit for bit, with the exception of linear layers
(see `weights`): a single row of more than 1,024 elements for an expert is added up in another order.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu.weights import fits
from hf_paged.fused.expert_modules import KnownExperts, is_of_interface, known_experts, projections_of
from hf_paged.fused.experts import GateKind, Projection
from hf_paged.integration.attention import in_packed_step
from hf_paged.kernels import buffers
from hf_paged.model.overrides import Overrides, Patch, is_unhooked, mark, uncompiled_modules
from hf_paged.model.picture import ClassForwards
from hf_paged.model.state import Slot, state_of
from hf_paged.model.trial import attempt
from hf_paged.model.weights import Weights

_IMPLEMENTATION = "grouped_mm"
"""The implementation of transformers with these bits, its default. Others round or add up in another order."""
# The kernel takes vectors of 16 elements of both sizes.
_MULTIPLE = 16

_known: Slot[tuple[int, NativeExperts]] = Slot("native experts")


def native_experts(model: Any, prepack: bool | None) -> NativeExperts | None:
    """Overrides for the model's experts, found once and after `weights_changed`; None if there are none.

    prepack: whether to keep packed copies of their weights (None: if copies of all of the model's weights would fit).
    Copies that there are already are used in any case: they give the same bits.
    """
    modules = [module for module in uncompiled_modules(model) if is_of_interface(module)]
    if not modules or model.device.type != "cpu" or not fused_ops.packs():
        _known.take(model)
        return None
    weights = state_of(model).weights
    known = _known.get(model)
    if known is None or known[0] != weights.all_moved or not known[1].is_of(modules):
        known = weights.all_moved, NativeExperts(modules, weights, known[1].copies if known else Copies())
        _known.put(model, known)
    found = known[1]
    if not found:
        return None
    # The whole model's bytes: linear layers keep copies too, and decide by the same share.
    if not found.has_copies and (prepack or (prepack is None and fits(sum(p.nbytes for p in model.parameters())))):
        found.keep_copies()
    # Copies must notice weights that were written in place.
    if found.has_copies:
        weights.look(contents=True)
    return found


class _Copy:
    """Packed copies of a module's weights in the state `stamp`."""

    __slots__ = ("__weakref__", "stamp", "weights")

    def __init__(self, stamp: tuple[Any, ...], weights: fused_ops.ExpertWeights) -> None:
        self.stamp, self.weights = stamp, weights


Copies = weakref.WeakKeyDictionary[nn.Module, "weakref.ref[_Copy]"]
"""The last copies of each module: engines made before and after `weights_changed` share them."""


class NativeExperts:
    """Overrides for those of these modules that the kernel can compute.

    has_copies: whether packed copies of the weights are kept, which are renewed when `weights` has detected a change.
    """

    def __init__(self, modules: list[nn.Module], weights: Weights, copies: Copies) -> None:
        self.copies = copies
        self._all = [weakref.ref(module) for module in modules]
        self._weights = weights
        found = [(module, _known_here(module)) for module in modules]
        self._mixtures = [Mixture(module, known, copies) for module, known in found if known is not None]
        # Of each class: they are not applied after the class's forward has been replaced.
        self._lists = [
            (ClassForwards([owner]), Overrides(m.patch() for m in self._mixtures if m.owner is owner))
            for owner in dict.fromkeys(mixture.owner for mixture in self._mixtures)
        ]
        self.has_copies = False
        self._seen: tuple[int, int] | None = None  # the state of the weights when the copies were last renewed

    def __bool__(self) -> bool:
        return bool(self._mixtures)

    def is_of(self, modules: list[nn.Module]) -> bool:
        """False if modules of the model have been replaced since this was made."""
        return [module() for module in self._all] == modules

    def keep_copies(self) -> None:
        self.has_copies, self._seen = True, None

    def apply(self, user: object) -> None:
        """Until `undo`, the kernel computes the experts in packed steps of this thread; other calls are unaffected."""
        seen = (self._weights.epoch, self._weights.layout)
        if self.has_copies and seen != self._seen:
            for mixture in self._mixtures:
                mixture.renew(self._weights)
            self._seen = seen
        for classes, overrides in self._lists:
            if classes.changed_at(self._weights.layout):
                overrides.withdraw()
            else:
                overrides.apply(user)

    def undo(self, user: object) -> None:
        """Undo `apply`, even if it was interrupted. Idempotent."""
        for _, overrides in self._lists:
            overrides.undo(user)


def _known_here(module: Any) -> KnownExperts | None:
    """The experts, if the kernel computes their gate."""
    like = next(iter(module._parameters.values()), None)
    if like is None or like.dtype != torch.bfloat16 or module.is_transposed or module.has_bias:
        return None
    known = attempt(lambda: known_experts(module, like))
    return known if isinstance(known, KnownExperts) and known.kind == GateKind("silu") else None


class Mixture:
    """The experts of one module, and their packed copies if there are any."""

    def __init__(self, module: Any, known: KnownExperts, copies: Copies) -> None:
        # A weak reference: a strong one would keep the model alive, which is the key of its overrides.
        self._module = weakref.ref(module)
        self._attributes = vars(module)
        self._known = known
        self.owner = type(module)
        self._children = dict(module._modules)
        self._copies = copies
        self._copy: _Copy | None = None

    def patch(self) -> Patch:
        return Patch(self._attributes, "forward", self.forward)

    def renew(self, weights: Weights) -> None:
        """Make the copies, again if the weights have changed; none of weights that the kernel cannot compute with, nor
        of those made in inference mode, whose changes cannot be noticed."""
        module: Any = self._module()
        parameters = [] if module is None else [p for p in module._parameters.values() if p is not None]
        stamp = tuple((id(x), weights.moved_at(x)) for x in parameters)
        if self._copy is not None and self._copy.stamp == stamp:
            return
        # Freed before the new copies are made, so that there are never two.
        self._copy = None
        if not parameters or any(parameter.is_inference() for parameter in parameters):
            return
        shared = self._copies[module]() if module in self._copies else None
        if shared is not None and shared.stamp == stamp:
            self._copy = shared
            return
        like = parameters[0]
        found = projections_of(module, buffers.empty((1, like.shape[-1]), like.dtype))
        if found is not None and (own := _weights_of(*found)) is not None:
            self._copy = _Copy(stamp, own.packed())
            self._copies[module] = weakref.ref(self._copy)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The arguments have the names of the interface."""
        module: Any = self._module()
        if in_packed_step() and self._is_as_found(module) and not torch.is_autocast_enabled("cpu"):
            operands = self._known.operands(module, hidden_states, top_k_index, top_k_weights)
            own = None if operands is None else _weights_of(operands.up, operands.down)
            if operands is not None and own is not None:
                layer = own if self._copy is None else self._copy.weights
                # The kernel declines a number of no expert; torch then raises its own error.
                result = fused_ops.experts(layer, operands.rows, operands.index.long(), operands.weights)
                if result is not None:
                    return result
        plain: torch.Tensor = self.owner.forward(module, hidden_states, top_k_index, top_k_weights)
        return plain

    mark(forward)

    def _is_as_found(self, module: Any) -> bool:
        """Return True if the activation is the one that was tried, unhooked, and experts run as `_IMPLEMENTATION`."""
        if getattr(module.config, "_experts_implementation", None) != _IMPLEMENTATION:
            return False
        return bool(module._modules == self._children) and all(map(is_unhooked, self._children.values()))


def _weights_of(up: Projection, down: Projection) -> fused_ops.ExpertWeights | None:
    """The weights as the kernel takes them, None if it does not."""
    plain = not up.is_transposed and up.bias is None and up.weight.dtype == torch.bfloat16
    if not plain or up.inputs % _MULTIPLE or down.inputs % _MULTIPLE:
        return None
    return fused_ops.ExpertWeights.of(up.weight, down.weight)
