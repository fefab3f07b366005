"""Constraints: sets of texts, as data, and how xgrammar compiles them for a vocabulary.

A constraint is a JSON value (a dict), so that it can be compared, cached and compiled in another process. The functions
that make one check what can be checked without a vocabulary, and raise ValueError for what xgrammar would ignore.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from hf_paged.generation.sampling.schemas import as_xgrammar_reads, check_schema

Constraint = dict[str, Any]
"""{kind: value, ...}; made by the functions below."""

MAX_WHITESPACE = 1
"""Characters of white space between two parts of a JSON document. With more, small models may write nothing else."""


def key_of(constraint: Constraint) -> str:
    """Equal for equal constraints. The order of a schema's properties counts: answers have it."""
    return json.dumps(constraint, ensure_ascii=False)


# -- making them ---------------------------------------------------------------------------------------------------


def json_schema(schema: Any, *, strict: bool = True) -> Constraint:
    """JSON documents of a schema: a dict, a bool, or a pydantic model class.

    strict: objects that name their properties have no others, whatever `additionalProperties` leaves open.
    """
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"json_schema: a dict, a bool or a pydantic model is needed, not a {type(schema).__name__}")
    check_schema(schema)
    return {"json_schema": schema, "strict": strict}


def parsed(schema: Any) -> Any:
    """A schema that may be given as JSON text. Raises ValueError."""
    if not isinstance(schema, (str, bytes)):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from error


def json_object() -> Constraint:
    """Any JSON object."""
    return {"json_schema": {"type": "object"}, "strict": False}


def regex(pattern: str) -> Constraint:
    """Texts that match a regular expression from their beginning to their end."""
    if not isinstance(pattern, str) or not pattern or "\0" in pattern:
        raise ValueError("regex: a string that is not empty and has no NUL character is needed")
    return {"regex": as_xgrammar_reads(pattern)}


def ebnf(text: str) -> Constraint:
    """Texts of a grammar in the EBNF of llama.cpp (GBNF); its start is the rule `root`."""
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ValueError("grammar: a string that is not empty and has no NUL character is needed")
    return {"ebnf": text}


def choice(texts: Iterable[str]) -> Constraint:
    """One of several texts."""
    made = list(dict.fromkeys(texts)) if not isinstance(texts, str) else []
    if not made or not all(isinstance(text, str) and text and "\0" not in text for text in made):
        raise ValueError("choice: a list of strings that are not empty is needed")
    return {"choice": made}


def structure(form: dict[str, Any]) -> Constraint:
    """Texts of a format of xgrammar's structural tags."""
    return {"structure": form}


def sequence(parts: Sequence[Constraint]) -> Constraint:
    """Texts of the first part, followed by texts of the next one, and so on."""
    return {"sequence": list(parts)}


def either(parts: Sequence[Constraint]) -> Constraint:
    """Texts of any of the parts."""
    return {"either": list(parts)}


# -- compiling -----------------------------------------------------------------------------------------------------


def check_installed() -> None:
    """Raises ImportError that names the extra."""
    if find_spec("xgrammar") is None:
        raise ImportError("grammars need the package xgrammar; in a checkout: pip install -e '.[grammar]'")


def compiled(constraint: Constraint, compiler: Any) -> Any:
    """The `xgrammar.CompiledGrammar`, with the `xgrammar.GrammarCompiler` of a vocabulary. Raises ValueError."""
    grammar = as_grammar(constraint)
    try:
        return compiler.compile_grammar(grammar)
    except RuntimeError as error:
        raise ValueError(f"the constraint cannot be compiled: {_first_line(error)}") from error


def as_grammar(constraint: Constraint) -> Any:
    """The `xgrammar.Grammar` of a constraint. Raises ValueError if there is none.

    What a hostile constraint does to the process (time, memory, a crash) is not bounded here.
    """
    import xgrammar

    kind = next(iter(constraint))
    value = constraint[kind]
    if kind == "sequence":
        return xgrammar.Grammar.concat(*map(as_grammar, value))
    if kind == "either":
        return xgrammar.Grammar.union(*map(as_grammar, value))
    try:
        if kind == "json_schema":
            return xgrammar.Grammar.from_json_schema(
                json.dumps(value), strict_mode=constraint["strict"], max_whitespace_cnt=MAX_WHITESPACE
            )
        if kind == "regex":
            return xgrammar.Grammar.from_regex(value)
        if kind == "ebnf":
            return xgrammar.Grammar.from_ebnf(value)
        if kind == "choice":
            options = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            return xgrammar.Grammar.from_ebnf(f"root ::= {options}")
        return xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": value})
    except (RuntimeError, ValueError, TypeError) as error:  # xgrammar's own are RuntimeErrors
        raise ValueError(f"the {_NAMES[kind]} cannot be used: {_first_line(error)}") from error


_NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "ebnf": "grammar",
    "choice": "choice",
    "structure": "structure",
}


def _first_line(error: Exception) -> str:
    """xgrammar's message without the place in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\[[\d:]+\] \S+: ", "", lines[0]) if lines else type(error).__name__
