"""One step as plain data: all that a process needs to compute it on its own device (SOSP'23 section 4.6).

With tensor parallelism the driver sends each plan to the other ranks. A plan refers to blocks, never to sequences,
requests or tensors of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hf_paged.generation.engine.tables import Copies
from hf_paged.kernels.metadata import StepArrays


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """One packed forward.

    tokens int64 [num_tokens]. step: their positions, slots and block tables. wanted int64 [num_rows]: the tokens whose
    logits are wanted; None for all, in a pure decode step. adapters: the description of an `AdapterChoice`, None for a
    model that has never had adapters.
    """

    tokens: np.ndarray
    step: StepArrays
    wanted: np.ndarray | None
    adapters: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all arrays as one buffer: one after another takes four times as long, and the other ranks wait."""
        step = self.step
        arrays = [*(getattr(step, name) for name in _ARRAYS), *step.block_tables, *step.slots, self.tokens]
        if self.wanted is not None:
            arrays.append(self.wanted)
        forms = [(array.dtype.char, array.shape) for array in arrays]
        data = bytearray()
        for array in arrays:
            data += array.tobytes()
            data += bytes(-len(data) % _ALIGNMENT)
        numbers = [getattr(step, name) for name in _NUMBERS]
        return _forward, (forms, data, len(step.block_tables), numbers, self.adapters)


_ALIGNMENT = 8  # bytes, of the largest elements
_ARRAYS = ("positions", "seq_lens", "query_start_loc")
_NUMBERS = [field.name for field in fields(StepArrays) if field.name not in (*_ARRAYS, "block_tables", "slots")]


def _forward(
    forms: list[tuple[str, tuple[int, ...]]], data: bytearray, groups: int, numbers: list[Any], adapters: bytes | None
) -> Forward:
    """The pickled Forward. Its arrays share the memory of `data`."""
    arrays: list[np.ndarray] = []
    start = 0
    for dtype, shape in forms:
        arrays.append(np.ndarray(shape, dtype, data, start))
        start += -(-arrays[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
    tables, rest = len(_ARRAYS), len(_ARRAYS) + 2 * groups
    step = StepArrays(
        **dict(zip(_ARRAYS, arrays)),
        block_tables=arrays[tables : tables + groups],
        slots=arrays[tables + groups : rest],
        **dict(zip(_NUMBERS, numbers, strict=True)),
    )
    return Forward(arrays[rest], step, arrays[rest + 1] if len(arrays) > rest + 1 else None, adapters)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step, to be carried out in this order: `swap_out`, `swap_in`, `block_copies`, then the forwards.

    The lists of copies are those of a SchedulerOutput. weights_epoch: increases when the driver has noticed a change of
    its weights.
    """

    swap_out: Copies
    swap_in: Copies
    block_copies: Copies
    forwards: list[Forward]
    weights_epoch: int

    def __reduce__(self) -> tuple[Any, ...]:
        return StepPlan, (self.swap_out, self.swap_in, self.block_copies, self.forwards, self.weights_epoch)
