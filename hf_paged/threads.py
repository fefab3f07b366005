"""Threads that run an engine's steps, and the end of the program. Standard library only.

`hf_paged/__init__.py` imports this first: exit functions run in the reverse order of their registration, and those that
a program registers after `import hf_paged` may still use its threads.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

# A step that takes longer hangs, most likely, and the program must end.
LAST_SECONDS = 30.0
"""Seconds that the end of the program waits for these threads."""

# Seconds until it says that it waits: most steps end before.
_SILENT_SECONDS = 1.0
# As shells have it: 128, and the number of SIGINT.
_EXIT_INTERRUPTED = 130

log = logging.getLogger("hf_paged")


class SteppingThread(threading.Thread):
    """A thread that calls torch until the program ends, if nothing stops it before.

    Up to version 3.13, Python ends a daemon thread that asks for its lock once the interpreter ends. In the middle of
    torch's code this aborts the process ("terminate called without an active exception"). So the end of the program
    asks these threads to stop, and waits for the step in progress.
    """

    def __init__(self, target: Callable[[], None], name: str, ask_to_stop: Callable[[], None]) -> None:
        """ask_to_stop: a bound method, after which `target` returns with the end of its step."""
        super().__init__(target=target, name=name, daemon=True)
        self._ask = weakref.WeakMethod(ask_to_stop)

    def start(self) -> None:
        # Before it runs, so that the end of the program waits for it from its first line on.
        _started[self] = None
        super().start()

    def run(self) -> None:
        try:
            super().run()
        finally:
            _started.pop(self, None)

    def ask_to_stop(self) -> None:
        """Call the method that was given, unless its object has been freed."""
        if (ask := self._ask()) is not None:
            ask()


_started: dict[SteppingThread, None] = {}


@atexit.register
def _stop_all() -> None:
    running = [thread for thread in list(_started) if thread.is_alive()]  # in a forked child none is
    try:
        # All are asked before one is awaited, so that their steps end side by side.
        for thread in running:
            with suppress(Exception):  # whatever it is, the other threads are asked too
                thread.ask_to_stop()
        _join(running, _SILENT_SECONDS)
        if waiting := [thread.name for thread in running if thread.is_alive()]:
            log.warning("the program ends when the step in progress does, in %s", ", ".join(waiting))
            _join(running, LAST_SECONDS - _SILENT_SECONDS)
    except KeyboardInterrupt:  # the user waits no longer; what runs would abort the process
        with suppress(OSError, ValueError, AttributeError):  # no output that could be written to
            sys.stdout.flush()
        os._exit(_EXIT_INTERRUPTED)


def _join(threads: list[SteppingThread], seconds: float) -> None:
    limit = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
