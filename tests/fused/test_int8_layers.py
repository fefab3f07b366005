"""Models with int8 weights in native kernels: of torchao, of optimum-quanto, and on request; and with int4 ones."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_paged
from hf_paged.fused import overrides as fused_overrides
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu import weights as fused_weights
from hf_paged.fused.cpu.coded import CodedWeight, coded_weight
from hf_paged.kernels.native import build as native_build
from tests import models
from tests.fused import int8_layers
from tests.fused.native import SIZES, build
from tests.fused.test_int8 import in_eight_bits
from tests.noted import note_calls

pytestmark = [
    pytest.mark.usefixtures("bf16_kernels"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

MODES: dict[str, dict[str, Any]] = {"greedy": {}, "beams": {"num_beams": 3}}


@pytest.fixture
def fp32() -> Any:
    return build(transformers.LlamaConfig(**SIZES, attention_bias=True)).float()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each linear layer that was computed alone in a native kernel: whether its weight was in int8 or int4."""
    return note_calls(monkeypatch, fused_ops, "linear", lambda layer, rows: layer.int8 != layer.groups)


def generate(model: Any, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**models.batch(5, 30, 1), **settings, **options)


def paged(model: Any, **options: Any) -> torch.Tensor:
    return generate(model, cache_implementation="paged", **options)


def by_engine(model: Any, **options: Any) -> list[list[int]]:
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    with hf_paged.Engine(model, **options) as engine:
        return [output.outputs[0].token_ids for output in engine.generate(models.prompts(5, 30, 1), config)]


@pytest.mark.parametrize("package", int8_layers.PACKAGES)
@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens(
    package: str, mode: str, fp32: Any, products: list[bool], stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    int8_layers.PACKAGES[package](fp32, monkeypatch)
    plain = generate(fp32, **MODES[mode])
    assert not products
    assert paged(fp32, **MODES[mode]).equal(plain)
    assert products and all(products) and stacks and set(stacks) == {2}
    if mode == "greedy":
        report = hf_paged.check(fp32)
        assert report.native and report.int8_layers == 15
        assert "weights: 15 linear layers in int8, in native kernels" in str(report)
        expected = plain[:, 30:].tolist()
        assert by_engine(fp32) == by_engine(fp32, scheduler_config={"batch_invariant": True}) == expected


@pytest.mark.parametrize("package", int8_layers.PACKAGES)
def test_bf16(package: str, products: list[bool], stacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scores are the layers' own but for rounding; the same with packed copies, which an engine makes."""
    model = build(transformers.LlamaConfig(**SIZES, mlp_bias=True))
    int8_layers.PACKAGES[package](model, monkeypatch)
    options = {"return_dict_in_generate": True, "output_scores": True}
    plain, ours = generate(model, **options).scores[0], paged(model, **options).scores[0]
    assert products and all(products) and stacks
    assert (plain - ours).abs().max() <= 0.06 * plain.abs().max()
    before = by_engine(model, prepack=False)
    assert by_engine(model) == before
    if fused_ops.packs():
        native = [layer.native for layer in fused_weights.layers_for_engine(model, True)._layers]
        assert all(each is not None and each.is_packed and each.int8 is not None for each in native)
    else:
        with pytest.raises(ValueError, match="int8 weights are read where they are; leave it out"):
            by_engine(model, prepack=True)


@pytest.mark.usefixtures("packed_weights")
def test_the_bits_of_torchao(monkeypatch: pytest.MonkeyPatch, products: list[bool]) -> None:
    model = build(transformers.LlamaConfig(**SIZES, attention_bias=True))
    int8_layers.torchao(model, monkeypatch)
    options = {"return_dict_in_generate": True, "output_scores": True}
    found = torch.stack(paged(model, **options).scores)
    assert products and all(products)
    monkeypatch.setattr(fused_overrides, "layers_for_calls", lambda model: None)
    products.clear()
    assert found.equal(torch.stack(paged(model, **options).scores)) and not products


@pytest.mark.covering(1)
@pytest.mark.parametrize("package", int8_layers.PACKAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_changed_weights_are_followed(package: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(transformers.LlamaConfig(**SIZES)).to(dtype)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.roll(1, 0)
    for each in (model, other):
        int8_layers.PACKAGES[package](each, monkeypatch)
    with hf_paged.Engine(model) as engine:
        config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)

        def logprobs() -> Any:
            return engine.generate([[5, 6, 7]], config)[0].outputs[0].logprobs

        seen = [logprobs()]
        layer = model.model.layers[1].mlp.down_proj
        data, scale = int8_layers.inner(layer.weight)
        for factor, each in (-1, data), (1.5, scale):
            with torch.no_grad():
                each.mul_(factor)
            seen.append(logprobs())
        layer.weight = other.model.layers[1].mlp.down_proj.weight
        seen.append(logprobs())
        model.model.layers[0].mlp.up_proj = other.model.layers[0].mlp.up_proj
        seen.append(logprobs())
    assert all(before != after for before, after in itertools.pairwise(seen))
    with hf_paged.Engine(model, prepack=False) as engine:  # whose kernels compute the new layer too
        assert engine.generate([[5, 6, 7]], config)[0].outputs[0].logprobs == pytest.approx(seen[-1], abs=0.05)


def test_another_arithmetic_is_left_to_the_layer(fp32: Any, products: list[bool], monkeypatch: Any) -> None:
    """A version of a package may compute something else with tensors of the same names."""
    monkeypatch.setattr(fused_weights, "_agreeing", {})
    monkeypatch.setattr(int8_layers, "_is_installed", lambda package: False)
    int8_layers.torchao(fp32, monkeypatch)
    linear = int8_layers.Int8Tensor.__torch_function__.__func__

    def negative(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = linear(cls, func, types, args, kwargs)
        return -found if func is nn.functional.linear else found

    monkeypatch.setattr(int8_layers.Int8Tensor, "__torch_function__", classmethod(negative))
    assert paged(fp32).equal(generate(fp32))
    assert len(products) <= 1  # the trial


@pytest.mark.parametrize("name", ["dynamic", "groups"])
def test_other_formats_are_left_to_the_layer(name: str, fp32: Any, products: list[bool], monkeypatch: Any) -> None:
    int8_layers.torchao(fp32, monkeypatch)
    for layer in fp32.modules():
        if type(layer) is nn.Linear:
            halves = [1, layer.weight.shape[1] // 2]
            field, value = ("act_pre_scale", torch.tensor(1.0)) if name == "dynamic" else ("block_size", halves)
            setattr(layer.weight, field, value)
    assert fused_weights.layers_for_calls(fp32) is None
    assert not products


class TestPrepack:
    @pytest.mark.parametrize("mode", MODES)
    def test_the_tokens_of_rounded_weights(self, fp32: Any, mode: str, products: list[bool], stacks: list[int]) -> None:
        rounded = copy.deepcopy(fp32)
        int8_layers.dequantised(rounded)
        expected = generate(rounded, **MODES[mode])
        assert not expected.equal(generate(fp32, **MODES[mode]))
        hf_paged.prepack(fp32, dtype="int8")
        assert paged(fp32, **MODES[mode]).equal(expected)
        assert products and all(products) and stacks
        assert by_engine(fp32) == by_engine(rounded) != by_engine(fp32, prepack=False)
        assert hf_paged.check(fp32).int8_layers == 15
        hf_paged.release_memory(fp32)
        assert hf_paged.check(fp32).int8_layers == 0
        assert paged(fp32, **MODES[mode]).equal(generate(fp32, **MODES[mode]))

    def test_changed_weights_are_rounded_again(self, fp32: Any) -> None:
        hf_paged.prepack(fp32, dtype="int8")
        paged(fp32)
        with torch.no_grad():
            for parameter in fp32.parameters():
                parameter.copy_(parameter.roll(1, 0))
        rounded = copy.deepcopy(fp32)
        int8_layers.dequantised(rounded)
        assert paged(fp32).equal(generate(rounded))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_memory(self, dtype: torch.dtype) -> None:
        model = build(transformers.LlamaConfig(**SIZES)).to(dtype)
        hf_paged.prepack(model, dtype="int8")
        assert fused_weights.rounded_layers(model) == {8: 15}
        for layer in fused_weights.layers_for_calls(model)._layers:
            memory = layer.native.memory  # of whole panels
            assert memory.dtype in (torch.int8, torch.uint8) and memory.nbytes == layer._shape.numel()

    def test_the_last_request_counts(self, fp32: Any, products: list[bool]) -> None:
        hf_paged.prepack(fp32)
        copies = weakref.ref(fused_weights.layers_for_calls(fp32))
        hf_paged.prepack(fp32, dtype="int8")
        gc.collect()
        assert copies() is None
        paged(fp32)
        assert products and all(products)
        hf_paged.prepack(fp32)
        assert paged(fp32).equal(generate(fp32))

    @torch.no_grad()
    def test_what_it_costs(self) -> None:
        """On the shipped model: the bounds that docs/quantised.md states."""
        from pydoc_data.topics import topics

        folder = Path(__file__).parents[2] / "examples" / "pydoc-lm-base"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        made = AutoTokenizer.from_pretrained(folder)("\n".join(list(topics.values())[10:14]), return_tensors="pt")
        ids = made["input_ids"][:, : model.config.max_position_embeddings - 1]
        exact = model(ids).logits[0].log_softmax(-1)
        int8_layers.dequantised(model)
        rounded = model(ids).logits[0].log_softmax(-1)
        assert (exact.exp() * (exact - rounded)).sum(-1).mean() <= 1e-3
        assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() >= 0.97


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype, size", [("int4", None), ("int4", 128), ("int8", 64), ("w8a16", None), ("w4a8", None)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_weights_in_groups(
    dtype: str, size: int | None, tied: bool, mode: str, products: list[bool], stacks: list[int], tmp_path: Path
) -> None:
    """All doors give the tokens of plain `generate` with the same weights, and those of what it saves; where kernels
    round activations to 8 bits, of `generate` with rounded inputs of its linear layers."""
    model = build(transformers.LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=tied)).float()

    def rounded(layer: nn.Module, inputs: Any) -> torch.Tensor | None:
        return in_eight_bits(inputs[0], 32).float() if dtype == "w4a8" and type(layer) is nn.Linear else None

    def plainly(model: Any) -> torch.Tensor:
        with nn.modules.module.register_module_forward_pre_hook(rounded):
            return generate(model, **MODES[mode])

    exact, old = paged(model, **MODES[mode]), weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    hf_paged.prepack(model, dtype, group_size=size)
    gc.collect()
    assert old() is None and (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    plain = plainly(model)
    assert not plain.equal(exact)
    products.clear()
    stacks.clear()
    assert paged(model, **MODES[mode]).equal(plain) and paged(copy.deepcopy(model), **MODES[mode]).equal(plain)
    assert all(products) and products and set(stacks) == {2}
    report = hf_paged.check(model)
    assert (report.int8_layers, report.int4_layers) == ((1, 14) if dtype in ("int4", "w4a8") else (15, 0))
    state = model.state_dict()
    assert (state["lm_head.weight"].zero_() is state["model.embed_tokens.weight"]) == tied  # the codes stay
    model.save_pretrained(tmp_path)
    assert plainly(AutoModelForCausalLM.from_pretrained(tmp_path)).equal(plain)
    if mode == "greedy":
        model.generation_config.eos_token_id = None  # which an engine's request without one would take
        assert by_engine(model, prepack=True) == plain[:, 30:].tolist()


def test_a_file_that_was_mapped_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, which stay as they are, would keep its pages in memory. Before, each weight gives its own pages back."""
    given: list[Any] = []
    monkeypatch.setattr("hf_paged.fused.cpu.coded.give_back", lambda rows, places: given.append(rows.shape))
    build(transformers.LlamaConfig(**SIZES)).float().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    file, maps, plain = str(tmp_path / "model.safetensors"), Path("/proc/self/maps"), generate(model)
    if file not in maps.read_text():
        pytest.skip("transformers has not mapped the file")
    fused_weights.round_new(model, "int4")
    assert len(given) == 2 * sum(isinstance(each, CodedWeight) for each in model.parameters()) > 0
    gc.collect()
    assert file not in maps.read_text()
    assert paged(model).equal(generate(model)) and not plain.equal(generate(model))


def test_wrong_requests_and_who_reads_and_writes_weights_in_groups(fp32: Any) -> None:
    plain, odd, large, coded = (copy.deepcopy(fp32) for _ in range(4))
    large.model.layers[1].mlp.up_proj.weight.data[3, 4] = -7e4
    hf_paged.prepack(coded, "int4")
    for model, dtype, size, reason in (
        (fp32, "int4", 48, "give 32, 64 or 128, with one of 'int8', 'int4', 'w8a16'"),
        (fp32, "w8a16", 32.0, r"group_size=32\.0 .* give 32, 64 or 128"),
        (fp32, "bf16", 32, "give 32, 64 or 128, with one of"),
        (fp32, "int2", None, "dtype='int2': give 'int8', .*, 'w8a8', 'w4a8' or 'bf16', or leave it out"),
        (odd.double(), "int8", None, r"dtype='int8': there are no native kernels for torch\.float64"),
        (odd, "int4", None, r"there are no native kernels for weights of torch\.float64 on cpu; load the model in"),
        (large, "int4", None, r"model\.layers\.1\.mlp\.up_proj: .* from -7e\+04 to .*; load a checkpoint without"),
        (coded, "int4", None, "not in codes; to change them, load it again"),
        (coded, "int8", None, "its weights are in codes"),
    ):
        with pytest.raises(ValueError, match=reason):
            hf_paged.prepack(model, dtype, group_size=size)
    assert not any(coded_weight(layer) is not None for layer in large.modules())
    fp32, weight = coded, coded.lm_head.weight
    for write in (
        lambda: fp32.load_state_dict(plain.state_dict()),
        lambda: torch._foreach_add_([weight], 1),  # as optimizers do
        lambda: setattr(weight, "data", plain.lm_head.weight),
    ):
        with pytest.raises(RuntimeError, match=r"that is kept in [48] bits; load the model again"), torch.no_grad():
            write()
    plain.load_state_dict(fp32.state_dict())
    inputs = [torch.ones(1, 3, 64, requires_grad=True) for _ in range(2)]
    for model, rows in zip((coded, plain), inputs):
        model(inputs_embeds=rows).logits.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    for own in (torch.bfloat16, torch.float32):
        assert paged(fp32.to(own)).shape == (3, 42)
        layers = fused_weights.layers_for_calls(fp32)._layers
        assert {each.native.groups.dtype for each in layers} == {own}


def test_adapters_over_weights_in_groups(fp32: Any) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(fp32, peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False))
    hf_paged.prepack(model, "int4")
    assert {each.requires_grad for name, each in model.named_parameters() if "lora" in name} == {True}
    assert coded_weight(fp32.lm_head.base_layer).codes.form.bits == 8
    with pytest.raises(RuntimeError, match="that is kept in 4 bits"):
        model.merge_adapter()
    assert paged(model.eval()).equal(generate(model))


def test_without_kernels(fp32: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    int8_layers.torchao(fp32, monkeypatch)
    plain = generate(fp32)
    monkeypatch.setattr(native_build, "library", lambda: None)
    assert paged(fp32).equal(plain)
    with pytest.raises(ValueError, match=r"there are no native kernels for torch\.float32"):
        hf_paged.prepack(fp32, dtype="int8")
