"""Writes docs/paper.md: each figure beside the paper's values, with every difference and its reason."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.paper.beams import TOP_PROBABILITY
from benchmarks.paper.beyond import BEYOND
from benchmarks.paper.cost import ASSUMED, SETUPS
from benchmarks.paper.figures import FIGURES
from benchmarks.paper.reading import LATENCY_FACTOR, POINTS, RATIO, Effort
from benchmarks.paper.requests import CHAT_ROUNDS, TRANSLATION_INPUT, TRANSLATION_OUTPUT, TRANSLATION_SIGMA
from benchmarks.paper.store import FAR

Data = dict[str, Any]
_WORDS = Path(__file__).with_name("notes.md").read_text().removeprefix("=== ")
NOTES = dict(note.split("\n", 1) for note in _WORDS.split("\n=== "))
"""The words of the page by what they are about: how to read a figure. A line `? pattern: reason` says why a value whose
name matches the pattern differs, and is shown only if one does; `?>` if ours is higher, `?<` if it is lower."""
SECTIONS = {"1": "1", "2": "1", "11": "6.1", "12": "6.2", "13": "6.2", "14": "6.3", "15": "6.3", "16": "6.4"}
SECTIONS |= {"17": "6.5", "18a": "7.1", "18b": "7.2", "19": "7.3"}
"""Of the paper, by figure, in order."""
ORDER = tuple(SECTIONS)


def render(data: dict[str, Data], folder: str) -> str:
    """The page. data: by figure; `folder` holds the plots, relative to the page."""
    titles = {figure.name: figure.title for figure in (*FIGURES, *BEYOND)}
    titles |= {"18a": "Latency of the attention kernel", "adapters": "Adapters"}
    tolerances = {"ratio": f"{RATIO:.0%}", "points": f"{POINTS:g}"}
    parts = [NOTES["introduction"].format(factor=LATENCY_FACTOR, **tolerances) + "\n"]
    if "speed" in data:
        parts.append(data["speed"]["sentence"] + _machine(data["speed"]) + "\n")
    parts.append(_summary(data))
    for name in [name for name in ORDER if name in data]:
        parts.append(f"## Figure {name} (section {SECTIONS[name]}): {titles[name]}\n")
        parts.append(f"![Figure {name}]({folder}/figure-{name}.png)\n")
        parts.append(_table(data[name]["checks"]))
        parts.append(said(name, data[name]) + _seeds(data[name]) + _machine(data[name]) + "\n")
    beyond = [name for name in (*(figure.name for figure in BEYOND), "adapters") if name in data]
    if beyond:
        parts.append("## Beyond the paper\n\n" + NOTES["beyond"] + "\n")
    for name in beyond:
        words = data[name]["sentence"] + data[name].get("remark", "") + _seeds(data[name]) + _machine(data[name])
        parts.append(f"**{titles[name]}.** {words}\n\n![{titles[name]}]({folder}/figure-{name}.png)\n")
    if "real" in data:
        parts.append(_real(data["real"]))
    if "fit" in data:
        parts.append(_fit(data["fit"]))
    parts.append(_assumptions(data))
    if "assumptions" in data:
        words = NOTES["assumptions"].strip() + data["assumptions"].get("remark", "")
        parts.append(f"## What the assumptions change\n\n{words}\n")
        table = data["assumptions"]["table"]
        parts.append(_lines(table["head"], table["rows"]))
    return "\n".join(parts)


def said(name: str, data: Data) -> str:
    """How to read the figure, with the numbers of this run, and why those values differ that do."""
    lines = NOTES[name].splitlines()
    text = " ".join(line for line in lines if not line.startswith("?")).format(**data.get("facts", {}))
    different = [row for row in data["checks"] if not row["agrees"]]
    explained: set[str] = set()
    for line in lines:
        if line.startswith("?"):
            sign, pattern, reason = re.match(r"\?([<>]?) (.*?): (.*)", line).groups()  # type: ignore[union-attr]
            about = {row["what"] for row in different if re.search(pattern, row["what"]) and sign in ("", _side(row))}
            if about:
                text += f" {reason.format(**data.get('facts', {}))}"
            explained |= about
    others = [row["what"] for row in different if row["what"] not in explained]
    return text + (f" We know no reason for: {'; '.join(others)}." if others else "")


def _side(row: Data) -> str:
    """Of the paper's value on which ours lies."""
    return ("<" if row["ours"] < row["within"][0] else ">") if "within" in row else "?"


def _lines(head: list[str], rows: list[list[Any]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells) + "\n"


def _seeds(data: Data) -> str:
    text = (
        f" Medians of {data['seeds']} seeds." if data.get("seeds", 1) > 1 else " One seed." if "seeds" in data else ""
    )
    return text + (f" Rough: {data['share']:.0%} of each trace." if data.get("share", 1) < 1 else "")


def _summary(data: dict[str, Data]) -> str:
    """How many of the paper's values are met, by figure."""
    rows, every = [], []
    for name in [name for name in ORDER if name in data]:
        kinds = [[row for row in data[name]["checks"] if ("within" in row) is number] for number in (True, False)]
        rows.append([name, *(f"{sum(r['agrees'] for r in each)} of {len(each)}" if each else "" for each in kinds)])
        every += data[name]["checks"]
    if not every:
        return ""
    numbers = [row["agrees"] for row in every if "within" in row]
    shapes = [row["agrees"] for row in every if "within" not in row]
    text = f"{sum(numbers)} of {len(numbers)} numbers agree with the paper"
    text += f", and {sum(shapes)} of {len(shapes)} shapes" if shapes else ""
    return f"{text}:\n\n" + _lines(["figure", "numbers", "shapes"], rows)


def _table(checks: list[Data]) -> str:
    head = ["", "paper", "from", "agrees within", "here", "difference"]
    return _lines(head, [[r["what"], _paper(r), r["source"], _within(r), _ours(r), _difference(r)] for r in checks])


def _unit(row: Data) -> str:
    return row["unit"] if row["unit"] in ("", "x") else f" {row['unit']}"


def _paper(row: Data) -> str:
    paper = row["paper"]
    return f"{paper:.3g}{_unit(row)}" if isinstance(paper, (int, float)) else f"{paper}{_unit(row)}"


def _within(row: Data) -> str:
    if "within" not in row:
        return "shape only"
    low, high = row["within"]
    return f"{low:.3g} to {high:.3g}"


def _ours(row: Data) -> str:
    if isinstance(row["ours"], str):
        return row["ours"]
    return f"{row['ours']:.3g}{_unit(row)}" if row["ours"] else "not sustained"


def _difference(row: Data) -> str:
    paper, ours = row["paper"], row["ours"]
    if isinstance(paper, (int, float)) and ours:
        text = f"{ours - paper:+.1f} points" if row["unit"] == "%" else f"{ours / paper - 1:+.0%}"
    else:
        text = "" if row["agrees"] else "differs"
    return text if row["agrees"] or not text else f"**{text}**"


def _machine(data: Data) -> str:
    machine = data.get("machine")
    if not machine:
        return ""
    before, after = machine["load_average"]
    return (
        f" Measured on one core of {machine['cores']}, {machine['cpu']}; load average {before:g} before and {after:g} "
        f"after, {machine['cpu_seconds']:g} CPU seconds in {machine['seconds']:g} s."
    )


def _assumptions(data: dict[str, Data]) -> str:
    setups = [
        [
            setup.name,
            f"{setup.parameters / 1e9:.4g}",
            setup.gpus,
            f"{setup.bandwidth / 1e12:g}",
            f"{setup.flops / 1e12:g}",
            f"{setup.slots:,}",
            f"{setup.bus / 1e9:g}",
        ]
        for setup in SETUPS.values()
    ]
    head = ["", "10^9 parameters", "GPUs", "TB/s of a GPU", "10^12 fp16/s of a GPU", "K/V slots", "GB/s to the host"]
    assumed = ", ".join(f"`{field.name}` {getattr(ASSUMED, field.name):g}" for field in fields(ASSUMED))
    text = NOTES["lengths"].format(
        translation=f"{TRANSLATION_INPUT} in, {TRANSLATION_OUTPUT} out, sigma {TRANSLATION_SIGMA:g}",
        beta=TOP_PROBABILITY,
        far=FAR,
        rounds=CHAT_ROUNDS,
        minutes=_minutes(data),
    )
    published, assumed = NOTES["published"], NOTES["assumed"].format(assumed=assumed)
    return "\n".join(["## Assumptions\n", published, "", _lines(head, setups), assumed, "", text])


def _minutes(data: dict[str, Data]) -> str:
    """Of the traces that were simulated, by figure."""
    said = []
    for figure in (*FIGURES, *BEYOND):
        runs = figure.runs(Effort(1, data[figure.name].get("share", 1.0))) if figure.name in data else []
        if runs:
            name = f"Figure {figure.name}" if figure in FIGURES else figure.name
            said.append(f"{name}: {', '.join(f'{minutes:g}' for minutes in sorted({run.minutes for run in runs}))}")
    return "; ".join(said)


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
