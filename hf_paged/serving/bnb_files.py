"""Reads checkpoints in nf4 and fp4, the 4-bit formats of bitsandbytes, as codes, without the package.

weight = table[code] * scale, with a scale for each block of the weight's elements. bitsandbytes rounds it to the dtype
from which the checkpoint was made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hf_paged.fused.cpu.groups import Form, Heads, Kind
from hf_paged.serving.coded_layers import Sorted, Tensors, check_length, common_size, load_layers, plain_ones
from hf_paged.serving.stored_codes import Stored, takes_codes

# What marks a weight in codes, and is followed by the name of its format.
_MARK = ".quant_state.bitsandbytes__"
_PARTS, _NESTED = ("", ".absmax", ".quant_map"), (".nested_absmax", ".nested_quant_map")
# Columns of a weight that are unpacked together.
_TOGETHER = 512


def load_in_codes(
    checkpoint: str, config: Any, loader: Any, dtype: torch.dtype, source: Mapping[str, Any]
) -> tuple[Any, str] | str:
    """Load the model of a checkpoint of bitsandbytes, and say what is in codes; or why its package must load it."""
    fields = config.quantization_config
    fields = fields if isinstance(fields, dict) else fields.to_dict()
    if not fields.get("load_in_4bit"):
        return "bitsandbytes computes with its weights in 8 bits"
    return load_layers(checkpoint, config, loader, dtype, source, partial(_sorted, dtype))


def _sorted(dtype: torch.dtype, model: Any, tensors: Tensors) -> Sorted | str:
    state: dict[str, torch.Tensor] = {}
    stored, plain = {}, 0
    coded = {name.partition(_MARK)[0]: name for name in tensors.names if _MARK in name}
    of_codes = {owner + part for owner in coded for part in _PARTS + _NESTED}
    for target, name in coded.items():
        weight = _Weight(target, name, tensors)
        if not takes_codes(model, target, weight.shape):
            return f"{target} has codes for {weight.shape}, and the model no linear layer of this name and size"
        if weight.size:
            form = Form(4, weight.size, Kind.TABLE, table=weight.table)
            stored[target] = Stored(weight.kind, *weight.shape, form, partial(_pieces, target, name, tensors))
        else:
            state[target] = weight.values().to(dtype)
            plain += 1
    state |= {name: tensors.read(name) for name in tensors.names if name not in of_codes and _MARK not in name}
    return Sorted(state, stored, plain_ones(plain, "their rows have no whole groups of 16 elements in one block"))


def _pieces(target: str, name: str, tensors: Tensors) -> Iterator[tuple[int, torch.Tensor, Heads]]:
    # Read again: all of them together would be a second copy of the file.
    yield from _Weight(target, name, tensors).pieces()


class _Weight:
    """A weight [columns, depth] of the file. size: of the groups that lie within one row and one block, 0 if there are
    none: blocks follow one another through all rows."""

    def __init__(self, target: str, name: str, tensors: Tensors) -> None:
        self.kind = name.partition(_MARK)[2]
        about = json.loads(bytes(tensors.read(name).tolist()))
        parts = tensors.parts(target, _PARTS, _NESTED)
        self.shape: tuple[int, int] = tuple(about["shape"])
        self.table: tuple[float, ...] = tuple(parts[".quant_map"].tolist())
        self._block: int = about["blocksize"]
        self.size = common_size(self._block, self.shape[1])
        # Bytes, in whatever dtype they were kept.
        self._bytes = parts[""].flatten().view(torch.uint8)
        self._scales = parts[".absmax"]
        count = math.prod(self.shape)
        check_length(target, 2 * len(self._bytes), count)
        check_length(f"{target}.absmax", len(self._scales), -(-count // self._block))
        check_length(f"{target}.quant_map", len(self.table), 16)
        if ".nested_absmax" in parts:
            outer = parts[".nested_absmax"].repeat_interleave(about["nested_blocksize"])[: len(self._scales)]
            # In the order of bitsandbytes, whose scales have the same bits.
            self._scales = parts[".nested_quant_map"][self._scales.int()] * outer + about["nested_offset"]

    def pieces(self) -> Iterator[tuple[int, torch.Tensor, Heads]]:
        """As `Stored` has them."""
        columns, depth = self.shape
        scales = self._scales.float().repeat_interleave(self._block // self.size)[: columns * depth // self.size]
        scales = scales.unflatten(0, (columns, -1))
        for first in range(0, columns, _TOGETHER):
            some = slice(first * depth // 2, (first + _TOGETHER) * depth // 2)
            yield first, self._codes(some).unflatten(0, (-1, depth)), Heads(scales[first : first + _TOGETHER])

    def values(self) -> torch.Tensor:
        """Return the weight: fp32 [columns, depth]."""
        count = self.shape[0] * self.shape[1]
        scales = self._scales.float().repeat_interleave(self._block)[:count]
        known = torch.tensor(self.table, dtype=torch.float32, device="cpu")
        return (known[self._codes(slice(None))[:count].int()] * scales).view(self.shape)

    def _codes(self, some: slice) -> torch.Tensor:
        """uint8 [elements]: of two, the first is in the high bits."""
        packed = self._bytes[some]
        return torch.stack([packed >> 4, packed & 15], -1).flatten()
