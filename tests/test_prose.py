"""Docstrings begin with a verb or a subject, so that a stranger reads them once; comments say why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.sources import FILES, PACKAGE, statements, text_of, tree_of

WORDS = {"What", "Which", "Whether", "How", "Of", "Those"}


def texts_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring: of modules, classes, functions and fields."""
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


@cache
def sources() -> list[tuple[str, list[str], ast.Module]]:
    """Return the name, the lines and the tree of each file of the package."""
    return [(str(path.relative_to(PACKAGE)), text_of(path).splitlines(), tree_of(path)) for path in FILES]


def test_docstrings_begin_with_a_verb_or_a_subject() -> None:
    assert not [
        f"{name}:{line}: {text.splitlines()[0]}"
        for name, _, tree in sources()
        for line, text in texts_of(tree)
        if text.split(maxsplit=1)[0].rstrip(",.:") in WORDS
    ]


def written(lines: list[str], tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, comment and message. A string without a space may be a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    yield from ((number, line.partition("#")[2]) for number, line in enumerate(lines, 1) if "#" in line)


def is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def is_number(node: ast.expr | None) -> bool:
    """Return True for a number, for what is calculated of numbers, and for a tuple of them."""
    if isinstance(node, ast.Tuple):
        return bool(node.elts) and all(map(is_number, node.elts))
    if isinstance(node, ast.BinOp):
        return is_number(node.left) and is_number(node.right)
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def is_constant(node: ast.stmt) -> bool:
    """Return True for a number with a name in capitals."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or not is_number(node.value):
        return False
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return all(each.id.isupper() for each in ast.walk(target) if isinstance(each, ast.Name))


def test_constants_have_reasons() -> None:
    """A comment stands above a number or above its neighbours, or a string stands below it."""
    bare = []
    for name, lines, tree in sources():
        texts = {number for number, _ in texts_of(tree)}
        numbers = [node.lineno for node in tree.body if is_constant(node)]
        for number in numbers:
            above = number - 1
            while above in numbers:
                above -= 1
            if not is_comment(lines[above - 1]) and number + 1 not in texts:
                bare.append(f"{name}:{number} {lines[number - 1]}")
    assert not bare


def test_long_functions_have_comments() -> None:
    assert not [
        f"{name}:{node.lineno} {node.name}"
        for name, lines, tree in sources()
        for node in statements(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(body := lines[node.lineno - 1 : node.end_lineno]) > 25
        and not any(map(is_comment, body))
    ]


def test_three_lines_of_a_hundred_are_comments() -> None:
    lines = [line for _, lines, _ in sources() for line in lines]
    assert sum(map(is_comment, lines)) >= 0.03 * len(lines)


def prose_of_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of README and of each page, without code."""
    root = PACKAGE.parent
    for path in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        yield path.name, re.sub(r"^```.*?^```$|`[^`\n]*`|<!--.*?-->", "", path.read_text(), flags=re.M | re.S)


def test_words_are_the_fields() -> None:
    """CONTRIBUTING.md lists the words that pages, docstrings, comments and messages do without."""
    table = (PACKAGE.parent / "CONTRIBUTING.md").read_text().split("| say | not |\n|---|---|\n")[1].split("\n\n")[0]
    words = [word.strip() for row in table.splitlines() for word in row.split("|")[2].split(",")]
    assert len(words) > 15
    refused = re.compile(rf"\b(?:{'|'.join(words)})\b".replace(" ", r"\s+"), re.IGNORECASE)
    code = [
        (f"{name}:{line}", re.sub(r"`[^`]*`", "", text))
        for name, lines, tree in sources()
        for line, text in written(lines, tree)
    ]
    found = [f"{place}: {hit[0]}" for place, text in (*prose_of_pages(), *code) for hit in refused.finditer(text)]
    assert not found, "\n".join(found)
