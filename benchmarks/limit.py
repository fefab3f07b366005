"""How close the engine comes to what one core can do in bf16, and where the rest of the time goes.

The limit of a step is the longer of two times: of reading all linear weights once, and of the core's bf16 products for
its rows, with the instructions that the engine uses: the matrix unit's (AMX) or AVX-512's dot products. All rates are
measured in C before and after the run, and the best ones count. Requests that arrive together run to their end, and
process CPU time is divided: what the limit leaves of the layers' parts around attention (linear layers, norms,
rotation, gates) and of the head; attention, of which reading K/V once, as fast as the weights, is a part that the limit
leaves out; sampling; the host. The parts of a layer are timed in their place, in a native call each: measured apart,
attention and linear layers find other data in the caches.

    python benchmarks/limit.py --requests 64 --scale 0.25 --json benchmarks/results/limit-cpu.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
import workloads
from throughput import build_model, generation_config, machine

import hf_paged
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu.stack import StackCall
from hf_paged.kernels import buffers
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import ops as native_ops

C = """
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
float dots(long n) { /* 24 independent sums; 64 operations each */
    __m512 a[24];
    const __m512bh x = (__m512bh)_mm512_setzero_si512();
    _Pragma("GCC unroll 24") for (int i = 0; i < 24; i++) a[i] = _mm512_setzero_ps();
    for (long k = 0; k < n; k++)
        _Pragma("GCC unroll 24") for (int i = 0; i < 24; i++) {
            a[i] = _mm512_dpbf16_ps(a[i], x, x);
            __asm__ volatile("" : "+v"(a[i]));
        }
    _Pragma("GCC unroll 24") for (int i = 1; i < 24; i++) a[0] = _mm512_add_ps(a[0], a[i]);
    return _mm512_reduce_add_ps(a[0]);
}
#define READ(name, ahead) \\
    float name(const char *p, long n) { \\
        __m512 a[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()}; \\
        for (long k = 0; k < n; k += 256) \\
            for (int i = 0; i < 4; i++) { \\
                if (ahead) _mm_prefetch(p + k + ahead + 64 * i, _MM_HINT_T1); \\
                a[i] = _mm512_add_ps(a[i], _mm512_load_ps(p + k + 64 * i)); \\
            } \\
        return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(a[0], a[1]), _mm512_add_ps(a[2], a[3]))); \\
    }
READ(read_all, 0)
READ(read_ahead, 4096)
#ifdef __AMX_BF16__
/* Products of 32 rows with 32 columns, 65,536 operations each: rows in the L1 cache, a weight in L2, as in a linear
   layer. p: 1 MiB. */
int tiles(const char *p, long n) {
    struct { char palette, start, rest[14]; unsigned short bytes[16]; char rows[16]; } config = {1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0;
    _tile_loadconfig(&config);
    for (long k = 0; k < n; k++) {
        const char *weight = p + k % 480 * 2048 + 65536, *rows = p + k % 8 * 2048;
        _tile_loadd(4, rows, 64);
        _tile_loadd(5, rows + 1024, 64);
        _tile_loadd(6, weight, 64);
        _tile_loadd(7, weight + 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 1;
}
#else
int tiles(const char *p, long n) { return 0; }
#endif
"""


def seconds_of(call: Callable[[], Any], rounds: int = 5) -> float:
    """The shortest CPU time of a call."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


class Rates:
    """Of this core: bytes read a second, and bf16 operations a second with AVX-512's dot products and with the matrix
    unit (0 without one). The best of all measurements."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, built = Path(folder) / "rates.c", Path(folder) / "rates.so"
            source.write_text(C)
            subprocess.run(["cc", "-O2", "-march=native", "-shared", "-fPIC", source, "-o", built], check=True)
            self._library = ctypes.CDLL(str(built))
        self._memory = buffers.in_large_pages((1 << 29) + 8192).zero_()
        self.read = self.dots = self.tiles = 0.0

    def measure(self) -> None:
        library, address, count = self._library, ctypes.c_void_p(self._memory.data_ptr()), ctypes.c_long(1 << 20)
        for read in (library.read_all, library.read_ahead):
            seconds = seconds_of(lambda read=read: read(address, ctypes.c_long(1 << 29)))
            self.read = max(self.read, (1 << 29) / seconds)
        self.dots = max(self.dots, count.value * 24 * 64 / seconds_of(lambda: library.dots(count), 20))
        count = ctypes.c_long(1 << 18)
        if library.tiles(address, count):
            self.tiles = max(self.tiles, count.value * 65536 / seconds_of(lambda: library.tiles(address, count), 20))


class Clock:
    """Adds up the CPU time of functions by part and number of rows, and notes the rows of each call."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, int], float] = defaultdict(float)
        self.rows: dict[str, list[int]] = defaultdict(list)

    def of(self, *parts: str, rows: Container[int] | None = None) -> float:
        """The seconds of these parts, for these numbers of rows."""
        return sum(t for (part, n), t in self.seconds.items() if part in parts and (rows is None or n in rows))

    def watch(self, owner: Any, name: str, part: str, rows_of: Callable[..., torch.Tensor]) -> None:
        """rows_of: the rows of a call, from its arguments."""
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = function(*args, **kwargs)
            seconds = time.process_time() - start
            rows = rows_of(*args)
            count = rows.numel() // rows.shape[-1]
            self.seconds[part, count] += seconds
            self.rows[name].append(count)
            return result

        setattr(owner, name, timed)


def layers_in_parts(clock: Clock) -> Callable[[StackCall], torch.Tensor]:
    """What replaces StackCall.run: the same native calls in the same order, with the time of each."""
    library = native_build.library()
    assert library is not None
    before, after = (fused_ops.entry(name, torch.bfloat16) for name in ("layer_in", "layer_out"))

    def run(call: StackCall) -> torch.Tensor:
        arrays = call.ins, call.calls, call.outs
        records = zip(*([array[i:].ctypes.data for i in range(len(array))] for array in arrays), strict=True)
        around = attention = 0.0
        now = time.process_time
        for of_before, of_attention, of_after in records:
            times = [now()]
            before(of_before)
            times.append(now())
            library.hfp_attention(of_attention, native_ops.DTYPES[torch.bfloat16])
            times.append(now())
            after(of_after)
            times.append(now())
            around += times[1] - times[0] + times[3] - times[2]
            attention += times[2] - times[1]
        rows = call.results.shape[2]
        clock.seconds["around attention", rows] += around
        clock.seconds["attention", rows] += attention
        clock.rows["run"].append(rows)
        return call.results

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model, args.dtype, args.device, args.seed = "135m", "bfloat16", "cpu", 0
    torch.set_num_threads(1)
    model = build_model(args)
    requests = workloads.synthesise("sharegpt", args.requests, scale=args.scale, rate=None, seed=0)
    prompts = workloads.prompts_for(requests, model.config.vocab_size, 0)
    rates = Rates()
    rates.measure()

    def run() -> tuple[float, int]:
        with hf_paged.Engine(model, hf_paged.CacheConfig(block_size=16)) as engine:
            for prompt, request in zip(prompts, requests, strict=True):
                engine.add_request(prompt, generation_config(request.output_length))
            start, steps = time.process_time(), 0
            while engine.has_unfinished_requests():
                engine.step()
                steps += 1
            return time.process_time() - start, steps

    run()
    clock = Clock()
    StackCall.run = layers_in_parts(clock)  # type: ignore[method-assign, assignment]
    clock.watch(fused_ops, "layer_in", "around attention", lambda _, rows, *others: rows)
    clock.watch(fused_ops, "layer_out", "around attention", lambda _, x, rows: rows)
    clock.watch(fused_ops, "linear", "head", lambda _, rows: rows)
    clock.watch(native_ops, "paged_attention", "attention", lambda query, *others: query.flatten(1))
    clock.watch(native_ops, "greedy", "sampling", lambda logits, *others: logits)
    total, steps = run()
    rates.measure()
    bandwidth, operations = rates.read, rates.tiles if "AMX" in native_ops.status() else rates.dots
    count = model.config.num_hidden_layers
    each_step = (
        clock.rows["run"] + clock.rows["layer_in"][::count]
    )  # the rows of each step; large ones go layer by layer
    head = model.lm_head.weight.numel()
    of_layers = sum(p.numel() for name, p in model.named_parameters() if name.endswith("proj.weight"))

    def limit_of(weights: int, calls: list[int]) -> float:
        return sum(max(2 * weights / bandwidth, 2 * rows * weights / operations) for rows in calls)

    limit = limit_of(of_layers, each_step) + limit_of(head, clock.rows["linear"])
    config = model.config
    of_token = 2 * 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * count
    lengths = [len(prompt) + i for prompt, each in zip(prompts, requests) for i in range(each.output_length)]
    reading = of_token * sum(lengths) / bandwidth
    parts = {
        "limit": limit,
        "linear layers, norms, rotation, gates beyond it": clock.of("around attention", "head") - limit,
        "attention: reading K/V once": reading,
        "attention beyond that": clock.of("attention") - reading,
        "sampling": clock.of("sampling"),
        "host": total - sum(clock.seconds.values()),
    }
    by_rows = []  # of the decoder layers
    for first, last in zip((1, 17, 33, 65), (17, 33, 65, 1 << 30)):
        steps_of = [rows for rows in each_step if first <= rows < last]
        by_rows.append({
            "rows": (first, max(steps_of, default=0)), "steps": len(steps_of), "limit": limit_of(of_layers, steps_of),
            "around_attention": clock.of("around attention", rows=range(first, last)),
            "attention": clock.of("attention", rows=range(first, last)),
        })  # fmt: skip
    tokens = sum(request.output_length for request in requests)
    report = {
        "command": "python benchmarks/limit.py " + " ".join(sys.argv[1:]), "date": time.strftime("%Y-%m-%d"),
        "machine": machine(args), "read_gb_per_s": bandwidth * 1e-9, "bf16_gflop_per_s": operations * 1e-9,
        "dots_gflop_per_s": rates.dots * 1e-9, "tiles_gflop_per_s": rates.tiles * 1e-9, "kernels": native_ops.status(),
        "tokens_per_cpu_s": tokens / total, "steps": steps, "share_of_limit": limit / total,
        "seconds": {"total": total, **parts}, "layers_by_rows": by_rows,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    for name, seconds in parts.items():
        print(f"| {name} | {seconds:.2f} s | {seconds / total:.1%} |")
    for each in by_rows:
        print("| {rows} rows | {steps} steps | {limit:.2f} | {around_attention:.2f} | {attention:.2f} |".format(**each))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
