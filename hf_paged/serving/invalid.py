"""Turns pydantic's errors of a body into one problem, which names the field, its value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hf_paged.serving.problems import Problem
from hf_paged.serving.schema import TAGS, kind_of

_MAX_SHOWN = 60  # characters of a value


def invalid(errors: Sequence[Any]) -> Problem:
    """The problem that the first of pydantic's error records of a request describes."""
    error = errors[0]
    place = _place(error["loc"][1:])
    if error["type"] == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {error['msg']} ({place})")
    text = f"{place}{_value(error)}: {_remedy(error)}" if place else _remedy(error)
    return Problem(422, text, param=place or None, code="invalid_field")


_BY_TYPE = ("content", "input", "response_format", "format", "tool_choice")
"""Fields of objects, or lists of objects, whose kinds are told by `type`: pydantic writes the type behind them."""


def _place(parts: Sequence[str | int]) -> str:
    """Of an error, in the names of the body's own fields."""
    made, is_type = [], False
    for part in parts:
        if part in TAGS or (is_type and isinstance(part, str)):
            is_type &= part in TAGS
            continue
        is_type = part in _BY_TYPE if isinstance(part, str) else is_type
        made.append(str(part))
    return ".".join(made)


def _value(error: Any) -> str:
    """The wrong value, in a few words, unless the message has it."""
    given = error["input"]
    if error["type"] in ("missing", "extra_forbidden", "value_error"):
        return ""
    if isinstance(given, list | dict):
        return f" is {kind_of(given)}" + f" of {len(given)}" * isinstance(given, list)
    is_long = isinstance(given, str) and len(given) > _MAX_SHOWN
    return f"={json.dumps(given[:_MAX_SHOWN])}..." if is_long else f"={json.dumps(given, default=str)}"


def _remedy(error: Any) -> str:
    """What is allowed in place of the value."""
    context = error.get("ctx") or {}
    expected = [each.strip("'") for each in str(context.get("expected_tags", "")).split(", ")]
    if error["type"] == "union_tag_invalid" and TAGS.issuperset(expected):
        return f"{' or '.join(expected)} is needed"
    if error["type"] == "union_tag_not_found":
        return f"it needs the field {context['discriminator']}"
    if error["type"] == "extra_forbidden":
        return "this field is not known; leave it out"
    return str(error["msg"]).removeprefix("Value error, ")
