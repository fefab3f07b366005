"""Latent attention (DeepSeek's MLA): the kernels read what the layers cache, and tokens are those of generate."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig, UnsupportedModelError
from hf_paged.cache.memory import PagedMemory
from hf_paged.model.packed import PackedModel
from tests.architectures.tiny import tiny_model

TYPES = ("deepseek_v3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("minicpm3", "kimi_linear")))


@functools.cache
def model_of(name: str) -> Any:
    return tiny_model(name)


@functools.cache
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    found = [torch.randint(6, 90, (n,), generator=generator).tolist() for n in (3, 17, 40, 64, 50, 9)]
    found[4] = found[3][:32] + found[4][:6]
    return found


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    )


def plain(model: Any, prompt: list[int], **options: Any) -> list[list[int]]:
    ids = torch.tensor([prompt])
    torch.manual_seed(0)
    rows = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config(**options))
    return [row[len(prompt) :].tolist() for row in rows]


def answers(model: Any, cache: CacheConfig | None = None, *, new: Any = None, **scheduler: Any) -> list[Any]:
    with Engine(model, cache, SchedulerConfig(**scheduler)) as engine:
        outputs = engine.generate(prompts(), new or config(), progress=False)
        if cache is not None:
            stats = engine.stats()
            assert stats.preemptions_recompute + stats.preemptions_swap
        engine.check_integrity()
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", TYPES)
def test_the_engine_gives_plain_tokens(name: str) -> None:
    model = model_of(name)
    expected = [plain(model, prompt) for prompt in prompts()]
    assert len({token for rows in expected for row in rows for token in row}) > 2
    small = {"block_size": 4, "num_blocks": 30}
    assert answers(model) == expected
    assert answers(model, max_num_batched_tokens=16) == expected
    assert answers(model, CacheConfig(**small), preemption="recompute") == expected
    assert answers(model, CacheConfig(**small, swap_memory="8MiB"), preemption="swap") == expected
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert answers(model, new=config(**beams)) == [plain(model, prompt, **beams) for prompt in prompts()]


@pytest.mark.parametrize("name", TYPES)
def test_generate_runs_packed(name: str) -> None:
    model, ids = model_of(name), torch.tensor([prompts()[3], prompts()[3][::-1]])
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with hf_paged.record_calls() as records:
        for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
            made = []
            for kind in ({}, {"cache_implementation": "paged"}):
                torch.manual_seed(1)
                made.append(model.generate(ids, attention_mask=mask, generation_config=config(**options), **kind))
            assert made[0].equal(made[1])
    assert {record.route for record in records} == {"packed"}


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_logits_of_chunks_are_those_of_the_model(name: str) -> None:
    model, memory, ids = model_of(name), PagedMemory(4, growable=True), torch.tensor(prompts()[3])
    packed, found = PackedModel(model, memory), []
    with torch.no_grad():
        for chunk in ids.split([30, 1, 20, 13]):
            memory.append([(0, len(chunk))])
            metadata, positions = memory.step_metadata([0], [len(chunk)], ids.device)
            found.append(packed.forward(chunk, positions, metadata))
        expected = model(ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=0)
    layer = memory.pool[0]
    assert layer.row is not None and layer.row.shape[3] == layer.key.shape[3] + layer.value.shape[3]
    assert not any("expand_kv" in vars(module) for module in model.modules())  # the model is as it was


def test_an_adapter_on_the_up_projection() -> None:
    """Its weight is found by computing it."""
    model = tiny_model("deepseek_v3")

    class Low(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.low = torch.nn.Parameter(torch.randn(base.out_features, 2) @ torch.randn(2, base.in_features) * 0.05)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + torch.nn.functional.linear(x, self.low)

    before = answers(model)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Low(layer.self_attn.kv_b_proj)
    expected = [plain(model, prompt) for prompt in prompts()]
    assert answers(model) == expected != before
    assert hf_paged.check(model).native


def test_eight_bits_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="leave key_dtype and value_dtype out"):
        Engine(model_of("deepseek_v3"), CacheConfig(key_dtype="int8", value_dtype="int8"))


def test_a_latent_is_kept_once() -> None:
    """24 numbers for each token and layer in place of 4 heads' keys and values."""
    report = hf_paged.check(model_of("deepseek_v3"))
    assert report.native
    assert {layer.bytes_per_token for layer in report.layers} == {(16 + 8) * 4}
    with Engine(model_of("deepseek_v3"), {"memory": "1MiB", "block_size": 16}) as engine:
        assert engine.stats().num_blocks == (1 << 20) // (16 * (16 + 8) * 4 * len(report.layers))
