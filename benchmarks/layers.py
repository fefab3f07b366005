"""The linear layers of a model alone, on a CPU, beside those of other commits or instruction sets.

    python benchmarks/layers.py --dtype float32 --rows 1 8 64 256                  # this checkout
    python benchmarks/layers.py --commits . 5dad232 --dtype float32 --rows 64      # and another commit
    python benchmarks/layers.py --isas default avx512 avx2 --dtype bfloat16 --rows 1 16 64
    python benchmarks/layers.py --isas avx2 --shape 2048 8192 --rows 48 512        # layers of one shape: columns, depth

Each variant has a process of its own with its own random weights. The processes compute in turns, one at a time, so
that a change of the machine's speed meets all of them. A time is the median over `--turns` turns, in milliseconds: CPU
time with one thread, else the time that passed. A ratio is the median of the pairs' ratios to the first variant. The
last column is the share of what fused multiplications and additions reach in registers (`fma_limit.c`, compiled for the
variant's instruction set, measured in the same turns on one thread).

A commit's code runs as it is, with its own compiled kernels. It must have `hf_paged.fused.cpu.ops.LinearWeight`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HERE, DEFAULT = ".", "default"
LEAST_NUMBERS = 1 << 24  # of the weights of one shape: more bytes than the cache that a core has to itself


def shapes(model: str) -> list[tuple[int, int]]:
    """(columns, depth) of each linear layer of a decoder layer."""
    from throughput import SHAPES

    config = SHAPES[model]
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    key = config["num_key_value_heads"] * hidden // heads
    return [(hidden, hidden), (key, hidden), (key, hidden), (hidden, hidden), (inner, hidden), (inner, hidden),
            (hidden, inner)]  # fmt: skip


# -- the process of a variant ------------------------------------------------------------------------------------------


def limit_function() -> Any:
    """The function of `fma_limit.c`, compiled for the instruction set of the kernels."""
    from hf_paged.kernels.native.toolchain import find_toolchain

    toolchain = find_toolchain()
    with tempfile.TemporaryDirectory() as folder:
        unit, out = Path(folder, "limit.o"), Path(folder, "limit.so")
        subprocess.run(toolchain.compile(Path(__file__).with_name("fma_limit.c"), unit, []), check=True)
        subprocess.run(toolchain.link([unit], out), check=True)
        function = ctypes.CDLL(str(out)).fma_limit
    function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64]
    return function


def work(options: dict[str, Any]) -> None:
    """Reads numbers of rows from standard input; writes the seconds that all layers took, and the operations a second
    of the limit, after a line of status."""
    import torch

    from hf_paged.fused.cpu import ops
    from hf_paged.kernels.native import build
    from hf_paged.kernels.native import ops as native_ops

    torch.set_num_threads(options["threads"])
    dtype = getattr(torch, options["dtype"])
    assert native_ops.is_available(), build.status()
    torch.manual_seed(0)
    is_packed = dtype == torch.bfloat16 and ops.packs()

    def layer(columns: int, depth: int) -> ops.LinearWeight:
        weight = torch.randn(columns, depth, dtype=dtype) * 0.02
        if is_packed:
            (packed,) = ops.WeightArena([(columns, depth)]).parts
            ops.pack(weight, packed)
            weight = packed
        return ops.LinearWeight(weight, None, columns, depth, is_packed)

    layers = [layer(*shape) for _ in range(options["layers"]) for shape in options["shapes"]]
    clock = time.process_time if options["threads"] == 1 else time.perf_counter
    limit = limit_function()
    print(build.status(), flush=True)
    for line in sys.stdin:
        rows = {depth: torch.randn(int(line), depth, dtype=dtype) for depth in {each.depth for each in layers}}
        start = clock()
        for each in layers:
            ops.linear(each, rows[each.depth])
        seconds, start = clock() - start, time.process_time()
        operations = limit(1_000_000)
        print(seconds, operations / (time.process_time() - start), flush=True)


# -- the process that compares them ------------------------------------------------------------------------------------


@contextmanager
def code_of(commit: str) -> Iterator[Path]:
    """A folder with the package as it is in a commit, or in this checkout."""
    if commit == HERE:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit, "hf_paged"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


class Variant:
    """A commit with an instruction set."""

    def __init__(self, commit: str, isa: str, code: Path, options: dict[str, Any]) -> None:
        self.name = f"{commit} {isa}"
        environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
        if isa != DEFAULT:
            environment["HF_PAGED_ISA"] = isa
        command = [sys.executable, __file__, "--work", json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=code
        )
        self.status = self._answer()

    def measure(self, rows: int) -> tuple[float, float]:
        """Seconds of all layers; operations a second of the limit."""
        assert self._process.stdin is not None
        print(rows, file=self._process.stdin, flush=True)
        seconds, limit = map(float, self._answer().split())
        return seconds, limit

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended with status {self._process.wait()}")
        return line.strip()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(variants: list[Variant], rows: int, turns: int, operations: float) -> list[dict[str, Any]]:
    """operations: of all layers, for these rows."""
    times: list[list[float]] = [[] for _ in variants]
    limits: list[list[float]] = [[] for _ in variants]
    for turn in range(-1, turns):  # the first one warms up
        order = range(len(variants)) if turn % 2 else reversed(range(len(variants)))
        for each in order:
            seconds, limit = variants[each].measure(rows)
            if turn >= 0:
                times[each].append(seconds)
                limits[each].append(limit)
    return [
        {
            "variant": variant.name,
            "rows": rows,
            "ms": round(1e3 * statistics.median(own), 3),
            "ratio": round(statistics.median(a / b for a, b in zip(own, times[0])), 3),
            "of the limit": round(statistics.median(operations / a / b for a, b in zip(own, limit)), 3),
        }
        for variant, own, limit in zip(variants, times, limits)
    ]


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", nargs="+", default=[HERE], help="'.' is this checkout, as it is now")
    parser.add_argument("--isas", nargs="+", default=[DEFAULT], help="values of HF_PAGED_ISA")
    parser.add_argument("--model", choices=("135m", "8b"), default="135m", help="whose shapes the layers have")
    parser.add_argument("--shape", type=int, nargs=2, metavar=("COLUMNS", "DEPTH"), help="of all layers, not a model's")
    parser.add_argument("--layers", type=int, help="decoder layers; default: as many as exceed the caches, 30 of 135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    sys.path.insert(0, str(ROOT))
    from kernels import environment

    of_layer = [tuple(options.shape)] if options.shape else shapes(options.model)
    of_shape = -(-LEAST_NUMBERS // (options.shape[0] * options.shape[1])) if options.shape else 0
    layers = options.layers or of_shape or {"135m": 30, "8b": 2}[options.model]
    given = {"dtype": options.dtype, "threads": options.threads, "layers": layers, "shapes": of_layer}
    numbers = layers * sum(columns * depth for columns, depth in of_layer)
    with ExitStack() as stack:
        variants = []
        for commit in options.commits:
            code = stack.enter_context(code_of(commit))
            for isa in options.isas:
                variants.append(Variant(commit, isa, code, given))
                stack.callback(variants[-1].end)
                print(f"{variants[-1].name}: {variants[-1].status}", file=sys.stderr)
        print(f"{'rows':>5} {'variant':<24} {'ms':>9} {'ratio':>6} {'G operations/s':>15} {'of the limit':>13}")
        figures = []
        for rows in options.rows:
            for line in compare(variants, rows, options.turns, 2 * numbers * rows):
                figures.append(line)
                speed = 2 * numbers * rows / line["ms"] / 1e6
                print(
                    f"{rows:5} {line['variant']:<24} {line['ms']:9.2f} {line['ratio']:6.2f} {speed:15.0f} "
                    f"{line['of the limit']:13.2f}",
                    flush=True,
                )
        if options.out:
            report = {**environment("cpu"), **given, "native": [each.status for each in variants], "figures": figures}
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
