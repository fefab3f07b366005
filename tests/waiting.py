"""How tests wait for other threads: for events, never for seconds, so that they pass on a machine of any speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hf_paged
from tests.forwards import before_forwards


def must(is_done: bool, otherwise: str) -> None:
    """Not an `assert`, which `python -O` removes together with the waiting in it."""
    if not is_done:
        raise AssertionError(otherwise)


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Waits for something that has no event of its own."""
    end = time.monotonic() + seconds
    while not condition():
        must(time.monotonic() < end, f"it has not happened within {seconds} seconds")
        time.sleep(0.005)


@contextmanager
def no_waits_for_a_device() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Gate:
    """Lets an engine run a number of steps; the next is held in the middle, and what is asked meanwhile waits."""

    def __init__(self, engine: hf_paged.Engine, steps: int) -> None:
        self._permits = threading.Semaphore(steps)
        self._holds = threading.Event()
        self._undo = before_forwards(engine, self._hold)

    def _hold(self, _: Any) -> None:
        if not self._permits.acquire(blocking=False):
            self._holds.set()
            must(self._permits.acquire(timeout=240), "the gate was never opened")

    def wait(self) -> None:
        """Until a step is held."""
        must(self._holds.wait(120), "no step has come to the gate")

    def pass_on(self, steps: int) -> None:
        self._holds.clear()
        self._permits.release(steps)

    def open(self) -> None:
        self._undo()
        self._permits.release(1000)
