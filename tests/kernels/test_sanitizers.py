"""The tests of the C code under AddressSanitizer and UndefinedBehaviorSanitizer. They take minutes.

python -m pytest -m slow tests/kernels/test_sanitizers.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native.toolchain import EMULATE_AMX, find_toolchain
from tests.kernels.sanitized import FLAGS, LIBRARY

ROOT = Path(__file__).parent.parent.parent
RUNTIMES = ("libasan.so", "libubsan.so")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine"),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of the tests; on a CPU with AVX-512 and BF16 it includes the emulation of AMX."""
    toolchain = find_toolchain()
    paths = [
        subprocess.run([*toolchain.command, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in RUNTIMES
    ]
    if not all(map(os.path.isabs, paths)):
        pytest.skip(f"the compiler has no {' and '.join(RUNTIMES)}")
    flags = (*toolchain.target, f"-D{EMULATE_AMX}=1", *FLAGS)
    library = native_build.compile_library(replace(toolchain, target=flags), tmp_path_factory.mktemp("sanitized"))
    return {
        **os.environ, LIBRARY: str(library), "LD_PRELOAD": " ".join(paths), "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "2",
    }  # fmt: skip


K, F = "tests/kernels/test_", "tests/fused/test_"
RUNS: dict[str, tuple[tuple[str, ...], str]] = {
    "shapes": (
        (f"{K}gather.py", "-k", "native and not two_to_the"), "check partition attention prefill write_kv copy_blocks",
    ),
    "native": ((f"{K}native.py", "-k", "tiles or sharing or equal_ids or threads_and"),
        "check partition partition_counts attention prefill"),
    "quantised": (
        (f"{K}quantised.py", "-k", "half_precision or few_tokens or in_prompts or does_not_see"), "attention prefill",),
    "ids": ((f"{K}validation.py", "-k", "native"), "check attention write_kv"),
    "layers": ((f"{F}layers.py", f"{F}linear_parts.py"),
        "linear linear_f32 rms_norm_f32 rotate_f32 layer_in_f32 layer_out_f32"),
    "groups": ((f"{F}int8.py", "-k", "groups"), "linear linear_f32"),
    "models": ((f"{F}native_layers.py", "-k", "same_bits"), "decode_layers decode_layers_f32"),
    "sampling": (("tests/generation/test_sampling.py", "-k", "draw or greedy or multinomial or generator or nan"),
        "greedy draw draw_top_p keep_largest"),
}  # fmt: skip
"""What pytest gets, and the functions of the library that it must reach."""


@pytest.mark.parametrize("name", RUNS)
def test_no_report(name: str, environment: dict[str, str]) -> None:
    arguments, entry_points = RUNS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels.sanitized"]
    command += ["-o", "timeout=1200", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout
    used = next(line for line in done.stdout.splitlines() if line.startswith("entry points: "))
    assert {f"hfp_{each}" for each in entry_points.split()} <= set(used.split()), used
