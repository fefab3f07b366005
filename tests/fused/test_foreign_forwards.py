"""Forwards and functions that other code has replaced stay in effect where native kernels compute parts of a model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.fused import overrides as fused_overrides
from hf_paged.model.overrides import foreign_forward
from tests import models

pytestmark = pytest.mark.usefixtures("bf16_kernels")

NEW_TOKENS = 4
ROTARY = "apply_rotary_pos_emb"
PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "linear": lambda model: model.model.layers[1].mlp.up_proj,
    "activation": lambda model: model.model.layers[1].mlp.act_fn, "mlp": lambda model: model.model.layers[1].mlp,
    "attention": lambda model: model.model.layers[1].self_attn,
    "norm in a layer": lambda model: model.model.layers[1].input_layernorm,
    "norm at the end": lambda model: model.model.norm, "layer": lambda model: model.model.layers[1],
    "first layer": lambda model: model.model.layers[0],
}  # fmt: skip


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with opened(model) as engine:
        run(engine)  # tries the layers
        yield engine


def opened(model: Any) -> Engine:
    return Engine(model, CacheConfig(num_blocks=64))


def run(engine: Engine) -> tuple[list[int], list[float]]:
    engine.clear_prefix_cache()
    options = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    output = engine.generate(models.prompts(9), options)[0].outputs[0]
    return output.token_ids, output.logprobs


def by_torch(model: Any, *, prepack: bool | None = None) -> tuple[list[int], list[float]]:
    """The model itself computes everything except linear layers; packed weights are tested elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("native_layers", "native_decoder"):
            patch.setattr(fused_overrides, name, lambda *_: None)
        with Engine(model, CacheConfig(num_blocks=64), prepack=prepack) as engine:
            return run(engine)


class Wrapper:
    """A function with which other code has replaced another: halves the (first) result and counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls = 0

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            result = function(*args, **kwargs)
            return (result[0] * 0.5, *result[1:]) if isinstance(result, tuple) else result * 0.5

        self.function = wrapper


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_set_within_a_step_later_and_before(place: str, model: Any, engine: Engine) -> None:
    first, module = run(engine), PLACES[place](model)
    wrappers: list[Wrapper] = []

    def wrap(*_: Any) -> None:
        if not wrappers:
            wrappers.append(Wrapper(module.forward))
            module.forward = wrappers[0].function

    handle = model.model.embed_tokens.register_forward_hook(wrap)
    run(engine)
    handle.remove()
    (wrapper,) = wrappers
    changed, before = run(engine), wrapper.calls
    assert changed == by_torch(model) != first and vars(module)["forward"] is wrapper.function
    del module.forward
    assert run(engine) == first and wrapper.calls >= before >= NEW_TOKENS
    wrapper = Wrapper(module.forward)
    module.forward = wrapper.function
    assert run(engine) == changed and wrapper.calls >= NEW_TOKENS
    with opened(model) as later:
        assert run(later) == changed
        before = wrapper.calls
        assert run(later) == changed and wrapper.calls == before + NEW_TOKENS
        assert vars(module)["forward"] is wrapper.function
        del module.forward
        assert run(later) == run(engine) == first and wrapper.calls == before + NEW_TOKENS
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("place", ["linear", "activation", "norm at the end", "layer"])
def test_a_class_patched_later(place: str, model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, owner = run(engine), type(PLACES[place](model))
    wrapper = Wrapper(owner.forward)
    with monkeypatch.context() as patch:
        patch.setattr(owner, "forward", wrapper.function)
        changed = run(engine)
        assert wrapper.calls >= NEW_TOKENS and changed != first
        assert by_torch(model, prepack=False if owner is nn.Linear else None) == changed
    assert run(engine) == first


@pytest.mark.parametrize("when", ["before", "later"])
def test_a_rotary_function(when: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[type(model).__module__]
    own = getattr(module, ROTARY)
    wrapper = Wrapper(own)
    with opened(model) as earlier:
        first = run(earlier)
        with monkeypatch.context() as patch:
            patch.setattr(module, ROTARY, wrapper.function)
            for prepack in (None, False):
                with Engine(model, CacheConfig(num_blocks=64), prepack=prepack) as later:
                    engine = later if when == "before" else earlier
                    wrapper.calls = 0
                    changed = run(engine)
                    assert wrapper.calls == 3 * NEW_TOKENS and getattr(module, ROTARY) is wrapper.function
                    assert changed == by_torch(model, prepack=None if engine is earlier else prepack) != first
        assert run(earlier) == first and getattr(module, ROTARY) is own


def test_hooks_on_all_modules(model: Any, engine: Engine) -> None:
    first = run(engine)
    seen: list[nn.Module] = []
    handle = torch_module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        assert run(engine) == first
    finally:
        handle.remove()
    for place, find in PLACES.items():
        assert seen.count(find(model)) == NEW_TOKENS, place
    seen.clear()
    assert run(engine) == first and not seen


def test_accelerate(model: Any, engine: Engine) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    first = run(engine)
    kept = model.model.layers[1], model.model.norm, model.model.layers[2].mlp.down_proj

    class Halves(hooks.ModelHook):  # type: ignore[misc]
        calls = 0

        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            Halves.calls += 1
            return output * 0.5

    for module in kept:
        hooks.add_hook_to_module(module, Halves())
    changed = run(engine)
    assert Halves.calls >= len(kept) * NEW_TOKENS and all(map(foreign_forward, kept))
    assert changed == by_torch(model) != first
    for module in kept:
        hooks.remove_hook_from_module(module)
    assert run(engine) == first
