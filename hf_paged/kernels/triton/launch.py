"""Launch: a kernel with its grid and arguments. Building one is separate from running it, so that a kernel can also be
compiled for a chip that is not present. Target: the properties of a chip that a launch depends on. Knows nothing of
attention.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

# Triton reads TRITON_INTERPRET when a kernel is decorated: set it before the first import.
INTERPRET: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class Target:
    """A chip. `arch`: compute capability as an integer (90) or an AMD name ("gfx942"); `num_cores`: SMs or CUs."""

    backend: str  # "cuda" or "hip"
    arch: int | str
    num_cores: int

    @property
    def warp_size(self) -> int:
        return 64 if self.backend == "hip" and str(self.arch).startswith("gfx9") else 32


@functools.cache
def target_of(device: torch.device) -> Target:
    """The chip of `device`. A CPU (the interpreter) counts as a chip with 3 cores, so that work is still split."""
    if device.type == "cpu":
        return Target("cuda", 90, 3)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `args`: every kernel argument by name; `options`: num_warps and num_stages."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, int]

    def run(self, device: torch.device) -> Any:
        """Run on `device`, where the tensors are. Triton itself would run on the process's current device.

        Returns triton's compiled kernel, which can be run again on equally aligned tensors; None in the interpreter.
        """
        if device.type == "cpu" or device.index == torch.cuda.current_device():
            return self.kernel[self.grid](**self.args, **self.options)
        with torch.cuda.device(device):
            return self.kernel[self.grid](**self.args, **self.options)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def stride_unit(*strides: int) -> int:
    """The largest power of two up to 16 that divides all strides. A kernel gets the strides in this unit and the unit
    as a constant, so that it knows the alignment of rows without being compiled anew for each stride: in a model's
    [heads, tokens, head_dim] the strides vary with the number of tokens, but the unit is that of head_dim."""
    return math.gcd(16, *strides)
