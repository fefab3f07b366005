"""Linear layers of a model, computed by other code than torch's: by the native kernels, or on request, in fp32, by
oneDNN with packed copies of the weights.

With the few rows of a decode step, a linear layer takes as long as reading its weights. The native kernels read the
weights themselves, faster than torch does with up to about 64 rows; with hundreds of rows in fp32, torch is faster
(docs/benchmarks.md). On CPUs with AVX-512 and BF16
they read bf16 weights faster still from packed copies, in the memory layout that is fastest to compute with; the
results are then those of torch 2.13, bit for bit, with two exceptions, where torch sums in another order: with AMX,
more than 32 rows; without it, a single row of more than 1,024 elements. On other CPUs and in other dtypes the order of
the sums is none of torch's, whose own depends on the number of rows; ours depends on the depth alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import linear as linear_module

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.integration.attention import in_packed_step
from hf_paged.model.overrides import Overrides, Patch, foreign_forward, mark
from hf_paged.model.parameters import is_parameter, readable
from hf_paged.model.state import Slot, state_of, unwrapped
from hf_paged.model.weights import ClassForwards, Weights

AUTO_SHARE = 0.25
"""With `prepack=None`, weights are packed only if the copies take at most this share of the free memory."""

_Linear = Callable[[torch.Tensor], torch.Tensor]

_TORCH: _Linear | None = None

_packed: Slot[LinearLayers] = Slot("packed weights")
_in_place: Slot[LinearLayers] = Slot("linear layers of native kernels")
_for_calls: Slot[bool] = Slot("prepack was called")


def layers_for_engine(model: Any, prepack: bool | None) -> LinearLayers | None:
    """The model's linear layers for an engine's steps, shared by all engines on it. None: torch computes them.

    prepack: True, False, or None (pack bf16 weights where that is faster if the memory suffices). Raises
    ValueError for True if packing is impossible.
    """
    layers = _linears(model)
    obstacle = _obstacle(layers)
    if obstacle is not None and prepack:
        raise ValueError(f"prepack=True: {obstacle}; leave it out")
    if obstacle is None and (prepack or (prepack is None and _pays(layers))):
        return _copies(model, layers)
    return _without_copies(model, layers)


def layers_for_calls(model: Any) -> LinearLayers | None:
    """The same for calls of `generate`: packed copies if `prepack` was called. Raises ValueError if the weights can no
    longer be packed."""
    layers = _linears(model)
    if not is_prepacked(model):
        return _without_copies(model, layers)
    _in_place.take(model)
    if (obstacle := _obstacle(layers)) is not None:
        raise ValueError(f"prepack was called for this model, but {obstacle}; call release_memory(model)")
    return _copies(model, layers)


def is_prepacked(model: Any) -> bool:
    """Whether `prepack` was called for the model."""
    return bool(_for_calls.get(model))


def prepack(model: Any) -> None:
    """Make paged `generate` calls compute with packed copies of the model's linear weights (CPU, bf16 or fp32).

    The copies take as much memory as the weights, until `release_memory(model)`. In bf16, with few rows, a call is up
    to three times as fast. In fp32 oneDNN computes with them, and layers are not computed whole, which is slower than
    hf_paged's own kernels for fp32. Sums may be in another order, as with `Engine(prepack=True)`. Changed weights are
    packed again at the start of the next call; see `weights_changed` for the changes that must be reported. Raises
    ValueError if the weights cannot be packed.
    """
    model = unwrapped(model)
    layers_for_engine(model, True)
    _for_calls.put(model, True)


def _linears(model: Any) -> list[nn.Linear]:
    """The layers that compute what nn.Linear does with a parameter: no other code has replaced their forward, or
    computes their weight. An encoder runs outside of packed steps."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    apart = set() if encoder is None else set(encoder.modules())
    linears = (module for module in model.modules() if type(module) is nn.Linear and module not in apart)
    return [layer for layer in linears if not foreign_forward(layer) and is_parameter(layer, "weight")]


def _copies(model: Any, layers: list[nn.Linear]) -> LinearLayers:
    weights = state_of(model).weights
    weights.look(contents=True)
    return _known(_packed, model, layers, True)


def _without_copies(model: Any, layers: list[nn.Linear]) -> LinearLayers | None:
    """The layers that the native kernels compute from the weights themselves, None if there are none."""
    usable = [layer for layer in layers if _unreadable(layer) is None and fused_ops.is_available(layer.weight.dtype)]
    if not usable:
        _in_place.take(model)  # it would keep the weights of layers that have been replaced
        return None
    state_of(model).weights.look()
    return _known(_in_place, model, usable, False)


def _known(slot: Slot[LinearLayers], model: Any, layers: list[nn.Linear], copies: bool) -> LinearLayers:
    known = slot.get(model)
    if known is None or not known.is_of(layers):
        known = LinearLayers(layers, state_of(model).weights, copies=copies)
        slot.put(model, known)
    return known


def _obstacle(layers: list[nn.Linear]) -> str | None:
    """Why there can be no packed copies of the weights."""
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this build of torch cannot pack linear weights"
    if not layers:
        return "the model has no linear layers with weights that are parameters"
    for layer in layers:
        if (reason := _unreadable(layer)) is not None:
            return reason
        dtype = layer.weight.dtype
        if dtype == torch.bfloat16 and not fused_ops.packs():
            if fused_ops.is_available(dtype):
                return "without AVX-512 and BF16 (see HF_PAGED_ISA) bfloat16 weights are read where they are"
            if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
                return "this CPU lacks the instructions (AVX-512) that oneDNN needs to pack bfloat16"
        if dtype not in (torch.bfloat16, torch.float32):
            return f"weights of {dtype} cannot be packed, only bfloat16 and float32"
    return None


def _unreadable(layer: nn.Linear) -> str | None:
    """Why other code than torch's cannot read the layer's weight."""
    if nn.Linear.forward.__globals__ is not vars(linear_module):
        return "torch.nn.Linear.forward has been replaced"
    if "weight" not in layer._parameters:
        return (
            "some weights are computed from other tensors at each call (pruning, a parametrization); make them "
            "permanent (torch.nn.utils.prune.remove, torch.nn.utils.parametrize.remove_parametrizations)"
        )
    if layer.weight.device.type != "cpu":
        return f"weights on {layer.weight.device} cannot be packed, only those on a CPU"
    if layer.weight.is_inference():
        return "weights made in inference mode have no version counter, so changes cannot be noticed"
    if type(layer.weight) not in (torch.Tensor, nn.Parameter):
        return f"weights of type {type(layer.weight).__name__} (quantized, for example) cannot be packed"
    if readable(layer, "weight", "bias") is None:
        return "a layer has a bias of a class of its own, or one that is computed"
    return None


def _pays(layers: list[nn.Linear]) -> bool:
    is_bf16 = all(layer.weight.dtype == torch.bfloat16 for layer in layers)
    return is_bf16 and fits(sum(layer.weight.nbytes for layer in layers))


def fits(num_bytes: int) -> bool:
    """Whether copies of this size are made without being asked for."""
    import psutil

    return num_bytes <= AUTO_SHARE * float(psutil.virtual_memory().available)


class LinearLayers:
    """The linear layers of a model that native kernels or oneDNN compute in packed steps.

    copies: with packed copies of the weights. What a layer computes with is renewed when `weights` has detected a
    change of its weight.
    """

    def __init__(self, layers: list[nn.Linear], weights: Weights, *, copies: bool) -> None:
        parts: dict[int, torch.Tensor] = {}
        if copies and fused_ops.packs():
            native = [layer for layer in layers if layer.weight.dtype == torch.bfloat16]
            arena = fused_ops.WeightArena([(layer.weight.shape[0], layer.weight.shape[1]) for layer in native])
            parts = {id(layer): part for layer, part in zip(native, arena.parts, strict=True)}
        self._layers = [LinearLayer(layer, parts.get(id(layer)), copies=copies) for layer in layers]
        self._weights = weights
        self._seen: tuple[int, int, list[Any]] | None = None  # state of the weights when the layers were last renewed
        self._of: weakref.WeakKeyDictionary[nn.Module, LinearLayer]
        self._of = weakref.WeakKeyDictionary(zip(layers, self._layers, strict=True))
        self._classes = ClassForwards([nn.Linear])
        self._overrides = Overrides(Patch(layer.attributes, "forward", layer.forward) for layer in self._layers)

    def is_of(self, layers: list[nn.Linear]) -> bool:
        """Whether they are these layers; False after layers of the model have been replaced."""
        return len(layers) == len(self._layers) and all(layer in self._of for layer in layers)

    def of(self, layer: nn.Module) -> LinearLayer | None:
        return self._of.get(layer)

    def apply(self, user: object) -> None:
        """Until `undo`, packed steps of this thread compute the layers this way; other calls are unaffected."""
        if self._classes.changed():
            self._overrides.withdraw()
            return
        seen = (self._weights.epoch, self._weights.layout, self._overrides.apply(user))
        if seen != self._seen:
            for layer in self._layers:
                layer.renew(self._weights)
            self._seen = seen

    def undo(self, user: object) -> None:
        """Undo `apply`, even if it was interrupted. Idempotent."""
        self._overrides.undo(user)


class LinearLayer:
    """One linear layer: with a packed copy (in `part` of an arena for the native kernels, else of oneDNN), or without.

    `native` describes it to the native kernels, None if they do not compute it. `forward` replaces the layer's own.
    Outside packed steps, and while torch computes the layer, it computes what the layer itself computes. (That is so
    while other code has set a forward on the layer, which may call this one.)
    """

    __slots__ = ("_compute", "_copies", "_layer", "_part", "_shape", "_stamp", "attributes", "forward", "native")

    def __init__(self, layer: nn.Linear, part: torch.Tensor | None, *, copies: bool) -> None:
        # No strong reference to the layer: the model, which is the key of its linear layers, must not be kept alive.
        self.attributes = layer.__dict__
        self._layer = reference = weakref.ref(layer)
        self.native: fused_ops.LinearWeight | None = None
        self._copies = copies
        self._part = part
        self._shape = layer.weight.shape
        self._stamp: tuple[Any, ...] | None = None
        # The function refers to this list only: a reference to this object would keep the copy until the garbage
        # collector runs.
        self._compute = compute = [_TORCH]

        def forward(input: torch.Tensor) -> torch.Tensor:  # named as in nn.Linear
            other = compute[0]
            is_plain = other is not None and type(input) is torch.Tensor and not torch.is_autocast_enabled("cpu")
            if other is not None and is_plain and in_packed_step():
                return other(input)
            own: Any = reference()
            result: torch.Tensor = type(own).forward(own, input)
            return result

        self.forward: _Linear = mark(forward)

    def renew(self, weights: Weights) -> None:
        """Look at the layer again if its weight has changed, which is then packed again, or if the bias has another
        address."""
        layer = self._layer()
        own = None if layer is None else readable(layer, "weight", "bias")
        weight, bias = own or (None, None)
        if weight is None or self.attributes.get("forward") is not self.forward:
            self._compute[0] = self._stamp = self.native = None
            return
        of_bias = None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, bias.stride())
        stamp = (weights.moved_at(weight), id(weight), id(bias), of_bias)
        if stamp == self._stamp:
            return
        self.native = self._native_weight(weight, bias)
        self._compute[0] = self._function(weight, bias)
        self._stamp = stamp

    def _native_weight(self, weight: torch.Tensor, bias: torch.Tensor | None) -> fused_ops.LinearWeight | None:
        if weight.shape != self._shape or not _is_like(bias, weight) or not weight.numel():
            return None
        if self._part is not None and weight.dtype == torch.bfloat16:
            fused_ops.pack(weight, self._part)
            return fused_ops.LinearWeight(self._part, bias, weight.shape[0], weight.shape[1], is_packed=True)
        if self._copies or not weight.is_contiguous() or weight.device.type != "cpu":
            return None
        if not fused_ops.is_available(weight.dtype):
            return None
        # The parameter itself: a view of it would keep its memory when the parameter gets other memory.
        return fused_ops.LinearWeight(weight, bias, weight.shape[0], weight.shape[1], is_packed=False)

    def _function(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Linear | None:
        if (native := self.native) is not None:
            plain, dtype = nn.functional.linear, weight.dtype
            return lambda rows: fused_ops.linear(native, rows) if rows.dtype == dtype else plain(rows, weight, bias)
        if not self._copies or not _is_like(bias, weight):
            return _TORCH
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda rows: pointwise(rows, packed, bias, "none", [], "")


def _is_like(bias: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Whether the bias is as the kernels expect it."""
    return bias is None or (
        bias.dtype == weight.dtype
        and bias.device == weight.device
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()
    )
