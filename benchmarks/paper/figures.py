"""The figures of the paper's evaluation: which runs each needs, and what is read off them.

A figure's data is {"panels": [{"title", "series": [...]}], "checks": [...]}. Each check sets one of the paper's values
beside ours.
"""

from __future__ import annotations

from benchmarks.paper.cost import OPT_13B, cost_of
from benchmarks.paper.policies.interface import Load
from benchmarks.paper.reading import (
    Data,
    Effort,
    Figure,
    Outcomes,
    add_point,
    check,
    curves,
    grouped,
    median,
    ratio_checks,
    seeded,
    spread,
)
from benchmarks.paper.runs import BASELINES, Run

SYSTEMS = ("ours", *BASELINES)


# -- latency over rate: figures 12, 14, 16 and 17 -------------------------------------------------------------------


LOADS_12 = {
    ("OPT-13B", "sharegpt"): (60.0, spread(2.4, 22)),
    ("OPT-66B", "sharegpt"): (60.0, spread(1.5, 16)),
    ("OPT-175B", "sharegpt"): (15.0, spread(4.0, 16)),
    ("OPT-13B", "alpaca"): (5.0, spread(60.0, 13)),
    ("OPT-66B", "alpaca"): (5.0, spread(45.0, 13)),
    ("OPT-175B", "alpaca"): (5.0, spread(45.0, 13)),
}
"""Minutes, as in the paper but for Alpaca (an hour there), and rates."""


def runs_12(effort: Effort) -> list[Run]:
    runs = []
    for (setup, workload), (minutes, rates) in LOADS_12.items():
        for policy in (*SYSTEMS, "faster-transformer"):
            low = [rates[0] / 8, rates[0] / 3] if policy in ("faster-transformer", "orca-max") else []
            runs += [Run(setup, workload, policy, rate, 0, minutes) for rate in [*low, *rates[:: effort.every]]]
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
    paper["OPT-13B, alpaca", "orca-oracle"] = 1.3
    return {"panels": panels, "checks": ratio_checks(panels, paper)}


RATES_14 = {("samples", 2): 30.0, ("samples", 4): 16.0, ("samples", 6): 11.0}
RATES_14 |= {("beams", 2): 30.0, ("beams", 4): 17.0, ("beams", 6): 12.0}


def runs_14(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "alpaca", policy, rate, 0, 2, kind, width)  # type: ignore[arg-type]
        for (kind, width), top in RATES_14.items()
        for policy in SYSTEMS
        for rate in [*([top / 40, top / 20] if policy == "orca-max" else []), *spread(top, 8)[:: effort.every]]
    ]
    return seeded(effort, runs)


def read_14(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"{run.width} {run.kind}")
    return {"panels": panels, "checks": ratio_checks(panels, {("6 beams", "orca-oracle"): 2.3})}


def runs_16(effort: Effort) -> list[Run]:
    runs = [
        Run("LLaMA-13B", "translation", policy, rate, 0, 3, prefix=prefix)
        for prefix, top in ((80, 65.0), (341, 42.0))
        for policy in ("ours", "orca-oracle")
        for rate in spread(top, 16)[:: effort.every]
    ]
    return seeded(effort, runs)


def read_16(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"prefix of {run.prefix} tokens")
    paper: dict[tuple[str, str], float | str] = {
        ("prefix of 80 tokens", "orca-oracle"): 1.67,
        ("prefix of 341 tokens", "orca-oracle"): 3.58,
    }
    return {"panels": panels, "checks": ratio_checks(panels, paper)}


def runs_17(effort: Effort) -> list[Run]:
    runs = [Run("OPT-13B", "chat", p, rate, 0, 60) for p in SYSTEMS for rate in spread(1.2, 16)[:: effort.every]]
    return seeded(effort, runs)


def read_17(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: "OPT-13B, chat")
    paper: dict[tuple[str, str], float | str] = {("OPT-13B, chat", name): 2.0 for name in BASELINES}
    return {"panels": panels, "checks": ratio_checks(panels, paper)}


# -- memory and batches: figures 2, 13 and 15 -----------------------------------------------------------------------


POINTS = 3.0


def runs_2(effort: Effort) -> list[Run]:
    return seeded(effort, [Run("OPT-13B", "sharegpt", policy, 4.0, 0, 10, measure_every=1) for policy in SYSTEMS])


def read_2(outcomes: Outcomes) -> Data:
    """Shares of the pool while requests wait, without what ours leaves free."""
    names = ("tokens", "reserved", "internal", "external")
    bars = {}
    for run, group in grouped(outcomes).items():
        busy = [{**o, "busy": o["busy"] or o["window"]} for o in group]
        bars[run.policy] = {n: median(busy, lambda o, n=n: o["busy"][n] / (1 - o["busy"]["free"])) for n in names}
    paper = {"ours": 96.3, "orca-oracle": 38.2, "orca-pow2": 26.8, "orca-max": 20.4}
    checks = [
        check(
            f"{name}: K/V memory that holds tokens",
            value,
            100 * bars[name]["tokens"]["median"],
            unit="%",
            within=(value - POINTS, value + POINTS),
        )
        for name, value in paper.items()
    ]
    return {"bars": bars, "checks": checks}


LOADS_13 = {
    ("sharegpt", 2.0): {"ours": 30.42, "orca-oracle": 13.62, "orca-pow2": 9.81, "orca-max": 7.00},
    ("alpaca", 30.0): {"ours": 132.44, "orca-oracle": 72.75, "orca-pow2": 43.24, "orca-max": 7.00},
}


def runs_13(effort: Effort) -> list[Run]:
    runs = [Run("OPT-13B", w, p, rate, 0, 10, measure_every=1) for w, rate in LOADS_13 for p in SYSTEMS]
    return seeded(effort, runs)


def read_13(outcomes: Outcomes) -> Data:
    groups: dict[str, Data] = {}
    checks = []
    for run, group in grouped(outcomes).items():
        title = f"{run.workload}, {run.rate:g} requests/s"
        value = groups.setdefault(title, {})[run.policy] = median(group, lambda outcome: outcome["batched"])
        paper = LOADS_13[run.workload, run.rate][run.policy]
        checks.append(check(f"{title}, {run.policy}: batched requests", paper, value["median"]))
    return {"groups": groups, "ylabel": "batched requests (mean)", "checks": checks}


KINDS_15 = [(kind, width) for kind in ("samples", "beams") for width in (2, 4, 6)]
PAPER_15 = {("alpaca", *case): value for case, value in zip(KINDS_15, (6.09, 8.53, 9.79, 37.56, 53.13, 55.16))}
PAPER_15 |= {("sharegpt", "samples", 2): 16.2, ("sharegpt", "samples", 6): 30.5}
PAPER_15 |= {("sharegpt", "beams", 2): 44.3, ("sharegpt", "beams", 6): 66.3}
"""Alpaca: printed in the figure; ShareGPT: ranges in section 6.3."""


def runs_15(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", workload, "ours", rate, 0, minutes, kind, width)  # type: ignore[arg-type]
        for workload, rate, minutes in (("alpaca", 3.0, 2), ("sharegpt", 0.3, 10))
        for kind, width in KINDS_15
    ]
    return seeded(effort, runs)


def read_15(outcomes: Outcomes) -> Data:
    groups: dict[str, Data] = {}
    checks = []
    for run, group in grouped(outcomes).items():
        value = median(group, lambda outcome: 100 * outcome["window"].get("saved", 0.0))
        groups.setdefault(run.workload, {})[f"{run.width} {run.kind}"] = value
        paper = PAPER_15.get((run.workload, run.kind, run.width))
        if paper is not None:
            what, near = f"{run.workload}, {run.width} {run.kind}: blocks saved", (paper - POINTS, paper + POINTS)
            checks.append(check(what, paper, value["median"], unit="%", within=near))
    return {"groups": groups, "ylabel": "blocks saved by sharing, %", "checks": checks}


# -- block sizes: figures 18b and 19 --------------------------------------------------------------------------------

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHAPES = {"near 1": (0.8, 1.25), "above 1": (1.0, 1e9)}
RATES_18B = {"sharegpt": 1.6, "alpaca": 40.0}


def runs_18b(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", workload, "ours", rate, 0, 5, block_size=size)
        for workload, rate in RATES_18B.items()
        for size in BLOCK_SIZES
    ]
    return seeded(effort, runs)


def read_18b(outcomes: Outcomes) -> Data:
    series: dict[str, Data] = {}
    for run, group in grouped(outcomes).items():
        add_point(series, run.workload, run.block_size, median(group, lambda outcome: outcome["latency"]))
    checks = []
    for workload, one in series.items():
        by_size = dict(zip(one["x"], one["median"]))
        for size in (1, 128, 256):
            paper = "near 1" if (workload, size) == ("sharegpt", 128) else "above 1"
            what = f"{workload}, {RATES_18B[workload]:g} requests/s: latency, block size {size} / 16"
            checks.append(check(what, paper, by_size[size] / by_size[16], unit="x", within=SHAPES[paper]))
    panels = [
        {"title": f"{name} at {RATES_18B[name]:g} requests/s", "xlabel": "block size", "series": [one]}
        for name, one in series.items()
    ]
    return {"panels": panels, "log_x": True, "checks": checks}


MOVED_TOKENS = 256
RATE_19 = 1.7


def runs_19(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "sharegpt", policy, RATE_19, 0, 10, block_size=size)
        for policy in ("ours-recompute", "ours-swap")
        for size in BLOCK_SIZES[:: max(1, effort.every // 2)]
    ]
    return seeded(effort, runs)


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
        add_point(series, run.policy, run.block_size, median(group, lambda outcome: outcome["latency"]))
    by_size = {name: dict(zip(one["x"], one["median"])) for name, one in series.items()}
    checks = []
    for size in (1, 16, 32, 64):
        if size in by_size["ours-swap"]:
            paper = "above 1" if size == 1 else "near 1"
            value = by_size["ours-swap"][size] / by_size["ours-recompute"][size]
            what = f"block size {size}: latency, swap / recompute"
            checks.append(check(what, paper, value, unit="x", within=SHAPES[paper]))
    panels = [
        {"title": f"moving {MOVED_TOKENS} tokens of OPT-13B", "xlabel": "block size", "ylabel": "ms", "series": left},
        {"title": f"ShareGPT at {RATE_19:g} requests/s", "xlabel": "block size", "series": list(series.values())},
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
    Figure("18b", "Latency over block sizes, the whole system", runs_18b, read_18b),
    Figure("19", "Recomputation and swapping over block sizes", runs_19, read_19),
)
