"""Runs a function as several ranks, in processes forked from one that has imported torch and transformers once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import distributed

from hf_paged.cli.ranks import use_gloo_of_one_thread

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.parallel.programs"])


def free_port() -> int:
    """A port on which nothing listens, of those that the kernel gives to no socket which asks for any."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Ranks:
    """The processes. `said(rank)` has what it has reported, with the time; its exit code is `codes()[rank]`."""

    def __init__(self, size: int, program: Callable[..., None], *args: Any) -> None:
        port = free_port()
        self._said: list[list[tuple[float, Any]]] = [[] for _ in range(size)]
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = _context.Pipe(duplex=False)
            process = _context.Process(target=_run, args=(rank, size, port, there, program, args), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def read(self, until: Callable[[], bool], seconds: float) -> bool:
        """Collect reports until a condition is met; False after that many seconds."""
        end = time.monotonic() + seconds
        while not until():
            if time.monotonic() > end:
                return False
            for pipe in wait([pipe for pipe in self._pipes if not pipe.closed], timeout=0.05):
                try:
                    self._said[self._pipes.index(pipe)].append((time.monotonic(), pipe.recv()))
                except (EOFError, OSError):
                    pipe.close()
        return True

    def said(self, rank: int) -> list[Any]:
        return [what for _, what in self._said[rank]]

    def when(self, rank: int, what: Any) -> float:
        return next(moment for moment, said in self._said[rank] if said == what)

    def have_all_said(self, what: Any, seconds: float) -> bool:
        return self.read(lambda: all(what in self.said(rank) for rank in range(len(self._pipes))), seconds)

    def are_gone(self) -> bool:
        return not any(process.is_alive() for process in self.processes)

    def are_silent(self) -> bool:
        """All their reports have been read, after they have gone."""
        return all(pipe.closed for pipe in self._pipes)

    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run(size: int, program: Callable[..., None], *args: Any, seconds: float = 240) -> list[list[Any]]:
    """What each rank has reported when all have ended without an error."""
    with closing(Ranks(size, program, *args)) as ranks:
        assert ranks.read(ranks.are_gone, seconds), f"still running: {[ranks.said(rank) for rank in range(size)]}"
        ranks.read(ranks.are_silent, 120)
        assert ranks.codes() == [0] * size, [ranks.said(rank) for rank in range(size)]
        return [ranks.said(rank) for rank in range(size)]


def _run(rank: int, size: int, port: int, pipe: Any, program: Callable[..., None], args: Any) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "RANK": str(rank)}
    os.environ.update(address, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    multiprocessing.set_start_method("fork", force=True)  # tqdm's lock then leaves no file if the rank is killed
    torch.set_num_threads(1)
    use_gloo_of_one_thread()
    program(pipe.send, *args)
    if distributed.is_initialized():
        distributed.destroy_process_group()
