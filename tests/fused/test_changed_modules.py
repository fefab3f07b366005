"""Fewer launches of modules that other code has changed, shares, or calls in ways of its own."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from hf_paged import CacheConfig, Engine
from hf_paged.fused.gpu import model as fused_model
from hf_paged.fused.gpu import parts
from tests import models
from tests.architectures.tiny import tiny_model
from tests.fused.fewer import ALL, INTERPRETED, ROTARY, Halves, by_generate, computes_as_plain, kinds, run

pytestmark = [INTERPRETED, pytest.mark.usefixtures("by_torch")]


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(models.shared("llama"))


def test_dropouts() -> None:
    model = tiny_model("phi3")
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        run(engine)
        handle = model.model.layers[1].resid_attn_dropout.register_forward_hook(lambda module, args, out: out * 0.5)
        assert computes_as_plain(engine, model)
        handle.remove()
        model.model.layers[1].resid_mlp_dropout = Halves()
        assert computes_as_plain(engine, model)


def test_what_is_inside_an_activation(model: Any) -> None:
    inner = nn.SiLU()
    model.model.layers[1].mlp.act_fn = nn.Sequential(inner)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        run(engine)
        inner.register_forward_hook(lambda module, args, out: out * 0.5)
        assert computes_as_plain(engine, model)


def test_training_mode(model: Any) -> None:
    found = fused_model.FusedParts(model)
    for module in model.model.layers:
        module.train()
    with torch.no_grad():
        found.apply(model)
    assert {name for name, module in model.named_modules() if "forward" in vars(module)} == {"model.norm"}
    found.undo(model)
    model.train()
    with torch.no_grad():
        found.apply(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_other_classes(model: Any, engine: Engine) -> None:
    norm = model.model.layers[1].post_attention_layernorm
    own = type(norm)
    norm.__class__ = type("Other", (own,), {"forward": lambda self, x: own.forward(self, x) * 0.5})
    assert computes_as_plain(engine, model)
    norm.__class__ = own
    register_parametrization(norm, "weight", Halves())
    assert computes_as_plain(engine, model)
    attention = model.model.layers[1].self_attn
    attention.scaling *= 4
    assert computes_as_plain(engine, model)
    attention.extra = nn.Parameter(torch.ones(2))
    register_parametrization(attention, "extra", Halves())
    assert computes_as_plain(engine, model)


def test_rotary_function_of_a_base_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Derived", (type(layer.self_attn),), {"__module__": __name__})
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert kinds(model) == ALL | {"norm"}
        run(engine)
        space = inspect.unwrap(type(layer.self_attn).forward).__globals__
        own = space[ROTARY]
        monkeypatch.setitem(space, ROTARY, lambda *args, **kwargs: [x * 0.5 for x in own(*args, **kwargs)])
        assert computes_as_plain(engine, model)


def test_a_factor_of_the_sums() -> None:
    model = tiny_model("granite")
    for factor in (1.0, 0.5):
        changed = copy.deepcopy(model)
        for layer in changed.model.layers:
            layer.residual_multiplier = factor
        with Engine(changed, CacheConfig(num_blocks=64), fuse=True) as engine:
            assert kinds(changed) == ALL | {"norm"} and computes_as_plain(engine, changed)


def test_an_attention_of_two_layers(model: Any) -> None:
    shared = model.model.layers[0].self_attn
    model.model.layers[1].self_attn = shared
    for i, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda module, args, i=i: setattr(shared, "layer_idx", i))
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert run(engine) == by_generate(model) and "attention" not in kinds(model)


def test_a_child_that_scales_the_query(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Temperature(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.ones(1)

    for layer in model.model.layers:
        layer.self_attn.temperature = scale = Temperature()
    space = inspect.unwrap(type(layer.self_attn).forward).__globals__
    own = space[ROTARY]

    def scaled(*args: Any, **kwargs: Any) -> Any:
        query, key = own(*args, **kwargs)
        return scale(query), key

    monkeypatch.setitem(space, ROTARY, scaled)
    assert kinds(model) == {"MLP", "layer", "norm"}


def test_threads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread chooses the parts in force while another wants to apply them."""
    found = fused_model.FusedParts(model)
    chosen, applied, own = threading.Event(), threading.Event(), parts.Part.is_ready

    def slow(self: Any) -> bool:
        if threading.current_thread() is first and not chosen.is_set():
            chosen.set()
            applied.wait(0.1)
        return own(self)

    def use() -> None:
        if threading.current_thread() is second:
            chosen.wait(120)
        with torch.no_grad():
            found.apply(use_of := object())
        applied.set()
        if threading.current_thread() is second:
            first.join(120)
        found.undo(use_of)

    monkeypatch.setattr(parts.Part, "is_ready", slow)
    first, second = threading.Thread(target=use), threading.Thread(target=use)
    first.start(), second.start()
    first.join(120), second.join(120)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["input_layernorm", "self_attn"])
def test_modules_put_back(name: str, model: Any, engine: Engine) -> None:
    def replaced() -> int:
        run(engine)
        found: Any = fused_model.fused_parts(model)
        return len(found._overrides._added[0])

    before = replaced()
    layer = model.model.layers[1]
    parent, _, last = name.rpartition(".")
    owner, module = layer.get_submodule(parent), layer.get_submodule(name)
    other = copy.deepcopy(module)
    if last == "self_attn":
        other.config = model.config
    setattr(owner, last, other)
    assert computes_as_plain(engine, model) and replaced() < before
    setattr(owner, last, module)
    assert computes_as_plain(engine, model) and replaced() == before


def test_replaced_modules_are_freed(model: Any, engine: Engine) -> None:
    layer = model.model.layers[1]
    weights = [weakref.ref(module.weight) for module in (layer.mlp.down_proj, layer.input_layernorm)]
    layer.mlp, layer.input_layernorm = copy.deepcopy(layer.mlp), copy.deepcopy(layer.input_layernorm)
    run(engine)
    gc.collect()
    assert [weight() for weight in weights] == [None, None]
