"""Linear layers of a model, computed by other code than torch's: by the native kernels, or on request, in fp32, by
oneDNN with packed copies of the weights. Weights in int8 (`int8.py`), copies in int8 on request, and weights in codes
(`coded.py`) have native kernels only.

With the few rows of a decode step, a linear layer takes as long as reading its weights. The native kernels read the
weights themselves, faster than torch does with up to about 64 rows; with hundreds of rows in fp32, torch is faster,
but for CPUs with AMX (docs/benchmarks.md). On CPUs with AVX-512 and BF16 they read bf16 weights faster still from
packed copies, in the memory layout that is fastest to compute with; the results are then those of torch 2.13, bit for
bit, with two exceptions, where torch sums in another order: with AMX, more than 32 rows; without it, a single row of
more than 1,024 elements. On other CPUs and in other dtypes the order of the sums is none of torch's, whose own
depends on the number of rows; ours depends on the depth alone, and in fp32, but for `batch_invariant`, also on whether
there are more than 48 rows (with AMX) or more than 4 (AVX-512: 8; weights in codes).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.modules import linear as linear_module

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu.coded import CodedWeight, coded_weight, keep_in_codes
from hf_paged.fused.cpu.groups import SIZES, Form
from hf_paged.fused.cpu.int8 import Int8Weight, as_int8, int8_weight
from hf_paged.fused.cpu.large_pages import move_weights
from hf_paged.integration.attention import in_packed_step
from hf_paged.kernels.buffers import has_memory, in_large_pages
from hf_paged.model.overrides import Overrides, Patch, foreign_forward, mark, uncompiled_modules
from hf_paged.model.parameters import is_parameter, readable
from hf_paged.model.picture import ClassForwards
from hf_paged.model.state import Slot, release, state_of, unwrapped
from hf_paged.model.trial import random_numbers
from hf_paged.model.weights import Weights

AUTO_SHARE = 0.25
"""With `prepack=None`, weights are packed only if the copies take at most this share of the free memory."""

_Linear = Callable[[torch.Tensor], torch.Tensor]

_TORCH: _Linear | None = None


class Copies(Enum):
    """Forms of the weights that linear layers use: the weights themselves, packed copies, copies in int8 or bf16."""

    NONE = "native kernels"
    PACKED = "packed weights"
    INT8 = "weights in int8"
    BF16 = "weights in bf16"


_FORMS = {"int8": Form(8, 32), "int4": Form(4, 32)}  # of codes
_FORMS |= {f"w{form.bits}a{bits}": form._replace(activations=bits) for bits in (16, 8) for form in _FORMS.values()}
_OF_DTYPES = {None: Copies.PACKED, "int8": Copies.INT8, "bf16": Copies.BF16}  # argument of `prepack`


_agreeing: dict[tuple[type, torch.dtype], bool] = {}  # what `_agrees` has found in this process
_known: dict[Copies, Slot[LinearLayers]] = {copies: Slot(f"linear layers of {copies.value}") for copies in Copies}
_for_calls: Slot[Copies] = Slot("prepack was called")


def layers_for_engine(model: Any, prepack: bool | None) -> LinearLayers | None:
    """The model's linear layers for an engine's steps, shared by all engines on it. None: torch computes them.

    prepack: True, False, or None (pack bf16 weights where that is faster, move others from mapped files into large
    pages, both if the memory suffices). Raises ValueError for True if packing is impossible.
    """
    layers = _linears(model)
    # The user has asked for such copies by `hf_paged.prepack`, which holds for engines too.
    if prepack is None and _for_calls.get(model) in (Copies.INT8, Copies.BF16):
        return layers_for_calls(model)
    obstacle = _obstacle(layers, Copies.PACKED)
    if obstacle is not None and prepack:
        raise ValueError(f"prepack=True: {obstacle}; leave it out")
    if obstacle is None and (prepack or (prepack is None and _pays(layers))):
        return _with_copies(model, layers, Copies.PACKED)
    if prepack is None:
        move_weights(model, filter(_is_read_in_place, layers), fits)
    return _without_copies(model, layers)


def layers_for_calls(model: Any) -> LinearLayers | None:
    """The same for calls of `generate`: packed copies if `prepack` was called. Raises ValueError if the weights can no
    longer be packed."""
    layers = _linears(model)
    copies = _for_calls.get(model)
    if copies is None:
        return _without_copies(model, layers)
    # Layers without copies are not used any more, and would keep weights that are replaced later.
    _known[Copies.NONE].take(model)
    if (obstacle := _obstacle(layers, copies)) is not None:
        raise ValueError(f"prepack was called for this model, but {obstacle}; call release_memory(model)")
    return _with_copies(model, layers, copies)


def is_prepacked(model: Any) -> bool:
    """Return True if `prepack` was called for the model."""
    return _for_calls.get(model) is not None


def prepack(model: Any, dtype: str | None = None, *, group_size: int | None = None) -> None:
    """Make paged `generate` calls compute with packed copies of the model's linear weights, or round these, on a CPU.

    The copies take as much memory as the weights, until `release_memory(model)`. In bf16, with few rows, a call is up
    to three times as fast. In fp32 oneDNN computes with them, and layers are not computed whole, which is slower than
    hf_paged's own kernels for fp32. Sums may be in another order, as with `Engine(prepack=True)`. Changed weights are
    packed again at the start of the next call; see `weights_changed` for the changes that must be reported.

    Args:
        model: A transformers model, or a PEFT model over one, with linear weights in bf16 or fp32.
        dtype: What the copies are made of. None = the weights' own dtype. "int8": with a scale for each output, they
            take half of the memory of bf16 and are read in half of the time; engines made later use them too, unless
            they have a `prepack` of their own. The model then computes other numbers, close to its own
            (docs/quantised.md). "bf16": of fp32 weights whose values bf16 represents exactly, such as those of a
            checkpoint in bf16 that was loaded in fp32. They are half as long, and the results are the same to the last
            bit; engines made later use them too. A weight that later gets other values is read itself. "int4": the
            model's own weights are rounded to four bits, with a scale and a least value for each group, and give their
            memory back, which only loading the model again undoes. Embeddings and the head are rounded to eight bits.
            Plain `generate` computes with the same rounded weights, slowly; what is saved has their values. "w4a16",
            "w8a16": weights in groups of four or eight bits, and in fp32 the kernels round the activations, too, to 15
            bits in units of each group's largest one, which makes prompts and batches faster. "w4a8", "w8a8": to 8
            bits, in any dtype, which is faster still and less exact.
        group_size: Elements of a group: 32, 64 or 128. None = 32, but for "int8", where the model's own weights are
            rounded too, to eight bits, if there is a group size.

    Raises:
        ValueError: For another dtype or group size, if the weights cannot be packed or rounded, or for "bf16" if a
            value is not exact. The message says which weights, and why.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        hf_paged.prepack(model)
        tokens = model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, cache_implementation="paged")
        hf_paged.release_memory(model)
        ```
    """
    if dtype not in (*_OF_DTYPES, *_FORMS):
        names = ", ".join(map(repr, _FORMS))
        raise ValueError(f"dtype={dtype!r}: give {names} or 'bf16', or leave it out for the weights' own dtype")
    form = None if dtype is None else _FORMS.get(dtype)
    if group_size is not None and (type(group_size) is not int or group_size not in SIZES or form is None):
        names = ", ".join(map(repr, _FORMS))
        raise ValueError(f"group_size={group_size!r} with dtype={dtype!r}: give 32, 64 or 128, with one of {names}")
    model = unwrapped(model)
    if form is not None and (dtype != "int8" or group_size is not None):
        _round(model, form._replace(size=group_size or form.size))
        return
    copies = _OF_DTYPES[dtype]
    layers = _linears(model)
    obstacle = _obstacle(layers, copies)
    if obstacle is None and copies is Copies.BF16:
        obstacle = _rounded_weight(layers)
    if obstacle is not None:
        call = "prepack=True" if dtype is None else f"dtype={dtype!r}"
        raise ValueError(f"{call}: {obstacle}; leave it out")
    # Copies in another form are freed before the new ones are made.
    if (before := _for_calls.get(model)) not in (None, copies):
        _known[before].take(model)
    _with_copies(model, layers, copies)
    _for_calls.put(model, copies)


def round_new(model: Any, dtype: str) -> None:
    """Round the weights of a model that has just been loaded, in groups of 32, as `prepack` does. Of files that are
    mapped, no more than a weight is in memory at once."""
    _round(model, _FORMS[dtype], is_new=True)


def _round(model: Any, form: Form, *, is_new: bool = False) -> None:
    # Whatever was derived from the weights would keep them.
    release(model)
    keep_in_codes(model, form, is_new=is_new)
    state_of(model).weights.look(contents=True)


def rounded_layers(model: Any) -> dict[int, int]:
    """Count the linear layers that native kernels compute with weights in 8 or 4 bits in paged calls of `generate`, by
    their bits."""
    layers = layers_for_calls(model)
    if layers is None:
        return {}
    user = object()
    try:
        # Only an applied layer knows what it computes with.
        layers.apply(user)
    finally:
        layers.undo(user)
    return layers.count_by_bits()


def _linears(model: Any) -> list[nn.Linear]:
    """The layers that compute what nn.Linear does with a parameter: no other code has replaced their forward, or
    computes their weight. An encoder runs outside of packed steps."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    apart = set() if encoder is None else set(encoder.modules())
    found = (layer for layer in uncompiled_modules(model) if layer not in apart)
    linears: Any = (layer for layer in found if type(layer) is nn.Linear or int8_weight(layer) is not None)
    return [layer for layer in linears if not foreign_forward(layer) and is_parameter(layer, "weight")]


def _with_copies(model: Any, layers: list[nn.Linear], copies: Copies) -> LinearLayers:
    weights = state_of(model).weights
    weights.look(contents=True)
    return _layers_of(model, layers, copies)


def _without_copies(model: Any, layers: list[nn.Linear]) -> LinearLayers | None:
    """The layers that the native kernels compute from the weights themselves, None if there are none."""
    usable = [layer for layer in layers if _is_usable(layer)]
    if not usable:
        # It would keep the weights of layers that have been replaced.
        _known[Copies.NONE].take(model)
        return None
    state_of(model).weights.look()
    return _layers_of(model, usable, Copies.NONE)


def _is_usable(layer: nn.Linear) -> bool:
    """Return True if native kernels may read the layer's weight."""
    return _unreadable(layer) is None and fused_ops.is_available(layer.weight.dtype)


def _is_read_in_place(layer: nn.Linear) -> bool:
    """Return True if native kernels read elements of the rows' dtype at the weight's address."""
    return _is_usable(layer) and coded_weight(layer) is None and int8_weight(layer) is None


def _layers_of(model: Any, layers: list[nn.Linear], copies: Copies) -> LinearLayers:
    slot = _known[copies]
    known = slot.get(model)
    if known is None or not known.is_of(layers):
        known = LinearLayers(layers, state_of(model).weights, copies)
        slot.put(model, known)
    return known


def _obstacle(layers: list[nn.Linear], copies: Copies) -> str | None:
    """Say why there can be no copies of the weights, packed or in int8; None if there can."""
    if copies in (Copies.INT8, Copies.BF16):
        return _obstacle_to_conversion(layers, copies)
    # Weights in codes are packed, and int8 weights of other packages are no obstacle for the packed copies of the rest.
    if layers and not (layers := [layer for layer in layers if coded_weight(layer) is None]):
        return None
    if layers and not fused_ops.packs() and all(int8_weight(layer) is not None for layer in layers):
        return "without AVX-512 and BF16 (see HF_PAGED_ISA) int8 weights are read where they are"
    layers = [layer for layer in layers if int8_weight(layer) is None] or layers
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this build of torch cannot pack linear weights"
    if not layers:
        return "the model has no linear layers with weights that are parameters"
    # All layers or none, so that `prepack=True` is honoured or refused.
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


def _obstacle_to_conversion(layers: list[nn.Linear], copies: Copies) -> str | None:
    if not layers:
        return "the model has no linear layers with weights that are parameters"
    for layer in layers:
        if coded_weight(layer) is not None:
            return "its weights are in codes, which have no copies"
        if (reason := _unreadable(layer)) is not None:
            return reason
        if not fused_ops.is_available(layer.weight.dtype):
            return f"there are no native kernels for {layer.weight.dtype} on this machine"
        if copies is Copies.BF16 and (layer.weight.dtype != torch.float32 or int8_weight(layer) is not None):
            return f"only weights in float32 have shorter copies in bfloat16, not those of {layer.weight.dtype}"
    return None


def _rounded_weight(layers: list[nn.Linear]) -> str | None:
    """Say why copies in bf16 would be other numbers; None if they would not."""
    for layer in layers:
        if not layer.weight.equal(layer.weight.bfloat16().float()):
            return f"bfloat16 does not represent all values of a weight {list(layer.weight.shape)} exactly"
    return None


def _in_bf16(weight: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
    """A copy in bf16 in this memory, None if that would round."""
    copy = part.view(torch.bfloat16).view(weight.shape).copy_(weight.detach())
    return copy if copy.float().equal(weight) else None


def _unreadable(layer: nn.Linear) -> str | None:
    """Say why only torch can read the layer's weight; None if the kernels can."""
    if (int8_weight(layer) is not None or coded_weight(layer) is not None) and _has_own_bias(layer):
        return None
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


def _has_own_bias(layer: nn.Module) -> bool:
    return readable(layer, "bias") is not None


def _pays(layers: list[nn.Linear]) -> bool:
    layers = [layer for layer in layers if coded_weight(layer) is None]
    is_bf16 = all(layer.weight.dtype == torch.bfloat16 for layer in layers)
    return is_bf16 and fits(sum(layer.weight.numel() * _stored(layer, Copies.PACKED).itemsize for layer in layers))


def _stored(layer: nn.Linear, copies: Copies) -> torch.dtype:
    """The dtype of what the layer is computed with."""
    is_int8 = copies is Copies.INT8 or int8_weight(layer) is not None
    return torch.int8 if is_int8 else layer.weight.dtype


def fits(num_bytes: int) -> bool:
    """Return True if free memory allows copies of this size that nobody asked for."""
    import psutil

    return num_bytes <= AUTO_SHARE * float(psutil.virtual_memory().available)


class LinearLayers:
    """The linear layers of a model that native kernels or oneDNN compute in packed steps.

    What a layer computes with is renewed when `weights` has detected a change of its weight.
    """

    def __init__(self, layers: list[nn.Linear], weights: Weights, copies: Copies) -> None:
        parts: dict[int, torch.Tensor] = {}
        if copies is Copies.BF16:
            sizes = [layer.weight.numel() * 2 for layer in layers]
            parts = dict(zip(map(id, layers), in_large_pages(sum(sizes)).split(sizes), strict=True))
        # One piece of memory for all copies of a dtype, in large pages.
        elif copies is not Copies.NONE and fused_ops.packs():
            native = [each for each in layers if each.weight.dtype == torch.bfloat16 and coded_weight(each) is None]
            for dtype in (torch.bfloat16, torch.int8):
                those = [layer for layer in native if _stored(layer, copies) == dtype]
                shapes = [(layer.weight.shape[0], layer.weight.shape[1]) for layer in those]
                arena = fused_ops.WeightArena(shapes, dtype)
                parts |= {id(layer): part for layer, part in zip(those, arena.parts, strict=True)}
        self._layers = [LinearLayer(layer, parts.get(id(layer)), copies) for layer in layers]
        self._weights = weights
        self._seen: tuple[int, int, list[Any]] | None = None  # state of the weights when the layers were last renewed
        self._of: weakref.WeakKeyDictionary[nn.Module, LinearLayer]
        self._of = weakref.WeakKeyDictionary(zip(layers, self._layers, strict=True))
        self._classes = ClassForwards([nn.Linear, *map(type, layers)])
        self._overrides = Overrides(Patch(layer.attributes, "forward", layer.forward) for layer in self._layers)

    def is_of(self, layers: list[nn.Linear]) -> bool:
        """Return True if these are the same layers; False after layers of the model have been replaced."""
        return len(layers) == len(self._layers) and all(layer in self._of for layer in layers)

    def of(self, layer: nn.Module) -> LinearLayer | None:
        return self._of.get(layer)

    def count_by_bits(self) -> dict[int, int]:
        """Count the layers that native kernels compute with weights in few bits, by these, as of the last `apply`."""
        natives = [layer.native for layer in self._layers if layer.native is not None]
        groups = [native.groups.bits for native in natives if native.groups is not None]
        return dict(Counter([*groups, *(8 for native in natives if native.int8 is not None)]))

    def apply(self, user: object) -> None:
        """Until `undo`, packed steps of this thread compute the layers this way; other calls are unaffected."""
        # Whoever has replaced a class's forward since must be called.
        if self._classes.changed_at(self._weights.layout):
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

    def __init__(self, layer: nn.Linear, part: torch.Tensor | None, copies: Copies) -> None:
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
        known = None if layer is None else _parameters(layer)
        # A forward that somebody has set since stays in effect.
        if layer is None or known is None or self.attributes.get("forward") is not self.forward:
            self._compute[0] = self._stamp = self.native = None
            return
        weight, bias, int8 = known
        of_bias = None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, bias.stride())
        inner: tuple[torch.Tensor, ...] = () if int8 is None else (int8.data, int8.scale)
        if isinstance(weight, CodedWeight):
            inner = (weight.memory,)
        moved = ((weights.moved_at(each), id(each)) for each in (weight, *inner))
        # Weights that wrap others get another dtype without new memory.
        stamp = (*moved, weight.dtype, id(bias), of_bias)
        if stamp == self._stamp:
            return
        self.native = self._native_weight(weight, bias, int8)
        # Another version of the package may have given its data another meaning.
        if int8 is not None and self.native is not None and not _agrees(layer, self.native):
            self.native = None
        self._compute[0] = self._function(weight, bias)
        self._stamp = stamp

    def _native_weight(
        self, weight: torch.Tensor, bias: torch.Tensor | None, int8: Int8Weight | None
    ) -> fused_ops.LinearWeight | None:
        if weight.shape != self._shape or not _is_like(bias, weight) or not weight.numel():
            return None
        if weight.device.type != "cpu" or not fused_ops.is_available(weight.dtype):
            return None
        shape = weight.shape[0], weight.shape[1]
        if isinstance(weight, CodedWeight):
            how = fused_ops.InGroups(*weight.codes.form, weight.dtype)
            return fused_ops.LinearWeight(weight.memory, bias, *shape, True, None, how)
        if int8 is None and self._copies is Copies.INT8:
            int8 = as_int8(weight)
        scales = None if int8 is None else fused_ops.Int8Scales(int8.scales(), int8.dtype, int8.rounds)
        # The tensor itself: a view of it would keep its memory when the layer gets other memory.
        memory, is_packed = weight if int8 is None else int8.data, False
        if self._part is not None and weight.dtype == torch.bfloat16:
            fused_ops.pack(memory, self._part)
            memory, is_packed = self._part, True
        elif (
            self._copies is Copies.BF16
            and self._part is not None
            and (copy := _in_bf16(weight, self._part)) is not None
        ):
            memory, is_packed = copy, True
        elif not memory.is_contiguous() or (int8 is None and self._copies is Copies.PACKED):
            return None
        return fused_ops.LinearWeight(memory, bias, *shape, is_packed, scales)

    def _function(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Linear | None:
        if (native := self.native) is not None:
            plain, dtype = nn.functional.linear, weight.dtype
            return lambda rows: fused_ops.linear(native, rows) if rows.dtype == dtype else plain(rows, weight, bias)
        if self._copies is not Copies.PACKED or not has_memory(weight) or not _is_like(bias, weight):
            return _TORCH
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        pointwise = torch.ops.mkldnn._linear_pointwise
        return lambda rows: pointwise(rows, packed, bias, "none", [], "")


def _parameters(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None, Int8Weight | None] | None:
    """Return weight and bias of a layer, and its `Int8Weight` if it has an int8 weight; None if the kernels must not
    read them."""
    int8 = int8_weight(layer)
    if int8 is not None or coded_weight(layer) is not None:
        own = readable(layer, "bias")
        return None if own is None else (layer._parameters["weight"], own[0], int8)  # type: ignore[return-value]
    own = readable(layer, "weight", "bias") if type(layer) is nn.Linear else None
    return None if own is None or own[0] is None else (own[0], own[1], None)


def _agrees(layer: nn.Module, native: fused_ops.LinearWeight) -> bool:
    """Return True if the kernels compute what a layer of another package computes, but for rounding: another version
    of the package may compute something else. One layer of each kind is tried."""
    kind = type(layer._parameters["weight"]), native.dtype
    if (known := _agreeing.get(kind)) is not None:
        return known
    rows = random_numbers()(1, native.depth).to(native.dtype)
    with torch.no_grad():
        expected = type(layer).forward(layer, rows).float()
    difference = (fused_ops.linear(native, rows).float() - expected).abs().max()
    # Some units in the last place, because the sums run in another order.
    agrees = bool(difference <= 8 * torch.finfo(native.dtype).eps * expected.abs().max())
    # A layer with odd weights says nothing about its kind.
    if expected.isfinite().all():
        _agreeing[kind] = agrees
    return agrees


def _is_like(bias: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Return True if there is no bias, or one as the kernels expect it beside this weight."""
    return bias is None or (
        bias.dtype == weight.dtype
        and bias.device == weight.device
        and bias.shape == weight.shape[:1]
        and bias.is_contiguous()
    )
