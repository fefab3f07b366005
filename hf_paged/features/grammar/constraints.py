"""Constraints: sets of texts, as data, and the grammars in llguidance's Lark that describe them.

A constraint is a JSON value (a dict), so that it can be compared and cached. The functions that make one take what they
are given; `lark_of`, whose time grows with the constraint, finds what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

from hf_paged.features.grammar import gbnf, patterns, schemas

Constraint = dict[str, Any]
"""{kind: value, ...}; made by the functions below."""


def key_of(constraint: Constraint) -> str:
    """Equal for equal constraints. The order of a schema's properties counts: answers have it."""
    return json.dumps(constraint, ensure_ascii=False)


def is_larger(constraint: Constraint, limit: int) -> bool:
    """Return True if the constraint has more than about `limit` characters, and stop counting there."""
    # With a list in place of recursion: what is measured may be deeper than the stack.
    left = limit
    waiting: list[Iterator[Any]] = [iter([constraint])]
    while waiting:
        for value in waiting[-1]:
            left -= len(value) if isinstance(value, (str, bytes)) else 1
            if left < 0:
                return True
            if isinstance(value, dict):
                waiting.append(each for item in value.items() for each in item)
                break
            if isinstance(value, (list, tuple)):
                waiting.append(iter(value))
                break
        else:
            waiting.pop()
    return False


# -- making them ---------------------------------------------------------------------------------------------------


def json_schema(schema: object, *, strict: bool = True, owner: str = "") -> Constraint:
    """JSON documents of a schema: a dict, a bool, JSON text, or a pydantic model class.

    strict: objects that name their properties, and say nothing of `additionalProperties`, have no others. owner: what
    errors begin with.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, (dict, bool, str, bytes)):
        raise ValueError(f"json_schema: a dict, a bool or a pydantic model is needed, not a {type(schema).__name__}")
    if isinstance(schema, bytes):
        schema = schema.decode(errors="replace")
    return {"json_schema": schema, "strict": strict, "owner": owner}


def json_object() -> Constraint:
    """Any JSON object."""
    return json_schema({"type": "object"}, strict=False)


def regex(pattern: str) -> Constraint:
    """Texts that match a regular expression of Python from their beginning to their end."""
    if not isinstance(pattern, str) or not pattern:
        raise ValueError("regex: a string that is not empty is needed")
    return {"regex": pattern}


def ebnf(text: str) -> Constraint:
    """Texts of a grammar in the EBNF of llama.cpp (GBNF); its start is the rule `root`."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError("grammar: a string that is not empty is needed")
    return {"ebnf": text}


def choice(texts: Iterable[str]) -> Constraint:
    """One of several texts."""
    made = list(dict.fromkeys(texts)) if not isinstance(texts, str) else []
    if not made or not all(isinstance(text, str) and text for text in made):
        raise ValueError("choice: a list of strings that are not empty is needed")
    return {"choice": made}


def sequence(*parts: Constraint) -> Constraint:
    """Texts of the first part, followed by texts of the next one, and so on."""
    inner = (part.get("sequence", [part]) for part in parts)
    return {"sequence": [each for some in inner for each in some]}


def either(parts: Sequence[Constraint]) -> Constraint:
    """Texts of any of the parts."""
    return {"either": list(parts)}


def several(part: Constraint) -> Constraint:
    """Texts of the part, one after the other; also none."""
    return {"repeat": part}


def unless_begun(part: Constraint, begin: str) -> Constraint:
    """Texts of the part that do not begin so, if the part is regular; else its texts."""
    return {"unless_begun": part, "begin": begin}


def until(end: str) -> Constraint:
    """Any text, up to and with `end`, which is in it once."""
    return {"until": end}


def without(part: str) -> Constraint:
    """Any text that does not contain `part`."""
    return {"without": part}


# -- as grammars ---------------------------------------------------------------------------------------------------


def check_installed() -> None:
    """Raises ImportError that names the extra."""
    if find_spec("llguidance") is None:
        raise ImportError("grammars need the package llguidance; in a checkout: pip install -e '.[grammar]'")


def lark_of(constraint: Constraint) -> str:
    """The grammar of a constraint in llguidance's Lark. Raises ValueError if there is none.

    The tokens that the model chooses are free: none are forced because a tokenizer would write the text with them.
    """
    writer = _Writer()
    try:
        expression, _ = writer.expression(constraint)
    except RecursionError as error:
        raise ValueError("the constraint is too deep; make it flatter") from error
    return "\n".join(['%llguidance {"no_forcing": true}', f"start: {expression}", *writer.lines])


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._made: dict[str, tuple[str, bool]] = {}

    def expression(self, constraint: Constraint) -> tuple[str, bool]:
        """An expression of Lark; whether it may be part of a terminal.

        What is regular becomes one terminal: of two, llguidance would take the longest text for the first."""
        key = key_of(constraint)
        if key not in self._made:
            self._made[key] = self._expression(constraint)
        return self._made[key]

    def _expression(self, constraint: Constraint) -> tuple[str, bool]:
        kind = next(iter(constraint))
        value = constraint[kind]
        if kind == "json_schema":
            return self._named(f"%json {self._schema(constraint)}", False), False
        if kind == "ebnf":
            lines, root, is_regular = gbnf.lark_of(value, f"g{len(self.lines)}r")
            self.lines += lines
            return root, is_regular
        if kind == "until":
            return self._named(f"/{patterns.ANY}*{patterns.literal(value)}/", False, options="[lazy]"), False
        if kind == "without":
            any_text, text = f"{patterns.ANY}*", patterns.literal(value)
            return self._named(f"/{any_text}/ & ~/{any_text}{text}{any_text}/", True), True
        if kind == "repeat":
            inner, is_regular = self.expression(value)
            return self._named(f"({inner})*", is_regular), is_regular
        if kind == "unless_begun":
            inner, is_regular = self.expression(value)
            if is_regular:
                inner = self._named(f"{inner} & ~/{patterns.literal(constraint['begin'])}{patterns.ANY}*/", True)
            return inner, is_regular
        if kind in ("sequence", "either"):
            return self._joined(list(map(self.expression, value)), " " if kind == "sequence" else " | ")
        return self._named(_regex(kind, value), True), True

    def _joined(self, parts: list[tuple[str, bool]], sign: str) -> tuple[str, bool]:
        is_regular = all(is_regular for _, is_regular in parts)
        # Two terminals in a row would be divided where the first is longest, which may not be where the second fits.
        if not is_regular:  # those in a row that are regular are one terminal
            grouped: list[tuple[str, bool]] = []
            for text, regular in parts:
                if regular and grouped and grouped[-1][1]:
                    grouped[-1] = self._named(f"{grouped[-1][0]}{sign}{text}", True), True
                else:
                    grouped.append((text, regular))
            parts = grouped
        return self._named(sign.join(text for text, _ in parts), is_regular), is_regular

    def _named(self, body: str, is_regular: bool, options: str = "") -> str:
        name = f"P{len(self.lines)}" if is_regular else f"p{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _schema(self, constraint: Constraint) -> str:
        owner = f"{constraint['owner']}: " if constraint["owner"] else ""
        try:
            schema = constraint["json_schema"]
            if isinstance(schema, str):
                schema = _parsed(schema)
            return json.dumps(schemas.followed(schema, strict=constraint["strict"]), allow_nan=False)
        except ValueError as error:
            raise ValueError(f"{owner}{error}") from error


def _regex(kind: str, value: Any) -> str:
    if kind == "choice":
        return f"/{'|'.join(map(patterns.literal, value))}/"
    made = patterns.whole(value)
    return f"/{made}/" if made else '""'


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from error
