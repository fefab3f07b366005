"""What all figures have in common: their runs as data, medians over seeds, latency over rate, the paper's values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Any

from benchmarks.paper.runs import Outcome, Run

Outcomes = dict[Run, Outcome]
Data = dict[str, Any]
LATENCY_FACTOR = 5.0
"""A system sustains a rate while its mean normalized latency is at most this factor above ours without load."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated: seeds, the share of each trace, and of the rates only every so many."""

    seeds: int = 3
    share: float = 1.0
    every: int = 1


FULL, QUICK, TINY = Effort(), Effort(1, 0.1, 2), Effort(1, 0.003, 8)


@dataclass(frozen=True, slots=True)
class Figure:
    """runs: what must be simulated; read: the data of the figure from their outcomes."""

    name: str
    title: str
    runs: Callable[[Effort], list[Run]]
    read: Callable[[Outcomes], Data]


def check(
    what: str, paper: float | str, ours: float, *, unit: str = "", within: tuple[float, float] | None = None
) -> Data:
    """One of the paper's values beside ours. within: the values that count as equal in shape; for a number, 20 % around
    it if nothing else is said."""
    if within is None and isinstance(paper, (int, float)):
        within = (0.8 * paper, 1.2 * paper)
    return {
        "what": what,
        "paper": paper,
        "ours": round(ours, 4),
        "unit": unit,
        "within": within and [round(bound, 4) for bound in within],
        "agrees": within is None or within[0] <= ours <= within[1],
    }


def median(outcomes: list[Outcome], read: Callable[[Outcome], float]) -> Data:
    """The median of several seeds, and their range."""
    values = sorted(read(outcome) for outcome in outcomes)
    return {"median": statistics.median(values), "low": values[0], "high": values[-1]}


def grouped(outcomes: Outcomes) -> dict[Run, list[Outcome]]:
    """By everything but the seed."""
    groups: dict[Run, list[Outcome]] = {}
    for run, outcome in outcomes.items():
        groups.setdefault(replace(run, seed=0), []).append(outcome)
    return groups


def seeded(effort: Effort, runs: list[Run]) -> list[Run]:
    """Each run with every seed, for its share of its minutes."""
    return [replace(run, seed=seed, minutes=run.minutes * effort.share) for seed in range(effort.seeds) for run in runs]


def curves(outcomes: Outcomes, panel_of: Callable[[Run], str]) -> list[Data]:
    """One panel for each value of `panel_of`, with one curve for each system."""
    panels: dict[str, dict[str, list[tuple[float, Data]]]] = {}
    for run, group in grouped(outcomes).items():
        point = median(group, lambda outcome: outcome["latency"])
        panels.setdefault(panel_of(run), {}).setdefault(run.policy, []).append((run.rate, point))
    result = []
    for title, systems in panels.items():
        series = [
            {"system": name, "x": [x for x, _ in sorted(points, key=lambda p: p[0])]}
            | {
                key: [point[key] for _, point in sorted(points, key=lambda p: p[0])]
                for key in ("median", "low", "high")
            }
            for name, points in systems.items()
        ]
        limit = LATENCY_FACTOR * min(min(s["median"]) for s in series if s["system"].startswith("ours"))
        for s in series:
            s["sustained"] = sustained(s["x"], s["median"], limit)
        result.append({"title": title, "limit": limit, "series": series})
    return result


def sustained(rates: list[float], latencies: list[float], limit: float) -> float:
    """The rate at which the latency crosses `limit`, between two rates by the logarithm of the latency. 0 if all are
    above, the last rate if none is."""
    if latencies[0] > limit:
        return 0.0
    for i in range(1, len(rates)):
        if latencies[i] > limit:
            share = log(limit / latencies[i - 1]) / log(latencies[i] / latencies[i - 1])
            return rates[i - 1] + share * (rates[i] - rates[i - 1])
    return rates[-1]


def ratio(panel: Data, system: str) -> float:
    """The rate that ours sustains, divided by that of `system`; 0 if that is unknown."""
    rates = {s["system"]: s["sustained"] for s in panel["series"]}
    return rates["ours"] / rates[system] if rates.get(system) else 0.0


def unreached(panel: Data, system: str) -> str:
    """A remark if one of the two still sustains the highest rate that was simulated."""
    names = {s["system"] for s in panel["series"] if s["sustained"] == s["x"][-1]}
    if system in names:
        return " (neither at its limit)" if "ours" in names else " (at most)"
    return " (at least)" if "ours" in names else ""


RANGES = {"1.7 to 2.7": (1.7, 2.7), "2.7 to 8": (2.7, 8.0), "up to 22": (1.0, 22.0)}


def ratio_checks(panels: list[Data], paper: dict[tuple[str, str], float | str]) -> list[Data]:
    """A check for each value that `paper` states, by panel and system: a number, or one of RANGES."""
    checks = []
    for panel in panels:
        for series in panel["series"]:
            system = series["system"]
            value = paper.get((panel["title"], system))
            if value is not None:
                what = f"{panel['title']}: rate, ours / {system}{unreached(panel, system)}"
                within = RANGES[value] if isinstance(value, str) else None
                checks.append(check(what, value, ratio(panel, system), unit="x", within=within))
    return checks


def spread(top: float, count: int = 10, low: float = 0.1) -> list[float]:
    """Rates from `low * top` to `top`, close together where systems saturate one after the other."""
    return [round(top * (low + (1 - low) * i / (count - 1)), 3) for i in range(count)]


def add_point(series: dict[str, Data], system: str, x: float, point: Data) -> None:
    one = series.setdefault(system, {"system": system, "x": [], "median": [], "low": [], "high": []})
    one["x"].append(x)
    for key in ("median", "low", "high"):
        one[key].append(point[key])
