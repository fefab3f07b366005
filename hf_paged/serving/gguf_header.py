"""Reads what a GGUF file says of its tensors, from the file's own memory: vocabularies are passed over, of which the
package gguf makes objects that take more memory than a small model."""

from __future__ import annotations

import contextlib
import importlib
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Types of values by their numbers in the format, as struct names them.
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIifBQqd", strict=True))
# Other types by their numbers.
_STRING, _ARRAY = 8, 9


@contextlib.contextmanager
def small_objects() -> Iterator[None]:
    """Let the package gguf read files meanwhile with half of its time and memory: it makes some objects of each token
    of a vocabulary, here arrays in place of memory maps."""
    package: Any = importlib.import_module("gguf")
    known = package.GGUFReader

    def keep(reader: Any, mapped: Any) -> None:
        # Whatever is cut out of an array of numpy's own class is one too.
        vars(reader)["_data"] = np.asarray(mapped)

    data = property(lambda reader: vars(reader)["_data"], keep)
    package.GGUFReader = type("GGUFReader", (known,), {"data": data})
    try:
        yield
    finally:
        package.GGUFReader = known


class Tensor(NamedTuple):
    """A tensor of the file. shape: as torch has it. kind: gguf's name of its type. offset, row: where its bytes begin,
    and how many a row has."""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    row: int


class Header:
    """The architecture and the tensors of a file in version 2 or 3, which stays mapped.

    Raises ValueError for other files, and for one that is cut off.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if (begins := file.read(4)) != b"GGUF":  # an empty file cannot be mapped
                raise ValueError(f"it is no GGUF file: it begins with {begins!r}, not b'GGUF'; give another file")
            self._memory, self._at = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), 4
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"it is a GGUF file of version {version}, not 2 or 3; convert the checkpoint again")
        count, fields = self._number("Q"), self._number("Q")
        known = {self._text(): self._value(self._number("I")) for _ in range(fields)}
        self.architecture = str(known["general.architecture"])
        found = [self._tensor() for _ in range(count)]
        start = self._at + -self._at % (known.get("general.alignment") or 32)
        self.tensors = [each._replace(offset=each.offset + start) for each in found]
        ends = [each.offset + math.prod(each.shape[:-1]) * each.row for each in self.tensors]
        self._check_end(max(ends, default=0), "")

    def rows(self, tensor: Tensor) -> Any:
        """Return the bytes of a tensor, without a copy: uint8 [*shape but the last, row]."""
        shape = (*tensor.shape[:-1], tensor.row)
        return np.frombuffer(self._memory, np.uint8, math.prod(shape), tensor.offset).reshape(shape)

    def forget(self) -> None:
        """Give back the memory of what has been read, which counts as the process's as long as it is mapped."""
        self._memory.madvise(mmap.MADV_DONTNEED)

    def _check_end(self, end: int, least: str) -> None:
        """Raise ValueError if the file has fewer bytes. least: "at least " as long as more may follow."""
        if (missing := end - len(self._memory)) > 0:
            raise ValueError(f"the file is cut off: {least}{missing} of {least}{end} bytes are missing; fetch it again")

    def _number(self, kind: str) -> Any:
        begin, self._at = self._at, self._at + struct.calcsize(kind)
        self._check_end(self._at, "at least ")
        (found,) = struct.unpack_from(f"<{kind}", self._memory, begin)
        return found

    def _text(self) -> str:
        size = self._number("Q")
        self._at += size
        return self._memory[self._at - size : self._at].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        """A value, None for an array, which is passed over."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        inner, count = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            self._at += count * struct.calcsize(_NUMBERS[inner])
        else:
            for _ in range(count):
                self._value(inner)
        return None

    def _tensor(self) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, rank = self._text(), self._number("I")
        shape = tuple(self._number("Q") for _ in range(rank))[::-1]
        kind = GGMLQuantizationType(self._number("I"))
        elements, num_bytes = GGML_QUANT_SIZES[kind]
        return Tensor(name, shape, kind.name, self._number("Q"), shape[-1] // elements * num_bytes)
