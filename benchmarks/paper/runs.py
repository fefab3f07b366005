"""One simulation of a figure as data: what to run, its outcome, and a file of outcomes that a later call continues."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.beams import TOP_PROBABILITY
from benchmarks.paper.cost import ASSUMED, SETUPS, cost_of
from benchmarks.paper.policies.interface import Policy
from benchmarks.paper.policies.orca import Orca
from benchmarks.paper.policies.paged import Paged
from benchmarks.paper.policies.static import Static
from benchmarks.paper.requests import (
    CHAT_ROUNDS,
    TRANSLATION_INPUT,
    TRANSLATION_OUTPUT,
    TRANSLATION_SIGMA,
    Kind,
    SimRequest,
    apart,
    chat,
    poisson,
    translation,
)
from benchmarks.paper.simulator import Integral, Result, Simulator
from benchmarks.workloads import WORKLOADS
from hf_paged.config import SchedulerConfig

Outcome = dict[str, Any]
BASELINES = ("orca-oracle", "orca-pow2", "orca-max")
PREEMPTION = {"ours": "auto", "ours-swap": "swap", "ours-recompute": "recompute", "ours-unshared": "auto"}


@dataclass(frozen=True, slots=True)
class Run:
    """policy: "ours", "ours-swap", "ours-recompute", "ours-unshared", "orca-max", "orca-pow2", "orca-oracle" or
    "faster-transformer". rate: requests a second; minutes: length of the trace; prefix: tokens shared by all prompts.
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

    @property
    def key(self) -> str:
        """Everything that the outcome depends on but the code."""
        assumed: list[object] = [asdict(SETUPS[self.setup]), asdict(ASSUMED)]
        if self.workload == "chat":
            assumed.append(CHAT_ROUNDS)
        elif self.workload == "translation":
            assumed.append([TRANSLATION_INPUT, TRANSLATION_OUTPUT, TRANSLATION_SIGMA])
        else:
            assumed.append([asdict(lengths) for lengths in WORKLOADS[self.workload]])
        if self.kind == "beams":
            assumed.append(TOP_PROBABILITY)
        return json.dumps([asdict(self), *assumed])

    def requests(self) -> list[SimRequest]:
        count = max(2, round(self.rate * 60 * self.minutes))
        if self.workload == "chat":
            return chat(count, self.rate, self.seed)
        if self.workload == "translation":
            return translation(count, self.rate, self.seed, self.prefix)
        made = poisson(self.workload, count, self.rate, self.seed, kind=self.kind, width=self.width)
        return apart(made) if self.policy == "ours-unshared" else made


def policy_for(run: Run, requests: list[SimRequest]) -> Policy:
    capacity, outputs = SETUPS[run.setup].slots, {r.request_id: r.output_length for r in requests}
    shares = run.prefix > 0 and run.policy != "ours-unshared"
    preemption: Any = PREEMPTION.get(run.policy, "auto")
    config = SchedulerConfig(max_num_batched_tokens=8192, prefix_caching=shares, preemption=preemption)
    if run.policy == "faster-transformer":
        return Static(config, capacity, outputs)
    if run.policy.startswith("orca-"):
        return Orca(config, capacity, outputs, reserve=run.policy.removeprefix("orca-"))
    finals = {r.request_id: r.final_length for r in requests}
    return Paged(config, capacity, finals, block_size=run.block_size, name=run.policy)


def execute(run: Run) -> Outcome:
    """Simulate it. Latencies in seconds for each token, shares of the pool, counts."""
    requests = run.requests()
    policy = policy_for(run, requests)
    is_paged = isinstance(policy, Paged)
    cost = cost_of(SETUPS[run.setup]).with_kv_factor(ASSUMED.kv_factor(run.block_size if is_paged else None))
    simulator = Simulator(
        policy,
        cost,
        requests,
        block_size=run.block_size,
        seed=run.seed,
        warm_up=requests[-1].arrival * 0.1,
        measure_every=8 if run.width > 1 or run.prefix else 1,
    )
    return outcome_of(simulator.run())


def outcome_of(result: Result) -> Outcome:
    latencies = sorted(c.normalized_latency for c in result.completed)
    return {
        "requests": len(latencies),
        "latency": statistics.fmean(latencies),
        "latency_p99": latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
        "seconds": result.seconds,
        "steps": result.num_steps,
        "preemptions": result.num_preemptions,
        "batched": result.window.requests / result.window.seconds if result.window.seconds else 0.0,
        "busy_share": result.busy.seconds / result.seconds if result.seconds else 0.0,
        "busy": shares_of(result.busy),
        "window": shares_of(result.window),
    }


def shares_of(integral: Integral) -> dict[str, float]:
    """Means over time: shares of the pool, and of what is saved by sharing in all that would be held without it."""
    pool = integral.tokens + integral.reserved + integral.internal + integral.external + integral.free
    if not pool:
        return {}
    held = pool - integral.free
    names = ("tokens", "reserved", "internal", "external", "free")
    shares = {name: getattr(integral, name) / pool for name in names}
    return {**shares, "filled": integral.tokens / held, "saved": integral.saved / (held + integral.saved)}


class Store:
    """Outcomes by run, one JSON line each, appended as they are made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    key, outcome = json.loads(line)
                except ValueError:
                    continue  # the line that an interrupted call left
                self._known[key] = outcome

    def get(self, key: str) -> Outcome | None:
        return self._known.get(key)

    def put(self, key: str, outcome: Outcome) -> None:
        self._known[key] = outcome
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps([key, outcome]) + "\n")

    def all(self, runs: Iterable[Run], progress: Callable[[Run], None]) -> dict[Run, Outcome]:
        """The outcome of each run, from the file or simulated now."""
        outcomes: dict[Run, Outcome] = {}
        for run in runs:
            outcome = self.get(run.key)
            if outcome is None:
                progress(run)
                outcome = execute(run)
                self.put(run.key, outcome)
            outcomes[run] = outcome
        return outcomes
