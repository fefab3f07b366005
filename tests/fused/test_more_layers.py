"""Other layers in fewer launches: attention beside the MLP, MLPs without gate, biases, norms with their own epsilon."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hf_paged import CacheConfig, Engine
from hf_paged.fused.gpu import norms, parts
from hf_paged.fused.gpu.layers import LayerPart
from hf_paged.fused.gpu.model import fused_parts
from hf_paged.fused.gpu.parts import ChainPart
from tests.fused.fewer import INTERPRETED, Halves, by_generate, computes_as_plain, kinds, new, run

pytestmark = [INTERPRETED, pytest.mark.usefixtures("by_torch")]


def layers_of(model: Any) -> list[Any]:
    found: Any = fused_parts(model)
    return [part for part in found._parts if isinstance(part, LayerPart)]


@pytest.mark.parametrize("name", ["phi", "starcoder2", "modernbert-decoder"])
def test_the_same_tokens(name: str) -> None:
    model = new(name)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert kinds(model) >= {"MLP", "layer"} and len(layers_of(model)) == model.config.num_hidden_layers
        assert all(layer._norms.is_parallel == (name == "phi") for layer in layers_of(model))
        assert run(engine) == by_generate(model)
        for layer in layers_of(model):
            mlp = layer.module._modules[layer._mlp]
            with torch.no_grad():
                for parameter in mlp.parameters():
                    parameter.mul_(-2)
        assert run(engine) == by_generate(model)


def test_layers_that_are_called_several_times() -> None:
    """Each call has another layer of the cache, of which only the attention knows."""
    model = new("hrm_text")
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert kinds(model) == {"norm", "MLP", "layer"} and len(layers_of(model)) == 4
        assert run(engine) == by_generate(model) and computes_as_plain(engine, model)


def test_calls_of_a_layer_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer gives its attention another constant in every second call."""
    model = new("hrm_text")
    owner = type(model.model.L_module.layers[0])
    own, calls = owner.forward, itertools.count()

    def forward(layer: Any, rows: torch.Tensor, **kwargs: Any) -> Any:
        return own(layer, rows, **kwargs, is_first_iteration=next(calls) // 2 % 2 == 0)

    monkeypatch.setattr(owner, "forward", forward)
    assert not layers_of(model)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert run(engine) == by_generate(model)


def test_a_bias_that_is_multiplied_or_read() -> None:
    """A bias of the last product is added beforehand only where nothing else reads the sum."""
    model = new("starcoder2")
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.Identity()
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert computes_as_plain(engine, model) and run(engine) == by_generate(model)


@pytest.mark.parametrize("place", ["mlp.fc2", "resid_dropout"])
def test_hooks_in_a_parallel_layer(place: str) -> None:
    model = new("phi")
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        before = run(engine)
        module = model.model.layers[1].get_submodule(place)
        handle = module.register_forward_hook(lambda module, args, out: out * -3)
        assert run(engine) == by_generate(model) != before
        handle.remove()
        assert run(engine) == before


def test_what_is_no_chain() -> None:
    """The module computes something between its children, or another child reads its rows."""
    model = new("nemotron")
    owner = type(model.model.layers[0].mlp)
    assert any(isinstance(part, ChainPart) for part in fused_parts(model)._parts)  # type: ignore[union-attr]

    class Scaled(owner):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.up_proj(x)) * 1.0)

    class Skipping(owner):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.act_fn(self.up_proj(x))
            return self.down_proj(self.up_proj(x))

    for other in (Scaled, Skipping):
        changed = new("nemotron")
        for layer in changed.model.layers:
            layer.mlp.__class__ = other
        assert not any(isinstance(part, ChainPart) for part in fused_parts(changed)._parts)  # type: ignore[union-attr]
        with Engine(changed, CacheConfig(num_blocks=64), fuse=True) as engine:
            assert run(engine) == by_generate(changed)


class OwnEpsilon(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.own_name = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], None, None, self.own_name)


class InCode(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], None, None, 1e-6)


class Limited(InCode):
    is_limited = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(max=1e4) if self.is_limited else super().forward(x)


def test_what_random_rows_do_not_show_of_a_norm() -> None:
    plain, limited = Limited(), Limited()
    plain.is_limited = False
    assert norms.norm_of(plain, 64, torch.float32) is not None and norms.norm_of(limited, 64, torch.float32) is None


class Multiplied(InCode):
    eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self._factor


def test_a_norm_with_another_number_is_another_norm() -> None:
    """Whatever holds the number: what was found for one module is no verdict on the next."""
    for of_kind in (float, torch.tensor, lambda x: [torch.tensor(x)], lambda x: nn.Buffer(torch.tensor(x))):
        for number in (1.0, 3.0):
            norm = Multiplied()
            norm._factor = of_kind(number)  # type: ignore[assignment, operator]
            is_norm = norms.norm_of(norm, 64, torch.float32) is not None
            assert is_norm == (number == 1 and of_kind is float), (of_kind, number)


def test_epsilons() -> None:
    """One that is an attribute of an unknown name may be changed; one in the code is found."""
    assert norms.norm_of(OwnEpsilon(1e-6), 64, torch.float32) is None
    module = InCode()
    found = norms.norm_of(module, 64, torch.float32)
    assert found is not None and found().eps == 1e-6 and found().kind.is_centered
    assert norms.norm_of(Halves(), 64, torch.float32) is None


def test_a_product_that_cannot_be_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is tried with the part of its MLP too."""
    model = new("nemotron")
    monkeypatch.setattr(parts.MLPPart, "add_to", lambda self, residual, *_: residual.mul_(2))
    assert kinds(model) == {"attention", "norm", "activation"}
