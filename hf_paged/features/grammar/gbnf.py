"""Grammars in llama.cpp's EBNF (GBNF), written as llguidance's Lark with the same meaning.

llguidance divides a text into lexemes, the longest first. What is regular becomes lexemes if that is never ambiguous;
else each character is one, which is exact and slower (with 128,000 tokens, JSON's grammar takes 4 ms in place of
0.07 ms for each). llguidance's own reader of GBNF does not look whether lexemes are ambiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby, product

from hf_paged.features.grammar import patterns
from hf_paged.features.grammar.gbnf_parser import EMPTY, END, Node, Parser, Rules, merged_ranges, names_in, sequence

# llguidance takes the square of that.
_MAX_BRANCHES = 4096  # repetitions and alternatives
# A larger grammar is written by characters: `_is_unambiguous` does not work out whether longest lexemes are right.
_MAX_STATES, _MAX_PAIRS, _MAX_LEXEMES = 3_000, 20_000, 64  # of automata that are compared


def lark_of(text: str, prefix: str) -> tuple[list[str], str, bool]:
    """The rules in Lark, whose names begin with `prefix`; the expression of `root`; whether that is a terminal. Raises
    ValueError."""
    rules = Parser(text).rules()
    if sum(_num_branches(node) for node in rules.values()) > _MAX_BRANCHES:
        raise ValueError(f"the grammar has more than {_MAX_BRANCHES} repetitions and alternatives; make it smaller")
    if not _ends(rules):
        raise ValueError("the grammar has no finite text: each rule needs itself, or rules that do")
    rules = {name: _unrolled(name, node) for name, node in rules.items()}
    return _Writer(_reachable(rules), prefix).written()


# -- reading -------------------------------------------------------------------------------------------------------


# -- rules ---------------------------------------------------------------------------------------------------------


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
            waiting += names_in(rules[name])
    return found


def _unrolled(name: str, node: Node) -> Node:
    """A rule that only repeats itself at its end (or only at its beginning), as a repetition."""
    for at in (-1, 0):
        loops, ends = [], []
        for option in _options(node):
            parts = list(option.parts) if option.kind == "seq" else [option]
            if parts and parts[at] == Node("ref", name=name):
                del parts[at]
                loops.append(sequence(parts))
            else:
                ends.append(option)
        if loops and not any(name in names_in(each) for each in [*loops, *ends]):
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
        return all(name in self._regular for name in names_in(node))

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
                parts = [sequence(parts)]
            made += (self._with_lexemes(each, is_joined) for each in parts)
        return sequence(made)

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
                letters = merged_ranges(pair for each in following for pair in automata[each].first())
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
    uses = {name: set(names_in(node)) for name, node in rules.items()}
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
    if ranges == ((0, END),):
        return patterns.ANY
    parts = []
    for low, high in ranges:
        # Surrogates between them are no characters.
        for first, last in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)):
            if first <= last:
                parts.append(f"\\x{{{first:X}}}-\\x{{{last:X}}}")
    return f"[{''.join(parts)}]"
