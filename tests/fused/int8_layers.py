"""Models with int8 weights, by torchao and optimum-quanto or by stand-ins that compute what these packages do."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_paged.fused.cpu.int8 import as_int8


class Int8Tensor(torch.Tensor):
    """As torchao's."""

    act_quant_kwargs = act_pre_scale = None
    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Int8Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)

    def __init__(self, qdata: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.qdata, self.scale, self.block_size = qdata, scale, [1, qdata.shape[1]]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].qdata, args[0].scale, args[0].dtype)
        raise NotImplementedError(func)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        rows, weight, bias = (*args, None)[:3]
        found = (rows @ weight.qdata.to(rows.dtype).T) * weight.scale.to(rows.dtype).flatten()
        return found if bias is None else found + bias


class WeightQBytesTensor(Int8Tensor):
    """As optimum-quanto's."""

    axis, activation_qtype = 0, None

    @property
    def _data(self) -> torch.Tensor:
        return self.qdata

    @property
    def _scale(self) -> torch.Tensor:
        return self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        rows, weight, bias = (*args, None)[:3]
        found = (rows.float() @ weight.qdata.float().T * weight.scale.float().flatten()).to(rows.dtype)
        return found if bias is None else found + bias


class QLinear(nn.Linear):
    activation_qtype = None


def _stand_in(monkeypatch: pytest.MonkeyPatch, package: str, **classes: type) -> None:
    module = types.ModuleType(package)
    vars(module).update(classes)
    monkeypatch.setitem(sys.modules, package, module)


def torchao(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if _is_installed("torchao"):
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
        return
    _stand_in(monkeypatch, "torchao.quantization", Int8Tensor=Int8Tensor)
    quantise(model, Int8Tensor)


def quanto(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if _is_installed("optimum.quanto"):
        from optimum.quanto import freeze, qint8, quantize

        quantize(model, weights=qint8)
        freeze(model)
        return
    _stand_in(monkeypatch, "optimum.quanto", QLinear=QLinear, WeightQBytesTensor=WeightQBytesTensor)
    for layer in quantise(model, WeightQBytesTensor):
        layer.__class__ = QLinear


def _linears(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module) is nn.Linear]


def quantise(model: Any, kind: type[Int8Tensor]) -> list[Any]:
    """Give all linear layers, which are returned, weights of this kind."""
    for layer in (layers := _linears(model)):
        found, dtype = as_int8(layer.weight), layer.weight.dtype
        layer.weight = nn.Parameter(kind(found.data, found.scale.to(dtype), dtype), requires_grad=False)
    return layers


def _is_installed(package: str) -> bool:
    top = package.partition(".")[0]
    return importlib.util.find_spec(top) is not None and importlib.util.find_spec(package) is not None


PACKAGES: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {"torchao": torchao, "quanto": quanto}


def inner(weight: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 elements of a weight and its scales."""
    return (weight.qdata, weight.scale) if hasattr(weight, "qdata") else (weight._data, weight._scale)


def dequantised(model: Any) -> None:
    """Put in each linear layer's weight what `prepack(model, dtype="int8")` computes with."""
    for layer in _linears(model):
        found = as_int8(layer.weight)
        layer.weight = nn.Parameter((found.data.float() * found.scale).to(layer.weight.dtype), requires_grad=False)
