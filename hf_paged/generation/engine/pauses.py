"""Pauses: which threads have paused an engine. Knows threads, never what a step does."""

from __future__ import annotations

import threading


class Pauses:
    """Pauses of one engine. `lock` is the engine's: every method needs it, `wait` releases it while waiting."""

    def __init__(self, lock: threading.RLock) -> None:
        self._ended = threading.Condition(lock)
        self.owners: list[int] = []  # ids of threads, one entry for each pause

    @property
    def is_own(self) -> bool:
        """Whether this thread has one."""
        return threading.get_ident() in self.owners

    def begin(self) -> None:
        self.owners.append(threading.get_ident())

    def end(self) -> None:
        self.owners.remove(threading.get_ident())
        self._ended.notify_all()

    def wait(self) -> None:
        """Return when there is no pause. Raises RuntimeError in a thread that has one: it would wait for itself."""
        while self.owners:
            if self.is_own:
                raise RuntimeError("this thread has paused the engine: leave `with engine.pause()` first")
            self._ended.wait()
