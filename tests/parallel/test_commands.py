"""`--tensor-parallel-size`: the commands start their own ranks, and leave none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
from pathlib import Path

import pytest

from tests.parallel.server import CHECKPOINT, command, is_loopback, listening, names_of_threads, serving, signal_group
from tests.waiting import until


def test_what_is_refused_before_ranks_start() -> None:
    refused = command("generate", CHECKPOINT, "x", "--tensor-parallel-size", "2", "--device", "cpu")
    result = subprocess.run(refused, capture_output=True, text=True)
    assert result.returncode == 2
    assert "--tensor-parallel-size 2 with --device cpu" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["prompts", "standard input", "sampling"])
def test_generate(way: str) -> None:
    questions = ["What is a list?", "Explain str.join."]
    arguments = ["generate", CHECKPOINT, "--dtype", "float32", "--json", "--no-stats"]
    if way != "standard input":
        arguments += questions
    if way == "sampling":
        arguments += ["--do-sample", "--seed", "3", "--num-return-sequences", "2"]
    answers = []
    for size in ("1", "2"):
        result = subprocess.run(
            command(*arguments, "--tensor-parallel-size", size),
            capture_output=True,
            text=True,
            input="".join(f"{question}\n" for question in questions) if way == "standard input" else None,
        )
        assert result.returncode == 0, result.stderr
        answers.append([json.loads(line) for line in result.stdout.splitlines()])
    assert len(answers[0]) == 2
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_without_a_seed_the_ranks_sample_alike() -> None:
    drawn = command("generate", CHECKPOINT, "What is a list?", "--do-sample", "--tensor-parallel-size", "2")
    result = subprocess.run(drawn, capture_output=True, text=True)
    assert result.returncode == 0 and "tokens" in result.stdout, result.stderr


@pytest.mark.slow
def test_ranks_end_without_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """Which would abort one of them now and then: see `end_rank`. Exit functions run."""
    (tmp_path / "sitecustomize.py").write_text(INTERPRETER_ENDS)
    generating = command("generate", CHECKPOINT, "What is a list?", "--tensor-parallel-size", "2")
    result = subprocess.run(generating, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0, result.stderr
    ends = [line for line in result.stderr.splitlines() if line.startswith("end of ")]
    assert sorted(ends) == ["end of launcher", "end of launcher's interpreter", "end of rank 0", "end of rank 1"]


INTERPRETER_ENDS = """
import atexit, os, sys
name = f"rank {os.environ['RANK']}" if "RANK" in os.environ else "launcher"
atexit.register(os.write, 2, f"end of {name}\\n".encode())


class Last:
    def __del__(self, write=os.write):
        write(2, f"end of {name}'s interpreter\\n".encode())


last = Last()
"""


# -- a server ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_serve(tmp_path: Path) -> None:
    """It answers, every socket of its processes is on the loopback, and it ends without an error.

    Each group of gloo, which has one thread for its sockets, has one for its operations: see `use_gloo_of_one_thread`.
    """
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
@pytest.mark.parametrize(
    "end, statuses",
    [
        ("rank 0 killed", {KILLED}),
        ("rank 1 killed", {KILLED}),
        ("rank 0 stopped", {1, KILLED}),
        ("rank 1 stopped", {1, KILLED}),
        ("rank 1 stopped, then SIGTERM", {1, KILLED}),
        ("launcher killed", {-signal.SIGKILL}),
        ("SIGTERM to the group", {0}),
        ("SIGINT to the group", {0}),
    ],
)
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
