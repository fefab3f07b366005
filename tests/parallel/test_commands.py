"""`--tensor-parallel-size`: the commands start their own ranks, and leave none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from hf_paged.cli import generate
from hf_paged.cli.main import main
from tests.parallel.server import (
    CHECKPOINT,
    ROOT,
    command,
    is_loopback,
    listening,
    names_of_threads,
    serving,
    signal_group,
)
from tests.waiting import until


def test_what_is_refused_before_ranks_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", CHECKPOINT, "x", "--tensor-parallel-size", "2", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "--tensor-parallel-size 2 with --device cpu" in error and error.count("\n") == 1


@pytest.mark.slow
def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second rank gets the first one's questions. Exit functions run, without the interpreter's end: `end_rank`."""
    questions = ["What is a list?", "Explain str.join."]
    arguments = ["generate", CHECKPOINT, "--dtype", "float32", "--json", "--no-stats", "--max-new-tokens", "24"]
    arguments += ["--do-sample", "--seed", "3", "--num-return-sequences", "2"]
    (tmp_path / "sitecustomize.py").write_text(INTERPRETER_ENDS)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        command(*arguments, "--tensor-parallel-size", "2"),
        capture_output=True,
        text=True,
        input="".join(f"{question}\n" for question in questions),
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert result.returncode == 0, result.stderr
    ends = [line for line in result.stderr.splitlines() if line.startswith("end of ")]
    assert sorted(ends) == ["end of launcher", "end of launcher's interpreter", "end of rank 0", "end of rank 1"]
    assert main([*arguments, *questions]) == 0
    answers = [list(map(json.loads, text.splitlines())) for text in (result.stdout, capsys.readouterr().out)]
    assert len(answers[0]) == 2
    assert answers[0] == answers[1]


def test_without_a_seed_the_ranks_sample_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int | None] = []
    monkeypatch.setattr(generate, "_load", lambda *_: None)
    monkeypatch.setattr(generate, "_run", lambda call, loaded, seed, stats: seeds.append(seed) or 0)
    monkeypatch.setattr(generate, "on_ranks", lambda size, work, **_: work())
    monkeypatch.setattr(generate, "check_tensor_parallel", lambda *_: None)
    for run in ("1-a", "1-a", "2-b"):
        monkeypatch.setenv("HF_PAGED_RANKS", run)
        assert main(["generate", CHECKPOINT, "x", "--do-sample", "--tensor-parallel-size", "2"]) == 0
    assert seeds[0] == seeds[1] != seeds[2] and None not in seeds


@pytest.mark.slow
def test_a_program_that_does_not_close_its_engine(tmp_path: Path) -> None:
    """It says so on all ranks, and torch aborts none."""
    (tmp_path / "program.py").write_text(UNCLOSED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "program.py")]
    result = subprocess.run(
        torchrun, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 1 and "status 0 of main" in result.stdout
    assert result.stderr.count("rank 0 ends without closing its engine") > 1 and "terminate called" not in result.stderr


UNCLOSED = f"""
import sys
import hf_paged
from hf_paged.cli.main import main
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

print("status", main(["--version"]), "of main", flush=True)  # which ends no rank
model = AutoModelForCausalLM.from_pretrained({CHECKPOINT!r}, distributed_config=DistributedConfig(tp_size=2))
engine = hf_paged.Engine(model)
if engine.is_driver:
    engine.generate([[1, 2, 3]], GenerationConfig(max_new_tokens=4), progress=False)
    sys.exit(5)
engine.run_worker()
"""


INTERPRETER_ENDS = """
import atexit, os, sys
name = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "launcher"
atexit.register(os.write, 2, f"end of {name}\\n".encode())


class Last:
    def __del__(self, write=os.write):
        write(2, f"end of {name}'s interpreter\\n".encode())


last = Last()
"""


@pytest.mark.slow
def test_serve(tmp_path: Path) -> None:
    """It answers on the loopback alone and ends without an error; for the threads see `use_gloo_of_one_thread`."""
    with serving(tmp_path, "--admin-key", "key") as server:
        question = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8, "model": CHECKPOINT}
        assert server.request("/v1/chat/completions", question)["usage"]["completion_tokens"] > 0
        with pytest.raises(urllib.error.HTTPError, match="400"):
            server.request("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"})
        addresses = [listening(pid) for pid in (server.process.pid, *(each.pid for each in server.family))]
        assert len([each for each in addresses if each]) >= 2, "each rank listens for the other one"
        assert all(is_loopback(address) for each in addresses for address in each), addresses
        for rank in (0, 1):
            threads = names_of_threads(server.rank(rank).pid)
            assert threads.count("pt_gloo_runloop") == threads.count("gloo_tcp_loop") > 0, threads
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


KILLED = 128 + signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("is_loaded", [False, True], ids=["idle", "loaded"])
@pytest.mark.parametrize("end, statuses", [
    ("rank 0 killed", {KILLED}), ("rank 1 killed", {KILLED}), ("rank 0 stopped", {1, KILLED}),
    ("rank 1 stopped", {1, KILLED}), ("rank 1 stopped, then SIGTERM", {1, KILLED}),
    ("launcher killed", {-signal.SIGKILL}), ("SIGTERM to the group", {0}), ("SIGINT to the group", {0}),
])  # fmt: skip
def test_every_end(end: str, statuses: set[int], is_loaded: bool, tmp_path: Path) -> None:
    """Requests end, /health no longer says that all is well, the status tells of a failure, and nothing is left."""
    with serving(tmp_path) as server:
        if is_loaded:
            server.load(2)
        what, _, rest = end.partition(" to the group")
        if rest or end.startswith("SIG"):
            signal_group(server.process, signal.Signals[what])
        elif end == "launcher killed":
            server.process.kill()
        else:
            number = signal.SIGKILL if end.endswith("killed") else signal.SIGSTOP
            server.rank(int(end[5])).send_signal(number)
        if end.endswith("then SIGTERM"):
            server.process.terminate()
        until(lambda: not server.is_healthy())
        assert server.wait() in statuses
        server.await_errors()
