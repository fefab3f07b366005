"""Grammars in GBNF: what they accept is what their rules produce, however llguidance divides the text."""

from __future__ import annotations

import re
from itertools import product
from random import Random

import pytest

from hf_paged.features.grammar import constraints, gbnf
from hf_paged.features.grammar.gbnf_parser import Node, Rules
from hf_paged.features.grammar.vocabulary import vocabulary_of
from tests.generation.grammars import accepts, accepts_tokens
from tests.generation.random_constraints import bytes_tokenizer

LONGEST = 4
TEXTS = ["".join(letters) for length in range(LONGEST + 1) for letters in product("ab", repeat=length)]
BYTES = bytes_tokenizer(0)


def produced(rules: Rules) -> set[str]:
    """The texts of `root` with at most LONGEST characters."""
    known: dict[str, set[str]] = {name: set() for name in rules}

    def joined(left: set[str], right: set[str]) -> set[str]:
        return {one + other for one in left for other in right if len(one + other) <= LONGEST}

    def of(node: Node) -> set[str]:
        if node.kind == "chars":
            return {letter for letter in "ab" if any(low <= ord(letter) <= high for low, high in node.ranges)}
        if node.kind == "ref":
            return known[node.name]
        parts = [of(part) for part in node.parts]
        if node.kind == "alt":
            return set().union(*parts)
        found = {""}
        if node.kind == "seq":
            for part in parts:
                found = joined(found, part)
            return found
        for _ in range(node.low):
            found = joined(found, parts[0])
        made, more = set(found), found
        for _ in range(LONGEST if node.high is None else node.high - node.low):
            more = joined(more, parts[0])
            made |= more
        return made

    is_new = True
    while is_new:
        found = {name: of(node) for name, node in rules.items()}
        is_new, known = found != known, found
    return known["root"]


def random_grammar(rnd: Random) -> str:
    def expression(depth: int) -> str:
        options = [" ".join(item(depth) for _ in range(rnd.randint(1, 3))) for _ in range(rnd.choice([1, 2, 2]))]
        return " | ".join(options)

    def item(depth: int) -> str:
        kinds = ['"a"', '"b"', '"ab"', '"ba"', "[ab]", "[^a]", "root", "r", "r", "s"]
        made = rnd.choice(kinds) if depth == 0 or rnd.random() < 0.8 else f"({expression(depth - 1)})"
        return made + rnd.choice(["", "", "", "?", "*", "+", "{2}", "{0,2}"])

    return "\n".join(f"{name} ::= {expression(1)}" for name in ("root", "r", "s"))


def test_random_grammars() -> None:
    vocabulary = vocabulary_of(BYTES)
    ways = set()
    for number in range(20):
        text = random_grammar(Random(number))
        wanted = produced(gbnf.Parser(text).rules())
        if not wanted:
            continue
        lines, _, is_regular = gbnf.lark_of(text, "g")
        ways.add("regular" if is_regular else "lexemes" if any("X" in x.split(":")[0] for x in lines) else "letters")
        try:
            compiled = vocabulary.compiled(constraints.ebnf(text))
            found = {each for each in TEXTS if accepts_tokens(compiled, each, BYTES)}
        except ValueError:  # it takes too much work
            continue
        assert found == wanted, text
    assert ways == {"regular", "lexemes", "letters"}


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # of anything
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
CASES: list[tuple[str, list[str], list[str]]] = [
    (JSON, ['{"a":[1,2.5e3,{"b":null}]}', '{"a" :1}', '{"a": "\\u00e9日"} '], ['{"a":01}', "[1]", '{"a":1']),
    ('root ::= "(" root ")" | [a-z]* "b"', ["(aab)", "((b))"], ["(a)", "(b"]),
    ('root ::= x\nx ::= "x" x | "y"', ["y", "xxy"], ["x", ""]),
    ('root ::= "\\u00e9" "\\x41" [\\-\\]\\n^] .\n  | "/"', ["éA-日", "éA]x", "éA\ny", "/"], ["é", "A"]),
    ('root ::= a-1{2,}\na-1 ::= "x" | ', ["", "xxx"], ["y"]),
]


@pytest.mark.parametrize(("grammar", "fitting", "others"), CASES, ids=range(len(CASES)))
def test_grammars(grammar: str, fitting: list[str], others: list[str]) -> None:
    for texts, fits in ((fitting, True), (others, False)):
        for text in texts:
            assert accepts(constraints.ebnf(grammar), text) is fits, text


@pytest.mark.parametrize(("grammar", "words"), [
    ("root ::= other", "'other'"), ('a ::= "b"', "'root'"), ('root ::= "a"\nroot ::= "b"', "twice"),
    ('root ::= "a" root | r\nr ::= root r', "no finite text"), ("root ::= (", "')'"), ('root ::= "a" )', "no group"),
    ('root ::= "a', "does not end"), ("root ::= [z-a]", "wrong order"), ('root ::= "a"{2,1}', "wrong order"),
    ('root ::= "\\q"', "unknown escape"), ('root ::= "\\ud800"', "no character"), ('start: "a"', "'::='"),
    ("root ::= " + '"a"? ' * 5000, "4096 repetitions"), ("root ::= " + "(" * 200 + ")" * 200, "100 groups"),
])  # fmt: skip
def test_grammars_that_are_wrong(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        constraints.lark_of(constraints.ebnf(grammar))
