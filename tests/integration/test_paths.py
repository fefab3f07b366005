"""How many of our modules a decode step enters, and a chat request until its first token. Newcomers read these paths,
so the bounds may fall, and rise only where a file of more than 450 lines is split: the functions stay the same.

The optional faster parts (`hf_paged/fused`) are switched off: they depend on the machine, and the step is the same
without them. With those for fp32 on a CPU, a step of Llama enters four modules more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import Engine
from hf_paged.fused import overrides as fused_overrides
from hf_paged.serving import service
from tests import models
from tests.serving.chats import TEMPLATE
from tests.serving.harness import NAME, serving

pytestmark = pytest.mark.skipif(sys.getprofile() is not None, reason="needs the profiler that something else uses")

ENGINE_STEP, GENERATE_STEP, CHAT_REQUEST = 18, 9, 55
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def without_faster_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("native_layers", "layers_for_engine", "layers_for_calls", "native_decoder", "native_experts"):
        monkeypatch.setattr(fused_overrides, name, lambda *_: None)


def code_of_properties() -> set[CodeType]:
    """Of all classes of hf_paged that are loaded."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("hf_paged.")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    found = [value.fget for owner in classes for value in vars(owner).values() if isinstance(value, property)]
    found += [vars(owner).get("__get__") for owner in classes]  # a property of another form
    return {getter.__code__ for getter in found if hasattr(getter, "__code__")}


class Modules:
    """The modules of hf_paged that are entered between `start` and `stop`.

    Generated methods of records do not count. All kernels count as one module: their files depend on the machine.
    Properties such as `Sequence.num_tokens` do not count either: they read the state of an object, their name says
    all, and a reader of the step need not open their module. What a property calls does count.
    """

    def __init__(self) -> None:
        self.entered: set[str] = set()
        self._properties = code_of_properties()

    def start(self) -> None:
        self.entered.clear()
        sys.setprofile(self._note)

    @contextmanager
    def in_other_threads(self) -> Iterator[Callable[[], None]]:
        """In the threads that begin within the block, from a call of what this yields on."""
        is_on = threading.Event()
        threading.setprofile(lambda frame, event, given: self._note(frame, event, given) if is_on.is_set() else None)
        try:
            yield is_on.set
        finally:
            is_on.clear()
            threading.setprofile(None)  # type: ignore[arg-type]

    def stop(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event != "call" or frame.f_code.co_filename == "<string>" or frame.f_code in self._properties:
            return
        if name.startswith("hf_paged."):
            name = name.removeprefix("hf_paged.")
            self.entered.add("kernels" if name.startswith("kernels.") else name)


def test_a_decode_step_of_an_engine() -> None:
    modules = Modules()
    with Engine(models.shared("llama")) as engine:
        for prompt in models.prompts(5, 9):
            engine.add_request(prompt, GenerationConfig(**OPTIONS))
        for _ in range(4):
            engine.step()
        modules.start()
        try:
            engine.step()
        finally:
            modules.stop()
    assert modules.entered >= {"generation.engine.scheduler", "cache.block_manager", "integration.attention", "kernels"}
    assert len(modules.entered) <= ENGINE_STEP, sorted(modules.entered)


def test_a_decode_step_of_generate() -> None:
    model, (prompt,) = models.shared("llama"), models.prompts(5)
    modules = Modules()
    steps: list[set[str]] = []

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Called once a step, so that each interval holds one forward and the loop around it."""
        modules.stop()
        steps.append(set(modules.entered))
        modules.start()
        return scores

    try:
        model.generate(prompt[None], **OPTIONS, cache_implementation="paged", logits_processor=[watch])
    finally:
        modules.stop()
    assert len(steps) == 8
    assert steps[4] >= {"generation.decoder", "cache.block_manager", "integration.attention", "kernels"}
    assert len(steps[4]) <= GENERATE_STEP, sorted(steps[4])


def test_a_chat_request_until_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all threads of a server. What the server looks at once a second is no part of a request."""
    monkeypatch.setattr(service, "_TICK", 3600.0)
    modules = Modules()
    fields: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    with modules.in_other_threads() as begin, serving(chat_template=TEMPLATE) as server:
        chat = server.client.chat.completions
        chat.create(**fields, max_tokens=2)  # examines the model
        begin()
        stream = chat.create(**fields, max_tokens=20, stream=True)
        next(chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content)
        entered = set(modules.entered)
        list(stream)
    assert entered >= {"serving.app", "serving.recipe", "serving.worker", "generation.engine.scheduler", "kernels"}
    assert len(entered) <= CHAT_REQUEST, sorted(entered)
