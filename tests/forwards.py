"""Where tests reach into the steps of an engine: at their forwards. Faults, waits and notes go in here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from hf_paged import Engine
from hf_paged.generation.engine.tables import SchedulerOutput


def around_forwards(engine: Engine, call: Callable[..., Any]) -> Callable[[], None]:
    """From now on `call(forward, output, *others)` takes the place of each `forward(output, *others)`, in the thread of
    the step. Returns what undoes it."""
    runner = engine._runner
    own = runner.run
    runner.run = partial(call, own)  # type: ignore[method-assign]

    def undo() -> None:
        runner.run = own  # type: ignore[method-assign]

    return undo


def before_forwards(engine: Engine, call: Callable[[SchedulerOutput], object]) -> Callable[[], None]:
    """From now on `call(output)` comes before each forward, and may raise in its place. Returns what undoes it."""

    def first(forward: Callable[..., Any], output: SchedulerOutput, *others: Any) -> Any:
        call(output)
        return forward(output, *others)

    return around_forwards(engine, first)


def fail_forward(engine: Engine, error: BaseException, *, at: int = 0) -> None:
    """The forward with this number, counted from now on, raises the error."""
    numbers = count()

    def fail(output: SchedulerOutput) -> None:
        if next(numbers) == at:
            raise error

    before_forwards(engine, fail)
