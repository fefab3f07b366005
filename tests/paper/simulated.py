"""Simulated runs in which every step takes a second."""

from __future__ import annotations

from benchmarks.paper.cost import CostModel
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.simulator import Result, Simulator

SECOND = CostModel(step=1.0, weights=0.0, token=0.0, kv_token=0.0)
"""Every step takes a second."""


def simulate(policy: object, requests: list[SimRequest], **options: object) -> Result:
    return Simulator(policy, SECOND, requests, **options).run()  # type: ignore[arg-type]


def ends(result: Result) -> dict[str, float]:
    return {done.request.request_id: done.end for done in result.completed}
