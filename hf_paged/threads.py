"""Threads that run an engine's steps, and the end of the program. Standard library only."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

LAST_SECONDS = 30.0
"""From the end of the program until it no longer waits for threads that still run."""


class SteppingThread(threading.Thread):
    """A thread that runs steps until the program ends, if nothing stops it before.

    Python ends daemon threads as soon as they ask for its lock once the interpreter ends. In the middle of torch's code
    this aborts the process ("terminate called without an active exception"). So the end of the program asks these
    threads to stop, and waits for the step in progress.
    """

    def __init__(self, target: Callable[[], None], name: str, ask_to_stop: Callable[[], None]) -> None:
        """ask_to_stop: a bound method, after which `target` returns with the end of its step."""
        super().__init__(target=target, name=name, daemon=True)
        self._ask_to_stop = weakref.WeakMethod(ask_to_stop)
        _threads.add(self)

    def ask_to_stop(self) -> None:
        """Nothing if its object is gone."""
        if (ask := self._ask_to_stop()) is not None:
            ask()


_threads: weakref.WeakSet[SteppingThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    running = [thread for thread in _threads if thread.is_alive()]
    for thread in running:
        thread.ask_to_stop()
    limit = time.monotonic() + LAST_SECONDS
    for thread in running:
        thread.join(max(0.0, limit - time.monotonic()))
