"""Calls of `generate(cache_implementation="paged")` against plain `generate`: time and K/V memory.

    python benchmarks/generate_calls.py                                   # the shipped checkpoint
    python benchmarks/generate_calls.py --model HuggingFaceTB/SmolLM2-135M --dtype bfloat16 --prepack

Three cases: one prompt; equal rows of one prompt, as GRPO and self-consistency send them; and turns 2 to `--turns` of a
conversation. Each figure is the median of `--repeats` runs, plain and paged in turns, in seconds of this process's CPU
time (wall time on a GPU), which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import throughput
import torch
import transformers

import hf_paged
from hf_paged.integration.names import CACHE

SHIPPED = Path(__file__).parent.parent / "examples" / "pydoc-lm-base"
PAGED = {"cache_implementation": "paged"}
Call = Callable[..., float]


def seconds(function: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    function()
    return time.process_time() - start


def compare(call: Call, repeats: int) -> dict[str, float]:
    """call(**options) runs once and returns its seconds; the first run of each kind is not counted."""
    times: dict[str, list[float]] = {"plain": [], "paged": []}
    for _ in range(repeats + 1):
        times["plain"].append(call())
        times["paged"].append(call(**PAGED))
    medians = {kind: statistics.median(values[1:]) for kind, values in times.items()}
    return {**medians, "ratio": medians["paged"] / medians["plain"]}


def options(new_tokens: int, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **more}


def prompt(model: Any, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (1, length), generator=generator).to(model.device)


def one_prompt(model: Any, args: argparse.Namespace) -> dict[str, float]:
    ids = prompt(model, 32)
    return compare(lambda **given: seconds(lambda: model.generate(ids, **options(32), **given)), args.repeats)


def equal_rows(model: Any, args: argparse.Namespace) -> dict[str, float]:
    """Also `kv_of_samples`: K/V memory relative to num_return_sequences."""
    ids, sampled = prompt(model, args.prompt), options(32, do_sample=True)
    rows = ids.repeat(args.rows, 1)
    with hf_paged.record_calls() as records:
        model.generate(rows, **sampled, **PAGED)
        model.generate(ids, **sampled, num_return_sequences=args.rows, **PAGED)
    result = compare(lambda **given: seconds(lambda: model.generate(rows, **sampled, **given)), args.repeats)
    return {**result, "kv_of_samples": records[0].kv_bytes_used / records[1].kv_bytes_used}


def conversation(model: Any, args: argparse.Namespace) -> dict[str, float]:
    def talk(**given: Any) -> float:
        ids, cache, total = prompt(model, 64), None, 0.0
        for turn in range(args.turns):
            outputs: list[Any] = []

            def answer(ids: torch.Tensor = ids, cache: Any = cache, outputs: list[Any] = outputs) -> None:
                more = options(16, return_dict_in_generate=True)
                outputs.append(model.generate(ids, **{CACHE: cache}, **more, **given))

            spent = seconds(answer)
            total += spent if turn else 0.0
            cache = outputs[0].past_key_values
            ids = torch.cat([outputs[0].sequences, prompt(model, 16, seed=turn + 1)], dim=1)
        return total

    return compare(talk, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt of equal rows")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prepack", action="store_true", help="hf_paged.prepack(model) first")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    if args.prepack:
        hf_paged.prepack(model)
    figures = {}
    for case in (one_prompt, equal_rows, conversation):
        figures[case.__name__] = case(model, args)
        print(case.__name__, {name: round(value, 4) for name, value in figures[case.__name__].items()}, flush=True)
    if args.json:
        report = {"date": time.strftime("%Y-%m-%d"), "machine": throughput.machine(args), **figures}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
