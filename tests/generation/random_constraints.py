"""Random JSON schemas and regular expressions, random answers, and judges of these: `jsonschema` and `re`."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from fractions import Fraction
from random import Random
from typing import Any

import jsonschema
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_paged.features.grammar.constraints import Constraint
from hf_paged.features.grammar.vocabulary import Matcher, Vocabulary, vocabulary_of

WORDS = ["a", "b", "name", "größe", 'q"t', "b\\s", "n\nl", "日本", "x/y", "t~u", "", "$id"]
LETTERS = ["a", "b", "Z", "7", "_", " ", '"', "\\", "\n", "/", "é", "日", "😀", "\t", "-", "\x7f", "^", "]"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "int32", "odd"]
HARD = [
    '^a"b$', r"^a\\b$", "a\nb", r"[\^a]", r"\x41c", r"\07", "^a$|b", "(^a|b)c$", "^$", "", r"\n", r"^[^\w]$", r"[]a]+",
    r"a{2}b{1,2}?", r"^.*$", r"(?P<n>a)|(?:b)", r"[a-c\d]", r"[\x00-\x1f]", r"\S\s",
    "é{2}", r"\u65e5", "a|", "[^\x00-\x7f]",
]  # fmt: skip


def regex(rnd: Random, depth: int = 3) -> str:
    if rnd.random() < 0.1:
        return rnd.choice(HARD)
    made = _alternatives(rnd, depth)
    return ("^" if rnd.random() < 0.25 else "") + made + ("$" if rnd.random() < 0.25 else "")


def _alternatives(rnd: Random, depth: int) -> str:
    branches = ["".join(_piece(rnd, depth - 1) for _ in range(rnd.randint(1, 3))) for _ in range(rnd.choice([1, 1, 2]))]
    return branches[0] if len(branches) == 1 else "(?:" + "|".join(branches) + ")"


def _piece(rnd: Random, depth: int) -> str:
    kind = rnd.random()
    if depth > 0 and kind < 0.2:
        atom = rnd.choice(["(", "(?:", f"(?P<g{rnd.randrange(10**9)}>"]) + _alternatives(rnd, depth) + ")"
    elif kind < 0.5:
        atom = re.escape(rnd.choice(LETTERS))
    elif kind < 0.6:
        atom = rnd.choice([r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "."])
    elif kind < 0.7:
        atom = rnd.choice([r"\x41", r"\101", r"\0", r"\n", r"\t", r"\"", r"\u00e9", r"\U0001F600", r"\a", r"\/", r"\."])
    else:
        parts = [rnd.choice(["a-f", "0-9", r"\d", r"\w", r"\s", r"\x30-9", r"\^", r"\-", *map(re.escape, LETTERS)])
                 for _ in range(rnd.randint(1, 3))]  # fmt: skip
        atom = "[" + rnd.choice(["", "^"]) + "".join(parts) + "]"
    return atom + rnd.choice(["", "", "", "?", "*", "+", "{2}", "{0,2}", "{1,}", "+?", "*?"])


def schema(rnd: Random) -> Any:
    """A JSON schema of draft 2020-12. Most have an answer."""
    names = rnd.sample(["d", "e/f", "t~u", "sp ce", "größe", "100%"], rnd.randint(0, 3))
    refs = ["#/$defs/" + _pointer(rnd, name) for name in names]
    defs: dict[str, Any] = {name: _schema(rnd, 2, refs) for name in names}
    if defs and rnd.random() < 0.3:
        anchored = rnd.choice(names)
        if isinstance(defs[anchored], dict):
            defs[anchored]["$anchor"] = "here"
            refs.append("#here")
    if rnd.random() < 0.1:
        refs.append("#")
    made = _schema(rnd, 3, refs)
    if not isinstance(made, dict):
        return made
    return {**({"$defs": defs} if defs else {}), **made}


def _pointer(rnd: Random, name: str) -> str:
    from urllib.parse import quote

    escaped = name.replace("~", "~0").replace("/", "~1")
    return quote(escaped, safe="/~") if rnd.random() < 0.5 or "%" in name else escaped


def _schema(rnd: Random, depth: int, refs: list[str]) -> Any:
    kind = rnd.random()
    if kind < 0.03:
        return rnd.random() < 0.9
    if refs and kind < 0.15:
        made: dict[str, Any] = {"$ref": rnd.choice(refs)}
        return made if rnd.random() < 0.7 else {**made, **_typed(rnd, depth - 1, refs)}
    if depth > 0 and kind < 0.35:
        return _combined(rnd, depth - 1, refs)
    if kind < 0.45:
        values = [_value(rnd) for _ in range(rnd.randint(1, 4))]
        made = {"const": values[0]} if rnd.random() < 0.4 else {"enum": values}
        return made if rnd.random() < 0.7 else {**made, **_typed(rnd, 0, refs)}
    return _typed(rnd, depth, refs)


def _combined(rnd: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    name = rnd.choice(["anyOf", "anyOf", "oneOf", "allOf"])
    inner = [_schema(rnd, depth, refs) for _ in range(rnd.randint(1, 3))]
    if name == "allOf" and rnd.random() < 0.7:  # else it is mostly empty
        kind = rnd.choice(list(_KINDS))
        inner = [_KINDS[kind](rnd, depth, refs) for _ in range(rnd.randint(1, 3))]
    made: dict[str, Any] = {name: inner}
    if rnd.random() < 0.3:
        beside = _typed(rnd, depth, refs)
        made = {**made, **beside} if rnd.random() < 0.5 else {**beside, **made}
    return made


def _typed(rnd: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    kinds = list(_KINDS) if depth > 0 else ["string", "integer", "number", "plain"]
    made = _KINDS[rnd.choice(kinds)](rnd, depth - 1, refs)
    if rnd.random() < 0.1 and "type" in made:
        made["type"] = [made["type"], rnd.choice(["null", "boolean"])]
    if rnd.random() < 0.07:
        made.pop("type", None)
    if rnd.random() < 0.15:
        made[rnd.choice(["title", "description", "$comment", "x-order"])] = "text"
    if rnd.random() < 0.02:
        name, value = rnd.choice([
            ("not", {"type": "string"}), ("if", {}), ("uniqueItems", True), ("contains", {}), ("dependentRequired", {}),
            ("unevaluatedProperties", False), ("madeUp", 1), ("minLenght", 3), ("dependencies", {}),
        ])  # fmt: skip
        made[name] = value
    return made


def _string(rnd: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    if rnd.random() < 0.4:
        made["minLength"] = rnd.randint(0, 3)
    if rnd.random() < 0.5:
        made["maxLength"] = rnd.randint(1, 8)
    if rnd.random() < 0.3:
        made["pattern"] = regex(rnd, 2)
    if rnd.random() < 0.15:
        made["format"] = rnd.choice(FORMATS)
    return made


def _number(rnd: Random, is_integer: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "integer" if is_integer else "number"}
    for name, low in (("minimum", -50), ("exclusiveMinimum", -50), ("maximum", 10), ("exclusiveMaximum", 10)):
        if rnd.random() < 0.25:
            bound = rnd.randint(low, low + 60) * rnd.choice([1, 1, 10**4])
            made[name] = bound if is_integer or rnd.random() < 0.5 else bound / 8
    if rnd.random() < 0.2:
        made["multipleOf"] = rnd.choice([1, 2, 3, 7, 10]) if is_integer else rnd.choice([1, 3, 0.5, 0.1, 0.01, 2.5])
    if rnd.random() < 0.1:
        made["format"] = rnd.choice(["int32", "double"])
    return made


def _array(rnd: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array"}
    if rnd.random() < 0.3:
        made["prefixItems"] = [_schema(rnd, depth, refs) for _ in range(rnd.randint(1, 2))]
    if rnd.random() < 0.8:
        made["items"] = _schema(rnd, depth, refs)
    if rnd.random() < 0.3:
        made["minItems"] = rnd.randint(0, 2)
    if rnd.random() < 0.6:
        made["maxItems"] = rnd.randint(1, 3)
    return made


def _object(rnd: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"}
    names = rnd.sample(WORDS, rnd.randint(0, 3))
    if names:
        made["properties"] = {name: _schema(rnd, depth, refs) for name in names}
    if rnd.random() < 0.5:
        made["required"] = [name for name in names if rnd.random() < 0.6] + (["other"] if rnd.random() < 0.05 else [])
    if rnd.random() < 0.4:
        made["additionalProperties"] = False if rnd.random() < 0.5 else _schema(rnd, depth, refs)
    if rnd.random() < 0.12:
        patterns = rnd.choice([[regex(rnd, 2)], ['^q"'], ["^a", "^b"], [r"^\d$"]])
        made["patternProperties"] = {pattern: _schema(rnd, depth, refs) for pattern in patterns}
    if rnd.random() < 0.08:
        made["propertyNames"] = rnd.choice(
            [
                {"pattern": regex(rnd, 2)}, {"maxLength": 3}, {"enum": ["a", 'q"t', "b"]}, {"pattern": '^q"'},
                {"format": "date"},
            ]
        )  # fmt: skip
    for name in ("minProperties", "maxProperties"):
        if rnd.random() < 0.07:
            made[name] = rnd.randint(0, 3)
    return made


def _plain(rnd: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    return {"type": rnd.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}


_KINDS: dict[str, Any] = {
    "string": _string, "integer": lambda rnd, depth, refs: _number(rnd, True),
    "number": lambda rnd, depth, refs: _number(rnd, False), "array": _array, "object": _object, "plain": _plain,
}  # fmt: skip


def _value(rnd: Random, depth: int = 2) -> Any:
    kind = rnd.randrange(8 if depth else 6)
    if kind == 6:
        return [_value(rnd, depth - 1) for _ in range(rnd.randint(0, 2))]
    if kind == 7:
        return {name: _value(rnd, depth - 1) for name in rnd.sample(WORDS, rnd.randint(0, 2))}
    text = "".join(rnd.choice(LETTERS) for _ in range(rnd.randint(0, 4)))
    return [None, rnd.random() < 0.5, rnd.randint(-20, 20), rnd.randint(-80, 80) / 8, text, rnd.choice(WORDS)][kind]


def _multiple(validator: Any, factor: Any, instance: Any, schema: Any) -> Any:
    """In decimal: 0.3 is a multiple of 0.1."""
    if _is_number(None, instance) and Fraction(str(instance)) % Fraction(str(factor)):
        yield jsonschema.ValidationError(f"{instance} is no multiple of {factor}")


def _is_number(checker: Any, value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _is_integer(checker: Any, value: Any) -> bool:
    return _is_number(checker, value) and Fraction(str(value)).denominator == 1


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {"multipleOf": _multiple},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": _is_number, "integer": _is_integer}
    ),
)


def _number_of(text: str) -> Decimal:
    """Those with large exponents become smaller ones."""
    mantissa, _, exponent = text.lower().partition("e")
    return Decimal(mantissa).scaleb(max(-200, min(200, int(exponent[:9] or 0))))


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def fault(schema: Any, text: str) -> str | None:
    """Why this is no JSON document of the schema; None: it is one."""
    try:
        value = json.loads(text, parse_float=_number_of, parse_constant=_constant)
    except ValueError as error:
        return f"no JSON: {error}"
    return fault_of_value(schema, value)


def fault_of_value(schema: Any, value: Any) -> str | None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        for error in _Validator(schema, format_checker=checker).iter_errors(value):
            return f"{error.validator}: {error.message}"[:200]
    except RecursionError:
        return "a reference to itself: there is no answer"
    return None


def bytes_tokenizer(seed: int) -> Any:
    """Byte-level, with all bytes and random pieces of several, which begin and end within characters."""
    rnd = Random(seed)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = "".join(WORDS + LETTERS).encode() + b'{"":[],}0123456789-.eEtruefalsn \r'
    signs = {0: ""}  # of bytes, as ByteLevel writes them
    for code in range(256):
        printed = range(33, 127), range(161, 173), range(174, 256)
        shift = sum(not any(each in part for part in printed) for each in range(code))
        signs[code] = chr(code) if any(code in part for part in printed) else chr(256 + shift)
    pieces = dict.fromkeys(["<end>", *letters])
    while len(pieces) < 600:
        pieces["".join(signs[rnd.choice(text)] for _ in range(rnd.randint(2, 4)))] = None
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


class Answers:
    """Random answers within constraints. cut: how many were too long."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary: Vocabulary = vocabulary_of(tokenizer)
        self._bytes = self.vocabulary.bytes
        closing = {b'"', b"}", b"]", b",", b":", b"0", b"5"}
        self._closing = np.array([each in closing for each in self._bytes])
        self.cut = self.finished = self.masks = 0

    def some(self, constraint: Constraint, rnd: Random, count: int) -> list[str]:
        """Those of `count` answers that end. Raises ValueError for a refused constraint, and UnicodeDecodeError."""
        compiled = self.vocabulary.compiled(constraint)
        found = [self._one(Matcher(compiled, [self.vocabulary.width]), rnd) for _ in range(count)]
        self.cut += found.count(None)
        self.finished += count - found.count(None)
        return [each.decode() for each in found if each is not None]

    def _one(self, matcher: Matcher, rnd: Random, length: int = 90) -> bytes | None:
        text = b""
        width = self.vocabulary.width
        for place in range(length):
            words = matcher.mask(width + 1)
            self.masks += 1
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: width + 1].astype(bool)
            chosen = np.flatnonzero(allowed[:width])
            if allowed[width] and (not len(chosen) or rnd.random() < 0.35):
                return text
            closing = np.flatnonzero(allowed[:width] & self._closing)
            if place > 12 and len(closing) and rnd.random() < 0.6:  # a random text might go on for ever
                chosen = closing
            token = int(rnd.choice(chosen))
            if rnd.random() < 0.05:
                matcher = matcher.fork()
            matcher.advance([token])
            text += self._bytes[token]
        return None
