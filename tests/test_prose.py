"""Docstrings begin with a verb or a subject, so that a stranger reads them once. The limits below may only fall."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hf_paged"
WORDS = {"What", "Which", "Whether", "How", "Of", "Those"}
MOST = {"generation": 20}  # by folder; 0 elsewhere


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring: of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def beginning_with_a_question(folder: str) -> list[str]:
    files = PACKAGE.glob("*.py") if folder == "." else (PACKAGE / folder).rglob("*.py")
    return [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in sorted(files)
        for line, text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
        if text.split(maxsplit=1)[0].rstrip(",.:") in WORDS
    ]


@pytest.mark.parametrize("folder", [".", *sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))])
def test_docstrings_begin_with_a_verb_or_a_subject(folder: str) -> None:
    found = beginning_with_a_question(folder)
    most = MOST.get(folder, 0)
    which = "\n".join(found)
    assert len(found) <= most, f"{len(found)} docstrings, not {most}, begin with one of {sorted(WORDS)}:\n{which}"
