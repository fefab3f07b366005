"""How many of our modules a decode step enters. Newcomers read this path, so the bounds may fall but must not rise.

The optional faster parts (`hf_paged/fused`) are switched off: they depend on the machine, and the step is the same
without them. With those for fp32 on a CPU, a step enters the overrides, the look at the weights and two modules more.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import Engine
from hf_paged.fused import overrides as fused_overrides
from tests import models

pytestmark = pytest.mark.skipif(sys.getprofile() is not None, reason="needs the profiler that something else uses")

ENGINE_STEP, GENERATE_STEP = 12, 7
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def without_faster_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_overrides, "native_layers", lambda *_: None)


def code_of_properties() -> set[CodeType]:
    """Of all classes of hf_paged that are loaded."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("hf_paged.")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    found = [value.fget for owner in classes for value in vars(owner).values() if isinstance(value, property)]
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
