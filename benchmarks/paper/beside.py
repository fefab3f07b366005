"""Figures 2, 13, 14, 15, 16 and 19 at small scale: the engine on this CPU, and the simulator under the same loads.

Needs torch and transformers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import workloads
from benchmarks.paper.cost import CostModel
from benchmarks.paper.fit import SCALE, load_of_workload
from benchmarks.paper.real import RealLoad, run_engine, simulate
from benchmarks.paper.requests import SimRequest, translation
from benchmarks.paper.runs import Outcome, outcome_of
from benchmarks.paper.store import Store

Data = dict[str, Any]
Row = tuple[str, Callable[[Outcome], float]]

ENOUGH = 16
"""Requests that do not fit together into the slots of Figures 2 and 19: some wait, or are preempted."""

FILLED: Row = ("slots that hold tokens while requests wait, %", lambda o: 100 * o["busy"]["filled"])
BATCHED: Row = ("batched requests", lambda o: o["batched"])
LATENCY: Row = ("normalized latency, ms/token", lambda o: 1000 * o["latency"])
SAVED: Row = ("blocks saved by sharing, %", lambda o: 100 * o["window"]["saved"])
STEPS: Row = ("steps", lambda o: o["steps"])
PREEMPTIONS: Row = ("preemptions", lambda o: o["preemptions"])


@dataclass(frozen=True, slots=True)
class Beside:
    figure: str
    load: RealLoad
    values: tuple[Row, ...]


def forking(kind: Any, width: int, count: int, rate: float) -> RealLoad:
    trace = workloads.synthesise("alpaca", count, scale=0.5, rate=rate, seed=21)
    requests = [
        SimRequest(f"r{i}", r.arrival, r.input_length, r.output_length, kind, width) for i, r in enumerate(trace)
    ]
    return RealLoad(f"Alpaca x 0.5, {width} {kind}", requests, 8192, max_num_seqs=128)


def loads(count: int) -> Iterator[Beside]:
    """`count`: requests of each load, or more where fewer would show nothing."""
    sharegpt = f"ShareGPT x {SCALE:g}"
    pressure = load_of_workload("sharegpt", max(count, ENOUGH), 1000.0, 22, slots=1024)
    yield Beside("2", replace(pressure, name=f"{sharegpt}, overload"), (FILLED,))
    for rate in (10.0, 30.0):
        load = load_of_workload("sharegpt", count, rate, 23, slots=1024)
        yield Beside("13", replace(load, name=f"{sharegpt}, {rate:g}/s"), (BATCHED, LATENCY))
    for kind, width in (("samples", 2), ("samples", 4), ("samples", 6), ("beams", 2), ("beams", 4), ("beams", 6)):
        yield Beside("14, 15", forking(kind, width, count, 10.0), (LATENCY, SAVED))
    for prefix in (80, 341):
        for shares in (True, False):
            requests = translation(count, 20.0, 24, prefix)
            name = f"prefix of {prefix} tokens, {'shared' if shares else 'not shared'}"
            yield Beside("16", RealLoad(name, requests, 16384, prefix_caching=shares), (LATENCY,))
    for mode in ("recompute", "swap"):
        for size in (1, 16, 64):
            load = load_of_workload(
                "sharegpt", max(count, ENOUGH), 40.0, 25, slots=768, preemption=mode, block_size=size
            )
            load = replace(load, name=f"{sharegpt}, {mode}, block size {size}")
            yield Beside("19", load, (LATENCY, PREEMPTIONS))


def compare_all(
    language_model: Callable[[], Any],
    cost: CostModel,
    count: int,
    repeats: int,
    store: Store,
    say: Callable[[str], None],
) -> Data:
    """Medians of the engine's runs, and the simulation, under each load. All loads run in turns, `repeats` times; runs
    that `store` has are not repeated."""
    outcomes: dict[int, list[Outcome]] = {}
    each = list(loads(count))
    for turn in range(repeats):
        for index, beside in enumerate(each):
            what = f"{count} requests ({beside.load.identity()})"
            key = f"engine, {what}, figure {beside.figure}: {beside.load.name}, run {turn}"
            outcome = store.get(key)
            if outcome is None:
                say(key)
                run = run_engine(language_model(), beside.load)
                outcome = outcome_of(run.result) | {"parents": run.parents}
                store.put(key, outcome)
            outcomes.setdefault(index, []).append(outcome)
    rows: list[Data] = []
    for index, beside in enumerate(each):
        simulated = outcome_of(simulate(beside.load, cost, outcomes[index][0]["parents"] or None))
        for value, read in beside.values:
            runs = [read(outcome) for outcome in outcomes[index]]
            row = {"figure": beside.figure, "load": beside.load.name, "value": value, "runs": runs}
            rows.append(row | {"engine": statistics.median(runs), "simulated": read(simulated)})
    return {"requests": count, "repeats": repeats, "rows": rows}
