"""Throughput and latency of serving systems with the same weights and the same requests, measured in one run.

Systems: ours (hf_paged.Engine), plain (padded `generate` in arrival order), hf-cb (transformers' continuous batching),
vllm and openvino (OpenVINO GenAI), the last two in environments of their own, whose Pythons are given by
`--vllm-python` and `--openvino-python`. Two modes: offline (all requests arrive at the start) and replay (`--rate`,
`--trace`: they arrive over time).

    python benchmarks/throughput.py --model 135m --workload sharegpt --scale 0.25 --requests 64 --threads 1
    python benchmarks/throughput.py --systems ours,vllm --vllm-python /path/to/venv/bin/python
    python benchmarks/throughput.py --model 8b --dtype bfloat16 --device cuda --rate 8

Useful tokens are those that the requests asked for; further tokens of a padded batch only cost time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import peers
import torch
import transformers
import workloads

SHAPES: dict[str, dict[str, Any]] = {
    # SmolLM2-135M
    "135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    # Llama-3-8B
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # Qwen3-4B
    "qwen3-4b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    # A small mixture of experts: 316 million parameters, of which a token uses a sixth
    "moe": {
        "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024,
        "moe_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192,
    },
}  # fmt: skip


@dataclasses.dataclass
class Measured:
    """Times of one request in seconds after the start of the run, and the number of its tokens."""

    arrival: float
    first: float
    end: float
    tokens: int


@dataclasses.dataclass
class Result:
    system: str
    seconds: float
    requests: list[Measured]
    start_up: float = 0.0
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_times: bool = True  # False: only the whole run was timed, not single requests

    def summary(self) -> dict[str, Any]:
        tokens = sum(r.tokens for r in self.requests)
        percentile = lambda values, q: sorted(values)[min(len(values) - 1, int(q * len(values)))]  # noqa: E731
        ttft = [r.first - r.arrival for r in self.requests]
        tpot = [(r.end - r.first) / max(r.tokens - 1, 1) for r in self.requests]
        summary: dict[str, Any] = {
            "system": self.system,
            "tokens_per_s": tokens / self.seconds,
            "requests_per_s": len(self.requests) / self.seconds,
            "seconds": self.seconds,
            "start_up_s": self.start_up,
        }
        if self.has_times:
            summary |= {
                "normalized_latency_s": statistics.mean((r.end - r.arrival) / r.tokens for r in self.requests),
                "ttft_median_s": statistics.median(ttft),
                "ttft_p99_s": percentile(ttft, 0.99),
                "tpot_median_s": statistics.median(tpot),
                "tpot_p99_s": percentile(tpot, 0.99),
            }
        return summary | self.figures


def build_model(args: argparse.Namespace) -> Any:
    ids = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(**{"model_type": "llama", **SHAPES[args.model], **ids})
    torch.manual_seed(args.seed)
    torch.set_default_dtype(getattr(torch, args.dtype))
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def generation_config(tokens: int) -> Any:
    return transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


def run_ours(model: Any, requests: list[Any], prompts: list[list[int]], args: argparse.Namespace) -> Result:
    import hf_paged

    begin = time.perf_counter()
    cache = hf_paged.CacheConfig(block_size=args.block_size, memory=args.memory)
    scheduler = hf_paged.SchedulerConfig(max_num_seqs=args.max_num_seqs)
    engine = hf_paged.Engine(model, cache, scheduler, cuda_graphs=False if args.eager else None)
    start_up = time.perf_counter() - begin
    waste, batched, steps = [], [], 0
    begin = time.perf_counter()
    waiting = list(range(len(requests)))
    arrivals: dict[str, float] = {}
    first: dict[str, float] = {}
    done: list[Measured] = []
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - begin
        while waiting and requests[waiting[0]].arrival <= now:
            index = waiting.pop(0)
            key = engine.add_request(prompts[index], generation_config(requests[index].output_length))
            arrivals[key] = requests[index].arrival
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, requests[waiting[0]].arrival - (time.perf_counter() - begin)))
            continue
        outputs = engine.step()
        steps += 1
        now = time.perf_counter() - begin
        for output in outputs:
            first.setdefault(output.request_id, now)
            if output.finished:
                key = output.request_id
                done.append(Measured(arrivals[key], first[key], now, len(output.outputs[0].token_ids)))
        if steps % 10 == 1:
            stats = engine.stats()
            if stats.blocks_used:
                waste.append(stats.kv_waste_ratio)
            batched.append(stats.num_running)
    seconds = time.perf_counter() - begin
    stats = engine.stats()
    figures = {
        "kv_waste": statistics.mean(waste),
        "batched_requests": statistics.mean(batched),
        "preemptions": stats.preemptions_recompute + stats.preemptions_swap,
        "steps": steps,
        "graph_replays": stats.graph_replays,
    }
    engine.close()
    return Result("ours", seconds, done, start_up, figures)


def run_plain(model: Any, requests: list[Any], prompts: list[list[int]], args: argparse.Namespace) -> Result:
    begin = time.perf_counter()
    done: list[Measured] = []
    held, filled = 0, 0
    for start in range(0, len(requests), args.plain_batch):
        group = range(start, min(start + args.plain_batch, len(requests)))
        # A static batch starts when its last request has arrived.
        wait = requests[group[-1]].arrival - (time.perf_counter() - begin)
        if wait > 0:
            time.sleep(wait)
        longest = max(len(prompts[i]) for i in group)
        ids = torch.zeros(len(group), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(group):
            ids[row, longest - len(prompts[i]) :] = torch.tensor(prompts[i])
            mask[row, longest - len(prompts[i]) :] = 1
        new = max(requests[i].output_length for i in group)
        model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), generation_config=generation_config(new)
        )
        now = time.perf_counter() - begin
        # No token is available before the batch ends.
        done += [Measured(requests[i].arrival, now, now, requests[i].output_length) for i in group]
        held += len(group) * (longest + new)
        filled += sum(len(prompts[i]) + requests[i].output_length for i in group)
    return Result("plain", time.perf_counter() - begin, done, 0.0, {"kv_waste": 1 - filled / held})


def run_hf_cb(model: Any, requests: list[Any], prompts: list[list[int]], args: argparse.Namespace) -> Result:
    if any(r.arrival > 0 for r in requests):
        raise SystemExit("hf-cb is measured offline only; leave --rate and --trace out")
    begin = time.perf_counter()
    with model.continuous_batching_context_manager(generation_config=generation_config(1), block=True) as manager:
        start_up = time.perf_counter() - begin
        begin = time.perf_counter()
        for i, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=str(i), max_new_tokens=requests[i].output_length)
        done = []
        while len(done) < len(prompts):
            output = manager.get_result(timeout=1)
            if output is not None and output.is_finished():
                now = time.perf_counter() - begin
                done.append(Measured(0.0, now, now, len(output.generated_tokens)))
            elif output is None and not manager.is_running():
                raise SystemExit("transformers' continuous batching stopped before the end")
        seconds = time.perf_counter() - begin
    return Result("hf-cb", seconds, done, start_up, has_times=False)


def run_peer(name: str, model: Any, requests: list[Any], prompts: list[list[int]], args: argparse.Namespace) -> Result:
    own = {"vllm": args.vllm_python, "openvino": args.openvino_python}[name]
    if own is None:
        raise SystemExit(f"{name} runs in an environment of its own: give its interpreter with --{name}-python")
    options = json.loads(args.vllm_options) if name == "vllm" else {}
    form = {"float32": "fp32", "bfloat16": "bf16"}[args.dtype]
    counts = [request.output_length for request in requests]
    with peers.saved(model) as folder:
        peer = peers.Peer(name, folder, form, own=own, threads=args.threads or 1, options=options)
        peer.run(prompts[:1], counts[:1])
        seconds, tokens = peer.run(prompts, counts)
        peer.close()
    done = [Measured(0.0, seconds, seconds, count) for count in tokens]
    return Result(name, seconds, done, peer.start_up, {"version": peer.version}, has_times=False)


SYSTEMS: dict[str, Callable[..., Result]] = {
    "ours": run_ours, "plain": run_plain, "hf-cb": run_hf_cb,
    "vllm": partial(run_peer, "vllm"), "openvino": partial(run_peer, "openvino"),
}  # fmt: skip


def machine(args: argparse.Namespace) -> dict[str, Any]:
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    if args.device == "cpu":
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        device = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), device)
        from hf_paged.kernels import ops

        versions["kernels"] = ops.default_impl("cpu")
    return {"device": device, "threads": torch.get_num_threads(), **versions, "commit": _commit()}


def _commit() -> str:
    """The commit of this checkout, with "-dirty" if it has changes; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="135m", help="shape of the random Llama")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--systems", default="ours,plain,hf-cb", help="comma-separated: ours, plain, hf-cb, vllm, openvino"
    )
    parser.add_argument("--workload", choices=workloads.WORKLOADS, default="sharegpt")
    parser.add_argument("--scale", type=float, default=0.25, help="lengths are multiplied by this")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, help="Poisson arrivals a second (default: all at the start)")
    parser.add_argument("--trace", type=Path, help="JSON lines with timestamp (ms), input_length, output_length")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--runs", type=int, default=1, help="the median run of each system is shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--memory", help="size of our engine's K/V pool (default: the engine's own)")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--eager", action="store_true", help="run our engine without CUDA graphs")
    parser.add_argument("--plain-batch", type=int, default=32)
    parser.add_argument("--vllm-python")
    parser.add_argument("--openvino-python", help="interpreter with openvino-genai and optimum-intel[openvino]")
    parser.add_argument("--vllm-options", default="{}", help="further arguments of vllm.LLM as JSON")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()

    model = build_model(args)
    if args.trace:
        requests = workloads.read_trace(args.trace)[: args.requests]
    else:
        requests = workloads.synthesise(args.workload, args.requests, scale=args.scale, rate=args.rate, seed=args.seed)
    prompts = workloads.prompts_for(requests, model.config.vocab_size, args.seed)
    warm = [workloads.TraceRequest(0.0, 8, 4)] * 2
    rows = []
    names = args.systems.split(",")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for run in range(args.runs):
        for name in names:
            if run == 0 and name in ("ours", "plain"):
                SYSTEMS[name](model, warm, workloads.prompts_for(warm, 500), args)
            runs[name].append(SYSTEMS[name](model, requests, prompts, args).summary())
            print(f"{name}: {runs[name][-1]['tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    for name in names:
        ordered = sorted(runs[name], key=lambda summary: summary["tokens_per_s"])
        rows.append(ordered[len(ordered) // 2])
    report = {
        "command": "python benchmarks/throughput.py " + " ".join(argv if argv is not None else sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(args),
        "workload": {
            "name": str(args.trace or args.workload),
            "requests": len(requests),
            "mean_input": statistics.mean(r.input_length for r in requests),
            "mean_output": statistics.mean(r.output_length for r in requests),
            "sigma_input": None if args.trace else workloads.WORKLOADS[args.workload][0].sigma,
            "sigma_output": None if args.trace else workloads.WORKLOADS[args.workload][1].sigma,
        },
        "results": rows,
    }
    print(table(report))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    workload, lines = report["workload"], []
    lines.append(
        f"{workload['name']}: {workload['requests']} requests, on average {workload['mean_input']:.0f} tokens in, "
        f"{workload['mean_output']:.0f} out; {report['machine']}"
    )
    columns = {
        "tokens_per_s": ("tokens/s", "{:.1f}"), "normalized_latency_s": ("s/token", "{:.3f}"),
        "ttft_median_s": ("TTFT s", "{:.2f}"), "tpot_median_s": ("TPOT s", "{:.3f}"),
        "batched_requests": ("batched", "{:.1f}"), "kv_waste": ("KV waste", "{:.1%}"),
        "start_up_s": ("start s", "{:.2f}"),
    }  # fmt: skip
    lines += ["", "| system | " + " | ".join(title for title, _ in columns.values()) + " | ours is |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    ours = next((r["tokens_per_s"] for r in report["results"] if r["system"] == "ours"), None)
    for row in report["results"]:
        cells = [form.format(row[name]) if name in row else "" for name, (_, form) in columns.items()]
        ratio = f"{ours / row['tokens_per_s']:.2f}x" if ours else ""
        lines.append(f"| {row['system']} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
