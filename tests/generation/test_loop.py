"""A thread that gives itself to the steps of an engine: what it is told between them, halts, and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.errors import EngineStopped
from hf_paged.generation.engine.arrivals import HaltMode
from tests import models
from tests.waiting import Gate

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def plain(prompt: Any) -> list[int]:
    return models.shared("llama").generate(prompt[None], **OPTIONS)[0, len(prompt) :].tolist()


class Running:
    def __init__(self) -> None:
        self.engine = Engine(models.shared("llama"), CacheConfig(num_blocks=64))
        self.finished: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.engine.run(lambda outputs, _: self.finished.update({o.request_id: o for o in outputs if o.finished}))
        except RuntimeError as error:
            self.error = error

    def add(self, name: str, prompt: Any, **options: Any) -> None:
        self.engine.add_request(prompt, GenerationConfig(**OPTIONS), request_id=name, **options)

    def add_held(self, name: str, prompt: Any) -> Gate:
        """Add a request, and hold the engine in its first step until the gate is opened."""
        gate = Gate(self.engine, 1)
        self.add(name, prompt)
        gate.wait()
        return gate

    def end(self) -> None:
        self.engine.end_run("when idle")
        self.thread.join(120)
        assert not self.thread.is_alive()

    def reason(self, name: str) -> str:
        return str(self.finished[name].outputs[0].finish_reason)


@contextmanager
def running() -> Iterator[Running]:
    made = Running()
    made.thread.start()
    with made.engine:
        yield made


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_halt(mode: HaltMode) -> None:
    first, second = models.prompts(5, 9)
    with running() as made:
        engine, gate = made.engine, made.add_held("first", first)
        begun = engine.halt(mode)
        made.add("late", second)
        assert not begun.done() and engine.is_halted
        gate.open()
        assert begun.result(120)
        ended = {"keep": None, "wait": "length", "abort": "abort"}[mode]
        assert (made.reason("first") if made.finished else None) == ended
        steps = engine.call(lambda: engine.stats().steps).result(120)
        assert engine.call(lambda: (engine.stats().steps, engine.stats().num_waiting)).result(120) == (steps, 1)
        engine.go_on()
        made.end()
        assert not engine.is_halted and made.finished["late"].outputs[0].token_ids == plain(second)
        if mode != "abort":
            assert made.finished["first"].outputs[0].token_ids == plain(first)
        engine.check_integrity()


@pytest.mark.parametrize("modes", [("wait", "abort"), ("abort", "keep")], ids="-".join)
def test_an_abort_beside_another_halt(modes: tuple[HaltMode, HaltMode]) -> None:
    """It takes the place of one that waits, and stays one if it has not begun. What came later is not aborted."""
    first, second = models.prompts(5, 9)
    with running() as made:
        gate = made.add_held("first", first)
        begun = made.engine.halt(modes[0])
        made.add("late", second)
        again = made.engine.halt(modes[1])
        assert again is begun or modes[0] == "abort"
        gate.open()
        begun.result(120), again.result(120)
        assert made.reason("first") == "abort" and "late" not in made.finished
        made.engine.go_on()
        made.end()
    assert made.finished["late"].outputs[0].token_ids == plain(second)


def test_a_halt_that_lets_end_what_another_has_kept() -> None:
    with running() as made:
        gate, ended = made.add_held("it", *models.prompts(5)), made.engine.halt("wait")
        made.engine.go_on()
        kept = made.engine.halt("keep")
        gate.open()
        assert not ended.result(120) and kept.result(120)
        assert made.engine.halt("wait") is kept and not made.finished
        assert made.engine.halt("wait", ends_kept=True).result(120) and made.reason("it") == "length"
        made.engine.go_on()
        made.end()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_halt_while_a_streamer_is_getting_the_prompt(is_late: bool) -> None:
    """The request ends before the halt begins if it came before, and waits for the end of the halt if it came later."""
    first, second = models.prompts(5, 9)
    has_begun, may_end = threading.Event(), threading.Event()
    streamer = mock.Mock(put=lambda _: (has_begun.set(), may_end.wait(120)))
    with running() as made, ThreadPoolExecutor() as threads:
        gate = made.add_held("first", first)
        late = [made.engine.halt("wait")] if is_late else []
        adding = threads.submit(made.add, "second", second, streamer=streamer)
        assert has_begun.wait(120)
        waits = made.engine.halt("wait")
        gate.open()
        for halt in late:
            halt.result(120)
        may_end.set()
        adding.result(120), waits.result(120)
        made.engine.call(lambda: None).result(120)  # after a step, if there were one
        assert ("second" in made.finished) != is_late and made.engine.stats().num_waiting == is_late
        made.engine.go_on()
        made.end()
    assert made.finished["second"].outputs[0].token_ids == plain(second)


def test_a_pause_of_another_thread_holds_it_up() -> None:
    (prompt,) = models.prompts(5)
    with running() as made:
        with made.engine.pause():
            made.add("it", prompt)
            steps = made.engine.stats().steps
            assert made.engine.call(lambda: made.engine.stats().steps).result(120) == steps
        made.end()
    assert made.finished["it"].outputs[0].token_ids == plain(prompt)


def test_errors_go_to_who_has_asked() -> None:
    with running() as made:
        with pytest.raises(ZeroDivisionError):
            made.engine.call(lambda: 1 / 0).result(120)
        made.engine.end_run(RuntimeError("no device"))
        made.thread.join(120)
    assert str(made.error) == "no device"


def test_closing_an_engine_ends_its_thread_and_what_waits_for_it() -> None:
    with running() as made:
        made.end()
        call, halt = made.engine.call(lambda: None), made.engine.halt("wait")
    for future in (call, halt):
        assert isinstance(future.exception(120), EngineStopped)
    with pytest.raises(EngineStopped):
        made.engine.call(lambda: None)
    with running() as made:
        made.engine.close()
        made.thread.join(120)
        assert not made.thread.is_alive() and made.error is None


def test_readers_of_streams_run_their_own_steps_while_a_halt_lets_others_end() -> None:
    first, second = models.prompts(5, 9)
    with running() as made:
        gate = made.add_held("first", first)
        waits = made.engine.halt("wait")
        inner = made.engine.call(lambda: made.engine.cache_prefix(second))
        gate.open()
        assert inner.result(120) >= 0
        waits.result(120)
        made.engine.go_on()
        made.end()
    assert made.finished["first"].outputs[0].token_ids == plain(first)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_calls_that_are_cancelled_or_leave_the_thread() -> None:
    with running() as made:
        with made.engine.pause():
            cancelled = made.engine.call(lambda: None)
            cancelled.cancel()
        assert made.engine.call(lambda: 3).result(120) == 3
        left = made.engine.call(mock.Mock(side_effect=SystemExit))
        assert isinstance(left.exception(120), SystemExit)
        made.thread.join(120)
