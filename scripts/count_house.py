"""Counts what the package should have little of: lines, `Any`, `getattr` by name, boolean parameters, patched tests.

    python scripts/count_house.py [folder of a checkout ...]

Prints a column for each checkout (the one that this script is in, if none is given).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path


def lines_with(pattern: str, texts: Iterable[str]) -> int:
    found = re.compile(pattern)
    return sum(bool(found.search(line)) for text in texts for line in text.splitlines())


def boolean_parameters(tree: ast.AST) -> int:
    """Parameters of functions that are annotated as `bool`, also beside None."""
    arguments = [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    every = [each for a in arguments for each in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return sum(
        each.annotation is not None and re.search(r"\bbool\b", ast.unparse(each.annotation)) is not None
        for each in every
    )


def most_parameters(tree: ast.AST) -> int:
    arguments = [node.args for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return max((len(a.posonlyargs) + len(a.args) + len(a.kwonlyargs) for a in arguments), default=0)


def counts(root: Path) -> dict[str, int]:
    texts = [path.read_text() for path in sorted((root / "hf_paged").rglob("*.py"))]
    tests = [path.read_text() for path in sorted((root / "tests").rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    return {
        "files of Python in hf_paged": len(texts),
        "lines": sum(text.count("\n") for text in texts),
        "lines with Any": lines_with(r"\bAny\b", texts),
        "lines with getattr": lines_with(r"\bgetattr\(", texts),
        "boolean parameters": sum(map(boolean_parameters, trees)),
        "type: ignore": lines_with(r"# type: ignore", texts),
        "most parameters of a function": max(map(most_parameters, trees)),
        "tests: lines with monkeypatch.setattr": lines_with(r"monkeypatch\.setattr\(", tests),
        "tests: lines with engine._runner": lines_with(r"\bengine\._runner\b", tests),
    }


def main() -> None:
    roots = [Path(each) for each in sys.argv[1:]] or [Path(__file__).parent.parent]
    columns = [counts(root) for root in roots]
    for name in columns[0]:
        print(f"{name:40}" + "".join(f"{column[name]:>10,}" for column in columns))


if __name__ == "__main__":
    main()
