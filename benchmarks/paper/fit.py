"""Coefficients of the cost model from runs of the engine on this machine, and the check on loads held out.

Needs torch, transformers and numpy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

from benchmarks import workloads
from benchmarks.paper.cost import FEW, CostModel
from benchmarks.paper.policies.interface import Load
from benchmarks.paper.real import RealLoad, RealRun, run_engine, run_in_turns, simulate
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.runs import outcome_of

FEATURES = (
    "step",
    "token",
    "kv_token",
    "pair",
    "row",
    "copied_token",
    "swap_call",
    "swap_token",
    "several",
    "few",
    "start",
)
SCALE = 0.2
"""The lengths of the paper's workloads are multiplied by this, so that runs take minutes on one CPU core."""
LATENCIES = ("latency", "latency_p99")
TOLERANCE = 0.15
OUTLIER = 5.0


def features(load: Load, block_size: int) -> list[float]:
    """What each coefficient is multiplied by, in the order of FEATURES."""
    swapped, several = load.swapped_blocks, load.tokens > 1
    work = [1.0, load.tokens, load.kv_tokens, load.pairs, load.rows, load.copied_tokens]
    return [*work, swapped, swapped * block_size, float(several), min(load.tokens, FEW) if several else 0, load.started]


def fit(runs: Iterable[tuple[RealRun, int]]) -> CostModel:
    """Least squares with coefficients >= 0, each step weighted by its estimated time; steps that took over
    OUTLIER times the estimate (the machine did something else) are left out. Each run comes with its block size."""
    import numpy as np

    runs = list(runs)
    rows = [(features(load, size), seconds) for run, size in runs for load, seconds in run.steps if load.rows]
    matrix = np.array([row for row, _ in rows], dtype=float)
    seconds = np.array([value for _, value in rows])
    kept = seconds < 10 * OUTLIER * np.median(seconds)
    matrix, seconds = matrix[kept], seconds[kept]
    # Weights by the measured time would favour steps that happened to be fast.
    estimate = np.full(len(seconds), seconds.mean())
    for _ in range(4):
        values = _non_negative(matrix / estimate[:, None], seconds / estimate)
        estimate = matrix @ values
        kept = seconds < OUTLIER * estimate
        matrix, seconds, estimate = matrix[kept], seconds[kept], estimate[kept]
    fitted = dict(zip(FEATURES, map(float, values)))
    arrivals: dict[bool, list[float]] = {False: [], True: []}
    for run, _ in runs:
        for value, is_known in run.adding:
            arrivals[is_known].append(value)
    request, known = (statistics.fmean(values or [0.0]) for values in arrivals.values())
    return CostModel(weights=0.0, request=request, known=known, **fitted)


def _non_negative(matrix: Any, target: Any) -> Any:
    """Least squares without the columns whose coefficient would be negative, the most negative first."""
    import numpy as np

    active = [i for i in range(matrix.shape[1]) if matrix[:, i].any()]
    while True:
        scale = np.linalg.norm(matrix[:, active], axis=0)
        found = np.linalg.lstsq(matrix[:, active] / scale, target, rcond=None)[0] / scale
        if found.min() >= 0:
            break
        del active[int((found * scale).argmin())]
    values = np.zeros(matrix.shape[1])
    values[active] = found
    return values


def load_of_workload(name: str, count: int, rate: float, seed: int, **changes: Any) -> RealLoad:
    trace = workloads.synthesise(name, count, scale=SCALE, rate=rate, seed=seed)
    requests = [SimRequest(f"r{i}", r.arrival, r.input_length, r.output_length) for i, r in enumerate(trace)]
    details = "".join(f", {key.replace('_', ' ')} {value}" for key, value in changes.items())
    return RealLoad(f"{name}, {rate:g}/s{details}", requests, **{"slots": 4096, **changes})


def training_loads(count: int) -> list[RealLoad]:
    return [
        load_of_workload("sharegpt", count, 20.0, 1),
        load_of_workload("sharegpt", count, 1000.0, 2),
        load_of_workload("alpaca", 4 * count, 300.0, 3),
        load_of_workload("sharegpt", count, 40.0, 4, slots=640, preemption="recompute"),
        load_of_workload("sharegpt", count, 40.0, 5, slots=640, preemption="swap"),
        load_of_workload("sharegpt", count, 40.0, 6, slots=640, preemption="swap", block_size=4),
    ]


def held_out_loads(count: int) -> list[RealLoad]:
    """So many requests that p99 is not the slowest one. Under overload, that one alone changes by half when all steps
    become 5 % faster, because it is admitted before or after others."""
    return [
        load_of_workload("sharegpt", 3 * count, 10.0, 11),
        load_of_workload("alpaca", 4 * count, 100.0, 12),
        load_of_workload("sharegpt", 3 * count, 30.0, 13, slots=800),
    ]


def compare(load: RealLoad, runs: list[RealRun], costs: list[CostModel]) -> dict[str, Any]:
    """Mean and p99 normalized latency of each run of the engine beside the simulation with the coefficients of the same
    turn; medians, also of the relative errors."""
    real = [outcome_of(run.result) for run in runs]
    simulated = [outcome_of(simulate(load, cost, run.parents or None)) for cost, run in zip(costs, runs, strict=True)]
    row: dict[str, Any] = {"load": load.name}
    for name in LATENCIES:
        every = [[outcome[name] for outcome in outcomes] for outcomes in (real, simulated)]
        error = statistics.median(b / a - 1 for a, b in zip(*every))
        row[name] = {"engine": statistics.median(every[0]), "runs": every[0], "simulated": every[1], "error": error}
    for name in ("steps", "preemptions"):
        row[name] = [statistics.median(outcome[name] for outcome in outcomes) for outcomes in (real, simulated)]
    row["within"] = all(abs(row[name]["error"]) <= TOLERANCE for name in LATENCIES)
    return row


def fit_and_check(language_model: Any, count: int, repeats: int) -> dict[str, Any]:
    """Fit on the training loads; compare on those and on three others. All run together, `repeats` times. Each of these
    turns is compared with its own fit, because the speed of a shared machine differs from turn to turn."""
    loads = {"training": training_loads(count), "held_out": held_out_loads(count)}
    every = [*loads["training"], *loads["held_out"]]
    run_engine(language_model, training_loads(4)[0])  # warms up
    turns = [run_in_turns(language_model, every) for _ in range(repeats)]
    runs_of = {load.name: [turn[index] for turn in turns] for index, load in enumerate(every)}
    measured = [[(runs_of[load.name][i], load.block_size) for load in loads["training"]] for i in range(repeats)]
    costs = [fit(runs) for runs in measured]
    compared = {kind: [compare(load, runs_of[load.name], costs) for load in each] for kind, each in loads.items()}
    cost = fit(chain.from_iterable(measured))
    return {"coefficients": asdict(cost), "repeats": repeats, **compared}
