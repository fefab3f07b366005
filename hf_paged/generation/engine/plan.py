"""One step as plain data: all that a process needs to compute it on its own device (SOSP'23 section 4.6).

With tensor parallelism the driver sends each plan to the other ranks. A plan refers to blocks, never to sequences,
requests or tensors of a device.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A step, to be carried out in this order: `swap_out`, `swap_in`, `block_copies`, then the forwards.

    The lists of copies are those of a SchedulerOutput, with one entry for each layer group. weights_epoch: increases
    when the driver has noticed a change of its weights.
    """

    swap_out: Copies
    swap_in: Copies
    block_copies: Copies
    forwards: list[Forward]
    weights_epoch: int
