"""Executes runs, in several processes if wanted, and keeps their outcomes in a file that a later call continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from threading import Lock

from benchmarks.paper import runs
from benchmarks.paper.runs import Outcome, Run

FAR = 15.0
"""Higher rates are not simulated after one whose latency is this many times that of the lowest: far above the plots."""


def series_of(wanted: Iterable[Run]) -> list[list[Run]]:
    """The runs that differ only in their rate together, lowest rate first. Series with the most requests come first, so
    that processes end at about the same time."""
    series: dict[Run, list[Run]] = {}
    for run in wanted:
        series.setdefault(replace(run, rate=0.0), []).append(run)
    in_order = [sorted(each, key=lambda run: run.rate) for each in series.values()]
    return sorted(in_order, key=lambda each: -sum(run.rate * run.minutes for run in each))


@contextmanager
def executor(workers: int) -> Iterator[Callable[[Run], Outcome]]:
    """`runs.execute` in one of `workers` processes; in this one if there is only one."""
    if workers == 1:
        yield runs.execute
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        yield lambda run: pool.submit(runs.execute, run).result()


class Store:
    """Outcomes by run, one JSON line each, appended as they are made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._known: dict[str, Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    key, outcome = json.loads(line)
                except ValueError:
                    continue  # the line that an interrupted call left
                self._known[key] = outcome

    def get(self, key: str) -> Outcome | None:
        return self._known.get(key)

    def put(self, key: str, outcome: Outcome) -> None:
        with self._lock:
            self._known[key] = outcome
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps([key, outcome]) + "\n")

    def all(self, wanted: Iterable[Run], progress: Callable[[Run], None], workers: int = 1) -> dict[Run, Outcome]:
        """The outcome of each run, from the file or simulated now; without those beyond FAR."""
        wanted = list(wanted)
        outcomes: dict[Run, Outcome] = {}
        with executor(workers) as simulate, ThreadPoolExecutor(workers) as threads:

            def follow(series: list[Run]) -> None:
                for run in series:
                    outcome = self.get(run.key)
                    if outcome is None:
                        progress(run)
                        outcome = simulate(run)
                        self.put(run.key, outcome)
                    outcomes[run] = outcome
                    if outcome["latency"] > FAR * outcomes[series[0]]["latency"]:
                        return

            list(threads.map(follow, series_of(wanted)))
        return {run: outcomes[run] for run in wanted if run in outcomes}
