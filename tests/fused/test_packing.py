"""Weights of layers that read the same rows, side by side: one product, the same tokens, one copy of each weight."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hf_paged import CacheConfig, Engine
from hf_paged.fused.gpu import model as fused_model
from hf_paged.fused.gpu.packing import LinearGroup
from tests import models
from tests.architectures.tiny import tiny_model
from tests.fused.fewer import ALL, INTERPRETED, by_generate, complete, kinds, run
from tests.fused.launches import count
from tests.generation import tape

pytestmark = [INTERPRETED, pytest.mark.usefixtures("by_torch")]


def new(family: str) -> Any:
    """qwen2: with random biases."""
    if family != "qwen2":
        return copy.deepcopy(models.shared(family))
    model = tiny_model("qwen2")
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def model() -> Any:
    return new("llama")


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    with open_engine(model) as engine:
        assert run(engine) == by_generate(model)
        yield engine


def open_engine(model: Any, prepack: bool | None = True) -> Engine:
    return Engine(model, CacheConfig(num_blocks=64), fuse=True, prepack=prepack)


def num_packed(model: Any) -> int:
    """Parts that the next step computes with one product instead of several."""
    groups = [LinearGroup(p.module, p.group.names) for p in fused_model.fused_parts(model)._parts if p.group]
    for group in groups:
        group.look()
    return sum(group.is_one for group in groups)


def num_bytes(model: Any) -> int:
    gc.collect()
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


def test_launches() -> None:
    for family, now in (("llama", 10), ("qwen3", 10), ("qwen2", 10), ("gemma3", 11)):
        model = new(family).bfloat16()
        layers = count(model, fused=True, packed=True)
        assert [len(layer) for layer in layers] == [now] * (model.config.num_hidden_layers - 1), layers[0]


@pytest.mark.quick_cases("[qwen2]")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_same_tokens_and_one_copy(family: str) -> None:
    model = new(family)
    weights, size, content = list(model.parameters()), num_bytes(model), copy.deepcopy(model.state_dict())
    with open_engine(model, None) as engine:
        assert num_packed(model) == 2 * model.config.num_hidden_layers
        assert run(engine) == by_generate(model) == by_generate(new(family))
    assert num_bytes(model) == size and all(map(lambda a, b: a is b, weights, model.parameters()))
    assert all(torch.equal(value, content[name]) for name, value in model.state_dict().items())
    open_engine(model).close()
    assert num_packed(model) == 2 * model.config.num_hidden_layers and num_bytes(model) == size


def test_replayed_graphs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tape.install(monkeypatch)
    tape.record_launches(monkeypatch)
    with Engine(model, CacheConfig(num_blocks=64), prepack=True, cuda_graphs=True) as engine:
        assert run(engine) == by_generate(model) and engine.stats().graph_replays >= 3
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = weight.data * 2
        assert run(engine) == by_generate(model)


def test_the_switch(model: Any) -> None:
    open_engine(model, prepack=False).close()
    assert num_packed(model) == 0
    with pytest.raises(ValueError, match="prepack=True: fuse=False; leave it out"):
        Engine(model, CacheConfig(num_blocks=64), fuse=False, prepack=True)
    with pytest.raises(ValueError, match="prepack=True: no weights of the model can be placed side by side; leave it"):
        open_engine(tiny_model("phi3"))
    with pytest.raises(ValueError, match="prepack=True: the model does not run packed"):
        Engine(tiny_model("bloom"), CacheConfig(num_blocks=64), prepack=True)
    open_engine(model, None).close()
    assert num_packed(model) == 4
    with open_engine(model, prepack=False) as engine:  # what another engine has moved stays where it is
        assert run(engine) == by_generate(model) and num_packed(model) == 4


def test_one_line_says_what_is_moved(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "hf_paged")
    for _ in range(2):
        open_engine(model).close()
    assert caplog.text.count("LlamaForCausalLM: weights of 4 parts were placed side by side, for one product") == 1


# -- what is left where it is ----------------------------------------------------------------------------------------


def tie(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.weight = model.model.layers[0].self_attn.v_proj.weight


def tie_elsewhere(model: Any) -> None:
    """Layer 0 moves the weight of both."""
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight


def hook(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 0.5)


def add_bias(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.randn(32))


@pytest.mark.parametrize("change", [tie, tie_elsewhere, add_bias, hook])
def test_layers_that_are_not_plain_or_share_memory(change: Callable[[Any], Any], model: Any) -> None:
    change(model)
    with open_engine(model) as engine:
        assert num_packed(model) == 3
        assert run(engine) == by_generate(model)


def test_weights_that_a_program_keeps(model: Any) -> None:
    state = model.state_dict()
    with pytest.raises(ValueError, match="no weights of the model can be placed side by side"):
        open_engine(model)
    alias = state.pop("model.layers.0.mlp.up_proj.weight")
    del state
    with open_engine(model) as engine:
        assert num_packed(model) == 3 and run(engine) == by_generate(model)
        with torch.no_grad():
            alias.mul_(2)
        assert run(engine) == by_generate(model)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, AttributeError])
def test_too_little_memory_and_other_failures(
    error: type[Exception], model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cat, calls = torch.cat, []

    def limited(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if type(tensors) is list and tensors[0].dim() == 2 and not tensors[0].requires_grad and len(tensors) == 3:
            calls.append(1)
            if len(calls) == 2:
                raise error("the reason")
        return cat(tensors, *args, **kwargs)

    fused = fused_model.fused_parts(model)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", limited)
        assert fused.pack() == 2
    assert f"other weights stay where they are ({error.__name__}: the reason)" in caplog.text
    with open_engine(model, prepack=False) as engine:
        assert run(engine) == by_generate(model)


def replace_data(model: Any) -> None:
    weight = model.model.layers[1].self_attn.k_proj.weight
    weight.data = torch.randn_like(weight)


def replace_module(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.q_proj = copy.deepcopy(layer.q_proj)
    with torch.no_grad():
        layer.q_proj.weight.mul_(2)


def assign(model: Any) -> None:
    model.load_state_dict({name: x * 2 for name, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replace_data, replace_module, assign, hook])
def test_replaced_weights_and_layers(change: Callable[[Any], Any], model: Any, engine: Engine) -> None:
    before = complete(engine).logprobs
    change(model)
    after = complete(engine)
    assert after.token_ids == by_generate(model) and after.logprobs != before


def test_changes_in_place(model: Any, engine: Engine) -> None:
    other = {name: torch.randn_like(x) for name, x in model.state_dict().items()}
    model.load_state_dict(other)
    assert run(engine) == by_generate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()
    assert run(engine) == by_generate(model)
    for weight in model.parameters():
        weight.data.copy_(torch.randn_like(weight))
    assert run(engine) == by_generate(model)
    assert num_packed(model) == 4


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT reads it
def test_adapters(model: Any, engine: Engine) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    plain, adapted = by_generate(model), peft.get_peft_model(model, config).eval()
    for _ in range(2):
        with Engine(adapted, CacheConfig(num_blocks=64), fuse=True) as engine_with:
            assert run(engine_with) == by_generate(adapted) != plain and kinds(model) >= ALL
    merged = adapted.merge_and_unload()
    assert run(engine) == by_generate(merged)


def test_each_weight_is_a_storage_of_its_own(model: Any, tmp_path: Path) -> None:
    """Programs that save models take parameters which share a storage for one, and drop all but the first."""
    open_engine(model).close()
    assert num_packed(model) == 2 * model.config.num_hidden_layers
    parameters = list(model.parameters())
    storages = [parameter.untyped_storage() for parameter in parameters]
    assert len({storage.data_ptr() for storage in storages}) == len(parameters)
    assert [storage.nbytes() for storage in storages] == [parameter.nbytes for parameter in parameters]
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters())
    other = pytest.importorskip("accelerate.utils.other")
    assert len(other.clean_state_dict_for_safetensors(model.state_dict())) == len(model.state_dict())


def test_an_engine_made_in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        engine = open_engine(model)
    with engine:
        assert run(engine) == by_generate(model) and num_packed(model) == 2 * model.config.num_hidden_layers
    assert not any(parameter.is_inference() for parameter in model.parameters())
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
