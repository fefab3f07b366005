"""Run a kernel: all threads of a program in lock step, and programs one after the other, or several at once.

Threads that are at the same instruction execute it together, under its guard. Where a branch parts them, those that are
behind go first, until they are together again; a barrier or a matrix instruction that some have not reached is a fault.
What instructions compute is in `arithmetic.py` and `matrices.py`, which register it with `instruction`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.ptx.formats import DTYPES, Array
from tests.ptx.memory import Fault, GlobalMemory, SharedMemory
from tests.ptx.reader import Address, Constant, Instruction, Kernel, Operand

LIMIT = 20_000_000  # instructions of a launch

Handler = Callable[["Machine", Instruction, Any], None]
"""Executes an instruction for the threads of a mask, or all for None."""

_handlers: dict[str, Handler] = {}
_UNDEFINED = np.uint64(0xA5A5A5A5A5A5A5A5)  # of a register in threads that have not written it


def instruction(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _handlers.update(dict.fromkeys(names, handler))
        return handler

    return register


class Machine:
    """registers: by name, an array of the number of threads each; bool for predicates, else unsigned."""

    def __init__(
        self, kernel: Kernel, shared_size: int, arguments: Sequence[Any], memory: GlobalMemory, together: int = 1
    ) -> None:
        """arguments: in the order of the kernel's parameters; tensors, numbers, or None. Those that Triton adds at the
        end are 0. together: so many programs at once, each with shared memory of its own, which is faster; their
        branches must be the same."""
        self.kernel, self.memory = kernel, memory
        # Of a program, and the distance to that of the next one, which is aligned as the first one is.
        self.shared_limit, self.shared_size = shared_size, -(-max(shared_size, 16) // 1024) * 1024
        self.together, self.threads, self.executed = together, kernel.threads * together, 0
        self.notes: set[str] = set()
        self.parameters = {}
        given = [*arguments, *[0] * (len(kernel.parameters) - len(arguments))]
        for (kind, name), value in zip(kernel.parameters, given, strict=True):
            if isinstance(value, torch.Tensor):
                value = value.data_ptr()
            if kind == "f32":
                self.parameters[name] = np.float32(value).view(np.uint32)
            else:
                dtype = np.dtype(f"u{DTYPES[kind].itemsize}")
                self.parameters[name] = dtype.type(int(value or 0) % 2 ** (8 * dtype.itemsize))
        missing = {each.name for each in kernel.instructions if each.name not in _handlers} - {"bra", "ret", "exit"}
        if missing:
            raise Fault(f"{kernel.name} has instructions that the machine does not know: {', '.join(sorted(missing))}")
        self._all = np.arange(self.threads)
        self.number = self._all // kernel.threads  # of a thread's program, of those that run at once
        self.warp_of = self._all % kernel.threads // 32
        self._constants: dict[tuple[int, Any], Array] = {}

    # -- operands

    def get(self, operand: Operand, kind: str) -> Array:
        """The operand in all threads, of the numpy type of `kind`; half precision as its bits."""
        dtype = DTYPES.get(kind, np.dtype("u2") if kind in ("bf16", "f16") else np.dtype("u4"))
        if isinstance(operand, Constant):
            return self._constant(operand, np.dtype(dtype))
        assert isinstance(operand, str), operand
        if self.in_flight and operand in self.in_flight:
            raise Fault(f"{operand} is read before the wait for the wgmma that writes it: {self.text}")
        value = self.registers.get(operand)
        if value is None:
            value = self._special(operand)
        if dtype is np.bool_ or value.dtype == np.bool_:
            return value
        dtype = np.dtype(dtype)
        if value.dtype.itemsize != dtype.itemsize:
            value = value.astype(f"u{dtype.itemsize}")
        return value.view(dtype)

    def _constant(self, operand: Constant, dtype: Any) -> Array:
        key = operand.bits, dtype
        if key not in self._constants:
            if dtype == np.bool_:
                self._constants[key] = np.full(self.threads, operand.bits != 0)
            else:
                unsigned = np.dtype(f"u{dtype.itemsize}")
                bits = operand.bits % 2 ** (8 * dtype.itemsize)
                self._constants[key] = np.full(self.threads, bits, unsigned).view(dtype)
        return self._constants[key]

    def _special(self, name: str) -> Array:
        if name.startswith("%tid."):
            return (self._all % self.kernel.threads * name.endswith("x")).astype(np.uint32)
        if name == "%laneid":
            return (self._all % 32).astype(np.uint32)
        if name.startswith("%ctaid."):
            return np.array([program["xyz".index(name[-1])] for program in self.programs], np.uint32)[self.number]
        if name.startswith("%nctaid."):
            return np.full(self.threads, self.grid["xyz".index(name[-1])], np.uint32)
        if name.startswith("%ntid."):
            return np.full(self.threads, self.kernel.threads if name.endswith("x") else 1, np.uint32)
        if name == "global_smem":
            return np.zeros(self.threads, np.uint32)
        raise Fault(f"{name} is read before it is written: {self.text}")

    def put(self, operand: Operand, value: Array, on: Array | None) -> None:
        """Write a register in the threads of the mask. A wider register gets the value extended by its sign."""
        assert isinstance(operand, str), operand
        if operand == "_":
            return
        if self.in_flight and (operand in self.in_flight or operand in self.held):
            raise Fault(f"{operand} is written before the wait for the wgmma that uses it: {self.text}")
        if value.dtype != np.bool_:
            found = re.match(r"%([a-z]+)", operand)
            width = self.kernel.widths.get(found[1] if found else operand, 0) or value.dtype.itemsize
            if width > value.dtype.itemsize:
                value = value.astype(f"{value.dtype.kind.replace('f', 'u')}{width}")
            value = value.view(f"u{value.dtype.itemsize}")
        if on is not None:
            old = self.registers.get(operand)
            if old is None:
                old = np.full_like(value, _UNDEFINED.astype(value.dtype))
            value = np.where(on, value, old)
        self.registers[operand] = np.ascontiguousarray(value)

    def address(self, operand: Operand) -> Array:
        """Of global memory."""
        assert isinstance(operand, Address), operand
        return self.get(operand.base, "u64").astype(np.int64) + operand.offset

    def shared_address(self, operand: Operand, who: Array) -> Array:
        """Of the threads `who` in shared memory, where that of the programs that run at once lies side by side."""
        assert isinstance(operand, Address), operand
        return self.in_shared((self.get(operand.base, "u32").astype(np.int64) + operand.offset)[who], self.number[who])

    def in_shared(self, addresses: Array, number: Any) -> Array:
        if len(addresses) and (addresses.min() < 0 or addresses.max() >= self.shared_limit):
            raise Fault(f"access outside of shared memory: {self.text}")
        return addresses + number * self.shared_size

    def who(self, on: Array | None) -> Array:
        """Indices of the threads of a mask."""
        return self._all if on is None else np.flatnonzero(on)

    def uniform(self, operand: Operand, kind: str) -> int:
        """A number that must be the same in all threads."""
        values = self.get(operand, kind)
        if (values != values[0]).any():
            raise Fault(f"{operand} differs between threads: {self.text}")
        return int(values[0])

    # -- programs

    def run(self, grid: Sequence[int], order: Sequence[tuple[int, int, int]]) -> None:
        """Run the programs of the grid in this order."""
        self.grid = tuple(grid)
        assert len(order) % self.together == 0, (len(order), self.together)
        with np.errstate(all="ignore"):
            for first in range(0, len(order), self.together):
                self._run(order[first : first + self.together])

    def _run(self, programs: Sequence[tuple[int, int, int]]) -> None:
        self.programs = programs
        self.registers: dict[str, Array] = {}
        self.shared = SharedMemory(self.shared_size * self.together, notes=self.notes)
        self.memory.epoch += 1
        # Groups of wgmma that nobody has waited for, and the registers that these write and read.
        self.products: list[list[Any]] = []
        self.open_products: list[Any] = []
        self.in_flight: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        code = self.kernel.instructions
        place, active = 0, None  # of the threads that are at work: their instruction, and a mask; None: all
        behind: dict[int, Array] = {}  # masks of the others, by the instruction that they have reached
        while place < len(code) or behind:
            if behind:
                place, active = self._hindmost(place, active, behind)
            now = code[place]
            self.text = self.shared.text = now.text
            self.executed += 1
            if self.executed > LIMIT:
                raise Fault(f"more than {LIMIT} instructions: {now.text}")
            on = active
            if now.guard is not None:
                guard = self.get(now.guard[0], "pred") ^ now.guard[1]
                on = guard if active is None else guard & active
                if on.all():
                    on = None
            if now.name in ("bra", "ret", "exit"):
                goes = on is None or (active is not None and bool((on == active).all()))
                target = len(code) if now.name != "bra" else self.kernel.labels[str(now.operands[0])]
                if not goes and on is not None and on.any():
                    behind[target] = on | behind.get(target, False)
                    active = ~on if active is None else active & ~on
                place = target if goes else place + 1
                continue
            if on is None or on.any() or now.name == "bar":
                _handlers[now.name](self, now, on)
            place += 1
        if any(self.shared.groups) or self.shared.open_group:
            raise Fault("the program ends without a wait for its asynchronous copies")
        if self.products or self.open_products:
            raise Fault("the program ends without a wait for its wgmma")

    def _hindmost(self, place: int, active: Array | None, behind: dict[int, Array]) -> tuple[int, Array | None]:
        """Of the threads at work and the others, those at the earliest instruction."""
        assert active is not None
        behind[place] = active | behind.get(place, False)
        first = min(behind)
        mask = behind.pop(first)
        return first, None if mask.all() else mask
