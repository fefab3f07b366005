"""scripts/gpu_check.sh: without a device it fails at once and says why, and its report shows failures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged.fused.gpu.kernels import gate
from tests.fused import fewer

ROOT = Path(__file__).resolve().parent.parent
PASSED = '<testcase classname="tests.kernels" name="test_a"/>'
SKIPPED = '<testcase classname="tests.kernels" name="test_s"><skipped message="no"/></testcase>'
FAILED = '<testcase classname="tests.kernels" name="test_b"><failure message="3 != 4">long text</failure></testcase>'


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=550)


def loaded(file: str, patch: pytest.MonkeyPatch) -> Any:
    """A program of the checkout as a module."""
    spec: Any = importlib.util.spec_from_file_location(Path(file).stem + "_of_the_checkout", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def report(patch: pytest.MonkeyPatch, *arguments: str) -> int:
    patch.setattr(sys, "argv", ["gpu_report.py", *arguments])
    return int(loaded("scripts/gpu_report.py", patch).main())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_no_device(tmp_path: Path) -> None:
    done = run("scripts/gpu_check.sh", PYTHON=sys.executable, OUT=str(tmp_path))
    assert done.returncode == 1
    assert "torch sees no CUDA device" in done.stdout
    assert "failed: device; the other parts would show nothing" in done.stdout and "== smoke" not in done.stdout
    assert (tmp_path / "log.txt").read_text() == done.stdout


def test_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cases, status, counts in (
        ((PASSED, SKIPPED), 0, {"passed": 1, "failed": 0, "skipped": 1}),
        ((PASSED, FAILED), 1, {"passed": 1, "failed": 1, "skipped": 0}),
        ((SKIPPED,), 1, {"passed": 0, "failed": 0, "skipped": 1}),
    ):
        (tmp_path / "tests.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        files = (str(tmp_path / "tests.xml"), "--out", str(tmp_path / "tests.json"))
        assert report(monkeypatch, "tests", *files) == status
        result = json.loads((tmp_path / "tests.json").read_text())
        assert {name: result[name] for name in counts} == counts
        assert result["failures"] == ({"tests.kernels::test_b": "3 != 4"} if FAILED in cases else {})


def test_parts_of_llama_left_to_torch_are_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = loaded("scripts/gpu_report.py", monkeypatch)
    out, layers = tmp_path / "layers.json", module.layers
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "layers", "--out", str(out)])
    monkeypatch.setattr(module, "layers", lambda: layers("cpu"))
    assert module.main() == 1  # our kernels compute no layers on a CPU
    assert json.loads(out.read_text()) == {"summary": "the model is on cpu", "left_to_torch": module.LLAMA_PARTS}
    fewer.on_cpu(monkeypatch, by_torch=True)
    assert module.main() == 0 and json.loads(out.read_text())["left_to_torch"] == {}
    monkeypatch.setattr(gate, "gated", lambda *args: torch.zeros(1))
    assert module.main() == 1 and json.loads(out.read_text())["left_to_torch"]["MLP"] == 2
    assert module._lines("layers", json.loads(out.read_text()))[0].startswith(
        "| parts of a Llama of two layers left to torch | 2"
    )


def stand_in(folder: Path, *, script: str) -> dict[str, str]:
    """The environment of a check whose interpreter does what the shell script says instead."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>"$OUT/calls"\n{script}\n')
    python.chmod(0o755)
    return {"PYTHON": str(python), "OUT": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}


def test_a_part_that_fails_is_named_and_others_go_on(tmp_path: Path) -> None:
    done = run("scripts/gpu_check.sh", **stand_in(tmp_path, script='case "$2" in layers) exit 1 ;; esac'))
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "failed: layers"
    calls = (tmp_path / "calls").read_text()
    wanted = ("smoke.py", "decode_step.py", "test_graphs_gpu.py", "kernels.py", "test_swap_gpu.py", "throughput.py")
    assert all(part in calls for part in wanted)


@pytest.mark.slow
def test_the_check_ends_in_time_whatever_hangs(tmp_path: Path) -> None:
    script = 'case "$1" in *smoke.py) trap "" INT TERM; sleep 300 & wait; sleep 300 ;; esac'
    done = run("scripts/gpu_check.sh", DEADLINE="3", LEAST="2", GRACE="1", **stand_in(tmp_path, script=script))
    assert done.returncode == 1 and "== throughput: left out" in done.stdout
    assert done.stdout.splitlines()[-1] == "failed: smoke"


def test_the_shapes_that_are_measured_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded("benchmarks/kernels.py", monkeypatch)
    asked = re.findall(r"'shapes \"([^\"]+)\"", (ROOT / "scripts" / "gpu_check.sh").read_text())
    assert len(asked) >= 5
    assert [name for name in asked if not any(name in shape.name for shape in module.GPU_SHAPES)] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("call", ["first", "second", "prepare"])
def test_dry_run(call: str, tmp_path: Path) -> None:
    """With the image's versions (HF_PAGED_GPU_PYTHON): packed runs, and parts that find files within limits."""
    if "HF_PAGED_GPU_PYTHON" not in os.environ:
        pytest.skip("HF_PAGED_GPU_PYTHON names no interpreter with the versions of the device's image")
    python, cache = os.environ["HF_PAGED_GPU_PYTHON"], tmp_path / "cache"
    done = run(
        "scripts/gpu_check.sh", call, PYTHON=python, OUT=str(tmp_path), TRITON_CACHE_DIR=str(cache), DRY_RUN="1",
        COMMIT="abc", KERNELS=str(tmp_path / "kernels.tar.xz"), PYTHONPATH="",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": native: every layer attends through AttentionInterface" in done.stdout
    if call == "prepare":
        assert 10_000 < (tmp_path / "kernels.tar.xz").stat().st_size < 2**20
        return
    assert "left out" not in done.stdout and "commit abc" in (tmp_path / "table.md").read_text()
    files = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert files == {"log.txt", "results.tar.gz", "table.md"}


@pytest.mark.slow
def test_decode_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a program
    monkeypatch.setitem(sys.modules, "kernels", loaded("benchmarks/kernels.py", monkeypatch))  # not those of tests/
    options = "--model tiny --device cpu --context 20 --steps 6 --batch 3 --profile 3 --no-fuse --no-prepack --json"
    loaded("benchmarks/decode_step.py", monkeypatch).main([*options.split(), str(tmp_path / "step.json")])
    result = json.loads((tmp_path / "step.json").read_text())
    assert result["profiles"][0]["launches_a_layer"] > 1
    assert result["rows"][0]["steps"] == 6 and result["rows"][0]["step_over_read"] > 0
