"""The process in which grammars of requests are compiled: `python -m hf_paged.serving.compiler_process FD`.

FD is a socket to the server. The process reads the vocabulary, says that it is ready, and then forks a child for each
job. A child has a connection of its own, and limits of time and memory that the kernel enforces: whatever a grammar
does to it, the server gets an answer, which says whether the grammar can be used, or the end of the connection.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hf_paged.generation.sampling.constraints import Constraint, compiled

READY = b"r"
OK, ERROR = b"k", b"e"  # how an answer begins; a message follows

LONGEST = 5
"""How many times as long a job may take, on a busy machine, as it may use the processor."""

_STACK = 4 * 2**20  # bytes
_STEPS = 128  # tokens of the trial


def send_frame(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack("<Q", len(data)) + data)


def receive_frame(connection: socket.socket) -> bytes:
    """Empty if the other side is gone."""
    head = _receive(connection, 8)
    return _receive(connection, struct.unpack("<Q", head)[0]) if head else b""


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(count - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return bytes(data)


def main(control: socket.socket) -> None:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(receive_frame(control).decode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    control.sendall(READY)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            try:
                control.close()
                _work(socket.socket(fileno=descriptors[0]), info)
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _work(connection: socket.socket, info: Any) -> None:
    job = json.loads(receive_frame(connection))
    _limit(job["seconds"], job["memory"])
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)  # xgrammar's warnings would fill the server's log
    try:
        _compile(job["constraint"], info)
        answer = OK
    except (ValueError, RuntimeError, TypeError, MemoryError, RecursionError) as error:
        answer = ERROR + str(error or type(error).__name__).encode()
    send_frame(connection, answer)


def _limit(seconds: float, memory: int) -> None:
    """From now on the kernel ends this process when it uses more. seconds: of processor time. memory: bytes beyond what
    it has."""
    for name, timer, factor in ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, LONGEST)):
        signal.signal(name, signal.SIG_DFL)
        signal.setitimer(timer, factor * seconds)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else None
    if pages is not None:
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Less than a thread of the server has, which compiles the same grammar next.
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, most))


def _compile(constraint: Constraint, info: Any) -> None:
    import xgrammar

    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _try(compiled(constraint, compiler), info.vocab_size)


def _try(made: Any, width: int) -> None:
    """Some steps of a random answer: a grammar that is slow to follow uses up its time here, and not the engine's."""
    import torch
    import xgrammar

    matcher = xgrammar.GrammarMatcher(made, override_stop_tokens=[0])  # which is never chosen
    words, chance = np.zeros((1, -(-width // 32)), dtype=np.int32), random.Random(0)
    for _ in range(_STEPS):
        matcher.fill_next_token_bitmask(torch.from_numpy(words))
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[1:width]) + 1
        if not len(allowed) or not matcher.accept_token(int(chance.choice(allowed))):
            return


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as server:
        main(server)
