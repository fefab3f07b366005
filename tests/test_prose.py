"""Docstrings begin with a verb or a subject, so that a stranger reads them once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hf_paged"
WORDS = {"What", "Which", "Whether", "How", "Of", "Those"}


def texts_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring: of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_begin_with_a_verb_or_a_subject() -> None:
    assert not [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in texts_of(ast.parse(path.read_text(encoding="utf-8")))
        if text.split(maxsplit=1)[0].rstrip(",.:") in WORDS
    ]
