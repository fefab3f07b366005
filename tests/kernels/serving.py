"""Which kernels an engine compiles: `python serving.py CHIP` serves random requests with tiny models on a CPU, records
every launch while torch computes the results, and prints for each model what its warm-up and what its steps compile for
the chip.

A variant is what triton's own binder distinguishes: types, constants, alignment and values that it specialises. Runs in
a process of its own without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from offline import CHIPS, Binder
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.features.graphs import warmup
from hf_paged.features.graphs.graph_inputs import StepCosts
from hf_paged.generation.engine import binding
from hf_paged.kernels import gather
from hf_paged.kernels.triton import ops as triton_ops
from hf_paged.kernels.triton import sampling as triton_sampling
from hf_paged.kernels.triton.launch import Launch
from tests.fused import fewer
from tests.generation import tape
from tests.implementations import compute_by

_SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 1500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOWS = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Any] = {
    # 72 is no multiple of 16: strides of [heads, tokens, head_dim] are aligned if the number of tokens is even.
    "qwen3 72": lambda: transformers.Qwen3Config(**_SIZES, head_dim=72),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, head_dim=16, sliding_window=250),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_SIZES, head_dim=256, sliding_window=300, layer_types=_WINDOWS),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, head_dim=16, num_local_experts=4),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=1500),
}


def run(name: str, dtype: torch.dtype, chip: str, cuda_graphs: bool | None) -> dict[str, Any]:
    """The variants that the warm-up compiles, by kernel, and those that are compiled later."""
    binder, before, warm, later = Binder(chip), set(), set(), set()
    found: set[tuple[str, str]] = before  # by the trial of the model, which is part of making an engine
    warm_up = binding.warm_up

    def warmed_up(*args: Any) -> None:
        nonlocal found
        found = warm
        warm_up(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "warm_up", warmed_up)
        record_launches(patch, lambda self, device: found.add(binder.variant(self)))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype).eval()
        options: dict[str, Any] = {"prepack": False, "cuda_graphs": cuda_graphs}
        scheduler = SchedulerConfig(max_num_seqs=20, max_num_batched_tokens=640, preemption="swap")
        with Engine(model, CacheConfig(num_blocks=170, swap_memory="64MiB"), scheduler, **options) as engine:
            captures = tape.TapedGraphs.captures
            found = later
            serve(engine)
            stats = engine.stats()
            captures = tape.TapedGraphs.captures - captures
    kernels = [kernel for kernel, _ in warm]
    return {
        "warm": {kernel: kernels.count(kernel) for kernel in sorted(set(kernels))}, "later": sorted(later - warm),
        "used": len(later), "captures": captures, "steps": stats.steps, "replays": stats.graph_replays,
        "swaps": stats.preemptions_swap, "copies": stats.cow_copies,
    }  # fmt: skip


def record_launches(patch: pytest.MonkeyPatch, run: Callable[[Launch, torch.device], None]) -> None:
    """From here on `run` gets what engines on a CPU would launch on a GPU, and torch computes the results."""
    tape.install(patch, StepCosts())
    patch.setattr(warmup, "DEVICE_TYPE", "cpu")
    compute_by(patch, "triton")
    patch.setattr(Launch, "run", run)
    for operation in ("paged_attention", "write_kv", "copy_blocks"):
        patch.setattr(triton_ops, operation, recorded(getattr(triton_ops, operation), getattr(gather, operation)))
    fewer.on_cpu(patch)
    for module, operation in fewer.OPERATIONS:
        computes = tape.as_one(getattr(fewer, operation))
        patch.setattr(module, operation, recorded(getattr(module, operation), computes))
    patch.setattr(triton_sampling, "greedy", recorded(triton_sampling.greedy, greedy_by_torch))


def recorded(launches: Callable[..., Any], computes: Callable[..., Any]) -> Callable[..., Any]:
    """The launches of one implementation, which do nothing, with the results of another."""

    def operation(*args: Any, **kwargs: Any) -> Any:
        launches(*args, **kwargs)
        return computes(*args, **kwargs)

    return operation


def greedy_by_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best, tokens = logits.float().max(-1)
    return tokens, best - logits.float().logsumexp(-1)


def serve(engine: Engine) -> None:
    """Random prompts, some with a common prefix, that arrive at any step: greedy, sampled, samples and beams."""
    rng = random.Random(0)
    common = [rng.randrange(3, 96) for _ in range(700)]
    kinds: list[dict[str, Any]] = [
        {}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 3},
        {"do_sample": True, "top_p": 0.9, "top_k": 20}, {"repetition_penalty": 1.2}, {"prompt_lookup_num_tokens": 4},
    ]  # fmt: skip
    waiting = 48
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.choice((0, 1, 3, 8))):
            if waiting:
                waiting -= 1
                length = rng.choice((rng.randrange(1, 40), rng.randrange(1, 700)))
                start = rng.choice((0, 300, 640))
                if waiting > 36:  # at first the contexts are short
                    length, start = rng.randrange(1, 15), 0
                prompt = common[:start] + [rng.randrange(3, 96) for _ in range(length)]
                options = {"max_new_tokens": rng.randrange(1, 50), "eos_token_id": 96, **rng.choice(kinds)}
                engine.add_request(prompt, GenerationConfig(**options))
        for output in engine.step():
            assert output.error is None, output.error


if __name__ == "__main__":
    assert sys.argv[1] in CHIPS
    for name in CONFIGS:
        dtype = torch.float32 if name == "mistral" else torch.bfloat16
        cuda_graphs = False if name in ("qwen3 72", "mistral") else None
        print(json.dumps({"name": name, **run(name, dtype, sys.argv[1], cuda_graphs)}), flush=True)
