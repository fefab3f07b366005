"""What all figures have in common: their runs as data, medians over seeds, latency over rate, the paper's values."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Any

from benchmarks.paper.published import FIGURES
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


RATIO, POINTS = 0.2, 3.0
"""A number agrees within this share of the paper's; a share in % within so many percentage points."""
READ = "read off"
"""Source of a value: the points of the paper's figure. Other sources: "printed" in it, or a section."""


def check(
    what: str,
    paper: float | str,
    ours: float,
    *,
    source: str,
    unit: str = "",
    within: tuple[float, float] | None = None,
) -> Data:
    """One of the paper's values beside ours. within: the values that agree; RATIO or POINTS around a number if nothing
    else is said."""
    if within is None:
        assert not isinstance(paper, str), "a bound says what agrees"
        within = (paper - POINTS, paper + POINTS) if unit == "%" else ((1 - RATIO) * paper, (1 + RATIO) * paper)
    return {
        "what": what,
        "paper": paper,
        "source": source,
        "ours": round(ours, 4),
        "unit": unit,
        "within": [round(bound, 4) for bound in within],
        "agrees": within[0] <= ours <= within[1],
    }


def shape(what: str, paper: str, ours: str, *, source: str) -> Data:
    """What a curve looks like, in words: agrees if the words are equal."""
    return {"what": what, "paper": paper, "source": source, "ours": ours, "unit": "", "agrees": paper == ours}


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


def one_seed(effort: Effort) -> Effort:
    """For traces so long that seeds change little."""
    return replace(effort, seeds=1)


def curves(outcomes: Outcomes, panel_of: Callable[[Run], str], figure: str = "") -> list[Data]:
    """One panel for each value of `panel_of`, with one curve for each system; with the paper's curves of `figure`."""
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
        limit = limit_of([s["median"] for s in series if s["system"].startswith("ours")])
        paper = FIGURES[figure][title] if figure else {}
        for s in series:
            s["sustained"] = sustained(s["x"], s["median"], limit)
            if s["system"] in paper:
                s["paper"] = paper[s["system"]]
        result.append({"title": title, "limit": limit, "series": series})
    return result


def limit_of(latencies: list[list[float]]) -> float:
    """The latency up to which a rate is sustained, from the latencies of ours over rates."""
    return LATENCY_FACTOR * min(map(min, latencies))


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
    rates = rates_of(panel)
    return rates["ours"] / rates[system] if rates.get(system) else 0.0


def unreached(panel: Data, system: str) -> str:
    """A remark if one of the two still sustains the highest rate that was simulated."""
    names = {s["system"] for s in panel["series"] if s["sustained"] == s["x"][-1]}
    if system in names:
        return " (neither at its limit)" if "ours" in names else " (at most)"
    return " (at least)" if "ours" in names else ""


def rate_checks(panels: list[Data]) -> list[Data]:
    """The rate of ours, and what it is of each other system's: beside the paper's curves, read in the same way."""
    checks = []
    for panel in panels:
        paper = paper_rates(panel)
        for system, rate in sorted(paper.items(), key=lambda item: item[0] != "ours"):
            if system == "ours":
                what, mine, theirs, unit = "ours, requests/s sustained", rates_of(panel)["ours"], rate, ""
            else:
                what, unit = f"rate, ours / {system}{unreached(panel, system)}", "x"
                mine, theirs = ratio(panel, system), paper["ours"] / rate
            checks.append(check(f"{panel['title']}: {what}", round(theirs, 3), mine, source=READ, unit=unit))
    return checks


def rates_of(panel: Data) -> dict[str, float]:
    return {series["system"]: series["sustained"] for series in panel["series"]}


def paper_rates(panel: Data, limit: float | None = None) -> dict[str, float]:
    """The rates that the paper's systems sustain: up to `limit` seconds for a token, LATENCY_FACTOR times the paper's
    ours at the lowest rate if nothing is said."""
    paper = {series["system"]: series["paper"] for series in panel["series"] if "paper" in series}
    limit = limit or limit_of([paper["ours"]["y"]])
    return {system: sustained(curve["x"], curve["y"], limit) for system, curve in paper.items()}


def spread(top: float, count: int = 10, low: float = 0.1) -> list[float]:
    """Rates from `low * top` to `top`, close together where systems saturate one after the other."""
    return [round(top * (low + (1 - low) * i / (count - 1)), 3) for i in range(count)]


def add_point(series: dict[str, Data], system: str, x: float, point: Data) -> None:
    one = series.setdefault(system, {"system": system, "x": [], "median": [], "low": [], "high": []})
    one["x"].append(x)
    for key in ("median", "low", "high"):
        one[key].append(point[key])
