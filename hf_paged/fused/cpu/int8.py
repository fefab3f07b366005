"""Weights in int8: made by other packages for linear layers, or here on request from other dtypes.

A layer of torchao's weight-only int8 (`Int8WeightOnlyConfig`) multiplies the rows by the int8 weight, rounds the sums
to the dtype of the rows, multiplies them by the scales, rounded to it too, and adds the bias. One of optimum-quanto
(`qint8`) rounds after it has multiplied. The kernels compute the same, but for the order of the sums.

Neither package is imported here: a model has such a layer only if its package has been imported.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.kernels.buffers import has_memory
from hf_paged.model.parameters import is_parameter

# Without -128 there are as many steps on each side of zero.
_LARGEST = 127


class Int8Weight(NamedTuple):
    """data: int8 [columns, depth], contiguous. scale: one for each column, or one for all. dtype: of the rows and the
    results. rounds: whether the scales are rounded to it, and the sums before they are multiplied."""

    data: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    rounds: bool

    def scales(self) -> torch.Tensor:
        """Return the factors of the sums, as the kernels need them: fp32 [columns]."""
        scale = self.scale.detach()
        scale = scale.to(self.dtype).float() if self.rounds else scale.float()
        return scale.reshape(-1).expand(len(self.data)).contiguous()


def int8_weight(layer: nn.Module) -> Int8Weight | None:
    """The int8 weight of a linear layer, None if it has none that the kernels can compute with."""
    weight: Any = layer._parameters.get("weight")
    if weight is None or type(weight) is nn.Parameter or not is_parameter(layer, "weight"):
        return None
    types, found = (type(layer), type(weight)), None
    if types == (nn.Linear, _loaded("torchao.quantization", "Int8Tensor")):
        found = _of_torchao(weight)
    elif types == (_loaded("optimum.quanto", "QLinear"), _loaded("optimum.quanto", "WeightQBytesTensor")):
        found = _of_quanto(layer, weight)
    return found if found is not None and _is_usable(found, weight.shape) else None


def _of_torchao(weight: Any) -> Int8Weight | None:
    # Its forward looks at nothing else if only the weight is quantised; not at `zero_point` either.
    if weight.act_quant_kwargs is not None or weight.act_pre_scale is not None:
        return None
    # Groups of a column have scales of their own, the kernels one for each column.
    if weight.block_size[-1] != weight.shape[-1]:
        return None
    return Int8Weight(weight.qdata, weight.scale, weight.dtype, rounds=True)


def _of_quanto(layer: Any, weight: Any) -> Int8Weight | None:
    if layer.activation_qtype is not None or weight.activation_qtype is not None or weight.axis != 0:
        return None
    # In other cases it multiplies the weight by the scales first, and rounds the products to 16 bits.
    if weight.dtype != torch.float32 and (weight.dtype != torch.bfloat16 or weight.shape[1] % 4):
        return None
    return Int8Weight(weight._data, weight._scale, weight.dtype, rounds=False)


def _is_usable(found: Int8Weight, shape: torch.Size) -> bool:
    data, scale = found.data, found.scale
    return (
        has_memory(data)
        and has_memory(scale)
        and data.dtype == torch.int8
        and data.is_cpu
        and data.is_contiguous()
        and not data.is_inference()  # changes could not be noticed
        and len(shape) == 2
        and data.shape == shape
        and scale.is_cpu
        and scale.numel() in (1, shape[0])
    )


def as_int8(weight: torch.Tensor) -> Int8Weight:
    """A weight [columns, depth] of another dtype, rounded to 127 steps on each side of zero; the largest magnitude of
    each column is one of them."""
    wide = weight.detach().float()
    scale = wide.abs().amax(1, keepdim=True) / _LARGEST
    # A column of zeros must not be divided by zero.
    scale = torch.where(scale > 0, scale, 1.0)
    data = (wide / scale).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return Int8Weight(data, scale, weight.dtype, rounds=False)


def _loaded(module: str, name: str) -> Any:
    """A class of a package, if the package has been imported; else None."""
    return getattr(sys.modules.get(module), name, None)
