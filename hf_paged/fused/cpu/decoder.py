"""Whole decoder layers done natively in packed steps, and in decode steps all that follow each other in one call.

Beside streaming the weights of a decode step, every module call and small operation of torch runs with cold caches;
together they take half as long again. A layer made of known parts (an RMS norm before its attention and one before a
gated MLP with SiLU) is computed both ways once, on random rows, and left alone for good if one bit of the results
differs. Then it takes three native calls: what is before attention, attention (the way it always goes), what is after.

`native_walk` says when the first layer of a decode step may compute those behind it too.
"""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

import torch
from torch import nn

from hf_paged.cache.packed_cache import PackedCache
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu.norms import norm_of
from hf_paged.fused.cpu.stack import Attention, Stack, StackLayer, layer_sizes
from hf_paged.fused.cpu.walk import Walk
from hf_paged.fused.cpu.weights import PackedLayer, PackedWeights
from hf_paged.integration.attention import attention_forward, in_packed_step, pattern_of_call
from hf_paged.model.state import Slot, state_of

TRIAL_TOKENS = 8
"""A shorter step decides nothing: of one token, at position 0, the rotated heads are the heads themselves."""

_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")  # some models have them
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")

_known: Slot[tuple[weakref.ref[PackedWeights], NativeDecoder]] = Slot("native decoder layers")


def native_decoder(model: nn.Module, weights: PackedWeights | None) -> NativeDecoder | None:
    """Stand-ins for the model's layers, shared by all who use these packed weights."""
    if weights is None or not fused_ops.is_available():
        return None
    known = _known.get(model)
    if known is None or known[0]() is not weights:
        known = weakref.ref(weights), NativeDecoder(model, weights)
        _known.put(model, known)
    return known[1]


class NativeDecoder:
    """Stand-ins for the decoder layers of a model that are made of known parts."""

    def __init__(self, model: nn.Module, weights: PackedWeights) -> None:
        layers = (_known_layer(module, weights) for module in model.modules())
        self._layers = [layer for layer in layers if layer is not None]
        self._ready: list[Layer] = []
        self._weights = state_of(model).weights
        self._seen: tuple[int, int] | None = None  # when these were found ready

    def enter(self) -> None:
        """Until `leave`, native kernels compute the layers in packed steps of this thread. After the weights' `enter`,
        which renews what these use."""
        seen = self._weights.epoch, self._weights.layout
        if seen != self._seen:
            self._ready = [layer for layer in self._layers if layer.is_ready()]
            self._seen = seen
        for layer in self._ready:
            layer.attributes["forward"] = layer.forward

    def leave(self) -> None:
        """Undo `enter`, or what there was of it; may be called again."""
        for layer in self._layers:
            layer.attributes.pop("forward", None)


def _known_layer(layer: nn.Module, weights: PackedWeights) -> Layer | None:
    """None unless the layer has the parts that the kernels know, and no others."""
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if attention is None or mlp is None:
        return None
    parts: dict[str, nn.Module] = {}
    for parent, names in ((layer, _LAYER), (attention, (*_ATTENTION, *_HEAD_NORMS)), (mlp, _MLP)):
        children = {name: child for name, child in parent._modules.items() if child is not None}
        if not set(names) - set(_HEAD_NORMS) <= set(children) <= set(names):
            return None
        if parent._parameters or parent._buffers or "forward" in parent.__dict__:
            return None
        parts |= children
    packed = {name: weights.of(part) for name, part in parts.items() if name.endswith("_proj")}
    norms = {name: norm_of(part) for name, part in parts.items() if name.endswith("norm")}
    if None in packed.values() or None in norms.values():
        return None
    if not _sizes_fit(attention, parts, norms):
        return None
    return Layer(layer, parts, packed, norms)


def _sizes_fit(attention: nn.Module, parts: dict[str, nn.Module], norms: dict[str, fused_ops.Norm]) -> bool:
    """What the kernels take for granted: they only get addresses."""
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or not isinstance(getattr(attention, "layer_idx", None), int):
        return False
    shapes = {name: part.weight.shape for name, part in parts.items() if name.endswith("_proj")}
    depth, inner = shapes["q_proj"][1], shapes["gate_proj"][0]
    heads, kv_heads = shapes["q_proj"][0], shapes["k_proj"][0]
    expected = {
        "q_proj": (heads, depth), "k_proj": (kv_heads, depth), "v_proj": (kv_heads, depth), "o_proj": (depth, heads),
        "gate_proj": (inner, depth), "up_proj": (inner, depth), "down_proj": (depth, inner),
    }  # fmt: skip
    return (
        shapes == expected
        and all(size % 32 == 0 for size in (depth, inner, head_dim))
        and heads % head_dim == kv_heads % head_dim == 0
        and all(norm.weight.numel() == (head_dim if name in _HEAD_NORMS else depth) for name, norm in norms.items())
    )


class Layer:
    """One decoder layer and its parts by name. `_verdict`: whether the kernels give its bits; None before the trial."""

    def __init__(
        self,
        layer: nn.Module,
        parts: dict[str, nn.Module],
        packed: dict[str, PackedLayer],
        norms: dict[str, fused_ops.Norm],
    ) -> None:
        self.attributes = layer.__dict__
        self._layer = layer
        self._attention = parts["self_attn"]
        parents = layer, parts["self_attn"], parts["mlp"]
        self.places = [(p._modules, name, child) for p in parents for name, child in p._modules.items() if child]
        self.packed = packed
        self._norms = norms
        self.norm_parameters = {name: parts[name]._parameters for name in norms}
        self._norm_addresses: dict[str, int] = {}
        self._norm_sizes = {name: norm.weight.numel() for name, norm in norms.items()}
        self._verdict: bool | None = None
        self._linears: dict[str, fused_ops.PackedLinear] = {}
        self._before: fused_ops.LayerIn
        self._after: fused_ops.LayerOut
        self._options: dict[str, Any] = {}  # what the layer passes to its attention beside tensors
        self._stack: tuple[list[Any], Stack] | None = None
        self.sizes: tuple[int, ...] = ()
        self.layer_idx: int = self._attention.layer_idx
        self.next: Layer | None = None  # which took this one's result, as it was, in the last step
        self.mask: Any = None  # what it was given then
        self._attends: Attention | None = None  # with that mask

    def is_ready(self) -> bool:
        """False when the kernels are not for this layer, or not any more: parts were replaced, or somebody watches."""
        if self._verdict is False:
            return False
        for modules, name, child in self.places:
            if modules.get(name) is not child or child._forward_hooks or child._forward_pre_hooks:
                return False
        changed = False
        for name, parameters in self.norm_parameters.items():
            norm, weight = self._norms[name], parameters["weight"]
            if weight is not norm.weight or weight.data_ptr() != self._norm_addresses.get(name):
                self._norms[name] = fused_ops.Norm(weight, norm.eps)
                self._norm_addresses[name] = weight.data_ptr()
                changed = True
            if weight.dtype != torch.bfloat16 or weight.numel() != self._norm_sizes[name]:
                return False
        for name, packed in self.packed.items():
            if packed.native is None:
                return False
            changed |= packed.native is not self._linears.get(name)
        if changed:
            self._gather()
        return True

    def _gather(self) -> None:
        linears = {name: packed.native for name, packed in self.packed.items() if packed.native is not None}
        self._linears, norms = linears, self._norms
        self._before = fused_ops.LayerIn(
            norms["input_layernorm"],
            *(linears[name] for name in ("q_proj", "k_proj", "v_proj")),
            *(norms.get(name) for name in _HEAD_NORMS),
            self._attention.head_dim,
        )
        self._after = fused_ops.LayerOut(
            linears["o_proj"],
            norms["post_attention_layernorm"],
            *(linears[name] for name in ("gate_proj", "up_proj", "down_proj")),
        )
        self.sizes = layer_sizes(self._before, self._after)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """In place of the layer's own, which computes whatever the kernels cannot."""
        cache = kwargs.get("past_key_values")
        if args or self._verdict is False or not isinstance(cache, PackedCache) or not in_packed_step():
            return self._plain(hidden_states, *args, **kwargs)
        walk = Walk.of(cache)
        ahead = walk.take(self, hidden_states, kwargs)
        if ahead is not None:
            return ahead
        if not self._fits(hidden_states, kwargs):
            return self._plain(hidden_states, **kwargs)
        walk.enter(self, hidden_states, kwargs)
        if self._verdict is None:
            result = self._try(hidden_states, kwargs)
        else:
            if len(line := walk.line(self, cache)) > 1:
                return walk.run(line, cache, hidden_states)
            result = self._compute(hidden_states, kwargs)
        walk.leave(self, result)
        return result

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._layer).forward(self._layer, *args, **kwargs)

    def _fits(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        angles = kwargs.get("position_embeddings")
        if not isinstance(angles, tuple) or len(angles) != 2:
            return False
        tokens = hidden_states.shape[1]
        shape = (1, tokens, self._before.head_dim)
        return (
            hidden_states.shape == (1, tokens, self._before.query.depth)
            and angles[0].shape == angles[1].shape == shape
            and all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in (hidden_states, *angles))
        )

    def _compute(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        attention = self._attention
        query, key, value = fused_ops.layer_in(self._before, hidden_states, *kwargs["position_embeddings"])
        key, value = kwargs["past_key_values"].update(key, value, self.layer_idx)
        mask = kwargs.get("attention_mask")
        attended, _ = attention_forward(attention, query, key, value, mask, **self._options)
        return fused_ops.layer_out(self._after, attended.flatten(2), hidden_states)

    def can_join(self, first: Layer) -> bool:
        """Whether one native call can compute both."""
        return self.sizes == first.sizes and self._attends is not None and "forward" in self.attributes

    def watch_mask(self, mask: Any) -> None:
        """Take note of how the layer is asked to attend, for calls of `stack`."""
        if self._verdict is True and (self._attends is None or mask is not self.mask):
            options = self._options
            pattern = pattern_of_call(self._attention, mask, options["sliding_window"])
            scale = self._before.head_dim**-0.5 if options["scaling"] is None else options["scaling"]
            self._attends = Attention(scale, options["softcap"], pattern.sliding_window, pattern.chunk_size)
            self.mask = mask

    def stack(self, line: list[Layer]) -> Stack:
        """Of this layer and those that follow; kept for the next step."""
        parts = [part for layer in line for part in (layer._before, layer._attends, layer._after)]
        if self._stack is None or len(parts) != len(self._stack[0]) or not all(map(is_, parts, self._stack[0])):
            triples = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
            self._stack = parts, Stack([StackLayer(*triple) for triple in triples])
        return self._stack[1]

    def _try(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Compute both ways, if the step is long enough, for random rows: a step's own may be all the same, or zero."""
        handles = kwargs["past_key_values"].handles
        if hidden_states.shape[1] >= TRIAL_TOKENS:
            generator = torch.Generator().manual_seed(self.layer_idx)
            rows = torch.randn(hidden_states.shape, generator=generator).bfloat16()
            expected = self._plain(rows, **kwargs)
            self._verdict = False
            if isinstance(expected, torch.Tensor) and handles and handles[-1].layer_idx == self.layer_idx:
                self._options = handles[-1].options
                if self._options["s_aux"] is None:  # a parameter of the layer: it would not be one of known parts
                    self._verdict = torch.equal(self._compute(rows, kwargs), expected)
        # Last, so that what is in the blocks then is the K/V of the step's own rows, computed in the layer's own way.
        return self._plain(hidden_states, **kwargs)
