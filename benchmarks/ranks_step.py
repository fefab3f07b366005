"""What a second rank adds to a decode step outside the forward, and what each rank holds.

    python benchmarks/ranks_step.py --output benchmarks/results/ranks-step-cpu.json    # 1 rank and 2 in turn

Outside the forward is the time of `Engine.step` on rank 0 without that of the model's forward: schedule, pack, send the
plan, sample, accept. Rank 0 waits in its first all-reduce until the other rank's forward has begun too, so the time by
which that begins later is added. The model is small, and on a CPU over gloo, because the plan depends on the number of
sequences and not on the model. Each rank has a core of its own and one thread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from kernels import environment
from torch import distributed
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

import hf_paged
from hf_paged.model.packed import PackedModel

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 4096,
}  # fmt: skip
WARM_STEPS = 20
LAST_STEPS = 2

Data = dict[str, Any]
Span = tuple[float, float]


def save_model(folder: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def run_rank(rank: int, size: int, port: int, folder: str, job: Data, pipe: Any) -> None:
    """One rank's process: reports its forwards and what it holds; rank 0 also its steps, in seconds."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(address, WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    options = {"distributed_config": DistributedConfig(tp_size=size)} if size > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    model.generation_config.eos_token_id = None  # every sequence has the same length
    blocks = job["sequences"] * (-(-(job["context"] + _new_tokens(job)) // 16) + 1)
    config = hf_paged.SchedulerConfig(max_num_seqs=job["sequences"], async_scheduling=False)
    forwards = _watched_forwards()
    steps: list[Span] = []
    with hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=blocks), config, cuda_graphs=False) as engine:
        if rank == 0:
            steps = _drive(engine, job)
        else:
            engine.run_worker()
        held = {"kv_bytes": engine._memory.nbytes, "weight_bytes": _weight_bytes(model)}
    pipe.send({"steps": steps, "forwards": forwards, **held})
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _new_tokens(job: Data) -> int:
    prompts = job["sequences"] * job["context"] // 256  # steps that compute prompts, beside decodes
    return int(prompts + WARM_STEPS + job["steps"] + LAST_STEPS)


def _weight_bytes(model: Any) -> int:
    return sum(getattr(weight, "_local_tensor", weight).nbytes for weight in model.parameters())


def _watched_forwards() -> list[Span]:
    """Begin and end of each packed forward of this process from now on."""
    own, spans = PackedModel.forward, []

    def forward(*args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        result = own(*args, **kwargs)
        spans.append((begin, time.monotonic()))
        return result

    PackedModel.forward = forward  # type: ignore[method-assign]
    return spans


def _drive(engine: hf_paged.Engine, job: Data) -> list[Span]:
    """Begin and end of the steps in which every sequence gets a token."""
    options = GenerationConfig(max_new_tokens=_new_tokens(job), do_sample=False, pad_token_id=0)
    torch.manual_seed(1)
    for row in torch.randint(3, SHAPE["vocab_size"], (job["sequences"], job["context"])).tolist():
        engine.add_request(row, options)
    steps, before = [], 0
    while engine.has_unfinished_requests():
        begin = time.monotonic()
        engine.step()
        end = time.monotonic()
        generated = engine.stats().generated_tokens
        if generated - before == job["sequences"]:
            steps.append((begin, end))
        before = generated
    return steps[WARM_STEPS:-LAST_STEPS]


def run(size: int, folder: str, job: Data) -> Data:
    """One run with `size` ranks: medians in ms."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(rank, size, port, folder, job, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    told = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return _medians(told)


def _medians(told: list[Data]) -> Data:
    begins = [[begin for begin, _ in rank["forwards"]] for rank in told]
    if len({len(own) for own in begins}) != 1:
        raise RuntimeError(f"the ranks have computed {[len(own) for own in begins]} forwards")
    outside, lag, whole = [], [], []
    for begin, end in told[0]["steps"]:
        (index,) = (i for i, start in enumerate(begins[0]) if begin <= start < end)
        start, stop = told[0]["forwards"][index]
        whole.append(end - begin)
        lag.append(max(0.0, max(own[index] for own in begins) - start))
        outside.append(end - begin - (stop - start) + lag[-1])
    values = {"outside_forward": outside, "of_which_lag": lag, "step": whole}
    return {
        **{f"{name}_ms": round(1e3 * statistics.median(value), 4) for name, value in values.items()},
        "steps": len(whole),
        "weight_bytes": [rank["weight_bytes"] for rank in told],
        "kv_bytes": [rank["kv_bytes"] for rank in told],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    job = {"sequences": args.sequences, "context": args.context, "steps": args.steps}
    runs: dict[int, list[Data]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for _ in range(args.runs):
            for size, made in runs.items():
                made.append(run(size, folder, job))
                print(size, json.dumps(made[-1]), flush=True)
    medians = {size: statistics.median(one["outside_forward_ms"] for one in made) for size, made in runs.items()}
    growth = round(medians[2] - medians[1], 4)
    print(f"outside the forward: {medians[1]:.3f} ms with 1 rank, {medians[2]:.3f} ms with 2: {growth:+.3f} ms")
    if args.output:
        result = {"environment": environment("cpu"), "model": SHAPE, **job, "growth_ms": growth, "runs": runs}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
