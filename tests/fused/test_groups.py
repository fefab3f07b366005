"""Linear layers of weights in codes of 4 or 8 bits, in native kernels, beside their values in fp64."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from hf_paged.fused.cpu import groups
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu import stack as fused_stack
from tests import models
from tests.fused.native import SIZES, build
from tests.noted import note_calls

pytestmark = pytest.mark.usefixtures("bf16_kernels")

COUNTS = [1, 2, 3, 5, 8, 9, 40, 65]  # of rows: each tile of the kernels, and more than are computed together


def coded(columns: int, depth: int, bits: int, size: int) -> groups.Codes:
    generator = torch.Generator().manual_seed(columns)
    return groups.rounded(torch.randn(columns, depth, generator=generator) * 0.1, bits, size)


def layer(codes: groups.Codes, bias: torch.Tensor | None, dtype: torch.dtype) -> fused_ops.LinearWeight:
    how = fused_ops.InGroups(codes.bits, codes.size, dtype)
    return fused_ops.LinearWeight(codes.memory, bias, codes.columns, codes.depth, True, None, how)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns, depth", [(32, 64), (50, 40), (7, 33), (200, 2100), (96, 1)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", groups.SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_sums(dtype: torch.dtype, columns: int, depth: int, bits: int, size: int, biased: bool) -> None:
    if not fused_ops.is_available(dtype):
        pytest.skip(f"no kernels for {dtype}")
    codes = coded(columns, depth, bits, size)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(max(COUNTS), depth, generator=generator) * torch.logspace(-1.5, 1, max(COUNTS))[:, None]
    # Most elements are small beside a few, as in models.
    rows[:, ::37] *= 1000
    rows, bias = rows.to(dtype), torch.randn(columns, generator=generator).to(dtype)
    weight = codes.values().double()
    known = rows.double() @ weight.T + (bias.double() if biased else 0)
    # A large element may have a small weight, which is the difference of larger numbers.
    terms = rows.double().abs().sum(1, keepdim=True) * weight.abs().amax(1) + bias.double().abs()
    native = layer(codes, bias if biased else None, dtype)
    all_rows = fused_ops.linear(native, rows)
    for count in COUNTS:  # the same bits in any batch
        assert fused_ops.linear(native, rows[:count]).equal(all_rows[:count])
    # Of rows in 16 bits, each element of a group is rounded to 2**-15 of the largest one.
    bound = torch.finfo(dtype).eps * known.abs() + (2**-12 if dtype.itemsize == 2 else 3e-7) * terms + 1e-7
    assert ((all_rows.double() - known).abs() <= bound).all()


def test_what_is_not_finite_is_seen() -> None:
    rows = torch.ones(2, 64)
    rows[0, 40] = torch.inf
    found = fused_ops.linear(layer(coded(32, 64, 4, 32), None, torch.float32), rows)
    assert not found[0].isfinite().any() and found[1].isfinite().all()


@pytest.mark.parametrize("bits, most", [(4, 0.076), (8, 0.0048)])
def test_rounding(bits: int, most: float) -> None:
    """Least squares leave 0.074 of normal numbers; the range of a group alone, 0.078."""
    weight = torch.randn(300, 2050, generator=torch.Generator().manual_seed(0))
    codes = groups.rounded(weight, bits, 32)
    assert (codes.values() - weight).square().mean().sqrt() < most
    index = torch.tensor([[299, 0], [17, 299]])
    assert codes.columns_at(index).equal(codes.values()[index])
    with pytest.raises(ValueError, match="which fp16 cannot span"):
        groups.rounded(weight * 1e6, bits, 32)
    equal = torch.full((16, 32), 0.5)
    assert groups.rounded(equal, bits, 32).values().equal(equal)


def test_the_layout_keeps_codes() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (20, 3, 32), generator=generator).to(torch.uint8)
    scale, least = torch.rand(2, 20, 3, generator=generator).half()
    expected = codes * scale[..., None].float() + least[..., None].float()
    assert groups.from_codes(codes, scale, least, 4).values().equal(expected.flatten(1))


def llama(**sizes: Any) -> Any:
    return build(transformers.LlamaConfig(**SIZES, attention_bias=True, **sizes)).float()


def generate(model: Any, **options: Any) -> torch.Tensor:
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(**models.batch(5, 30, 1), **settings, **options)


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype, size", [("int4", None), ("int4", 128), ("int8", 64)])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_model_in_codes(
    dtype: str, size: int | None, tied: bool, beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both doors give the tokens of plain `generate` with the same rounded weights, and of what it saves."""
    products = note_calls(monkeypatch, fused_ops, "linear", lambda layer, rows: layer.groups is not None)
    stacks = note_calls(monkeypatch, fused_stack.StackCall, "run", lambda call: len(call.ins))
    model = llama(tie_word_embeddings=tied)
    exact, before = generate(model, num_beams=beams, cache_implementation="paged"), len(products)
    old = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    hf_paged.prepack(model, dtype, group_size=size)
    gc.collect()
    assert old() is None and (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    plain = generate(model, num_beams=beams)
    assert not plain.equal(exact)
    stacks.clear()
    assert generate(model, num_beams=beams, cache_implementation="paged").equal(plain)
    assert all(products[before:]) and products[before:] and stacks
    report = hf_paged.check(model)
    assert (report.int8_layers, report.int4_layers) == ((15, 0) if dtype == "int8" else (1, 14))
    model.save_pretrained(tmp_path)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert generate(saved, num_beams=beams).equal(plain)
    assert generate(copy.deepcopy(model), num_beams=beams, cache_implementation="paged").equal(plain)
    if beams == 1:
        batch = models.batch(5, 30, 1)
        prompts = [ids[mask > 0].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
        config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None)
        with hf_paged.Engine(model, {"num_blocks": 64}, prepack=True) as engine:
            found = [each.outputs[0].new_token_ids for each in engine.generate(prompts, config)]
        assert found == plain[:, 30:].tolist()


def test_gradients_of_the_input_and_refusals(tmp_path: Path) -> None:
    model = llama()
    for wrong in ({"dtype": "int4", "group_size": 48}, {"dtype": "bf16", "group_size": 32}):
        with pytest.raises(ValueError, match="give 32, 64 or 128, with 'int8' or 'int4'"):
            hf_paged.prepack(model, **wrong)
    own = model.state_dict()
    hf_paged.prepack(model, "int4")
    rounded = {name: each.clone() for name, each in model.state_dict().items()}
    assert all(type(each) is torch.Tensor for each in rounded.values())
    with pytest.raises(ValueError, match="not in codes"):
        hf_paged.prepack(model, "int4")
    with pytest.raises(ValueError, match="its weights are in codes"):
        hf_paged.prepack(model, "int8")
    with pytest.raises(RuntimeError, match="that is kept in 4 bits; load the model again"):
        model.load_state_dict(own)
    inputs = model.get_input_embeddings()(torch.tensor([[5, 6, 7]])).requires_grad_()
    model(inputs_embeds=inputs).logits.sum().backward()
    plain = llama()
    plain.load_state_dict(rounded)
    known = inputs.detach().requires_grad_()
    plain(inputs_embeds=known).logits.sum().backward()
    torch.testing.assert_close(inputs.grad, known.grad)
    assert model.to(torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    assert generate(model, cache_implementation="paged").shape == (3, 42)
