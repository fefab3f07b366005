"""Write docs/api.md: what hf_paged exports, each with its signature and the first sentence of its docstring.

tests/test_api_docs.py checks that the page is up to date, and the docstrings themselves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import hf_paged

DOC = Path(__file__).resolve().parents[1] / "docs" / "api.md"

GROUPS = {
    "The engine": ("Engine", "CacheConfig", "SchedulerConfig", "EngineStats"),
    "What the engine returns": ("RequestOutput", "CompletionOutput", "RequestMetrics"),
    "Drafts and constraints": ("Drafter", "first_layers", "grammar"),
    "Calls of generate": ("PagedKVCache", "record_calls", "CallRecord", "prepack", "release_memory"),
    "Models": ("check", "SupportReport", "tokenwise", "weights_changed"),
    "The plugin": ("install", "uninstall", "install_serving", "uninstall_serving"),
    "Errors": ("EngineError", "OutOfBlocks", "QueueFull", "RankError", "UnsupportedModelError",
               "UnsupportedVersionError"),
}  # fmt: skip
MADE_BY_CALLERS = ("Engine", "CacheConfig", "SchedulerConfig", "PagedKVCache")
"""Classes whose signatures matter to callers."""

INSIDE = {
    "CallRecord": ("start", "observe", "finish"),
    "Engine": (
        "prepare_request", "submit", "num_arriving", "settle", "drop", "follow", "read", "is_paused_here", "run",
        "end_run", "call", "halt", "go_on", "is_halted", "check_integrity",
    ),
    "PagedKVCache": (
        "batch_size", "take_rows", "lend_rows", "return_rows", "is_even", "view_rows", "release_rows", "keeps_states",
        "states", "set_states", "has_only_states", "num_layers", "sizes_of", "check_integrity",
    ),
}  # fmt: skip
"""Public names that other parts of hf_paged use, which the page leaves out."""

INTRODUCTION = """\
# API reference

<!-- Written by scripts/make_api_doc.py from the docstrings. Do not edit. -->

Everything here is imported from `hf_paged`: `from hf_paged import Engine`. The tables have signatures, the fields of
records, and the first sentence of each docstring. `help(hf_paged.Engine)` shows arguments, results, errors and
examples, as does the second part of this page on the documentation's site. The examples run as they stand from the
repository's root, which has the checkpoint that they load.
"""

IN_FULL = """\
## In full

The documentation's site has the whole docstrings here; elsewhere only names follow.
"""


def main() -> None:
    DOC.write_text(page())


def page() -> str:
    parts = [INTRODUCTION]
    for title, names in GROUPS.items():
        parts.append("\n".join([f"## {title}", "", "| | |", "|---|---|", *_lines(names), ""]))
    parts.append(IN_FULL)
    parts += [_block(name) for names in GROUPS.values() for name in names]
    return "\n".join(parts)


def members(kind: type) -> dict[str, Any]:
    """The public methods and properties that a class has from hf_paged, by name, its own first."""
    found: dict[str, Any] = {}
    for each in kind.__mro__:
        if each.__module__.startswith("hf_paged."):
            for name, value in vars(each).items():
                if not name.startswith("_") and isinstance(value, FunctionType | property):
                    found.setdefault(name, value)
    return found


def first_sentence(value: Any) -> str:
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`(])", paragraph, maxsplit=1)[0]


def signature_of(value: Any) -> str:
    """(argument=default, ...) without annotations, `self`, and what takes arguments only to refuse them."""
    parameters = inspect.signature(value).parameters.values()
    shown = [each for each in parameters if each.name != "self" and each.annotation != "Never"]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in shown]
    return str(inspect.Signature(bare))


def _lines(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = getattr(hf_paged, name)
        is_called = name in MADE_BY_CALLERS or not isinstance(value, type)
        given = signature_of(value) if is_called else ", ".join(_fields(value))
        yield _line(f"**`{name}`**", given, value)
        if isinstance(value, type):
            for own, member in shown(name, value).items():
                given = "" if isinstance(member, property) else signature_of(member)
                yield _line(f"`{name}.{own}`", given, member)


def _fields(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if not field.name.startswith("_")] if is_dataclass(kind) else []


def _line(name: str, given: str, value: Any) -> str:
    return f"| {name}{f' `{given}`' if given else ''} | {first_sentence(value)} |"


def shown(name: str, kind: type) -> dict[str, Any]:
    return {own: member for own, member in members(kind).items() if own not in INSIDE.get(name, ())}


def _block(name: str) -> str:
    """What mkdocstrings replaces by the docstring of a name, and those of its members."""
    value, lines = getattr(hf_paged, name), [f"::: hf_paged.{name}"]
    inherited = [own for own in shown(name, value) if own not in vars(value)] if isinstance(value, type) else []
    if name in INSIDE:
        lines.append("    options:")
        lines += [f"      inherited_members: [{', '.join(inherited)}]"] * bool(inherited)
        lines.append(f'      filters: ["!^_", "!^({"|".join(INSIDE[name])})$"]')
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
