"""Keywords of JSON schemas: which are followed, what they may have, and the formats of strings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

# llguidance has bounds as fp64.
_MAX_NUMBER = 2**53

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
        "$defs",
        "definitions",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
        "externalDocs",
        "xml",
    ]
)
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
OBJECTS = ("properties", "patternProperties")  # values of an object are schemas
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")  # items of a list are


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_bound(value: Any) -> bool:
    return is_number(value) and abs(value) < _MAX_NUMBER


def is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_filled(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


# What is followed, and what its value has to be.
FOLLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (is_type, f"one of {', '.join(sorted(TYPES))}, or a list of them"),
    "enum": (_is_filled, "a list that is not empty"),
    "const": (lambda value: True, ""),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "a whole number that is not negative"),
    ),
    **dict.fromkeys(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        (is_bound, "a number between -2^53 and 2^53"),
    ),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format", "$ref"), (_of(str), "a string")),
    "required": (are_names, "a list of strings"),
    **dict.fromkeys(OBJECTS, (_of(dict), "an object whose values are schemas")),
    **dict.fromkeys(LISTS, (_is_filled, "a list of schemas that is not empty")),
    **dict.fromkeys(("items", "additionalProperties", "propertyNames"), (_of(object), "")),
}

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{0,3}}{_LABEL.replace('61', '59')}"  # at most 253 characters
_HEX = "[0-9a-fA-F]{1,4}"
_MAIL = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_URL = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(?:[0-9]+W|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
    r"(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?"
    r"|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))",
    "email": rf"{_MAIL}(?:\.{_MAIL})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "|".join(
        [f"(?:{_HEX}:){{7}}{_HEX}", "::", f"(?:{_HEX}:){{1,7}}:", f"::{_HEX}(?::{_HEX}){{0,6}}"]
        + [f"(?:{_HEX}:){{{left}}}(?::{_HEX}){{1,{7 - left}}}" for left in range(1, 7)]
    ),
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,5}})?(?:/{_URL}*)*|{_URL}+(?:/{_URL}*)*)"
    rf"(?:\?(?:{_URL}|[/?])*)?(?:#(?:{_URL}|[/?])*)?",
}
"""Formats of strings, as regular expressions for whole texts. Other formats are annotations."""


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def anchors(schema: object, path: str = "#") -> Iterator[tuple[str, str]]:
    """Each `$anchor`, and the pointer to its schema."""
    waiting = [(schema, path)]
    while waiting:
        each, place = waiting.pop()
        if not isinstance(each, dict):
            continue
        if isinstance(each.get("$anchor"), str):
            yield each["$anchor"], place
        for name, value in each.items():
            if name in (*OBJECTS, "$defs", "definitions") and isinstance(value, dict):
                waiting += [(inner, f"{place}/{escaped(name)}/{escaped(key)}") for key, inner in value.items()]
            elif name in LISTS and isinstance(value, list):
                waiting += [(inner, f"{place}/{name}/{number}") for number, inner in enumerate(value)]
            elif name in ("items", "additionalProperties", "propertyNames"):
                waiting.append((value, f"{place}/{name}"))


def types_of(value: object) -> set[str]:
    if value is None or isinstance(value, bool):
        return {"null"} if value is None else {"boolean"}
    if isinstance(value, (int, float)):
        return {"integer", "number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}
