"""Coefficients of the cost model from runs of the engine on this machine, and the check on loads held out.

Needs torch, transformers and numpy.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from benchmarks import workloads
from benchmarks.paper.cost import CostModel
from benchmarks.paper.policies.interface import Load
from benchmarks.paper.real import RealLoad, RealRun, run_engine, simulate
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.runs import outcome_of

FEATURES = ("step", "token", "kv_token", "pair", "row", "copied_token", "swap_call", "swap_token")
SCALE = 0.2
"""The lengths of the paper's workloads are multiplied by this, so that runs take minutes on one CPU core."""
TOLERANCE = 0.15
OUTLIER = 5.0


def features(load: Load, block_size: int) -> list[float]:
    """What each coefficient is multiplied by, in the order of FEATURES."""
    swapped = load.swapped_blocks
    return [
        1.0, load.tokens, load.kv_tokens, load.pairs, load.rows, load.copied_tokens, swapped, swapped * block_size,
    ]  # fmt: skip


def fit(runs: Iterable[tuple[RealRun, int]]) -> CostModel:
    """Least squares with coefficients >= 0, each step weighted by its estimated time; steps that took over
    OUTLIER times the estimate (the machine did something else) are left out. Each run comes with its block size."""
    import numpy as np

    runs = list(runs)
    rows = [(features(load, size), seconds) for run, size in runs for load, seconds in run.steps if load.rows]
    matrix = np.array([row for row, _ in rows], dtype=float)
    seconds = np.array([value for _, value in rows])
    # Weights by the measured time would favour steps that happened to be fast.
    estimate = np.full(len(seconds), seconds.mean())
    for _ in range(4):
        values = _non_negative(matrix / estimate[:, None], seconds / estimate)
        estimate = matrix @ values
        kept = seconds < OUTLIER * estimate
        matrix, seconds, estimate = matrix[kept], seconds[kept], estimate[kept]
    fitted = dict(zip(FEATURES, map(float, values)))
    adding = statistics.median(value for run, _ in runs for value in run.adding)
    return CostModel(weights=0.0, request=adding, **fitted)


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
    return RealLoad(f"{name}, {rate:g}/s", requests, **{"slots": 4096, **changes})


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
    return [
        load_of_workload("sharegpt", count, 10.0, 11),
        load_of_workload("alpaca", 4 * count, 100.0, 12),
        load_of_workload("sharegpt", count, 30.0, 13, slots=800),
    ]


def compare(load: RealLoad, run: RealRun, cost: CostModel) -> dict[str, Any]:
    """Mean and p99 normalized latency of the engine and of the simulation, and the relative errors."""
    real, simulated = outcome_of(run.result), outcome_of(simulate(load, cost, run.parents or None))
    row: dict[str, Any] = {"load": load.name, "steps": [real["steps"], simulated["steps"]]}
    for name in ("latency", "latency_p99"):
        error = simulated[name] / real[name] - 1
        row[name] = {"engine": real[name], "simulated": simulated[name], "error": error}
    row["preemptions"] = [real["preemptions"], simulated["preemptions"]]
    row["within"] = all(abs(row[name]["error"]) <= TOLERANCE for name in ("latency", "latency_p99"))
    return row


def fit_and_check(language_model: Any, count: int) -> dict[str, Any]:
    """Fit on the training loads; compare on those and on three others."""
    run_engine(language_model, replace(training_loads(4)[0], name="warm-up"))
    # In turns, because the speed of a shared machine drifts.
    training, held_out = training_loads(count), held_out_loads(count)
    runs: dict[str, list[tuple[RealLoad, RealRun]]] = {"training": [], "held_out": []}
    for index, load in enumerate(training):
        runs["training"].append((load, run_engine(language_model, load)))
        if index % 2 == 1:
            other = held_out[index // 2]
            runs["held_out"].append((other, run_engine(language_model, other)))
    cost = fit((run, load.block_size) for load, run in runs["training"])
    compared = {kind: [compare(load, run, cost) for load, run in pairs] for kind, pairs in runs.items()}
    return {"coefficients": asdict(cost), **compared}
