"""The sources of the package, as the tests of style and imports read them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hf_paged"
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _trees() -> dict[Path, ast.Module]:
    """Of all files. Collections of garbage do not look at them, which takes longer than parsing."""
    gc.disable()
    found = {path: ast.parse(text_of(path)) for path in FILES}
    gc.freeze()
    gc.enable()
    return found


def tree_of(path: Path) -> ast.Module:
    return _trees()[path]


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements in a node, and those in them: a tenth of the nodes that `ast.walk` visits."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from statements(each)
