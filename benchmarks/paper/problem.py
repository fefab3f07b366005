"""Figures 1 and 11: where memory goes, and how long prompts and outputs are."""

from __future__ import annotations

import random
import statistics

from benchmarks.paper import published
from benchmarks.paper.cost import ASSUMED, OPT_13B, cost_of
from benchmarks.paper.policies.interface import Load
from benchmarks.paper.reading import READ, Data, Effort, Figure, Outcomes, check, grouped, seeded
from benchmarks.paper.runs import Outcome, Run

GB = 1e9
A100_MEMORY = 40.0
FILLED_AT = 39.0
"""GB at which the paper's curves end."""
BATCHES = tuple(range(4, 41, 4))


def runs_1(effort: Effort) -> list[Run]:
    return seeded(effort, [Run("OPT-13B", "sharegpt", p, 2.0, 0, 10, measure_every=1) for p in ("ours", "orca-max")])


def read_1(outcomes: Outcomes) -> Data:
    """Memory of an A100 with OPT-13B; memory and tokens a second over the number of requests."""
    weights, cache = 2 * OPT_13B.parameters / GB, OPT_13B.slots * OPT_13B.kv_bytes / GB
    shares = {"parameters": weights, "K/V cache": cache, "others": A100_MEMORY - weights - cache}
    held = {
        run.policy: OPT_13B.kv_bytes / GB * statistics.median(_slots_of_a_request(o) for o in group)
        for run, group in grouped(outcomes).items()
    }
    context = statistics.median(
        o["window"]["tokens"] * OPT_13B.slots / o["batched"] for run, o in outcomes.items() if run.policy == "ours"
    )
    cost = cost_of(OPT_13B).with_kv_factor(ASSUMED.kv_factor(16))
    speed = {size: size / cost.seconds(Load(size, size, round(size * context))) for size in BATCHES}
    fits = {policy: (FILLED_AT - weights) / each for policy, each in held.items()}
    read = published.FIGURES["1"]
    memory = [
        {"system": policy, "x": [0, fits[policy]], "median": [weights, FILLED_AT], "paper": read["memory"][policy]}
        for policy in held
    ]
    throughput = {"system": "ours", "x": list(speed), "median": list(speed.values()), "paper": read["throughput"]}
    printed = {"parameters": 26.0, "K/V cache": 12.0, "others": 2.0}
    panels = [
        {
            "title": "OPT-13B on an A100 with 40 GB",
            "ylabel": "GB",
            "stack": {"ours": shares},
            "paper": {"ours": printed},
        },
        {"title": "memory", "xlabel": "requests at a time", "ylabel": "GB", "series": memory, "bottom": 20},
        {"title": "throughput", "xlabel": "requests at a time", "ylabel": "tokens/s", "series": [throughput]},
    ]
    speeds = dict(zip(read["throughput"]["x"], read["throughput"]["y"]))
    checks = [
        check("parameters", 65, 100 * weights / A100_MEMORY, unit="%", source="printed"),
        check("K/V cache", "over 30", 100 * cache / A100_MEMORY, unit="%", source="printed", within=(30, 100)),
        *(
            check(f"{policy}: requests in {FILLED_AT:g} GB", read["memory"][policy]["x"][-1], fits[policy], source=READ)
            for policy in held
        ),
        *(check(f"tokens/s with {size} requests", speeds[size], speed[size], source=READ) for size in (8, 40)),
    ]
    facts = {"context": f"{context:.0f}", "slots": f"{1e9 * held['ours'] / OPT_13B.kv_bytes:.0f}"}
    return {"panels": panels, "checks": checks, "facts": facts}


def _slots_of_a_request(outcome: Outcome) -> float:
    window = outcome["window"]
    return (1 - window["free"] - window["external"]) * OPT_13B.slots / outcome["batched"]


DRAWN = 20_000


def read_11(_: Outcomes) -> Data:
    """The lengths that the simulations draw, in the bins of the paper's histograms."""
    panels, checks = [], []
    for workload, means in published.MEANS.items():
        drawn = dict(zip(("in", "out"), zip(*published.pairs(workload, DRAWN, random.Random(0), 2048))))
        series = []
        for side, lengths in drawn.items():
            bins = published.lengths(workload, side)
            edges = [bins.first + i * bins.width for i in range(len(bins.density) + 1)]
            counts = [0] * len(bins.density)
            for length in lengths:
                counts[min(int((length + 0.5 - bins.first) / bins.width), len(counts) - 1)] += 1
            density = [count / DRAWN / bins.width for count in counts]
            series.append({"system": side, "edges": edges, "median": density, "paper": list(bins.density)})
            what = f"{workload}: mean tokens of {'a prompt' if side == 'in' else 'an output'}"
            checks.append(check(what, means[side], statistics.fmean(lengths), source="printed"))
        right = 1.2 * sorted(drawn["out"])[round(0.99 * DRAWN)]  # the rest is too rare to be seen
        panels.append(
            {"title": workload, "xlabel": "tokens", "ylabel": "share for each token", "series": series, "right": right}
        )
    return {"panels": panels, "checks": checks}


FIGURES = (
    Figure("1", "Where memory goes", runs_1, read_1),
    Figure("11", "Lengths of prompts and outputs", lambda _: [], read_11),
)
