"""Decoder layers in fewer launches on a device: the same tokens, about the same logits, and the number of kernels."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import CacheConfig, Engine
from hf_paged.cache.memory import PagedMemory
from hf_paged.fused.gpu.model import fused_parts
from hf_paged.model.packed import PackedModel
from tests import models
from tests.architectures.tiny import tiny_model
from tests.generation.solo import config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]

TYPES = ["llama", "mistral", "qwen2", "phi3", "qwen3", "gemma2", "gemma3_text", "olmo2", "gpt2", "phi", "gpt_neox",
         "nemotron", "starcoder2"]  # fmt: skip
# In half precision other roundings may choose other experts.
MIXTURES = ["mixtral", "gpt_oss", "qwen3_moe", "glm4_moe", "phimoe"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LIMITS = {"llama": 13, "qwen3": 16, "gemma3_text": 16}


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """fp32 products in fp32: with TF32 the tokens of tiny models would move."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_the_same_tokens(family: str, cuda_graphs: bool) -> None:
    model = models.build(family).cuda()
    results = []
    for fuse in (None, False):
        with Engine(model, CacheConfig(num_blocks=400), fuse=fuse, cuda_graphs=cuda_graphs) as engine:
            outputs = engine.generate(models.prompts(5, 30, 90), config("greedy", eos_token_id=models.VOCAB))
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]


def logits(model: Any, *, fused: bool) -> list[torch.Tensor]:
    """Of a step with prompts and of a decode step."""
    memory, parts = PagedMemory(16, growable=True), fused_parts(model) if fused else None
    packed, found = PackedModel(model, memory, [] if parts is None else [parts]), []
    with torch.inference_mode():
        for length in (20, 1):
            memory.append([(0, length), (1, length)])
            metadata, positions = memory.step_metadata([0, 1], [length, length], model.device)
            found.append(packed.forward(torch.arange(2 * length, device="cuda") + 7, positions, metadata).float())
    return found


@pytest.mark.parametrize(
    "name,dtype", [*itertools.product(TYPES, DTYPES), *((name, torch.float32) for name in MIXTURES)], ids=str
)
def test_logits(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to("cuda", dtype)
    parts, expected = fused_parts(model), logits(model, fused=False)
    assert parts
    for moves in (False, True):
        if moves and not parts.pack():
            assert name in ("phi3", "gpt2", "gpt_neox")  # one weight already
        for actual, plain in zip(logits(model, fused=True), expected, strict=True):
            tolerance = 1e-3 if dtype == torch.float32 else 0.1
            assert (actual - plain).abs().max() <= tolerance * plain.abs().max()


def test_memory_while_weights_are_moved() -> None:
    config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=96)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    parts, before = fused_parts(model), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert parts is not None and parts.pack() == 16
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert torch.cuda.max_memory_allocated() <= before + 2 * 2 * 1024 * 4096 + 2**20  # gate and up of one layer


def kernels_of_steps(model: Any) -> list[list[str]]:
    """Those of a step with a prompt and of a decode step."""
    logits(model, fused=True)  # compiles
    memory = PagedMemory(16, growable=True)
    packed = PackedModel(model, memory, [parts for parts in [fused_parts(model)] if parts is not None])
    counts = []
    with torch.inference_mode():
        for length in (20, 1):
            memory.append([(0, length)])
            metadata, positions = memory.step_metadata([0], [length], model.device)
            ids = torch.arange(length, device="cuda") + 7
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                packed.forward(ids, positions, metadata)
                torch.cuda.synchronize()
            events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
            counts.append([event.name for event in events if not event.name.startswith("Mem")])
    return counts


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("name", LIMITS)
def test_kernels_of_a_step(name: str, moves: bool) -> None:
    """Those of its four layers, and at most 30 for what comes before and after them."""
    model = tiny_model(name).to("cuda", torch.bfloat16)
    parts = fused_parts(model)
    if moves:
        assert parts is not None and parts.pack() == 8
    counts = kernels_of_steps(model)
    for kernel in ("add_norm_kernel", "rotate_kernel", "gate_kernel"):
        assert sum(kernel in each for each in counts[1]) >= 4, counts[1]
    assert len(counts[1]) <= 4 * (LIMITS[name] - 3 * moves) + 30, counts[1]


def test_kernels_of_experts() -> None:
    for kernels in kernels_of_steps(tiny_model("mixtral").to("cuda", torch.bfloat16)):
        for kernel, count in (("route", 4), ("assign", 4), ("product", 8), ("combine", 4)):
            assert sum(f"{kernel}_kernel" in each for each in kernels) == count, kernels
