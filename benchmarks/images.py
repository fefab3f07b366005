"""Sixteen requests with images: the engine, plain `generate` one by one, and plain `generate` with a padded batch.

    python benchmarks/images.py --out benchmarks/results/images-cpu.json
    python benchmarks/images.py --dtype bfloat16 --memory

The model is a LLaVA with random weights: a vision tower of 12 layers x 384 for images of 224 x 224 (196 placeholders),
and a decoder of SmolLM2-135M's shape. Prompts have 20 to 120 tokens beside the image. Each system runs in turns, on one
thread; ratios are medians. K/V is what the requests hold at their peak. `--memory`: each system alone in a process of
its own, once, with no times: the most that the process had in memory beyond what it had with the model and a first run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import hf_paged
from hf_paged.integration.names import CACHE

DTYPES = ("bfloat16", "float32")
IMAGE, NUM_FEATURES = 49151, 196
Request = tuple[list[int], torch.Tensor]


def make(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, image_size=224,
        patch_size=16,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=IMAGE))
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.to(dtype).eval()


def requests(count: int) -> list[Request]:
    numbers, generator = random.Random(0), torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        before, after = numbers.randint(5, 20), numbers.randint(15, 100)
        ids = [numbers.randrange(3, 49000) for _ in range(before + after)]
        ids[before:before] = [IMAGE] * NUM_FEATURES
        made.append((ids, torch.randn(1, 3, 224, 224, generator=generator)))
    return made


def plain(model: Any, given: list[Request], new: int) -> tuple[list[list[int]], int]:
    """The new tokens of each request, in one padded batch, and the bytes of K/V."""
    longest = max(len(ids) for ids, _ in given)
    ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in given])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in given])
    cache = DynamicCache()
    tokens = model.generate(
        input_ids=ids, attention_mask=mask, pixel_values=torch.cat([pixels for _, pixels in given]).to(model.dtype),
        **{CACHE: cache}, max_new_tokens=new, do_sample=False,
    )  # fmt: skip
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return tokens[:, longest:].tolist(), size


def one_by_one(model: Any, given: list[Request], new: int) -> tuple[list[list[int]], int]:
    results = [plain(model, [request], new) for request in given]
    return [tokens[0] for tokens, _ in results], max(size for _, size in results)


def engine(model: Any, given: list[Request], new: int) -> tuple[list[list[int]], int]:
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    peak, finished = 0, {}
    with hf_paged.Engine(model, hf_paged.CacheConfig(memory="2GiB")) as running:
        names = [
            running.add_request(ids, config, inputs={"pixel_values": pixels.to(model.dtype)}) for ids, pixels in given
        ]
        while running.has_unfinished_requests():
            finished.update({output.request_id: output for output in running.step() if output.finished})
            peak = max(peak, running.stats().kv_bytes_used)
    return [list(finished[name].outputs[0].token_ids) for name in names], peak


SYSTEMS: dict[str, Callable[..., tuple[list[list[int]], int]]] = {
    "plain, one by one": one_by_one,
    "plain, padded batch": plain,
    "engine": engine,
}


def measure(dtype: torch.dtype, count: int, new: int, rounds: int) -> dict[str, Any]:
    model, given = make(dtype), requests(count)
    times: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    found: dict[str, tuple[list[list[int]], int]] = {}
    for system in SYSTEMS.values():
        system(model, given[:2], 4)
    for _ in range(rounds):
        for name, system in SYSTEMS.items():
            started = time.perf_counter()
            found[name] = system(model, given, new)
            times[name].append(time.perf_counter() - started)
            print(dtype, name, f"{times[name][-1]:.2f} s", flush=True)
    first = times["plain, one by one"]
    result = {}
    for name, (tokens, size) in found.items():
        ratios = [base / own for base, own in zip(first, times[name])]
        result[name] = {
            "seconds": round(statistics.median(times[name]), 2),
            "ratio": round(statistics.median(ratios), 2),
            "kv_mib": round(size / 2**20, 1),
            "equal": sum(own == base for own, base in zip(tokens, found["plain, one by one"][0])),
        }
        print(dtype, name, result[name], flush=True)
    return result


def memory(dtype: torch.dtype, name: str, count: int, new: int) -> None:
    """Prints by how many MiB the resident memory of this process grows, at its peak, while a system answers. Linux."""
    model, given = make(dtype), requests(count)
    SYSTEMS[name](model, given[:1], 2)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    SYSTEMS[name](model, given, new)
    print(dtype, name, f"{(peak() - before) / 1024:.0f} MiB", flush=True)


def peak() -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.dtype or DTYPES
    if args.memory:
        fork = multiprocessing.get_context("fork")
        for dtype, system in itertools.product(names, SYSTEMS):
            child = fork.Process(target=memory, args=(getattr(torch, dtype), system, args.requests, args.new_tokens))
            child.start()
            child.join()
        return
    results: dict[str, Any] = {"torch": torch.__version__, "requests": args.requests, "new_tokens": args.new_tokens}
    for name in names:
        results[name] = measure(getattr(torch, name), args.requests, args.new_tokens, args.rounds)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
