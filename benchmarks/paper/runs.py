"""One simulation of a figure as data: what to run, and its outcome."""

from __future__ import annotations

import json
import statistics
import zlib
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.paper import published
from benchmarks.paper.beams import TOP_PROBABILITY
from benchmarks.paper.cost import ASSUMED, SETUPS, Assumptions, cost_of
from benchmarks.paper.policies.interface import Policy
from benchmarks.paper.policies.orca import Orca
from benchmarks.paper.policies.paged import Paged, Tiled
from benchmarks.paper.policies.static import Static
from benchmarks.paper.published import MEANS
from benchmarks.paper.requests import (
    CHAT_ROUNDS,
    THINKING,
    TRANSLATION_INPUT,
    TRANSLATION_OUTPUT,
    TRANSLATION_SIGMA,
    TURNS,
    Kind,
    SimRequest,
    apart,
    chat,
    in_bursts,
    poisson,
    translation,
    turns,
    with_urgent,
)
from benchmarks.paper.simulator import Integral, Result, Simulator
from benchmarks.workloads import WORKLOADS
from hf_paged.config import SchedulerConfig

Outcome = dict[str, Any]
BASELINES = ("orca-oracle", "orca-pow2", "orca-max")
PREEMPTION = {"ours": "auto", "ours-swap": "swap", "ours-recompute": "recompute", "ours-unshared": "auto"}


@dataclass(frozen=True, slots=True)
class Run:
    """policy: "ours", "ours-swap", "ours-recompute", "ours-unshared", "ours-tiles", "orca-max", "orca-pow2",
    "orca-oracle" or "faster-transformer". rate: requests a second; minutes: length of the trace; prefix: tokens shared
    by all prompts; budget: tokens of a step, at most; seats: sequences of a step, at most; variation: of the times
    between arrivals (1: Poisson); urgent: share of the requests that come first; measure_every: memory is looked at
    in every so many calls of the scheduler; changes: of ASSUMED, by name.
    """

    setup: str
    workload: str
    policy: str
    rate: float
    seed: int
    minutes: float
    kind: Kind = "greedy"
    width: int = 1
    block_size: int = 16
    prefix: int = 0
    budget: int = 8192
    seats: int = 256
    variation: float = 1.0
    urgent: float = 0.0
    measure_every: int = 8
    changes: tuple[tuple[str, float], ...] = ()

    @property
    def assumed(self) -> Assumptions:
        return replace(ASSUMED, **dict(self.changes))

    @property
    def key(self) -> str:
        """Everything that the outcome depends on but the code."""
        parameters = {
            "chat": [CHAT_ROUNDS],
            "translation": [TRANSLATION_INPUT, TRANSLATION_OUTPUT, TRANSLATION_SIGMA],
            "turns": [TURNS, THINKING],
        }
        if self.workload.startswith("azure"):
            lengths = WORKLOADS[self.workload]
        else:
            name = self.workload if self.workload in MEANS else "sharegpt"
            lengths = tuple(published.lengths(name, side) for side in ("in", "out"))
        beams = TOP_PROBABILITY if self.kind == "beams" else None
        assumed = [asdict(SETUPS[self.setup]), asdict(self.assumed), zlib.crc32(repr(lengths).encode())]
        return json.dumps([asdict(self), *assumed, parameters.get(self.workload), beams])

    def requests(self) -> list[SimRequest]:
        count = max(2, round(self.rate * 60 * self.minutes))
        if self.workload in CONVERSATIONS:
            return CONVERSATIONS[self.workload](count, self.rate, self.seed)
        if self.workload == "translation":
            return translation(count, self.rate, self.seed, self.prefix)
        longest = SETUPS[self.setup].longest
        made = poisson(self.workload, count, self.rate, self.seed, kind=self.kind, width=self.width, longest=longest)
        if self.variation != 1.0:
            made = in_bursts(made, self.rate, self.variation, self.seed)
        if self.urgent:
            made = with_urgent(made, self.urgent, self.seed)
        return apart(made) if self.policy == "ours-unshared" else made


CONVERSATIONS = {"chat": chat, "turns": turns}


def policy_for(run: Run, requests: list[SimRequest]) -> Policy:
    setup, outputs = SETUPS[run.setup], {r.request_id: r.output_length for r in requests}
    shares = (run.prefix > 0 or run.workload == "turns") and run.policy != "ours-unshared"
    preemption: Any = PREEMPTION.get(run.policy, "auto")
    config = SchedulerConfig(
        max_num_seqs=run.seats, max_num_batched_tokens=run.budget, prefix_caching=shares, preemption=preemption
    )
    if run.policy == "faster-transformer":
        return Static(config, setup.slots, outputs)
    if run.policy.startswith("orca-"):
        reserve = run.policy.removeprefix("orca-")
        return Orca(config, setup.slots, outputs, reserve=reserve, longest=setup.longest)
    options: dict[str, Any] = {"block_size": run.block_size, "name": run.policy}
    finals = {r.request_id: r.final_length for r in requests}
    if run.policy == "ours-tiles":
        return Tiled(config, setup.slots, finals, prefix=run.prefix, **options)
    return Paged(config, setup.slots, finals, **options)


def execute(run: Run) -> Outcome:
    """Simulate it. Latencies in seconds for each token, shares of the pool, counts."""
    requests = run.requests()
    policy, assumed = policy_for(run, requests), run.assumed
    is_paged = isinstance(policy, Paged)
    cost = cost_of(SETUPS[run.setup], assumed).with_kv_factor(assumed.kv_factor(run.block_size if is_paged else None))
    simulator = Simulator(
        policy,
        cost,
        requests,
        block_size=run.block_size,
        seed=run.seed,
        warm_up=requests[-1].arrival * 0.1,
        measure_every=run.measure_every,
    )
    return outcome_of(simulator.run())


def outcome_of(result: Result) -> Outcome:
    latencies = sorted(c.normalized_latency for c in result.completed)
    firsts = sorted(c.first_token - c.request.arrival for c in result.completed)
    by_priority: dict[int, list[float]] = {}
    for each in result.completed:
        by_priority.setdefault(each.request.priority, []).append(each.normalized_latency)
    return {
        "requests": len(latencies),
        "latency": statistics.fmean(latencies),
        "latency_p99": percentile(latencies),
        "latency_by_priority": [statistics.fmean(each) for _, each in sorted(by_priority.items())],
        "first_token": statistics.fmean(firsts),
        "first_token_p99": percentile(firsts),
        "pace_p99": pace(result.paces),
        "seconds": result.seconds,
        "steps": result.num_steps,
        "preemptions": result.num_preemptions,
        "batched": result.window.requests / result.window.seconds if result.window.seconds else 0.0,
        "busy_share": result.busy.seconds / result.seconds if result.seconds else 0.0,
        "busy": shares_of(result.busy),
        "window": shares_of(result.window),
    }


def percentile(values: list[float], share: float = 0.99) -> float:
    """Of values in ascending order."""
    return values[min(len(values) - 1, int(share * len(values)))]


def pace(paces: list[tuple[float, int]], share: float = 0.99) -> float:
    """Seconds between two tokens that `share` of all tokens do not exceed."""
    left = (1 - share) * sum(count for _, count in paces)
    for seconds, count in sorted(paces, reverse=True):
        left -= count
        if left < 0:
            return seconds
    return 0.0


def shares_of(integral: Integral) -> dict[str, float]:
    """Means over time: shares of the pool, and of what is saved by sharing in all that would be held without it."""
    pool = integral.tokens + integral.reserved + integral.internal + integral.external + integral.free
    if not pool:
        return {}
    held = pool - integral.free
    names = ("tokens", "reserved", "internal", "external", "free")
    shares = {name: getattr(integral, name) / pool for name in names}
    return {**shares, "filled": integral.tokens / held, "saved": integral.saved / (held + integral.saved)}
