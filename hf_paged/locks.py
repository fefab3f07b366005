"""Locks in forked children: free there, or refused with a reason. Standard library only."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, TypeVar

_Lock = TypeVar("_Lock", threading.Lock, threading.RLock)

_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_refused: weakref.WeakKeyDictionary[object, tuple[str, ...]] = weakref.WeakKeyDictionary()


def usable_after_fork(lock: _Lock) -> _Lock:
    """Returns the lock, which will be free in every forked child.

    A thread that the child does not have may hold it at the fork, and would never release it there.
    """
    _locks.add(lock)
    return lock


class RefusingLock:
    """A lock that cannot be taken: `with` raises RuntimeError."""

    def __enter__(self) -> None:
        raise RuntimeError(
            "this engine was made before the process was forked and works in the parent only; make an engine in the "
            "child (with DataLoader in worker_init_fn, with gunicorn --preload in post_fork), or start processes with "
            "'spawn'"
        )

    def __exit__(self, *_: object) -> None: ...


def refuse_after_fork(engine: object, *names: str) -> None:
    """In every forked child, these attributes of the engine become RefusingLocks: a thread of the parent may have held
    its locks at the fork, and would hold them forever."""
    _refused[engine] = names


def _after_fork() -> None:
    # Lists, because the collections are weak, and garbage may be collected meanwhile.
    for lock in list(_locks):
        lock._at_fork_reinit()  # what the standard library calls for locks of its own
    for engine, names in list(_refused.items()):
        vars(engine).update(dict.fromkeys(names, RefusingLock()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
