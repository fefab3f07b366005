"""The AMX code without AMX, in subprocesses with an emulation, which is compared with the instruction's definition."""

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


@pytest.mark.parametrize(("files", "names"), [
    (("kernels/test_native", "kernels/test_quantised", "fused/test_layers", "fused/test_linear_parts"),
        "test_layers or linear_parts or tiles or sharing or half_precision or few_tokens or in_prompts or not_see"),
    (
        ("fused/test_native_layers", "fused/test_prepack", "fused/test_native_experts",
         "fused/test_weights_in_place", "fused/test_foreign_forwards", "integration/test_interrupt"),
        "native_layers or prepack or native_experts or copies_give or foreign_forwards or interrupt",
    ),
])  # fmt: skip
def test_suites_on_the_emulation(files: tuple[str, ...], names: str) -> None:
    environment = {**os.environ, EMULATE_AMX: "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", names]
    command += [f"tests/{file}.py" for file in files]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-1000:]
