"""Regular expressions of Python, written for llguidance with the same meaning.

Python's own parser reads them, so an escape or a class means what it means to `re`. What has no counterpart is refused.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from re import _constants as ops  # type: ignore[attr-defined]  # isort: skip
from re import _parser as reader  # type: ignore[attr-defined]  # isort: skip

_Op = tuple[Any, Any]  # of Python's parser: its name, its argument

ANY = "(?s:.)"
"""Matches every character."""

# llguidance takes time and memory that grow with the square of a sequence of optional parts.
_LONGEST = 8192
_AGE = unicodedata.unidata_version.rpartition(".")[0]  # later characters are unassigned to Python
_SPACES = (
    "\\x{9}-\\x{D}\\x{1C}-\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}"
    "\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
)
_CLASSES = {  # of Unicode, of ASCII
    "DIGIT": (rf"[\p{{Nd}}&&\p{{Age={_AGE}}}]", "[0-9]"),
    "SPACE": (f"[{_SPACES}]", "[\\x{9}-\\x{D}\\x{20}]"),
    "WORD": (rf"[\p{{L}}\p{{N}}_&&\p{{Age={_AGE}}}]", "[0-9A-Za-z_]"),
}


def whole(pattern: str) -> str:
    """For texts that match from beginning to end. Raises ValueError."""
    return _Writer(pattern).written("", "")


def found(pattern: str) -> str:
    """For texts in which there is a match, as `pattern` of JSON schemas has it. Raises ValueError.

    Classes match what Python and ECMAScript agree about: `\\d` ASCII digits, `\\D` nothing that Unicode calls a digit.
    """
    return _Writer(pattern, is_narrow=True).written(f"{ANY}*", f"{ANY}*")


def literal(text: str) -> str:
    """For this text."""
    return "".join(map(_letter, map(ord, text)))


def _letter(code: int) -> str:
    letter = chr(code)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{code:X}}}"


class _Writer:
    def __init__(self, pattern: str, *, is_narrow: bool = False) -> None:
        self._pattern = pattern
        self._is_narrow = is_narrow
        if len(pattern) > _LONGEST:
            raise self._refused(f"it has more than {_LONGEST} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what may change in later versions of Python
                self._tree = reader.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"the regular expression {_shown(pattern)} cannot be used: {error}") from error

    def written(self, before: str, after: str) -> str:
        """before, after: what may precede and follow a match where no ^ or $ forbids it."""
        flags = self._tree.state.flags
        for flag in (re.IGNORECASE, re.MULTILINE, re.LOCALE):
            if flags & flag:
                raise self._refused(f"the flag {flag.name}")
        try:
            return self._sequence(self._tree, flags, before, after)
        except RecursionError as error:
            raise self._refused("its depth") from error

    def _refused(self, what: str) -> ValueError:
        return ValueError(f"the regular expression {_shown(self._pattern)} cannot be followed: {what}")

    def _sequence(self, items: Iterable[_Op], flags: int, before: str | None, after: str | None) -> str:
        """before, after: what is put at these ends, or None within the text, where ^ or $ cannot stand."""
        todo = list(items)
        begins = before is not None and _is_anchored(todo[:1], "AT_BEGINNING")
        ends = after is not None and _is_anchored(todo[-1:], "AT_END")
        made = [] if begins or before is None else [before]
        for place, (op, value) in enumerate(todo):
            start = before if begins and place == 0 else None
            end = after if ends and place == len(todo) - 1 else None
            made.append(self._item(op, value, flags, start, end))
        if not ends and after is not None:
            made.append(after)
        return "".join(made)

    def _item(self, op: Any, value: Any, flags: int, before: str | None, after: str | None) -> str:
        name = str(op)
        # No text that tokens can form contains one.
        if name in ("LITERAL", "NOT_LITERAL") and _is_surrogate(value):
            raise self._refused("a surrogate")
        if name == "LITERAL":
            return _letter(value)
        if name == "NOT_LITERAL":
            return f"[^{_letter(value)}]"
        if name == "ANY":
            # Python's dot leaves out the line feed only, other engines more characters.
            return ANY if flags & re.DOTALL else "[^\\x{A}]"
        if name == "IN":
            return self._class(value, flags)
        if name == "CATEGORY":
            return self._category(str(value), flags)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, inner = value
            bounds = f"{{{low},{'' if high is ops.MAXREPEAT else high}}}"
            return f"(?:{self._sequence(inner, flags, None, None)}){bounds}"
        if name == "SUBPATTERN":
            _, added, removed, inner = value
            # Within a group they would change the meaning of letters or anchors, which are written as they stand.
            if added & (re.IGNORECASE | re.MULTILINE):
                raise self._refused("a flag")
            return f"(?:{self._sequence(inner, flags & ~removed | added, before, after)})"
        if name == "BRANCH":
            branches = value[1]
            return f"(?:{'|'.join(self._sequence(each, flags, before, after) for each in branches)})"
        if name == "AT":
            at = str(value)
            if (before is not None and at in _AT["AT_BEGINNING"]) or (after is not None and at in _AT["AT_END"]):
                return ""
            raise self._refused(f"{_ANCHORS.get(at, at)} in its middle" if at in _ANCHORS else "\\b or \\B")
        raise self._refused(_NAMES.get(name, name))

    def _class(self, items: Sequence[_Op], flags: int) -> str:
        is_negated = str(items[0][0]) == "NEGATE"
        made = []
        for op, value in items[is_negated:]:
            if str(op) == "CATEGORY":
                made.append(self._category(str(value), flags, is_negated))
            elif str(op) == "RANGE":
                low, high = value
                parts = [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)]  # surrogates are no characters
                made += [f"{_letter(first)}-{_letter(last)}" for first, last in parts if first <= last]
            elif not _is_surrogate(value):
                made.append(_letter(value))
        if not made:
            raise self._refused("a class of surrogates")
        return f"[{'^' * is_negated}{''.join(made)}]"

    def _category(self, name: str, flags: int, is_negated: bool = False) -> str:
        """is_negated: the class that has it is."""
        _, *rest = name.split("_")
        is_ascii = flags & re.ASCII or (self._is_narrow and ("NOT" in rest) == is_negated)
        made = _CLASSES[rest[-1]][bool(is_ascii)]
        return f"[^{made}]" if "NOT" in rest else made


_AT = {"AT_BEGINNING": ("AT_BEGINNING", "AT_BEGINNING_STRING"), "AT_END": ("AT_END", "AT_END_STRING")}
_ANCHORS = {"AT_BEGINNING": "^", "AT_END": "$", "AT_BEGINNING_STRING": "\\A", "AT_END_STRING": "\\Z"}
_NAMES = {
    "ASSERT": "a look-ahead or look-behind",
    "ASSERT_NOT": "a look-ahead or look-behind",
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a reference to a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}


def _is_anchored(items: Sequence[_Op], end: str) -> bool:
    """Return True if some alternative of these items has an anchor at `end`, AT_BEGINNING or AT_END."""
    if not items:
        return False
    op, value = items[0]
    if str(op) == "AT":
        return str(value) in _AT[end]
    at = slice(0, 1) if end == "AT_BEGINNING" else slice(-1, None)
    if str(op) == "SUBPATTERN":
        return _is_anchored(list(value[3])[at], end)
    return str(op) == "BRANCH" and any(_is_anchored(list(each)[at], end) for each in value[1])


def _is_surrogate(code: object) -> bool:
    return isinstance(code, int) and 0xD800 <= code <= 0xDFFF


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else f"{pattern[:57]}...")
