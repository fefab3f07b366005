"""Triton's interpreter as a GPU with weak memory: the programs of a launch run in a random order, and what one of them
stores is visible to the others only after it has released it, by an atomic operation or with the end of the launch.

Without that, the interpreter runs programs in the order of their numbers and shows every store at once, so that no test
in it can see that a program reads what another one may not have written yet.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from triton._C.libtriton import interpreter as raw
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class _Store(NamedTuple):
    pointers: np.ndarray
    mask: np.ndarray
    before: np.ndarray
    after: np.ndarray


class WeakMemory:
    """From its making on, for the launches of one test. `seed` the order of the programs before each launch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._order = random.Random(0)
        self._own: list[_Store] = []  # stores of the running program that it has not released
        self._hidden: list[_Store] = []  # those of the programs before
        store, count = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_atomic_rmw
        place, launch = InterpreterBuilder.set_grid_idx, GridExecutor.__call__
        programs: list[tuple[int, int, int]] = []

        def stored(builder: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
            before = raw.load(pointers.data, mask.data, np.zeros_like(value.data), value.data.dtype)
            self._own.append(_Store(pointers.data.copy(), mask.data.copy(), before, value.data.copy()))
            return store(builder, pointers, value, mask, *options)

        def counted(builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
            if order.name in ("RELEASE", "ACQUIRE_RELEASE"):
                self._own.clear()
            return count(builder, operation, pointers, value, mask, order, scope)

        def placed(builder: Any, x: int, y: int, z: int) -> Any:
            self._hide()
            if not programs:
                sizes = builder.grid_dim
                programs.extend(np.ndindex(*sizes))
                self._order.shuffle(programs)
            return place(builder, *programs.pop())

        def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
            programs.clear()
            result = launch(executor, *args, **kwargs)
            self._hide()
            for each in self._hidden:
                raw.store(each.pointers, each.after, each.mask)
            self._hidden.clear()
            return result

        patch.setattr(InterpreterBuilder, "create_masked_store", stored)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", counted)
        patch.setattr(InterpreterBuilder, "set_grid_idx", placed)
        patch.setattr(GridExecutor, "__call__", launched)

    def seed(self, seed: int) -> None:
        self._order.seed(seed)

    def _hide(self) -> None:
        """Another program runs from here on."""
        for each in reversed(self._own):
            raw.store(each.pointers, each.before, each.mask)
        self._hidden += self._own
        self._own.clear()
