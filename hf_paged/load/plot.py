"""Plots of a run, with matplotlib."""

from __future__ import annotations

from pathlib import Path

from hf_paged.load.client import Run
from hf_paged.load.report import METRICS, values_of


def draw(run: Run, path: Path, title: str) -> None:
    """Distributions of the latencies, and the requests in flight over time. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    values = values_of(run)
    shown = [name for name in ("ttft", "itl", "norm", "e2e") if values[name]]
    figure = Figure(figsize=(3.2 * (len(shown) + 1), 3.2), layout="constrained")
    axes = figure.subplots(1, len(shown) + 1, squeeze=False)[0]
    # Distributions, because means hide the few that waited long.
    for axis, name in zip(axes, shown):
        ordered = sorted(values[name])
        axis.plot(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], drawstyle="steps-post")
        axis.set(xlabel=f"{METRICS[name][0]}, s", ylim=(0, 1), xlim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests")
    changes = sorted(
        [(outcome.sent, 1) for outcome in run.outcomes]
        + [(outcome.end, -1) for outcome in run.outcomes if outcome.end is not None]
    )
    times, counts, count = [0.0], [0], 0
    for at, change in changes:
        count += change
        times.append(at)
        counts.append(count)
    axes[-1].plot(times, counts, drawstyle="steps-post")
    axes[-1].set(xlabel="time, s", ylabel="requests in flight", xlim=(0, None), ylim=(0, None))
    axes[-1].grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path)
