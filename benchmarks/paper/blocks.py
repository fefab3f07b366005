"""Figures 18b and 19: what the size of a block changes."""

from __future__ import annotations

import statistics

from benchmarks.paper import published
from benchmarks.paper.cost import OPT_13B, cost_of
from benchmarks.paper.policies.interface import Load
from benchmarks.paper.reading import (
    READ,
    Data,
    Effort,
    Figure,
    Outcomes,
    add_point,
    check,
    grouped,
    median,
    one_seed,
    seeded,
    shape,
)
from benchmarks.paper.runs import Run

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COMPARED = SIZES[::2]
GOOD = 2.0
"""A block size is good if its latency is at most so many times the lowest."""
LOADS_18B = {"sharegpt": (1.85, 60.0), "alpaca": (51.0, 5.0)}
"""Rate, at which blocks of 16 have about the latency of the paper's figure, which names none; minutes."""


def runs_18b(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", workload, "ours", rate, 0, minutes, block_size=size)
        for workload, (rate, minutes) in LOADS_18B.items()
        for size in SIZES
    ]
    return seeded(one_seed(effort), runs)


def read_18b(outcomes: Outcomes) -> Data:
    series = _over_sizes(outcomes, lambda run: run.workload)
    panels, checks = [], []
    for workload, one in series.items():
        one["paper"] = published.FIGURES["18b"][workload]
        rate = LOADS_18B[workload][0]
        panels.append({"title": f"{workload} at {rate:g} requests/s", "series": [one], "log_y": True})
        sets = (good(one["paper"]["x"], one["paper"]["y"]), good(one["x"], one["median"]))
        checks.append(shape(f"{workload}: good block sizes", *sets, source=READ))
    return {"panels": [_sized(panel) for panel in panels], "checks": checks, "facts": {"good": f"{GOOD:g}"}}


def good(sizes: list[float], latencies: list[float]) -> str:
    return ", ".join(f"{size:g}" for size, value in zip(sizes, latencies) if value <= GOOD * min(latencies))


MOVED_TOKENS = 256
RATE_19, MINUTES_19 = 1.8, 60.0
WHOLE = ("ours-recompute", "ours-swap")


def runs_19(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "sharegpt", policy, RATE_19, 0, MINUTES_19, block_size=size)
        for policy in WHOLE
        for size in SIZES[:: max(1, effort.every // 2)]
    ]
    return seeded(one_seed(effort), runs)


def read_19(outcomes: Outcomes) -> Data:
    """Left: what it costs to bring back 256 tokens; right: the latency of a load that preempts."""
    moved = moving(MOVED_TOKENS)
    paper = published.FIGURES["19"]
    left = [{"system": n, "x": list(SIZES), "median": y, "paper": paper["moved"][n]} for n, y in moved.items()]
    series = _over_sizes(outcomes, lambda run: run.policy)
    for policy, one in series.items():
        one["paper"] = paper["whole"][policy]
    recompute, both = moved["recompute"][0], dict(zip(SIZES, moved["swap out and in"]))
    published_both = dict(zip(paper["moved"]["swap out and in"]["x"], paper["moved"]["swap out and in"]["y"]))
    mean = round(statistics.fmean(paper["moved"]["recompute"]["y"]), 1)
    checks = [check(f"recompute {MOVED_TOKENS} tokens", mean, recompute, unit="ms", source=READ)]
    checks += [
        check(f"swap them out and in, block size {size}", published_both[size], both[size], unit="ms", source=READ)
        for size in COMPARED
    ]
    largest = recompute / min(both.values())
    checks.append(
        check("recompute / swap, at most", "up to 1.2", largest, unit="x", source="section 7.3", within=(0.0, 1.2))
    )
    ratios, theirs = (
        {size: b / a for size, a, b in zip(*(sides[0][0], sides[0][1], sides[1][1]))}
        for sides in (
            [(series[policy]["x"], series[policy]["median"]) for policy in WHOLE],
            [(paper["whole"][policy]["x"], paper["whole"][policy]["y"]) for policy in WHOLE],
        )
    )
    checks += [
        check(
            f"block size {size}: latency, swap / recompute", round(theirs[size], 3), ratios[size], unit="x", source=READ
        )
        for size in COMPARED
        if size in ratios
    ]
    panels = [
        {"title": f"moving {MOVED_TOKENS} tokens of OPT-13B", "ylabel": "ms", "series": left},
        {"title": f"ShareGPT at {RATE_19:g} requests/s", "series": list(series.values()), "log_y": True},
    ]
    preempted = _over_sizes(outcomes, lambda run: run.policy, "preemptions")
    never = sorted({size for one in preempted.values() for size, n in zip(one["x"], one["median"]) if not n})
    least = min(min(one["median"]) for one in preempted.values())
    facts = {
        "ratio": f"{largest:.2f}",
        "implied": f"{MOVED_TOKENS * OPT_13B.kv_bytes / published_both[256] * 2 / 1e6:.1f}",
        "preemptions": (
            f"Nothing was preempted with block sizes {', '.join(map(str, never))}: these say nothing."
            if never
            else f"Every run preempted, at least {least:.0f} times."
        ),
    }
    return {"panels": [_sized(panel) for panel in panels], "checks": checks, "facts": facts}


def moving(tokens: int) -> dict[str, list[float]]:
    """Milliseconds to recompute `tokens` of one sequence, and to swap them, for each of SIZES."""
    cost = cost_of(OPT_13B)
    idle = cost.seconds(Load(0, 0, 0))
    swap = [(cost.seconds(Load(0, 0, 0, swapped_blocks=-(-tokens // size)), size) - idle) * 1000 for size in SIZES]
    recompute = (cost.seconds(Load(1, tokens, tokens, tokens * (tokens + 1) // 2)) - idle) * 1000
    both = [2 * value for value in swap]
    return {"recompute": [recompute] * len(SIZES), "swap in": swap, "swap out": swap, "swap out and in": both}


def _over_sizes(outcomes: Outcomes, system_of, name: str = "latency") -> dict[str, Data]:  # type: ignore[no-untyped-def]
    series: dict[str, Data] = {}
    for run, group in grouped(outcomes).items():
        add_point(series, system_of(run), run.block_size, median(group, lambda outcome: outcome[name]))
    return series


def _sized(panel: Data) -> Data:
    return {**panel, "xlabel": "block size", "ticks": list(SIZES)}


FIGURES = (
    Figure("18b", "Latency over block sizes, the whole system", runs_18b, read_18b),
    Figure("19", "Recomputation and swapping over block sizes", runs_19, read_19),
)
