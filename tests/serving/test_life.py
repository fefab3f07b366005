"""The life of requests and of the server: clients that go, readers that are slow, pauses, ends and deaths."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import hf_paged
from hf_paged.serving.settings import Limits
from tests.serving.harness import NAME, QA, Ended, Running, serving
from tests.waiting import Gate, until

ROOT = Path(hf_paged.__file__).parent.parent
PROMPT = "A list is"
LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "one": {}, "samples": {"n": 4, "temperature": 1.0}, "beams": {"n": 4, "use_beam_search": True},
    "prompts": {"prompt": ["one", "two", "three"]},
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [0, 1, 7])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_no_block(server: Running, kind: str, steps: int, stream: bool) -> None:
    """`steps` steps have ended and the engine is in the middle of another one when the client goes."""
    gate = Gate(server.engine, steps)
    body = httpx.Request("POST", server.url, json={**LONG, **KINDS[kind], "stream": stream}).content
    with Ended("status='disconnected'") as ended:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            if stream:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            gate.wait()
        ended.wait()
    gate.open()
    server.assert_idle()


# -- pauses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause(server: Running, mode: str) -> None:
    worker = server.service.worker
    alone = server.post("/v1/completions", **{**LONG, "max_tokens": 60}).json()["choices"][0]["text"]
    gate = Gate(server.engine, 1)
    stream = server.client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(stream)
    gate.wait()
    pausing = server.beside(server.http.post, "/pause", params={"mode": mode})
    server.await_command()
    gate.open()
    assert pausing.result(120).json() == {"status": "paused"}
    assert worker.num_in_flight == (1 if mode == "keep" else 0)
    steps = server.call(lambda engine: engine.stats().steps)
    late = server.beside(server.post, "/v1/completions", prompt=PROMPT, max_tokens=3)
    until(lambda: worker.num_in_flight == (2 if mode == "keep" else 1))
    assert server.http.get("/health").status_code == 200
    assert server.call(lambda engine: (engine.stats().num_waiting, engine.stats().steps)) == (1, steps)
    assert server.http.post("/resume").json() == {"status": "resumed"}
    if mode == "abort":
        with pytest.raises(openai.APIError, match="aborted"):
            list(stream)
    else:
        assert first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream) == alone
    assert late.result(120).json()["usage"]["completion_tokens"] == 3


def test_a_pause_delivers_what_has_ended(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = server.service.worker
    monkeypatch.setattr(worker, "_tell", lambda *_, **__: None)  # what is planned for later comes too late
    answer = server.beside(server.post, "/v1/completions", prompt=PROMPT, max_tokens=3)
    until(lambda: worker.num_in_flight == 1)
    assert server.http.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
    assert worker.num_in_flight == 0 and answer.result(120).status_code == 200
    server.http.post("/resume")


def test_a_pause_whose_caller_has_gone(server: Running) -> None:
    gate = Gate(server.engine, 0)
    stream = server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, stream=True)
    pause = server.on_loop(server.service.worker.pause("wait"))
    begun = server.on_loop(server.service.worker.call(lambda engine: None))  # after the pause, between the same steps
    until(lambda: server.engine._calls or begun.done())
    gate.pass_on(1)
    begun.result(120)
    pause.cancel()
    gate.open()
    assert list(stream)
    assert server.http.post("/resume").status_code == 200
    assert server.post("/v1/completions", prompt=PROMPT, max_tokens=2).status_code == 200


def test_a_pause_in_place_of_one_that_waits(server: Running) -> None:
    gate = Gate(server.engine, 0)
    stream = server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, stream=True)
    ended = server.beside(server.http.post, "/pause", params={"mode": "wait"})
    until(lambda: server.engine.is_halted)
    server.http.post("/resume")
    assert ended.result(120).json()["error"]["code"] == "resumed"
    first = server.on_loop(server.service.worker.pause("wait"))
    second = server.on_loop(server.service.worker.pause("keep"))
    until(lambda: server.engine.is_halted and server.engine._halt_mode == "keep")
    gate.open()
    first.result(120), second.result(120)
    answer = server.http.get("/ready")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "paused"
    server.service._is_suspect = True  # tried after the pause
    assert server.http.get("/health").status_code == 200
    server.http.post("/resume")
    assert list(stream) and server.http.get("/ready").status_code == server.http.get("/health").status_code == 200
    assert not server.service._is_suspect


def test_routes_that_change_the_server_are_off_by_default() -> None:
    with serving() as running:
        for path, body in {
            "/pause": None, "/resume": None, "/reset_prefix_cache": None, "/update_weights": {"path": "a"},
            "/abort_requests": {}, "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "b"},
            "/v1/unload_lora_adapter": {"lora_name": "a"},
        }.items():  # fmt: skip
            answer = running.http.post(path, json=body)
            assert answer.status_code == 403 and "--admin-key" in answer.json()["error"]["message"]


# -- errors --------------------------------------------------------------------------------------------------------


def test_a_request_that_fails_fails_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.serving.processors import OccurrencePenalty

    def broken(self: Any, ids: Any, scores: Any) -> Any:
        raise RuntimeError("a broken processor")

    gate = Gate(server.engine, 0)
    good = server.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=8, stream=True)
    monkeypatch.setattr(OccurrencePenalty, "__call__", broken)
    gate.open()
    with Ended("failed", "a broken processor") as logged:
        answer = server.post("/v1/completions", prompt=PROMPT, presence_penalty=1.0)
        logged.wait()
    assert "in broken\n" in logged.traces[0]  # where it was raised
    assert answer.status_code == 500 and "a broken processor" in answer.json()["error"]["message"]
    with pytest.raises(openai.APIError, match="a broken processor"):
        list(server.client.completions.create(model=NAME, prompt=PROMPT, presence_penalty=1.0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in good)


def test_an_engine_that_dies() -> None:
    with serving() as running:
        gate = Gate(running.engine, 2)

        def die() -> Any:
            raise RuntimeError("out of order")

        asked = {k: v for k, v in LONG.items() if k != "ignore_eos"}
        stream = running.client.completions.create(model=NAME, **asked, stream=True)
        next(stream)
        gate.wait()
        running.engine.step = die
        end = running.service.on_death
        died: Future[BaseException] = Future()
        running.service.on_death = died.set_result
        gate.open()
        with pytest.raises(openai.APIError, match="out of order"):
            list(stream)
        error = died.result(120)
        health = running.http.get("/health")
        assert health.status_code == 503 and "out of order" in health.json()["error"]["message"]
        assert running.post("/v1/completions", prompt=PROMPT).status_code == 503
        assert {running.http.get(path).status_code for path in ("/ready", "/metrics")} == {503}
        end(error)
        running.thread.join(120)
        assert not running.thread.is_alive()


def test_a_deadline() -> None:
    """In the middle of a step, and while the server is paused."""
    with serving(admin=True, limits=Limits(request_seconds=0.05)) as running:
        gate = Gate(running.engine, 0)
        with pytest.raises(openai.APIError, match="longer than the server allows"):
            list(running.client.completions.create(model=NAME, prompt=PROMPT, stream=True))
        gate.open()
        running.http.post("/pause", params={"mode": "keep"})
        answer = running.post("/v1/completions", prompt=PROMPT)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline"
        running.http.post("/resume")
        running.assert_idle()


@contextmanager
def started(*argv: str, code: str = "", log: list[str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, with code that runs before it; and its address. log: gets its further lines."""
    arguments = ["serve", QA, "--port", "0", *argv]
    script = f"import sys\n{code}\nfrom hf_paged.cli.main import main\nsys.exit(main({arguments!r}))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        try:
            line = next((each for each in process.stderr if "running on" in each), None)
            assert line is not None, f"the server has not started: exit status {process.wait(120)}"
            threading.Thread(target=([] if log is None else log).extend, args=(process.stderr,), daemon=True).start()
            yield process, line.split("running on ")[1].split()[0]
        finally:
            process.kill()


@pytest.mark.slow
def test_the_exit_status_tells_of_a_dead_engine() -> None:
    code = (
        "from hf_paged.generation.engine.engine import Engine\n"
        "def step(self):\n    raise RuntimeError('out of order')\n"
        "Engine.step = step"
    )
    with started(code=code) as (process, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": PROMPT}, timeout=120)
        assert answer.status_code == 503 and "out of order" in answer.json()["error"]["message"]
        assert process.wait(120) == 1


@pytest.mark.slow
def test_signals_after_the_third_leave_the_exit_status() -> None:
    """They come while the process ends, which here takes until all of them have been sent."""
    code = "import atexit, sys\natexit.register(sys.stdin.read)\n"  # until the end of its input
    log: list[str] = []
    with started("--drain-seconds", "200", code=code, log=log) as (process, url):
        connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        for words in ("draining", "ending", "Finished"):
            process.send_signal(signal.SIGTERM)
            until(lambda words=words: any(words in line for line in log))
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
    assert not any("Traceback" in line for line in log)
