"""Grammars in llama.cpp's EBNF (GBNF), written as llguidance's Lark with the same meaning.

llguidance divides a text into lexemes, the longest first. What is regular becomes lexemes if that is never ambiguous;
else each character is one, which is exact and slower (with 128,000 tokens, JSON's grammar takes 4 ms in place of
0.07 ms for each). llguidance's own reader of GBNF does not look whether lexemes are ambiguous.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, product

from hf_paged.features.grammar import patterns

# The parser and all that walks the tree call themselves for each group, on Python's stack.
_MAX_DEPTH = 100  # groups within groups
_MAX_BRANCHES = 4096  # repetitions and alternatives; llguidance takes the square of that
# A larger grammar is written by characters: `_is_unambiguous` does not work out whether longest lexemes are right.
_MAX_STATES, _MAX_PAIRS, _MAX_LEXEMES = 3_000, 20_000, 64  # of automata that are compared


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
_END = 0x10FFFF


def lark_of(text: str, prefix: str) -> tuple[list[str], str, bool]:
    """The rules in Lark, whose names begin with `prefix`; the expression of `root`; whether that is a terminal. Raises
    ValueError."""
    rules = _Parser(text).rules()
    if sum(_num_branches(node) for node in rules.values()) > _MAX_BRANCHES:
        raise ValueError(f"the grammar has more than {_MAX_BRANCHES} repetitions and alternatives; make it smaller")
    if not _ends(rules):
        raise ValueError("the grammar has no finite text: each rule needs itself, or rules that do")
    rules = {name: _unrolled(name, node) for name, node in rules.items()}
    return _Writer(_reachable(rules), prefix).written()


# -- reading -------------------------------------------------------------------------------------------------------

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_RULE = re.compile(r"[a-zA-Z0-9_-]+(?:[ \t]|#[^\r\n]*)*::=")
_BOUNDS = re.compile(r"\{\s*(\d{1,6})?\s*(,)?\s*(\d{1,6})?\s*\}")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_SIGNS = {"n": 10, "r": 13, "t": 9, "\\": 92, '"': 34, "[": 91, "]": 93, "-": 45, "^": 94}


class _Parser:
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
            for each in _names(node):
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
                return _sequence(found)
            sign = self._text[self._place : self._place + 1]
            if sign == '"':
                item = self._literal()
            elif sign == "[":
                item = self._class()
            elif self._take("."):
                item = Node("chars", ranges=((0, _END),))
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
                return _sequence(found)
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
            if code > _END or 0xD800 <= code <= 0xDFFF:
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
        return _sequence([Node("chars", ranges=((code, code),)) for code in codes])

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
        merged = _merged(found)
        ranges = _complement(merged) if is_negated else merged
        if not ranges:
            raise self._wrong("a class without characters, before")
        return Node("chars", ranges=tuple(ranges))


def _sequence(items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else Node("seq", tuple(items))


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if made and first <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(made[-1][1], last)
        else:
            made.append((first, last))
    return made


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    edges = [-1, *(edge for pair in ranges for edge in pair), _END + 1]
    return [(low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2]) if low + 1 <= high - 1]


# -- rules ---------------------------------------------------------------------------------------------------------


def _names(node: Node) -> Iterator[str]:
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.kind == "ref":
            yield each.name
        waiting += each.parts


def _ends(rules: Rules) -> bool:
    """Return True if `root` produces a finite text."""
    known: set[str] = set()

    def ends(node: Node) -> bool:
        if node.kind == "alt":
            return any(map(ends, node.parts))
        if node.kind == "ref":
            return node.name in known
        return (node.kind == "rep" and node.low == 0) or all(map(ends, node.parts))

    # Rules may be recursive, so this repeats until no further rule is known to end.
    while found := {name for name, node in rules.items() if name not in known and ends(node)}:
        known |= found
    return "root" in known


def _num_branches(node: Node) -> int:
    own = len(node.parts) if node.kind == "alt" else int(node.kind == "rep")
    return own + sum(map(_num_branches, node.parts))


def _reachable(rules: Rules) -> Rules:
    found, waiting = {}, ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = rules[name]
            waiting += _names(rules[name])
    return found


def _unrolled(name: str, node: Node) -> Node:
    """A rule that only repeats itself at its end (or only at its beginning), as a repetition."""
    for at in (-1, 0):
        loops, ends = [], []
        for option in _options(node):
            parts = list(option.parts) if option.kind == "seq" else [option]
            if parts and parts[at] == Node("ref", name=name):
                del parts[at]
                loops.append(_sequence(parts))
            else:
                ends.append(option)
        if loops and not any(name in _names(each) for each in [*loops, *ends]):
            repeated = Node("rep", (Node("alt", tuple(loops)),))
            once = Node("alt", tuple(ends))
            return Node("seq", (repeated, once) if at == -1 else (once, repeated)) if ends else node
    return node


def _options(node: Node) -> list[Node]:
    if node.kind == "alt":
        return [each for part in node.parts for each in _options(part)]
    if node.kind == "rep" and (node.low, node.high) == (0, 1):
        return [*_options(node.parts[0]), EMPTY]
    return [node]


# -- writing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ends:
    """Lexemes that an expression may begin and end with. is_empty: it may be empty."""

    is_empty: bool = False
    first: frozenset[Node] = frozenset()
    last: frozenset[Node] = frozenset()


class _Writer:
    def __init__(self, rules: Rules, prefix: str) -> None:
        self._rules = rules
        self._names = {name: f"{prefix}{number}" for number, name in enumerate(rules)}
        self._regular = _regular(rules)
        self._lexemes: list[str] = []  # their definitions

    def written(self) -> tuple[list[str], str, bool]:
        lines = [f"{self._names[name].upper()}: {self._regex(self._rules[name])}" for name in sorted(self._regular)]
        if "root" in self._regular:
            return lines, self._names["root"].upper(), True
        write = self._by_character
        # Longer lexemes first, because each costs a step of the parser.
        for is_joined in (True, False):
            rules = {name: node for name, node in self._rules.items() if name not in self._regular}
            bodies = {name: self._with_lexemes(node, is_joined) for name, node in rules.items()}
            if self._is_unambiguous(bodies):
                write = self._as_lexeme
                break
        lines += [f"{self._names[name]}: {self._expression(node, write)}" for name, node in bodies.items()]
        # Rules that would be terminals are written by characters too, where these refer to them.
        if write == self._by_character:
            lines += [f"{self._names[name]}c: {write(self._rules[name])}" for name in sorted(self._regular)]
        return lines + self._lexemes, self._names["root"], False

    def _is_regular(self, node: Node) -> bool:
        return all(name in self._regular for name in _names(node))

    def _with_lexemes(self, node: Node, is_joined: bool) -> Node:
        """The body of a rule, in which what is regular is a node "lexeme". is_joined: one for all that is in a row."""
        if self._is_regular(node) and (
            is_joined or node.kind != "seq" or all(each.kind == "chars" for each in node.parts)
        ):
            return Node("lexeme", (node,))
        if node.kind != "seq":
            return replace(node, parts=tuple(self._with_lexemes(each, is_joined) for each in node.parts))
        made: list[Node] = []
        for is_regular, group in groupby(node.parts, self._is_regular):
            parts = list(group)
            if is_joined and is_regular:
                parts = [_sequence(parts)]
            made += (self._with_lexemes(each, is_joined) for each in parts)
        return _sequence(made)

    # -- expressions --------------------------------------------------------------------------------------------

    def _regex(self, node: Node) -> str:
        """As the expression of a terminal."""
        if node.kind == "chars":
            return f"/{_class(node.ranges)}/"
        return self._names[node.name].upper() if node.kind == "ref" else _joined(node, self._regex)

    def _as_lexeme(self, node: Node) -> str:
        self._lexemes.append(f"{self._names['root'].upper()}X{len(self._lexemes)}: {self._regex(node)}")
        return self._lexemes[-1].partition(":")[0]

    def _by_character(self, node: Node) -> str:
        if node.kind == "ref":
            return f"{self._names[node.name]}c"
        return self._regex(node) if node.kind == "chars" else _joined(node, self._by_character)

    def _expression(self, node: Node, write: Callable[[Node], str]) -> str:
        """As the expression of a rule."""
        if node.kind == "lexeme":
            return write(node.parts[0])
        if node.kind == "ref":
            return self._names[node.name]
        return _joined(node, lambda each: self._expression(each, write))

    # -- are the longest lexemes the right ones? ----------------------------------------------------------------

    def _is_unambiguous(self, bodies: Rules) -> bool:
        """Return True if no lexeme, nor another in its place, could continue where the next begins.

        Returns False too if that takes too much work to find out.
        """
        if len(set(chain(*map(_lexemes, bodies.values())))) > _MAX_LEXEMES:
            return False
        try:
            automata = {node: _Automaton(node, self._rules) for node in set(chain(*map(_lexemes, bodies.values())))}
            after, begins = _neighbours(bodies, {node for node, automaton in automata.items() if automaton.is_nullable})
            for node, automaton in automata.items():
                following = [each for first, each in after if first == node]
                letters = _merged(pair for each in following for pair in automata[each].first())
                beside = {each for place in [begins, *_successors(after)] if node in place for each in place}
                if any(automaton.meets(automata[each], letters) for each in beside):
                    return False
        except _TooLarge:
            return False
        return True


def _joined(node: Node, inner: Callable[[Node], str]) -> str:
    if node.kind == "rep":
        bounds = f"{{{node.low},{'' if node.high is None else node.high}}}"
        return f"({inner(node.parts[0])}){bounds}" if node.high != 0 else '""'
    if node.kind == "alt":
        return "(" + " | ".join(map(inner, node.parts)) + ")"
    return " ".join(f"({inner(part)})" for part in node.parts) or '""'


def _regular(rules: Rules) -> set[str]:
    """Rules that do not lead back to themselves, nor to such."""
    uses = {name: set(_names(node)) for name, node in rules.items()}
    regular: set[str] = set()
    while found := {name for name in uses if name not in regular and uses[name] <= regular}:
        regular |= found
    return regular


def _lexemes(node: Node) -> Iterator[Node]:
    if node.kind == "lexeme":
        yield node
    else:
        for part in node.parts:
            yield from _lexemes(part)


def _neighbours(bodies: Rules, empty: set[Node]) -> tuple[set[tuple[Node, Node]], frozenset[Node]]:
    """Pairs of lexemes of which the second may follow the first; those with which a text may begin. empty: those that
    may be."""
    after: set[tuple[Node, Node]] = set()
    known = dict.fromkeys(bodies, _Ends())

    def ends(node: Node) -> _Ends:
        if node.kind == "lexeme":
            return _Ends(node in empty, frozenset([node]), frozenset([node]))
        if node.kind == "ref":
            return known[node.name]
        parts = [ends(part) for part in node.parts]
        if node.kind == "alt":
            return _Ends(
                any(each.is_empty for each in parts),
                frozenset().union(*(each.first for each in parts)),
                frozenset().union(*(each.last for each in parts)),
            )
        if node.kind == "rep":
            # The end of one repetition meets the beginning of the next.
            if node.high is None or node.high > 1:
                after.update(product(parts[0].last, parts[0].first))
            return replace(parts[0], is_empty=parts[0].is_empty or node.low == 0)
        made = _Ends(is_empty=True)
        for each in parts:
            after.update(product(made.last, each.first))
            made = _Ends(
                made.is_empty and each.is_empty,
                made.first | each.first if made.is_empty else made.first,
                made.last | each.last if each.is_empty else each.last,
            )
        return made

    # Rules may be recursive, so this repeats until nothing changes.
    is_new = True
    while is_new:
        found = {name: ends(node) for name, node in bodies.items()}
        is_new, known = found != known, found
    return after, known["root"].first


def _successors(after: set[tuple[Node, Node]]) -> list[set[Node]]:
    found: dict[Node, set[Node]] = {}
    for first, second in after:
        found.setdefault(first, set()).add(second)
    return list(found.values())


class _TooLarge(Exception):
    """The automaton has too many states."""


class _Automaton:
    """A nondeterministic automaton of a lexeme. Its first state is 0, its last one `end`."""

    def __init__(self, node: Node, rules: Rules) -> None:
        self._rules = rules
        self._moves: list[list[tuple[tuple[tuple[int, int], ...] | None, int]]] = [[]]  # None: without a character
        self.end = self._build(node, 0)
        self.is_nullable = self.end in self._reached(0)

    def _state(self) -> int:
        if len(self._moves) >= _MAX_STATES:
            raise _TooLarge
        self._moves.append([])
        return len(self._moves) - 1

    def _build(self, node: Node, start: int) -> int:
        if node.kind == "ref":
            return self._build(self._rules[node.name], start)
        if node.kind == "chars":
            end = self._state()
            self._moves[start].append((node.ranges, end))
            return end
        if node.kind == "alt":
            end = self._state()  # of its own: nothing that continues there comes back
            for part in node.parts:
                self._moves[self._build(part, self._begun(start))].append((None, end))
            return end
        if node.kind == "rep":
            return self._repeated(node, start)
        for part in node.parts:
            start = self._build(part, start)
        return start

    def _begun(self, start: int) -> int:
        inner = self._state()
        self._moves[start].append((None, inner))
        return inner

    def _repeated(self, node: Node, start: int) -> int:
        for _ in range(node.low):
            start = self._build(node.parts[0], start)
        if node.high is None:
            again = self._begun(start)
            self._moves[self._build(node.parts[0], again)].append((None, again))
            return again
        end = self._state()
        for _ in range(node.high - node.low):
            self._moves[start].append((None, end))
            start = self._build(node.parts[0], self._begun(start))
        self._moves[start].append((None, end))
        return end

    def _reached(self, state: int) -> set[int]:
        """Without a character."""
        found, waiting = {state}, [state]
        while waiting:
            for ranges, target in self._moves[waiting.pop()]:
                if ranges is None and target not in found:
                    found.add(target)
                    waiting.append(target)
        return found

    def moves(self, state: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
        return [(ranges, to) for each in self._reached(state) for ranges, to in self._moves[each] if ranges is not None]

    def first(self) -> list[tuple[int, int]]:
        return [pair for ranges, _ in self.moves(0) for pair in ranges]

    def meets(self, other: _Automaton, letters: list[tuple[int, int]]) -> bool:
        """Return True if a text of this automaton plus one of the letters begins a text of `other`."""
        seen, waiting = {(0, 0)}, [(0, 0)]
        while waiting:
            mine, theirs = waiting.pop()
            moves = other.moves(theirs)
            is_text = (mine, theirs) != (0, 0) and self.end in self._reached(mine)
            if is_text and any(_overlap(ranges, letters) for ranges, _ in moves):
                return True
            for ranges, to in self.moves(mine):
                for others, target in moves:
                    if (to, target) not in seen and _overlap(ranges, others):
                        seen.add((to, target))
                        waiting.append((to, target))
            if len(seen) > _MAX_PAIRS:
                raise _TooLarge
        return False


def _overlap(one: Iterable[tuple[int, int]], other: Iterable[tuple[int, int]]) -> bool:
    return any(low <= last and first <= high for low, high in one for first, last in other)


def _class(ranges: tuple[tuple[int, int], ...]) -> str:
    if ranges == ((0, _END),):
        return patterns.ANY
    parts = []
    for low, high in ranges:
        # Surrogates between them are no characters.
        for first, last in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if first <= last:
                parts.append(f"\\x{{{first:X}}}-\\x{{{last:X}}}")
    return f"[{''.join(parts)}]"
