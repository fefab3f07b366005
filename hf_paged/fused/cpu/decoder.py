"""Whole decoder layers in native kernels during packed steps; in decode steps, one call for consecutive layers.

A decode step streams the weights through the CPU's caches, so every module call and small operation of torch runs with
cold caches; together they add half of the streaming time. An override computes a layer in three calls: the part before
attention, attention, and the part after it. It is used for layers with known parts (an RMS norm before attention, and
one before a gated MLP with SiLU) whose code is known, and only if a trial on random rows gives the bits of the model's
own layer.

`walk` decides when the first layer of a decode step may compute the following ones too.
"""

from __future__ import annotations

import sys
import weakref
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from hf_paged.features.watch.known_code import is_known_module, settings_of
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu.norms import norm_of, own_rotary
from hf_paged.fused.cpu.stack import StackLayer, layer_sizes
from hf_paged.fused.cpu.walk import Link, Walk
from hf_paged.fused.cpu.weights import LinearLayer, LinearLayers
from hf_paged.integration.attention import attention_forward, in_packed_step, pattern_of_call
from hf_paged.integration.names import CACHE
from hf_paged.kernels.arguments import Attention
from hf_paged.model.overrides import Overrides, Patch, foreign_forward, mark, uncompiled_modules
from hf_paged.model.packed_step import PackedCache
from hf_paged.model.parameters import readable_weight
from hf_paged.model.picture import ClassForwards, differ
from hf_paged.model.state import Slot, state_of
from hf_paged.model.weights import Weights

TRIAL_TOKENS = 8
"""A shorter step does not suffice for the comparison: a token at position 0 is not rotated at all."""

_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")  # some models have them
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")

_NATIVE = attrgetter("native")

_Seen = tuple[list[Any], tuple[int, int], list[Any]]
"""Modules, functions and numbers; the state of the weights; the linear layers' weights (compared by identity)."""

_known: Slot[tuple[weakref.ref[LinearLayers], int, NativeDecoder]] = Slot("native decoder layers")


def native_decoder(model: nn.Module, linears: LinearLayers | None) -> NativeDecoder | None:
    """Overrides for the model's layers, shared by all users of these linear layers. None without linear layers.

    After `weights_changed` they are tried again, because attributes of the modules may have changed too.
    """
    if linears is None:
        # Layers that were known would keep the memory of earlier linear layers.
        _known.take(model)
        return None
    known, reported = _known.get(model), state_of(model).weights.all_moved
    if known is None or known[0]() is not linears or known[1] != reported:
        known = weakref.ref(linears), reported, NativeDecoder(model, linears, state_of(model).weights)
        _known.put(model, known)
    return known[2]


def chain_of(model: nn.Module, count: int) -> list[StackLayer] | None:
    """Return the model's `count` decoder layers as a chain. None unless native kernels computed all in the last packed
    step, each from the unchanged result of the layer before."""
    known = _known.get(model)
    return None if known is None else known[2].chain(count)


class NativeDecoder:
    """Overrides for those decoder layers of a model that consist of known parts.

    A layer is ready while nothing that belongs to it has been replaced or hooked by other code; only ready layers are
    overridden.
    """

    def __init__(self, model: nn.Module, linears: LinearLayers, weights: Weights) -> None:
        layers = (_known_layer(module, linears) for module in uncompiled_modules(model))
        self._layers = [layer for layer in layers if layer is not None]
        self.needs_trial = bool(self._layers)  # until the owner of the calls has run a short step
        self._ready: list[Layer] = []
        self._overrides = Overrides()  # of the ready layers
        self._seen: _Seen | None = None  # the result of `_look` when they were found ready
        self._in_force: list[Any] = []
        places = [place for layer in self._layers for place in layer.places]
        self._tables = [modules for modules, _, _ in places]
        self._names = [name for _, name, _ in places]
        self._children = [vars(child) for _, _, child in places]
        hooks = [hooks for _, _, child in places for hooks in (child._forward_hooks, child._forward_pre_hooks)]
        self._hooks = [*hooks, _module._global_forward_hooks, _module._global_forward_pre_hooks]
        self._weights = weights
        self._linears = [linear for layer in self._layers for linear in layer.linears.values()]
        settings = [each for layer in self._layers for each in layer.settings]
        self._fields = [fields for fields, _, _ in settings]
        self._attributes = [name for _, name, _ in settings]
        self._classes = list(dict.fromkeys(owner for layer in self._layers for owner in layer.classes))
        self._rotary = list({id(layer.namespace): layer.namespace for layer in self._layers}.values())

    def apply(self, user: object) -> None:
        """Until `undo`, native kernels compute the ready layers in packed steps of this thread.

        Call it after the `apply` of the weights and norms, because these are parts of the layers.
        """
        # A hook anywhere may concern any layer, so each layer is asked by itself.
        seen = None if any(self._hooks) else self._look()
        if seen is None or self._seen is None or not _same(seen, self._seen):
            self._choose([layer for layer in self._layers if layer.is_ready()])
            self._seen = seen
        in_force = self._overrides.apply(user)
        if in_force != self._in_force:
            for layer, function in zip(self._ready, in_force, strict=True):
                layer.link.in_force = getattr(function, "__self__", None) is layer
            self._in_force = in_force

    def undo(self, user: object) -> None:
        """Undo `apply`, even if it was interrupted. Idempotent."""
        self._overrides.undo(user)

    def chain(self, count: int) -> list[StackLayer] | None:
        """See `chain_of`."""
        links = sorted((layer.link for layer in self._ready), key=lambda link: link.layer_idx)
        if len(links) != count or any(link.native is None or link.sizes != links[0].sizes for link in links):
            return None
        if [link.next for link in links] != [*links[1:], None]:
            return None
        return [link.native for link in links if link.native is not None]

    def _choose(self, ready: list[Layer]) -> None:
        if ready == self._ready:
            return
        # Forwards of layers that are no longer ready must not stay in place.
        self._overrides.withdraw()
        for layer in self._layers:
            layer.link.in_force = False
        self._in_force = []
        self._overrides = Overrides(Patch(layer.attributes, "forward", layer.forward) for layer in ready)
        self._ready = ready

    def _look(self) -> _Seen:
        """Everything but hooks on which `is_ready` depends; for all layers at once, because every step compares it."""
        parts: list[Any] = list(map(dict.get, self._tables, self._names))
        parts += map(dict.get, self._children, repeat("forward"))
        parts += map(dict.get, self._fields, self._attributes)
        parts += [owner.forward for owner in self._classes]
        parts += map(own_rotary, self._rotary)
        weights = self._weights.layout, self._weights.all_moved
        return parts, weights, list(map(_NATIVE, self._linears))


def _same(seen: _Seen, before: _Seen) -> bool:
    return not differ(seen[:2], before[:2]) and all(map(is_, seen[2], before[2]))


def _known_layer(layer: nn.Module, linear_layers: LinearLayers) -> Layer | None:
    """The layer, if it has exactly the parts that the kernels implement; else None."""
    attention, mlp = layer._modules.get("self_attn"), layer._modules.get("mlp")
    if attention is None or mlp is None:
        return None
    parts: dict[str, Any] = {}
    for parent, names in ((layer, _LAYER), (attention, (*_ATTENTION, *_HEAD_NORMS)), (mlp, _MLP)):
        children = {name: child for name, child in parent._modules.items() if child is not None}
        if not set(names) - set(_HEAD_NORMS) <= set(children) <= set(names):
            return None
        # Parameters of its own would take part in what the module computes.
        if parent._parameters or parent._buffers:
            return None
        parts |= children
    linears: dict[str, Any] = {name: linear_layers.of(part) for name, part in parts.items() if name.endswith("_proj")}
    norms: dict[str, Any] = {name: norm_of(part) for name, part in parts.items() if name.endswith("norm")}
    if None in linears.values() or None in norms.values():
        return None
    kinds = {"layer": layer, "attention": attention, "mlp": mlp, "silu": parts["act_fn"]}
    if not all(is_known_module(part, kind) for kind, part in kinds.items()) or not _sizes_fit(attention, parts, norms):
        return None
    return Layer(layer, parts, linears, norms)


def _sizes_fit(attention: nn.Module, parts: dict[str, Any], norms: dict[str, fused_ops.Norm]) -> bool:
    """Return True if the sizes are as the kernels assume; kernels get only addresses, and cannot check."""
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
        # Kernels take panels of 32 columns and rotate halves of heads in whole vectors.
        and all(size % 32 == 0 for size in (depth, inner, head_dim))
        and heads % head_dim == kv_heads % head_dim == 0
        and all(norm.weight.numel() == (head_dim if name in _HEAD_NORMS else depth) for name, norm in norms.items())
    )


class Layer:
    """One decoder layer and its parts by name. `_verdict`: whether the kernels gave its bits; None before the trial."""

    def __init__(
        self,
        layer: nn.Module,
        parts: dict[str, nn.Module],
        linears: dict[str, LinearLayer],
        norms: dict[str, fused_ops.Norm],
    ) -> None:
        self.attributes = layer.__dict__
        self._layer = layer
        self._attention = parts["self_attn"]
        parents = layer, parts["self_attn"], parts["mlp"]
        self.places = [(p._modules, name, child) for p in parents for name, child in p._modules.items() if child]
        self.linears = linears
        self._norms = norms
        self._norm_modules = {name: parts[name] for name in norms}
        # What the kernels were tried with: epsilons, the factor of the scores, the window, and the like.
        readers = *parents, parts["act_fn"], *self._norm_modules.values()
        self.settings = [setting for module in readers for setting in settings_of(module)]
        self._norm_addresses: dict[str, int] = {}
        self._dtype = norms["input_layernorm"].weight.dtype  # of all weights
        self._norm_sizes = {name: norm.weight.numel() for name, norm in norms.items()}
        self._verdict: bool | None = None
        self._weights: dict[str, fused_ops.LinearWeight] = {}
        self._before: fused_ops.LayerIn
        self._after: fused_ops.LayerOut
        self._options: dict[str, Any] = {}  # arguments of its attention call other than tensors
        self.classes = list(dict.fromkeys([type(layer), *(type(child) for _, _, child in self.places)]))
        self._class_forwards = ClassForwards(self.classes)
        self.namespace: dict[str, Any] = vars(sys.modules[type(self._attention).__module__])
        self._rotary: Any = None  # the modeling module's function, which the kernels implement too
        self.link = Link(self._attention.layer_idx)  # type: ignore[arg-type]

    def is_ready(self) -> bool:
        """Return True if the kernels can replace this layer: no part was replaced or hooked, and each forward, rotary
        function and number is as it was."""
        if self._verdict is False or _module._global_forward_hooks or _module._global_forward_pre_hooks:
            return False
        numbers = [fields.get(name) for fields, name, _ in self.settings]
        # A tensor may be written into, which the comparison of the steps does not see.
        is_tensor = any(isinstance(each, torch.Tensor) for each in numbers)
        if is_tensor or differ(numbers, [value for _, _, value in self.settings]):
            return False
        for modules, name, child in self.places:
            if modules.get(name) is not child or child._forward_hooks or child._forward_pre_hooks:
                return False
            if foreign_forward(child):
                return False
        rotary = own_rotary(self.namespace)
        # The first one found is the one that the trial has seen.
        if self._rotary is None:
            self._rotary = rotary
        if rotary is None or rotary is not self._rotary or self._class_forwards.changed():
            return False
        return self._take_weights()

    def _take_weights(self) -> bool:
        """Read the weights again, which may have been replaced; False if the kernels no longer support them."""
        changed = False
        for name, module in self._norm_modules.items():
            norm, weight = self._norms[name], readable_weight(module)
            if weight is None or weight.dtype != self._dtype or weight.numel() != self._norm_sizes[name]:
                return False
            if not weight.is_contiguous() or weight.device.type != "cpu":
                return False
            # The same parameter may have got other memory.
            if weight is not norm.weight or weight.data_ptr() != self._norm_addresses.get(name):
                self._norms[name] = fused_ops.Norm(weight, norm.eps)
                self._norm_addresses[name] = weight.data_ptr()
                changed = True
        for name, linear in self.linears.items():
            if linear.native is None or linear.native.dtype != self._dtype:
                return False
            changed |= linear.native is not self._weights.get(name)
        if changed:
            self._gather()
        return True

    def _gather(self) -> None:
        weights = {name: linear.native for name, linear in self.linears.items() if linear.native is not None}
        self._weights, norms = weights, self._norms
        self._before = fused_ops.LayerIn(  # type: ignore[call-arg]
            norms["input_layernorm"],
            *(weights[name] for name in ("q_proj", "k_proj", "v_proj")),  # type: ignore[arg-type]
            *(norms.get(name) for name in _HEAD_NORMS),
            self._attention.head_dim,
        )
        self._after = fused_ops.LayerOut(
            weights["o_proj"],
            norms["post_attention_layernorm"],
            *(weights[name] for name in ("gate_proj", "up_proj", "down_proj")),
        )
        self.link.sizes = layer_sizes(self._before, self._after)
        if (native := self.link.native) is not None:
            self.link.native = StackLayer(self._before, native.attention, self._after)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer, by its own forward where the kernels do not support the call."""
        cache = kwargs.get(CACHE)
        # Anything unusual is the model's own: a call by position, another cache, or one outside of a step.
        if args or self._verdict is False or not isinstance(cache, PackedCache) or not in_packed_step():
            return self._plain(hidden_states, *args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            return self._plain(hidden_states, **kwargs)
        walk = Walk.of(cache)
        # What was computed ahead has the input that was expected, and needs no check.
        ahead = walk.take(self.link, hidden_states, kwargs)
        if ahead is not None:
            return ahead
        if not self._fits(hidden_states, kwargs):
            return self._plain(hidden_states, **kwargs)
        self._note_mask(kwargs.get("attention_mask"))
        walk.begin_layer(self.link, hidden_states, kwargs)
        if self._verdict is None:
            result = self._try(hidden_states, kwargs)
        else:
            if len(line := walk.line(self.link, cache)) > 1:
                return walk.run(line, cache, hidden_states)
            result = self._compute(hidden_states, kwargs)
        walk.end_layer(self.link, result)
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
            and all(
                type(x) is torch.Tensor and x.is_cpu and x.dtype == self._dtype and x.is_contiguous()
                for x in (hidden_states, *angles)
            )
        )

    def _compute(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        attention = self._attention
        query, key, value = fused_ops.layer_in(self._before, hidden_states, *kwargs["position_embeddings"])
        key, value = kwargs[CACHE].update(key, value, self.link.layer_idx)
        mask = kwargs.get("attention_mask")
        attended, _ = attention_forward(attention, query, key, value, mask, **self._options)
        return fused_ops.layer_out(self._after, attended.flatten(2), hidden_states)

    def _note_mask(self, mask: Any) -> None:
        """Record the pattern of the layer's mask, for decode steps in which the layer is computed ahead."""
        if self._verdict is True and (self.link.native is None or mask is not self.link.mask):
            options = self._options
            pattern = pattern_of_call(self._attention, mask, options["sliding_window"])
            # Some attentions leave the usual scale to the function that they call.
            scale = self._before.head_dim**-0.5 if options["scaling"] is None else options["scaling"]
            attention = Attention(scale, pattern.bounds, options["softcap"])
            self.link.native = StackLayer(self._before, attention, self._after)
            self.link.mask = mask

    def _try(self, hidden_states: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Compute random rows both ways, if the step is long enough; the step's own rows may all be equal or zero."""
        handles = kwargs[CACHE].handles
        if hidden_states.shape[1] >= TRIAL_TOKENS:
            generator = torch.Generator().manual_seed(self.link.layer_idx)
            rows = torch.randn(hidden_states.shape, generator=generator, dtype=torch.float32, device="cpu")
            rows = rows.to(self._dtype)
            expected = self._plain(rows, **kwargs)
            # Not ready until the comparison has been made, even if it is interrupted.
            self._verdict = False
            if isinstance(expected, torch.Tensor) and handles and handles[-1].layer_idx == self.link.layer_idx:
                self._options = handles[-1].options
                # Attention sinks would be a parameter outside of the known parts.
                if self._options["s_aux"] is None:
                    self._verdict = torch.equal(self._compute(rows, kwargs), expected)
        # Run the layer's own forward last, so that the blocks finally hold the K/V of the step's own rows.
        return self._plain(hidden_states, **kwargs)


mark(Layer.forward)
