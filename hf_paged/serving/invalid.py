"""Turns FastAPI's and pydantic's errors of a body into one problem, which names the field, its value and what is
allowed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from hf_paged.serving.problems import Problem
from hf_paged.serving.values import TAGS, kind_of

# Characters of a value: enough to find it again, and an error of one line.
_MAX_SHOWN = 60
# Characters on either side of an error in JSON, because one long line may be all of the body.
_NEAR = 12
# Fields that other servers, or `generate`, have for the same thing.
_REPLACED = {
    "guided_json": 'use structured_outputs={"json": ...} or response_format',
    "guided_regex": 'use structured_outputs={"regex": ...}',
    "guided_choice": 'use structured_outputs={"choice": [...]}',
    "guided_grammar": 'use structured_outputs={"grammar": ...}',
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "do_sample": "temperature=0 is greedy search, and a higher one samples",
    "num_beams": "use use_beam_search=true, where n is the number of beams",
    "extra_body": "a client's argument; its fields stand beside the others in a request",
}


def invalid(errors: Sequence[Any], body: Any) -> Problem:
    """The problem that the first of pydantic's error records of a request describes. body: what was checked."""
    error = errors[0]
    parts = error["loc"][1:]
    if error["type"] == "json_invalid":
        return Problem(400, f"the body is not valid JSON: {error['ctx']['error']}, {_near(body, *parts)}")
    if not parts and error["type"] == "missing":
        return Problem(422, "the body is empty; send a JSON object", code="invalid_field")
    if error["type"] == "string_unicode" and (path := _holder(parts, body, error["input"])) is not None:
        place, key = _shown(path), json.dumps(error["input"][:_MAX_SHOWN])
        return Problem(
            422, f"{place or 'the body'}: the key {key} is no Unicode", param=place or None, code="invalid_field"
        )
    place = _shown(_path(parts, body, error))
    if not place:
        at = "" if error["type"] == "value_error" else f"the body is {kind_of(error['input'])}; "
        return Problem(422, f"{at}{_remedy(error)}", code="invalid_field")
    return Problem(422, f"{place}{_value(error)}: {_remedy(error)}", param=place, code="invalid_field")


def not_json(content_type: str) -> Problem:
    """For a body that is not said to be JSON, and was not read."""
    given = f"the header Content-Type is {content_type[:100]}" if content_type else "the header Content-Type is missing"
    return Problem(415, f"{given}; send JSON, with 'Content-Type: application/json'", code="not_json")


def _near(text: str, place: int) -> str:
    """Say where in the text an error is."""
    line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
    around = text[max(0, place - _NEAR) : place + _NEAR]
    return f"line {line}, column {column}, near {json.dumps(around, ensure_ascii=False)}"


def _path(parts: Sequence[str | int], body: Any, error: Any) -> Sequence[str | int]:
    """Return the keys and numbers that lead to the value, without pydantic's names of types in between. A key may be
    such a name too, so the value of the error tells them apart."""
    value, inner, last = error["input"], parts, parts[:0]
    if error["type"] == "missing":  # of an object, which a validator may have copied
        inner, last = parts[:-1], parts[-1:]
        found = _steps(inner, body, lambda at: isinstance(at, dict) and last[0] not in at)
    else:
        found = _steps(inner, body, lambda at: at is value)
    return [part for part in parts if part not in TAGS] if found is None else [*found, *last]


def _holder(parts: Sequence[str | int], body: Any, key: str) -> list[str | int] | None:
    """Return the path of the object with this wrong key; None: the error is about a value."""
    return _steps(parts, body, lambda at: isinstance(at, dict) and key in at)


def _steps(parts: Sequence[str | int], at: Any, is_there: Callable[[Any], bool]) -> list[str | int] | None:
    """Choose from the parts a path from `at` to a place where `is_there` is true; None: there is no such path."""
    if not parts:
        return [] if is_there(at) else None
    first, rest = parts[0], parts[1:]
    if first in at if isinstance(at, dict) else isinstance(at, list) and first in range(len(at)):
        # A part that is in the value may still be one of pydantic's names: then this way leads nowhere, and the next
        # one is tried.
        found = _steps(rest, at[first], is_there)
        if found is not None:
            return [first, *found]
    return _steps(rest, at, is_there)


def _shown(path: Sequence[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _value(error: Any) -> str:
    """Show the wrong value in a few words, unless the message has it."""
    given = error["input"]
    if error["type"] in ("missing", "extra_forbidden", "value_error"):
        return ""
    if isinstance(given, list | dict):
        return f" is {kind_of(given)}" + f" of {len(given)}" * isinstance(given, list)
    is_long = isinstance(given, str) and len(given) > _MAX_SHOWN
    return f"={json.dumps(given[:_MAX_SHOWN])}..." if is_long else f"={json.dumps(given, default=str)}"


def _remedy(error: Any) -> str:
    """Say what is allowed in place of the value."""
    context = error.get("ctx") or {}
    expected = [each.strip("'") for each in str(context.get("expected_tags", "")).split(", ")]
    if error["type"] == "union_tag_invalid" and TAGS.issuperset(expected):
        return f"{' or '.join(expected)} is needed"
    if error["type"] == "union_tag_not_found":
        return f"it needs the field {context['discriminator']}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "an object is needed"
    if error["type"] == "extra_forbidden":
        return f"this field is not known; {_REPLACED.get(str(error['loc'][-1]), 'leave it out')}"
    return str(error["msg"]).removeprefix("Value error, ")
