"""Reads checkpoints of torchao's `IntxWeightOnlyConfig` as codes, without the package.

weight = (code - zero) * scale."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hf_paged.fused.cpu.groups import Form, Heads, Kind
from hf_paged.serving.coded_layers import Sorted, Tensors, check_length, common_size, load_layers, plain_ones
from hf_paged.serving.stored_codes import Stored, takes_codes

_PARTS, _ZERO = ("_weight_qdata", "_weight_scale"), "_weight_zero_point"
_READ = "IntxUnpackedToInt8Tensor"
# Bits of a code, by the dtype that torchao names.
_BITS = {f"int{bits}": 4 if bits <= 4 else 8 for bits in range(1, 9)}
# Codes of four bits and no zero are numbers of these values, so that their scales may be in fp32.
_WHOLE = tuple(float(each) for each in range(-8, 8))
# Columns of a weight that are converted together.
_TOGETHER = 512


def load_in_codes(
    checkpoint: str, config: Any, loader: Any, dtype: torch.dtype, source: Mapping[str, Any]
) -> tuple[Any, str] | str:
    """Load the model of a checkpoint of torchao, and say what is in codes; or why its package must load it.

    Raises ValueError for weights of four bits in another layout.
    """
    return load_layers(checkpoint, config, loader, dtype, source, partial(_sorted, dtype))


def _sorted(dtype: torch.dtype, model: Any, tensors: Tensors) -> Sorted | str:
    known = {name: _about(text) for name, text in tensors.metadata.items()}
    coded = {name: about for name, about in known.items() if about is not None}
    if (obstacle := _obstacle(list(coded.values()))) is not None:
        return obstacle
    state: dict[str, torch.Tensor] = {}
    stored, plain, of_codes = {}, 0, set()
    for target, about in coded.items():
        of_codes |= {_prefix(target) + part for part in (*_PARTS, _ZERO)}
        weight = _Weight(target, about["_data"], tensors)
        if not takes_codes(model, target, weight.shape):
            return f"{target} has codes for {weight.shape}, and the model no linear layer of this name and size"
        if (form := weight.form()) is not None:
            stored[target] = Stored(weight.kind, *weight.shape, form, partial(_pieces, target, about, tensors))
        else:
            state[target] = weight.values().to(dtype)
            plain += 1
    state |= {name: tensors.read(name) for name in tensors.names if name not in of_codes}
    return Sorted(state, stored, plain_ones(plain, "their scales are not in fp16, or their groups no multiples of 16"))


def _obstacle(coded: list[Any]) -> str | None:
    """Say why torchao must load weights of which its metadata say this; None if they are read here."""
    layouts = {about["_type"] for about in coded} - {_READ}
    if gpu := [each for each in layouts if each.startswith("Int4")]:
        raise ValueError(
            f"its weights are {gpu[0]} of torchao, which is laid out for GPUs; quantise the model with "
            "IntxWeightOnlyConfig(torch.int4, PerGroup(32)), or give --weights int4 with the plain checkpoint"
        )
    if layouts or not coded:
        return f"torchao computes with its weights ({', '.join(sorted(layouts)) or 'its files do not say how'})"
    # Older versions have another field.
    if any(about["_data"].get("activation_quantization", "unknown") is not None for about in coded):
        return "torchao quantises its activations, or its version says nothing of that"
    return None


def _about(text: str) -> Any:
    """Return what the metadata say of a weight in codes, None of anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("_type") not in (None, "Tensor") else None


def _pieces(target: str, about: Any, tensors: Tensors) -> Iterator[tuple[int, torch.Tensor, Heads]]:
    # Read again: all of them together would be a second copy of the file.
    yield from _Weight(target, about["_data"], tensors).pieces()


def _prefix(target: str) -> str:
    return target.removesuffix("weight")


class _Weight:
    """A weight [columns, depth] of the file."""

    def __init__(self, target: str, about: Any, tensors: Tensors) -> None:
        parts = tensors.parts(_prefix(target), _PARTS, (_ZERO,))
        self._data, self._scale = parts["_weight_qdata"], parts["_weight_scale"].float()
        self._zero = parts.get(_ZERO)
        self._group: int = about["block_size"][-1]
        self.kind: str = f"torchao's {about['target_dtype']['_data']}"
        self._bits = _BITS[about["target_dtype"]["_data"]]
        self._size = common_size(self._group)
        self.shape: tuple[int, int] = (self._data.shape[0], self._data.shape[1])
        for each in (self._scale, self._zeros()):
            check_length(f"{target}'s scale or zero point", each.numel(), self._data.numel() // self._group)

    def form(self) -> Form | None:
        """Return the form of codes that keeps all values; None if there is none."""
        if not self._size:
            return None
        if self._bits == 4 and (self._zero is None or not self._zero.any()):
            return Form(4, self._size, Kind.TABLE, table=_WHOLE)
        return Form(self._bits, self._size, Kind.ZEROS) if self._scale.half().float().equal(self._scale) else None

    def pieces(self) -> Iterator[tuple[int, torch.Tensor, Heads]]:
        """As `Stored` has them."""
        form, middle = self.form(), 2 ** (self._bits - 1)
        has_table = form is not None and bool(form.table)
        # A longer group is several of the kernels' ones.
        scale, zero = (each.repeat_interleave(self._group // self._size, 1) for each in (self._scale, self._zeros()))
        for first in range(0, self.shape[0], _TOGETHER):
            some = slice(first, first + _TOGETHER)
            codes = self._data[some].short() + middle
            # One that is longer would write over its neighbours.
            if codes.numel() and codes.max() >> self._bits | codes.min() >> self._bits:
                raise ValueError(f"it has codes beyond {self._bits} bits; fetch the checkpoint again")
            heads = Heads(scale[some]) if has_table else Heads(scale[some].half(), zero[some].half() + middle)
            yield first, codes.to(torch.uint8), heads

    def values(self) -> torch.Tensor:
        """Return the weight: fp32 [columns, depth]."""
        scale, zero = (each.repeat_interleave(self._group, 1) for each in (self._scale, self._zeros()))
        return (self._data - zero) * scale

    def _zeros(self) -> torch.Tensor:
        return torch.zeros_like(self._scale) if self._zero is None else self._zero.float()
