"""Weights that the native kernels read themselves, where there are no packed copies."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from hf_paged.fused import overrides as fused_overrides
from hf_paged.fused.cpu import decoder as fused_decoder
from hf_paged.fused.cpu import large_pages
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu import weights as fused_weights
from hf_paged.kernels.buffers import mapped_files
from tests import models
from tests.conftest import state_of
from tests.fused.native import KNOWN, SIZES, build
from tests.noted import note_calls

pytestmark = pytest.mark.usefixtures("bf16_kernels")


@pytest.fixture
def llama() -> Any:
    return build(transformers.LlamaConfig(**SIZES))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each linear layer that was computed alone in a native kernel: whether its weight was packed."""
    return note_calls(monkeypatch, fused_ops, "linear", lambda layer, rows: layer.is_packed)


def switched_off(patch: pytest.MonkeyPatch) -> None:
    """torch computes linear layers until the end of the test."""
    patch.setattr(fused_overrides, "layers_for_calls", lambda model: None)
    patch.setattr(fused_overrides, "layers_for_engine", lambda model, prepack: None)


def scores(model: Any, **options: Any) -> torch.Tensor:
    """The scores of each new token, [new tokens, rows, vocab]."""
    batch = models.batch(5, 20, 1)
    settings = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **options}
    paged = {"cache_implementation": "paged", "return_dict_in_generate": True, "output_scores": True}
    return torch.stack(model.generate(**batch, **settings, **paged).scores)


def agree(ours: torch.Tensor, by_torch: torch.Tensor) -> bool:
    """Equal scores, where bf16 sums have torch's order; elsewhere equal but for rounding, those of the first token."""
    if fused_ops.packs():
        return ours.equal(by_torch)
    return bool(((ours[0] - by_torch[0]).abs() <= 0.06 * by_torch[0].abs().max()).all())


def prepack(model: Any) -> None:
    if model.dtype == torch.bfloat16 and not fused_ops.packs():
        pytest.skip("packed weights in bf16 need AVX-512 with BF16")
    hf_paged.prepack(model)


@pytest.mark.usefixtures("packed_weights")
@pytest.mark.parametrize("kind", ["llama", "llama-biased", "gemma3"])
def test_copies_give_the_same_bits(kind: str, calls: list[bool]) -> None:
    """On AMX too, whose sums have an order of their own."""
    model = build(KNOWN[kind][0]())
    found = scores(model)
    hf_paged.prepack(model)
    calls.clear()
    assert scores(model).equal(found) and calls and all(calls)
    hf_paged.release_memory(model)
    calls.clear()
    assert scores(model).equal(found) and calls and not any(calls)


@pytest.mark.usefixtures("packed_weights")
@pytest.mark.parametrize("kind", ["llama-biased", "gemma3"])
def test_the_bits_of_torch(kind: str, monkeypatch: pytest.MonkeyPatch, calls: list[bool]) -> None:
    model = build(KNOWN[kind][0]())
    before = state_of(model)
    found = scores(model), scores(model, num_beams=3)
    assert calls and not any(calls) and state_of(model) == before
    switched_off(monkeypatch)
    assert scores(model).equal(found[0]) and scores(model, num_beams=3).equal(found[1])


@pytest.mark.parametrize("is_exact", [True, False])
def test_exact_copies_in_bf16_of_fp32_weights(is_exact: bool, llama: Any, calls: list[bool]) -> None:
    """The same bits from half of the memory, also after a weight has got a value that bf16 does not represent."""
    model = llama.float()
    expected = scores(model)
    hf_paged.prepack(model, dtype="bf16")
    calls.clear()
    assert scores(model).equal(expected) and calls and all(calls)
    layers = fused_weights.layers_for_calls(model)
    assert all(x.native.memory.dtype == torch.bfloat16 for x in layers._layers)  # type: ignore[union-attr]
    with hf_paged.Engine(model) as engine:
        calls.clear()
        engine.generate(models.prompts(3, 40), GenerationConfig(max_new_tokens=3, eos_token_id=None, pad_token_id=0))
        assert all(calls)
    with torch.no_grad():
        model.lm_head.weight[3] += 1.0 if is_exact else 1e-3
        model.lm_head.weight[3] = model.lm_head.weight[3].bfloat16() if is_exact else model.lm_head.weight[3]
    calls.clear()
    changed = scores(model)
    assert all(calls) == is_exact and not changed.equal(expected)
    hf_paged.release_memory(model)
    assert scores(model).equal(changed)


def test_copies_in_bf16_are_refused_where_they_would_round(llama: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype='bf16': only weights in float32 .*, not those of torch\.bfloat16"):
        hf_paged.prepack(llama, dtype="bf16")
    model = llama.float()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[5, 5] = 1 + 2**-9
    with pytest.raises(ValueError, match=r"dtype='bf16': bfloat16 does not represent .* a weight \[96, 64\] exactly"):
        hf_paged.prepack(model, dtype="bf16")
    assert not fused_weights.is_prepacked(model)


def test_engines_move_weights_out_of_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(transformers.LlamaConfig(**SIZES)).float().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    before, up = dict(model.named_parameters()), model.model.layers[1].mlp.up_proj.weight
    kept = up.detach()  # by a program, which would miss changes of the weight

    def stay(least: int, prepack: bool | None, factor: float = 1) -> list[torch.Tensor]:
        """The linear weights that are in the file after an engine, whose tokens are plain's."""
        monkeypatch.setattr(large_pages, "LEAST_BYTES", least)
        model.model.layers[0].mlp.up_proj.weight.data.mul_(factor)
        with hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=16), prepack=prepack) as engine:
            options = GenerationConfig(max_new_tokens=4, eos_token_id=None, pad_token_id=0, do_sample=False)
            expected = model.generate(torch.tensor([[5, 6, 7]]), options)[0, 3:].tolist()
            assert list(engine.generate([[5, 6, 7]], options)[0].outputs[0].token_ids) == expected
        weights = [w for name, w in before.items() if name.endswith(("proj.weight", "head.weight"))]
        return [w for w in weights if any(w.data_ptr() in file for file in mapped_files())]

    assert len(stay(1, False)) == len(stay(1 << 30, None)) == 15
    assert [w is up for w in stay(1, None, -3)] == [w is up for w in stay(1, None, -3)] == [True] and kept.equal(up)
    assert all(parameter is before[name] and parameter.requires_grad for name, parameter in model.named_parameters())


@pytest.mark.parametrize("prepack", [False, None])
def test_models_that_run_as_rows_move_theirs_too(prepack: bool | None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(large_pages, "LEAST_BYTES", 1)
    sizes: dict[str, Any] = {
        "vocab_size": 97, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 64,
    }  # fmt: skip
    transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).save_pretrained(tmp_path)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float32)
    with hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=16), prepack=prepack):
        weight = model.model.decoder.layers[0].fc1.weight
        assert any(weight.data_ptr() in file for file in mapped_files()) == (prepack is False)


def test_layers_are_tried_on_few_tokens_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = note_calls(monkeypatch, fused_decoder.Layer, "_try", lambda layer, hidden, kwargs: hidden.shape[1])
    steps = note_calls(monkeypatch, fused_overrides, "_try_on_few_tokens", lambda *args: 1)
    state = torch.get_rng_state()
    scores(llama)
    scores(llama)
    assert len(steps) == 1 and lengths == [fused_decoder.TRIAL_TOKENS] * 2
    assert torch.get_rng_state().equal(state)


def test_memory_that_a_weight_no_longer_has_is_freed(llama: Any) -> None:
    weight = llama.model.layers[0].mlp.gate_proj.weight
    array = np.zeros(tuple(weight.shape), dtype=np.uint16)
    memory = weakref.ref(array)
    weight.data = torch.from_numpy(array).view(torch.bfloat16)
    del array
    scores(llama)
    assert memory() is not None
    weight.data = torch.ones_like(weight)
    assert memory() is None


def test_weights_in_another_layout_or_dtype_are_left_to_torch(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scores(llama)
    projection = llama.model.layers[0].mlp.gate_proj
    projection.weight.data = projection.weight.data.t().contiguous().t()
    found = scores(llama)
    llama.lm_head.weight.data = llama.lm_head.weight.data.float()
    head = llama.lm_head
    head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    mixed = scores(llama)
    switched_off(monkeypatch)
    by_torch = scores(llama)  # torch sums products of fp32 in another order than the native head
    assert agree(mixed, by_torch) or (mixed - by_torch).abs().max() <= 1e-5 * by_torch.abs().max()
    head._forward_pre_hooks.clear()
    head.weight.data = head.weight.data.bfloat16()
    assert agree(found, scores(llama))


@pytest.mark.parametrize("has_copies", [False, True])
@pytest.mark.parametrize("is_tried", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)],
)
@pytest.mark.covering(1)
def test_autocast(
    llama: Any, dtype: torch.dtype, autocast: torch.dtype, is_tried: bool, has_copies: bool, calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = llama.to(dtype)
    if has_copies:
        prepack(model)
    if is_tried:
        scores(model)
    calls.clear()
    with torch.autocast("cpu", dtype=autocast):
        found = scores(model)
        assert not calls
    if dtype == torch.bfloat16:
        assert scores(model).numel() and calls
    with torch.autocast("cpu", dtype=autocast):
        switched_off(monkeypatch)
        assert scores(model).equal(found)


def test_replaced_layers_are_freed(llama: Any) -> None:
    scores(llama)
    old = []
    for name, module in list(llama.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            old.append(weakref.ref(module.weight))
            parent = llama.get_submodule(name.rpartition(".")[0])
            new = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            setattr(parent, name.rpartition(".")[2], new.bfloat16() if len(old) % 2 else new.bfloat16().double())
    del module, parent
    llama.bfloat16()
    scores(llama)
    layers = fused_weights.layers_for_calls(llama)
    assert layers is not None and layers.of(new) is not None  # the new ones are read in place too
    llama.double()
    scores(llama)
    gc.collect()
    assert not any(weight() is not None for weight in old)


@pytest.mark.parametrize("has_copies", [False, True])
def test_a_bias_in_another_layout_or_dtype(has_copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(KNOWN["llama-biased"][0]())
    if has_copies:
        prepack(model)
    scores(model)
    for projection in (model.model.layers[0].self_attn.v_proj, model.model.layers[1].mlp.up_proj):
        other = torch.randn(len(projection.bias))
        projection.bias = torch.nn.Parameter(torch.stack([projection.bias.data, other.bfloat16()], dim=1)[:, 0])
    found = scores(model)
    switched_off(monkeypatch)
    assert agree(found, scores(model))


def test_nothing_for_fp64_or_inference_weights(llama: Any) -> None:
    assert fused_weights.layers_for_calls(llama) is not None
    assert fused_weights.layers_for_calls(models.build("llama")) is not None
    assert fused_weights.layers_for_calls(models.build("llama").double()) is None
    with torch.inference_mode():
        other = build(transformers.LlamaConfig(**SIZES))
    assert fused_weights.layers_for_calls(other) is None
