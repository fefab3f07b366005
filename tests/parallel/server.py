"""`hf-paged serve --tensor-parallel-size 2` in processes of their own: what they listen on, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from tests.parallel.ranks import free_port
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
CHECKPOINT = str(ROOT / "examples/pydoc-lm-qa")
SHARED_MEMORY = Path("/dev/shm")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hf_paged.cli", *arguments]


def listening(pid: int) -> list[str]:
    """The addresses, in hexadecimal, on which a process listens, TCP over IPv4 and IPv6."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(descriptor))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.append(local.split(":")[0])
    return found


def names_of_threads(pid: int) -> list[str]:
    return [task.read_text().strip() for task in Path(f"/proc/{pid}/task").glob("*/comm")]


def is_loopback(address: str) -> bool:
    words = [int(address[place : place + 8], 16).to_bytes(4, sys.byteorder) for place in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    text = socket.inet_ntop(family, b"".join(words))
    return text.startswith("127.") or text == "::1" or text.startswith("::ffff:127.")


class Server:
    """process: the one that was started. family: the ranks, and what they have started."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port
        self.family: list[psutil.Process] = []
        self.errors: list[str] = []  # of requests in the background, one for each that has ended
        self._threads: list[threading.Thread] = []

    def rank(self, number: int) -> psutil.Process:
        (found,) = (each for each in self.family if each.environ().get("RANK") == str(number) and is_serve(each))
        return found

    def request(self, path: str, body: Any = None, timeout: float = 120) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError, HTTPException):  # the server may be killed while it answers
            return bool(self.request("/health", timeout=5) == {"status": "ok"})
        return False

    def load(self, count: int) -> None:
        """As many requests that end only with the server; returns when they run."""
        body = {"prompt": "A list", "max_tokens": 1000, "ignore_eos": True, "temperature": 1.0, "n": 2}

        def ask() -> None:
            try:
                while True:
                    self.request("/v1/completions", body)
            except (OSError, HTTPException, ValueError) as error:
                self.errors.append(repr(error))

        self._threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        until(lambda: self.running() > 0 or bool(self.errors))
        assert not self.errors, self.errors

    def running(self) -> float:
        headers = {"Authorization": "Bearer key"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("hf_paged:num_requests_running"))

    def await_errors(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert len(self.errors) == len(self._threads), "a request has not ended"

    def wait(self, seconds: float = 120) -> int:
        return self.process.wait(seconds)

    def assert_nothing_left(self) -> None:
        """No process, and no one on its port."""
        _, alive = psutil.wait_procs(self.family, timeout=60)
        assert not alive
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", self.port))


def is_serve(process: psutil.Process) -> bool:
    return "serve" in process.cmdline()


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    """A server with two ranks. folder: for temporary files, of which none may be left."""
    port = free_port()
    arguments = ("serve", CHECKPOINT, "--port", str(port), "--tensor-parallel-size", "2", "--drain-seconds", "4")
    shared = set(SHARED_MEMORY.iterdir())
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command(*arguments, *options), stderr=log, text=True,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
    server = Server(process, port)
    try:
        until(lambda: server.is_healthy() or process.poll() is not None, seconds=600)  # four processes load torch
        assert process.poll() is None, (folder / "log").read_text()
        server.family = psutil.Process(process.pid).children(recursive=True)
        yield server
        server.assert_nothing_left()
        left = [
            each.name for each in folder.iterdir() if not each.name.startswith(("log", "torchinductor"))
        ]  # the latter is torch's cache
        assert not left, left
        own = [x for x in set(SHARED_MEMORY.iterdir()) - shared if x.name.startswith(("torch", "nccl", "sem."))]
        until(lambda: not any(each.exists() for each in own))  # those of a test beside this one go with it
    except BaseException:
        print((folder / "log").read_text())
        raise
    finally:
        if process.poll() is None:
            server.family += psutil.Process(process.pid).children(recursive=True)
        for each in server.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
        process.wait()


def signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    os.killpg(process.pid, number)
