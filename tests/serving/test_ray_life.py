"""`hf-paged serve --replicas` on a cluster: faults of its processes, two applications beside each other, their ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.server_process import CHECKPOINT, serving
from tests.parallel.ranks import free_port
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra `ray`")]
LONG = {"prompt": "A list", "max_tokens": 1000, "ignore_eos": True, "n": 4, "temperature": 1.0}
SMALL = ("--kv-cache-memory", "16MiB", "--dtype", "float32")


def ask(url: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any, list[str]]:
    """Status, answer and the values of X-Request-Id."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=300) as answer:
            return answer.status, json.load(answer), answer.headers.get_all("x-request-id")
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers.get_all("x-request-id")


def complete(url: str, count: int = 4) -> int:
    return ask(url, "/v1/completions", {"prompt": "A list", "max_tokens": count, "ignore_eos": True})[0]


class Beside:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=lambda: setattr(self, "result", call()), daemon=True)
        self._thread.start()

    def join(self) -> Any:
        self._thread.join(300)
        assert not self._thread.is_alive(), "a request has not ended"
        return self.result


def processes(pid: int, kind: str) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if f":{kind}" in " ".join(each.cmdline()):
                found.append(each)
    return found


def test_faults() -> None:
    """The ingress is killed, a replica freezes, and a signal to all processes ends the server when its request has."""
    with serving("--replicas", "2", "--drain-seconds", "120", *SMALL) as server:
        status, _, ids = ask(server.url, "/v1/models")
        assert status == 200 and len(ids) == 1

        running = Beside(lambda: ask(server.url, "/v1/completions", LONG))
        assert complete(server.url) == 200  # and the longer one, which came before, runs
        (ingress,) = processes(server.pid, "ingress")
        ingress.kill()
        status, answer, ids = running.join()
        assert status == 503 and answer["error"]["code"] == "proxy" and len(ids) == 1
        assert complete(server.url) == 200

        frozen, other = processes(server.pid, "engine")
        frozen.send_signal(signal.SIGSTOP)
        assert [each.join() for each in [Beside(lambda: complete(server.url)) for _ in range(4)]] == [200] * 4
        until(lambda: not frozen.is_running())
        until(lambda: len(processes(server.pid, "engine")) == 2)
        assert other in processes(server.pid, "engine")

        running = Beside(lambda: ask(server.url, "/v1/completions", LONG))
        assert complete(server.url) == 200  # and the longer one, which came before, runs
        family = psutil.Process(server.pid).children(recursive=True)
        for each in [psutil.Process(server.pid), *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGTERM)
        until(lambda: ask(server.url, "/v1/models")[0] != 200)
        status, answer, _ = ask(server.url, "/v1/models")
        assert status == 503 and answer["error"]["code"] == "draining"
        assert running.join()[0] == 200
    assert server.status == 0, "".join(server.lines[-30:])
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_a_cluster_that_dies() -> None:
    """Its server ends with an error, and so do its requests and processes."""
    name = "raylet"
    with serving("--replicas", "1", *SMALL) as server:
        assert complete(server.url) == 200
        running = Beside(lambda: fails(server.url))
        assert complete(server.url) == 200
        family = psutil.Process(server.pid).children(recursive=True)
        (found,) = (each for each in family if each.name() == name)
        found.kill()
        assert running.join()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    assert server.status == 1 and any(f"{name} has ended" in line for line in server.lines)


def fails(url: str) -> bool:
    while True:
        try:
            if ask(url, "/v1/completions", LONG)[0] != 200:
                return True
        except OSError:
            return True


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of its own."""
    port = free_port()
    options = f"--port {port} --num-cpus 4 --include-dashboard false --object-store-memory 80000000"
    options += f" --dashboard-agent-listen-port {free_port()} --node-ip-address 127.0.0.1"
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options.split()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "RAY_AUTH_MODE": "disabled"}
    ) as head:
        assert head.stdout is not None
        try:
            next(line for line in head.stdout if "Ray runtime started" in line)
            threading.Thread(target=head.stdout.read, daemon=True).start()
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            yield f"127.0.0.1:{port}"
        finally:
            family = psutil.Process(head.pid).children(recursive=True)
            for each in [psutil.Process(head.pid), *family]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def refused(*options: str) -> str:
    command = [sys.executable, "-m", "hf_paged.cli", "serve", str(CHECKPOINT), "--replicas", "1", *SMALL, *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    return result.stderr.splitlines()[-1]


def test_two_applications(cluster: str) -> None:
    """Neither replaces, opens or ends the other one; the same command starts again."""
    port = str(free_port())
    first_options = ("--replicas", "1", *SMALL, "--api-key", "first", "--served-model-name", "one")
    with serving(*first_options, "--port", port) as first:
        assert f":{port}" in first.url
        assert "is being used by application" in refused("--port", port)
        assert f"listens on 127.0.0.1:{port}" in refused("--port", str(int(port) + 1), "--route-prefix", "/two")
        assert f"listens on 127.0.0.1:{port}" in refused(
            "--host", "0.0.0.0", "--api-key", "k", "--route-prefix", "/two"
        )
        with serving("--replicas", "1", *SMALL, "--port", port, "--route-prefix", "/two") as second:
            assert second.url == f"{first.url}/two"
            assert ask(first.url, "/v1/models")[0] == 401
            assert ask(first.url, "/v1/models", key="first")[1]["data"][0]["id"] == "one"
            assert ask(second.url, "/v1/models")[1]["data"][0]["id"] == str(CHECKPOINT)
            assert complete(second.url) == 200
        assert second.status == 0, "".join(second.lines[-30:])
        assert ask(first.url, "/v1/models", key="first")[0] == 200
    assert first.status == 0, "".join(first.lines[-30:])
    with serving(*first_options, "--port", port) as again:
        assert ask(again.url, "/v1/models", key="first")[0] == 200
    assert again.status == 0, "".join(again.lines[-30:])


def test_another_program_ends_serve(cluster: str) -> None:
    shut_down = f"import ray; from ray import serve; ray.init({cluster!r}, log_to_driver=False); serve.shutdown()"
    with serving("--replicas", "1", *SMALL, "--port", str(free_port())) as server:
        assert complete(server.url) == 200
        subprocess.run([sys.executable, "-c", shut_down], check=True, capture_output=True)
        until(lambda: not psutil.pid_exists(server.pid) or psutil.Process(server.pid).status() == psutil.STATUS_ZOMBIE)
    assert server.status == 1 and any("the application" in line for line in server.lines), server.lines[-10:]
