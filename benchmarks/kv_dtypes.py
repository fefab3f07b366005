"""What K/V in eight bits costs and gains on this machine: time of a decode step's attention and of a prompt's, and
throughput where memory is short. Each pair is measured in turns, in process CPU time, on one thread.

    python benchmarks/kv_dtypes.py --out benchmarks/results/kv-dtypes-cpu.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_paged
from hf_paged.cache.kv_pool import KVPool
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import Attention, NewKV
from hf_paged.kernels.metadata import AttentionMetadata
from hf_paged.kernels.native import ops as native_ops
from hf_paged.kernels.quantised import storage_of

BLOCK_SIZE = 16
KINDS = {"exact": (None, None), "int8": ("int8", "int8"), "fp8": ("fp8", "fp8")}
# Sequences, new tokens and all tokens of each, query heads, KV heads, head size, layers. K/V of all layers of a decode
# step exceeds the caches.
DECODE = [
    (1, 1, 2048, 32, 8, 64, 16),
    (8, 1, 2048, 32, 8, 64, 8),
    (8, 1, 2048, 9, 3, 64, 8),
    (8, 1, 2048, 8, 8, 64, 8),
    (4, 1, 2048, 32, 8, 128, 4),
    (8, 1, 2048, 14, 2, 64, 16),
    (8, 1, 2048, 32, 4, 64, 8),
    (8, 1, 2048, 28, 4, 128, 4),
    (8, 1, 2048, 32, 2, 64, 16),
]
PROMPTS = [
    (1, 256, 2048, 9, 3, 64, 4),
    (1, 512, 512, 32, 8, 64, 4),
    (1, 512, 4096, 32, 8, 64, 4),
    (1, 256, 4096, 32, 8, 128, 4),
    (4, 64, 2048, 14, 2, 64, 4),
    (1, 512, 4096, 8, 8, 64, 4),
]


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median CPU time of each call in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def attention_of(
    kind: str,
    dtype: torch.dtype,
    num_seqs: int,
    new: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    layers: int,
) -> Callable[[], None]:
    """The attention of all layers for the last `new` tokens of each sequence of `length` tokens."""
    per_seq = -(-length // BLOCK_SIZE)
    pool = KVPool(num_seqs * per_seq, BLOCK_SIZE, storage=storage_of(*KINDS[kind]))
    tables = torch.randperm(num_seqs * per_seq).view(num_seqs, per_seq).to(torch.int32)
    places = torch.arange(length - new, length)
    slots = (tables[:, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE).flatten()
    starts = new * torch.arange(num_seqs + 1, dtype=torch.int32)
    lens = torch.full((num_seqs,), length, dtype=torch.int32)
    rows = torch.randn(pool.num_blocks * BLOCK_SIZE, kv_heads, dim).to(dtype)
    for layer in range(layers):
        kv = pool.layer_for(layer, rows, rows)
        ops.write_kv(NewKV(rows, rows), kv, torch.arange(len(rows)))
    query, own = torch.randn(num_seqs * new, heads, dim).to(dtype), rows[: num_seqs * new]

    def run() -> None:
        metadata = AttentionMetadata(tables, lens, starts, slots, max_query_len=new, max_seq_len=length)
        for kv in pool.layers.values():
            ops.paged_attention(query, kv, metadata, Attention(dim**-0.5), NewKV(own, own))

    return run


def times_of(shapes: list[Any], rounds: int) -> list[dict[str, Any]]:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in shapes:
            times = in_turns({kind: attention_of(kind, dtype, *shape) for kind in KINDS}, rounds)
            names = ("sequences", "new_tokens", "tokens", "heads", "kv_heads", "head_dim", "layers")
            record = {"dtype": str(dtype).removeprefix("torch."), **dict(zip(names, shape))}
            found.append(record | {f"{kind}_ms": round(ms, 3) for kind, ms in times.items()})
            print(found[-1], flush=True)
    return found


def throughput(num_requests: int, room: int, rounds: int, shape: dict[str, int]) -> dict[str, Any]:
    """Tokens a second of requests with about `shape["prompt"]` and `shape["new"]` tokens, in the bytes that `room` such
    requests take in bf16."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in shape.items() if key not in ("prompt", "new")}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, head_dim=64, max_position_embeddings=4096))
    model = model.to(torch.bfloat16).eval()
    rng = random.Random(0)
    lengths = [rng.randint(shape["prompt"] // 2, shape["prompt"] * 3 // 2) for _ in range(num_requests)]
    prompts = [torch.randint(3, sizes["vocab_size"], (n,)) for n in lengths]
    news = [rng.randint(shape["new"] // 2, shape["new"] * 3 // 2) for _ in range(num_requests)]
    configs = [transformers.GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None) for n in news]
    for config in configs:
        config.eos_token_id = sizes["vocab_size"]
    per_token = 2 * 2 * 64 * sizes["num_key_value_heads"] * sizes["num_hidden_layers"]
    memory = room * (shape["prompt"] + shape["new"]) * per_token
    results: dict[str, Any] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, (key, value) in KINDS.items():
            cache = hf_paged.CacheConfig(memory=memory, key_dtype=key, value_dtype=value)  # type: ignore[arg-type]
            with hf_paged.Engine(model, cache, hf_paged.SchedulerConfig(preemption="recompute")) as engine:
                start = time.process_time()
                outputs = engine.generate(prompts, configs)
                seconds, stats = time.process_time() - start, engine.stats()
            assert sum(len(o.outputs[0].token_ids) for o in outputs) == sum(news)
            record = {"tokens_per_second": round(sum(news) / seconds, 1), "blocks": stats.num_blocks,
                      "preemptions": stats.preemptions_recompute, "steps": stats.steps}  # fmt: skip
            results[kind].append(record)
            print(kind, record, flush=True)
    median = {k: statistics.median(each["tokens_per_second"] for each in runs) for k, runs in results.items()}
    return {"model": shape, "requests": num_requests, "memory_for": room, "memory": memory, "runs": results,
            "tokens_per_second": median}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["decode", "prompts", "throughput"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"cpu": native_ops.status(), "torch": torch.__version__}
    for name, shapes in (("decode", DECODE), ("prompts", PROMPTS)):
        if given.only in (None, name):
            found[name] = times_of(shapes, given.rounds)
    if given.only in (None, "throughput"):
        shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 9,
                 "vocab_size": 4096, "prompt": 32}  # fmt: skip
        found["throughput"] = [
            throughput(64, 20, max(1, given.rounds // 9), shape | {"num_key_value_heads": kv_heads, "new": new})
            for kv_heads, new in ((3, 192), (3, 448), (9, 448))
        ]
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
