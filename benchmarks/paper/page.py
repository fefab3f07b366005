"""Writes docs/paper.md: each figure beside the paper's values, with every difference and its reason."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.paper.beams import TOP_PROBABILITY
from benchmarks.paper.beyond import BEYOND
from benchmarks.paper.cost import ASSUMED, SETUPS
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.reading import LATENCY_FACTOR
from benchmarks.paper.requests import CHAT_ROUNDS, TRANSLATION_INPUT, TRANSLATION_OUTPUT, TRANSLATION_SIGMA
from benchmarks.paper.store import FAR

Data = dict[str, Any]
_WORDS = Path(__file__).with_name("notes.md").read_text().removeprefix("=== ")
NOTES = dict(note.split("\n", 1) for note in _WORDS.split("\n=== "))
"""The words of the page by what they are about. Each says how to read a figure and why a value differs."""
ORDER = ("2", "12", "13", "14", "15", "16", "17", "18", "18b", "19")


def render(data: dict[str, Data], folder: str) -> str:
    """The page. data: by figure; `folder` holds the plots, relative to the page."""
    titles = {figure.name: figure.title for figure in (*FIGURES, *BEYOND)}
    titles |= {"18": "Kernel latency over block sizes", "adapters": "Adapters"}
    parts = [NOTES["introduction"].format(factor=LATENCY_FACTOR) + "\n"]
    if "speed" in data:
        parts.append(data["speed"]["sentence"] + _machine(data["speed"]) + "\n")
    parts.append(_summary(data))
    for name in [name for name in ORDER if name in data]:
        parts.append(f"## Figure {name}: {titles[name]}\n\n![Figure {name}]({folder}/figure-{name}.png)\n")
        parts.append(_table(data[name]["checks"]))
        parts.append(NOTES[name] + _seeds(data[name]) + _machine(data[name]) + "\n")
    beyond = [name for name in (*(figure.name for figure in BEYOND), "adapters") if name in data]
    if beyond:
        parts.append("## Beyond the paper\n\n" + NOTES["beyond"] + "\n")
    for name in beyond:
        said = data[name]["sentence"] + _seeds(data[name]) + _machine(data[name])
        parts.append(f"**{titles[name]}.** {said}\n\n![{titles[name]}]({folder}/figure-{name}.png)\n")
    if "real" in data:
        parts.append(_real(data["real"]))
    if "fit" in data:
        parts.append(_fit(data["fit"]))
    parts.append(_assumptions())
    if "assumptions" in data:
        parts.append("## What the assumptions change\n\n" + NOTES["assumptions"] + "\n")
        table = data["assumptions"]["table"]
        parts.append(_lines(table["head"], table["rows"]))
    return "\n".join(parts)


def _lines(head: list[str], rows: list[list[Any]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells) + "\n"


def _seeds(data: Data) -> str:
    text = (
        f" Medians of {data['seeds']} seeds." if data.get("seeds", 1) > 1 else " One seed." if "seeds" in data else ""
    )
    return text + (f" Rough: {data['share']:.0%} of each trace." if data.get("share", 1) < 1 else "")


def _summary(data: dict[str, Data]) -> str:
    """Which of the paper's values are met, and a line for each that is not."""
    checks = [(name, row) for name in ORDER if name in data for row in data[name]["checks"]]
    different = [(name, row) for name, row in checks if not row["agrees"]]
    if not checks:
        return ""
    text = f"{len(checks) - len(different)} of {len(checks)} values agree with the paper"
    text += ". These differ; the reasons are under each figure:\n" if different else ".\n"
    if not different:
        return text
    rows = [[name, row["what"], _paper(row), _ours(row), _difference(row)] for name, row in different]
    return text + "\n" + _lines(["figure", "value", "paper", "here", "difference"], rows)


def _table(checks: list[Data]) -> str:
    rows = [[row["what"], _paper(row), _ours(row), _difference(row)] for row in checks]
    return _lines(["", "paper", "here", "difference"], rows)


def _unit(row: Data) -> str:
    return row["unit"] if row["unit"] in ("", "x") else f" {row['unit']}"


def _paper(row: Data) -> str:
    paper = row["paper"]
    return f"{paper:g}{_unit(row)}" if isinstance(paper, (int, float)) else f"{paper}{_unit(row)}"


def _ours(row: Data) -> str:
    return f"{row['ours']:.3g}{_unit(row)}" if row["ours"] else "not sustained"


def _difference(row: Data) -> str:
    paper, ours = row["paper"], row["ours"]
    if not ours:
        return ""
    if isinstance(paper, (int, float)):
        text = f"{ours - paper:+.1f} points" if row["unit"] == "%" else f"{ours / paper - 1:+.0%}"
    elif row["agrees"]:
        text = ""
    else:
        bound = row["within"][0] if ours < row["within"][0] else row["within"][1]
        text = f"{ours / bound - 1:+.0%} from {bound:g}"
    return text if row["agrees"] else f"**{text}**"


def _machine(data: Data) -> str:
    machine = data.get("machine")
    if not machine:
        return ""
    before, after = machine["load_average"]
    return (
        f" Measured on one core of {machine['cores']}, {machine['cpu']}; load average {before:g} before and {after:g} "
        f"after, {machine['cpu_seconds']:g} CPU seconds in {machine['seconds']:g} s."
    )


def _assumptions() -> str:
    setups = [
        [
            setup.name,
            f"{setup.parameters / 1e9:.4g}",
            setup.gpus,
            f"{setup.bandwidth / 1e12:g}",
            f"{setup.flops / 1e12:g}",
            f"{setup.slots:,}",
        ]
        for setup in SETUPS.values()
    ]
    head = ["", "10^9 parameters", "GPUs", "TB/s of a GPU", "10^12 fp16/s of a GPU", "K/V slots"]
    assumed = ", ".join(f"`{field.name}` {getattr(ASSUMED, field.name):g}" for field in fields(ASSUMED))
    inputs = {name: workloads.WORKLOADS[name] for name in ("sharegpt", "alpaca")}
    sigmas = "; ".join(f"{name} {i.sigma:g} in, {o.sigma:g} out" for name, (i, o) in inputs.items())
    means = "; ".join(f"{name} {i.mean:g} in, {o.mean:g} out" for name, (i, o) in inputs.items())
    text = NOTES["lengths"].format(
        means=means,
        sigmas=sigmas,
        translation=f"{TRANSLATION_INPUT} in, {TRANSLATION_OUTPUT} out, sigma {TRANSLATION_SIGMA:g}",
        beta=TOP_PROBABILITY,
        far=FAR,
        rounds=CHAT_ROUNDS,
    )
    published, assumed = NOTES["published"], NOTES["assumed"].format(assumed=assumed)
    return "\n".join(["## Assumptions\n", published, "", _lines(head, setups), assumed, "", text])


def _real(data: Data) -> str:
    """One row for each load: the latency, and what else its figure is about."""
    by_load: dict[tuple[str, str], list[Data]] = {}
    for row in data["rows"]:
        by_load.setdefault((row["figure"], row["load"]), []).append(row)
    rows = []
    for (figure, load), values in by_load.items():
        cells = {"latency": "", "other": ""}
        for row in values:
            kind = "latency" if row["value"].startswith("normalized latency") else "other"
            shown = f"{row['engine']:.3g} / {row['simulated']:.3g}"
            cells[kind] = shown if kind == "latency" else f"{row['value']}: {shown}"
        rows.append([figure, load, cells["latency"], cells["other"]])
    head = ["figure", "load", "normalized latency, ms/token", "engine / simulated"]
    intro = NOTES["real"].format(repeats=data["repeats"]) + _machine(data)
    return f"## The engine beside the simulation\n\n{intro}\n\n{_lines(head, rows)}"


def _fit(data: Data) -> str:
    rows = []
    for kind, label in (("training", "fitted"), ("held_out", "**held out**")):
        for row in data[kind]:
            cells = [f"{1000 * row[n]['engine']:.2f} ms, {row[n]['error']:+.0%}" for n in ("latency", "latency_p99")]
            rows.append([row["load"], label, *cells, " / ".join(f"{count:g}" for count in row["preemptions"])])
    within = sum(row["within"] for row in data["held_out"])
    head = ["load", "", "mean: engine, error", "p99: engine, error", "preemptions: engine / simulated"]
    text = f"{within} of the {len(data['held_out'])} loads held out are within 15 % in both.\n"
    intro = NOTES["fit"].format(repeats=data["repeats"]) + _machine(data)
    return f"## The cost model against the engine\n\n{intro}\n\n{_lines(head, rows)}\n{text}"
