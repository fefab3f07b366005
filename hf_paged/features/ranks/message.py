"""One step as plain data: all that a process needs to compute it on its own device (SOSP'23 section 4.6).

With tensor parallelism the driver sends each step to the other ranks, as numbers alone: nothing in it can be run. A
message refers to blocks, never to sequences, requests or tensors of a device.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from hf_paged.cache.block_manager import BlockCopy
from hf_paged.generation.engine.tables import Copies
from hf_paged.kernels.metadata import StepArrays
from hf_paged.model.packed import Forward


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """A step, to be carried out in this order: `swap_out`, `swap_in`, `block_copies`, then the forwards.

    The lists of copies are those of a SchedulerOutput. weights_epoch: increases when the driver has noticed a change of
    its weights.
    """

    swap_out: Copies
    swap_in: Copies
    block_copies: Copies
    forwards: list[Forward]
    weights_epoch: int

    def to_bytes(self) -> bytes:
        """A row of int64 (how many follow; lengths, copies, figures), then arrays, each at a multiple of 8 bytes."""
        numbers = [self.weights_epoch, len(self.forwards)]
        for copies in (self.swap_out, self.swap_in, self.block_copies):
            numbers.append(len(copies))
            numbers += chain.from_iterable(copies)
        data: list[bytes] = []
        for each in self.forwards:
            step = each.step
            numbers += (len(each.tokens), len(step.seq_lens), len(step.block_tables))
            numbers += (table.shape[1] for table in step.block_tables)
            numbers += (_NONE if some is None else len(some) for some in (each.wanted, each.adapters))
            numbers += (getattr(step, name) for name in _FIGURES)
            wanted = () if each.wanted is None else (each.wanted,)
            # In the order in which `_forward` reads them.
            data += (_bytes(array, np.int64) for array in (each.tokens, step.positions, *step.slots, *wanted))
            data += (_bytes(array, np.int32) for array in (step.seq_lens, step.query_start_loc, *step.block_tables))
            data.append(_padded(each.adapters or b""))
        return b"".join((struct.pack(f"={1 + len(numbers)}q", len(numbers), *numbers), *data))

    @classmethod
    def from_bytes(cls, data: bytearray) -> StepMessage:
        """The step of `to_bytes`. Its arrays share the memory of `data`."""
        (count,) = struct.unpack_from("=q", data)
        numbers = iter(struct.unpack_from(f"={count}q", data, _ALIGNMENT))
        epoch, num_forwards = next(numbers), next(numbers)
        swap_out, swap_in, block_copies = (_copies(numbers) for _ in range(3))
        forwards, start = [], _ALIGNMENT * (1 + count)
        for _ in range(num_forwards):
            forward, start = _forward(numbers, data, start)
            forwards.append(forward)
        return cls(swap_out, swap_in, block_copies, forwards, epoch)


# Bytes of the largest elements, at whose multiples all arrays may begin.
_ALIGNMENT = 8
# In place of a length, which is never negative.
_NONE = -1
_ARRAYS = ("positions", "seq_lens", "query_start_loc", "block_tables", "slots", "reach")  # media are for one rank
_FIGURES = [field.name for field in fields(StepArrays) if field.name not in _ARRAYS]


def _bytes(array: np.ndarray, dtype: type) -> bytes:
    return _padded(array.astype(dtype, copy=False).tobytes())


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _copies(numbers: Iterator[int]) -> list[BlockCopy]:
    return [BlockCopy(next(numbers), next(numbers)) for _ in range(next(numbers))]


def _forward(numbers: Iterator[int], data: bytearray, start: int) -> tuple[Forward, int]:
    """A forward whose arrays begin at byte `start`, and where they end."""

    def array(dtype: type, *shape: int) -> np.ndarray:
        nonlocal start
        made: np.ndarray = np.ndarray(shape, dtype, data, start)
        start += -(-made.nbytes // _ALIGNMENT) * _ALIGNMENT
        return made

    # In the order of `to_bytes`.
    num_tokens, num_seqs, groups = next(numbers), next(numbers), next(numbers)
    widths = [next(numbers) for _ in range(groups)]
    num_wanted, num_adapters = next(numbers), next(numbers)
    figures = {name: next(numbers) for name in _FIGURES}
    shares = bool(figures.pop("shares"))
    tokens, positions = array(np.int64, num_tokens), array(np.int64, num_tokens)
    slots = [array(np.int64, num_tokens) for _ in widths]
    wanted = None if num_wanted == _NONE else array(np.int64, num_wanted)
    seq_lens, starts = array(np.int32, num_seqs), array(np.int32, num_seqs + 1)
    tables = [array(np.int32, num_seqs, width) for width in widths]
    adapters = None if num_adapters == _NONE else array(np.uint8, num_adapters).tobytes()
    step = StepArrays(positions, seq_lens, starts, tables, slots, **figures, shares=shares, reach=None)
    return Forward(tokens, step, wanted, adapters), start
