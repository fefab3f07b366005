"""Statistics of a run: latencies, throughput, goodput. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hf_paged.load.client import Outcome, Run

# name -> (title, what it is). All are in seconds.
METRICS = {
    "ttft": ("TTFT", "from the arrival to the first token"),
    "itl": ("ITL", "between two parts of an answer"),
    "tpot": ("TPOT", "from the first token to the last, for each token after the first"),
    "norm": ("norm. latency", "from the arrival to the end, for each token of the answer"),
    "e2e": ("e2e", "from the arrival to the end"),
}
_NEED_USAGE = {"tpot", "norm"}  # they need the number of tokens
# The usual request, and the slowest of ten and of a hundred.
PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest values, which are at least one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latencies(outcome: Outcome) -> dict[str, float]:
    """The metrics of one complete request but `itl`. Those that need the number of tokens are missing without it."""
    assert outcome.end is not None
    values = {"e2e": outcome.end - outcome.arrival}
    if outcome.pieces:
        values["ttft"] = outcome.pieces[0] - outcome.arrival
    if outcome.completion_tokens:
        values["norm"] = values["e2e"] / outcome.completion_tokens
        if outcome.pieces and outcome.completion_tokens > 1:
            values["tpot"] = (outcome.pieces[-1] - outcome.pieces[0]) / (outcome.completion_tokens - 1)
    return values


def values_of(run: Run) -> dict[str, list[float]]:
    """The values of each metric over the complete requests."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for outcome in run.outcomes:
        if outcome.is_complete:
            for name, value in latencies(outcome).items():
                values[name].append(value)
            values["itl"] += gaps_of(outcome)
    return values


def gaps_of(outcome: Outcome) -> list[float]:
    """The seconds between the parts of an answer."""
    return [later - earlier for earlier, later in pairwise(outcome.pieces)]


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts, rates a second, and `metrics`: name -> mean, p50, p90, p99 and max in seconds (absent: no value).

    Latencies are those of complete requests, from their planned arrival on; `send_lag_p99` is how much later they were
    really sent. goodput: complete requests a second that meet every objective; None without objectives, or where an
    objective needs numbers of tokens that the server has not given. Rates are over the whole run, the end included in
    which few requests are left.
    """

    requests: int
    complete: int
    left: int
    errors: dict[str, int]
    seconds: float
    requests_per_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    tokens_per_s: float | None
    goodput: float | None
    objectives: dict[str, float]
    send_lag_p99: float
    metrics: dict[str, dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(run: Run, objectives: Mapping[str, float] | None = None) -> Summary:
    """objectives: metric -> seconds that a request may take at most (`itl`: the mean of the request)."""
    complete = [outcome for outcome in run.outcomes if outcome.is_complete]
    good = sum(_is_good(outcome, objectives or {}) for outcome in complete)
    # One answer without it would make rates of tokens too small.
    has_usage = all(outcome.completion_tokens is not None for outcome in complete)
    generated = sum(outcome.completion_tokens or 0 for outcome in complete) if has_usage else None
    return Summary(
        requests=len(run.outcomes),
        complete=len(complete),
        left=sum(outcome.has_left for outcome in run.outcomes),
        errors=dict(Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)),
        seconds=run.seconds,
        requests_per_s=len(complete) / run.seconds,
        prompt_tokens=sum(outcome.prompt_tokens or 0 for outcome in complete) if has_usage else None,
        completion_tokens=generated,
        tokens_per_s=None if generated is None else generated / run.seconds,
        goodput=good / run.seconds if objectives and (has_usage or not _NEED_USAGE & set(objectives)) else None,
        objectives=dict(objectives or {}),
        send_lag_p99=percentile([outcome.sent - outcome.arrival for outcome in run.outcomes], 99),
        metrics={name: _statistics(of) for name, of in values_of(run).items() if of},
    )


def _is_good(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    own, gaps = latencies(outcome), gaps_of(outcome)
    if gaps:
        own["itl"] = statistics.fmean(gaps)
    # A metric that a request has no value of, such as ITL of one token, is met.
    return all(own.get(name, 0.0) <= limit for name, limit in objectives.items())


def _statistics(values: list[float]) -> dict[str, float]:
    marks = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"mean": statistics.fmean(values), **marks, "max": max(values)}


def table(summary: Summary) -> str:
    """The summary as text. Times in milliseconds."""
    tokens = "the server gave no usage" if summary.tokens_per_s is None else f"{summary.tokens_per_s:.1f} tokens/s"
    lines = [
        f"{summary.complete} of {summary.requests} requests complete, {summary.left} clients left, "
        f"{sum(summary.errors.values())} errors, in {summary.seconds:.2f} s",
        f"{summary.requests_per_s:.3f} requests/s, {tokens}; sent {summary.send_lag_p99 * 1000:.1f} ms late at most "
        "in 99 of 100 cases",
    ]
    if summary.objectives:
        limits = ", ".join(f"{name} <= {limit * 1000:g} ms" for name, limit in summary.objectives.items())
        known = "is not known" if summary.goodput is None else f"{summary.goodput:.3f} requests/s"
        lines.append(f"goodput {known} with {limits}")
    lines += [f"  {count} x {error}" for error, count in sorted(summary.errors.items(), key=lambda item: -item[1])[:5]]
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines += ["", f"{'ms':<14}" + "".join(f"{column:>11}" for column in columns)]
    for name, (title, _) in METRICS.items():
        if name in summary.metrics:
            lines.append(f"{title:<14}" + "".join(f"{summary.metrics[name][c] * 1000:>11.2f}" for c in columns))
    return "\n".join(lines)
