"""`--tensor-parallel-size`: the commands start their own ranks, and leave none."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.parallel.ranks import free_port

ROOT = Path(__file__).parent.parent.parent
CHECKPOINT = str(ROOT / "examples/pydoc-lm-qa")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hf_paged.cli", *arguments]


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
@pytest.mark.parametrize("end", ["SIGTERM", "a rank is killed"])
def test_serve(end: str) -> None:
    pytest.importorskip("fastapi")
    port = free_port()
    server = subprocess.Popen(
        command("serve", CHECKPOINT, "--port", str(port), "--tensor-parallel-size", "2", "--admin-key", "key"),
        stderr=subprocess.PIPE,
        text=True,
    )
    family: list[psutil.Process] = []
    try:
        wait_for(server, port)
        question = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 8, "model": CHECKPOINT}
        answer = post(port, "/v1/chat/completions", question)
        assert answer["usage"]["completion_tokens"] > 0
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(port, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"})
        family = psutil.Process(server.pid).children(recursive=True)
        assert len(family) >= 2
        if end == "SIGTERM":
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
        else:
            follower = next(p for p in family if is_rank(p, "1"))
            follower.kill()
            assert server.wait(120) == 128 + signal.SIGKILL
        _, alive = psutil.wait_procs(family, timeout=120)
        assert not alive
    finally:
        if server.poll() is None:
            family += psutil.Process(server.pid).children(recursive=True)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        server.kill()
        server.wait()


def is_rank(process: psutil.Process, rank: str) -> bool:
    return process.environ().get("RANK") == rank and "serve" in process.cmdline()


def wait_for(server: Any, port: int) -> None:
    """Until the server answers, or has ended."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(server.stderr.read())


def post(port: int, path: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)
