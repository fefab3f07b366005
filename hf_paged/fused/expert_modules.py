"""Experts of transformers' `ExpertsInterface`: what their modules compute, and whether it may be computed otherwise.

The interface defines it by attributes of the module (`is_transposed`, ...), the parameters' names, and the method
`_apply_gate`, whose code must be known; a trial finds its numbers. Knows modules; never kernels.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.features.watch.known_code import is_known, is_known_module, settings_of
from hf_paged.fused.experts import SCALED_SILU, Gate, GateKind, Projection, gated
from hf_paged.fused.rows import ACTIVATIONS, DTYPES, are_alike, are_close
from hf_paged.model.parameters import readable
from hf_paged.model.trial import random_numbers

_INTERFACE = "transformers.integrations.moe"  # the module of the interface
_IMPLEMENTATIONS = {
    "eager": None, "grouped_mm": "grouped_mm_experts_forward", "batched_mm": "batched_mm_experts_forward",
}  # fmt: skip
"""Implementations that ours replaces, with their functions. Others are chosen for what they do themselves."""


class Operands(NamedTuple):
    """rows [num_tokens, n], index and weights [num_tokens, top_k], contiguous; the products up (gates and ups) and
    down."""

    rows: torch.Tensor
    index: torch.Tensor  # type: ignore[assignment]  # the method of tuples has no use here
    weights: torch.Tensor
    up: Projection
    down: Projection


class KnownExperts:
    """A module of the interface with its gate as it was recognised.

    kind, alpha, limit: the gate; its numbers are attributes of the module ("": it has none).
    """

    def __init__(self, module: Any, kind: GateKind, alpha: str, limit: str) -> None:
        self.kind = kind
        self._numbers = alpha, limit
        self._class = type(module)
        self._apply_gate = self._class._apply_gate
        self._settings = [each for child in module.children() for each in settings_of(child)]

    def gate(self, module: Any) -> Gate:
        """Return the gate with the current values of its numbers."""
        alpha, limit = (getattr(module, name) if name else 0.0 for name in self._numbers)
        return Gate(self.kind, alpha, limit)

    def operands(self, module: Any, rows: Any, index: Any, weights: Any) -> Operands | None:
        """Return the operands; None if the module must compute itself: adapters change classes while they compute."""
        # PEFT gives experts another class for the time of a call.
        if type(module) is not self._class or self._class._apply_gate is not self._apply_gate:
            return None
        if "_apply_gate" in vars(module) or not is_replaceable(module) or not _are_operands(rows, index, weights):
            return None
        if any(owner.get(name) is not value for owner, name, value in self._settings):
            return None
        projections = projections_of(module, rows)
        if projections is None:
            return None
        return Operands(rows.contiguous(), index.contiguous(), weights.contiguous(), *projections)


def known_experts(module: Any, rows: torch.Tensor) -> KnownExperts | None:
    """The experts, if the module is one of the interface and its gate is known. rows: of the dtype and device."""
    if not is_of_interface(module) or not module.has_gate or not is_replaceable(module):
        return None
    # Such experts normalise what they return, which no kernel of ours does.
    if getattr(module, "has_post_expert_norm", False):  # since transformers 5.20
        return None
    if not is_known(type(module)._apply_gate, "gate", type(module)) or not all(map(_is_activation, module.children())):
        return None
    found = _gate_of(module, rows)
    return None if found is None else KnownExperts(module, found[0], *found[1])


def _is_activation(module: nn.Module) -> bool:
    return is_known_module(module, "silu") or is_known_module(module, "activation")


def _are_operands(rows: Any, index: Any, weights: Any) -> bool:
    if not all(type(x) is torch.Tensor and x.dim() == 2 for x in (rows, index, weights)):
        return False
    return bool(
        rows.dtype in DTYPES
        and weights.dtype in (rows.dtype, torch.float32)
        and index.dtype in (torch.int64, torch.int32)
        and index.shape == weights.shape
        and 0 < index.shape[0] == rows.shape[0]
    )


def is_replaceable(module: Any) -> bool:
    """Return True if the interface would compute all these experts by a known implementation in this process."""
    interface = sys.modules.get(_INTERFACE)
    name = getattr(module.config, "_experts_implementation", None)
    if interface is None or name not in _IMPLEMENTATIONS or getattr(module, "_is_expert_parallel", False):
        return False  # the attribute exists since transformers 5.18
    function = _IMPLEMENTATIONS[name]
    # A function that other code has registered by this name computes something else.
    return function is None or interface.ALL_EXPERTS_FUNCTIONS.get(name) is vars(interface)[function]


def projections_of(module: Any, rows: torch.Tensor) -> tuple[Projection, Projection] | None:
    """The products up and down; None if the parameters are no plain ones of the rows' dtype and sizes."""
    found = []
    for name in ("gate_up_proj", "down_proj"):
        tensors = readable(module, name, *([f"{name}_bias"] if module.has_bias else []))
        if tensors is None or tensors[0] is None or not all(_are_of(tensor, rows) for tensor in tensors):
            return None
        found.append(Projection(tensors[0], tensors[1] if module.has_bias else None, module.is_transposed))
    up, down = found
    # Kernels get addresses and trust these sizes.
    sizes = up.inputs, down.outputs, up.outputs, down.weight.shape[0]
    if sizes != (rows.shape[1], rows.shape[1], 2 * down.inputs, up.weight.shape[0]):
        return None
    return (up, down) if all(p.bias is None or p.bias.shape == (sizes[3], p.outputs) for p in found) else None


def _are_of(tensor: Any, rows: torch.Tensor) -> bool:
    fits = tensor is not None and tensor.dim() in (2, 3) and tensor.dtype == rows.dtype
    return bool(fits and tensor.device == rows.device and tensor.is_contiguous())


def is_of_interface(module: nn.Module) -> bool:
    """Return True if its class's forward is the one that chooses among the implementations."""
    interface = sys.modules.get(_INTERFACE)
    return interface is not None and getattr(type(module).forward, "__globals__", None) is vars(interface)


# Few gates and ups of ordinary size reach a limit, so larger ones are tried too.
_MAGNITUDES = (0.1, 6.0, 1e3)


@torch.no_grad()
def _gate_of(module: Any, rows: torch.Tensor) -> tuple[GateKind, tuple[str, str]] | None:
    """Find the kind of the module's gate, and the attributes that are alpha and the limit ("" if there are none)."""
    random = random_numbers()
    both = [(random(32, 64) * size).to(rows.device) for size in _MAGNITUDES]
    expected = [module._apply_gate(x) for x in both]
    numbers = [name for name, value in vars(module).items() if isinstance(value, float)]
    plain = itertools.product(ACTIVATIONS, [""], ["", *numbers])
    scaled = itertools.product([SCALED_SILU], numbers, ["", *numbers])
    for (activation, alpha, limit), adds, interleaved in itertools.product((*plain, *scaled), *[(False, True)] * 2):
        values = [getattr(module, name) if name else 0.0 for name in (alpha, limit)]
        kind = GateKind(activation, interleaved, bool(limit), adds)
        # In fp32 first, where formulas differ most; how it rounds shows in the rows' dtype only.
        if not all(are_close(gated(x, Gate(kind, *values)), y, 1e-5) for x, y in zip(both, expected)):
            continue
        like = both[1].to(rows.dtype)
        result = module._apply_gate(like)
        kinds = [kind._replace(rounds=rounds) for rounds in (True, False)]
        kinds = [kind for kind in kinds if are_alike(gated(like, Gate(kind, *values)), result)]
        return (kinds[0], (alpha, limit)) if kinds else None
    return None
