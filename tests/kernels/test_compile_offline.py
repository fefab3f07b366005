"""A performance test without a GPU: every kernel is compiled for eight chips and its machine code is checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# KiB of shared memory that a program may use.
CHIPS = {
    "sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, "sm103": 227, "sm120": 99, "gfx942": 64, "gfx1100": 64,
}  # fmt: skip
OTHERS = ("sm89", "sm103", "sm120", "gfx1100")
"""They share the code of the other ones, with other sizes of tiles."""
TCGEN05 = ("sm100", "sm103")


def resident(chip: str, found: dict[str, Any]) -> int:
    """Programs of this code on a core at a time: registers go to warps by 256, the system takes 1 KiB shared memory."""
    registers = -(-found["registers"] * 32 // 256) * 256 * found["warps"]
    shared, warps = (CHIPS[chip] + 1) * 1024, 48 if chip in ("sm89", "sm120") else 64
    return min(65536 // registers, shared // (found["shared"] + 1024), warps // found["warps"])


def offline(*arguments: str, script: str = "offline.py") -> str:
    """What the script prints, run without the interpreter."""
    folder = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder.parent.parent), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, str(folder / script), *arguments], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def faults(chip: str, name: str, found: dict[str, Any]) -> list[str]:
    """The rules that one variant's machine code breaks."""
    attends = name.split()[0] in ("decode", "prefill", "verify", "short") or name.startswith("shared decode")
    wanted = {
        # A few registers spilled outside the loops cost nothing, and ptxas sometimes does that.
        "no spills": found["spills"] == 0 and found["stack"] <= 64,
        "fits shared memory": found["shared"] <= CHIPS[chip] * 1024,
        # It would not round a product that torch rounds before it is added.
        "no fma of half precision": found.get("fused_halves", 0) == 0,
    }
    if chip.startswith("gfx"):
        wanted["matrix cores"] = not (attends or name.startswith("experts")) or found["mfma"] > 0
    elif name in ("write", "copy"):
        wanted["16 bytes an access"] = found["wide_loads"] >= 4 and found["wide_stores"] >= 4
    elif name.startswith(("norm", "gate", "rotate", "sum")):
        wanted["16 bytes an access"] = found["wide_loads"] >= 2 and found["wide_stores"] >= 1
    elif name.startswith("experts"):
        # Rows and weights of two tiles; of one where the shared memory has no room for more wide ones.
        least = 2 if name.endswith("wide") and chip in ("sm89", "sm120") else 4
        wanted["pipelined"] = chip in TCGEN05 or (bool(found["in_flight"]) and min(found["in_flight"]) >= least)
        if chip in ("sm90", *TCGEN05) and not name.endswith("small"):
            wanted["wgmma"] = found["wgmma" if chip == "sm90" else "tcgen05"] > 0
    elif name == "greedy pieces" or name.startswith("top-p"):
        wanted["16 bytes an access"] = found["wide_loads"] >= 1
    elif attends:
        wanted["asynchronous copies"] = found["cp_async"] > 0
        if "fp32" not in name:
            # K and V of the next tile are loaded while this one is multiplied: paging costs no pipeline stage.
            wanted["pipelined"] = bool(found["in_flight"]) and min(found["in_flight"]) >= 2
        if chip == "sm90" and name.startswith(("prefill", "verify")) and "d512" not in name:
            wanted["wgmma"] = found["wgmma"] > 0
        if chip in TCGEN05 and name.startswith("prefill d128"):
            wanted["tcgen05"] = found["tcgen05"] > 0
    return [f"{name}: {rule}: {found}" for rule, holds in wanted.items() if not holds]


# Registers of a thread and KiB of shared memory of a decode step without a common prefix, for heads of 128 in half
# precision.
DECODE = {
    "sm80": (216, 72), "sm89": (168, 42), "sm90": (168, 72), "sm100": (168, 72), "sm103": (168, 72), "sm120": (168, 42),
    "gfx942": (256, 32),
}  # fmt: skip


def check(chip: str) -> None:
    """Of a decode step without a common prefix two programs run on each core, as the launch assumes
    (`PROGRAMS_PER_CORE`), with four warps each: in its registers and its shared memory. Each keeps K and V of two tiles
    of 64 keys in flight."""
    measured = map(json.loads, offline(chip).splitlines())
    variants = {each["name"]: each for each in measured}
    assert len(variants) >= 14
    assert not [fault for name, found in variants.items() for fault in faults(chip, name, found)]
    if chip == "gfx1100":  # not tuned
        return
    found, (registers, shared) = variants["decode d128"], DECODE[chip]
    assert found["registers"] <= registers and found["shared"] <= shared * 1024, found
    if chip.startswith("gfx"):
        assert 2 * found["registers"] <= 512  # of a lane; one warp of each program runs on each of four SIMDs
    else:
        assert resident(chip, found) >= 2 and found["in_flight"] == [2] and found["arrivals"] == 1
        # In heads of 512 two tiles of 16 keys take all shared memory of some chips.
        assert all(resident(chip, variants[f"decode d{size}"]) >= 2 for size in (64, 256))
        assert all(resident(chip, each) >= 1 for each in variants.values())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", [chip for chip in CHIPS if chip not in OTHERS])
def test_machine_code(chip: str) -> None:
    check(chip)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", OTHERS)
def test_every_other_chip(chip: str) -> None:
    check(chip)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_compiled_or_captured_after_the_warm_up() -> None:
    """Each kernel's variants and the graphs of engines that serve requests of all kinds are those of the warm-up."""
    runs = [json.loads(line) for line in offline("sm90", script="serving.py").splitlines()]
    assert {run["name"]: (run["later"], run["captures"]) for run in runs} == {run["name"]: ([], 0) for run in runs}
    assert len(runs) == 5 and all(run["used"] > 5 for run in runs)
    assert [run["replays"] > 20 for run in runs] == [False, False, True, True, True]
    assert sum(run["swaps"] for run in runs) > 0 and sum(run["copies"] for run in runs) > 0


@pytest.mark.slow
def test_a_step_prepares_the_launches_of_its_layers_once() -> None:
    """Later layers launch without choice and binder, with equal arguments; other alignment needs another code."""
    *runs, greedy, norm, gate, rotary, experts, router = [
        json.loads(line) for line in offline(script="repeated.py").splitlines()
    ]
    assert greedy == {"name": "greedy", "bound": [2, 0, 2, 2], "args": [True] * 4}
    assert [run["name"] for run in runs] == ["lean", "shared", "whole", "mixed", "window"]
    assert all(run["equal"] == [True] * 3 for run in runs)
    # Launches of a layer: K/V is written; attention; its parts are combined; prompts have a launch of their own.
    assert [run["each"] for run in runs] == [2, 3, 2, 4, 2]
    # Kernels between attentions are kept for all layers and steps: other numbers of rows, weights and blocks.
    assert norm == {"name": "norm", "unequal": [], "again": [1, 2, 8]}
    assert gate == {"name": "gate", "unequal": [], "again": [1, 9, 10, 16, 19]}
    assert rotary == {"name": "rotary", "unequal": [], "again": [1, 2, 5, 10, 30]}
    assert experts == {"name": "experts", "unequal": [], "again": [1, 8, 9, 22]}
    assert router == {"name": "router", "unequal": [], "again": [1]}
    assert [run["bound"] for run in runs] == [[3, 0, 2], [6, 0, 3], [2, 0, 2], [7, 0, 4], [3, 0, 2]]
