"""What the paper does not evaluate, simulated in the same way; and what the assumptions change.

A figure's data is as in `figures`, and has a "sentence" that says what it shows.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper.kinds import KINDS
from benchmarks.paper.reading import (
    LATENCY_FACTOR,
    Data,
    Effort,
    Figure,
    Outcomes,
    add_point,
    curves,
    grouped,
    median,
    ratio,
    seeded,
    spread,
)
from benchmarks.paper.runs import BASELINES, Run

LARGE = "LLaMA-13B, 80 GB"
AZURE = {("azure-conv", 1.09): 2.8, ("azure-code", 1.0): 3.6, ("azure-code", 13.2): 3.6}
"""(lengths, standard deviation / mean of the times between arrivals) -> highest rate. 1.09 and 13.2 are Azure's."""


def runs_azure(effort: Effort) -> list[Run]:
    runs = [
        Run(LARGE, workload, policy, rate, 0, 15, variation=variation)
        for (workload, variation), top in AZURE.items()
        for policy in ("ours", *BASELINES)
        for rate in spread(top, 12, 0.05)[:: effort.every]
    ]
    return seeded(effort, runs)


def read_azure(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"{run.workload}, CV {run.variation:g}")
    gains = [ratio(panel, "orca-oracle") for panel in panels]
    bursty, poisson = ({s["system"]: s["sustained"] for s in panels[i]["series"]} for i in (2, 1))
    sentence = (
        f"Ours sustains {gains[0]:.2g} times Oracle's rate on the lengths of Azure's conversations and {gains[1]:.2g} "
        f"times on those of its code completions; with code's bursts, ours sustains {bursty['ours']:.2g} requests/s "
        f"instead of {poisson['ours']:.2g}, which is {gains[2]:.2g} times Oracle's rate."
    )
    return {"panels": panels, "checks": [], "sentence": sentence}


BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
CHUNKS_RATE = 1.2


def runs_chunks(effort: Effort) -> list[Run]:
    return seeded(effort, [Run(LARGE, "azure-conv", "ours", CHUNKS_RATE, 0, 15, budget=size) for size in BUDGETS])


def read_chunks(outcomes: Outcomes) -> Data:
    """The largest budget takes every prompt whole."""
    series: dict[str, dict[str, Data]] = {"pace_p99": {}, "first_token_p99": {}}
    for run, group in grouped(outcomes).items():
        for name, one in series.items():
            point = median(group, lambda outcome, name=name: outcome[name])
            add_point(one, "ours", run.budget, point)
    titles = {"pace_p99": "p99 of the time between tokens", "first_token_p99": "p99 of the time to the first token"}
    panels = [
        {"title": titles[name], "xlabel": "tokens of a step, at most", "ylabel": "s", "series": list(one.values())}
        for name, one in series.items()
    ]
    pace, first = (series[name]["ours"]["median"] for name in ("pace_p99", "first_token_p99"))
    sentence = (
        f"With chunks of at most {BUDGETS[1]} tokens instead of whole prompts, 99 % of the tokens come within "
        f"{1000 * pace[1]:.0f} instead of {1000 * pace[-1]:.0f} ms, and 99 % of the first tokens within {first[1]:.2g} "
        f"instead of {first[-1]:.2g} s (Azure's conversations, {CHUNKS_RATE:g} requests/s)."
    )
    return {"panels": panels, "log_x": True, "checks": [], "sentence": sentence}


def runs_turns(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "turns", policy, rate, 0, 15)
        for policy in ("ours", "ours-unshared")
        for rate in spread(1.8, 14)[:: effort.every]
    ]
    return seeded(effort, runs)


def read_turns(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: "OPT-13B, conversations of up to 8 turns")
    sentence = (
        f"With the prefix cache, conversations whose prompts are all that was said before are sustained at "
        f"{ratio(panels[0], 'ours-unshared'):.2g} times the rate without."
    )
    return {"panels": panels, "checks": [], "sentence": sentence}


URGENT = 0.2


def runs_priorities(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "sharegpt", "ours", rate, 0, 15, urgent=urgent)
        for urgent in (0.0, URGENT)
        for rate in spread(2.4, 12, 0.3)[:: effort.every]
    ]
    return seeded(effort, runs)


def read_priorities(outcomes: Outcomes) -> Data:
    series: dict[str, Data] = {}
    for run, group in grouped(outcomes).items():
        # A short trace may have only one of the classes.
        names = ("urgent", "others") if run.urgent else ("without priorities",)
        for i, name in enumerate(names):
            point = median(
                group, lambda outcome, i=i: (2 * outcome["latency_by_priority"])[i]
            )  # one class may be empty
            add_point(series, name, run.rate, point)
    limit = LATENCY_FACTOR * min(series["without priorities"]["median"])
    rate = min(one["x"][-1] for one in series.values())
    urgent, others, plain = (
        series[name]["median"][series[name]["x"].index(rate)] for name in ("urgent", "others", "without priorities")
    )
    sentence = (
        f"At {rate:g} requests/s, more than OPT-13B sustains, the urgent {URGENT:.0%} of the requests take "
        f"{urgent:.2g} s/token, the others {others:.2g}, and all {plain:.2g} without priorities."
    )
    panel = {"title": f"OPT-13B, ShareGPT, {URGENT:.0%} urgent", "limit": limit, "series": list(series.values())}
    return {"panels": [panel], "checks": [], "sentence": sentence}


TILES_PREFIX = 341


def runs_tiles(effort: Effort) -> list[Run]:
    runs = [
        Run("LLaMA-13B", "translation", policy, rate, 0, 2, prefix=TILES_PREFIX)
        for policy in ("ours-tiles", "ours")
        for rate in spread(80.0, 14)[:: effort.every]
    ]
    return seeded(effort, runs)


def read_tiles(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"LLaMA-13B, prefix of {TILES_PREFIX} tokens")
    rates = {s["system"]: s["sustained"] for s in panels[0]["series"]}
    gain = rates["ours-tiles"] / rates["ours"] if rates["ours"] else 0.0
    sentence = (
        f"A decode kernel that reads the K/V of the shared prefix once for each tile of 64 sequences sustains "
        f"{gain:.2g} times the rate; the simulation assumes that reading K/V is all that attention costs."
    )
    return {"panels": panels, "checks": [], "sentence": sentence}


BEYOND = (
    KINDS,
    Figure("azure", "Production traces", runs_azure, read_azure),
    Figure("chunks", "Chunked prefill", runs_chunks, read_chunks),
    Figure("turns", "Prefix cache in conversations", runs_turns, read_turns),
    Figure("priorities", "Priorities", runs_priorities, read_priorities),
    Figure("tiles", "Prefix tiles of the kernel", runs_tiles, read_tiles),
)

# -- what the assumptions change ------------------------------------------------------------------------------------

CHANGES: dict[str, Data] = {
    "as assumed": {},
    "`host_row_s` 0.25 ms": {"changes": (("host_row_s", 250e-6),)},
    "`arithmetic` 0.7": {"changes": (("arithmetic", 0.7),)},
    "`kv_reading` 0.8": {"changes": (("kv_reading", 0.8),)},
    "`reading` 0.5": {"changes": (("reading", 0.5),)},
    "1,024 sequences a step": {"seats": 1024},
}
CASES = {
    "ShareGPT": Run("OPT-13B", "sharegpt", "ours", 6.0, 0, 5),
    "Alpaca": Run("OPT-13B", "alpaca", "ours", 150.0, 0, 1),
    "6 beams": Run("OPT-13B", "alpaca", "ours", 30.0, 0, 0.5, "beams", 6),
    "prefix of 341": Run("LLaMA-13B", "translation", "ours", 100.0, 0, 1, prefix=341),
    "chat": Run("OPT-13B", "chat", "ours", 3.0, 0, 10),
}
"""Requests come faster than any system serves them."""


def runs_assumptions(effort: Effort) -> list[Run]:
    runs = [
        replace(run, policy=policy, **change)
        for run in CASES.values()
        for change in CHANGES.values()
        for policy in ("ours", "orca-oracle")
    ]
    return seeded(Effort(1, effort.share, 1), runs)


def read_assumptions(outcomes: Outcomes) -> Data:
    done = iter(outcomes.values())
    columns = []
    for _ in CASES:
        ours, oracle = zip(*((next(done), next(done)) for _ in CHANGES))
        rates = [[o["requests"] / o["seconds"] for o in system] for system in (ours, oracle)]
        columns.append([a / b for a, b in zip(*rates)])
    rows = [[name, *(round(column[i], 2) for column in columns)] for i, name in enumerate(CHANGES)]
    return {"table": {"head": ["", *CASES], "rows": rows}, "checks": []}


ASSUMPTIONS = Figure("assumptions", "What the assumptions change", runs_assumptions, read_assumptions)
