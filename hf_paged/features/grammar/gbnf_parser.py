"""Reads grammars in llama.cpp's EBNF (GBNF) into trees."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# The parser and all that walks the tree call themselves for each group, on Python's stack.
_MAX_DEPTH = 100  # groups within groups


@dataclass(frozen=True, slots=True)
class Node:
    """kind: "chars" (one of `ranges`), "ref" (the rule `name`), "seq", "alt" (of `parts`), "rep" (`low` to `high` times
    its one part; None: any number), "lexeme" (its one part, in one piece)."""

    kind: str
    parts: tuple[Node, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    name: str = ""
    low: int = 0
    high: int | None = None


Rules = dict[str, Node]
EMPTY = Node("seq")
# The last character of Unicode.
END = 0x10FFFF

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_RULE = re.compile(r"[a-zA-Z0-9_-]+(?:[ \t]|#[^\r\n]*)*::=")
_BOUNDS = re.compile(r"\{\s*(\d{1,6})?\s*(,)?\s*(\d{1,6})?\s*\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_SIGNS = {"n": 10, "r": 13, "t": 9, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45, "^": 94}


class Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def rules(self) -> Rules:
        found: Rules = {}
        self._skip(_LINES)
        while self._place < len(self._text):
            name = self._name()
            self._skip(_LINES)
            if not self._take("::="):
                raise self._wrong("'::=' is needed")
            if name in found:
                raise self._wrong(f"the rule {name!r} is there twice")
            self._skip(_LINES)
            found[name] = self._alternatives(0)
            self._skip(_LINES)
        for node in found.values():
            for each in names_in(node):
                if each not in found:
                    raise ValueError(f"the grammar has no rule {each!r}")
        if "root" not in found:
            raise ValueError("the grammar has no rule 'root', with which it begins")
        return found

    def _wrong(self, why: str) -> ValueError:
        line = self._text.count("\n", 0, self._place) + 1
        return ValueError(
            f"the grammar cannot be read: {why} at {self._text[self._place : self._place + 20]!r}, line {line}"
        )

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self._text, self._place)
        self._place = found.end() if found else self._place

    def _take(self, sign: str) -> bool:
        is_there = self._text.startswith(sign, self._place)
        self._place += len(sign) * is_there
        return is_there

    def _name(self) -> str:
        found = _NAME.match(self._text, self._place)
        if not found:
            raise self._wrong("a name is needed")
        self._place = found.end()
        return found[0]

    def _alternatives(self, depth: int) -> Node:
        if depth > _MAX_DEPTH:
            raise self._wrong(f"there are more than {_MAX_DEPTH} groups within each other")
        found = [self._sequence(depth)]
        while self._take("|"):
            self._skip(_LINES)
            found.append(self._sequence(depth))
        return found[0] if len(found) == 1 else Node("alt", tuple(found))

    def _sequence(self, depth: int) -> Node:
        found: list[Node] = []
        while True:
            self._skip(_LINES if depth else _SPACE)
            if not depth and self._text[self._place : self._place + 1] in ("\r", "\n"):
                # A rule may continue in the next line with "|".
                after = _LINES.match(self._text, self._place)
                if after and self._text.startswith("|", after.end()):
                    self._place = after.end()
                return sequence(found)
            sign = self._text[self._place : self._place + 1]
            if sign == '"':
                item = self._literal()
            elif sign == "[":
                item = self._class()
            elif self._take("."):
                item = Node("chars", ranges=((0, END),))
            elif self._take("("):
                self._skip(_LINES)
                item = self._alternatives(depth + 1)
                self._skip(_LINES)
                if not self._take(")"):
                    raise self._wrong("')' is needed")
            elif _NAME.match(self._text, self._place) and not _RULE.match(self._text, self._place):
                item = Node("ref", name=self._name())
            elif sign in ("", "|", ")"):
                if sign == ")" and not depth:
                    raise self._wrong("there is no group that ends")
                return sequence(found)
            else:
                raise self._wrong("a string, a class, a group or a rule's name is needed")
            found.append(self._repeated(item, depth))

    def _repeated(self, item: Node, depth: int) -> Node:
        while True:
            self._skip(_LINES if depth else _SPACE)
            sign = self._text[self._place : self._place + 1]
            if sign and sign in "*+?":
                self._place += 1
                item = Node("rep", (item,), low=int(sign == "+"), high=1 if sign == "?" else None)
            elif sign == "{":
                found = _BOUNDS.match(self._text, self._place)
                if not found or (found[1] is None and found[3] is None):
                    raise self._wrong("bounds {m}, {m,} or {m,n} are needed")
                self._place = found.end()
                low = int(found[1] or 0)
                high = (int(found[3]) if found[3] else None) if found[2] else low
                if high is not None and high < low:
                    raise self._wrong("the bounds are in the wrong order before this")
                item = Node("rep", (item,), low=low, high=high)
            else:
                return item

    def _letter(self) -> int:
        if self._place >= len(self._text):
            raise self._wrong("something does not end")
        if not self._take("\\"):
            self._place += 1
            return ord(self._text[self._place - 1])
        found = _CODE.match(self._text, self._place)
        if found:
            self._place = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if code > END or 0xD800 <= code <= 0xDFFF:
                raise self._wrong("this is the code of no character, before")
            return code
        sign = self._text[self._place : self._place + 1]
        if sign not in _SIGNS:
            raise self._wrong("an unknown escape")
        self._place += 1
        return _SIGNS[sign]

    def _literal(self) -> Node:
        self._place += 1
        codes = []
        while not self._take('"'):
            codes.append(self._letter())
        return sequence([Node("chars", ranges=((code, code),)) for code in codes])

    def _class(self) -> Node:
        self._place += 1
        is_negated = self._take("^")
        found = []
        while not self._take("]"):
            first = last = self._letter()
            if self._text.startswith("-", self._place) and not self._text.startswith("-]", self._place):
                self._place += 1
                last = self._letter()
            if last < first:
                raise self._wrong("the range is in the wrong order before this")
            found.append((first, last))
        merged = merged_ranges(found)
        ranges = complement_of(merged) if is_negated else merged
        if not ranges:
            raise self._wrong("a class without characters, before")
        return Node("chars", ranges=tuple(ranges))


def sequence(items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else Node("seq", tuple(items))


def merged_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(made[-1][1], last)
        else:
            made.append((first, last))
    return made


def complement_of(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    edges = [-1, *(edge for pair in ranges for edge in pair), END + 1]
    return [(low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2]) if low + 1 <= high - 1]


def names_in(node: Node) -> Iterator[str]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.kind == "ref":
            yield each.name
        waiting += each.parts
