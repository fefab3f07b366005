"""Packed copies of linear weights, in the memory layout that is fastest to compute with: of the native kernels for bf16
on a CPU with AVX-512 and BF16, otherwise of oneDNN.

With the few rows of a decode step, a linear layer takes as long as reading its weights, and packed weights are read 1.3
to 2.5 times as fast. In bf16 the results are those of torch 2.13, bit for bit, with two exceptions, where torch sums in
another order: with AMX, more than 32 rows; without it, a single row of more than 1,024 elements. In fp32 the order of
the sums differs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import linear as linear_module

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.integration.attention import in_packed_step
from hf_paged.model.overrides import ClassForwards, Overrides, Patch, foreign_forward, mark
from hf_paged.model.state import Slot, state_of, unwrapped
from hf_paged.model.weights import Weights

AUTO_SHARE = 0.25
"""With `prepack=None`, weights are packed only if the copies take at most this share of the free memory."""

_Linear = Callable[[torch.Tensor], torch.Tensor]

_NO_COPY: _Linear | None = None

_packed: Slot[PackedWeights] = Slot("packed weights")
_for_calls: Slot[bool] = Slot("prepack was called")


def packed_weights(model: Any, prepack: bool | None) -> PackedWeights | None:
    """Packed copies of the model's linear weights, shared by all engines on it. None: use the weights themselves.

    prepack: True, False, or None (pack bf16 weights on a CPU that computes with bf16 if the memory suffices). Raises
    ValueError for True if packing is impossible.
    """
    if prepack is False:
        return None
    layers = _linears(model)
    obstacle = _obstacle(layers)
    if obstacle is not None:
        if prepack:
            raise ValueError(f"prepack=True: {obstacle}; leave it out")
        return None
    if prepack is None and not _pays(layers):
        return None
    return _copies(model, layers)


def _linears(model: nn.Module) -> list[nn.Linear]:
    """The layers that compute what nn.Linear does, so that other code has not replaced their forward."""
    return [module for module in model.modules() if type(module) is nn.Linear and not foreign_forward(module)]


def _copies(model: Any, layers: list[nn.Linear]) -> PackedWeights:
    weights = state_of(model).weights
    weights.look(contents=True)
    known = _packed.get(model)
    if known is None or not known.is_of(layers):
        known = PackedWeights(layers, weights)
        _packed.put(model, known)
    return known


def prepack(model: Any) -> None:
    """Make paged `generate` calls compute with packed copies of the model's linear weights (CPU, bf16 or fp32).

    The copies take as much memory as the weights, until `release_memory(model)`. With few rows a call is two to three
    times as fast. Sums may be in another order, as with `Engine(prepack=True)`. Changed weights are packed again at the
    start of the next call; see `weights_changed` for the changes that must be reported. Raises ValueError if the
    weights cannot be packed.
    """
    model = unwrapped(model)
    packed_weights(model, True)
    _for_calls.put(model, True)


def weights_for_calls(model: Any) -> PackedWeights | None:
    """The copies that `prepack` has requested, or None. Raises ValueError if the weights can no longer be packed."""
    if not _for_calls.get(model):
        return None
    layers = _linears(model)
    if (obstacle := _obstacle(layers)) is not None:
        raise ValueError(f"prepack was called for this model, but {obstacle}; call release_memory(model)")
    return _copies(model, layers)


def _obstacle(layers: list[nn.Linear]) -> str | None:
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this build of torch cannot pack linear weights"
    if nn.Linear.forward.__globals__ is not vars(linear_module):
        return "torch.nn.Linear.forward has been replaced"
    if not layers:
        return "the model has no linear layers"
    for layer in layers:
        if layer.weight.device.type != "cpu":
            return f"weights on {layer.weight.device} cannot be packed, only those on a CPU"
        if layer.weight.is_inference():
            return "weights made in inference mode have no version counter, so changes cannot be noticed"
        if type(layer.weight) not in (torch.Tensor, nn.Parameter):
            return f"weights of type {type(layer.weight).__name__} (quantized, for example) cannot be packed"
        if layer.weight.dtype not in (torch.bfloat16, torch.float32):
            return f"weights of {layer.weight.dtype} cannot be packed, only bfloat16 and float32"
    return None


def _pays(layers: list[nn.Linear]) -> bool:
    import psutil

    if any(layer.weight.dtype != torch.bfloat16 for layer in layers):
        return False
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    size = sum(layer.weight.nbytes for layer in layers)
    return size <= AUTO_SHARE * float(psutil.virtual_memory().available)


class PackedWeights:
    """Packed copies of the weights of some linear layers.

    A copy is renewed when `weights` has detected a change of its weight.
    """

    def __init__(self, layers: list[nn.Linear], weights: Weights) -> None:
        parts: dict[int, torch.Tensor] = {}
        if fused_ops.is_available():
            native = [layer for layer in layers if layer.weight.dtype == torch.bfloat16]
            arena = fused_ops.WeightArena([(layer.weight.shape[0], layer.weight.shape[1]) for layer in native])
            parts = {id(layer): part for layer, part in zip(native, arena.parts, strict=True)}
        self._layers = [PackedLayer(layer, parts.get(id(layer))) for layer in layers]
        self._weights = weights
        self._seen: tuple[int, int, list[Any]] | None = None  # state of the weights when the copies were last renewed
        self._of = weakref.WeakKeyDictionary(zip(layers, self._layers, strict=True))
        self._classes = ClassForwards([nn.Linear])
        self._overrides = Overrides(Patch(packed.attributes, "forward", packed.forward) for packed in self._layers)

    def is_of(self, layers: list[nn.Linear]) -> bool:
        """Whether each of these layers has a copy here; False after layers of the model have been replaced."""
        return all(layer in self._of for layer in layers)

    def of(self, layer: nn.Module) -> PackedLayer | None:
        """The packed copy of a layer, if it has one."""
        return self._of.get(layer)

    def apply(self, user: object) -> None:
        """Until `undo`, the layers use the packed copies in packed steps of this thread; other calls are unaffected."""
        if self._classes.changed():
            self._overrides.withdraw()
            return
        seen = (self._weights.epoch, self._weights.layout, self._overrides.apply(user))
        if seen != self._seen:
            for packed in self._layers:
                packed.renew(self._weights)
            self._seen = seen

    def undo(self, user: object) -> None:
        """Undo `apply`, even if it was interrupted. Idempotent."""
        self._overrides.undo(user)


class PackedLayer:
    """One linear layer's copy: for the native kernels in `part` of their arena (then `native` describes it), or for
    oneDNN.

    `forward` replaces the layer's own while the copy is used. Outside packed steps, and while there is no copy, it
    computes what the layer itself computes. (There is no copy while other code has set a forward on the layer, which
    may call this one.)
    """

    __slots__ = ("_compute", "_parameters", "_part", "_shape", "_stamp", "attributes", "forward", "layer", "native")

    def __init__(self, layer: nn.Linear, part: torch.Tensor | None) -> None:
        # A weak reference: a strong one would keep the model alive, which is the key of its packed weights.
        self.layer = weakref.ref(layer)
        self.attributes = layer.__dict__
        self._parameters = parameters = layer._parameters
        self.native: fused_ops.PackedLinear | None = None
        self._part = part
        self._shape = layer.weight.shape
        self._stamp: tuple[int, ...] | None = None
        # The function refers to this list only: a reference to this object would keep the copy until the garbage
        # collector runs.
        self._compute = compute = [_NO_COPY]
        plain = nn.functional.linear

        def forward(input: torch.Tensor) -> torch.Tensor:  # named as in nn.Linear
            packed = compute[0]
            if packed is not None and in_packed_step():
                return packed(input)
            return plain(input, parameters["weight"], parameters["bias"])

        self.forward: _Linear = mark(forward)

    def renew(self, weights: Weights) -> None:
        """Pack the weight again if it has changed or if the bias has another address."""
        if self.attributes.get("forward") is not self.forward:
            self._compute[0] = self._stamp = self.native = None
            return
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        stamp = (weights.moved_at(weight), id(weight), id(bias), 0 if bias is None else bias.data_ptr())
        if stamp == self._stamp:
            return
        self._compute[0] = self._pack(weight, bias)
        self._stamp = stamp

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Linear:
        self.native = None
        if self._part is not None and weight.dtype == torch.bfloat16 and weight.shape == self._shape:
            fused_ops.pack(weight, self._part)
            self.native = fused_ops.PackedLinear(self._part, bias, *weight.shape)
            return functools.partial(fused_ops.linear, self.native)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda rows: pointwise(rows, packed, bias, "none", [], "")
