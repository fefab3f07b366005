"""The experts of mixtures in one native call each during packed steps, in bf16 on a CPU with AVX-512 and BF16.

torch sorts the tokens, gathers them, and calls a matrix product for each expert twice; in a decode step that takes two
to three times as long as reading the weights. The results are torch's, bit for bit, with the exception of linear layers
(see `weights`): a single row of more than 1,024 elements for an expert is added up in another order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.experts import KnownExperts, is_of_interface, known_experts
from hf_paged.integration.attention import in_packed_step
from hf_paged.kernels.experts import GateKind
from hf_paged.model.overrides import ClassForwards, Overrides, Patch, foreign_forward, mark
from hf_paged.model.state import Slot, state_of

_IMPLEMENTATION = "grouped_mm"
"""The implementation of transformers with these bits, its default. Others round or add up in another order."""
_MULTIPLE = 16  # of which the kernel needs both sizes to be multiples

_known: Slot[tuple[int, NativeExperts]] = Slot("native experts")


def native_experts(model: Any) -> NativeExperts | None:
    """Overrides for the model's experts, found once and after `weights_changed`; None if there are none."""
    modules = [module for module in model.modules() if is_of_interface(module)]
    if not modules or model.device.type != "cpu" or not fused_ops.is_available():
        _known.take(model)
        return None
    known, reported = _known.get(model), state_of(model).weights.all_moved
    if known is None or known[0] != reported or not known[1].is_of(modules):
        known = reported, NativeExperts(modules)
        _known.put(model, known)
    return known[1]


class NativeExperts:
    """Overrides for those of these modules that the kernel can compute."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._all = [weakref.ref(module) for module in modules]
        found = [(module, _known_here(module)) for module in modules]
        # Of each class: they are not applied after the class's forward has been replaced.
        self._lists: list[tuple[ClassForwards, Overrides]] = []
        for owner in dict.fromkeys(type(module) for module, known in found if known is not None):
            patches = [
                Patch(vars(module), "forward", _forward_of(module, known))
                for module, known in found
                if known is not None and type(module) is owner
            ]
            self._lists.append((ClassForwards([owner]), Overrides(patches)))

    def is_of(self, modules: list[nn.Module]) -> bool:
        """False if modules of the model have been replaced since this was made."""
        return [module() for module in self._all] == modules

    def apply(self, user: object) -> None:
        """Until `undo`, the kernel computes the experts in packed steps of this thread; other calls are unaffected."""
        for classes, overrides in self._lists:
            if classes.changed():
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
    try:
        known = known_experts(module, like)
    except Exception:  # a foreign method may raise anything on such rows; then it is not a gate that we know
        return None
    return known if known is not None and known.kind == GateKind("silu") else None


def _forward_of(module: Any, known: KnownExperts) -> Callable[..., torch.Tensor]:
    # A weak reference: a strong one would keep the model alive, which is the key of its overrides.
    owner, reference = type(module), weakref.ref(module)
    children = dict(module._modules)

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        own: Any = reference()
        if in_packed_step() and _is_as_found(own, children) and not torch.is_autocast_enabled("cpu"):
            result = _computed(own, known, hidden_states, top_k_index, top_k_weights)
            if result is not None:
                return result
        plain: torch.Tensor = owner.forward(own, hidden_states, top_k_index, top_k_weights)
        return plain

    marked: Callable[..., torch.Tensor] = mark(forward)
    return marked


def _is_as_found(module: Any, children: dict[str, Any]) -> bool:
    """Whether its activation is the one that was tried, without hooks, and the implementation the one that is equal."""
    if module._modules != children or getattr(module.config, "_experts_implementation", None) != _IMPLEMENTATION:
        return False
    return not any(c._forward_hooks or c._forward_pre_hooks or foreign_forward(c) for c in children.values())


def _computed(module: Any, known: KnownExperts, rows: Any, index: Any, weights: Any) -> torch.Tensor | None:
    operands = known.operands(module, rows, index, weights)
    if operands is None or operands.rows.dtype != torch.bfloat16:
        return None
    rows, index, weights, up, down = operands
    if up.inputs % _MULTIPLE or down.inputs % _MULTIPLE or up.is_transposed or up.bias is not None:
        return None
    return fused_ops.experts(rows, index.long(), weights, up.weight, down.weight)
