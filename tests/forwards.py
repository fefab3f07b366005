"""Where tests reach into an engine: its runner. Faults, waits and notes go in at the forwards of steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from hf_paged import Engine
from hf_paged.features.rows.states import States
from hf_paged.generation.engine.tables import SchedulerOutput


def runner_of(engine: Engine) -> Any:
    return engine._runner


def bound_model(engine: Engine) -> Any:
    """The executor of its steps: a PackedModel or RowModel."""
    return engine._runner._executor


def states_of(engine: Engine) -> States:
    """The recurrent states of its sequences, and the copies of states."""
    states: States = bound_model(engine)._rows.states
    return states


def graphs_of(engine: Engine) -> Any:
    return engine._runner._bound.graphs


def around_forwards(engine: Engine, call: Callable[..., Any]) -> Callable[[], None]:
    """From now on `call(forward, output, *others)` takes the place of each `forward`. Returns what undoes it."""
    runner = runner_of(engine)
    own = runner.run
    runner.run = partial(call, own)

    def undo() -> None:
        runner.run = own

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
