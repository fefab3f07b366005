"""What drafts gain on this machine: tokens a second of the engine with drafts, as a multiple of those without.

    python benchmarks/speculation.py --int8 --out benchmarks/results/speculation-cpu.json

A random model repeats itself, or nothing at all, so its drafts say little about real ones. Two loads are measured:

- *lookup*: prompts that have a passage three times, as in summaries and edits of code; drafts come from
  the texts themselves (`prompt_lookup_num_tokens`);
- *draft model*: another model of fewer layers computes each draft. Its tokens are then replaced by those of a run
  without drafts, each with a given probability, so that this share of the compared tokens is right;
- *drafts for nothing*: the same without the model, as from a drafter whose time does not count.

Each run with drafts follows one without, on one thread; ratios of such pairs are medians. Rates are by the processor's
time, which other programs on the machine disturb least. Each run is of a new engine, which has yet to learn what drafts
cost. With `--waves 4`, four times as many requests as run together keep a batch full: as on a server, the engine has
learnt for most of them, and few steps have a batch that is nearly over.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import hf_paged
from hf_paged.config import SchedulerConfig
from hf_paged.features.speculation.draft_model import ModelDrafter
from hf_paged.features.speculation.drafts import Wanted

SHAPE: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
LAYERS, DRAFT_LAYERS = 30, 4
NEW_TOKENS, DRAFT = 128, 7


class KnownDrafts:
    """Drafts that are right with a probability, at the cost of those of a model, or at none."""

    num_assistant_tokens = DRAFT

    def __init__(self, share: float, texts: Sequence[Sequence[int]], model: ModelDrafter | None, seed: int) -> None:
        self.share, self.model, self.random = share, model, random.Random(seed)
        self.texts = {tuple(text[:16]): text for text in texts}

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        if self.model is not None:
            self.model.draft(wanted)  # takes its time
        drafts = []
        for each in wanted:
            at = len(each.token_ids)
            right = self.texts[tuple(each.token_ids[:16])][at : at + each.most]
            drafts.append([token if self.random.random() < self.share else 7 for token in right])
            if self.model is not None:  # a model keeps the K/V of its tokens that were right
                own = self.model._followed[each.seq_id].seq.token_ids
                own[at:] = drafts[-1][: len(own) - at]
        return drafts


def make(layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers)).to(dtype).eval()


def run(
    model: Any, prompts: list[list[int]], batch: int, lookup: int | None = None, assistant: Any = None
) -> dict[str, Any]:
    """batch: requests that run together, at most."""
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, do_sample=False, prompt_lookup_num_tokens=lookup
    )
    scheduler = SchedulerConfig(max_num_seqs=batch)
    with hf_paged.Engine(model, hf_paged.CacheConfig(memory="1GiB"), scheduler, assistant_model=assistant) as engine:
        short = GenerationConfig(max_new_tokens=2, eos_token_id=None, do_sample=False)
        engine.generate([[5, 6, 7]], short, progress=False)
        started, before = time.process_time(), engine.stats()
        outputs = engine.generate(prompts, config, progress=False)
        seconds, stats = time.process_time() - started, engine.stats()
    return {
        "tokens_per_second": len(prompts) * NEW_TOKENS / seconds,
        "steps": stats.steps - before.steps,
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
    }


def measure(model: Any, small: Any, count: int, waves: int, rounds: int, shares: Sequence[float]) -> dict[str, Any]:
    numbers = random.Random(count)
    passages = [[numbers.randrange(3, 49000) for _ in range(32)] for _ in range(count * waves)]
    prompts = [passage * 3 for passage in passages]
    plain = run(model, prompts, count)
    texts = [prompt + text for prompt, text in zip(prompts, plain["texts"])]
    found: dict[str, list[dict[str, Any]]] = {}

    def pair(name: str, **drafts: Any) -> None:
        found.setdefault("plain", []).append(run(model, prompts, count))
        found.setdefault(name, []).append(run(model, prompts, count, **drafts) | {"plain": found["plain"][-1]})

    for round_ in range(rounds):
        pair("lookup", lookup=DRAFT)
        for share in shares:
            pair(f"drafts for nothing, {share:.0%} right", assistant=KnownDrafts(share, texts, None, round_))
            small.generation_config.assistant_confidence_threshold = 0.0
            with hf_paged.Engine(model, hf_paged.CacheConfig(memory="1GiB"), assistant_model=small) as other:
                own: Any = other._stepper.speculation.drafter
                pair(f"draft model, {share:.0%} right", assistant=KnownDrafts(share, texts, own, round_))
    result: dict[str, Any] = {}
    for name, runs in found.items():
        drafted, accepted, steps = (sum(run[name] for run in runs) for name in ("drafted", "accepted", "steps"))
        ratios = [run["tokens_per_second"] / run.get("plain", run)["tokens_per_second"] for run in runs]
        result[name] = {
            "tokens_per_second": round(statistics.median(run["tokens_per_second"] for run in runs), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios] if name != "plain" else [],
            "steps": round(steps / len(runs), 1),
            "drafted": round(drafted / len(runs), 1),
            "accepted": round(accepted / len(runs), 1),
            "equal_texts": min(sum(map(list.__eq__, run["texts"], plain["texts"])) for run in runs),
        }
        print(count, name, result[name], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--waves", type=int, default=1, help="requests, as a multiple of those that run together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.6, 0.9])
    parser.add_argument("--int8", action="store_true", help="the draft model computes with int8 copies of its weights")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    model, small = make(LAYERS, dtype), make(DRAFT_LAYERS, dtype)
    if args.int8:
        hf_paged.prepack(small, dtype="int8")
    results = {
        "torch": torch.__version__,
        "dtype": args.dtype,
        "draft_weights": "int8" if args.int8 else args.dtype,
        "token_budget": SchedulerConfig().max_num_batched_tokens,
        "waves": args.waves,
        "batches": {
            count: measure(model, small, count, args.waves, args.rounds, args.shares) for count in args.batches
        },
    }
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
