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
    "swap out": ("#009E73", "v", "swap out"),
    "in": ("#0072B2", "o", "prompts"),
    "out": ("#D55E00", "s", "outputs"),
    "contiguous": ("#D55E00", "s", "contiguous (torch)"),
    "ratio": ("#0072B2", "o", "paged / contiguous"),
    "swap out and in": ("#D55E00", "s", "swap out and in"),
    "orca-oracle": ("#009E73", "s", "Orca (Oracle)"),
    "orca-pow2": ("#E69F00", "^", "Orca (Pow2)"),
    "orca-max": ("#D55E00", "v", "Orca (Max)"),
    "faster-transformer": ("#CC79A7", "x", "FasterTransformer"),
}
STYLES |= {f"{width} samples": ("#0072B2", "o", f"{width} samples") for width in (2, 4, 6)}
STYLES |= {f"{width} beams": ("#D55E00", "s", f"{width} beams") for width in (2, 4, 6)}
STYLES |= {"sharegpt": ("#0072B2", "o", "ShareGPT"), "alpaca": ("#D55E00", "s", "Alpaca")}
OTHERS = ("#000000", "#56B4E9", "#F0E442", "#0072B2", "#D55E00", "#009E73")
KINDS = {
    "tokens": ("#0072B2", "", "tokens"),
    "reserved": ("#56B4E9", "//", "reserved"),
    "internal": ("#E69F00", "..", "internal fragmentation"),
    "external": ("#999999", "xx", "external fragmentation, others"),
    "parameters": ("#999999", "", "parameters"),
    "K/V cache": ("#0072B2", "//", "K/V cache"),
    "others": ("#E69F00", "..", "others"),
}
PAPER = {"linestyle": "--", "linewidth": 1, "markerfacecolor": "white", "markersize": 4, "alpha": 0.8}


class PlotsMissing(ValueError):
    """matplotlib is not installed."""


def pyplot() -> Any:
    """matplotlib.pyplot without a display. Raises PlotsMissing that names the extra."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsMissing("plots need matplotlib: pip install -e '.[paper]', or give --no-plots") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "hf-paged"  # the same file from the same data
    import matplotlib.pyplot as plt

    return plt


def draw(name: str, title: str, data: Data, paths: list[Path]) -> None:
    """Draw one figure and write it to each of `paths`, in the format of its suffix."""
    plt = pyplot()
    panels = data["panels"]
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(max(4.4 * columns, 8.0), 3.2 * rows + 0.6), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(panels, axes.flat):
        one_panel(panel, axis, data)
    heading = f"Figure {name}: {title}" if name[0].isdigit() else title
    bottom = legend(figure, axes.flat, 0.6 + 3.2 * rows)
    figure.suptitle(heading, fontsize=10)
    figure.tight_layout(rect=(0, bottom, 1, 1))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def one_panel(panel: Data, axis: Any, data: Data) -> None:
    if "stack" in panel:
        stacked(panel, axis)
    elif "bars" in panel:
        bars(panel, axis)
    else:
        lines(panel, axis, data)
    axis.set_title(panel["title"], fontsize=9)
    axis.set_xlabel(panel.get("xlabel", "requests/s" if "series" in panel else ""))
    axis.set_ylabel(panel.get("ylabel", "normalized latency, s/token"))


def legend(figure: Any, axes: Any, height: float) -> float:
    """One for all panels, below them, where it hides nothing. Returns the share of the height that it takes."""
    entries = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    columns = min(len(entries), 4 if height < 6 else 6)
    if not entries:
        return 0.0
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=columns, fontsize=7)
    return (0.12 + 0.17 * -(-len(entries) // columns)) / height


def style(system: str, index: int) -> tuple[str, str, str]:
    return STYLES.get(system, (OTHERS[index % len(OTHERS)], "osv^xD"[index % 6], system))


def lines(panel: Data, axis: Any, data: Data) -> None:
    """Medians with bands of the seeds; the paper's points are hollow, with dashed lines."""
    for index, series in enumerate(panel["series"]):
        colour, marker, label = style(series["system"], index)
        paper = series.get("paper")
        if "edges" in series:
            axis.stairs(series["median"], series["edges"], color=colour, alpha=0.4, fill=True, label=label)
            axis.stairs(paper, series["edges"], color=colour, linewidth=0.8, label=f"{label}, the paper")
            continue
        axis.plot(series["x"], series["median"], color=colour, marker=marker, markersize=4, label=label)
        if paper:
            axis.plot(paper["x"], paper["y"], color=colour, marker=marker, label=f"{label}, the paper", **PAPER)
        if "low" in series:
            axis.fill_between(series["x"], series["low"], series["high"], color=colour, alpha=0.2, linewidth=0)
    if panel.get("log_y"):
        axis.set_yscale("log")
    elif "limit" in panel:
        axis.axhline(panel["limit"], color="#999999", linestyle=":", linewidth=1)
        axis.set_ylim(0, panel["limit"] * 3)
    else:
        axis.set_ylim(bottom=panel.get("bottom", 0))
    if "right" in panel:
        axis.set_xlim(right=panel["right"])
    if "ticks" in panel or data.get("log_x"):
        ticks = panel.get("ticks") or panel["series"][0]["x"]
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()


def bars(panel: Data, axis: Any) -> None:
    """Bars side by side with the range of the seeds; a line across a bar is the paper's value."""
    labels = []
    for index, (system, value) in enumerate(panel["bars"].items()):
        colour, _, label = style(system, index)
        error = [[value["median"] - value["low"]], [value["high"] - value["median"]]]
        axis.bar(index, value["median"], color=colour, yerr=error, capsize=3)
        labels.append(f"{label}\n{value['median']:.1f}")
        if "paper" in value:
            ends = (index - 0.45, index + 0.45)
            axis.hlines(value["paper"], *ends, colors="black", linewidth=1.5, zorder=3, label="the paper")
            labels[-1] += f"\npaper {value['paper']:.1f}"
    axis.set_xticks(range(len(labels)), labels, fontsize=7)


def stacked(panel: Data, axis: Any) -> None:
    """One bar for each system, and the paper's beside it, paler."""
    systems = list(panel["stack"])
    for side, alpha, shift in (("stack", 1.0, -0.2), ("paper", 0.5, 0.2)):
        bottom = [0.0] * len(systems)
        for kind, (colour, hatch, label) in KINDS.items():
            heights = [panel[side].get(system, {}).get(kind, 0.0) for system in systems]
            if not any(heights):
                continue
            places = [index + shift for index in range(len(systems))]
            named = f"{label}, the paper" if side == "paper" else label
            axis.bar(
                places, heights, 0.38, bottom, color=colour, hatch=hatch, label=named, edgecolor="white", alpha=alpha
            )
            bottom = [b + h for b, h in zip(bottom, heights)]
    labels = [style(system, 0)[2] for system in systems] if len(systems) > 1 else [""]
    axis.set_xticks(range(len(systems)), labels, fontsize=8)
