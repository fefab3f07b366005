"""Our kernels as Triton compiles them for sm80 and sm90, executed without a GPU, against torch.

A case holds if the machine sees no fault and the results are the reference's: the same bits where docs/gpu.md promises
them, else within the bound of the other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

FOLDER = Path(__file__).parent
CHIPS = ("sm80", "sm90")
SAME_BITS = {
    *(f"{part}, {kind}" for part in ("norms before and after the sum", "rotary positions", "gates")
      for kind in ("bf16", "fp16")),
    "bf16, strided", "fp32", "int8 of bf16", "fp8 of fp16", "copies of blocks", "top-p",
}  # fmt: skip


def told(script: str, *arguments: str) -> str:
    """What a script of this folder prints, run without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(FOLDER.parent.parent), os.environ.get("PYTHONPATH")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(chip: str, *arguments: str, least: int) -> None:
    ran = [json.loads(line) for line in told("room.py", chip, *arguments).splitlines()]
    assert len(ran) >= least
    assert [(each["case"], each["fault"]) for each in ran if each["fault"]] == []
    assert [(each["case"], each["apart"]) for each in ran if not each["apart"] <= 1] == []
    # Triton 3.6 writes no fences between cp.async and wgmma, which NVIDIA's manual asks for; 3.7 does.
    assert triton.__version__.startswith("3.6.") or not any(each["notes"] for each in ran)
    groups = {"write", "rounding", "samples"} & set(arguments)
    assert [(each["case"], each["unequal"]) for each in ran
            if groups and each["case"] in SAME_BITS and each["unequal"]] == []  # fmt: skip
    # All that a program for 8,192 scores executes. One for a row of 128k scores executed 253,000 instructions.
    pieces = [each["kernels"] for each in ran if "two whole pieces" in each["case"]]
    assert all(sum(counts.values()) / 2 < 30_000 for counts in pieces), pieces
    # sm80 has no eight-bit floating-point numbers.
    assert all(each["elements"] and each["kernels"] for each in ran if chip == "sm90" or "fp8" not in each["case"])


@pytest.mark.smoke
def test_a_kernel_of_each_kind() -> None:
    """wgmma in a prompt, greedy tokens."""
    check("sm90", "prefill", "samples", "--only", "heads of 80", "greedy", least=2)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "groups, least",
    [(("decode", "features"), 14), (("prefill", "spans", "shared", "order"), 16), (("rows", "experts"), 8),
     (("write", "samples", "rounding"), 14)],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_kernels(chip: str, groups: tuple[str, ...], least: int) -> None:
    check(chip, *groups, least=least)


EARLY = "between copies to buffers of their own, before the first is read"
ANOTHER = "another one guards the same"
UNSEEN: list[tuple[tuple[str, str, str, str], dict[int, str]]] = [
    (("sm90", "decode", "heads of 64, a part for each program", "split_kernel"), {
        1: EARLY,
        15: "of the memory of other programs, which run one after the other here: see tests/kernels/weak_memory.py",
        17: ANOTHER, 18: ANOTHER,
    }),
    (("sm90", "prefill", "heads of 80", "whole_kernel"), {
        0: EARLY, 1: ANOTHER, 6: ANOTHER,
        8: "after the loop, when no copy is on its way",
        10: EARLY, 11: ANOTHER,
    }),
    (("sm90", "samples", "greedy", "pieces_kernel"), {}),
    (("sm80", "experts", "small tiles", "product_kernel"), {
        0: EARLY,
        1: EARLY,
    }),
]  # fmt: skip
"""Barriers, waits and fences, by their number, without which the machine sees no fault, and why there is none."""


@pytest.mark.slow
@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="other versions number the barriers otherwise")
@pytest.mark.parametrize("kernel, unseen", UNSEEN, ids=[kernel[3] for kernel, _ in UNSEEN])
def test_every_barrier_is_needed_or_known_as_redundant(kernel: tuple[str, ...], unseen: dict[int, str]) -> None:
    outcomes: list[dict[str, Any]] = json.loads(told("mutants.py", *kernel))
    assert len(outcomes) >= 5
    assert {each["number"]: each["guard"] for each in outcomes if not each["seen"]}.keys() == unseen.keys()
