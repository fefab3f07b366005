"""Norms and rotations in fp32, on any CPU: torch's bits, where they apply, and that other code's forwards are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm

from hf_paged import CacheConfig, Engine
from hf_paged.fused import overrides as fused_overrides
from hf_paged.fused.cpu import norms, ops
from hf_paged.kernels.native import build as native_build
from tests import models
from tests.noted import note_calls

pytestmark = pytest.mark.skipif(not native_build.has_compiler(), reason="no C compiler on this machine")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    native_build.build()


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("size", [16, 48, 80, 128, 576, 4096, 14336])
def test_norms_have_torchs_bits(size: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(size)
    module = LlamaRMSNorm(size, eps=1e-5)
    module.weight.data = torch.randn(size, generator=generator)
    for scale in (1e-22, 1e-3, 1.0, 1e18, 1e30):  # subnormal squares, and infinite ones
        rows = torch.randn(1, tokens, size, generator=generator) * scale
        rows[0, 0, 3] = -0.0
        norm = ops.Norm(module.weight, 1e-5)
        assert torch.equal(ops.rms_norm(norm, rows).view(torch.int32), module(rows).view(torch.int32))
    rows[0, 0, 5] = torch.nan
    assert ops.rms_norm(norm, rows).isnan().equal(module(rows).isnan())


@torch.no_grad()
@pytest.mark.parametrize("heads, kv_heads, dim, tokens", [(4, 2, 32, 1), (9, 3, 64, 5), (2, 2, 128, 300)])
def test_rotations_have_torchs_bits(heads: int, kv_heads: int, dim: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    query, key = (torch.randn(1, tokens, n, dim, generator=generator).transpose(1, 2) for n in (heads, kv_heads))
    cos, sin = (torch.randn(1, tokens, dim, generator=generator) for _ in range(2))
    for ours, theirs in zip(ops.rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin)):
        assert torch.equal(ours.contiguous().view(torch.int32), theirs.contiguous().view(torch.int32))


def test_what_is_recognised() -> None:
    assert norms.norm_of(LlamaRMSNorm(64)) is not None
    assert norms.norm_of(Llama4TextRMSNorm(64, 1e-3)).eps == 1e-3  # type: ignore[union-attr]
    assert norms.norm_of(LlamaRMSNorm(40)) is None  # not a multiple of 16
    assert norms.norm_of(LlamaRMSNorm(64).double()) is None
    assert norms.norm_of(GemmaRMSNorm(64)) is None  # multiplies by 1 + weight
    assert norms.norm_of(torch.nn.LayerNorm(64)) is None

    class Other(LlamaRMSNorm):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * 1.0000002

    assert norms.norm_of(Other(64)) is None


def test_a_weight_with_gaps_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "in_packed_step", lambda: True)
    module, rows = LlamaRMSNorm(64), torch.randn(1, 3, 64)
    forward = norms.NativeNorm(module).forward
    module.weight = torch.nn.Parameter(torch.rand(128)[::2], requires_grad=False)
    assert torch.equal(forward(rows), module(rows))


def build(family: type, **options: Any) -> Any:
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(family(**sizes, **options)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model


@pytest.mark.parametrize("family", [transformers.LlamaConfig, transformers.Qwen3Config], ids=["llama", "qwen3"])
def test_models_have_the_same_bits(family: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = build(family), models.prompts(3, 40, 17)
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    calls = note_calls(monkeypatch, ops, "rms_norm", lambda *_: None)

    def outputs() -> list[Any]:
        ids = prompts[1][None]
        scores = model.generate(
            ids,
            generation_config=config,
            output_logits=True,
            return_dict_in_generate=True,
            cache_implementation="paged",
        ).logits
        with Engine(model, CacheConfig(num_blocks=128, block_size=4)) as engine:
            served = engine.generate(prompts, config)
        return [torch.stack(scores).tolist(), *((o.outputs[0].token_ids, o.outputs[0].logprobs) for o in served)]

    got, count = outputs(), len(calls)
    assert count
    monkeypatch.setattr(fused_overrides, "native_layers", lambda *_: None)
    assert outputs() == got and len(calls) == count


def test_a_forward_of_other_code_is_kept() -> None:
    model = build(transformers.LlamaConfig)
    ids = models.prompts(9)[0][None]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    before = model.generate(ids, **options, cache_implementation="paged")
    norm = model.model.norm
    norm.forward = lambda rows: -LlamaRMSNorm.forward(norm, rows)
    plain = model.generate(ids, **options)
    assert not plain.equal(before)
    assert model.generate(ids, **options, cache_implementation="paged").equal(plain)
    del norm.forward
    assert model.generate(ids, **options, cache_implementation="paged").equal(before)
