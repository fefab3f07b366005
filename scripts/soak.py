"""A long soak test: random requests with every kind of option, from several threads, with aborts, preemptions, adapter
switches, weight changes, pauses and processors that raise. Each result is compared with `generate` of that request
alone.

    python scripts/soak.py --requests 0:1000000 --log soak.jsonl --out benchmarks/results/soak.json

Requests are numbered, and all random choices are seeded by the numbers. A line is appended to the log after every round
of some hundred requests; a run that is started again continues after the rounds in the log. Two processes may take half
of the numbers each; `--merge a.jsonl b.jsonl --out ...` combines their logs into one summary. `--round N` repeats the
round that begins with request N, to investigate a failure (without the state that earlier rounds left in the process).
`--fault` injects a fault into hf_paged, which the soak must find. The exit status is 1 if a result was wrong or memory
leaked.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROUND = 250


def main() -> int:
    args = _arguments()
    if args.merge:
        lines = [line for path in args.merge for line in _read(path)]
    else:
        start, stop = (int(number) for number in args.requests.split(":"))
        _soak(args, start, stop)
        lines = _read(args.log)
    summary = summarize(lines)
    text = json.dumps(summary, indent=1)
    if args.out:
        args.out.write_text(f"{text}\n")
    print(text if len(text) < 10_000 else json.dumps({**summary, "wrong_requests": "see the log"}, indent=1))
    return int(bool(summary["wrong"] or summary["leaked_blocks"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", "--seeds", default="0:1000000", help="numbers of the requests, first:end")
    parser.add_argument("--log", type=Path, default=Path("soak.jsonl"), help="one line per round, to be continued")
    parser.add_argument("--out", type=Path, help="summary, JSON")
    parser.add_argument("--merge", type=Path, nargs="+", help="summarize these logs without running anything")
    parser.add_argument("--round", type=int, help="run only the round that begins with this request")
    parser.add_argument("--kind", help="use only this kind of model")
    parser.add_argument("--fault", help="a fault of tests/sabotage.py; stops at the first round that finds it")
    return parser.parse_args()


def _soak(args: argparse.Namespace, start: int, stop: int) -> None:
    import pytest

    from tests import sabotage
    from tests.soaking.rounds import Round
    from tests.soaking.world import World

    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if args.fault:
        sabotage.SOAK_FAULTS[args.fault](pytest.MonkeyPatch())
    done = {line["first"] for line in _read(args.log)}
    _remember_signatures()
    world, process = World(), psutil.Process()
    firsts = range(start, stop, ROUND) if args.round is None else [args.round]
    for first in firsts:
        if first in done:
            continue
        began, cpu = time.monotonic(), time.process_time()
        count = min(ROUND, stop - first)
        report = Round(world, first, count, args.kind).run()
        if first // ROUND % 10 == 0:
            gc.collect()
        line = {
            "first": first,
            "requests": count,
            "kind": report.kind,
            "mode": report.mode,
            "counts": report.counts,
            "wrong": report.wrong,
            "leaked": report.leaked,
            "seconds": round(time.monotonic() - began, 2),
            "cpu_seconds": round(time.process_time() - cpu, 2),
            "rss": process.memory_info().rss,
            "solo_runs": world.num_solo_runs,
            "pid": os.getpid(),
            "commit": _commit(),
        }
        with args.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        if report.wrong or report.leaked:
            print(
                f"round {first}: {len(report.wrong)} wrong, {report.leaked} leaked ({report.kind}, {report.mode})",
                flush=True,
            )
            for wrong in report.wrong[:3]:
                print("   ", json.dumps(wrong), flush=True)
            if args.fault:
                return


def _remember_signatures() -> None:
    """Cache the signatures that transformers inspects in every request and step, a tenth of the time of a soak."""
    compute, known = inspect.signature, {}

    def signature(obj: Any, **options: Any) -> inspect.Signature:
        function = getattr(obj, "__func__", None)  # not the method itself, which would keep its object alive
        if function is None or options:
            return compute(obj, **options)
        if function not in known:
            known[function] = compute(obj)
        return known[function]

    inspect.signature = signature


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; an incomplete last line is dropped."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


_commits: list[str] = []


def _commit() -> str:
    if not _commits:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        _commits.append(told.stdout.strip())
    return _commits[0]


def summarize(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary of all rounds. memory: resident bytes after each tenth of a process's rounds."""
    counts: Counter[str] = Counter()
    memory: dict[str, list[int]] = {}
    for pid in dict.fromkeys(line["pid"] for line in lines):
        sizes = [line["rss"] for line in lines if line["pid"] == pid]
        memory[f"process {len(memory) + 1}"] = [
            max(sizes[len(sizes) * i // 10 :][: len(sizes) // 10 + 1]) for i in range(10)
        ]
    for line in lines:
        counts.update(line["counts"])
    return {
        "requests": sum(line["requests"] for line in lines),
        "wrong": sum(len(line["wrong"]) for line in lines),
        "leaked_blocks": sum(abs(line["leaked"]) for line in lines),
        "seconds": round(sum(line["seconds"] for line in lines)),
        "cpu_seconds": round(sum(line["cpu_seconds"] for line in lines)),
        "solo_runs": sum(
            max(line["solo_runs"] for line in lines if line["pid"] == pid) for pid in {line["pid"] for line in lines}
        ),
        "rounds": len(lines),
        "counts": dict(sorted(counts.items())),
        "requests_by_model": dict(_by(lines, "kind")),
        "requests_by_mode": dict(_by(lines, "mode")),
        "rss_bytes": memory,
        "commits": sorted({line["commit"] for line in lines}),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": f"{platform.processor() or platform.machine()}, one thread a process",
        "wrong_requests": [wrong for line in lines for wrong in line["wrong"]],
    }


def _by(lines: list[dict[str, Any]], name: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for line in lines:
        counts[line[name]] += line["requests"]
    return counts


if __name__ == "__main__":
    sys.exit(main())
