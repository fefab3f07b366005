"""Engines and paged calls in a forked child, and random numbers between threads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged.config import CacheConfig
from hf_paged.generation import paged_generate
from hf_paged.generation.engine.engine import Engine
from hf_paged.integration import attention
from hf_paged.integration.names import CACHE
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import sampling as native_sampling
from hf_paged.model import overrides, state
from tests import models

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def in_child(function: Callable[[], object]) -> str:
    """What the function returns or raises in a forked child, as text. A child that hangs is ended and returns ""."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(120)
        try:
            answer = str(function())
        except BaseException as error:  # after any error, the child must not continue pytest
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


@contextmanager
def held(lock: Any) -> Iterator[None]:
    holds, go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            go.wait(240)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(120)
    try:
        yield
    finally:
        go.set()
        thread.join()


CALLS: dict[str, Callable[[Engine], object]] = {
    "add_request": lambda engine: engine.add_request([5, 6, 7]), "step": lambda engine: engine.step(),
    "abort": lambda engine: engine.abort("one"),
    "generate": lambda engine: engine.generate([[5, 6, 7]], GenerationConfig(**OPTIONS)),
    "stream": lambda engine: engine.stream([[5, 6, 7]]), "stats": lambda engine: engine.stats(),
    "cache_prefix": lambda engine: engine.cache_prefix([5] * 40),
    "clear_prefix_cache": lambda engine: engine.clear_prefix_cache(),
    "check_integrity": lambda engine: engine.check_integrity(),
}  # fmt: skip


def test_an_engine_of_the_parent_raises() -> None:
    """It raises at once, although a thread of the parent is in the middle of a step."""
    with Engine(models.shared("llama"), CacheConfig(num_blocks=32)) as engine:
        engine.add_request([5, 6, 7], GenerationConfig(**OPTIONS), request_id="one")

        def outcomes() -> dict[str, str]:
            found = {}
            for name, call in CALLS.items():
                try:
                    call(engine)
                    found[name] = "no error"
                except RuntimeError as error:
                    found[name] = str(error)
            engine.close()
            return {name: text for name, text in found.items() if "make an engine in the child" not in text}

        with held(engine._lock):
            assert in_child(outcomes) == "{}"
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        assert output.finished


def test_an_engine_of_the_child_works() -> None:
    model, config = models.shared("llama"), GenerationConfig(**OPTIONS)

    def tokens() -> list[int]:
        with Engine(model, CacheConfig(num_blocks=32)) as engine:
            return engine.generate([[5, 6, 7]], config)[0].outputs[0].token_ids

    expected = tokens()
    assert in_child(tokens) == str(expected)


@pytest.mark.parametrize("do_sample", [False, True])
def test_paged_calls_and_caches_work(do_sample: bool) -> None:
    model, inputs = models.shared("llama"), models.batch(9, 5)
    options = {**inputs, **OPTIONS, "do_sample": do_sample}
    model.generate(**options, cache_implementation="paged")  # leaves memory for the next call

    def tokens(**paged: Any) -> list[list[int]]:
        torch.manual_seed(3)
        return model.generate(**options, **paged).tolist()

    expected = str(tokens())
    locks = [native_sampling._drawing, overrides._lock, attention._lock, state._lock]
    locks += [state.state_of(model).lock, state.state_of(model).weights._lock, paged_generate._idle_pools(model)._lock]
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(held(lock))
        assert in_child(lambda: tokens(cache_implementation="paged")) == expected
        assert in_child(lambda: tokens(**{CACHE: hf_paged.PagedKVCache(model.config)})) == expected
    assert str(tokens(cache_implementation="paged")) == expected


@pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine")
def test_draws_are_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    held_meanwhile = []
    library = native_build.library()
    assert library is not None

    class Watched:
        @staticmethod
        def hfp_draw(*arguments: Any) -> None:
            held_meanwhile.append(native_sampling._drawing.locked())
            library.hfp_draw(*arguments)

    monkeypatch.setattr(native_sampling, "c_library", Watched)
    native_sampling.draw(torch.full((2, 50), 0.02), [torch.default_generator] * 2)
    assert held_meanwhile == [True]
