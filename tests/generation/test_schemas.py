"""JSON schemas and regular expressions: what the grammar would not follow is refused, and the rest is followed."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from hf_paged.generation.sampling import constraints
from hf_paged.generation.sampling.grammar import Compiled, Matcher, vocabulary_of
from tests.generation.test_grammar import tokenizer


def accepts(constraint: constraints.Constraint, text: str) -> bool:
    return accepts_tokens(vocabulary_of(tokenizer()).compiled(constraint), text)


def accepts_tokens(compiled: Compiled, text: str) -> bool:
    """Whether a text, written with the tokenizer's tokens, stays within the grammar and may end."""
    matcher = Matcher(compiled, [2])
    for token in tokenizer()(text, add_special_tokens=False)["input_ids"]:
        if not int(matcher.mask(2048)[token // 32]) >> token % 32 & 1:
            return False
        matcher.advance([token])
    return matcher.is_complete()


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": STRING}, "contains"),
    ({"not": STRING}, "not"),
    ({"if": STRING, "then": {"maxLength": 1}}, "if"),
    ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"properties": {"a": {}}, "unevaluatedProperties": {}}, "unevaluatedProperties"),
    ({"type": "string", "pattern": "^a*$", "maxLength": 2}, "maxLength"),
    ({"type": "string", "format": "email", "minLength": 2}, "minLength"),
    ({"properties": {"ab": {}}, "patternProperties": {"^a": {}}}, "patternProperties"),
    ({"patternProperties": {"^a": {}, "^b": {}}}, "patternProperties"),
    ({"properties": {"b": {}}, "propertyNames": {"pattern": "^a$"}}, "propertyNames"),
    ({"allOf": [STRING, {"enum": ["y"]}]}, "allOf"),
    ({"maxLength": 1}, "maxLength"),
    ({"minimum": 3}, "minimum"),
    ({"minItems": 2}, "minItems"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 7.5}, "multipleOf"),
    ({"type": "string", "enum": ["a", 5]}, "5"),
    ({"type": "integer", "const": True}, "true"),
    ({"properties": {"a": {}}, "required": ["z"]}, "'z'"),
    ({"$ref": "http://example.org/x"}, "example.org"),
    ({"$defs": {"s": STRING}, "$ref": "#/$defs/s", "maxLength": 1, "type": "string"}, "maxLength"),
    ({"type": "string", "pattern": "(?=a)b"}, "(?=a"),
    ({"properties": {"a": 5}}, "5"),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_by_name(schema: dict[str, Any], words: str) -> None:
    for wrapped in (schema, {"type": "object", "properties": {"x": {"anyOf": [{"items": schema}, STRING]}}}):
        with pytest.raises(ValueError, match=re.escape(words)):
            constraints.json_schema(wrapped)


@pytest.mark.parametrize(
    "schema",
    [
        {"required": 5},
        {"enum": 5},
        {"type": {"a": 1}},
        {"type": "string", "pattern": 5},
        {"allOf": 5},
        {"patternProperties": 5},
    ],
    ids=str,
)
def test_a_keyword_of_the_wrong_type_is_an_error_of_the_schema(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a value of the wrong type"):
        constraints.json_schema(schema)


def test_names_and_data_are_no_keywords() -> None:
    for schema in (
        {"type": "object", "properties": {"not": STRING, "if": INTEGER}, "required": ["not"]},
        {"enum": [{"not": 1}, {"uniqueItems": True}]},
        {"type": "string", "default": {"not": 1}, "title": "contains"},
        {"type": "array", "items": INTEGER, "uniqueItems": False},
    ):
        constraints.json_schema(schema)


def test_schemas_within_schemas() -> None:
    nested: Any = {"type": "string"}
    for _ in range(65):
        nested = {"type": "array", "items": nested}
    with pytest.raises(ValueError, match="64"):
        constraints.json_schema(nested)


FOLLOWED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 5}, [-3, 4], [-4, 5, 1.5, "1"]),
    ({"type": "integer", "multipleOf": 5}, [0, 10, -15], [7]),
    ({"type": "number", "exclusiveMinimum": 5}, [5.5, 6], [5, 4.9]),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "éé"], ["", "abc"]),
    ({"type": "string", "pattern": "^a.b$"}, ["axb"], ["ab", "axbc"]),
    ({"type": "string", "format": "date"}, ["2026-11-22"], ["hello"]),
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, [[1, "a"]], [[1, 2]]),
    ({"properties": {"a": INTEGER}, "required": ["a"], "type": "object"}, [{"a": 1}], [{}, {"a": "x"}]),
    ({"type": "object", "additionalProperties": INTEGER}, [{}, {"x": 1, "y": 2}], [{"x": "y"}]),
    ({"type": "object", "patternProperties": {"^a$": INTEGER}}, [{"a": 1}], [{"a": "x"}]),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, [{"a": 1}], [{"b": 1}]),
    ({"enum": ["a", 5, None, [1]]}, ["a", 5, None, [1]], ["b", 6]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": 7}]}, ["a", 7], ["aa", 8]),
    (
        {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        [{}, {"n": {"n": {}}}],
        [{"n": 1}],
    ),
    (True, [1, "a", [None]], []),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), FOLLOWED, ids=lambda value: str(value)[:40])
def test_what_is_followed(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    made = constraints.json_schema(schema)
    for value in fitting:
        jsonschema.validate(value, schema)
        assert accepts(made, json.dumps(value, ensure_ascii=False)), value
    for value in others:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
        assert not accepts(made, json.dumps(value, ensure_ascii=False)), value


def test_strict_objects_have_no_other_properties() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}}
    for strict in (True, False):
        assert accepts(constraints.json_schema(schema, strict=strict), '{"a": 1, "b": 2}') is not strict
    assert accepts(constraints.json_schema({"type": "object"}), '{"b": 2}')
    assert accepts(constraints.json_object(), '{"b": [2]}') and not accepts(constraints.json_object(), "[1]")


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"a.b", ["axb", "a日b"], ["a\nb", "ab"]),
    (r"[.]\.\d{2}", ["..12"], ["x.12", ".x12"]),
    (r"(?P<year>\d+)-(?:a|b)?", ["12-", "1-a"], ["a", "-b"]),
    (r"^ab$|^[]^a-]+$", ["ab", "]-^"], ["b]"]),
    (r"x*?y", ["y", "xxy"], ["x"]),
]


@pytest.mark.parametrize(("pattern", "fitting", "others"), PATTERNS)
def test_regular_expressions(pattern: str, fitting: list[str], others: list[str]) -> None:
    made = constraints.regex(pattern)
    for text, wanted in [*((each, True) for each in fitting), *((each, False) for each in others)]:
        assert (re.fullmatch(pattern, text) is not None) is wanted
        assert accepts(made, text) is wanted, text


@pytest.mark.parametrize("pattern", ["(?i)a", "(?!a)b", "(?<=a)b", r"\bx", r"(a)\1", r"a\Z", "a^b", "a$b", "(a$)"])
def test_regular_expressions_that_cannot_be_followed(pattern: str) -> None:
    with pytest.raises(ValueError, match="cannot be followed"):
        constraints.regex(pattern)


class Counted(str):
    """Counts the characters of its slices."""

    copied = 0

    def __getitem__(self, place: Any) -> str:
        part = super().__getitem__(place)
        Counted.copied += len(part)
        return part


def test_a_long_pattern_is_read_in_linear_time() -> None:
    pattern = Counted(r"ab[c]\d(?P<name>x)(?:y)" * 200)
    assert as_xgrammar_reads(pattern) == r"ab[c]\d(x)(?:y)" * 200
    assert Counted.copied < 10 * len(pattern)
