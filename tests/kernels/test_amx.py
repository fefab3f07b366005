"""The AMX code on machines without AMX: its tests run in subprocesses with an emulation of the tile instructions. The
emulation itself is compared with the definition of the instruction.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native.toolchain import EMULATE_AMX

ROOT = Path(__file__).parent.parent.parent
CPUINFO = Path("/proc/cpuinfo")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),  # a build and two suites, on a machine that may be busy
    pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine"),
    pytest.mark.skipif(
        not CPUINFO.exists() or "avx512_bf16" not in CPUINFO.read_text(), reason="the emulation needs AVX-512 with BF16"
    ),
]


def run_emulated(*arguments: str) -> None:
    environment = {**os.environ, EMULATE_AMX: "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-1000:]


def test_attention_and_linear_layers() -> None:
    run_emulated(
        "tests/kernels/test_native.py", "tests/fused/test_layers.py", "tests/fused/test_linear_parts.py", "-k",
        "test_layers or test_linear_parts or tiles or sharing",
    )  # fmt: skip


def test_attention_over_eight_bits() -> None:
    run_emulated(
        "tests/kernels/test_quantised.py",
        "-k",
        "test_half_precision or test_int8_in_few_tokens or test_eight_bits_in_prompts or does_not_see",
    )


def test_layers_of_models() -> None:
    run_emulated(
        "tests/fused/test_native_layers.py",
        "tests/fused/test_prepack.py",
        "tests/fused/test_native_experts.py",
        "tests/model/test_weights.py::test_native_layers",
        "tests/fused/test_weights_in_place.py::test_copies_give_the_same_bits",
    )
