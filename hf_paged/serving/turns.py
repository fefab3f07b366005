"""Turns: threads that work for many clients, one piece of each in turn. Knows nothing of the work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol


class Work(Protocol):
    def run(self) -> None: ...

    def abandon(self) -> None: ...


class Turns:
    """A client with a hundred pieces waits longer for its last one; nobody else does. Used from any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Work]] = {}  # in the order of turns

    def add(self, client: Hashable, work: Work) -> None:
        """Have a thread call `work.run()`, or, if `close` comes first, `work.abandon()`."""
        # Added before a thread is asked, which takes whatever is next in turn, not this piece.
        with self._lock:
            self._waiting.setdefault(client, deque()).append(work)
        try:
            self._threads.submit(self._take)
        except RuntimeError:  # closed
            work.abandon()

    def close(self) -> None:
        """Wait for what runs; nothing else is begun."""
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        # Outside of the lock, because abandoning runs callbacks of others.
        for pieces in waiting.values():
            for work in pieces:
                work.abandon()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> None:
        with self._lock:
            if not self._waiting:  # closed
                return
            client = next(iter(self._waiting))
            pieces = self._waiting.pop(client)
            work = pieces.popleft()
            if pieces:
                self._waiting[client] = pieces  # behind the others
        work.run()
