"""Makes the figures, the page and the checks of `hf-paged bench paper`; a run that was stopped continues."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.paper import page, plots
from benchmarks.paper.cost import CostModel
from benchmarks.paper.figures import FIGURES, Effort, grouped
from benchmarks.paper.runs import Run, Store

Data = dict[str, Any]
Say = Callable[[str], None]
REAL = ("fit", "real")
NAMES = (*(figure.name for figure in FIGURES), "18", *REAL)
ENGINE_REQUESTS = 24


@dataclass(frozen=True, slots=True)
class Job:
    """names: of NAMES; out: folder for JSON, PNG and SVG; page: Markdown file; plots: its folder of PNGs is `page`
    without the suffix. requests: of each load of the engine."""

    names: tuple[str, ...]
    effort: Effort
    out: Path
    page: Path
    plots: bool = True
    requests: int = ENGINE_REQUESTS


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
    job.page.write_text(page.render(data, job.effort, job.page.stem))
    return data


def _path(job: Job, name: str) -> Path:
    return job.out / (f"{name}.json" if name in REAL else f"figure-{name}.json")


def _made(name: str, job: Job, store: Store, say: Say, data: dict[str, Data]) -> Data:
    if name == "18":
        say("figure 18: kernels on this CPU")
        from benchmarks.paper.kernels import measure

        return measure()
    if name in REAL:
        return _measured(name, job, store, say, data)
    figure = next(figure for figure in FIGURES if figure.name == name)
    runs = figure.runs(job.effort)
    position = {run: index for index, run in enumerate(runs)}

    def progress(run: Run) -> None:
        what = f"{run.setup}, {run.workload}, {run.policy}, {run.rate:g}/s, seed {run.seed}"
        say(f"figure {name}: {position[run] + 1} of {len(runs)}: {what}")

    outcomes = store.all(runs, progress)
    return figure.read(outcomes) | {"seeds": min(map(len, grouped(outcomes).values()))}


def _measured(name: str, job: Job, store: Store, say: Say, data: dict[str, Data]) -> Data:
    """Runs of the engine on one thread."""
    import torch

    from benchmarks.paper.beside import compare_all
    from benchmarks.paper.fit import fit_and_check
    from benchmarks.paper.real import model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if name == "fit":
            say("coefficients from runs of the engine")
            return fit_and_check(model(), job.requests)
        if "fit" not in data:
            raise ValueError("'real' needs the coefficients that 'fit' measures; give --figures fit,real")
        return compare_all(cache(model), CostModel(**data["fit"]["coefficients"]), job.requests, store, say)
    finally:
        torch.set_num_threads(threads)


def _draw(name: str, data: Data, job: Job) -> None:
    if not job.plots or name in REAL:
        return
    title = next((figure.title for figure in FIGURES if figure.name == name), "kernel latency over block sizes")
    paths = [job.out / f"figure-{name}.png", job.out / f"figure-{name}.svg"]
    plots.draw(name, title, data, [*paths, job.page.with_suffix("") / f"figure-{name}.png"])


def summary(data: dict[str, Data]) -> str:
    """The checks as lines: what, the paper's value, ours."""
    lines = []
    for name, figure in data.items():
        for row in figure.get("checks", ()):
            lines.append(f"figure {name:3} {row['what']}: paper {row['paper']}, here {row['ours']:.4g} {row['unit']}")
    return "\n".join(lines)


def say_on(stream: Any = None) -> Say:
    """Progress as lines; on a terminal each overwrites the last."""
    target = sys.stderr if stream is None else stream

    def say(message: str) -> None:
        if target.isatty():
            print(f"\r\x1b[K{message}", end="", file=target, flush=True)
        else:
            print(message, file=target, flush=True)

    return say
