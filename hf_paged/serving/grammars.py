"""Compiled grammars for requests.

A grammar comes from a client, and may be made to take for ever, to use up the memory, or to crash what compiles it. So
a process of its own compiles it first, under limits. (It does not send the result: writing and reading that may take
many times as long as compiling again.)
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from hf_paged.generation.sampling.constraints import Constraint, check_installed, key_of
from hf_paged.generation.sampling.grammar import Vocabulary
from hf_paged.serving import compiler_process
from hf_paged.serving.problems import Problem, not_served

log = logging.getLogger("hf_paged.serving")

_AT_ONCE = 2  # grammars that are compiled at the same time
_MAX_WAITING = 64
_MEMORY = 2**30  # bytes that compiling may take
_START_SECONDS = 120.0  # importing torch, on a busy machine
_GRACE_SECONDS = 10.0  # until a child that the kernel should have ended is given up


class Grammars:
    """Those of one vocabulary. Used on the event loop."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, max_bytes: int, seconds: float) -> None:
        """vocabulary: makes it, or finds it; takes a second. max_bytes: of a constraint as JSON. seconds: of processor
        time, to compile one; 0: none is compiled."""
        self._new_vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._vocabulary: Vocabulary | None = None  # when it has been needed
        self._process = CompilerProcess(vocabulary, seconds)
        self._threads = ThreadPoolExecutor(_AT_ONCE, "hf-paged-grammars")
        self._num_waiting = 0

    async def compiled(self, constraint: Constraint) -> Any:
        """The `xgrammar.CompiledGrammar`. Raises Problem for one that cannot be used, or not now."""
        self._check(key_of(constraint))
        known = None if self._vocabulary is None else self._vocabulary.known(constraint)
        if known is not None:
            return known
        if self._num_waiting >= _MAX_WAITING:
            raise Problem(
                429, f"{_MAX_WAITING} grammars are being compiled", code="queue_full", headers={"retry-after": "1"}
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, constraint)
        except ValueError as error:
            raise _refused(str(error)) from error
        except (RuntimeError, OSError) as error:
            log.exception("the process that compiles grammars does not run")
            raise Problem(
                503,
                "grammars cannot be compiled now; the server's log says why",
                code="no_compiler",
                headers={"retry-after": "10"},
            ) from error
        finally:
            self._num_waiting -= 1

    def _compile(self, constraint: Constraint) -> Any:
        self._vocabulary = self._new_vocabulary()
        if self._vocabulary.known(constraint) is None:
            self._process.check(constraint)
        return self._vocabulary.compiled(constraint)

    def _check(self, key: str) -> None:
        if not self._seconds:
            raise not_served("schemas, grammars and forced tool calls are switched off here", param="response_format")
        try:
            check_installed()
        except ImportError as error:
            raise not_served(str(error), param="response_format") from error
        if len(key.encode()) > self._max_bytes:
            raise _refused(f"it has more than the {self._max_bytes} bytes that a request's grammar may have")

    def close(self) -> None:
        """Waits for what is being compiled, which the limit of time bounds."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._process.close()


class CompilerProcess:
    """The process that compiles grammars, started when it is needed first. Used from any thread; its methods wait."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], seconds: float) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._lock = threading.Lock()  # guards the following
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def check(self, constraint: Constraint) -> None:
        """Raises ValueError for a constraint that cannot be compiled within the limits."""
        job = {"constraint": constraint, "seconds": self._seconds, "memory": _MEMORY}
        answer = b""
        with self._connection() as connection, suppress(TimeoutError, ConnectionError):
            connection.settimeout(compiler_process.LONGEST * self._seconds + _GRACE_SECONDS)
            compiler_process.send_frame(connection, json.dumps(job).encode())
            answer = compiler_process.receive_frame(connection)
        status, message = answer[:1], answer[1:].decode(errors="replace")
        if status == compiler_process.ERROR:
            raise ValueError(message)
        if status != compiler_process.OK:
            raise ValueError(f"it could not be compiled within {self._seconds:g} seconds and {_MEMORY >> 20} MiB")

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _connection(self) -> socket.socket:
        """One to a child of the process, which is started if it does not run."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                try:
                    socket.send_fds(self._running(), [b"j"], [theirs.fileno()])
                except OSError:  # it has ended
                    self._stop()
                    socket.send_fds(self._running(), [b"j"], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        return ours

    def _running(self) -> socket.socket:
        """The connection to the process."""
        if self._control is not None:
            return self._control
        control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", compiler_process.__name__, str(theirs.fileno())]
            # A session of its own: Ctrl-C ends the server, which ends this process when it has no more requests.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._control = control
        control.settimeout(_START_SECONDS)
        compiler_process.send_frame(control, self._vocabulary().info.serialize_json().encode())
        if control.recv(1) != compiler_process.READY:
            self._stop()
            raise RuntimeError("the process that compiles grammars did not start; its own message is above")
        log.info("grammars are compiled by process %d", self._process.pid)
        return control

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def _refused(why: str) -> Problem:
    return Problem(400, f"the grammar of this request is refused: {why}", code="invalid_grammar")
