"""Linear layers that read the same rows, computed by one product: their weights lie side by side in memory.

The parameters stay the same objects; each has its part of the memory. So no second copy of a weight is kept, and
changes in place (optimizers, `load_state_dict`, weight syncs) need no care. Each part is a storage of its own, because
accelerate and safetensors take parameters that share a storage for one parameter, and save only the first of them.
Knows modules and tensors; never parts.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_paged.model.overrides import is_unhooked
from hf_paged.model.parameters import readable, uses_of_memory

# Bytes, of every part, because kernels load as many at once.
ALIGNMENT = 16

_linear_forward = nn.Linear.forward


def is_linear(module: nn.Module | None) -> bool:
    """Return True if calling the module would run nn.Linear's own forward and nothing else."""
    return type(module) is nn.Linear and nn.Linear.forward is _linear_forward and is_unhooked(module)


class Product(NamedTuple):
    """rows @ matrix + bias. matrix [in, out], bias [out] or None."""

    matrix: torch.Tensor
    bias: torch.Tensor | None


_conv_forward = Conv1D.forward


def product_of(module: nn.Module | None) -> Product | None:
    """Return the product of a linear layer or Conv1D of transformers; None if calling it would run anything else."""
    is_conv = type(module) is Conv1D and Conv1D.forward is _conv_forward and is_unhooked(module)
    if module is None or not (is_conv or is_linear(module)):
        return None
    weight, bias = readable(module, "weight", "bias") or (None, None)
    if weight is None:
        return None
    if bias is not None and bias.dtype != weight.dtype:
        return None
    return Product(weight if is_conv else weight.t(), bias)


class _One(NamedTuple):
    """Layers that one product computes. sizes: of their results. joined: the weight of all, and the bias if they have
    one; neither keeps the memory alive."""

    sizes: list[int]
    joined: list[torch.Tensor]


class LinearGroup:
    """Linear layers of one module, by name, that are called with the same rows.

    One product computes them if `look` has found their weights side by side, else each is called as a module.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.names = list(names)
        self._module = weakref.ref(module)  # it must not keep weights of a module that is replaced
        self._one: _One | None = None  # set at once: another thread may compute

    @property
    def _children(self) -> dict[str, Any]:
        module = self._module()
        return {} if module is None else module._modules

    @property
    def is_one(self) -> bool:
        return self._one is not None

    def look(self) -> None:
        """Find out whether one product computes the layers. To be called when a layer or weight may have changed."""
        columns = _columns(self._layers())
        pairs = [pair for column in columns for pair in itertools.pairwise(column)]
        are_one = bool(columns) and all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairs)
        self._one = _One(list(map(len, columns[0])), list(map(_spanning, columns))) if are_one else None

    def __call__(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """rows [..., size] -> the layers' results [..., size of each], which may be views of one tensor."""
        one = self._one
        if one is None:
            children = self._children
            return [children[name](rows) for name in self.names]
        results = functional.linear(rows, *one.joined)
        return list(results.split_with_sizes(one.sizes, -1))  # `split` takes Python's way there

    def pack(self) -> bool:
        """Place the weights side by side; returns whether they are now, or were already.

        They are left where they are if the layers are not plain ones of one dtype and device, or if other code uses
        the memory of a weight: another module, a buffer, a tensor that a program keeps. Takes the memory of these
        weights until those before are freed. Raises torch.OutOfMemoryError if there is none.
        """
        self.look()
        columns = _columns(self._layers())
        if self.is_one or not columns or not all(map(_may_move, columns)):
            return self.is_one
        # Made in inference mode, as the caller may be, parameters could not be trained any more.
        with torch.inference_mode(False), torch.no_grad():
            for parameters in columns:
                joined = torch.cat([parameter.detach() for parameter in parameters])
                for parameter, part in zip(parameters, joined.split([len(parameter) for parameter in parameters])):
                    # Each part is a storage of its own here, which keeps `joined` alive.
                    parameter.data = torch.utils.dlpack.from_dlpack(part)
        self.look()
        return self.is_one

    def _layers(self) -> list[nn.Linear]:
        """The layers if all are plain ones; else none."""
        layers: list[Any] = [self._children.get(name) for name in self.names]
        return layers if all(map(is_linear, layers)) else []


def _columns(layers: list[nn.Linear]) -> list[list[nn.Parameter]]:
    """Return the layers' weights, and their biases if all have some; nothing if a single layer could not have all."""
    own: list[Any] = [readable(layer, "weight", "bias") or (None, None) for layer in layers]
    weights, biases = columns = [[each[0] for each in own], [each[1] for each in own]]
    if len(layers) < 2 or (any(bias is None for bias in biases) and any(bias is not None for bias in biases)):
        return []
    if biases[0] is None:
        columns = [weights]
    every = [parameter for column in columns for parameter in column]
    plain = all(p is not None and p.is_contiguous() and not p.is_inference() for p in every)
    if not plain or len({(p.dtype, p.device) for p in every}) > 1 or len({w.shape[1:] for w in weights}) > 1:
        return []
    is_like = biases[0] is None or all(bias.shape == weight.shape[:1] for bias, weight in zip(biases, weights))
    return columns if is_like and weights[0].dim() == 2 else []


def _spanning(parameters: list[nn.Parameter]) -> torch.Tensor:
    """View neighbouring parameters as one tensor, which does not keep their memory alive."""
    first, num_bytes = parameters[0], sum(parameter.nbytes for parameter in parameters)
    # A storage without an owner, so that weights that are replaced can be freed.
    storage = torch._C._construct_storage_from_data_pointer(first.data_ptr(), first.device, num_bytes)
    shape = sum(map(len, parameters)), *first.shape[1:]
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=first.dtype, device=first.device)
        return empty.set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _may_move(parameters: list[nn.Parameter]) -> bool:
    """Return True if nothing else uses the parameters' memory, and joined parts would be aligned."""
    # The parameters themselves may share memory, which is no use by others.
    own = {_memory_of(parameter): 0 for parameter in parameters}
    for parameter in parameters:
        own[_memory_of(parameter)] += 1
    return (
        len(set(map(id, parameters))) == len(parameters)
        and all(parameter.nbytes % ALIGNMENT == 0 for parameter in parameters[:-1])
        and all(uses_of_memory(parameter) == own[_memory_of(parameter)] for parameter in parameters)
    )
