"""`hf-paged bench`: load on a server, and the benchmarks of a checkout.

The wheel has no benchmarks of the paper, so they are imported from the source tree.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import hf_paged
from hf_paged.cli import bench_serve
from hf_paged.cli.common import Job, UsageError, show

bench = typer.Typer(help="Benchmarks.", rich_markup_mode=None)
bench.command("serve")(bench_serve.serve)


@bench.callback()
def _bench() -> None:
    """Benchmarks: of a server, of the paper."""


@bench.command("paper")
def paper(
    figures: Annotated[
        str,
        typer.Option(
            help="comma-separated: 1, 2, 11 to 17, 18a, 18b, 19, kinds, azure, chunks, turns, priorities, tiles, "
            "adapters, assumptions, speed, fit (cost model against the engine), real (runs of the engine)"
        ),
    ] = "all",
    quick: Annotated[
        bool, typer.Option("--quick", help="fewer rates, seeds and minutes; its own output folder")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="folder for JSON, PNG and SVG")] = None,
    page: Annotated[Path | None, typer.Option(help="Markdown page with all figures")] = None,
    plots: Annotated[bool, typer.Option(help="draw the figures; needs the extra 'paper'")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="repeat the runs that an earlier call has done")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes that simulate (default: one for a core)")
    ] = None,
) -> Job:
    """Reproduce the evaluation of the PagedAttention paper: the baselines and ours on a simulated clock.

    Needs a clone of the repository: a wheel has no benchmarks. A call that was interrupted continues where
    it was.
    """
    return lambda: _paper(figures, quick, out, page, plots=plots, fresh=fresh, workers=workers)


def _paper(
    figures: str, quick: bool, out: Path | None, page: Path | None, *, plots: bool, fresh: bool, workers: int | None
) -> int:
    module = _from_checkout("benchmarks.paper.bench")
    efforts = _from_checkout("benchmarks.paper.reading")
    root = _root()
    folder = out or root / "benchmarks" / "results" / ("paper-quick" if quick else "paper")
    # Finished runs are not repeated, so that an interrupted benchmark resumes.
    if fresh:
        (folder / "runs.jsonl").unlink(missing_ok=True)
    job = module.Job(
        names=module.NAMES if figures == "all" else tuple(name.strip() for name in figures.split(",")),
        effort=efforts.QUICK if quick else efforts.FULL,
        out=folder,
        page=page or (folder / "paper.md" if quick or out else root / "docs" / "paper.md"),
        plots=plots,
        requests=module.ENGINE_REQUESTS // 4 if quick else module.ENGINE_REQUESTS,
        repeats=1 if quick else 3,
        workers=workers or len(os.sched_getaffinity(0)),
    )
    data = module.run(job, module.say_on())
    show("")
    print(module.summary(data))
    print(f"{job.page}; data and plots in {job.out}")
    return 0


def _root() -> Path:
    """The checkout that this package was imported from."""
    root = Path(hf_paged.__file__).parent.parent
    if not (root / "benchmarks" / "paper").is_dir():
        raise UsageError(
            f"{root} has no benchmarks/paper: the wheel leaves it out; clone the repository and "
            "`pip install -e '.[paper]'` there"
        )
    return root


def _from_checkout(name: str) -> Any:
    root = str(_root())
    # Put first, so that another installed package of this name is not taken.
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module(name)
