"""What takes long to make, and that all processes of `pytest -n` read: one of them makes it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The directory of this name, which `make` has filled once for all processes. Tests only read it."""
    base = factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    shared.mkdir(exist_ok=True)
    made, done = shared / "made", shared / "done"
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            made.mkdir()  # raises FileExistsError where another process has failed to fill it
            make(made)
            done.touch()
    return made
