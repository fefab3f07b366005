"""JSON schemas, written for llguidance so that answers follow every keyword.

A keyword is followed, or an annotation (by the standard it asserts nothing), or refused with its name and its path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from hf_paged.features.grammar import patterns
from hf_paged.features.grammar.finite_schemas import Schema, num_patterns, pruned
from hf_paged.features.grammar.schema_keywords import (
    ANNOTATIONS,
    FOLLOWED,
    FORMATS,
    OBJECTS,
    TYPES,
    anchors,
    are_names,
    escaped,
    is_bound,
    is_number,
    is_type,
    types_of,
)

MAX_WHITESPACE = 1
"""Characters of white space between two parts of a JSON document. With more, small models may write nothing else."""

# The reader calls itself for each, on Python's stack.
_MAX_DEPTH = 64  # schemas within schemas, also through references
_MAX_MULTIPLES = 100_000  # its automata have that many states
_MAX_PATTERNS = 6  # for one string; llguidance's time and memory grow exponentially, and none of its limits ends that

_SIMPLE = ("type", "minLength", "maxLength", "minItems", "maxItems")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")


def followed(schema: object, *, strict: bool) -> Schema:
    """The schema that llguidance follows in its place. strict: objects that name their properties, and say nothing of
    `additionalProperties`, have no others. Raises ValueError."""
    return _Reader(schema, strict).read()


class _Reader:
    def __init__(self, root: object, strict: bool) -> None:
        self._root = root
        self._strict = strict
        self._definitions: Schema = {}
        self._names: dict[tuple[str, bool], str] = {}  # of definitions, by pointer and whether they are left open
        self._anchors = dict(anchors(root))
        self._multiples: set[Fraction] = set()
        self._owner: str | None = "#"  # pointer of the schema whose own values are described; None: those within them
        self._leads_to: dict[str, set[str]] = {}  # pointers of schemas, to those that describe the same value

    def read(self) -> Schema:
        made = self._schema(self._root, "#", 0, is_open=False)
        self._check_circles()
        options = {"x-guidance": {"whitespace_pattern": f"[ \\n\\r\\t]{{1,{MAX_WHITESPACE}}}"}}
        whole = {**options, "$defs": self._definitions, **(made if isinstance(made, dict) else {})}
        if made is False or not pruned(whole):
            raise ValueError("the schema has no finite answer: it is false, or a required value would contain itself")
        if num_patterns(whole, whole["$defs"], {}) > _MAX_PATTERNS:
            raise ValueError(
                f"the schema's keyword 'pattern' (or 'format') is there more than {_MAX_PATTERNS} times for the same "
                "string, by 'allOf' or '$ref'; leave some out"
            )
        return whole

    def _refused(self, name: str, path: str, why: str) -> ValueError:
        return ValueError(f"the schema's keyword {name!r} (at {path}) {why}")

    def _schema(self, schema: object, path: str, depth: int, is_open: bool) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(
                f"the schema has more than {_MAX_DEPTH} schemas within each other (at {path}); make it flatter"
            )
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{json.dumps(schema)[:50]} stands where a JSON schema is needed (at {path})")
        for name, value in schema.items():
            self._check(name, value, path)
        made: Schema = {
            name: int(schema[name]) if is_number(schema[name]) else schema[name] for name in _SIMPLE if name in schema
        }
        made |= {name: _bound(name, schema[name]) for name in _BOUNDS if name in schema}
        made |= self._strings(schema, path)
        made |= self._multiple(schema, path)
        made |= self._array(schema, path, depth)
        made |= self._object(schema, path, depth, is_open)
        made |= {name: schema[name] for name in ("enum", "const") if name in schema}
        every: list[Any] = made.pop("allOf", [])
        is_closing, is_alone = self._closing(schema, is_open)
        for name in _IN_PLACE:
            if name in schema:
                inner = self._in_place(name, schema[name], path, depth, is_open or not is_alone)
                if name == "allOf":
                    every += inner
                else:
                    # Its options exclude one another, so that any of them is exactly one.
                    every.append({name.replace("oneOf", "anyOf"): inner})
        # The parts name the properties together, so that none of them may exclude those of the others.
        if is_closing:
            names = dict.fromkeys(self._property_names(schema, set()))
            every.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})
        if len(every) == 1 and not made:
            return every[0]
        return {**made, **({"allOf": every} if every else {})}

    def _within(self, schema: object, path: str, depth: int) -> Any:
        """A schema of something within the value."""
        owner, self._owner = self._owner, None
        made = self._schema(schema, path, depth + 1, is_open=False)
        self._owner = owner
        return made

    def _check_circles(self) -> None:
        left = dict(self._leads_to)
        while ends := [each for each, others in left.items() if not others & left.keys()]:
            for each in ends:
                del left[each]
        if left:
            raise self._refused("$ref", min(left), "leads back to the same schema for the same value")

    # -- keywords ----------------------------------------------------------------------------------------------

    def _check(self, name: str, value: object, path: str) -> None:
        if name == "$id" and path != "#":
            raise self._refused(name, path, "is only followed at the beginning")
        if name in ANNOTATIONS or name.startswith("x-") or (name == "uniqueItems" and value is False):
            return
        if name not in FOLLOWED:
            raise self._refused(name, path, "cannot be followed; leave it out")
        fits, wanted = FOLLOWED[name]
        if not fits(value):
            raise self._refused(name, path, f"has the value {json.dumps(value)[:50]}; it needs {wanted}")
        if name in ("enum", "const"):
            for number in _numbers(value):
                if not is_bound(number):
                    raise self._refused(name, path, f"has the number {number}; it needs one between -2^53 and 2^53")

    def _strings(self, schema: Schema, path: str) -> Schema:
        wanted = []
        if "pattern" in schema:
            wanted.append(self._found(schema["pattern"], "pattern", path))
        if schema.get("format") in FORMATS:
            wanted.append(f"^(?:{patterns.whole(FORMATS[schema['format']])})$")
        if len(wanted) < 2:
            return {"pattern": wanted[0]} if wanted else {}
        return {"pattern": wanted[0], "allOf": [{"pattern": wanted[1]}]}

    def _found(self, pattern: str, name: str, path: str) -> str:
        try:
            return f"^(?:{patterns.found(pattern)})$"
        except ValueError as error:
            raise self._refused(name, path, f"cannot be followed: {error}") from error

    def _multiple(self, schema: Schema, path: str) -> Schema:
        if "multipleOf" not in schema:
            return {}
        # As it is written: 0.1 in fp64 is no fraction of ten.
        factor = Fraction(str(schema["multipleOf"]))
        digits = 0
        while factor * 10**digits % 1:
            digits += 1
        self._multiples.add(factor)
        # What llguidance computes with several of them has to fit into 32 bits.
        product = math.prod(int(each * 10**digits) for each in self._multiples)
        if sum(int(each * 10**digits) for each in self._multiples) > _MAX_MULTIPLES or product >= 2**32 or digits > 4:
            raise self._refused("multipleOf", path, f"cannot be followed with {schema['multipleOf']}; leave it out")
        return {"multipleOf": schema["multipleOf"]}

    def _array(self, schema: Schema, path: str, depth: int) -> Schema:
        made: Schema = {}
        prefix = schema.get("prefixItems", ())
        if prefix:
            made["prefixItems"] = [
                self._within(each, f"{path}/prefixItems/{place}", depth) for place, each in enumerate(prefix)
            ]
        if "items" in schema:
            made["items"] = self._within(schema["items"], f"{path}/items", depth)
        elif prefix and self._strict and max(schema.get("minItems", 0), schema.get("maxItems", 0)) <= len(prefix):
            made["items"] = False
        return made

    def _object(self, schema: Schema, path: str, depth: int, is_open: bool) -> Schema:
        properties = {
            name: self._within(each, f"{path}/properties/{escaped(name)}", depth)
            for name, each in schema.get("properties", {}).items()
        }
        by_pattern = {
            self._found(pattern, "patternProperties", path): self._within(
                each, f"{path}/patternProperties/{escaped(pattern)}", depth
            )
            for pattern, each in schema.get("patternProperties", {}).items()
        }
        required = list(dict.fromkeys(schema.get("required", ())))
        others = None
        if "additionalProperties" in schema:
            others = self._within(schema["additionalProperties"], f"{path}/additionalProperties", depth)
        elif self._is_closed(schema, is_open):
            others = False
            # A required name must be allowed, though nothing describes its value.
            properties |= {name: True for name in required if name not in properties and not by_pattern}
        if schema.get("propertyNames", True) not in (True, {}):
            if by_pattern:
                raise self._refused("propertyNames", path, "cannot be followed beside 'patternProperties'")
            allowed = self._allowed_names(schema["propertyNames"], f"{path}/propertyNames")
            for name in [*properties, *required]:
                if not re.search(allowed.python, name):
                    properties[name] = False
            if others is not False:
                by_pattern, others = {allowed.rust: True if others is None else others}, False
        made: Schema = {}
        if properties:
            made["properties"] = properties
        if by_pattern:
            made["patternProperties"] = by_pattern
        if others is not None:
            made["additionalProperties"] = others
        if required:
            made["required"] = required
        return made | self._counts(schema, made, path)

    def _counts(self, schema: Schema, made: Schema, path: str) -> Schema:
        """minProperties, maxProperties."""
        required, names = set(made.get("required", ())), set(made.get("properties", ()))
        least, most = int(schema.get("minProperties", 0)) - len(required), schema.get("maxProperties")
        is_closed = made.get("additionalProperties") is False and "patternProperties" not in made
        if most is not None and is_closed and most >= len(names | required):
            most = None
        counts = {**({"minProperties": schema["minProperties"]} if least > 0 else {})}
        counts |= {} if most is None else {"maxProperties": most}
        optional = names - required
        # The names of further properties may repeat, so that two may be one. What llguidance can count:
        is_counted = least <= 1 and (not optional or not counts or (is_closed and most in (None, len(required) + 1)))
        if not is_counted:
            name = "maxProperties" if least <= 1 and most is not None else "minProperties"
            raise self._refused(name, path, "cannot be followed with these properties; use 'required'")
        return {name: int(value) for name, value in counts.items()}

    def _allowed_names(self, schema: object, path: str) -> _Names:
        if isinstance(schema, dict):
            for name, value in schema.items():
                self._check(name, value, path)
            given = {name for name in schema if name in FOLLOWED}
            if given <= {"pattern", "type"} and "pattern" in given:
                return _Names(schema["pattern"], self._found(schema["pattern"], "pattern", path))
            if given <= {"minLength", "maxLength", "type"} and schema.get("type", "string") == "string":
                most = int(schema["maxLength"]) if "maxLength" in schema else ""
                python = f"(?s:^.{{{int(schema.get('minLength', 0))},{most}}}\\Z)"
                return _Names(python, f"^{patterns.whole(python)}$")
            if given <= {"enum", "const", "type"}:
                texts = [each for each in [*schema.get("enum", ()), schema.get("const")] if isinstance(each, str)]
                python = f"^(?:{'|'.join(map(re.escape, texts))})\\Z"
                if texts and ("enum" in given) != ("const" in given):
                    return _Names(python, f"^(?:{'|'.join(map(patterns.literal, texts))})$")
        raise self._refused("propertyNames", path, "is only followed with a pattern, or with lengths, or with an enum")

    # -- schemas in place ---------------------------------------------------------------------------------------

    def _in_place(self, name: str, value: Any, path: str, depth: int, is_open: bool) -> Any:
        if name == "$ref":
            return self._reference(value, path, depth, is_open)
        if name == "oneOf":
            self._check_exclusive(value, path)
        return [self._schema(each, f"{path}/{name}/{place}", depth + 1, is_open) for place, each in enumerate(value)]

    def _reference(self, reference: str, path: str, depth: int, is_open: bool) -> str:
        pointer = self._pointer(reference, path)
        is_open = is_open and self._strict
        if self._owner is not None:
            self._leads_to.setdefault(self._owner, set()).add(pointer)
        if (pointer, is_open) not in self._names:
            name = self._names[pointer, is_open] = f"d{len(self._names)}"
            self._definitions[name] = True  # its place
            owner, self._owner = self._owner, pointer
            self._definitions[name] = self._schema(self._resolved(reference, path), pointer, depth + 1, is_open)
            self._owner = owner
        return f"#/$defs/{self._names[pointer, is_open]}"

    def _pointer(self, reference: str, path: str) -> str:
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        inner = reference.removeprefix(own.split("#")[0]) if isinstance(own, str) else reference
        if inner and not inner.startswith("#"):
            raise self._refused(
                "$ref", path, f"leads elsewhere, to {reference[:100]!r}; put what it names under '$defs'"
            )
        inner = unquote(inner)
        if inner in ("", "#"):
            return "#"
        return inner if inner.startswith("#/") else self._anchors.get(inner[1:], inner)

    def _resolved(self, reference: str, path: str) -> Any:
        pointer = self._pointer(reference, path)
        found: Any = self._root
        try:
            for part in pointer.split("/")[1:] if pointer.startswith("#/") else () if pointer == "#" else ("",):
                name = part.replace("~1", "/").replace("~0", "~")
                found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise self._refused("$ref", path, f"names {reference[:100]!r}, which is nowhere in the schema") from error
        return found

    # -- objects without other properties -----------------------------------------------------------------------

    def _is_closed(self, schema: Schema, is_open: bool) -> bool:
        return self._strict and not is_open and "properties" in schema and not any(name in schema for name in _IN_PLACE)

    def _closing(self, schema: Schema, is_open: bool) -> tuple[bool, bool]:
        """Return two flags: the parts of this schema together name all properties; a lone part may do so.

        The first is False unless the reader is strict and the schema is not open.
        """
        places = [name for name in _IN_PLACE if name in schema]
        says = [name for name in (*OBJECTS, "additionalProperties", "required", "propertyNames") if name in schema]
        is_alone = len(places) == 1 and not says and (places[0] != "allOf" or len(schema["allOf"]) == 1)
        if not self._strict or is_open or not places or is_alone:
            return False, is_alone
        names = list(self._property_names(schema, set()))
        return None not in names and bool(names), False

    def _property_names(self, schema: object, seen: set[str]) -> Iterator[str | None]:
        """Yield the property names of all parts, and None for a part that allows or describes further names."""
        if not isinstance(schema, dict):
            return
        if "additionalProperties" in schema or "patternProperties" in schema:
            yield None
        yield from schema.get("properties", ()) if isinstance(schema.get("properties"), dict) else ()
        yield from schema.get("required", ()) if are_names(schema.get("required")) else ()
        for name in ("allOf", "anyOf", "oneOf"):
            for each in schema.get(name, ()) if isinstance(schema.get(name), list) else ():
                yield from self._property_names(each, seen)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            yield from self._property_names(self._resolved(reference, "#"), seen)

    # -- oneOf --------------------------------------------------------------------------------------------------

    def _check_exclusive(self, options: list[Any], path: str) -> None:
        facts = [self._facts(option, 0) for option in options]
        for place, one in enumerate(facts):
            for other in facts[:place]:
                if not self._exclude(one, other, 0):
                    raise self._refused(
                        "oneOf", path, "has schemas that may both fit; let them differ by type, by a constant or by a "
                        "required property with different constants, or use 'anyOf'"
                    )  # fmt: skip

    def _facts(self, schema: object, depth: int) -> _Facts:
        facts = _Facts(set(TYPES), None, {})
        if schema is False:
            return _Facts(set(), [], {})
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return facts
        if "type" in schema and is_type(schema["type"]):
            facts.types &= set(schema["type"] if isinstance(schema["type"], list) else [schema["type"]])
        values = schema["enum"] if isinstance(schema.get("enum"), list) else None
        values = [schema["const"]] if "const" in schema else values
        if values is not None:
            facts.values = values
            facts.types &= set().union(*map(types_of, values))
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if isinstance(properties, dict) and isinstance(required, list):
            facts.required = {name: [properties[name]] for name in required if name in properties}
        parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        if isinstance(schema.get("$ref"), str):
            parts = [*parts, self._resolved(schema["$ref"], "#")]
        for each in parts:
            more = self._facts(each, depth + 1)
            facts.types = _widened(facts.types) & _widened(more.types)
            # The values of one part suffice to tell options apart.
            facts.values = more.values if facts.values is None else facts.values
            for name, inner in more.required.items():
                facts.required.setdefault(name, []).extend(inner)
        return facts

    def _exclude(self, one: _Facts, other: _Facts, depth: int) -> bool:
        """Return True if it is certain that no value fits both."""
        common = _widened(one.types) & _widened(other.types)
        if not common:
            return True
        if one.values is not None and other.values is not None:
            return not any(_same(a, b) for a in one.values for b in other.values)
        # Four levels, because schemas may contain themselves.
        if common == {"object"} and depth < 4:
            for name in one.required.keys() & other.required.keys():
                for left in one.required[name]:
                    for right in other.required[name]:
                        if self._exclude(self._facts(left, 0), self._facts(right, 0), depth + 1):
                            return True
        return False


class _Names:
    """Names of properties: a regular expression for `re.search`, and one for llguidance."""

    def __init__(self, python: str, rust: str) -> None:
        self.python, self.rust = python, rust


class _Facts:
    """Facts known of the values that fit a schema.

    values: all that may fit (None: unknown). required: schemas of properties that objects have.
    """

    def __init__(self, types: set[str], values: list[Any] | None, required: dict[str, list[Any]]) -> None:
        self.types, self.values, self.required = types, values, required


def _widened(types: set[str]) -> set[str]:
    return types | {"integer"} if "number" in types else types


def _bound(name: str, value: float) -> float:
    """The bound for llguidance, which takes an exclusive whole number into a range such as 0 to 0.1: the next fp64
    number stands for it, and 1e-16 for zero."""
    if not name.startswith("exclusive") or value % 1:
        return value
    away = math.inf if name == "exclusiveMinimum" else -math.inf
    return math.nextafter(value, away) if value else math.copysign(1e-16, away)


def _same(one: object, other: object) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or (
        is_number(one) and is_number(other) and one == other
    )


def _numbers(value: object) -> Iterator[int | float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
