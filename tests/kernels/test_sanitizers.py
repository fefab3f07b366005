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
        **os.environ,
        LIBRARY: str(library),
        "LD_PRELOAD": " ".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "2",
    }


@pytest.mark.parametrize(
    ("arguments", "entry_points"),
    [
        (
            ("tests/kernels/test_gather.py", "-k", "native and not two_to_the"),
            {"hfp_check", "hfp_partition", "hfp_attention", "hfp_prefill", "hfp_write_kv", "hfp_copy_blocks"},
        ),
        (
            ("tests/kernels/test_native.py", "-k", "tiles or sharing or equal_ids or threads_and"),
            {"hfp_check", "hfp_partition", "hfp_partition_counts", "hfp_attention", "hfp_prefill"},
        ),
        (
            ("tests/kernels/test_quantised.py", "-k", "half_precision or few_tokens or in_prompts or does_not_see"),
            {"hfp_attention", "hfp_prefill"},
        ),
        (("tests/kernels/test_validation.py", "-k", "native"), {"hfp_check", "hfp_attention", "hfp_write_kv"}),
        (
            ("tests/fused/test_layers.py", "tests/fused/test_linear_parts.py"),
            {
                "hfp_linear",
                "hfp_linear_f32",
                "hfp_rms_norm_f32",
                "hfp_rotate_f32",
                "hfp_layer_in_f32",
                "hfp_layer_out_f32",
            },
        ),
        (("tests/fused/test_native_layers.py", "-k", "same_bits"), {"hfp_decode_layers", "hfp_decode_layers_f32"}),
        (
            ("tests/generation/test_sampling.py", "-k", "draw or greedy or multinomial or generator or nan"),
            {"hfp_greedy", "hfp_draw", "hfp_draw_top_p", "hfp_keep_largest"},
        ),
    ],
    ids=["shapes", "native", "quantised", "ids", "layers", "models", "sampling"],
)
def test_no_report(arguments: tuple[str, ...], entry_points: set[str], environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "tests.kernels.sanitized"]
    command += ["-o", "timeout=1200", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout
    used = next(line for line in done.stdout.splitlines() if line.startswith("entry points: "))
    assert entry_points <= set(used.split()), used
