"""The figures of the paper's evaluation: which runs each needs, and what is read off them.

A figure's data is {"panels": [{"title", "series": [...]}], "checks": [...]}. Each check sets one of the paper's values
beside ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log
from typing import Any

from benchmarks.paper.cost import OPT_13B, cost_of
from benchmarks.paper.policies.interface import Load
from benchmarks.paper.runs import BASELINES, Outcome, Run

Outcomes = dict[Run, Outcome]
Data = dict[str, Any]
SYSTEMS = ("ours", *BASELINES)
LATENCY_FACTOR = 5.0
"""A system sustains a rate while its mean normalized latency is at most this factor above ours without load."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated: seeds, minutes of each trace, and of the rates only every so many."""

    seeds: int = 3
    minutes: float = 5.0
    every: int = 1


FULL, QUICK, TINY = Effort(), Effort(1, 3.0, 2), Effort(1, 0.2, 8)


@dataclass(frozen=True, slots=True)
class Figure:
    """runs: what must be simulated; read: the data of the figure from their outcomes."""

    name: str
    title: str
    runs: Callable[[Effort], list[Run]]
    read: Callable[[Outcomes], Data]


def check(what: str, paper: float | str, ours: float, *, unit: str = "") -> Data:
    return {"what": what, "paper": paper, "ours": round(ours, 4), "unit": unit}


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
    return [replace(run, seed=seed, minutes=effort.minutes) for seed in range(effort.seeds) for run in runs]


# -- latency over rate: figures 12, 14, 16 and 17 -------------------------------------------------------------------


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


def ratio_checks(panels: list[Data], paper: dict[tuple[str, str], float | str]) -> list[Data]:
    """A check for each system of each panel; `paper` has the values that the paper states."""
    checks = []
    for panel in panels:
        for series in panel["series"]:
            system = series["system"]
            if system != "ours":
                value = paper.get((panel["title"], system), "-")
                what = f"{panel['title']}: rate, ours / {system}{unreached(panel, system)}"
                checks.append(check(what, value, ratio(panel, system), unit="x"))
    return checks


def spread(top: float, count: int = 10, low: float = 0.1) -> list[float]:
    """Rates from `low * top` to `top`, close together where systems saturate one after the other."""
    return [round(top * (low + (1 - low) * i / (count - 1)), 3) for i in range(count)]


LOADS_12 = {
    ("OPT-13B", "sharegpt"): spread(2.4, 12),
    ("OPT-66B", "sharegpt"): spread(1.2, 12),
    ("OPT-175B", "sharegpt"): spread(3.3, 12),
    ("OPT-13B", "alpaca"): spread(40.0),
    ("OPT-66B", "alpaca"): spread(24.0),
    ("OPT-175B", "alpaca"): spread(24.0),
}


def runs_12(effort: Effort) -> list[Run]:
    runs = []
    for (setup, workload), rates in LOADS_12.items():
        for policy in (*SYSTEMS, "faster-transformer"):
            low = [rates[0] / 8, rates[0] / 3] if policy in ("faster-transformer", "orca-max") else []
            runs += [Run(setup, workload, policy, rate, 0, 0) for rate in [*low, *rates[:: effort.every]]]
    return seeded(effort, runs)


def read_12(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"{run.setup}, {run.workload}")
    for panel in panels:
        # Only where all are drawn: the baselines with less memory are measured at lower rates too.
        panel["xlabel"] = "requests/s"
    paper: dict[tuple[str, str], float | str] = {}
    for setup in ("OPT-13B", "OPT-66B", "OPT-175B"):
        paper[f"{setup}, sharegpt", "orca-oracle"] = "1.7 to 2.7"
        paper[f"{setup}, sharegpt", "orca-max"] = "2.7 to 8"
        paper[f"{setup}, sharegpt", "faster-transformer"] = "up to 22"
    return {"panels": panels, "checks": ratio_checks(panels, paper)}


WIDTHS = (2, 4, 6)
RATES_14 = {("samples", 2): 16.0, ("samples", 4): 9.0, ("samples", 6): 6.5}
RATES_14 |= {("beams", 2): 16.0, ("beams", 4): 10.0, ("beams", 6): 8.0}


def runs_14(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "alpaca", policy, rate, 0, 0, kind, width)  # type: ignore[arg-type]
        for (kind, width), top in RATES_14.items()
        for policy in SYSTEMS
        for rate in spread(top, 8)[:: effort.every]
        if not (policy == "orca-max" and width > 7)
    ]
    return seeded(replace(effort, minutes=effort.minutes / 6), runs)


def read_14(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"{run.width} {run.kind}")
    return {"panels": panels, "checks": ratio_checks(panels, {("6 beams", "orca-oracle"): 2.3})}


def runs_16(effort: Effort) -> list[Run]:
    runs = [
        Run("LLaMA-13B", "translation", policy, rate, 0, 0, prefix=prefix)
        for prefix, top in ((80, 50.0), (341, 45.0))
        for policy in ("ours", "orca-oracle")
        for rate in spread(top)[:: effort.every]
    ]
    return seeded(replace(effort, minutes=effort.minutes / 2), runs)


def read_16(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"prefix of {run.prefix} tokens")
    paper: dict[tuple[str, str], float | str] = {
        ("prefix of 80 tokens", "orca-oracle"): 1.67,
        ("prefix of 341 tokens", "orca-oracle"): 3.58,
    }
    return {"panels": panels, "checks": ratio_checks(panels, paper)}


def runs_17(effort: Effort) -> list[Run]:
    runs = [Run("OPT-13B", "chat", p, rate, 0, 0) for p in SYSTEMS for rate in spread(1.6)[:: effort.every]]
    return seeded(effort, runs)


def read_17(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: "OPT-13B, chat")
    paper: dict[tuple[str, str], float | str] = {("OPT-13B, chat", name): 2.0 for name in BASELINES}
    return {"panels": panels, "checks": ratio_checks(panels, paper)}


# -- memory and batches: figures 2, 13 and 15 -----------------------------------------------------------------------


def runs_2(effort: Effort) -> list[Run]:
    return seeded(effort, [Run("OPT-13B", "sharegpt", policy, 4.0, 0, 0) for policy in SYSTEMS])


def read_2(outcomes: Outcomes) -> Data:
    """Shares of the pool while requests wait, without what ours leaves free."""
    names = ("tokens", "reserved", "internal", "external")
    bars = {}
    for run, group in grouped(outcomes).items():
        busy = [{**o, "busy": o["busy"] or o["window"]} for o in group]
        bars[run.policy] = {n: median(busy, lambda o, n=n: o["busy"][n] / (1 - o["busy"]["free"])) for n in names}
    paper = {"ours": 96.3, "orca-oracle": 38.2, "orca-max": 20.4}
    checks = [
        check(f"{name}: K/V memory that holds tokens", value, 100 * bars[name]["tokens"]["median"], unit="%")
        for name, value in paper.items()
    ]
    return {"bars": bars, "checks": checks}


LOADS_13 = {
    ("sharegpt", 2.0): {"ours": 30.42, "orca-oracle": 13.62, "orca-pow2": 9.81, "orca-max": 7.00},
    ("alpaca", 30.0): {},
}


def runs_13(effort: Effort) -> list[Run]:
    return seeded(effort, [Run("OPT-13B", w, p, rate, 0, 0) for w, rate in LOADS_13 for p in SYSTEMS])


def read_13(outcomes: Outcomes) -> Data:
    groups: dict[str, Data] = {}
    checks = []
    for run, group in grouped(outcomes).items():
        title = f"{run.workload}, {run.rate:g} requests/s"
        value = groups.setdefault(title, {})[run.policy] = median(group, lambda outcome: outcome["batched"])
        paper = LOADS_13[run.workload, run.rate].get(run.policy, "-")
        checks.append(check(f"{title}, {run.policy}: batched requests", paper, value["median"]))
    return {"groups": groups, "ylabel": "batched requests (mean)", "checks": checks}


PAPER_15 = {("samples", 2): 6.1, ("samples", 4): 8.5, ("samples", 6): 9.8}
PAPER_15 |= {("beams", 2): 37.6, ("beams", 4): 53.1, ("beams", 6): 55.2}


def runs_15(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", workload, "ours", rate, 0, 0, kind, width)  # type: ignore[arg-type]
        for workload, rate in (("alpaca", 3.0), ("sharegpt", 0.3))
        for kind, width in PAPER_15
    ]
    return seeded(replace(effort, minutes=effort.minutes / 3), runs)


def read_15(outcomes: Outcomes) -> Data:
    groups: dict[str, Data] = {}
    checks = []
    for run, group in grouped(outcomes).items():
        value = median(group, lambda outcome: 100 * outcome["window"].get("saved", 0.0))
        groups.setdefault(run.workload, {})[f"{run.width} {run.kind}"] = value
        if run.workload == "alpaca":
            paper = PAPER_15[run.kind, run.width]
            checks.append(check(f"alpaca, {run.width} {run.kind}: blocks saved", paper, value["median"], unit="%"))
    return {"groups": groups, "ylabel": "blocks saved by sharing, %", "checks": checks}


# -- preemption: figure 19 ------------------------------------------------------------------------------------------

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOVED_TOKENS = 256


def runs_19(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "sharegpt", policy, 2.0, 0, 0, block_size=size)
        for policy in ("ours-recompute", "ours-swap")
        for size in BLOCK_SIZES[:: max(1, effort.every // 2)]
    ]
    return seeded(replace(effort, minutes=effort.minutes / 2), runs)


def read_19(outcomes: Outcomes) -> Data:
    """Left: what it costs to bring back 256 tokens; right: the latency of a load that preempts."""
    cost = cost_of(OPT_13B)
    idle = cost.seconds(Load(0, 0, 0))
    swap = [
        (cost.seconds(Load(0, 0, 0, swapped_blocks=-(-MOVED_TOKENS // size)), size) - idle) * 1000
        for size in BLOCK_SIZES
    ]
    tokens = MOVED_TOKENS
    recompute = (cost.seconds(Load(1, tokens, tokens, tokens * (tokens + 1) // 2)) - idle) * 1000
    left = [
        {"system": "swap in", "x": list(BLOCK_SIZES), "median": swap},
        {"system": "swap out and in", "x": list(BLOCK_SIZES), "median": [2 * value for value in swap]},
        {"system": "recompute", "x": list(BLOCK_SIZES), "median": [recompute] * len(BLOCK_SIZES)},
    ]
    series: dict[str, Data] = {}
    for run, group in grouped(outcomes).items():
        point = median(group, lambda outcome: outcome["latency"])
        one = series.setdefault(run.policy, {"system": run.policy, "x": [], "median": [], "low": [], "high": []})
        one["x"].append(run.block_size)
        for key in ("median", "low", "high"):
            one[key].append(point[key])
    by_size = {name: dict(zip(one["x"], one["median"])) for name, one in series.items()}
    checks = [
        check(f"block size {size}: latency, swap / recompute", "above 1" if size < 8 else "near 1", value, unit="x")
        for size in by_size["ours-swap"]
        if size in (1, 16, 32, 64) and (value := by_size["ours-swap"][size] / by_size["ours-recompute"][size])
    ]
    panels = [
        {"title": f"moving {MOVED_TOKENS} tokens of OPT-13B", "xlabel": "block size", "ylabel": "ms", "series": left},
        {"title": "ShareGPT at 2 requests/s", "xlabel": "block size", "series": list(series.values())},
    ]
    return {"panels": panels, "log_x": True, "checks": checks}


FIGURES = (
    Figure("2", "K/V memory by use", runs_2, read_2),
    Figure("12", "Normalized latency over request rate", runs_12, read_12),
    Figure("13", "Batched requests", runs_13, read_13),
    Figure("14", "Parallel sampling and beam search, OPT-13B on Alpaca", runs_14, read_14),
    Figure("15", "Memory saved by sharing", runs_15, read_15),
    Figure("16", "Shared prefix, LLaMA-13B", runs_16, read_16),
    Figure("17", "Chatbot", runs_17, read_17),
    Figure("19", "Recomputation and swapping over block sizes", runs_19, read_19),
)
