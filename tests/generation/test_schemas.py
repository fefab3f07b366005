"""JSON schemas and regular expressions: what the grammar would not follow is refused, and the rest is followed."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import jsonschema
import pytest

from hf_paged.features.grammar import constraints, patterns
from hf_paged.features.grammar.vocabulary import Matcher, vocabulary_of
from tests.generation import random_constraints
from tests.generation.grammars import accepts, tokenizer
from tests.generation.random_constraints import Answers, bytes_tokenizer

STRING, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": STRING}, "contains"),
    ({"not": STRING}, "not"),
    ({"if": STRING, "then": {"maxLength": 1}}, "if"),
    ({"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"properties": {"a": {}}, "unevaluatedProperties": {}}, "unevaluatedProperties"),
    ({"type": "string", "minLenght": 2}, "minLenght"),
    ({"type": "string", "nullable": True}, "nullable"),
    ({"type": "object", "patternProperties": {"^a": {}, "a$": {}}}, "patternProperties"),
    ({"patternProperties": {"^a": {}}, "propertyNames": {"pattern": "^a$"}}, "propertyNames"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2}, "maxProperties"),
    ({"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames"),
    ({"oneOf": [INTEGER, {"minimum": 3}]}, "oneOf"),
    ({"type": "integer", "multipleOf": 1_000_003}, "multipleOf"),
    ({"type": "integer", "multipleOf": -1}, "multipleOf"),
    ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"enum": [1, 10**400]}, "enum"),
    ({"type": "string", "minLength": -1}, "minLength"),
    ({"$ref": "http://example.org/x"}, "example.org"),
    ({"$ref": "#x"}, "#x"),
    ({"$ref": "#/$defs/none"}, "#/$defs/none"),
    ({"$ref": "#/properties/x~1y/items"}, "leads back"),
    ({"$id": "http://example.org/x", "type": "object"}, "$id"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
    ({"properties": {"a": 5}}, "5"),
    ({"type": "string", "enum": [5]}, "no answer"),
    ({"type": "string", "const": "abc", "maxLength": 2}, "no answer"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "no answer"),
    ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "no answer"),
    *(
        ({name: value}, name)
        for name, value in {
            "required": 5, "enum": 5, "type": {"a": 1}, "pattern": 5, "allOf": 5, "patternProperties": 5, "anyOf": []
        }.items()
    ),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_by_name(schema: dict[str, Any], words: str) -> None:
    wrapped = {
        "type": "object",
        "properties": {"x/y": {"type": "array", "items": schema, "minItems": 1}},
        "required": ["x/y"],
    }
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        vocabulary_of(tokenizer()).compiled(constraints.json_schema(wrapped))
    assert "keyword" not in str(caught.value) or "(at #/properties/x~1y/items" in str(caught.value)


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "integer", "minimum": 4, "maximum": 3}, "no answer: minimum (4) is greater than maximum (3)"),
    ({"type": "string", "pattern": "[😀é]*?/+?$", "format": "email"}, "'pattern', 'format', 'minLength'"),
    ({"type": "array", "items": {"$ref": "#", "maxItems": 2}}, "'$ref' leads back to a schema around it"),
    ({"type": "object", "patternProperties": {"^a": STRING, "b$": STRING}}, "patterns of one 'patternProperties'"),
], ids=str)  # fmt: skip
def test_what_the_compiler_refuses(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        vocabulary_of(tokenizer()).compiled(constraints.json_schema(schema))


def test_many_patterns_for_one_string() -> None:
    """The compiler's time and memory would grow exponentially with them. One for each of many strings is fine."""
    strings = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{number}}}c"} for number in range(16)]
    objects = [{"properties": {"x": {"type": "array", "items": each}}} for each in strings]
    named = {f"d{number}": each for number, each in enumerate(strings)}
    for wrong in (
        {"allOf": strings},
        {"allOf": objects, "type": "object"},
        {"$defs": named, "allOf": [{"$ref": f"#/$defs/{name}"} for name in named]},
        {"$defs": {"d": strings[0]}, "allOf": [{"anyOf": [each, {"type": "null"}]} for each in strings]},
    ):
        with pytest.raises(ValueError, match="is there more than 6 times for the same string"):
            constraints.lark_of(constraints.json_schema(wrong))
    for right in (
        {"type": "object", "properties": {f"p{number}": each for number, each in enumerate(strings)}},
        {"anyOf": strings},
        {"$defs": {"n": {"properties": {"a": strings[0], "n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    ):
        vocabulary_of(tokenizer()).compiled(constraints.json_schema(right))


def test_names_and_data_are_no_keywords() -> None:
    for schema in (
        {"type": "object", "properties": {"not": STRING, "if": INTEGER}, "required": ["not"]},
        {"enum": [{"not": 1}, {"uniqueItems": True}]},
        {"type": "string", "default": {"not": 1}, "title": "contains", "x-order": 3, "contentEncoding": "base64"},
        {"type": "array", "items": INTEGER, "uniqueItems": False},
    ):
        constraints.lark_of(constraints.json_schema(schema))


@pytest.mark.parametrize("is_in_references", [False, True])
def test_schemas_within_schemas(is_in_references: bool) -> None:
    nested: Any = {"type": "string"}
    for _ in range(65):
        nested = {"type": "array", "items": nested}
    if is_in_references:
        names = [{"type": "array", "items": {"$ref": f"#/$defs/{number + 1}"}} for number in range(2000)]
        nested = {"$defs": {str(number): each for number, each in enumerate([*names, STRING])}, "$ref": "#/$defs/0"}
    with pytest.raises(ValueError, match="64"):
        constraints.lark_of(constraints.json_schema(nested))


def test_answers_that_would_never_end() -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    for schema in (endless, False, {"type": "array", "items": False, "minItems": 1}):
        with pytest.raises(ValueError, match="no finite answer"):
            constraints.lark_of(constraints.json_schema(schema))
    inner = {"$defs": {"n": endless | {"properties": {"n": {"$ref": "#/$defs/n"}}}}}
    some = constraints.json_schema(
        {**inner, "properties": {"a": INTEGER, "n": {"$ref": "#/$defs/n"}}, "type": "object"}
    )
    assert accepts(some, '{"a": 1}') and not accepts(some, '{"n": {')


FOLLOWED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 5}, [-3, 4], [-4, 5, 1.5, "1"]),
    ({"type": "integer", "multipleOf": 5}, [0, 10, -15], [7]),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, [14, 700], [7, 15]),
    ({"type": "number", "multipleOf": 0.5}, [0.5, -2], [0.3]),
    ({"type": "number", "exclusiveMinimum": 5}, [5.5, 6], [5, 4.9]),
    ({"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}, [5.01, 5.5], [5, 5.6]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.1}, [0.01, 0.099], [0, 0.1, -0.01]),
    ({"type": "number", "exclusiveMinimum": -0.1, "exclusiveMaximum": 0}, [-0.01, -0.099], [0, -0.1, 0.01]),
    ({"type": "integer", "exclusiveMinimum": -2, "exclusiveMaximum": 2}, [-1, 0, 1], [-2, 2]),
    ({"type": "integer", "format": "int32"}, [7], ["7"]),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ["a", "éé", "\n"], ["", "abc"]),
    ({"type": "string", "pattern": "^a.b$"}, ["axb"], ["ab", "axbc"]),
    ({"type": "string", "pattern": "b+"}, ["abc", "b"], ["ac"]),
    ({"type": "string", "pattern": "(^a|b)c$"}, ["ac", "xbc"], ["xac", "bcx"]),
    ({"type": "string", "pattern": '^a"b$'}, ['a"b'], ["ab"]),
    ({"type": "string", "pattern": r"^a\\b$"}, ["a\\b"], ["a\b"]),
    ({"type": "string", "pattern": "^a\nb$"}, ["a\nb"], ["ab"]),
    ({"type": "string", "pattern": "^a*$", "minLength": 1, "maxLength": 2}, ["a", "aa"], ["", "aaa", "b"]),
    ({"minLength": 2}, ["ab", 1, None], ["a"]), ({"minimum": 3}, [3, "x"], [2]),
    ({"type": "string", "format": "date"}, ["2026-11-22", "2024-02-29"], ["hello", "2023-02-29"]),
    ({"type": "string", "format": "email", "maxLength": 6}, ["a@b.cd"], ["a@b.cde", "a"]),
    ({"type": "string", "format": "made-up"}, ["x"], [1]), ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, [[1, "a"]], [[1, 2]]),
    ({"properties": {"a": INTEGER}, "required": ["a"], "type": "object"}, [{"a": 1}], [{}, {"a": "x"}]),
    ({"type": "object", "additionalProperties": INTEGER}, [{}, {"x": 1, "y": 2}], [{"x": "y"}]),
    ({"type": "object", "patternProperties": {"^a$": INTEGER}}, [{"a": 1}], [{"a": "x"}]),
    ({"patternProperties": {'^q"$': INTEGER}, "additionalProperties": False}, [{'q"': 1}], [{"q": 1}]),
    ({"type": "object", "propertyNames": {"pattern": '^"$'}}, [{'"': 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"enum": ["a", 'q"']}}, [{"a": 1, 'q"': 2}], [{"b": 1}]),
    ({"minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": 1, "b": 1, "c": 1}]),
    ({"enum": ["a", 5, None, [1]]}, ["a", 5, None, [1]], ["b", 6]),
    ({"type": "string", "enum": ["a", 5, "b"], "maxLength": 1}, ["a", "b"], [5, "c"]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"const": 7}]}, ["a", 7], ["aa", 8]),
    ({"anyOf": [STRING, INTEGER], "type": "integer"}, [5], ["a"]),
    ({"allOf": [STRING, {"minLength": 2}], "maxLength": 3}, ["ab", "abc"], ["a", "abcd", 1]),
    ({"oneOf": [STRING, INTEGER], "maximum": 3}, ["a", 2], [4, None]),
    ({"const": {"a": [1, 'q"']}}, [{"a": [1, 'q"']}], [{}, {"a": [2]}]),
    ({"$defs": {"s": STRING}, "$ref": "#/$defs/s", "maxLength": 1}, ["a"], ["ab", 1]),
    ({"$defs": {"a/b": {"const": "x"}}, "$ref": "#/$defs/a~1b"}, ["x"], ["a"]),
    ({"$defs": {"t~u": INTEGER}, "$ref": "#/$defs/t~0u"}, [1], ["a"]),
    ({"$defs": {"s p": {"$anchor": "here", "const": 3}}, "items": {"$ref": "#here"}, "type": "array"}, [[3]], [[4]]),
    ({"$defs": {"s p": STRING}, "$ref": "#/$defs/s%20p"}, ["a"], [1]),
    ({"$id": "http://example.org/s", "$defs": {"s": STRING}, "$ref": "http://example.org/s#/$defs/s"}, ["a"], [1]),
    (
        {"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        [{}, {"n": {"n": {}}}], [{"n": 1}],
    ),
    (
        {
            "$defs": {kind: {"properties": {"kind": {"const": kind}}, "required": ["kind"], **OBJECT} for kind in "ab"},
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "kind"},
        },
        [{"kind": "a"}, {"kind": "b"}], [{"kind": "c"}, {}],
    ),
    (True, [1, "a", [None]], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "fitting", "others"), FOLLOWED, ids=lambda value: str(value)[:40])
def test_what_is_followed(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    made = constraints.json_schema(schema)
    for value in fitting:
        assert random_constraints.fault_of_value(schema, value) is None
        assert accepts(made, json.dumps(value, ensure_ascii=False)), value
    for value in others:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
        assert not accepts(made, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(("schema", "texts"), [
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"\n"', '"\x01"', '"\\ud800"', '"""']),
    ({"type": "string", "pattern": '^a"b$'}, ['"a"b"']),
    ({"type": "string", "pattern": "^a\nb$"}, ['"a\nb"']),
    ({"type": "object", "patternProperties": {'^"$': {}}, "additionalProperties": False}, ['{""":1}']),
    ({"type": "object", "propertyNames": {"pattern": '^"$'}}, ['{""":1}']),
], ids=str)  # fmt: skip
def test_every_answer_is_json(schema: Any, texts: list[str]) -> None:
    for text in texts:
        assert not accepts(constraints.json_schema(schema), text), text


def test_bytes_that_are_no_characters() -> None:
    """Surrogates, bytes out of order, and codes beyond the last one, in strings, names and regular expressions."""
    tokens = {piece: index for index, piece in enumerate(vocabulary_of(BYTES).bytes)}
    for constraint, begin in (
        (constraints.json_schema({"type": "string"}), b'"'),
        (constraints.json_schema({"type": "string", "pattern": "."}), b'"'),
        (constraints.json_schema({"type": "object"}), b'{"'),
        (constraints.regex("[^a]+"), b""),
        (constraints.ebnf("root ::= [^a]+"), b""),
    ):
        for wrong in (b"\xed\xa0\x80", b"\x80", b"\xc3\xc3", b"\xf4\x90\x80\x80", b"\xc0\xaf"):
            matcher = Matcher(vocabulary_of(BYTES).compiled(constraint), [0])
            allowed = []
            for byte in begin + wrong:
                token = tokens[bytes([byte])]
                allowed.append(int(matcher.mask(600)[token // 32]) >> token % 32 & 1)
                matcher.advance([token])
            assert all(allowed[: len(begin)]) and not all(allowed), wrong


BYTES = bytes_tokenizer(0)


def test_host_names_have_at_most_253_characters() -> None:
    made = constraints.json_schema({"type": "string", "format": "hostname"})
    longest = ".".join(["x" * 63] * 3)
    for name, fits in (
        ("a-1.example.org", True),
        ("-a", False),
        (f"{longest}.{'x' * 61}", True),
        (f"{longest}.{'x' * 62}", False),
    ):
        assert accepts(made, json.dumps(name)) is fits, name


def test_strict_objects_have_no_other_properties() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}}
    for strict in (True, False):
        assert accepts(constraints.json_schema(schema, strict=strict), '{"a": 1, "b": 2}') is not strict
    assert accepts(constraints.json_schema({"type": "object"}), '{"b": 2}')
    assert accepts(constraints.json_object(), '{"b": [2]}') and not accepts(constraints.json_object(), "[1]")
    some = constraints.json_schema({**schema, "additionalProperties": STRING})
    assert accepts(some, '{"a": 1, "b": "x"}') and not accepts(some, '{"a": 1, "b": 2}')
    parts = {"$defs": {"s": schema}, "allOf": [{"$ref": "#/$defs/s"}, {"properties": {"b": STRING}, "required": ["b"]}]}
    both = constraints.json_schema(parts)
    assert accepts(both, '{"a": 1, "b": "x"}') and not accepts(both, '{"a": 1, "b": "x", "c": 1}')


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"a.b", ["axb", "a日b"], ["a\nb", "ab"]), (r"[.]\.\d{2}", ["..12"], ["x.12", ".x12"]),
    (r"(?P<year>\d+)-(?:a|b)?", ["12-", "1-a"], ["a", "-b"]), (r"^ab$|^[]^a-]+$", ["ab", "]-^"], ["b]"]),
    (r"x*?y", ["y", "xxy"], ["x"]), (r"[\^a]", ["^", "a"], ["b", "\\"]), (r"\x41c", ["Ac"], ["\u041c", "A"]),
    (r"\07\101", ["\x07A"], ["\x00", "07"]), (r"[^\W\d]+/\s", ["aé/ ", "b/\n"], ["1/ ", "a/b"]),
    (r"(?s:.)\Z|(?x: a b )", ["\n", "ab"], ["a b"]), (r"\"\\\a|[\b]", ['"\\\a', "\b"], ["a"]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "fitting", "others"), PATTERNS)
def test_regular_expressions(pattern: str, fitting: list[str], others: list[str]) -> None:
    made = constraints.regex(pattern)
    for text, wanted in [*((each, True) for each in fitting), *((each, False) for each in others)]:
        assert (re.fullmatch(pattern, text) is not None) is wanted
        assert accepts(made, text) is wanted, text


@pytest.mark.parametrize("pattern", [
    "(?i)a", "(?!a)b", "(?<=a)b", r"\bx", r"(a)\1", "a^b", "a$b", "(a$)*", "(?>a)", "a++", "(?m)^a", "\ud800",
    "a?" * 5000,
])  # fmt: skip
def test_regular_expressions_that_cannot_be_followed(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be followed|cannot be used"):
        constraints.lark_of(constraints.regex(pattern))


def test_classes_of_a_schemas_pattern_are_those_of_python_and_of_ecmascript() -> None:
    assert accepts(constraints.regex(r"\d\D"), "٣x") and not accepts(constraints.regex(r"\D"), "٣")
    for pattern, fits in ((r"^\d$", False), (r"^\D$", False), (r"^[^\d]$", False), (r"^[\D]$", False)):
        assert accepts(constraints.json_schema({"type": "string", "pattern": pattern}), '"٣"') is fits
    assert patterns.found(r"\w") == patterns.found(r"(?a)\w")


@pytest.mark.parametrize("kind", ["schemas", "regular expressions"])
def test_random_ones(kind: str) -> None:
    """All finished answers are right. (scripts/check_grammars.py has many more.)"""
    answers, refused = [Answers(tokenizer()), Answers(BYTES)], 0
    for number in range(70):
        rnd = Random(number)
        given: Any = random_constraints.schema(rnd) if kind == "schemas" else random_constraints.regex(rnd)
        made = constraints.json_schema(given, strict=number % 3 == 0) if kind == "schemas" else {"regex": given}
        try:
            texts = answers[number % 2].some(made, rnd, 2)
        except ValueError:
            refused += 1
            continue
        for text in texts:
            is_right = re.fullmatch(given, text) if kind != "schemas" else not random_constraints.fault(given, text)
            assert is_right, (number, given, text)
    assert refused < 25 and sum(each.finished for each in answers) > 80
