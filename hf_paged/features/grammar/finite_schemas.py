"""Schemas, as they are written for llguidance: takes out what no finite value fits, and counts patterns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hf_paged.features.grammar.schema_keywords import LISTS, OBJECTS, TYPES

Schema = dict[str, Any]


def pruned(root: Schema) -> bool:
    """Take out, in place, what no finite value fits: a value that would contain itself. Returns whether anything is
    left."""
    definitions: dict[str, Any] = root["$defs"]
    known: set[str] = set()

    def ends(schema: object) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema and schema["$ref"].rpartition("/")[2] not in known:
            return False
        if not all(map(ends, schema.get("allOf", ()))):
            return False
        if "anyOf" in schema and not any(map(ends, schema["anyOf"])):
            return False
        return any(_type_ends(name, schema, ends) for name in listed(schema.get("type", list(TYPES))))

    def prune(schema: object) -> None:
        if not isinstance(schema, dict):
            return
        for name in OBJECTS:
            for key, each in schema.get(name, {}).items():
                schema[name][key] = each if ends(each) else False
                prune(schema[name][key])
        for name in ("items", "additionalProperties"):
            if name in schema:
                schema[name] = schema[name] if ends(schema[name]) else False
                prune(schema[name])
        if "anyOf" in schema:
            schema["anyOf"] = [each for each in schema["anyOf"] if ends(each)]
        if "prefixItems" in schema:
            fitting = [ends(each) for each in schema["prefixItems"]] + [False]
            if False in fitting[:-1]:
                schema["prefixItems"] = schema["prefixItems"][: fitting.index(False)]
                schema["items"] = False
        for name in LISTS:
            for each in schema.get(name, ()):
                prune(each)

    # What is not known to end when nothing new is found would contain itself.
    while found := {name for name, each in definitions.items() if name not in known and ends(each)}:
        known |= found
    whole = {name: each for name, each in root.items() if name != "$defs"}
    if not ends(whole):
        return False
    for schema in [whole, *(definitions[name] for name in known)]:
        prune(schema)
    root.update(whole)
    root["$defs"] = {name: definitions[name] for name in known}
    return True


def num_patterns(schema: object, definitions: Schema, known: dict[str, int]) -> int:
    """Count the patterns that one string of the value may have to match together, at most.

    known: counts of definitions, by name.
    """
    if not isinstance(schema, dict):
        return 0

    def most(parts: Iterable[Any]) -> int:
        return max((num_patterns(each, definitions, known) for each in parts), default=0)

    within = [each for name in OBJECTS for each in schema.get(name, {}).values()]
    within += [*schema.get("prefixItems", ()), schema.get("items"), schema.get("additionalProperties")]
    found = max(int("pattern" in schema), most(within)) + most(schema.get("anyOf", ()))
    found += sum(num_patterns(each, definitions, known) for each in schema.get("allOf", ()))
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in known:
            known[name] = 0  # while it is read: it may contain itself
            known[name] = num_patterns(definitions[name], definitions, known)
        found += known[name]
    return found


def _type_ends(name: str, schema: Schema, ends: Callable[[Any], bool]) -> bool:
    if "enum" in schema or "const" in schema:
        return True
    if name == "object":
        properties = schema.get("properties", {})
        return all(ends(properties[each]) for each in schema.get("required", ()) if each in properties)
    if name == "array" and schema.get("minItems", 0):
        prefix = schema.get("prefixItems", [])[: schema["minItems"]]
        return all(map(ends, prefix)) and (len(prefix) >= schema["minItems"] or ends(schema.get("items", True)))
    return True


def listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]
