"""The fleet simulation: a fleet of one is one simulation, whatever the router; what it counts; the command's page."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import fleet, fleet_page
from benchmarks.fleet_simulator import SYSTEM, Fleet, Traffic, chain, cost_model, make_replica, requests_of
from benchmarks.paper.requests import SimRequest
from hf_paged.serving.routing import PrefixRouting, RoundRobin

TRAFFIC = Traffic(4500, 2.0, 0.0)
SMALL = replace(fleet.SETUP, slots=9000)


def alone(requests: list[SimRequest]) -> dict[str, tuple[float, float]]:
    """(first token, end) of each request on one replica that knows all arrivals in advance."""
    replica = make_replica(SMALL, cost_model(SMALL))
    replica.requests = requests
    done = replica.run().completed
    return {each.request.request_id: (each.first_token, each.end) for each in done}


def test_a_fleet_of_one() -> None:
    """The same latencies as without a router; with so few slots there are preemptions."""
    requests = requests_of(TRAFFIC)
    one, expected = Fleet(1, RoundRobin(), SMALL), alone(requests)
    measured = one.run(requests, 0.0)
    arrivals = {request.request_id: request.arrival for request in requests}
    firsts = sorted(first - arrivals[name] for name, (first, _) in expected.items())
    assert sorted(measured.first_token) == pytest.approx(firsts)
    assert len(firsts) == len(requests) and measured.preemptions > 0
    assert measured.cached_tokens == one._looked_up()[1] > 0
    assert set(one._loads.values()) == {0}


def test_chains_are_prefixes_of_later_ones() -> None:
    requests = requests_of(TRAFFIC)
    turns: dict[str, list[SimRequest]] = {}
    for request in requests:
        turns.setdefault(request.conversation, []).append(request)
    pairs = [(a, b) for said in turns.values() for a, b in pairwise(said)]
    assert len(pairs) > 40
    for before, after in pairs:
        assert chain(after)[: len(chain(before))] == chain(before)
    router = PrefixRouting[int]()
    router.sent(chain(requests[0]), 0)
    other = next(r for r in requests if r.conversation.split(".")[0] == requests[0].conversation.split(".")[0])
    assert router.matched(chain(other), 0) >= SYSTEM // 16


def test_the_page() -> None:
    counted = zip(fleet.runs(quick=True), [1, 1, 1, 2, 2, 2])
    wanted = [replace(run, minutes=2.0, hourly=3000, replicas=count) for run, count in counted]
    outcomes = {run: fleet.execute(run) for run in wanted}
    assert all(0 < outcome["hit_rate"] < 1 and outcome["first_token_p99"] > 0 for outcome in outcomes.values())
    routers = [fleet.measure_router(policy, 2, 0.01) for policy in fleet.POLICIES]
    assert [router["bytes"] > 0 for router in routers] == [True, False, False]
    data = fleet_page.read(outcomes, routers)
    page = fleet_page.render(data, "fleet")
    assert "3,000" in page and "nan" not in page
    assert math.isfinite(sum(outcome["latency"] for outcome in outcomes.values()))
