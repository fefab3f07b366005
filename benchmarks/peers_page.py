"""Write the tables of docs/benchmarks.md that have figures of peers.py and equal_tokens.py, from their results.

    python benchmarks/peers_page.py

A table lies between the comment that names it and `<!-- end -->`. Of several figures of a system and case the last one
counts.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"
NAMES = {
    "engine": "hf-paged, engine", "paged": "hf-paged, `generate`", "plain": "plain `generate`",
    "hf-cb": "transformers' continuous batching", "openvino": "OpenVINO GenAI", "vllm": "vLLM (CPU)",
    "ctranslate2": "CTranslate2",
}  # fmt: skip
Figures = dict[str, Any]


def speed(figures: Figures) -> str:
    return f"{figures['tokens_per_s']:.0f}" if figures["tokens_per_s"] >= 100 else f"{figures['tokens_per_s']:.1f}"


def seconds(figures: Figures) -> str:
    held = f", {figures['kv_mib']:.1f} MiB" if "kv_mib" in figures else ""
    return f"{figures['seconds']:.2f} s{held}"


def peak(figures: Figures) -> str:
    return f"{figures['peak_mib']:,}"


def equal(figures: Figures) -> str:
    return f"{figures['equal']} of {figures['prompts']}"


def first(figures: Figures) -> str:
    return str(figures["first differing token, median"] or "")


def margin(figures: Figures) -> str:
    median, largest = figures["margin there, median"], figures["margin there, largest"]
    return "" if median is None else f"{median}, {largest}"


class Table(NamedTuple):
    """columns: heading -> case, and how its figures are written."""

    columns: dict[str, tuple[str, Callable[[Figures], str]]]
    isa: str = "all"
    threads: int = 1


_SPEEDS = {name: (name, speed) for name in ("prompt of 512", "one request", "64 requests")}
TABLES = {
    "speeds": Table(_SPEEDS),
    "speeds with AVX2": Table(_SPEEDS, isa="avx2"),
    "speeds of two threads": Table(_SPEEDS, threads=2),
    "beams and samples": Table({name: (name, seconds) for name in ("8 samples", "4 beams")}),
    "memory": Table({name: (name, peak) for name in ("one request", "64 requests")}),
    "long prompts and drafts": Table(
        {name: (name, speed) for name in ("prompt of 2,048", "edit", "edit, prompt lookup")}
    ),
    "equal tokens": Table({
        "equal texts": ("equal tokens", equal), "first differing token, median": ("equal tokens", first),
        "margin there, median and largest": ("equal tokens", margin),
    }),
}  # fmt: skip


def written(table: Table, lines: list[Figures]) -> str:
    """The table as Markdown, with the largest spread of its rounds."""
    cases = {case for case, _ in table.columns.values()}
    chosen = [each for each in lines if each["case"] in cases and (each["isa"], each["threads"]) == table[1:]]
    found = {(each["system"], each["case"]): each for each in chosen}
    rows = [["", *table.columns], ["---"] * (len(table.columns) + 1)]
    for system in dict.fromkeys(system for system, _ in found):
        engine, form = system.split(":")
        cells = [
            form_of(found[system, case]) if (system, case) in found else "" for case, form_of in table.columns.values()
        ]
        rows.append([f"{NAMES.get(engine, engine)}, {form}", *cells])
    rounds = [each["all_seconds"] for each in found.values() if "all_seconds" in each]
    spreads = sorted(100 * (max(each) - min(each)) / statistics.median(each) for each in rounds)
    said = []
    if spreads:
        middle, most = statistics.median(spreads), spreads[-1]
        said = [
            "",
            f"Rounds differ by at most {middle:.0f} % for half of the figures, by at most {most:.0f} % for the rest.",
        ]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), *said])


QUESTIONS = {
    "one request?": [("one request", speed, "tokens a second"), ("prompt of 512", speed, "of its prompt")],
    "many requests at once?": [("64 requests", speed, "tokens a second")],
    "beams and samples?": [("8 samples", seconds, ""), ("4 beams", seconds, "")],
    "memory?": [("64 requests", peak, "MiB")],
    "long prompts? drafts?": [
        ("prompt of 2,048", speed, "tokens a second"),
        ("edit, prompt lookup", speed, "in an edit"),
    ],
}


def answers(lines: list[Figures]) -> str:
    """The questions with the engine's figures in fp32 and those of the best other engine in fp32, wins and losses."""
    rows = ["| question | hf-paged and the best of the others, fp32, one thread |", "|---|---|"]
    for question, asked in QUESTIONS.items():
        parts = []
        for case, form_of, unit in asked:
            found = {
                each["system"].removesuffix(":fp32"): each for each in lines
                if each["case"] == case and (each["isa"], each["threads"]) == ("all", 1) and ":fp32" in each["system"]
            }  # fmt: skip
            value = (lambda each: each["peak_mib"]) if form_of is peak else (lambda each: each["seconds"])
            others = [name for name in found if name not in ("engine", "paged")]
            if "engine" in found and others:
                best = min(others, key=lambda name: value(found[name]))
                name = NAMES.get(best, best)
                parts.append(f"{form_of(found['engine'])} {unit}".strip() + f" ({name}: {form_of(found[best])})")
        anchor = re.sub(r"[^a-z ]", "", question).replace(" ", "-")
        rows.append(f"| [{question}](#{anchor}) | {'; '.join(parts)} |")
    return "\n".join(rows)


def main() -> None:
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    block = re.compile(r"<!-- table: (.*?) -->\n.*?<!-- end -->", re.S)

    def new(old: re.Match[str]) -> str:
        table = answers(lines) if old[1] == "answers" else written(TABLES[old[1]], lines)
        return f"<!-- table: {old[1]} -->\n\n{table}\n\n<!-- end -->"

    PAGE.write_text(block.sub(new, PAGE.read_text()))


if __name__ == "__main__":
    main()
