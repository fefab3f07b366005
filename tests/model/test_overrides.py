"""Overrides are applied where they fit and removed again; what other code sets on a model stays in effect."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.model.overrides import ABSENT, Overrides, Patch, foreign_forward, is_override, mark
from hf_paged.model.picture import ClassForwards, Surroundings
from hf_paged.model.state import state_of
from tests import models

pytestmark = pytest.mark.usefixtures("trusted_code")

# -- the list --------------------------------------------------------------------------------------------------------


def test_names_are_added_replaced_and_removed() -> None:
    space: dict[str, Any] = {"b": 1, "c": 2}
    overrides = Overrides([Patch(space, "a", "x"), Patch(space, "b", "y", 1), Patch(space, "c", ABSENT, 2)])
    overrides.apply("user")
    assert space == {"a": "x", "b": "y"}
    for _ in range(2):
        overrides.undo("user")
        assert space == {"b": 1, "c": 2}


def test_what_other_code_sets_stays_in_force() -> None:
    theirs = object()
    space: dict[str, Any] = {"a": theirs, "b": theirs}
    overrides = Overrides([Patch(space, "a", "x"), Patch(space, "b", "y", 1), Patch(space, "c", "z")])
    assert overrides.apply("user") == [theirs, "z"]
    assert space == {"a": theirs, "b": theirs, "c": "z"}
    overrides.undo("user")
    assert space == {"a": theirs, "b": theirs}
    space.clear()
    space["b"] = 1
    overrides.apply("user")
    space["a"] = space["b"] = theirs
    overrides.undo("user")
    assert space == {"a": theirs, "b": theirs}


def test_the_last_user_takes_them_out() -> None:
    space: dict[str, Any] = {"b": 1}
    overrides = Overrides([Patch(space, "a", "x"), Patch(space, "b", "y", 1)])
    first, second = object(), object()
    overrides.apply(first)
    overrides.apply(second)
    overrides.undo(first)
    overrides.undo(first)
    assert space == {"a": "x", "b": "y"}
    overrides.undo(second)
    assert space == {"b": 1}
    overrides.apply(first)
    overrides.apply(second)
    overrides.withdraw()
    assert space == {"b": 1}
    overrides.undo(second)
    assert space == {"b": 1}


def test_a_wrapper_of_an_override_is_no_override() -> None:
    def override(x: int) -> int:
        return x

    mark(override)
    wrapper = functools.wraps(override)(lambda x: override(x))
    partial = functools.update_wrapper(functools.partial(wrapper), override)
    assert is_override(override) and not is_override(wrapper) and not is_override(partial) and not is_override([])
    module = nn.Linear(1, 1)
    assert not foreign_forward(module)
    module.forward = override
    assert not foreign_forward(module)
    module.forward = wrapper
    assert foreign_forward(module)


def test_classes_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = ClassForwards([nn.Linear, nn.Linear, nn.SiLU])
    assert not classes.changed()
    with monkeypatch.context() as patch:
        patch.setattr(nn.SiLU, "forward", lambda self, x: x)
        assert classes.changed()
    assert not classes.changed()


NEW_TOKENS = 4
OPTIONS = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)


class Foreign:
    """A forward of other code: it calls the previous forward, halves the result and counts its calls."""

    def __init__(self, module: nn.Module) -> None:
        self.calls = 0
        self.module = module
        found = module.forward

        @functools.wraps(found)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return found(*args, **kwargs) * 0.5

        module.forward = self._forward = forward

    def in_place(self) -> bool:
        return vars(self.module).get("forward") is self._forward

    def remove(self) -> None:
        del self.module.forward


def build() -> Any:
    model = models.build("llama")
    model.generation_config.eos_token_id = None
    return model


def run(model: Any, engine: Engine | None) -> list[int]:
    """Tokens from the engine, or from `generate` if there is none."""
    (prompt,) = models.prompts(9)
    if engine is None:
        ids = model.generate(prompt[None], generation_config=OPTIONS, cache_implementation="paged")
        return ids[0, len(prompt) :].tolist()
    engine.clear_prefix_cache()
    return engine.generate([prompt], OPTIONS)[0].outputs[0].token_ids


def plain(model: Any) -> list[int]:
    (prompt,) = models.prompts(9)
    return model.generate(prompt[None], generation_config=OPTIONS)[0, len(prompt) :].tolist()


@pytest.fixture(params=["engine", "generate"])
def prepacked(request: pytest.FixtureRequest) -> Any:
    """A model with packed weights, and the engine that runs it (None: `generate`)."""
    model = build()
    if request.param == "generate":
        hf_paged.prepack(model)
        yield model, functools.partial(run, model, None)
    else:
        with Engine(model, CacheConfig(num_blocks=64), prepack=True) as engine:
            yield model, functools.partial(run, model, engine)


def test_an_empty_namespace_is_watched() -> None:
    space: dict[str, Any] = {}
    surroundings = Surroundings([], [], [space])
    assert surroundings.are_same()
    space.update({"sdpa": print})
    assert not surroundings.are_same()


def test_a_forward_set_after_a_look_in_the_step_of_another_thread() -> None:
    """The override that is gone does not make up for it."""
    model = build()
    layer = model.model.layers[0].mlp.up_proj
    weights = state_of(model).weights
    step = Overrides([Patch(vars(layer), "forward", lambda rows: rows)])
    for is_new in (True, False):
        if not is_new:
            weights.look()
        step.apply("user")
        weights.look()
        step.undo("user")
        before = weights.structure
        foreign = Foreign(layer)
        weights.look()
        assert weights.structure > before
        foreign.remove()


def test_a_forward_set_in_a_step_stays(prepacked: Any) -> None:
    """It wraps the override, which then computes what the layer would."""
    model, paged = prepacked
    first = paged()
    foreign: list[Foreign] = []

    def in_step(*_: Any) -> None:
        if not foreign:
            foreign.append(Foreign(model.model.layers[1].mlp.up_proj))

    handle = model.model.layers[0].register_forward_hook(in_step)
    paged()
    handle.remove()
    assert foreign[0].in_place() and foreign[0].calls >= NEW_TOKENS  # more: an engine tries the changed model first
    second = paged()
    assert foreign[0].in_place() and second == plain(model) != first
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(-3)
    assert paged() == plain(model) != second
    foreign[0].remove()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.div_(-3)
    assert paged() == first
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_class_patched_later_stays(prepacked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, paged = prepacked
    first = paged()
    own = nn.Linear.forward
    calls = []

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return own(self, input).clamp(-0.2, 0.2)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", forward)
        if isinstance(paged.args[1], Engine):
            assert paged() == plain(model) != first and calls
        else:
            with pytest.raises(ValueError, match=r"Linear\.forward has been replaced; call release_memory"):
                paged()
        with pytest.raises(ValueError, match=r"prepack=True: torch\.nn\.Linear\.forward has been replaced"):
            Engine(model, CacheConfig(num_blocks=64), prepack=True)
    assert paged() == first


def test_an_implementation_set_in_a_step_stays() -> None:
    model = build()
    own = model.config._attn_implementation
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        first = run(model, engine)
        chosen = model.lm_head.register_forward_hook(lambda *_: model.set_attn_implementation("eager"))
        run(model, engine)
        chosen.remove()
        assert model.config._attn_implementation == "eager" != own
        assert run(model, engine) == first


def test_engines_in_other_threads_keep_their_overrides() -> None:
    """When the first of two overlapping steps ends, the other one still uses the packed copies."""
    model = build()
    entered, go = threading.Event(), threading.Event()
    seen: list[bool] = []
    layer = model.model.layers[0].mlp.up_proj
    with (
        Engine(model, CacheConfig(num_blocks=64), prepack=True) as slow,
        Engine(model, CacheConfig(num_blocks=64), prepack=True) as fast,
    ):
        slow_thread = threading.Thread(target=run, args=(model, slow))

        def wait(*_: Any) -> None:
            if threading.current_thread() is slow_thread and not entered.is_set():
                entered.set()
                assert go.wait(120)
                seen.append(is_override(vars(layer).get("forward")))

        handle = model.model.embed_tokens.register_forward_hook(wait)
        slow_thread.start()
        assert entered.wait(120)
        run(model, fast)
        go.set()
        slow_thread.join()
        handle.remove()
    assert seen == [True]
    assert not any("forward" in vars(module) for module in model.modules())
