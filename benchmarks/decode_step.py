"""How long a decode step of the engine takes, against reading the weights and the K/V once.

    python benchmarks/decode_step.py --model 8b --batch 1 8 64            # on a CUDA device
    python benchmarks/decode_step.py --model 8b --profile 8               # which kernels run, and how often a layer
    python benchmarks/decode_step.py --model tiny --device cpu --context 64

A step cannot be faster than reading what it needs, so the ratio says how much of a step is overhead. The bandwidth is
that of a copy, measured in the same run: bytes read and written, divided by its time. A step's time is the median over
`--steps` calls of `Engine.step`, with all requests past their prompts. The JSON file is written after each row, so that
a run that is ended early leaves what it has measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from kernels import environment
from throughput import SHAPES, build_model, generation_config

import hf_paged

WARM_STEPS = 8
PROMPT_TOKENS = 8192
"""Of a step, while the prompts are computed."""


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.empty((2 << 30) if device == "cuda" else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(times)


def bytes_of_step(model: Any, batch: int, context: int) -> int:
    """Bytes of the weights and of the K/V of `batch` sequences of `context` tokens. Embeddings are not read as a whole
    unless they are the output layer's weights too."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:
        weights -= embedding.nbytes
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * embedding.element_size()
    return int(weights + batch * context * kv)


def use_liger() -> None:
    """From here on Liger's kernels take the place of transformers' norms, rotations and MLPs in every Llama."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from transformers.models.llama import modeling_llama

    apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
    for part in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"):
        code = getattr(modeling_llama, part)
        hf_paged.tokenwise(getattr(code, "forward", code))  # each token by itself: such layers may run packed


def open_engine(model: Any, batch: int, steps: int, args: argparse.Namespace) -> hf_paged.Engine:
    """An engine in which `batch` requests decode; their prompts have been computed."""
    context = args.context
    # Requests whose prompts came first decode while the prompts of the others are computed.
    prompt_steps = -(-batch * context // (PROMPT_TOKENS - batch)) + 1
    new = prompt_steps + WARM_STEPS + steps + 2
    blocks = batch * (-(-(context + new) // 16) + 1)
    engine = hf_paged.Engine(
        model,
        {"num_blocks": blocks},
        # No graphs of other batch sizes.
        {"prefix_caching": False, "max_num_seqs": batch, "max_num_batched_tokens": PROMPT_TOKENS},
        fuse=False if args.no_fuse or args.liger else None,
        prepack=False if args.no_prepack else None,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(batch):
        ids = torch.randint(1, model.config.vocab_size, (context,), generator=generator)
        engine.add_request(ids, generation_config(new))
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    return engine


def measure(model: Any, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    with open_engine(model, batch, args.steps, args) as engine:
        for _ in range(WARM_STEPS // 2):
            engine.step()
        # A call returns while the device computes: single calls say little, and their median is not the device's time.
        _wait(args.device)
        start = time.perf_counter()
        for _ in range(args.steps):
            engine.step()
        _wait(args.device)
        seconds = time.perf_counter() - start
        stats = engine.stats()
    if stats.num_running != batch:
        raise SystemExit(f"batch {batch}: {batch - stats.num_running} requests ended meanwhile")
    return {
        "batch": batch, "context": args.context, "step_ms": 1e3 * seconds / args.steps, "steps": args.steps,
        "graph_replays": stats.graph_replays,
    }  # fmt: skip


def profile(model: Any, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Kernels (on a CPU: operations) of one step, by name: how often they run a layer, and their time a step."""
    steps = min(args.steps, 10)
    with open_engine(model, batch, steps + WARM_STEPS, args) as engine:
        for _ in range(WARM_STEPS):
            engine.step()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if args.device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        start = time.process_time()
        with torch.profiler.profile(activities=activities) as profiled:
            for _ in range(steps):
                engine.step()
            _wait(args.device)
        cpu_seconds = time.process_time() - start
    counts: Counter[str] = Counter()
    micros: Counter[str] = Counter()
    wanted = torch.autograd.DeviceType.CUDA if args.device == "cuda" else torch.autograd.DeviceType.CPU
    for event in profiled.events():
        if event.device_type == wanted:
            counts[event.name] += 1
            micros[event.name] += event.self_device_time_total if args.device == "cuda" else event.self_cpu_time_total
    layers = model.config.num_hidden_layers
    return {
        "batch": batch,
        "launches_a_layer": sum(counts.values()) / steps / layers,
        "cpu_ms_a_step_while_profiled": 1e3 * cpu_seconds / steps,
        "kernels": [
            {"name": name, "a_layer": counts[name] / steps / layers, "us_a_step": spent / steps}
            for name, spent in micros.most_common(40)
        ],
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="135m", help="shape of the random Llama")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="batch sizes of which to list the kernels")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of each request, as far as they fit")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--no-prepack", action="store_true", help="leave weights where they are")
    parser.add_argument("--no-fuse", action="store_true", help="leave decoder layers to torch but for their attention")
    parser.add_argument("--liger", action="store_true", help="the same with liger-kernel's layers")
    parser.add_argument("--deadline", type=float, help="start no row after so many seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    args.seed = 0
    start = time.perf_counter()
    if args.liger:
        use_liger()
    model = build_model(args)
    report: dict[str, Any] = environment(args.device) | {"rows": [], "profiles": [], "skipped": [], "errors": []}
    bandwidth = report["copy_bytes_per_s"] = copy_bandwidth(args.device)
    longest = args.context
    for batch, profiles in [(batch, False) for batch in args.batch] + [(batch, True) for batch in args.profile]:
        if args.deadline is not None and time.perf_counter() - start > args.deadline:
            report["skipped"].append({"batch": batch, "profile": profiles})
        else:
            args.context = _context_that_fits(model, batch, longest, args.device)
            try:
                add_row(report, model, batch, args, profiles=profiles, bandwidth=bandwidth)
            except (RuntimeError, SystemExit) as error:  # too little memory, for example: other rows may fit
                report["errors"].append({"batch": batch, "profile": profiles, "error": f"{error}"[:500]})
                print(f"batch {batch}: {type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if report["errors"]:
        raise SystemExit(f"{len(report['errors'])} rows failed")


def add_row(
    report: dict[str, Any], model: Any, batch: int, args: argparse.Namespace, *, profiles: bool, bandwidth: float
) -> None:
    if profiles:
        row = profile(model, batch, args)
        report["profiles"].append(row)
        print(f"batch {row['batch']}: {row['launches_a_layer']:.1f} launches a layer")
        for kernel in row["kernels"][:15]:
            print(f"  {kernel['a_layer']:6.2f} a layer {kernel['us_a_step']:9.1f} us a step  {kernel['name'][:90]}")
        sys.stdout.flush()
        return
    row = measure(model, batch, args)
    read = 1e3 * bytes_of_step(model, batch, args.context) / bandwidth
    row |= {"read_ms": read, "step_over_read": row["step_ms"] / read}
    report["rows"].append(row)
    print("  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)


def _context_that_fits(model: Any, batch: int, longest: int, device: str) -> int:
    """`longest`, or so many tokens of each sequence as four fifths of a device's free memory hold."""
    if device != "cuda":
        return longest
    a_token = bytes_of_step(model, 1, 1) - bytes_of_step(model, 1, 0)
    return min(longest, int(torch.cuda.mem_get_info()[0] * 0.8 / (a_token * batch)) // 16 * 16)


if __name__ == "__main__":
    main()
