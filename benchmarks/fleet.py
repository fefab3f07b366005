"""Hundreds of replicas behind a router, simulated; and the router by itself, measured.

python -m benchmarks.fleet            # benchmarks/results/fleet/, docs/fleet.md and its plots; continues if stopped
python -m benchmarks.fleet --quick    # a rough version, in build/fleet/
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import fleet_page, fleet_simulator
from benchmarks.fleet_simulator import ANSWER, APPLICATIONS, BLOCK, QUESTION, SYSTEM, THINKING, TURNS, Fleet, Traffic
from benchmarks.paper.cost import ASSUMED, LLAMA_13B_80
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.runs import percentile
from benchmarks.paper.store import Store
from hf_paged.serving.routing import PrefixRouting, Router, make_routing

ROOT = Path(__file__).parents[1]
SETUP = LLAMA_13B_80
POLICIES = ("prefix", "least-loaded", "round-robin")
REPLICA_BLOCKS = SETUP.slots // BLOCK
Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. entry: tokens of an entry of the router's chains; remembered: share of a replica's blocks that
    the router remembers of it."""

    group: str
    hourly: float
    replicas: int
    policy: str
    minutes: float
    variation: float = 1.0
    entry: int = BLOCK
    remembered: float = 1.0
    seed: int = 0

    @property
    def key(self) -> str:
        constants = [TURNS, ANSWER, THINKING, APPLICATIONS, SYSTEM, QUESTION, asdict(SETUP), asdict(ASSUMED)]
        return json.dumps([asdict(self), *constants, fleet_simulator.BUDGET, fleet_simulator.SEATS])

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.hourly, self.minutes, self.minutes / 2, self.variation, self.seed)

    def router(self) -> Router[int]:
        if self.policy != "prefix":
            return make_routing(self.policy)  # type: ignore[arg-type]
        entries = max(1, round(REPLICA_BLOCKS * self.remembered * BLOCK / self.entry))
        weight = 4.0 * BLOCK / self.entry  # as many tokens count as one request as with entries of one block
        return make_routing("prefix", most_blocks=entries, blocks_per_request=weight)


def execute(run: Run) -> Outcome:
    """Latencies in seconds, hit rate as a share of the prompts' tokens."""
    begin = time.process_time()
    requests = fleet_simulator.requests_of(run.traffic, SETUP.longest)
    fleet = Fleet(run.replicas, run.router(), SETUP, tokens=run.entry)
    measured = fleet.run(requests, 60 * run.traffic.warm_up)
    firsts = sorted(measured.first_token)
    return {
        "requests": len(requests),
        "measured": len(firsts),
        "prompt": statistics.fmean(request.input_length for request in requests),
        "answer": statistics.fmean(request.output_length for request in requests),
        "hit_rate": measured.cached_tokens / measured.prompt_tokens,
        "first_token_p50": percentile(firsts, 0.5),
        "first_token_p99": percentile(firsts),
        "latency": statistics.fmean(measured.latency),
        "most_in_flight": measured.most_in_flight,
        "preemptions": measured.preemptions,
        "cpu_seconds": round(time.process_time() - begin, 1),
    }


# -- what is run -------------------------------------------------------------------------------------------------------

SIZES = {
    10_000: (20.0, (2, 3, 4, 10)),
    100_000: (8.0, (14, 16, 18, 22, 30, 100)),
    1_000_000: (6.0, (140, 200, 1000)),
}
"""Requests an hour -> minutes of arrivals, replicas."""
BURSTS = 13.2
BURST_REPLICAS = (22, 30)
CHAINS = ((16, 1.0), (64, 1.0), (256, 1.0), (16, 0.25), (16, 4.0))
CHAINS_REPLICAS = 16
ROUTER_REPLICAS = (10, 100, 1000)


def runs(*, quick: bool = False) -> list[Run]:
    wanted = []
    for hourly, (minutes, counts) in SIZES.items():
        if quick:
            hourly, minutes, counts = hourly // 100, 4.0, [max(1, count // 100) for count in counts][::2]
        wanted += [Run("size", hourly, count, policy, minutes) for count in counts for policy in POLICIES]
    share = 20 if quick else 1
    for count in BURST_REPLICAS[:: 2 if quick else 1]:
        wanted += [Run("bursts", 100_000 / share, -(-count // share), policy, 8.0, BURSTS) for policy in POLICIES]
    few = -(-CHAINS_REPLICAS // share)
    wanted += [Run("chains", 100_000 / share, few, "prefix", 8.0, 1.0, *how) for how in CHAINS]
    return list(dict.fromkeys(wanted))


def all_outcomes(wanted: list[Run], store: Store, workers: int, say: Callable[[str], None]) -> dict[Run, Outcome]:
    """Those that the store has not are simulated, the shortest first."""
    missing = sorted((run for run in wanted if store.get(run.key) is None), key=lambda run: run.hourly * run.minutes)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for index, (run, outcome) in enumerate(zip(missing, pool.map(execute, missing))):
            store.put(run.key, outcome)
            what = f"{run.group}: {run.hourly:,.0f}/h, {run.replicas} replicas, {run.policy}"
            say(f"{index + 1} of {len(missing)}: {what}, {outcome['cpu_seconds']} s")
    outcomes = {run: store.get(run.key) for run in wanted}
    return {run: outcome for run, outcome in outcomes.items() if outcome is not None}


# -- the router by itself ----------------------------------------------------------------------------------------------


def measure_router(policy: str, replicas: int, seconds: float) -> Outcome:
    """Time of a decision, and memory, once the router remembers all that the replicas hold. Runs for about `seconds`
    after that. Conversations go where the router sends them; loads change at random around the same mean."""
    router: Router[int] = make_routing(policy, **({"most_blocks": REPLICA_BLOCKS} if policy == "prefix" else {}))  # type: ignore[arg-type]
    rng = random.Random(0)
    loads = {replica: float(rng.randint(5, 15)) for replica in range(replicas)}
    requests = _endless()
    if isinstance(router, PrefixRouting):  # a conversation stays at its replica
        while sum(map(router.held, loads)) < 0.98 * replicas * REPLICA_BLOCKS:
            for request in itertools.islice(requests, 1000):
                router.sent(fleet_simulator.chain(request), hash(request.conversation) % replicas)
    spent, steps = 0.0, []
    for request in requests:
        entries = fleet_simulator.chain(request)
        begin = time.process_time()
        replica = router.choose(entries, loads).replica
        middle = time.process_time()
        router.sent(entries, replica)
        end = time.process_time()
        loads[replica] += 1
        loads[rng.randrange(replicas)] -= 1
        steps.append((middle - begin, end - middle))
        spent += end - begin
        if spent > seconds:
            break
    choose, send = (statistics.fmean(column) for column in zip(*steps))
    return {
        "policy": policy,
        "replicas": replicas,
        "choose_us": 1e6 * choose,
        "sent_us": 1e6 * send,
        "choose_p99_us": 1e6 * percentile(sorted(step[0] for step in steps)),
        "entries": replicas * REPLICA_BLOCKS if policy == "prefix" else 0,
        "bytes": table_bytes(router) if isinstance(router, PrefixRouting) else 0,
    }


def _endless() -> Iterator[SimRequest]:
    """Requests as those of `requests_of`, without an end."""
    for part in itertools.count():
        for request in fleet_simulator.requests_of(Traffic(100_000, 2.0, 0.0, seed=part)):
            application, conversation = request.conversation.split(".")
            yield replace(request, conversation=f"{application}.{int(conversation) + part * 1_000_000}")


def table_bytes(router: PrefixRouting[int]) -> int:
    """Of the dictionaries of the router, and 32 for the integer of each entry."""
    held, holders = router._held, router._holders
    parts = [held, *held.values(), holders, *holders.values()]
    return sum(map(sys.getsizeof, parts)) + 32 * len(holders)


def measured_routers(seconds: float, replicas: tuple[int, ...]) -> list[Outcome]:
    """Each in a process of its own, one after the other."""
    made = []
    for count in replicas:
        for policy in POLICIES:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                made.append(pool.submit(measure_router, policy, count, seconds).result())
    return made


# -- the command -------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the requests, in build/fleet/")
    parser.add_argument("--workers", type=int, default=1, help="processes that simulate")
    parser.add_argument("--fresh", action="store_true", help="repeat what an earlier call has done")
    parser.add_argument("--no-plots", action="store_true", help="without matplotlib (the extra 'paper')")
    parser.add_argument("--page-only", action="store_true", help="the page of what has been run so far")
    args = parser.parse_args()
    out = ROOT / ("build/fleet" if args.quick else "benchmarks/results/fleet")
    page = out / "fleet.md" if args.quick else ROOT / "docs/fleet.md"
    store, routers = Store(out / "runs.jsonl"), out / "router.json"
    if args.fresh:
        store.path.unlink(missing_ok=True)
        routers.unlink(missing_ok=True)
        store = Store(store.path)
    wanted = runs(quick=args.quick)
    if args.page_only:
        wanted = [run for run in wanted if store.get(run.key) is not None]
    outcomes = all_outcomes(wanted, store, args.workers, lambda line: print(line, flush=True))
    if not routers.exists():
        print("the router by itself", flush=True)
        made = measured_routers(1.0 if args.quick else 4.0, ROUTER_REPLICAS[:2] if args.quick else ROUTER_REPLICAS)
        routers.write_text(json.dumps(made, indent=1) + "\n")
    data = fleet_page.read(outcomes, json.loads(routers.read_text()))
    (out / "fleet.json").write_text(json.dumps(data, indent=1) + "\n")
    if not args.no_plots:
        fleet_page.draw(data, [page.with_suffix("") / "fleet.png", out / "fleet.svg"])
    page.write_text(fleet_page.render(data, page.stem))
    print(fleet_page.summary(data))


if __name__ == "__main__":
    main()
