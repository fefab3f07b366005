"""The format of a model's answers: where its reasoning and its tool calls stand, by its response template.

Makes the constraints with which a grammar forces tool calls and structured output, and the parsers that find them
again. Knows texts and constraints; neither tokens nor HTTP.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass, field
from typing import Any

from hf_paged.generation.sampling import constraints
from hf_paged.generation.sampling.constraints import Constraint
from hf_paged.serving.parsing import (
    REASONING,
    ForcedCallsParser,
    Parser,
    PlainParser,
    TemplateParser,
    lenient,
    new_response_parser,
)

log = logging.getLogger("hf_paged.serving")

Form = dict[str, Any]
"""A format of xgrammar's structural tags."""


class UnfollowedTool(ValueError):
    """A grammar cannot follow the schema of a tool's arguments."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema of an object. strict: also where the model is free
    to call it, the arguments follow the schema."""

    name: str
    parameters: Any
    strict: bool
    definition: dict[str, Any] = field(hash=False)  # as the chat template has it


@dataclass(frozen=True, slots=True)
class Calls:
    """Tool calls of an answer. is_forced: there is at least one, and nothing else but reasoning. max_calls: None = any
    number."""

    tools: tuple[Tool, ...]
    is_forced: bool
    max_calls: int | None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """template: a response template of transformers, as JSON; None: answers are plain text.

    reasoning: the marks around the reasoning. call: the marks around a tool call whose content is the JSON object
    {"name": ..., "arguments": ...}. None: there are none, or the template has them in another way.
    """

    template: dict[str, Any] | None = None
    reasoning: tuple[str, str] | None = None
    call: tuple[str, str] | None = None

    @classmethod
    def of(cls, template: dict[str, Any] | None) -> AnswerFormat:
        """Raises ValueError for a template that transformers refuses."""
        if template is None:
            return cls()
        new_response_parser(template, "")
        fields = template["fields"]
        named = next((name for name in REASONING if name in fields), None)
        reasoning = None if named is None else _marks(fields[named])
        call = _marks(fields["tool_calls"]) if "tool_calls" in fields else None
        if call is not None and not _is_read(template, call):
            call = None
        return cls(template, reasoning, call)

    def special_marks(self, tokenizer: Any) -> frozenset[str]:
        """The special tokens of a tokenizer that stand in the marks: under a grammar, they are text."""
        marks = [mark for pair in (self.reasoning, self.call) if pair is not None for mark in pair]
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        return frozenset(content for content in special if any(content in mark for mark in marks))

    # -- reading ------------------------------------------------------------------------------------------------

    def parser(self, prompt: str, calls: Calls | None) -> Parser:
        """For the answer to a prompt, with the tool calls that the request allows. Raises ValueError for a prompt that
        cannot be read."""
        is_native = calls is not None and (self.call is not None or not calls.is_forced)
        if self.template is None:
            inner: Parser = PlainParser()
        else:
            template, tools = self.template, []
            if calls is None or not is_native:  # what looks like a call is text
                fields = {name: each for name, each in template["fields"].items() if name != "tool_calls"}
                template = {**template, "fields": fields}
            else:
                tools = [tool.definition for tool in calls.tools]
            inner = TemplateParser(
                template,
                prompt,
                tools,
                marks=_marks(self.template["fields"].get("tool_calls", {})) or ("", ""),
                max_calls=calls.max_calls if calls else None,
            )
        return ForcedCallsParser(inner) if calls is not None and calls.is_forced and not is_native else inner

    # -- forcing ------------------------------------------------------------------------------------------------

    def constraint(self, prompt: str, content: Constraint | None, calls: Calls | None) -> Constraint | None:
        """What the answer to a prompt has to be, its reasoning included. content: what its content has to be. None: it
        is free. Raises UnfollowedTool; ValueError for a prompt that cannot be read."""
        if calls is not None and calls.is_forced:
            wanted = constraints.structure(self._forced(calls))
        elif content is not None:
            wanted = content
            if calls is not None and self.call is not None:
                wanted = constraints.either([constraints.structure(self._forced(calls)), content])
        elif calls is not None and self.call is not None and _is_bound(calls):
            wanted = constraints.structure(self._free(calls, self.call))
        else:
            return None
        reasoning = self._reasoning(prompt)
        return wanted if reasoning is None else constraints.sequence([constraints.structure(reasoning), wanted])

    def _forced(self, calls: Calls) -> Form:
        """One call after the other."""
        if self.call is not None:
            tags, separator = [_native(tool, self.call) for tool in calls.tools], "\n"
        else:
            tags, separator = [_plain(tool) for tool in calls.tools], ForcedCallsParser.BETWEEN
        form: Form = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": separator,
            "at_least_one": True,
            "stop_after_first": calls.max_calls == 1,
        }
        if self.call is not None:
            return form
        return _in_order(_text(ForcedCallsParser.BEGIN), form, _text(ForcedCallsParser.END))

    def _free(self, calls: Calls, marks: tuple[str, str]) -> Form:
        """Any text, and calls where the model makes them."""
        return {
            "type": "triggered_tags",
            "triggers": [marks[0]],
            "tags": [_native(tool, marks) for tool in calls.tools],
            "stop_after_first": calls.max_calls == 1,
        }

    def _reasoning(self, prompt: str) -> Form | None:
        """The reasoning that may or must come first, and the white space after it; None: none."""
        if self.reasoning is None or self.template is None:
            return None
        begin, end = self.reasoning
        events = new_response_parser(lenient(self.template), prompt).initial_events
        regions = [event for event in events if event["field"] in REASONING and event["type"] != "region_chunk"]
        is_open = bool(regions) and regions[-1]["type"] == "region_open"
        if regions and not is_open:
            return None  # the prompt has it
        form = _in_order(
            {"type": "tag", "begin": "" if is_open else begin, "content": {"type": "any_text"}, "end": end},
            {"type": "regex", "pattern": r"[ \n]{0,4}"},
        )
        return form if is_open else {"type": "optional", "content": form}


def _is_bound(calls: Calls) -> bool:
    """Whether calls have to be watched where the model is free to make them."""
    return calls.max_calls is not None or any(tool.strict for tool in calls.tools)


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _in_order(*forms: Form) -> Form:
    return {"type": "sequence", "elements": list(forms)}


def _tag(begin: str, tool: Tool, end: str) -> Form:
    try:
        constraints.check_schema(tool.parameters)
    except ValueError as error:
        raise UnfollowedTool(f"{tool.name}: {error}") from error
    arguments = {
        "type": "json_schema",
        "json_schema": tool.parameters,
        "max_whitespace_cnt": constraints.MAX_WHITESPACE,
    }
    return {"type": "tag", "begin": begin, "content": arguments, "end": end}


def _native(tool: Tool, marks: tuple[str, str]) -> Form:
    begin, end = marks
    return _tag(f'{begin}\n{{"name": {_quoted(tool.name)}, "arguments": ', tool, f"}}\n{end}")


def _plain(tool: Tool) -> Form:
    name = _quoted(tool.name)[1:-1]
    return _tag(f"{ForcedCallsParser.NAME}{name}{ForcedCallsParser.ARGUMENTS}", tool, ForcedCallsParser.CLOSE)


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


# -- what a template says ------------------------------------------------------------------------------------------


def _marks(spec: dict[str, Any]) -> tuple[str, str] | None:
    """The texts that open and close a field. None if they are not fixed."""
    begin, end = _mark(spec, "open"), _mark(spec, "close")
    return None if begin is None or end is None else (begin, end)


def _mark(spec: dict[str, Any], side: str) -> str | None:
    literal, pattern = spec.get(side), spec.get(f"{side}_pattern")
    if isinstance(literal, list):
        literal = literal[0] if len(literal) == 1 else None
    if isinstance(literal, str):
        return literal
    fixed = pattern.removeprefix(r"\s*") if isinstance(pattern, str) else ""
    if not fixed or set(re.sub(r"\\\W", "", fixed)) & set(r".^$*+?{}[]|()\\"):
        return None
    return re.sub(r"\\(\W)", r"\1", fixed)


def _is_read(template: dict[str, Any], marks: tuple[str, str]) -> bool:
    """Whether the template finds a call that is written as `_native` forces it."""
    begin, end = marks
    text = f'{begin}\n{{"name": "f", "arguments": {{"a": 1}}}}\n{end}'
    parser = TemplateParser(template, "")
    pieces = parser.feed(f"{text}\n{text}") + parser.finish()
    read = [(call.name, call.arguments) for call in pieces.calls]
    return read == [("f", '{"a": 1}')] * 2 and not pieces.content


def template_of(model: Any, tokenizer: Any, given: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """The response template of a model, and where it comes from: the operator, the tokenizer, or transformers."""
    if given is not None:
        return given, "--response-template"
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own, "the tokenizer"
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError as error:  # packages of transformers' own server
        return None, f"none: transformers' table needs {error.name}"
    return get_response_template(tokenizer, model), f"transformers, for {model.config.model_type}"
