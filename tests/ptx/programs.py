"""Small programs in PTX, written by hand, for the tests of the machine itself."""

from __future__ import annotations

import torch

from tests.ptx import arithmetic, matrices
from tests.ptx.machine import Machine
from tests.ptx.memory import GlobalMemory
from tests.ptx.reader import read

assert arithmetic and matrices  # they register what instructions do

SIZES = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
PREFIXES = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}


def execute(
    body: str, *tensors: torch.Tensor, threads: int = 32, shared: int = 1024, blank: tuple[int, ...] = (),
    programs: int = 1,
) -> Machine:  # fmt: skip
    """Run the statements, separated by semicolons. Before them %r1 is the thread's number, and %rd1, %rd2, ... are the
    addresses of the tensors. blank: the places of tensors that nobody has written."""
    parameters = ", ".join(f".param .u64 .ptr .global .align 16 k_param_{i}" for i in range(len(tensors)))
    lines = [
        f".visible .entry k({parameters})\n.reqntid {threads}\n{{",
        ".reg .pred %p<99>;\n.reg .b16 %rs<99>;\n.reg .b32 %r<99>;\n.reg .b64 %rd<99>;",
        "mov.u32 %r1, %tid.x;",
        *(f"ld.param.b64 %rd{i + 1}, [k_param_{i}];" for i in range(len(tensors))),
        *(f"{statement.strip()};" for statement in body.strip().removesuffix(";").split(";")),
        "ret;\n}",
    ]
    memory = GlobalMemory(tensors, [tensors[i] for i in blank])
    machine = Machine(read("\n".join(lines)), shared, list(tensors), memory)
    machine.run((programs, 1, 1), [(i, 0, 0) for i in range(programs)])
    return machine


def computed(statements: str, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Run statements that compute {d} from {a}, {b} and {c}, a thread for each element of the inputs, of which one
    element each is loaded; out is filled and returned."""
    count = len(inputs[0])
    lines, names = [], {}
    for place, (name, tensor) in enumerate(zip("abc", inputs)):
        size = tensor.element_size()
        names[name] = f"{PREFIXES[size]}{20 + place}"
        lines.append(f"mad.wide.s32 %rd{30 + place}, %r1, {size}, %rd{place + 2}")
        lines.append(f"ld.global.{SIZES[size]} {names[name]}, [%rd{30 + place}]")
    size = out.element_size()
    names["d"] = f"{PREFIXES[size]}19"
    lines.append(statements.format(**names))
    lines.append(f"mad.wide.s32 %rd40, %r1, {size}, %rd1")
    lines.append(f"st.global.{SIZES[size]} [%rd40], {names['d']}")
    execute(";".join(lines), out, *inputs, threads=count)
    return out
