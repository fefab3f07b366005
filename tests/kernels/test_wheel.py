"""Wheels with native kernels: what `pip wheel` makes, and a process of an installation that has no compiler."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native.toolchain import INSTRUCTION_SETS, find_toolchain, usable_sets
from tests.once import once

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not native_build.has_compiler() or sys.platform != "linux", reason="needs gcc on Linux"),
]

GENERATE = """
import pathlib, torch, transformers, hf_paged
from hf_paged.kernels.native import build
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, initializer_range=0.6)
model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(40, (5, 70))
options = dict(max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(ids))
plain = model.generate(ids, **options)
assert torch.equal(model.generate(ids, **options, cache_implementation="paged"), plain)
print(build.status())
print(pathlib.Path(hf_paged.__file__).parent)
"""


def make_wheel(directory: Path, **settings: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


def generate(installed: Path, cache: Path, **settings: str) -> tuple[str, str]:
    """The last lines of the output, and the errors, of a process that has no compiler."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(cache), "CC": "no-such-compiler"}
    environment = {name: value for name, value in environment.items() if not name.startswith("HF_PAGED_")}
    done = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=cache, env={**environment, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    status, package = done.stdout.splitlines()[-2:]
    assert Path(package) == installed / "hf_paged"
    return status, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "wheel", install) / "content"


def install(directory: Path) -> None:
    """The content of a platform wheel, whose libraries are compiled in a third of the time: without optimisations."""
    compiler = directory / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shlex.join(find_toolchain().command)} "$@" -O0\n')
    compiler.chmod(0o755)
    wheel = make_wheel(directory, HF_PAGED_WHEEL="platform", CC=str(compiler))
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(directory / "content")


def test_it_has_the_kernels_for_every_instruction_set(installed: Path) -> None:
    names = {path.name.split("-")[1] for path in (installed / "hf_paged/kernels/native").glob("*.so")}
    assert names == {isa for isa, each in INSTRUCTION_SETS.items() if platform.machine() in each.needed}
    assert {"LICENSE", "WHEEL"} <= {path.name for path in installed.glob("*.dist-info/**/*")}


@pytest.mark.parametrize("isa", ["", "avx2"] if "avx2" in usable_sets() else [""])
def test_no_compiler_is_needed(isa: str, installed: Path, tmp_path: Path) -> None:
    status, errors = generate(installed, tmp_path, **({"HF_PAGED_ISA": isa} if isa else {}), OMP_NUM_THREADS="2")
    assert status.endswith(", OpenMP, of the wheel") and "Warning" not in errors
    assert not (tmp_path / "hf_paged").exists()
    names = {"avx2": "AVX2", "avx512": "AVX-512", "avx512_bf16": "AVX-512 with BF16", "neon": "NEON"}
    assert not isa or status.startswith(f"native kernels: {names[isa]}, ")


def test_kernels_of_other_sources_are_not_used(installed: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(installed, changed)
    with (changed / "hf_paged/kernels/native/blocks.c").open("a") as source:
        source.write("\n")
    status, errors = generate(changed, tmp_path)
    assert status.startswith("no native kernels: ") and "no-such-compiler" in errors


def test_native_compiles_for_this_cpu(installed: Path, tmp_path: Path) -> None:
    status, errors = generate(installed, tmp_path, HF_PAGED_ISA="native")
    assert status.startswith("no native kernels: ") and "no-such-compiler" in errors


def test_a_pure_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, HF_PAGED_WHEEL="pure")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert "hf_paged/kernels/native/blocks.c" in names and not any(name.endswith(".so") for name in names)


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    assert make_wheel(tmp_path, CC="no-such-compiler").name.endswith("-py3-none-any.whl")
