"""Draws the figures. Needs matplotlib (the extra `paper`), which is imported when the first figure is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Data = dict[str, Any]
# The colours of Okabe and Ito, which remain distinct in every common kind of colour blindness; markers differ too.
STYLES = {
    "ours": ("#0072B2", "o", "ours (paged)"),
    "ours-unshared": ("#E69F00", "^", "ours, without prefix cache"),
    "ours-tiles": ("#009E73", "s", "ours, with prefix tiles"),
    "urgent": ("#009E73", "s", "urgent"),
    "others": ("#D55E00", "v", "others"),
    "without priorities": ("#0072B2", "o", "without priorities"),
    "ours-recompute": ("#0072B2", "o", "recompute"),
    "recompute": ("#0072B2", "o", "recompute"),
    "ours-swap": ("#D55E00", "s", "swap"),
    "swap in": ("#E69F00", "^", "swap in"),
    "swap out and in": ("#D55E00", "s", "swap out and in"),
    "orca-oracle": ("#009E73", "s", "Orca (Oracle)"),
    "orca-pow2": ("#E69F00", "^", "Orca (Pow2)"),
    "orca-max": ("#D55E00", "v", "Orca (Max)"),
    "faster-transformer": ("#CC79A7", "x", "FasterTransformer"),
}
OTHERS = ("#000000", "#56B4E9", "#F0E442", "#0072B2", "#D55E00", "#009E73")
KINDS = {
    "tokens": ("#0072B2", "", "token states"),
    "reserved": ("#56B4E9", "//", "reserved"),
    "internal": ("#E69F00", "..", "internal fragmentation"),
    "external": ("#999999", "xx", "external fragmentation, others"),
}


class PlotsMissing(ValueError):
    """matplotlib is not installed."""


def pyplot() -> Any:
    """matplotlib.pyplot without a display. Raises PlotsMissing that names the extra."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsMissing("plots need matplotlib: pip install 'hf-paged[paper]', or give --no-plots") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hf-paged"  # the same file from the same data
    import matplotlib.pyplot as plt

    return plt


def draw(name: str, title: str, data: Data, paths: list[Path]) -> None:
    """Draw one figure and write it to each of `paths`, in the format of its suffix."""
    plt = pyplot()
    if "bars" in data:
        figure = stacked(plt, data)
    elif "groups" in data:
        figure = grouped(plt, data)
    else:
        figure = lines(plt, data)
    figure.suptitle(f"Figure {name}: {title}" if name[0].isdigit() else title, fontsize=10)
    figure.tight_layout()
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def style(system: str, index: int) -> tuple[str, str, str]:
    return STYLES.get(system, (OTHERS[index % len(OTHERS)], "osv^xD"[index % 6], system))


def lines(plt: Any, data: Data) -> Any:
    """One panel for each entry of data["panels"]; medians with bands of the seeds."""
    panels = data["panels"]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(panels, axes.flat):
        for index, series in enumerate(panel["series"]):
            colour, marker, label = style(series["system"], index)
            axis.plot(series["x"], series["median"], color=colour, marker=marker, markersize=4, label=label)
            if "low" in series:
                axis.fill_between(series["x"], series["low"], series["high"], color=colour, alpha=0.2, linewidth=0)
        if "limit" in panel:
            axis.axhline(panel["limit"], color="#999999", linestyle=":", linewidth=1)
            axis.set_ylim(0, panel["limit"] * 3)
        else:
            axis.set_ylim(bottom=0)
        if data.get("log_x"):
            axis.set_xscale("log", base=2)
        axis.set_title(panel["title"], fontsize=9)
        axis.set_xlabel(panel.get("xlabel", "requests/s"))
        axis.set_ylabel(panel.get("ylabel", "normalized latency, s/token"))
        axis.legend(fontsize=7)
    return figure


def grouped(plt: Any, data: Data) -> Any:
    """Bars side by side with the range of the seeds."""
    groups = data["groups"]
    figure, axes = plt.subplots(1, len(groups), figsize=(4.4 * len(groups), 3.4), squeeze=False)
    for (title, bars), axis in zip(groups.items(), axes.flat):
        for index, (system, value) in enumerate(bars.items()):
            colour, _, label = style(system, index)
            error = [[value["median"] - value["low"]], [value["high"] - value["median"]]]
            axis.bar(index, value["median"], color=colour, yerr=error, capsize=3)
            axis.text(index, value["median"], f" {value['median']:.1f}", ha="left", va="bottom", fontsize=7)
            bars[system]["label"] = label
        axis.set_xticks(range(len(bars)), [value["label"] for value in bars.values()], fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(data["ylabel"])
    return figure


def stacked(plt: Any, data: Data) -> Any:
    """Figure 2: shares of the pool, one bar for each system."""
    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    systems = list(data["bars"])
    bottom = [0.0] * len(systems)
    for kind, (colour, hatch, label) in KINDS.items():
        heights = [100 * data["bars"][system][kind]["median"] for system in systems]
        axis.bar(range(len(systems)), heights, bottom=bottom, color=colour, hatch=hatch, label=label, edgecolor="white")
        bottom = [b + h for b, h in zip(bottom, heights)]
    axis.set_xticks(range(len(systems)), [style(system, 0)[2] for system in systems], fontsize=8)
    axis.set_ylabel("K/V memory, %")
    axis.legend(fontsize=7, loc="lower right")
    return figure
