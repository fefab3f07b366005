"""Weights of a model that are kept in codes (`groups.py`) and nowhere else: parameters of a class of their own.

Whoever computes with such a parameter gets its values, so that a module's own forward computes with the same numbers as
the kernels. Knows modules and tensors, never steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_paged.fused.cpu.groups import Codes, num_bytes, rounded
from hf_paged.fused.cpu.ops import is_available
from hf_paged.kernels.buffers import HOST, in_large_pages
from hf_paged.model.parameters import readable_weight

_aten = torch.ops.aten
HEAD_BITS = 8
"""Embeddings and heads have so many bits: rounding them to four changes more tokens (docs/quantised.md)."""


class CodedWeight(torch.Tensor):
    """A weight [columns, depth] that is kept in codes. Functions get its values, rounded to its dtype; an embedding
    gets those of its rows only. Nobody can write to it."""

    codes: Codes

    @staticmethod
    def __new__(cls, codes: Codes, dtype: torch.dtype) -> CodedWeight:
        shape = (codes.columns, codes.depth)
        made: CodedWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=HOST)
        return made

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        self.codes = codes

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodedWeight({list(self.shape)}, {self.codes.bits} bits in groups of {self.codes.size}, {self.dtype})"

    @property
    def memory(self) -> torch.Tensor:
        """The memory of the codes, for whoever watches tensors that wrap others."""
        return self.codes.memory

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["memory"], (self.codes[1:], self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], about: tuple[Any, ...], *_: object) -> CodedWeight:
        return CodedWeight(Codes(inner["memory"], *about[0]), about[1])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0]
        if func in (_aten.detach.default, _aten.alias.default):
            return cls(first.codes, first.dtype)
        if func is _aten.clone.default:
            return cls(first.codes._replace(memory=first.memory.clone()), first.dtype)
        device = kwargs.get("device")
        if func is _aten._to_copy.default and (device is None or device.type == "cpu"):
            return cls(first.codes, kwargs.get("dtype") or first.dtype)
        if func is _aten.embedding.default and isinstance(first, cls):
            return first.codes.columns_at(args[1]).to(first.dtype)
        if func._schema.is_mutable and isinstance(first, cls):
            raise RuntimeError(
                f"{func} would write to a weight {list(first.shape)} that is kept in {first.codes.bits} bits; load the "
                "model again to change its weights"
            )
        return func(*pytree.tree_map(_values, args), **pytree.tree_map(_values, kwargs))


def _values(each: Any) -> Any:
    return each.codes.values().to(each.dtype) if isinstance(each, CodedWeight) else each


def coded_weight(layer: nn.Module) -> CodedWeight | None:
    """The layer's weight if it is kept in codes."""
    weight: torch.Tensor | None = layer._parameters.get("weight")
    return weight if isinstance(weight, CodedWeight) else None


def keep_in_codes(model: nn.Module, bits: int, size: int) -> None:
    """Replace the weights of linear layers and of the embedding by codes, one by one, so that each gives its memory
    back before the next one is read.

    Raises ValueError if there is nothing to replace, or for a weight that the kernels do not support; the weights
    before it have been replaced then.
    """
    apart = {id(part) for part in (_embedding(model), _head(model)) if part is not None}
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear or id(layer) in apart]
    layers = [layer for layer in layers if coded_weight(layer) is None]
    if not layers:
        raise ValueError("the model has no linear layers whose weights are not in codes")
    for layer in layers:
        if (reason := _obstacle(layer)) is not None:
            raise ValueError(reason)
    in_bits = {id(weight): bits for weight in _weights(layers)}
    in_bits |= {id(weight): HEAD_BITS for weight in _weights([layer for layer in layers if id(layer) in apart])}
    sizes = {
        id(weight): num_bytes(weight.shape[0], weight.shape[1], in_bits[id(weight)], size)
        for weight in _weights(layers)
    }
    parts = dict(zip(sizes, in_large_pages(sum(sizes.values())).split(list(sizes.values())), strict=True))
    holders: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        holders.setdefault(id(module._parameters.get("weight")), []).append(module)
    for layer in layers:
        # Tied weights have become codes with the first of their layers.
        if coded_weight(layer) is None:
            (weight,) = _weights([layer])
            codes = rounded(weight, in_bits[id(weight)], size, parts[id(weight)])
            own = nn.Parameter(CodedWeight(codes, weight.dtype), requires_grad=False)
            for module in holders[id(weight)]:
                module._parameters["weight"] = own
                module.register_state_dict_post_hook(_save_values)
            del weight


def _weights(layers: list[nn.Module]) -> Iterator[nn.Parameter]:
    # One by one, because a list would keep them all.
    return (weight for layer in layers if (weight := layer._parameters["weight"]) is not None)


def _embedding(model: Any) -> nn.Module | None:
    try:
        found: nn.Module | None = model.get_input_embeddings()
    # Models of audio have none.
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None


def _head(model: Any) -> nn.Module | None:
    found: nn.Module | None = model.get_output_embeddings()
    return found if type(found) is nn.Linear else None


def _obstacle(layer: nn.Module) -> str | None:
    weight = readable_weight(layer)
    if weight is None:
        return f"the weight of a {type(layer).__name__} is computed, or of a class of its own"
    if not weight.is_cpu or not is_available(weight.dtype):
        kind = f"{weight.dtype} on {weight.device}"
        return f"there are no native kernels for weights of {kind}; load the model in fp32 or bf16 on a CPU"
    return None


def _save_values(module: nn.Module, found: dict[str, Any], prefix: str, *_: object) -> None:
    """Give whoever saves the model plain values: other programs can load them."""
    if (weight := found.get(key := f"{prefix}weight")) is not None and isinstance(weight, CodedWeight):
        found[key] = _values(weight)
