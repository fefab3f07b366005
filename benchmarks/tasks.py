"""Measures embeddings of prompts of mixed lengths, and decisions on one long context, beside the plain model.

    python benchmarks/tasks.py build/real/smollm2 --dtype bfloat16
    python benchmarks/tasks.py build/real/smollm2 --only decisions --context 4000 --questions 100

Embeddings: the mean of 512 random prompts, whose lengths are drawn between 4 and 128 with equal chances for each power
of two. "padded" are batches of 32 in the order of arrival, "sorted" are those in the order of length. Decisions: the
log-probabilities of two options after each question on one context; "generate" makes one token for each question, of
which a few are measured. Prints seconds of the wall clock. The rounds take the systems in turns.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_paged import CacheConfig, Engine, SchedulerConfig

Prompts = list[list[int]]
BATCH = 32


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@torch.inference_mode()
def padded(model: Any, prompts: Prompts) -> None:
    """Embed batches of 32 prompts, padded on the right, as sentence-transformers does."""
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([each + [0] * (width - len(each)) for each in batch])
        mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in batch])
        states = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def embeddings(model: Any, arguments: argparse.Namespace, draw: random.Random) -> None:
    lengths = [round(4 * 32 ** draw.random()) for _ in range(arguments.prompts)]
    prompts = [[draw.randrange(100, 2000) for _ in range(length)] for length in lengths]
    engine = Engine(model, CacheConfig(memory="512MB"), SchedulerConfig(prefix_caching=False))
    systems = {
        "engine": lambda: engine.embed(prompts, "mean"),
        "sorted": lambda: padded(model.model, sorted(prompts, key=len)),
        "padded": lambda: padded(model.model, prompts),
    }
    report({name: systems[name] for name in arguments.systems or systems}, arguments, f"{sum(lengths)} tokens")
    engine.close()


def decisions(model: Any, arguments: argparse.Namespace, draw: random.Random) -> None:
    context = [draw.randrange(100, 2000) for _ in range(arguments.context)]
    questions = [[draw.randrange(100, 2000) for _ in range(12)] for _ in range(arguments.questions)]
    engine = Engine(model, CacheConfig(memory="1GB"))
    few = questions[: arguments.generated]

    def decide() -> None:
        engine.clear_prefix_cache()
        for question in questions:
            engine.decide([*context, *question], [[260], [914]])

    def generate() -> None:
        for question in few:
            ids = torch.tensor([[*context, *question]])
            model.generate(ids, GenerationConfig(max_new_tokens=1), attention_mask=torch.ones_like(ids))

    systems = {"engine": (decide, len(questions)), "generate": (generate, len(few))}
    chosen = {name: systems[name] for name in arguments.systems or systems}
    report({name: call for name, (call, _) in chosen.items()}, arguments, f"{ {n: c for n, (_, c) in chosen.items()} }")
    print("tokens found in the cache:", engine.stats().prefix_cache_hit_tokens)
    engine.close()


def report(systems: dict[str, Callable[[], object]], arguments: argparse.Namespace, what: str) -> None:
    found: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(arguments.rounds):
        for name, call in systems.items():
            found[name].append(timed(call))
            print(f"{name}: {found[name][-1]:.2f} s", flush=True)
    print(what, {name: f"{median(each):.2f} s of {[round(one, 2) for one in each]}" for name, each in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--only", choices=["embeddings", "decisions"])
    parser.add_argument("--systems", nargs="+")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--generated", type=int, default=2, help="questions that generate answers")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype=getattr(torch, arguments.dtype)).eval()
    if arguments.only != "decisions":
        embeddings(model, arguments, random.Random(0))
    if arguments.only != "embeddings":
        decisions(model, arguments, random.Random(1))


if __name__ == "__main__":
    main()
