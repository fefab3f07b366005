"""`hf-paged run`: other programs with hf_paged in them; and calls of generate that are paged by default."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged.cli.common import UsageError
from hf_paged.cli.run import resolved
from tests import conftest, models
from tests.architectures.tiny import tiny_model

SAY = "from hf_paged import plugin as h; print(h.is_installed(), h.is_default(), h.is_serving_installed())"


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_paged.__file__).parent.parent), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "hf_paged.cli", "run", *words], capture_output=True, text=True, env=environment,
        **options,
    )  # fmt: skip


def test_exit_status_arguments_and_standard_input_are_the_programs_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{SAY}\nprint(sys.argv[1:], input(), __name__)\nsys.exit(7)\n")
    done = run(str(script), "--default", "-x", "a b", input="typed\n")
    assert done.returncode == 7 and not done.stderr
    assert done.stdout.splitlines() == ["True False False", "['--default', '-x', 'a b'] typed __main__"]


def test_options_reach_the_program_and_its_children() -> None:
    child = f"import subprocess, sys; {SAY}; sys.stdout.flush(); subprocess.run([sys.executable, '-c', {SAY!r}])"
    done = run("--default", "--serving", "python", "-c", child)
    assert done.stdout.splitlines() == ["True True True"] * 2, done.stderr


def test_a_signal_ends_it_as_it_would_end_the_program() -> None:
    done = run("python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert done.returncode == -signal.SIGTERM


def test_console_scripts_and_modules(tmp_path: Path) -> None:
    assert run("hf-paged", "--version").stdout == f"hf-paged {hf_paged.__version__}\n"
    # A command in it is no rank.
    asks = "from hf_paged.cli.ranks import is_first_rank, is_rank; print(is_rank(), is_first_rank())"
    (tmp_path / "a_module.py").write_text(f"{SAY}\n{asks}")
    assert run("python", "-m", "a_module", cwd=tmp_path).stdout == "True False False\nFalse True\n"


def test_another_sitecustomize_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('another')")
    paths = os.pathsep.join([str(tmp_path), str(Path(hf_paged.__file__).parent.parent)])
    done = run("python", "-c", SAY, env={"PYTHONPATH": paths})
    # It runs for hf-paged itself, and then for the program.
    assert done.stdout.splitlines() == ["another", "another", "True False False"], done.stderr


def test_a_python_without_hf_paged_is_an_error_and_in_a_child_a_warning(tmp_path: Path) -> None:
    (tmp_path / "hf_paged.py").write_text("raise ImportError('not here')")
    boot = str(Path(hf_paged.__file__).parent / "cli" / "boot")
    code = "import os, sys; print('runs')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([boot, str(tmp_path)]), "HF_PAGED_RUN": "install"}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert child.returncode == 0 and child.stdout == "runs\n" and "no hf_paged in" in child.stderr
    words = [sys.executable, "-c", code]
    script = f"import os; os.environ['HF_PAGED_RUN_PID'] = str(os.getpid()); os.execv({sys.executable!r}, {words!r})"
    first = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, env=environment)
    assert first.returncode == 1 and not first.stdout and "no hf_paged in" in first.stderr


def test_what_cannot_be_run() -> None:
    for words, message in (
        (["no-such-command"], "there is no command no-such-command"),
        (["no-such-file.py"], "there is no file no-such-file.py"),
        (["python", "-I", "x.py"], "python -I ignores the environment"),
        (["python", "-u", "-W", "ignore", "-SE", "x.py"], "python -SE ignores the environment"),
    ):
        with pytest.raises(UsageError, match=message):
            resolved(words)


def test_what_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(["python3", "-c", "pass", "-I"]) == [sys.executable, "-c", "pass", "-I"]
    assert resolved(["python", "-Wignore", "x.py", "-S"]) == [sys.executable, "-Wignore", "x.py", "-S"]
    tool = tmp_path / "a-tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert resolved([str(tool), "x"]) == [str(tool), "x"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolved(["a-tool", "x"]) == [str(tool), "x"]


@pytest.fixture
def by_default() -> Iterator[None]:
    hf_paged.install(default=True)
    yield
    hf_paged.install(default=False)
    assert conftest.blocks_in_use() == 0


def test_calls_that_name_no_cache_are_paged(by_default: None) -> None:
    model, inputs = models.shared("llama"), models.batch(5, 9)
    options = {"max_new_tokens": 6, "do_sample": False}
    hf_paged.install(default=False)
    plain = model.generate(**inputs, **options)
    hf_paged.install(default=True)
    hf_paged.install()  # changes nothing
    with hf_paged.record_calls() as records:
        assert torch.equal(model.generate(**inputs, **options), plain)
        assert len(records) == 1 and records[0].route == "packed"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for other in ({"cache_implementation": "dynamic"}, {"use_cache": False}):
                assert torch.equal(model.generate(**inputs, **options, **other), plain)
            named = GenerationConfig(**options, pad_token_id=models.PAD, cache_implementation="dynamic")
            by_position = model.generate(inputs["input_ids"], named, attention_mask=inputs["attention_mask"])
            assert torch.equal(by_position, plain)
        assert len(records) == 1


def test_a_call_that_cannot_be_paged_runs_as_before_after_a_warning(by_default: None) -> None:
    model = tiny_model("mamba2")
    ids = torch.tensor([[5, 6, 7]])
    with hf_paged.record_calls() as records, pytest.warns(RuntimeWarning, match="Mamba2.* runs without a paged cache"):
        paged = model.generate(ids, max_new_tokens=4)
    hf_paged.install(default=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4), paged) and not records


def test_uninstalling_ends_the_default(by_default: None) -> None:
    hf_paged.uninstall()
    hf_paged.install()
    model, inputs = models.shared("llama"), models.batch(5, 9)
    with hf_paged.record_calls() as records, warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**inputs, max_new_tokens=2)
    assert not records
    with pytest.raises(ValueError, match="default='yes'"):
        hf_paged.install(default="yes")  # type: ignore[arg-type]


def test_a_model_with_states_by_default(by_default: None) -> None:
    """What the trial of such a model calls is plain `generate`."""
    model, ids = tiny_model("lfm2"), torch.tensor([[5, 6, 7]])
    with hf_paged.record_calls() as records:
        paged = model.generate(ids, max_new_tokens=4)
    assert [record.route for record in records] == ["packed"]
    hf_paged.install(default=False)
    assert torch.equal(model.generate(ids, max_new_tokens=4), paged)
