"""Locks that a forked child can use. Standard library only."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, TypeVar

_Lock = TypeVar("_Lock", threading.Lock, threading.RLock)

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def usable_after_fork(lock: _Lock) -> _Lock:
    """Returns the lock, which will be free in every forked child.

    A thread that the child does not have may hold it at the fork, and would never release it there.
    """
    _locks.add(lock)
    return lock


class RefusingLock:
    """A lock that cannot be taken: `with` raises RuntimeError with the message."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __enter__(self) -> None:
        raise RuntimeError(self._message)

    def __exit__(self, *_: object) -> None: ...


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # what the standard library calls for locks of its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
