"""Decoder layers in fewer launches on GPUs: what is recognised, how many are left, the same tokens, others' code."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.fused.gpu import model as fused_model
from hf_paged.fused.gpu.kernels import gate, norm, rotary
from hf_paged.integration.names import CACHE
from tests import models
from tests.architectures.tiny import tiny_model
from tests.forwards import bound_model
from tests.fused import fewer
from tests.fused.fewer import ALL, INTERPRETED, NEW_TOKENS, ROTARY, by_generate, complete, kinds, run, shortened
from tests.fused.launches import count
from tests.implementations import compute_by

pytestmark = INTERPRETED


@pytest.mark.parametrize("family,eager,now", [("llama", 40, 13), ("qwen3", 56, 13), ("gemma3", 84, 14)])
def test_launches(family: str, eager: int, now: int) -> None:
    model = copy.deepcopy(models.shared(family)).bfloat16()
    assert [len(layer) for layer in count(model, fused=False)] == [eager] * (model.config.num_hidden_layers - 1)
    layers = count(model, fused=True)
    assert [len(layer) for layer in layers] == [now] * (model.config.num_hidden_layers - 1), layers[0]


# Type -> launches of a layer: eager, now (means of its layers). See docs/gpu.md for all types.
LAUNCHES = {
    "phi3": (39, 10), "cohere": (40, 13), "olmo2": (58, 15), "ministral3": (48, 13), "hunyuan_v1_dense": (56, 13),
    "gpt_oss": (67, 16), "mixtral": (58, 16), "qwen2_moe": (65, 24), "persimmon": (27, 10), "nemotron": (29, 12),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_more_types(name: str) -> None:
    model = tiny_model(name).bfloat16()
    found = [sum(map(len, layers)) / len(layers) for layers in (count(model, fused=fused) for fused in (False, True))]
    assert tuple(found) == LAUNCHES[name]


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_the_same_tokens(family: str) -> None:
    model = models.shared(family)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert run(engine) == by_generate(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "phi3", "gemma3_text", "glm4_moe"])
def test_the_same_tokens_with_all_our_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer.on_cpu(monkeypatch)
    compute_by(monkeypatch, "triton")
    model = shortened(tiny_model(name), 1 if name in ("qwen2", "phi3") else 2)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert run(engine, 11, 2) == by_generate(model, 11, 2)  # a prompt, and a decode step


@pytest.mark.usefixtures("by_torch")
def test_calls_of_generate(paged_equals_plain: Callable[..., Any]) -> None:
    ids = torch.stack(models.prompts(5))
    paged_equals_plain(models.shared("qwen3"), ids, max_new_tokens=NEW_TOKENS, num_beams=2)


@pytest.mark.usefixtures("by_torch")
def test_behaviour_that_few_tokens_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that few values reach, multipliers that are 1, queries that are scaled from some position on."""
    assert kinds(copy.deepcopy(models.shared("llama"))) == ALL | {"norm"}
    limited = copy.deepcopy(models.shared("llama"))

    for layer in limited.model.layers:
        layer.mlp.act_fn = fewer.Limited()
    assert kinds(limited) == {"attention", "layer", "norm"}

    owner = type(limited.model.layers[0])
    forward = owner.forward
    multiplied = copy.deepcopy(models.shared("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(owner, "forward", lambda *args, **kwargs: forward(*args, **kwargs) * 1.0)
        assert kinds(multiplied) == {"attention", "MLP", "norm"}

    scaled = copy.deepcopy(models.shared("llama"))
    space = inspect.unwrap(type(scaled.model.layers[0].self_attn).forward).__globals__
    rotary = space[ROTARY]

    def scaling(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        turned, key = rotary(query, *args, **kwargs)
        return turned * 1.0, key

    with monkeypatch.context() as patch:
        patch.setitem(space, ROTARY, scaling)
        assert kinds(scaled) == {"MLP", "layer", "norm"}


@pytest.mark.usefixtures("by_torch")
def test_kernels_that_fail_or_give_something_else(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gate, "gated", mock.Mock(side_effect=RuntimeError("no assembler")))
        assert kinds(copy.deepcopy(models.shared("llama"))) == {"attention", "layer", "norm"}
    assert "2 layers (of 2 attentions); LlamaMLP: RuntimeError: no assembler" in caplog.text
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(rotary, "rotate", lambda *args, **kwargs: fewer.rotate(*args, **kwargs | {"angles": None}))
        assert kinds(copy.deepcopy(models.shared("llama"))) == {"MLP", "layer", "norm"}
    with monkeypatch.context() as patch:
        patch.setattr(
            norm, "add_norm", lambda rows, *added, **norms: fewer.add_norm(rows, *(x * 2 for x in added), **norms)
        )
        assert kinds(copy.deepcopy(models.shared("gemma3"))) == {"attention", "MLP", "norm"}
    assert not caplog.text


class Positional(nn.Module):
    """A layer that passes what it gets by place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.one, self.two, self.attend, self.mix = (
            layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn, layer.mlp
        )  # fmt: skip

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        angles, mask, cache = kwargs["position_embeddings"], kwargs["attention_mask"], kwargs[CACHE]
        x = x + self.attend(self.one(x), angles, mask, cache)[0]
        return x + self.mix(self.two(x))


@pytest.mark.usefixtures("by_torch")
def test_arguments_by_place_and_other_names() -> None:
    model = copy.deepcopy(models.shared("llama"))
    expected = by_generate(model)
    model.model.layers = nn.ModuleList(map(Positional, model.model.layers))
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert kinds(model) == ALL | {"norm"} and run(engine) == expected


@pytest.mark.usefixtures("by_torch")
def test_arguments() -> None:
    model = models.shared("llama")
    with Engine(model, CacheConfig(num_blocks=64), fuse=False) as engine:
        assert bound_model(engine)._overrides == []
    bert = tiny_model("bloom")
    with pytest.raises(ValueError, match="fuse=True: the model does not run packed"):
        Engine(bert, CacheConfig(num_blocks=64), fuse=True)


def test_other_devices() -> None:
    with pytest.raises(ValueError, match="fuse=True: the model is on cpu; leave it out"):
        Engine(models.shared("llama"), CacheConfig(num_blocks=64), fuse=True)


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "linear": lambda model: model.model.layers[1].mlp.down_proj,
    "activation": lambda model: model.model.layers[1].mlp.act_fn, "mlp": lambda model: model.model.layers[1].mlp,
    "attention": lambda model: model.model.layers[1].self_attn,
    "norm of heads": lambda model: model.model.layers[1].self_attn.q_norm,
    "norm in a layer": lambda model: model.model.layers[1].post_attention_layernorm,
    "layer": lambda model: model.model.layers[1],
}  # fmt: skip


@pytest.fixture
def model(by_torch: None) -> Any:
    return copy.deepcopy(models.shared("qwen3"))


class Halves:
    """Code of others in place of a function, or a hook: halves the (first) result and counts its calls."""

    def __init__(self, function: Callable[..., Any] = lambda module, args, result: result) -> None:
        self.calls = 0
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        result = self._function(*args, **kwargs)
        return (result[0] * 0.5, *result[1:]) if isinstance(result, tuple) else result * 0.5


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_and_a_hook(place: str, model: Any, engine: Engine) -> None:
    module = PLACES[place](model)
    module.forward = halves = Halves(module.forward)
    expected = by_generate(model)
    assert run(engine) == expected and halves.calls >= 2 * NEW_TOKENS
    assert vars(module)["forward"] is halves
    if place in ("mlp", "norm of heads", "layer"):  # set before the engine is made
        with Engine(model, CacheConfig(num_blocks=64), fuse=True) as later:
            assert run(later) == expected
    del module.forward
    calls = halves.calls
    before = run(engine)
    assert halves.calls == calls and not any("forward" in vars(m) for m in model.modules())
    hook = Halves()
    handle = module.register_forward_hook(hook)
    assert run(engine) == expected and hook.calls == NEW_TOKENS
    handle.remove()
    assert run(engine) == before == by_generate(model) and hook.calls == NEW_TOKENS


@pytest.mark.parametrize("place", ["linear", "norm in a layer"])
def test_a_class_patched_later(place: str, model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = type(PLACES[place](model))
    forward = owner.forward
    with monkeypatch.context() as patch:
        patch.setattr(owner, "forward", lambda *args, **kwargs: Halves(forward)(*args, **kwargs))
        assert run(engine) == by_generate(model)
    assert run(engine) == by_generate(model)


def test_a_module_replaced(model: Any, engine: Engine) -> None:
    layer = model.model.layers[1]
    for parent, name in ((layer, "post_attention_layernorm"), (layer.self_attn, "k_norm"), (layer.mlp, "up_proj")):
        before = complete(engine).logprobs
        other = copy.deepcopy(getattr(parent, name))
        with torch.no_grad():
            other.weight.copy_(torch.randn_like(other.weight) * 2)
        setattr(parent, name, other)
        after = complete(engine)
        assert after.token_ids == by_generate(model) and after.logprobs != before


def test_a_rotary_function(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    space = vars(sys.modules[type(model).__module__])
    with monkeypatch.context() as patch:
        patch.setitem(space, ROTARY, Halves(space[ROTARY]))
        assert run(engine) == by_generate(model)
        assert space[ROTARY].calls == 2 * 2 * NEW_TOKENS
    assert run(engine) == by_generate(model)


@pytest.mark.usefixtures("by_torch")
def test_training_mode_and_autocast() -> None:
    model = copy.deepcopy(models.shared("llama")).train()
    assert fused_model.fused_parts(model) is None and fused_model.obstacle(model) == "the model is in training mode"
    with torch.autocast("cpu", torch.bfloat16):
        assert fused_model.obstacle(model.eval()) == "autocast is on"


@pytest.mark.usefixtures("by_torch")
def test_the_report_says_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(models.shared("llama"))
    found = "computed in fewer launches: 5 norms, 2 attentions, 2 MLPs, 2 layers (of 2 attentions)"
    assert hf_paged.check(model).fused == found and f"  between attentions: {found}\n" in str(hf_paged.check(model))
    report = hf_paged.check(copy.deepcopy(models.shared("llama")).train())
    assert report.fused == "nothing is computed in fewer launches: the model is in training mode"
    assert hf_paged.check(tiny_model("bert")).fused.endswith("no part of it is known")
    assert hf_paged.check(tiny_model("bloom")).fused == ""
    monkeypatch.setattr(fused_model, "DEVICE_TYPE", "cuda")
    assert hf_paged.check(model).fused == ""
