"""Wheels with native kernels: what `pip wheel` makes, and a process of an installation that has no compiler."""

from __future__ import annotations

import json
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
from hf_paged.kernels.native.toolchain import INSTRUCTION_SETS, ISA, find_toolchain, usable_sets
from tests.once import once

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not native_build.has_compiler() or sys.platform != "linux", reason="needs gcc on Linux"),
]

GENERATE = """
import json, os, pathlib, sys, torch, transformers
for folder, out, settings in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(settings)
        sys.path.insert(0, folder)
        for stream in (1, 2):
            os.dup2(os.open(out, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
        break
    assert os.wait()[1] == 0, pathlib.Path(out).read_text()
else:
    sys.exit()
import hf_paged
from hf_paged.kernels.native import build
torch.manual_seed(0)
config = transformers.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                  num_attention_heads=4, num_key_value_heads=2, initializer_range=0.6)
model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(40, (5, 70))
options = dict(max_new_tokens=9, do_sample=False, attention_mask=torch.ones_like(ids))
plain = model.generate(ids, **options)
assert torch.equal(model.generate(ids, **options, cache_implementation="paged"), plain)
assert str(pathlib.Path(hf_paged.__file__).parents[1]) == folder
print(build.status())
"""
"""For each case a child of one process that has imported torch and transformers, which takes longest."""


def make_wheel(directory: Path, **settings: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(directory), str(ROOT)]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


def generate(cache: Path, cases: dict[str, tuple[Path, dict[str, str]]]) -> dict[str, str]:
    """What processes without a compiler say, of cases of a folder with the package, and of settings."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CC": "no-such-compiler", "OMP_NUM_THREADS": "2"}
    environment = {key: value for key, value in environment.items() if not key.startswith(("HF_PAGED_", "PYTHONPATH"))}
    asked = [(str(folder), str(cache / name), settings) for name, (folder, settings) in cases.items()]
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, json.dumps(asked)], cwd=cache, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: (cache / name).read_text() for name in cases}


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


def test_an_installation_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    """It has kernels, but none of other sources, and none for this very CPU."""
    changed, avx2 = tmp_path / "changed", "avx2" in usable_sets()
    shutil.copytree(installed, changed)
    with (changed / "hf_paged/kernels/native/blocks.c").open("a") as source:
        source.write("\n")
    cases = {"best": (installed, {}), "other sources": (changed, {}), "this CPU": (installed, {ISA: "native"})}
    said = generate(tmp_path, cases | ({"avx2": (installed, {ISA: "avx2"})} if avx2 else {}))
    assert not (tmp_path / "hf_paged").exists()
    for name in ("best", "avx2") if avx2 else ("best",):
        assert said[name].rstrip().endswith(", OpenMP, of the wheel") and "Warning" not in said[name], said[name]
    assert not avx2 or said["avx2"].startswith("native kernels: AVX2, ")
    for name in ("other sources", "this CPU"):
        assert "no native kernels: " in said[name] and "no-such-compiler" in said[name], said[name]


def test_a_pure_wheel(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, HF_PAGED_WHEEL="pure")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert "hf_paged/kernels/native/blocks.c" in names and not any(name.endswith(".so") for name in names)


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    assert make_wheel(tmp_path, CC="no-such-compiler").name.endswith("-py3-none-any.whl")
