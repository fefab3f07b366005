"""The docstrings of what hf_paged and its sockets export: complete, true to the signatures, with examples that run."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hf_paged
from hf_paged import sockets
from hf_paged.generation.request_options import OptionArguments
from scripts import make_api_doc

ROOT = Path(__file__).parent.parent


def sections(value: Any) -> dict[str, str]:
    """The text of each section of a docstring, by title."""
    text = f"{inspect.getdoc(value) or ''}\n"
    return dict(
        re.findall(r"^(Args|Returns|Yields|Raises|Attributes|Example):\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    )


def items(value: Any, title: str) -> list[str]:
    return re.findall(r"^    ([*\w]+): \S", sections(value).get(title, ""), re.MULTILINE)


def arguments(function: Any) -> list[str]:
    """The names that callers give, with the keys of a TypedDict, and without what is there to be refused."""
    names: list[str] = []
    for each in inspect.signature(function).parameters.values():
        if each.annotation == "Unpack[OptionArguments]":
            names += OptionArguments.__annotations__
        elif each.name != "self" and each.annotation != "Never":
            names.append(str(each.replace(annotation=each.empty, default=each.empty)))
    return names


def raised(function: Any) -> set[str]:
    """The exceptions that a function's own body names in `raise`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
    names = [ast.unparse(call.func if isinstance(call, ast.Call) else call) for call in calls]
    return {name for name in names if name[0].isupper()}


def documented() -> Iterator[tuple[str, Any]]:
    values = {name: getattr(hf_paged, name) for name in hf_paged.__all__}
    plugged = (sockets.Parts, sockets.Executor, sockets.Policy, sockets.SideMemory)
    for name, value in (values | {each.__name__: each for each in plugged}).items():
        yield name, value
        # What implements these two reads their types; users write tasks and policies.
        if isinstance(value, type) and value not in (sockets.Executor, sockets.SideMemory):
            yield from ((f"{name}.{own}", member) for own, member in make_api_doc.shown(name, value).items())


def faults(name: str, value: Any) -> Iterator[str]:
    sentence = make_api_doc.first_sentence(value)
    if not sentence.endswith(".") or len(sentence.split()) > 25:
        yield f"{name}: a first sentence of at most 25 words: {sentence!r}"
    expected: list[str] = []
    bodies: list[Any] = []
    if isinstance(value, type):
        is_made = not getattr(value, "_is_protocol", False)
        bodies = [vars(value)[own] for own in ("__init__", "__post_init__") if is_made and own in vars(value)]
        if is_dataclass(value):
            bodies = bodies[1:]  # the first one is generated
            attributes = [field.name for field in fields(value) if not field.name.startswith("_")]
            if items(value, "Attributes") != attributes:
                yield f"{name}: Attributes {items(value, 'Attributes')}, fields {attributes}"
        elif bodies:
            expected = arguments(value)
    elif not isinstance(value, property):
        bodies, expected = [value], arguments(value)
        if value.__annotations__["return"] != "None" and not {"Returns", "Yields"} & sections(value).keys():
            yield f"{name}: no Returns"
    if items(value, "Args") != expected:
        yield f"{name}: Args {items(value, 'Args')}, parameters {expected}"
    missing = set().union(*map(raised, bodies)) - {*items(value, "Raises")}
    if missing:
        yield f"{name}: raises {', '.join(sorted(missing))}"
    if "." not in name and "Example" not in sections(value):
        yield f"{name}: no Example"


def test_docstrings_say_what_signatures_and_bodies_say() -> None:
    assert [fault for name, value in documented() for fault in faults(name, value)] == []


def test_the_page_is_up_to_date() -> None:
    assert make_api_doc.DOC.read_text() == make_api_doc.page()  # else run scripts/make_api_doc.py


def test_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of methods after that of their class, in the same namespace."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", functools.cache(AutoModelForCausalLM.from_pretrained))
    namespace: dict[str, Any] = {}
    done = 0
    for name, value in documented():
        namespace = namespace if "." in name else {"__name__": name}
        if example := sections(value).get("Example"):
            code = re.search(r"```python\n(.*?)```", textwrap.dedent(example), re.DOTALL)
            assert code is not None, name
            exec(compile(code[1], f"example of {name}", "exec"), namespace)
            done += 1
    assert done > 40
