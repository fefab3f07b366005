"""The host's part of a decode step, without a device: what the device does is left out, the rest takes its usual time.

    python benchmarks/host_step.py                                    # a minute
    python benchmarks/host_step.py --parts step --rows 256 --profile  # where the time goes

`attention`: a call of the attention of one layer in an eager decode step, up to the driver: checks, our own choice of
kernels, Triton's binder. `fused`: likewise, each of the four launches of such a layer beside its attention. `step`:
`Engine.step` with graphs whose replay does nothing: scheduling, block tables, the step's inputs, greedy tokens,
outputs. All are medians in the fastest of some runs. What only a device adds is missing: the launch of each kernel and
copy by the driver (2 to 4 microseconds each on common machines) and pinned memory.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import torch
import triton
from kernels import environment
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import hf_paged
from hf_paged.features.graphs import graphs
from hf_paged.fused import overrides
from hf_paged.fused.gpu.kernels.gate import gated
from hf_paged.fused.gpu.kernels.norm import add_norm
from hf_paged.fused.gpu.kernels.rotary import rotate
from hf_paged.fused.rows import Norm, NormKind, RotaryKind
from hf_paged.kernels import ops
from hf_paged.kernels.arguments import Attention, LayerKV, NewKV
from hf_paged.kernels.metadata import step_arrays
from hf_paged.kernels.triton import launch as triton_launch
from hf_paged.kernels.triton import sampling as triton_sampling

PARTS = ["attention", "fused", "step"]
WARM_CALLS = 20
MAX_TOKENS = 1000
LAYERS = 32
BLOCKS = 10


class Driver:
    """Triton's driver of an H200 that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> None:
        return None


class Compiled:
    """A kernel that does nothing, in place of triton's CompiledKernel."""

    function = packed_metadata = None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        return None

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        stream = function = metadata = launch_metadata = enter_hook = exit_hook = None
        return lambda *args: self.run(*grid, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args)


def _compile(self: JITFunction, key: str, signature: Any, device: int, *args: Any) -> Compiled:
    self.device_caches[device][0][key] = made = Compiled()
    return made


class NoGraphs:
    """In place of `graphs.CudaGraphs`: the step is computed when it is captured, and not when it is replayed."""

    device_type = "cpu"

    def __init__(self, device: torch.device) -> None:
        pass

    def warm_up(self, compute: Callable[[], None]) -> None:
        pass

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return lambda: None


def replays() -> list[Any]:
    """Patches with which an engine on a CPU replays its steps."""
    return [
        mock.patch.object(graphs, "CudaGraphs", NoGraphs),
        mock.patch.object(overrides, "native_layers", lambda *_: None),
        mock.patch.object(overrides, "layers_for_engine", lambda *_: None),
    ]


def launches() -> list[Any]:
    """Patches with which CPU tensors take the way of tensors on an H200, without results."""
    greedy = triton_sampling.greedy

    def first_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = greedy(logits)
        return tokens.zero_(), logprobs.zero_()

    return [
        mock.patch.dict(ops._default_impl, {"cpu": "triton"}),
        mock.patch.object(triton.runtime.driver, "_active", Driver()),
        mock.patch.object(JITFunction, "_do_compile", _compile),
        mock.patch.object(triton_launch, "target_of", lambda device: triton_launch.Target("cuda", 90, 132)),
        mock.patch.object(triton_sampling, "greedy", first_tokens),
    ]


def median_us(work: Callable[[], Any], calls: int) -> float:
    """The median of a block of calls, of the fastest block: other programs on the machine slow some of them."""
    medians = []
    with ExitStack() as stack:
        for patch in launches():
            stack.enter_context(patch)
        for _ in range(WARM_CALLS):
            work()
        for _ in range(BLOCKS):
            times = []
            for _ in range(calls // BLOCKS):
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
            medians.append(statistics.median(times))
    return round(min(medians) * 1e6, 1)


def attention_call(rows: int, layers: int = LAYERS) -> Callable[[], None]:
    """All layers of an eager decode step of a model like Llama-3-8B; `layers` calls."""
    heads, kv_heads, head_dim, length, block_size = 32, 8, 128, 1024, 16
    blocks = length // block_size
    arrays = step_arrays(
        [[range(i * blocks, (i + 1) * blocks) for i in range(rows)]], [length] * rows, [1] * rows, block_size
    )
    (metadata,) = arrays.metadata(torch.device("cpu"))
    caches = [
        [torch.empty(blocks * rows, block_size, kv_heads, head_dim, dtype=torch.bfloat16, device="cpu") for _ in "kv"]
        for _ in range(2)
    ]
    query, key, value = (
        torch.empty(1, rows, n, head_dim, dtype=torch.bfloat16).transpose(1, 2)[0].transpose(0, 1)
        for n in (heads, kv_heads, kv_heads)
    )

    def step() -> None:
        own = replace(metadata, scratch={})
        for layer in range(layers):
            ops.paged_attention(query, LayerKV(*caches[layer % 2]), own, Attention(0.1), NewKV(key, value))

    return step


def fused_calls(rows: int) -> dict[str, Callable[[], Any]]:
    """The launches of a layer of Llama-3-8B that are neither products nor attention."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    residual, hidden, gate, up = empty(rows, 4096), empty(rows, 4096), empty(rows, 14_336), empty(rows, 14_336)
    query, key, value = (empty(rows, heads, 128) for heads in (32, 8, 8))
    angles, after = (empty(rows, 128), empty(rows, 128)), Norm(empty(4096), None, 1e-5, NormKind(rounds_first=True))
    into = (empty(64, 16, 8, 128), empty(64, 16, 8, 128), empty(rows, dtype=torch.int64))
    return {
        "norm": partial(add_norm, hidden, after=after),
        "rotate and write": partial(rotate, query, key, angles=angles, kind=RotaryKind(), value=value, into=into),
        "add and norm": partial(add_norm, hidden, residual, after=after),
        "gate": partial(gated, gate, up, "silu"),
    }


def open_engine(rows: int) -> hf_paged.Engine:
    """An engine in which `rows` greedy requests decode."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, max_position_embeddings=4096,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    limits = {"max_num_seqs": 256, "async_scheduling": True, "max_num_batched_tokens": 8192}
    engine = hf_paged.Engine(model, {"num_blocks": rows * 70}, limits, cuda_graphs=True, prepack=False)
    for row in range(rows):
        prompt = [3 + (row * 7 + i * 13) % 120 for i in range(16 + row % 16)]
        engine.add_request(prompt, GenerationConfig(max_new_tokens=MAX_TOKENS, eos_token_id=128, do_sample=False))
    while engine.stats().graph_replays < 3:
        engine.step()
    return engine


def step_of_generate(engine: hf_paged.Engine) -> None:
    """A step as `Engine.generate` runs it, which reads the outputs at the end only."""
    with engine._lock:
        engine._step()


def measured(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows in args.rows:
        if "attention" in args.parts:
            found[f"attention, {rows} rows, a layer"] = round(median_us(attention_call(rows), 50) / LAYERS, 1)
        if "fused" in args.parts:
            found |= {f"{name}, {rows} rows": median_us(call, 2000) for name, call in fused_calls(rows).items()}
        if "step" in args.parts:
            engine = open_engine(rows)
            found[f"step, {rows} rows"] = median_us(engine.step, args.steps)
            found[f"step, {rows} rows, without outputs"] = median_us(partial(step_of_generate, engine), args.steps)
            engine.close()
    return found


def profile(args: argparse.Namespace) -> None:
    rows = args.rows[0]

    def fused() -> None:
        for call in calls.values():
            call()

    for part in args.parts:
        calls = fused_calls(rows)
        work = {"attention": attention_call(rows), "fused": fused}.get(part) or open_engine(rows).step
        profiler = cProfile.Profile()
        profiler.runcall(median_us, work, args.steps)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for patch in replays():
        patch.start()
    if args.profile:
        return profile(args)
    result = {"microseconds": measured(args), "environment": environment("cpu")}
    print(json.dumps(result["microseconds"], indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
