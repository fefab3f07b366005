"""Weights that are computed or of tensor classes of their own, and each way to put them where addresses are read."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

Change = Callable[[Any], object]


class Sealed(torch.Tensor):
    """A weight without memory of its own, over another tensor, which it scales. No one else knows what it wraps."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Sealed:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        value = lambda x: x.inner * -1.5 if isinstance(x, Sealed) else x  # noqa: E731
        return func(*torch.utils._pytree.tree_map(value, args), **torch.utils._pytree.tree_map(value, kwargs or {}))


class Wrapped(Sealed):
    """The same, as torchao and DTensor keep a weight."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


class Opposite(torch.Tensor):
    """A tensor with memory of its own, whose class decides what its functions compute: each gets another value."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in (nn.functional.linear, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__):
                args = [x.as_subclass(torch.Tensor) * -1.5 if isinstance(x, Opposite) else x for x in args]
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func is torch.Tensor.detach else result


class Tagged(torch.Tensor):
    """A tensor with memory of its own, whose results are of its class too, as torch has it by default."""


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * -1.5


def linears(model: Any) -> list[Any]:
    """In both layers, one inside attention and one of the MLP."""
    return [layer for each in model.model.layers for layer in (each.self_attn.v_proj, each.mlp.down_proj)]


def norms(model: Any) -> list[Any]:
    return [model.model.norm, *(each.post_attention_layernorm for each in model.model.layers)]


PLACES = {"linears": linears, "norms": norms}


def replace(module: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.weight = nn.Parameter(make(module.weight.detach().clone()), requires_grad=False)


def pruned(module: Any) -> None:
    prune.random_unstructured(module, "weight", amount=max(1, module.weight.numel() // 3))


def shadowed(module: Any) -> None:
    """The parameter stays, but the module reads a plain attribute."""
    vars(module)["weight"] = module.weight.detach() * -1.5


def by_property(module: Any) -> None:
    own = module._parameters["weight"]
    module.__class__ = type("Own", (type(module),), {"weight": property(lambda self: own.detach() * -1.5)})


def as_attribute(module: Any) -> None:
    weight = module.weight.detach() * -1.5
    del module.weight
    module.weight = weight


def by_pre_hook(module: Any) -> None:
    """As `torch.nn.utils.weight_norm` once did for all modules."""
    own = module.weight.detach()
    del module.weight
    module.own_weight = nn.Parameter(own, requires_grad=False)
    module.register_forward_pre_hook(lambda module, args: setattr(module, "weight", module.own_weight * -1.5))
    module.weight = own


def flipped_parametrization(module: Any) -> None:
    parametrize.register_parametrization(module, "weight", Scaled())


def weight_norm(module: Any) -> None:
    parametrizations.weight_norm(module)
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(-1.5)


def old_weight_norm(module: Any) -> None:
    nn.utils.weight_norm(module)
    with torch.no_grad():
        module.weight_g.mul_(-1.5)


# By what is done to one module; those of the second kind are for matrices alone.
TYPES: dict[str, Change] = {
    "wrapped": lambda module: replace(module, Wrapped),
    "sealed": lambda module: replace(module, Sealed),
    "opposite": lambda module: replace(module, lambda x: x.as_subclass(Opposite)),
    "tagged": lambda module: replace(module, lambda x: (x * -1.5).as_subclass(Tagged)),
}
COMPUTED: dict[str, Change] = {
    "pruned": pruned, "parametrized": flipped_parametrization, "shadowed": shadowed, "property": by_property,
    "attribute": as_attribute, "pre-hook": by_pre_hook,
}  # fmt: skip
OF_MATRICES: dict[str, Change] = {
    "weight_norm": weight_norm, "old weight_norm": old_weight_norm, "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}  # fmt: skip


def quantized(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def everywhere(change: Change, places: Callable[[Any], list[Any]]) -> Change:
    def apply(model: Any) -> None:
        for module in places(model):
            change(module)

    return apply


CHANGES: dict[str, Change] = {
    f"{name} {place}": everywhere(change, PLACES[place])
    for place in PLACES
    for name, change in {**TYPES, **COMPUTED, **(OF_MATRICES if place == "linears" else {})}.items()
}
if importlib.util.find_spec("torchao") is not None:
    CHANGES["torchao"] = quantized


def everything(model: Any) -> None:
    for module in model.modules():
        for name, own in module._parameters.items():
            if own is not None:
                module._parameters[name] = nn.Parameter((own.detach() * 1.3).as_subclass(Tagged), requires_grad=False)


def wrap_bias(module: Any) -> None:
    module.bias = nn.Parameter(Wrapped(module.bias.detach().clone()), requires_grad=False)


def wrap_frequencies(model: Any) -> None:
    rotary = model.model.rotary_emb
    for name, buffer in list(rotary._buffers.items()):
        rotary._buffers[name] = Sealed(buffer.clone())


def experts(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers]


def wrap_experts(module: Any) -> None:
    module.down_proj = nn.Parameter(Sealed(module.down_proj.detach().clone()), requires_grad=False)


OTHERS: dict[str, Change] = {
    "every parameter tagged": everything,
    "wrapped embeddings": lambda model: replace(model.model.embed_tokens, Wrapped),
    "wrapped head": lambda model: replace(model.lm_head, Sealed),
    "wrapped frequencies": wrap_frequencies,
    "wrapped biases": everywhere(wrap_bias, lambda model: [layer.self_attn.q_proj for layer in model.model.layers]),
    "wrapped experts": everywhere(wrap_experts, experts),
    "pruned experts": everywhere(lambda each: prune.random_unstructured(each, "down_proj", amount=2000), experts),
}


def removed(module: Any) -> None:
    """Make computed weights parameters again, by torch's own functions."""
    if prune.is_pruned(module):
        prune.remove(module, "weight")
    elif parametrize.is_parametrized(module):
        parametrize.remove_parametrizations(module, "weight")
    else:
        nn.utils.remove_weight_norm(module)


REMOVABLE: dict[str, Change] = {
    "pruned": pruned, "parametrized": flipped_parametrization, "old weight_norm": old_weight_norm,
}  # fmt: skip
