"""Reads checkpoints in the formats of GPTQ and AWQ as codes, without their packages: weight = (code - zero) * scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_paged.fused.cpu.groups import SIZES, Form, Heads, Kind
from hf_paged.serving.coded_layers import Sorted, Tensors, load_layers, plain_ones
from hf_paged.serving.stored_codes import Stored, takes_codes

_PARTS, _INDEX = ("qweight", "qzeros", "scales"), "g_idx"  # tensors of a layer
# Columns of a weight that are unpacked together.
_TOGETHER = 512
# Where AWQ keeps the columns of eight in 32 bits.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class _Format(NamedTuple):
    """A quantization_config says this. group: elements, 0 for the whole depth. added: to each code of zero."""

    method: str
    bits: int
    group: int
    added: int

    @property
    def size(self) -> int:
        return self.group if self.group in SIZES else SIZES[-1]


def _format(fields: Mapping[str, Any]) -> _Format:
    """Raises ValueError for what is not read."""
    method, bits, group = fields["quant_method"], fields.get("bits", 4), fields.get("group_size", 128)
    kind = fields.get("version" if method == "awq" else "checkpoint_format") or fields.get("format")
    known = (None, "gemm") if method == "awq" else (None, "gptq", "gptq_v2")
    remedy = "save the dequantised model with the package that made it"
    if bits not in ((4,) if method == "awq" else (4, 8)) or str(kind or known[1]).lower() not in known:
        raise ValueError(f"{method} with bits={bits} and format {kind} is not read; {remedy}")
    if group != -1 and group not in SIZES and group % SIZES[-1]:
        raise ValueError(f"{method} with group_size={group} is not read, only 32, 64 and multiples of 128; {remedy}")
    return _Format(method, bits, max(group, 0), int(method == "gptq" and kind != "gptq_v2"))


def load_in_codes(
    checkpoint: str, config: Any, loader: Any, dtype: torch.dtype, source: Mapping[str, Any]
) -> tuple[Any, str] | str:
    """Load the model of a checkpoint in one of these formats, and say what is in codes.

    Raises ValueError for other variants, and for weights that the model does not have.
    """
    fields = config.quantization_config
    of = _format(fields if isinstance(fields, dict) else fields.to_dict())
    return load_layers(checkpoint, config, loader, dtype, source, partial(_sorted, of, dtype))


def _sorted(of: _Format, dtype: torch.dtype, model: Any, tensors: Tensors) -> Sorted:
    state, stored, plain = {}, {}, 0
    for name in tensors.names:
        owner, _, last = name.rpartition(".")
        target = f"{owner}.weight"
        if last not in (*_PARTS, _INDEX):
            state[name] = tensors.read(name)
        if last != "qweight":
            continue
        weight = _Weight.read(of, owner, tensors)
        if not takes_codes(model, target, weight.shape):
            raise ValueError(f"{owner} has codes for {weight.shape}, and the model no linear layer of this size")
        if weight.is_exact():
            stored[target] = Stored(of.method, *weight.shape, weight.form, partial(_pieces, of, owner, tensors))
        else:
            state[target] = weight.values().to(dtype)
            plain += 1
    return Sorted(state, stored, plain_ones(plain, "their groups are out of order or their scales not in fp16"))


def _pieces(of: _Format, owner: str, tensors: Tensors) -> Iterator[tuple[int, torch.Tensor, Heads]]:
    # Read again: all of them together would be a second copy of the file.
    yield from _Weight.read(of, owner, tensors).pieces()


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes of 32-bit words, from the low bits on: int32 [...] -> uint8 [..., 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device="cpu")
    codes: torch.Tensor = words[..., None] >> shifts & 2**bits - 1
    return codes.to(torch.uint8)


class _Weight:
    """A weight [columns, depth] of the file."""

    def __init__(self, of: _Format, parts: Mapping[str, torch.Tensor]) -> None:
        self._of, self._words, self._scales = of, parts["qweight"], parts["scales"]
        self._zero_words, self._index = parts["qzeros"], parts.get(_INDEX)
        per_word = 32 // of.bits
        rows, columns = self._words.shape
        self.shape = (columns * per_word, rows) if of.method == "awq" else (columns, rows * per_word)
        self.form = Form(of.bits, of.size, Kind.ZEROS)

    @classmethod
    def read(cls, of: _Format, owner: str, tensors: Tensors) -> _Weight:
        """Read the weight of this layer."""
        return cls(of, tensors.parts(f"{owner}.", _PARTS, (_INDEX,)))

    def is_exact(self) -> bool:
        """Return True if the codes can be kept: groups are in the order of the depth, scales in fp16."""
        in_order = self._index is None or self._index.equal(self._groups(self.shape[1], self._of.group).int())
        return in_order and self._scales.half().to(self._scales.dtype).equal(self._scales)

    def pieces(self) -> Iterator[tuple[int, torch.Tensor, Heads]]:
        """As `Stored` has them."""
        size = self._of.size
        # A longer group is several of the kernels' ones.
        own = self._groups(-(-self.shape[1] // size), self._of.group // size)
        for first in range(0, self.shape[0], _TOGETHER):
            some = slice(first, first + _TOGETHER)
            codes = torch.nn.functional.pad(self._codes(some), (0, -self.shape[1] % size))
            yield first, codes, Heads(self._scales[own, some].T.half(), self._zeros()[own, some].T.half())

    def values(self) -> torch.Tensor:
        """Return the weight: fp32 [columns, depth]."""
        index = self._groups(self.shape[1], self._of.group) if self._index is None else self._index.long()
        codes = self._codes(slice(None)).float()
        return (codes - self._zeros()[index].T) * self._scales.float()[index].T

    def _groups(self, count: int, together: int) -> torch.Tensor:
        index = torch.arange(count, dtype=torch.int64, device="cpu")
        return index // together if together else index * 0

    def _zeros(self) -> torch.Tensor:
        codes = _unpacked(self._zero_words, self._of.bits)
        codes = codes[..., _AWQ_ORDER] if self._of.method == "awq" else codes
        return (codes.flatten(1).float() + self._of.added)[:, : self.shape[0]]

    def _codes(self, columns: slice) -> torch.Tensor:
        """uint8 [columns, depth]"""
        if self._of.method == "gptq":
            return _unpacked(self._words[:, columns].T, self._of.bits).flatten(1)
        words = self._words if columns.start is None else self._words[:, columns.start // 8 : columns.stop // 8]
        return _unpacked(words, 4)[..., _AWQ_ORDER].flatten(1).T.contiguous()
