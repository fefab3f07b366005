"""Makes the figures, the page and the checks of `hf-paged bench paper`; a run that was stopped continues."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.paper import page, plots
from benchmarks.paper.beyond import ASSUMPTIONS, BEYOND
from benchmarks.paper.cost import CostModel
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.reading import Effort, grouped
from benchmarks.paper.runs import Run
from benchmarks.paper.store import Store

Data = dict[str, Any]
Say = Callable[[str], None]
SIMULATED = {figure.name: figure for figure in (*FIGURES, *BEYOND, ASSUMPTIONS)}
REAL = ("fit", "real")
MEASURED = {
    "18a": "Latency of the attention kernel (measured)",
    "adapters": "Adapters (measured)",
    "speed": "Speed of the simulator",
}
NAMES = (*SIMULATED, *MEASURED, *REAL)
ENGINE_REQUESTS = 24
MANY = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """names: of NAMES; out: folder for JSON, PNG and SVG; page: Markdown file; plots: its folder of PNGs is `page`
    without the suffix. requests: of each load of the engine; repeats: runs of each; workers: processes that simulate.
    """

    names: tuple[str, ...]
    effort: Effort
    out: Path
    page: Path
    plots: bool = True
    requests: int = ENGINE_REQUESTS
    repeats: int = 3
    workers: int = 1


def run(job: Job, say: Say) -> dict[str, Data]:
    """Make what `job` names; figures of earlier calls stay on the page. Raises ValueError for an unknown name."""
    unknown = [name for name in job.names if name not in NAMES]
    if unknown:
        raise ValueError(f"figure {unknown[0]!r} is unknown; there are {', '.join(NAMES)}")
    if job.plots:
        plots.pyplot()  # before the work, not after it
    store = Store(job.out / "runs.jsonl")
    data = {name: json.loads(path.read_text()) for name in NAMES if (path := _path(job, name)).exists()}
    for name in NAMES:
        if name not in job.names:
            continue
        data[name] = _made(name, job, store, say, data)
        _path(job, name).parent.mkdir(parents=True, exist_ok=True)
        _path(job, name).write_text(json.dumps(data[name], indent=1) + "\n")
        _draw(name, data[name], job)
    job.page.parent.mkdir(parents=True, exist_ok=True)
    job.page.write_text(page.render(data, job.page.stem))
    return data


def _path(job: Job, name: str) -> Path:
    return job.out / (f"{name}.json" if name in REAL else f"figure-{name}.json")


def _made(name: str, job: Job, store: Store, say: Say, data: dict[str, Data]) -> Data:
    if name in MEASURED or name in REAL:
        return _measured(name, job, store, say, data)
    figure = SIMULATED[name]
    runs = figure.runs(job.effort)
    position = {run: index for index, run in enumerate(runs)}

    def progress(run: Run) -> None:
        what = f"{run.setup}, {run.workload}, {run.policy}, {run.rate:g}/s, seed {run.seed}"
        say(f"figure {name}: {position[run] + 1} of {len(runs)}: {what}")

    outcomes = store.all(runs, progress, job.workers)
    made = figure.read(outcomes)
    if outcomes:
        made |= {"seeds": max(map(len, grouped(outcomes).values())), "share": job.effort.share}
    return made


def _measured(name: str, job: Job, store: Store, say: Say, data: dict[str, Data]) -> Data:
    """Runs of the engine and of its kernels on one thread."""
    import torch

    from benchmarks.paper import adapters, beside, fit, kernels, real, speed

    say(f"measured on one thread of this CPU: {name}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    begin = (os.getloadavg()[0], time.process_time(), time.perf_counter())
    try:
        if name == "18a":
            made = kernels.measure(calls=max(3, round(job.effort.share * kernels.CALLS)))
        elif name == "speed":
            made = speed.measure(round(job.effort.share * MANY))
        elif name == "adapters":
            made = adapters.measure(job.repeats)
        elif name == "fit":
            made = fit.fit_and_check(real.model(), 2 * job.requests, job.repeats)
        elif "fit" in data:
            cost = CostModel(**data["fit"]["coefficients"])
            made = beside.compare_all(cache(real.model), cost, job.requests, job.repeats, store, say)
        else:
            raise ValueError("'real' needs the coefficients that 'fit' measures; give --figures fit,real")
    finally:
        torch.set_num_threads(threads)
    return made | {"machine": _machine(*begin)}


def _machine(load: float, cpu: float, wall: float) -> Data:
    """What else may have slowed a measurement down: the load average before and after, CPU seconds and seconds."""
    names = {line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "seconds": round(time.perf_counter() - wall, 1),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _draw(name: str, data: Data, job: Job) -> None:
    if not job.plots or "panels" not in data:
        return
    title = MEASURED[name] if name in MEASURED else f"{SIMULATED[name].title} (simulated)"
    paths = [job.out / f"figure-{name}.png", job.out / f"figure-{name}.svg"]
    plots.draw(name, title, data, [*paths, job.page.with_suffix("") / f"figure-{name}.png"])


def summary(data: dict[str, Data]) -> str:
    """The checks as lines: what, the paper's value, ours."""
    lines = []
    for name, figure in data.items():
        for row in figure.get("checks", ()):
            lines.append(
                f"figure {name:3} {row['what']}: paper {row['paper']}, here {_number(row['ours'])} {row['unit']}"
            )
        if "sentence" in figure:
            lines.append(f"{name}: {figure['sentence']}")
    return "\n".join(lines)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def say_on(stream: Any = None) -> Say:
    """Progress as lines; on a terminal each overwrites the last."""
    target = sys.stderr if stream is None else stream

    def say(message: str) -> None:
        if target.isatty():
            print(f"\r\x1b[K{message}", end="", file=target, flush=True)
        else:
            print(message, file=target, flush=True)

    return say
