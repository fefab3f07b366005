"""The figures of the paper's evaluation: which runs each needs, and what is read off them.

A figure's data is {"panels": [...], "checks": [...], "facts": {...}}. A panel has "series" of points, "bars" or a
"stack" of them. Each check sets one of the paper's values beside ours. Facts are numbers for the words of the page.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper import blocks, problem, published
from benchmarks.paper.cost import SETUPS
from benchmarks.paper.policies.orca import MAX_MODEL_LENGTH
from benchmarks.paper.reading import (
    Data,
    Effort,
    Figure,
    Outcomes,
    check,
    curves,
    grouped,
    median,
    one_seed,
    paper_rates,
    rate_checks,
    seeded,
    spread,
)
from benchmarks.paper.requests import CHAT_PROMPT
from benchmarks.paper.runs import BASELINES, Run

SYSTEMS = ("ours", *BASELINES)


# -- latency over rate: figures 12, 14, 16 and 17 -------------------------------------------------------------------


LOADS_12 = {
    ("OPT-13B", "sharegpt"): (60.0, spread(2.4, 13)),
    ("OPT-66B", "sharegpt"): (60.0, spread(1.5, 11)),
    ("OPT-175B", "sharegpt"): (15.0, spread(4.0, 11)),
    ("OPT-13B", "alpaca"): (5.0, spread(60.0, 10)),
    ("OPT-66B", "alpaca"): (5.0, spread(45.0, 10)),
    ("OPT-175B", "alpaca"): (5.0, spread(45.0, 10)),
}
"""Minutes, as in the paper but for Alpaca (an hour there), and rates."""


def runs_12(effort: Effort) -> list[Run]:
    """One seed with Alpaca: its traces have thousands of requests."""
    runs = []
    for (setup, workload), (minutes, rates) in LOADS_12.items():
        each = one_seed(effort) if workload == "alpaca" else effort
        for policy in (*SYSTEMS, "faster-transformer"):
            low = [rates[0] / 8, rates[0] / 3] if policy in ("faster-transformer", "orca-max") else []
            low = [rates[0] / 40, *low] if policy == "faster-transformer" else low
            chosen = [*low, *rates[:: effort.every]]
            runs += seeded(each, [Run(setup, workload, policy, rate, 0, minutes) for rate in chosen])
    return runs


def read_12(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"{run.setup}, {run.workload}", "12")
    for panel in panels:
        # Only where all are drawn: the baselines with less memory are measured at lower rates too.
        panel["xlabel"] = "requests/s"
    longer = [panel for panel in panels if panel["title"].endswith("sharegpt")]
    facts = {
        system.replace("-", "_"): " to ".join(f"{value:.2g}" for value in _extremes(longer, system))
        for system in (*BASELINES, "faster-transformer")
    }
    facts |= {"batch": str(SETUPS["OPT-175B"].slots // MAX_MODEL_LENGTH), "moved": f"{_moved(panels):.0%}"}
    return {"panels": panels, "checks": rate_checks(panels), "facts": facts}


def _extremes(panels: list[Data], system: str) -> tuple[float, float]:
    """The lowest and the highest of the paper's ratios of ours to `system`."""
    ratios = [rates["ours"] / rates[system] for rates in map(paper_rates, panels)]
    return min(ratios), max(ratios)


def _moved(panels: list[Data], limit: float = 0.5) -> float:
    """How far the paper's ratios to Orca move, at most, if they are read at `limit` seconds for a token."""
    moves = []
    for panel in panels:
        ours, other = paper_rates(panel), paper_rates(panel, limit)
        moves += [abs(other["ours"] / other[name] / (ours["ours"] / ours[name]) - 1) for name in BASELINES]
    return max(moves)


RATES_14 = {("samples", 2): 30.0, ("samples", 4): 16.0, ("samples", 6): 11.0}
RATES_14 |= {("beams", 2): 30.0, ("beams", 4): 17.0, ("beams", 6): 12.0}


def runs_14(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", "alpaca", policy, rate, 0, 2, kind, width)  # type: ignore[arg-type]
        for (kind, width), top in RATES_14.items()
        for policy in SYSTEMS
        for rate in [
            *([top / 100, top / 40, top / 20] if policy == "orca-max" else []),
            *spread(top, 8)[:: effort.every],
        ]
    ]
    return seeded(one_seed(effort), runs)


def read_14(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"{run.width} {run.kind}", "14")
    return {"panels": panels, "checks": rate_checks(panels)}


def runs_16(effort: Effort) -> list[Run]:
    runs = [
        Run("LLaMA-13B", "translation", policy, rate, 0, 3, prefix=prefix)
        for prefix, top in ((80, 65.0), (341, 42.0))
        for policy in ("ours", "orca-oracle")
        for rate in spread(top, 16)[:: effort.every]
    ]
    return seeded(effort, runs)


def read_16(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: f"prefix of {run.prefix} tokens", "16")
    return {"panels": panels, "checks": rate_checks(panels)}


def runs_17(effort: Effort) -> list[Run]:
    runs = [Run("OPT-13B", "chat", p, rate, 0, 60) for p in SYSTEMS for rate in spread(1.2, 16)[:: effort.every]]
    return seeded(effort, runs)


def read_17(outcomes: Outcomes) -> Data:
    panels = curves(outcomes, lambda run: "OPT-13B, chat", "17")
    facts = {name: _busy_requests(outcomes, name) for name in ("ours", "orca-oracle")}
    prompts = Run("OPT-13B", "chat", "ours", 1.0, 0, 20).requests()
    full = sum(request.input_length == CHAT_PROMPT for request in prompts) / len(prompts)
    facts = {"ours": facts["ours"], "oracle": facts["orca-oracle"], "full": f"{full:.0%}"}
    return {"panels": panels, "checks": rate_checks(panels), "facts": facts}


# -- memory and batches: figures 2, 13 and 15 -----------------------------------------------------------------------


def _busy_requests(outcomes: Outcomes, policy: str) -> str:
    """Requests that run at a time at the highest rate that was simulated."""
    last = max((run for run in outcomes if run.policy == policy), key=lambda run: run.rate)
    return f"{median(grouped(outcomes)[replace(last, seed=0)], lambda outcome: outcome['batched'])['median']:.0f}"


def runs_2(effort: Effort) -> list[Run]:
    return seeded(effort, [Run("OPT-13B", "sharegpt", policy, 4.0, 0, 10, measure_every=1) for policy in SYSTEMS])


NAMES_2 = {
    "tokens": "holds tokens",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external": "external fragmentation",
}


def read_2(outcomes: Outcomes) -> Data:
    """Shares of the pool while requests wait, without what ours leaves free."""
    stack: dict[str, dict[str, float]] = {}
    for run, group in grouped(outcomes).items():
        busy = [{**o, "busy": o["busy"] or o["window"]} for o in group]
        stack[run.policy] = {
            n: 100 * median(busy, lambda o, n=n: o["busy"][n] / (1 - o["busy"]["free"]))["median"] for n in NAMES_2
        }
    checks = [
        check(f"{system}: {NAMES_2[kind]}", value, stack[system][kind], unit="%", source="printed")
        for system, values in published.MEMORY.items()
        for kind, value in values.items()
    ]
    panel = {"title": "", "ylabel": "K/V memory, %", "stack": stack, "paper": published.MEMORY}
    return {"panels": [panel], "checks": checks}


RATES_13 = {"sharegpt": 2.0, "alpaca": 30.0}


def runs_13(effort: Effort) -> list[Run]:
    runs = [Run("OPT-13B", w, p, rate, 0, 10, measure_every=1) for w, rate in RATES_13.items() for p in SYSTEMS]
    return seeded(effort, runs)


def read_13(outcomes: Outcomes) -> Data:
    bars: dict[str, Data] = {}
    checks = []
    for run, group in grouped(outcomes).items():
        title = f"{run.workload}, {run.rate:g} requests/s"
        value = median(group, lambda outcome: outcome["batched"])
        paper = published.BATCHED[run.workload][run.policy]
        bars.setdefault(title, {})[run.policy] = {**value, "paper": paper}
        checks.append(check(f"{title}, {run.policy}: batched requests", paper, value["median"], source="printed"))
    panels = [{"title": title, "ylabel": "batched requests (mean)", "bars": each} for title, each in bars.items()]
    return {"panels": panels, "checks": checks, "facts": _step_facts(outcomes)}


def _step_facts(outcomes: Outcomes) -> dict[str, str]:
    """By Little's law, the time of a request is the number of them over their rate; each output token takes a step."""
    ours = [o for run, o in outcomes.items() if run.workload == "alpaca" and run.policy == "ours"]
    rate, tokens = RATES_13["alpaca"], published.MEANS["alpaca"]["out"]
    batches = {"paper": published.BATCHED["alpaca"]["ours"], "ours": median(ours, lambda o: o["batched"])["median"]}
    return {f"step_{name}": f"{1000 * batch / rate / tokens:.0f}" for name, batch in batches.items()}


KINDS_15 = [(kind, width) for kind in ("samples", "beams") for width in (2, 4, 6)]
LOADS_15 = {"alpaca": (3.0, 2), "sharegpt": (0.3, 10)}


def runs_15(effort: Effort) -> list[Run]:
    runs = [
        Run("OPT-13B", workload, "ours", rate, 0, minutes, kind, width)  # type: ignore[arg-type]
        for workload, (rate, minutes) in LOADS_15.items()
        for kind, width in KINDS_15
    ]
    return seeded(effort, runs)


def read_15(outcomes: Outcomes) -> Data:
    bars: dict[str, Data] = {}
    checks = []
    for run, group in grouped(outcomes).items():
        bar = median(group, lambda outcome: 100 * outcome["window"].get("saved", 0.0))
        paper = published.SAVED.get((run.workload, run.kind, run.width))
        bars.setdefault(run.workload, {})[f"{run.width} {run.kind}"] = bar | ({"paper": paper} if paper else {})
        if paper:
            what = f"{run.workload}, {run.width} {run.kind}: blocks saved"
            source = "printed" if run.workload == "alpaca" else "section 6.3"
            checks.append(check(what, paper, bar["median"], unit="%", source=source))
    panels = [{"title": name, "ylabel": "blocks saved by sharing, %", "bars": each} for name, each in bars.items()]
    return {"panels": panels, "checks": checks}


FIGURES = (
    problem.FIGURES[0],
    Figure("2", "K/V memory by use", runs_2, read_2),
    problem.FIGURES[1],
    Figure("12", "Normalized latency over request rate", runs_12, read_12),
    Figure("13", "Batched requests", runs_13, read_13),
    Figure("14", "Parallel sampling and beam search, OPT-13B on Alpaca", runs_14, read_14),
    Figure("15", "Memory saved by sharing", runs_15, read_15),
    Figure("16", "Shared prefix, LLaMA-13B", runs_16, read_16),
    Figure("17", "Chatbot", runs_17, read_17),
    *blocks.FIGURES,
)
