"""Compile a launch of ours for a chip that is not present, and run its machine code. Needs TRITON_INTERPRET=0."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from offline import CHIPS, gpu_target, source_of

from hf_paged.kernels.triton.launch import Launch
from tests.ptx import arithmetic, matrices
from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory
from tests.ptx.reader import Kernel, read

assert arithmetic and matrices  # they register what instructions do

Change = Callable[[str], str]
"""What a test does to the PTX before it is run."""

_read: dict[tuple[str, str], tuple[Kernel, int]] = {}


def run(
    launch: Launch, chip: str, *, blank: Sequence[torch.Tensor] = (), seed: int | None = 0,
    change: Change | None = None, together: int = 1, only: tuple[int | None, ...] = (),
    also: Sequence[torch.Tensor] = (), poisoned: Sequence[torch.Tensor] = (),
) -> Machine:  # fmt: skip
    """Run all programs, in an order that depends on the seed (None: in that of the grid), so many together, and return
    the machine that has run them. Raises Fault.

    blank: tensors that nobody has written. only: programs with these numbers in the grid. also: tensors whose addresses
    the kernel reads from memory. poisoned: tensors of whose elements NaN must not be read."""
    source = source_of(launch)
    kernel, shared = _compiled(launch, source, chip, change)
    tensors = [value for value in launch.args.values() if isinstance(value, torch.Tensor)]
    names = [parameter.name for parameter in launch.kernel.params if source.signature[parameter.name] != "constexpr"]
    memory = GlobalMemory([*tensors, *also], blank, poisoned)
    machine = Machine(kernel, shared, [launch.args[name] for name in names], memory, together)
    grid = (*launch.grid, 1, 1)[:3]
    sizes = [range(n) for n in grid]
    for axis, number in enumerate(only):
        if number is not None:
            sizes[axis] = range(number, number + 1)
    programs = list(itertools.product(*sizes))
    if seed is not None:
        random.Random(seed).shuffle(programs)
    machine.run(grid, programs)
    return machine


def compiled(launch: Launch, source: Any, chip: str) -> Any:
    return triton.compile(source, target=gpu_target(CHIPS[chip][0]), options=launch.options)


def _compiled(launch: Launch, source: Any, chip: str, change: Change | None) -> tuple[Kernel, int]:
    made = compiled(launch, source, chip)
    if change is not None:
        return read(change(made.asm["ptx"])), made.metadata.shared
    key = made.hash, chip
    if key not in _read:
        _read[key] = read(made.asm["ptx"]), made.metadata.shared
    return _read[key]
