"""Compare paged with plain `generate` on this machine: the same calls alternate in one process; medians of the ratio.

    python benchmarks/generate.py                     # the shipped checkpoint
    python benchmarks/generate.py CHECKPOINT --rounds 9 --threads 2 --json out.json
    python benchmarks/generate.py --random 135m --prepack     # random weights, bf16, packed for the CPU

Also measures how much longer the first paged call takes than the first plain call, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

SHIPPED = Path(__file__).parent.parent / "examples" / "pydoc-lm-qa"

# name -> (tokens of each prompt, options of generate). The lengths of "ragged" are evenly spaced in the logarithm.
RAGGED = [round(8 * (400 / 8) ** (i / 15)) for i in range(16)]
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "ragged 16": (RAGGED, {}),
    "ragged 16, no early end": (RAGGED, {"min_new_tokens": 64}),
    "equal 16 x 128": ([128] * 16, {"min_new_tokens": 64}),
    "one prompt": ([64], {"min_new_tokens": 64}),
    "ragged 4, 4 beams": (RAGGED[::5], {"num_beams": 4}),
    "ragged 4, 4 samples": (RAGGED[::5], {"do_sample": True, "num_return_sequences": 4, "min_new_tokens": 64}),
}


def batch(tokenizer: Any, lengths: list[int], device: Any) -> dict[str, Any]:
    """Documentation text cut into prompts of these lengths, left-padded."""
    import torch

    stream = tokenizer("\n\n".join(topics.topics[name] for name in sorted(topics.topics)), verbose=False)["input_ids"]
    width, pad = max(lengths), tokenizer.pad_token_id or 0
    rows, masks = [], []
    for number, length in enumerate(lengths):
        tokens = stream[number * 1000 : number * 1000 + length]
        rows.append([pad] * (width - length) + tokens)
        masks.append([0] * (width - length) + [1] * length)
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": torch.tensor(masks, device=device),
    }


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    if args.random:
        return tokenizer, random_model(args.random, args.device)
    return tokenizer, AutoModelForCausalLM.from_pretrained(args.checkpoint).to(args.device).eval()


def random_model(shape: str, device: str) -> Any:
    from throughput import build_model

    return build_model(argparse.Namespace(model=shape, dtype="bfloat16", device=device, seed=0))


def timed(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[float, Any]:
    import torch

    torch.manual_seed(0)
    started = time.perf_counter()
    output = model.generate(**inputs, **options)
    if output.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, output


def compare(args: argparse.Namespace, tokenizer: Any, model: Any, name: str) -> dict[str, Any]:
    import torch

    import hf_paged

    lengths, more = CASES[name]
    inputs = batch(tokenizer, lengths, model.device)
    options = {"max_new_tokens": args.max_new_tokens, "pad_token_id": tokenizer.pad_token_id or 0, **more}
    if "min_new_tokens" in options:
        options["min_new_tokens"] = args.max_new_tokens
    paged_options = {**options, "cache_implementation": "paged"}
    _, expected = timed(model, inputs, options)
    with hf_paged.record_calls() as records:
        _, actual = timed(model, inputs, paged_options)
    ratios, plain_times, paged_times = [], [], []
    for number in range(args.rounds):
        # Alternate the order, so that neither always runs second.
        order = [options, paged_options] if number % 2 else [paged_options, options]
        times = {id(chosen): timed(model, inputs, chosen)[0] for chosen in order}
        plain_times.append(times[id(options)])
        paged_times.append(times[id(paged_options)])
        ratios.append(paged_times[-1] / plain_times[-1])
    record = records[0]
    return {
        "case": name,
        "route": record.route,
        "same_tokens": bool(torch.equal(actual, expected)),
        "plain_s": statistics.median(plain_times),
        "paged_s": statistics.median(paged_times),
        "paged_over_plain": statistics.median(ratios),
        "ratios": ratios,
        "kv_bytes_used": record.kv_bytes_used,
        "kv_bytes_filled": record.kv_bytes_filled,
        "kv_bytes_contiguous": record.kv_bytes_contiguous,
        "cow_copies": record.cow_copies,
    }


def first_call(args: argparse.Namespace) -> dict[str, Any]:
    """Time of the first generate call of a process, including the import of this package: medians of three each.

    In seconds of wall-clock time and of CPU time; other processes on the machine affect the latter less.
    """
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "paged": []}
    for kind in ("plain", "paged") * 3:
        argv = [sys.executable, __file__, str(args.checkpoint), "--first", kind, "--threads", str(args.threads)]
        result = subprocess.run(argv, capture_output=True, text=True, check=True)
        wall, cpu = map(float, result.stdout.split()[-2:])
        seconds[kind].append((wall, cpu))
    report: dict[str, Any] = {}
    for index, clock in enumerate(("wall", "cpu")):
        plain, paged = (statistics.median(times[index] for times in seconds[kind]) for kind in ("plain", "paged"))
        report[clock] = {"plain_s": plain, "paged_s": paged, "added_s": paged - plain}
    return report


def print_first_call(args: argparse.Namespace) -> None:
    tokenizer, model = load(args)
    inputs = batch(tokenizer, [16, 8], model.device)
    options: dict[str, Any] = {"max_new_tokens": 4}
    wall, cpu = time.perf_counter(), time.process_time()
    if args.first == "paged":
        import hf_paged  # noqa: F401

        options["cache_implementation"] = "paged"
    model.generate(**inputs, **options)
    print(time.perf_counter() - wall, time.process_time() - cpu)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default=str(SHIPPED))
    parser.add_argument("--random", metavar="SHAPE", help="a bf16 model of a shape of throughput.py, random weights")
    parser.add_argument("--prepack", action="store_true", help="hf_paged.prepack(model) first")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only this case (may be repeated)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--first", choices=["plain", "paged"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.first:
        print_first_call(args)
        return
    import torch
    import transformers

    tokenizer, model = load(args)
    if args.prepack:
        import hf_paged

        hf_paged.prepack(model)
    report: dict[str, Any] = {
        "checkpoint": f"random {args.random}, bfloat16" if args.random else Path(args.checkpoint).name,
        "prepack": args.prepack,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {args.threads} threads, {args.device}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "max_new_tokens": args.max_new_tokens,
        "rounds": args.rounds,
        "cases": [],
    }
    print(f"{'case':<26}{'plain s':>9}{'paged s':>9}{'ratio':>7}  {'KV used / contiguous':<22}same tokens")
    for name in args.case or CASES:
        result = compare(args, tokenizer, model, name)
        report["cases"].append(result)
        memory = f"{result['kv_bytes_used'] / 2**20:.2f} / {result['kv_bytes_contiguous'] / 2**20:.2f} MiB"
        print(
            f"{name:<26}{result['plain_s']:>9.3f}{result['paged_s']:>9.3f}{result['paged_over_plain']:>7.2f}  "
            f"{memory:<22}{result['same_tokens']}",
            flush=True,
        )
    if not (args.random or args.prepack):
        report["first_call"] = first_call(args)
    for clock, first in report.get("first_call", {}).items():
        print(
            f"first call, {clock} time: plain {first['plain_s']:.2f} s, paged {first['paged_s']:.2f} s, "
            f"{first['added_s']:+.2f} s"
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
