"""What xgrammar leaves out of JSON schemas and regular expressions, so that it can be refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

# -- JSON schemas --------------------------------------------------------------------------------------------------

_MAX_DEPTH = 64  # schemas within schemas

# Where a schema has other schemas: as values of an object, as items of a list, as itself.
_IN_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "propertyNames")

_NOT_FOLLOWED = (
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
)
_NOT_TOGETHER = (
    ("pattern", "minLength"),
    ("pattern", "maxLength"),
    ("format", "minLength"),
    ("format", "maxLength"),
    ("patternProperties", "properties"),
    ("propertyNames", "properties"),
    ("propertyNames", "patternProperties"),
)
_NEED_TYPE = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), ("integer", "number")),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties"), ("object",)),
    "multipleOf": ("integer",),
}
_REMARKS = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "discriminator",
    "$comment",
    "$defs",
    "definitions",
    "$schema",
    "$id",
)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def check_schema(schema: Any) -> None:
    """Raises ValueError for a JSON schema with keywords that answers would not follow."""
    waiting = [(schema, 0, False)]
    while waiting:
        each, depth, is_name = waiting.pop()
        if depth > _MAX_DEPTH:
            raise ValueError(f"the schema has more than {_MAX_DEPTH} schemas within each other; make it flatter")
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise ValueError(f"{json.dumps(each)[:50]} stands where a JSON schema is needed")
        try:
            _check_keywords({"type": "string", **each} if is_name else each)
        except TypeError as error:
            raise ValueError(f"a keyword of the schema has a value of the wrong type: {error}") from error
        for name, value in each.items():
            waiting += [(inner, depth + 1, name == "propertyNames") for inner in _inner(name, value)]


def _inner(name: str, value: Any) -> Iterable[Any]:
    if name in _IN_OBJECTS and isinstance(value, dict):
        return value.values()
    if name in _IN_LISTS and isinstance(value, list):
        return value
    if name in _ALONE:
        return value if isinstance(value, list) else [value]
    return ()


def _check_keywords(schema: dict[str, Any]) -> None:
    for name in _NOT_FOLLOWED:
        if name in schema and schema[name] is not False:
            raise ValueError(f"the schema's keyword {name!r} cannot be followed; leave it out")
    for one, other in _NOT_TOGETHER:
        if one in schema and other in schema:
            raise ValueError(f"the schema's keywords {one!r} and {other!r} cannot be followed together; leave one out")
    if len(schema.get("allOf") or ()) > 1:
        raise ValueError("the schema's keyword 'allOf' cannot be followed with several schemas; put them into one")
    if len(schema.get("patternProperties") or ()) > 1:
        raise ValueError("the schema's keyword 'patternProperties' can only have one pattern; leave the others out")
    for pattern in [schema.get("pattern", ""), *(schema.get("patternProperties") or ())]:
        as_xgrammar_reads(pattern)
    _check_types(schema)
    _check_names(schema)


def _check_types(schema: dict[str, Any]) -> None:
    given = schema.get("type")
    types = set(given) if isinstance(given, list) else {given}
    for name, needed in _NEED_TYPE.items():
        if name in schema and not types.intersection(needed):
            raise ValueError(f"the schema's keyword {name!r} is only followed beside 'type': {needed[0]!r}; add that")
    if "multipleOf" in schema and type(schema["multipleOf"]) is not int:
        raise ValueError("the schema's keyword 'multipleOf' is only followed with an integer")
    values = [*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])]
    fitting = tuple(kind for name in types for kind in _TYPES.get(str(name), ()))
    for value in values if given is not None else ():
        if not isinstance(value, fitting) or (isinstance(value, bool) and bool not in fitting):
            raise ValueError(f"the schema's value {json.dumps(value)[:50]} is not of its type {given!r}")


def _check_names(schema: dict[str, Any]) -> None:
    known = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in known:
            raise ValueError(f"the schema requires {name!r}, which is none of its 'properties'; add it there")
    if "$ref" in schema:
        reference = schema["$ref"]
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(f"the schema's reference {reference!r} leads elsewhere; put what it names under '$defs'")
        beside = [name for name in schema if name not in _REMARKS and name != "$ref" and not name.startswith("x-")]
        if beside:
            raise ValueError(f"the schema's keyword {beside[0]!r} is not followed beside '$ref'; leave it out")


# -- regular expressions -------------------------------------------------------------------------------------------

_NAMED_GROUP = re.compile(r"\(\?P<\w+>")
_ESCAPES = frozenset("dDwWsSntrfvxu0")  # letters and digits that may follow a backslash


def as_xgrammar_reads(pattern: str) -> str:
    """A regular expression of Python's as xgrammar understands it: a dot is no line break, and groups have no names.

    Raises ValueError for what xgrammar would ignore or read in another way. It finds other mistakes itself.
    """
    made: list[str] = []
    depth, place = 0, 0
    while place < len(pattern):
        letter, rest = pattern[place], pattern[place + 1 : place + 3]  # not all: long patterns would take for ever
        taken = shown = letter
        if letter == "\\":
            if rest[:1].isalnum() and rest[0] not in _ESCAPES:
                raise ValueError(f"the regular expression has \\{rest[0]}, which cannot be followed; leave it out")
            taken = shown = letter + rest[:1]
        elif letter == "[":
            taken = _class_at(pattern, place)
            shown = re.sub(r"^(\[\^?)\]", r"\1\\]", taken)
        elif letter == "(":
            depth += 1
            named = _NAMED_GROUP.match(pattern, place)
            if named is None and rest.startswith("?") and not rest.startswith("?:"):
                raise ValueError(f"the regular expression has {pattern[place : place + 4]!r}, which cannot be followed")
            if named is not None:
                made.append("(")
                place = named.end()
                continue
        elif letter == ")":
            depth -= 1
        elif (letter == "^" and (depth or (place and pattern[place - 1] != "|"))) or (
            letter == "$" and (depth or (rest and rest[0] != "|"))
        ):
            raise ValueError(f"the regular expression has {letter!r} in its middle, which cannot be followed")
        made.append("[^\\n]" if taken == "." else shown)
        place += len(taken)
    return "".join(made)


def _class_at(pattern: str, start: int) -> str:
    """The character class that begins there; all of the rest if it does not end."""
    end = start + 1 + pattern.startswith("^", start + 1)
    end += pattern.startswith("]", end)
    while end < len(pattern) and pattern[end] != "]":
        end += 2 if pattern[end] == "\\" else 1
    return pattern[start : end + 1]
