"""Launch: a kernel with its grid and arguments. Building one is separate from running it, so that a kernel can also be
compiled for a chip that is not present. Target: the properties of a chip that a launch depends on. Knows nothing of
attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, or_
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

from hf_paged.kernels.buffers import as_plain

# Triton reads TRITON_INTERPRET when a kernel is decorated: set it before the first import.
INTERPRET: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class Target:
    """A chip. `arch`: compute capability as an integer (90) or an AMD name ("gfx942"); `num_cores`: SMs or CUs."""

    backend: str  # "cuda" or "hip"
    arch: int | str
    num_cores: int


@functools.cache
def target_of(device: torch.device) -> Target:
    """The chip of `device`. A CPU (the interpreter) counts as a chip with 3 cores, so that work is still split."""
    if device.type == "cpu":
        return Target("cuda", 90, 3)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Target("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Target("cuda", properties.major * 10 + properties.minor, properties.multi_processor_count)


def is_current(device: torch.device) -> bool:
    """Return True if Triton runs a kernel there: a CPU, or the process's current device."""
    return device.type == "cpu" or device.index == torch.cuda.current_device()


# Of kernels in which torch rounds a product before it is added: LLVM and ptxas would make one `fma` of both, in half
# precision too, although the kernel rounds the product.
UNFUSED = {"enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. `args`: every kernel argument by name; `options`: num_warps, num_stages, UNFUSED."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    options: dict[str, int]

    def run(self, device: torch.device) -> Any:
        """Run on `device`, where the tensors are. Triton itself would run on the process's current device.

        Returns triton's compiled kernel, which can be run again on equally aligned tensors; None in the interpreter.
        Raises ValueError for a tensor that has no memory of its own.
        """
        args = {name: as_plain(arg) if isinstance(arg, torch.Tensor) else arg for name, arg in self.args.items()}
        if is_current(device):
            return self.kernel[self.grid](**args, **self.options)
        with torch.cuda.device(device):
            return self.kernel[self.grid](**args, **self.options)


@dataclass(frozen=True, slots=True)
class Ready:
    """A compiled kernel with its arguments in order, to be run again: Triton takes longer to find it by all arguments.

    tensors: (place in `args`, name) of the arguments that differ from run to run. They are None in `args`, which would
    keep them alive.
    """

    run: Callable[..., None]
    args: list[Any]
    tensors: tuple[tuple[int, str], ...]
    compiled: Any
    grid: tuple[int, ...]

    @classmethod
    def of(cls, launch: Launch, compiled: Any, kept: frozenset[str] = frozenset()) -> Ready:
        """compiled: what the launch has returned. kept: names of tensors that are the same in every run."""
        names = [parameter.name for parameter in launch.kernel.params]
        given = [launch.args[name] for name in names]
        own = [isinstance(arg, torch.Tensor) and name not in kept for name, arg in zip(names, given)]
        tensors = tuple((place, name) for place, name in enumerate(names) if own[place])
        args = [None if is_own else arg for arg, is_own in zip(given, own)]
        grid = (*launch.grid, 1, 1)[:3]
        return cls(compiled[grid], args, tensors, compiled, grid)

    def run_on(self, tensors: dict[str, torch.Tensor], num_rows: int | None = None) -> None:
        """Run on the current device and stream. The tensors must be aligned to 16 bytes where those before were.

        num_rows: the first size of the grid, if it is another one.
        """
        args = self.args.copy()
        for place, name in self.tensors:
            args[place] = tensors[name]
        run = self.run if num_rows is None else self.compiled[(num_rows, *self.grid[1:])]
        run(*args)


# A limit, because keys have strides, of which programs may bring ever new ones.
_MAX_KEPT = 1024
_address_of, _stride_of, _dtype_of = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("dtype")


class RowLaunches:
    """The launches of one kernel whose grid begins with the number of rows, kept to be run again with other tensors.

    They are kept by all that a launch depends on but addresses and the number of rows, so that the layers of a model
    share one, in steps of any size. Only launches whose tensors are all aligned to 16 bytes are kept.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Ready] = {}

    def run(
        self,
        num_rows: int,
        device: torch.device,
        tensors: dict[str, torch.Tensor | None],
        options: tuple[Any, ...],
        build: Callable[[], Launch],
    ) -> None:
        """Run the launch that `build` gives, or the one kept for such tensors and options, on `device`.

        tensors: all of the launch's, by the names of its arguments. options: all else on which it depends but the
        tensors' strides and dtypes, such as sizes; hashable. num_rows: at least 1.
        """
        given = {name: x for name, x in tensors.items() if x is not None}
        present = given.values()
        # The arguments for a single row do not have its strides, which are arbitrary.
        key = num_rows == 1, device, options, *given, *map(_stride_of, present), *map(_dtype_of, present)
        addresses = list(map(_address_of, present))
        is_aligned = functools.reduce(or_, addresses) % 16 == 0
        ready = self._kept.get(key) if is_aligned and 0 not in addresses else None
        if ready is not None and is_current(device):
            ready.run_on(given, num_rows)
            return
        launch = build()
        compiled = launch.run(device)
        if compiled is not None and is_aligned:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.pop(list(self._kept)[0], None)  # noqa: RUF015 (the oldest; other threads may add one meanwhile)
            self._kept[key] = Ready.of(launch, compiled)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def stride_unit(*strides: int) -> int:
    """The largest power of two up to 16 that divides all strides. A kernel gets the strides in this unit and the unit
    as a constant, so that it knows the alignment of rows without being compiled anew for each stride: in a model's
    [heads, tokens, head_dim] the strides vary with the number of tokens, but the unit is that of head_dim."""
    return math.gcd(16, *strides)
