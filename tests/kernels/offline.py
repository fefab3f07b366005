"""Compile a kernel launch for a chip that is not there and measure the machine code.

Runs in a process of its own without TRITON_INTERPRET: `python offline.py CHIP` prints one JSON object a line.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_paged.kernels.triton_launch import Launch, Target

# The chip's name: target, shared memory a program may use (bytes).
CHIPS = {
    "sm80": (Target("cuda", 80, 108), 163 * 1024),
    "sm90": (Target("cuda", 90, 132), 227 * 1024),
    "sm100": (Target("cuda", 100, 148), 227 * 1024),
    "gfx942": (Target("hip", "gfx942", 304), 64 * 1024),
}
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8", torch.int32: "i32",
    torch.int64: "i64",
}  # fmt: skip


def source_of(launch: Launch) -> ASTSource:
    """What triton would specialise this launch on: types, constants, divisibility by 16."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            hints[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                hints[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, hints)


def measure(launch: Launch, chip: str) -> dict[str, Any]:
    """registers, spills (bytes or registers), shared (bytes), and the counts of the instructions that matter."""
    target, _ = CHIPS[chip]
    compiled = triton.compile(
        source_of(launch), target=GPUTarget(target.backend, target.arch, target.warp_size), options=launch.options
    )
    found: dict[str, Any] = {"shared": compiled.metadata.shared}
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found["registers"] = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        found["spills"] = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
        found["mfma"] = text.count("v_mfma")
        return found
    text = compiled.asm["ptx"]
    found |= {
        name: len(re.findall(pattern, text))
        for name, pattern in {
            "cp_async": r"cp\.async\.c[ga]", "mma": r"\bmma\.sync", "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma",
            "wide_loads": r"ld\.global\S*\.v[24]\.", "wide_stores": r"st\.global\S*\.v[24]\.",
        }.items()
    }  # fmt: skip
    found |= _ptxas(text, chip)
    return found


def _ptxas(ptx: str, chip: str) -> dict[str, int]:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    tool = folder / ("ptxas-blackwell" if chip == "sm100" else "ptxas")
    suffix = "" if chip == "sm80" else "a"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(tool), "-v", f"-arch={chip.replace('sm', 'sm_')}{suffix}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),  # type: ignore[index]
        "spills": sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log)),
    }
