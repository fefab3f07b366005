"""The page and the plots of the fleet simulation, from its outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.fleet_simulator import ANSWER, APPLICATIONS, BLOCK, BUDGET, QUESTION, SEATS, SYSTEM, THINKING, TURNS
from benchmarks.paper import plots
from hf_paged.serving.routing import MOST_BLOCKS

Data = dict[str, Any]
TARGET = 1.0
"""Seconds within which 99 % of the requests are to have their first token."""
POLICIES = ("prefix", "least-loaded", "round-robin")
MILLION = 1_000_000


def read(outcomes: Mapping[Any, Data], routers: list[Data]) -> Data:
    """`outcomes`: by run. Everything that the page says follows from the result."""
    rows = [asdict(run) | outcome for run, outcome in outcomes.items()]
    groups = {name: [row for row in rows if row["group"] == name] for name in ("size", "bursts", "chains")}
    return {**groups, "needed": needed(groups["size"]), "bursts_needed": needed(groups["bursts"]), "routers": routers}


def needed(rows: list[Data]) -> list[Data]:
    """For each rate and policy, the smallest simulated number of replicas from which on the target is met."""
    found = []
    for hourly in sorted({row["hourly"] for row in rows}):
        for policy in POLICIES:
            tried = sorted(
                (row for row in rows if (row["hourly"], row["policy"]) == (hourly, policy)), key=lambda r: r["replicas"]
            )
            enough: Data | None = None
            for row in reversed(tried):
                if row["first_token_p99"] > TARGET:
                    break
                enough = row
            smallest = tried[0]["replicas"] if tried else None
            found.append({"hourly": hourly, "policy": policy, "row": enough, "smallest": smallest})
    return found


# -- plots -------------------------------------------------------------------------------------------------------------


def draw(data: Data, paths: list[Path]) -> None:
    plt = plots.pyplot()
    rates = sorted({row["hourly"] for row in data["size"]})[-2:]
    figure, axes = plt.subplots(1, len(rates) + 1, figsize=(4.2 * (len(rates) + 1), 3.4), squeeze=False)
    for hourly, axis in zip(rates, axes.flat):
        rows = [row for row in data["size"] if row["hourly"] == hourly]
        _lines(axis, rows, "first_token_p99")
        axis.axhline(TARGET, color="#999999", linestyle=":", linewidth=1)
        axis.set_yscale("log")
        axis.set_title(f"{hourly:,.0f} requests an hour", fontsize=9)
        axis.set_ylabel("time to first token, p99, s")
    last = axes.flat[len(rates)]
    _lines(last, [row for row in data["size"] if row["hourly"] == rates[-1]], "hit_rate", 100)
    last.set_title(f"{rates[-1]:,.0f} requests an hour", fontsize=9)
    last.set_ylabel("prompt tokens found in the cache, %")
    last.set_ylim(0, 100)
    figure.suptitle("A fleet of replicas (simulated)", fontsize=10)
    figure.tight_layout()
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _lines(axis: Any, rows: list[Data], name: str, factor: float = 1) -> None:
    for policy, colour, marker in zip(POLICIES, ("#0072B2", "#E69F00", "#D55E00"), "o^v"):
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["replicas"])
        values = [factor * row[name] for row in own]
        axis.plot([row["replicas"] for row in own], values, color=colour, marker=marker, markersize=4, label=policy)
    counts = sorted({row["replicas"] for row in rows})
    axis.set_xscale("log")
    axis.set_xticks(counts, map(str, counts))
    axis.set_xticks([], minor=True)
    axis.set_xlabel("replicas")
    axis.legend(fontsize=7)


# -- the page ----------------------------------------------------------------------------------------------------------


def render(data: Data, stem: str) -> str:
    parts = [
        *_what(data), *_cost(data, stem), *_hits(data), *_bursts(data), *_router(data), *_chains(data), *_limits(),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _what(data: Data) -> list[str]:
    one = max(data["size"], key=lambda row: row["requests"])
    return [
        "# A fleet of replicas, simulated",
        "<!-- Written by benchmarks/fleet.py. Do not edit. -->",
        "Estimate how many [replicas](ray.md) a load needs, and what routing by prefix saves. A simulation makes this "
        "page from a clone (extra `paper` for the plots; no GPU):",
        "```bash\n.venv/bin/python -m benchmarks.fleet --quick   # a hundredth of the requests, in build/fleet\n```",
        "Every replica is hf_paged's own scheduler, block manager and prefix cache on a virtual clock, as on "
        "[the paper's page](paper.md#assumptions): LLaMA-13B on one A100 with 80 GB, 60,000 tokens of K/V, steps of at "
        f"most {BUDGET:,} tokens and {SEATS} sequences. The router is the server's (`hf_paged/serving/routing.py`). It "
        "knows at once how many requests each replica has in flight. Nothing here has been measured on a GPU or in a "
        "cluster.",
        f"Requests are turns of conversations: a system prompt of {SYSTEM} tokens, which the conversations of one of "
        f"{APPLICATIONS} applications share (Zipf), then all that was said before, and a question of {QUESTION} tokens "
        "on average. Answers have the lengths of Azure's conversations of 2023 "
        "(Azure/AzurePublicDataset, as fitted in `hf_paged/load/workloads.py`), and question lengths are chosen so "
        "that the average prompt has Azure's length (1,155 tokens; here "
        f"{one['prompt']:,.0f}, answers {one['answer']:.0f}). That a trace without names of conversations consists of "
        f"1 to {TURNS} turns each, {ANSWER:g} s and {THINKING:g} s more on average apart, is an assumption, and hit "
        "rates depend on it. Conversations begin as a Poisson process. One seed.",
        "Arrivals last "
        + ", ".join(
            f"{minutes:g} minutes at {hourly:,.0f} requests an hour"
            for hourly, minutes in sorted({(row["hourly"], row["minutes"]) for row in data["size"]})
        )
        + "; the first half is not measured. A conversation takes up to 5 minutes, so in the shortest runs caches fill "
        "and the queues of an overloaded fleet grow until the end: hit rates are a little too low there, and times "
        "to the first token of too few replicas too short. "
        f"At most {max(row['replicas'] for row in data['size']):,} replicas were simulated together.",
    ]


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _enough(entry: Data) -> str:
    row = entry["row"]
    if entry["smallest"] is None:
        return "not simulated"
    if row is None:
        return "more than simulated"
    few = "at most " if row["replicas"] == entry["smallest"] else ""
    return f"{few}{row['replicas']}"


def _cost(data: Data, stem: str) -> list[str]:
    rows = []
    for hourly in sorted({entry["hourly"] for entry in data["needed"]}):
        own = {entry["policy"]: entry for entry in data["needed"] if entry["hourly"] == hourly}
        rows.append([f"{hourly:,.0f}", *(_enough(own[policy]) for policy in POLICIES)])
    text = (
        f"Replicas that are needed so that 99 % of the requests have their first token within {TARGET:g} s, of the "
        "numbers that were simulated. As each of them runs all the time, this is also the cost in replica-hours for "
        "an hour of requests."
    )
    parts = ["## Cost", text, _table(["requests an hour", *POLICIES], rows)]
    rows = [
        [
            f"{row['hourly']:,.0f}", str(row["replicas"]), row["policy"], f"{row['hit_rate']:.1%}",
            f"{row['first_token_p50']:.3f}", f"{row['first_token_p99']:.3g}", f"{row['latency'] * 1000:.1f}",
            str(row["most_in_flight"]), str(row["preemptions"]),
        ]
        for row in data["size"]
    ]  # fmt: skip
    head = [
        "requests an hour", "replicas", "router", "hit rate", "first token p50, s", "p99, s",
        "ms for each output token", "most in flight at a replica", "preemptions",
    ]  # fmt: skip
    return [*parts, f"![First token and hit rate over the number of replicas]({stem}/fleet.png)", _table(head, rows)]


def _of(rows: list[Data], **wanted: Any) -> Data | None:
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), None)


def _hits(data: Data) -> list[str]:
    hourly = max(row["hourly"] for row in data["size"])
    counts = sorted({row["replicas"] for row in data["size"] if row["hourly"] == hourly})
    sentences = []
    for count in (counts[0], counts[-1]):
        found = {p: _of(data["size"], hourly=hourly, replicas=count, policy=p) for p in POLICIES}
        if any(found.values()):
            values = ", ".join(f"{row['hit_rate']:.0%} ({policy})" for policy, row in found.items() if row)
            sentences.append(f"With {count} replicas at {hourly:,.0f} requests an hour: {values}.")
    return [
        "## Hit rate",
        "The share of the prompts' tokens that a replica finds in its cache. Without any limit of memory and with one "
        f"replica it would be about {1 - (QUESTION + BLOCK / 2) / 1155:.0%}: all but the question and part of a block. "
        "Without knowledge of prefixes, a turn finds its conversation only if it comes to the same replica by chance; "
        "the system prompts are found nearly everywhere. " + " ".join(sentences),
    ]


def _bursts(data: Data) -> list[str]:
    if not data["bursts"]:
        return []
    rows = [
        [str(row["replicas"]), row["policy"], f"{row['hit_rate']:.1%}", f"{row['first_token_p99']:.3g}"]
        for row in data["bursts"]
    ]
    variation, hourly = data["bursts"][0]["variation"], data["bursts"][0]["hourly"]
    return [
        "## Bursts",
        f"The same at {hourly:,.0f} requests an hour, where the times between conversations have a standard deviation "
        f"of {variation:g} times the mean, as those of Azure's code completions.",
        _table(["replicas", "router", "hit rate", "first token p99, s"], rows),
    ]


def _router(data: Data) -> list[str]:
    rows = []
    for one in data["routers"]:
        total = one["choose_us"] + one["sent_us"]
        rows.append([
            str(one["replicas"]), one["policy"], f"{one['choose_us']:.0f}", f"{one['choose_p99_us']:.0f}",
            f"{one['sent_us']:.0f}", f"{1e6 / total:,.0f}", f"{3600 / total:.3g}",
            f"{one['entries']:,}" if one["entries"] else "", f"{one['bytes'] / 2**20:,.0f}" if one["entries"] else "",
        ])  # fmt: skip
    head = [
        "replicas", "router", "choice, us", "p99", "note where it went, us", "decisions a second",
        "millions an hour", "entries remembered", "MiB",
    ]  # fmt: skip
    parts = [
        "## Where the router or its table breaks",
        "The router alone, in one Python process, once it remembers as many blocks as the replicas hold. CPU time of "
        "one core, shared with other programs; memory as `sys.getsizeof` counts it.",
        _table(head, rows),
    ]
    largest = max((one for one in data["routers"] if one["policy"] == "prefix"), key=lambda one: one["replicas"])
    hourly = 3600 / (largest["choose_us"] + largest["sent_us"]) * MILLION
    each = largest["bytes"] / largest["entries"]
    table = each * largest["replicas"] * MOST_BLOCKS / 2**30
    parts.append(
        f"With {largest['replicas']:,} replicas one process decides {hourly / MILLION:.2g} million times an hour, so a "
        f"million requests an hour load it to {MILLION / hourly:.0%}. An entry takes {each:.0f} bytes: "
        f"{largest['bytes'] / 2**30:.2g} GiB for what these replicas hold, and {table:.2g} GiB if the router "
        f"remembers its default of {MOST_BLOCKS:,} blocks of each. So the table breaks first, and every process that "
        "routes has a table of its own. What it takes: `most_blocks` as large as a replica's pool and not larger; "
        "chains with one entry for several blocks (below); a number of routing processes that each see whole "
        "conversations. A choice looks at every replica; beyond a few thousand of them, two levels are needed: a "
        "router that chooses a group, and one in each group."
    )
    return parts


def _chains(data: Data) -> list[str]:
    if not data["chains"]:
        return []
    rows = [
        [str(row["entry"]), f"{row['remembered']:g}", f"{row['hit_rate']:.1%}", f"{row['first_token_p99']:.3g}"]
        for row in data["chains"]
    ]
    first = data["chains"][0]
    return [
        "## How exact must the table be?",
        f"{first['hourly']:,.0f} requests an hour, {first['replicas']} replicas, routing by prefix. With 256 tokens to "
        "an entry the table is a sixteenth as large.",
        _table(["tokens of an entry", "remembered / a replica's blocks", "hit rate", "first token p99, s"], rows),
    ]


def _limits() -> list[str]:
    return [
        "## What is not in it",
        "Times of the network, of tokenization and of HTTP; a router whose loads are old, and several routers that do "
        "not know of one another's requests; replicas that start, fail or are scaled; adapters. A step's time is that "
        "of the cost model, whose assumptions are on the paper's page. Real traces may repeat prompts in other ways "
        "than conversations do.",
    ]


def summary(data: Data) -> str:
    return "\n".join(f"{entry['hourly']:,.0f}/h, {entry['policy']}: {_enough(entry)}" for entry in data["needed"])
