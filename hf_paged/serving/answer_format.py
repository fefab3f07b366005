"""The format of a model's answers: where its reasoning and its tool calls stand, by its response template.

Makes the constraints with which a grammar forces tool calls and structured output, and the parsers that find them
again. Knows texts and constraints; neither tokens nor HTTP.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_paged.annotations import Model, Tokenizer
from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.constraints import Constraint
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
        """Make the format of a template. Raises ValueError if transformers refuses the template."""
        if template is None:
            return cls()
        # First, because transformers refuses a template that is wrong with a reason.
        new_response_parser(template, "")
        fields = template["fields"]
        named = next((name for name in REASONING if name in fields), None)
        reasoning = None if named is None else _marks(fields[named])
        call = _marks(fields["tool_calls"]) if "tool_calls" in fields else None
        # A grammar may force only what the template's own parser reads again.
        if call is not None and not _is_read(template, call):
            call = None
        return cls(template, reasoning, call)

    def special_marks(self, tokenizer: Tokenizer) -> frozenset[str]:
        """The special tokens of a tokenizer that occur in the marks: under a grammar, they are text."""
        marks = [mark for pair in (self.reasoning, self.call) if pair is not None for mark in pair]
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        return frozenset(content for content in special if any(content in mark for mark in marks))

    # -- reading ------------------------------------------------------------------------------------------------

    def parser(self, prompt: str, calls: Calls | None) -> Parser:
        """Make a parser of the answer to a prompt, with the tool calls that the request allows. Raises ValueError for a
        prompt that cannot be read."""
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

    def is_content(self, prompt: str, calls: Calls | None) -> Callable[[str], bool] | None:
        """Return a test that tells from the beginning of an answer if content follows. None: all is content."""
        if calls is not None and calls.is_forced:
            return lambda text: False
        if self.template is None:
            return None
        marks = [each for each in (self.reasoning, self.call if calls is not None else None) if each is not None]
        # The mark that opened it is in the prompt, and not in the answer.
        begun = self.reasoning[0] if self.reasoning is not None and self.reasons(prompt) else ""

        def follows(text: str) -> bool:
            return all((begun + text).rfind(begin) <= (begun + text).rfind(end) for begin, end in marks)

        return follows

    def reasons(self, prompt: str) -> bool | None:
        """Return True if the prompt ends within reasoning, False if its reasoning is over, None if there is none."""
        events = new_response_parser(lenient(self.template or {}), prompt).initial_events
        regions = [event for event in events if event["field"] in REASONING and event["type"] != "region_chunk"]
        return regions[-1]["type"] == "region_open" if regions else None

    # -- forcing ------------------------------------------------------------------------------------------------

    def constraint(self, prompt: str, content: Constraint | None, calls: Calls | None) -> Constraint | None:
        """Return the constraint on the answer to a prompt, its reasoning included. content: on the content alone.
        None: the answer is free. Raises ValueError for a prompt that cannot be read."""
        if calls is not None and calls.is_forced:
            wanted = self._forced(calls)
        elif content is not None:
            wanted = content
            if calls is not None and self.call is not None:
                # Content that begins with the mark of a call would be read as one.
                wanted = constraints.either([self._forced(calls), constraints.unless_begun(content, self.call[0])])
        elif calls is not None and self.call is not None and _is_bound(calls):
            wanted = self._free(calls, self.call)
        else:
            return None
        return self._reasoned(prompt, wanted)

    def _forced(self, calls: Calls) -> Constraint:
        """Constrain the answer to calls, separated as the model or our parser expects."""
        if self.call is not None:
            call, separator = constraints.either([_native(tool, self.call) for tool in calls.tools]), "\n"
        else:
            call, separator = constraints.either([_plain(tool) for tool in calls.tools]), ForcedCallsParser.BETWEEN
        if calls.max_calls != 1:
            call = constraints.sequence(call, constraints.several(constraints.sequence(_text(separator), call)))
        if self.call is not None:
            return call
        return constraints.sequence(_text(ForcedCallsParser.BEGIN), call, _text(ForcedCallsParser.END))

    def _free(self, calls: Calls, marks: tuple[str, str]) -> Constraint:
        """Constrain calls only, where the model makes them in any text."""
        begin = marks[0]
        call = constraints.sequence(
            constraints.until(begin), constraints.either([_native(tool, marks, is_begun=True) for tool in calls.tools])
        )
        text = constraints.without(begin)
        if calls.max_calls == 1:
            # At most one call: nothing follows it.
            return constraints.either([text, call])
        return constraints.sequence(constraints.several(call), text)

    def _reasoned(self, prompt: str, wanted: Constraint) -> Constraint:
        """Put reasoning before the constraint where it may or must come first, and the white space after it."""
        if self.reasoning is None or self.template is None:
            return wanted
        begin, end = self.reasoning
        is_open = self.reasons(prompt)
        if is_open is False:
            return wanted  # the prompt has it
        # White space has a bound here as in JSON (`schemas.MAX_WHITESPACE`): small models may write nothing else.
        rest = constraints.sequence(constraints.until(end), constraints.regex(r"[ \n]{0,4}"), wanted)
        if is_open:
            return rest
        return constraints.either([constraints.sequence(_text(begin), rest), constraints.unless_begun(wanted, begin)])


def _is_bound(calls: Calls) -> bool:
    """Return True if optional calls need a constraint: on their number, or on the arguments of a strict tool."""
    return calls.max_calls is not None or any(tool.strict for tool in calls.tools)


def _text(value: str) -> Constraint:
    return constraints.choice([value])


def _call(begin: str, tool: Tool, end: str) -> Constraint:
    arguments = constraints.json_schema(tool.parameters, owner=f"tools: {tool.name}")
    return constraints.sequence(_text(begin), arguments, _text(end))


def _native(tool: Tool, marks: tuple[str, str], *, is_begun: bool = False) -> Constraint:
    """is_begun: without the mark that opens it."""
    begin, end = marks
    return _call(f'{"" if is_begun else begin}\n{{"name": {_quoted(tool.name)}, "arguments": ', tool, f"}}\n{end}")


def _plain(tool: Tool) -> Constraint:
    name = _quoted(tool.name)[1:-1]
    return _call(f"{ForcedCallsParser.NAME}{name}{ForcedCallsParser.ARGUMENTS}", tool, ForcedCallsParser.CLOSE)


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


# -- what a template says ------------------------------------------------------------------------------------------


def _marks(spec: dict[str, Any]) -> tuple[str, str] | None:
    """The texts that open and close a field. None if they are not fixed."""
    begin, end = _mark(spec, "open"), _mark(spec, "close")
    return None if begin is None or end is None else (begin, end)


def _mark(spec: dict[str, Any], side: str) -> str | None:
    literal, pattern = spec.get(side), spec.get(f"{side}_pattern")
    # Several marks: none of them is the one to force.
    if isinstance(literal, list):
        literal = literal[0] if len(literal) == 1 else None
    if isinstance(literal, str):
        return literal
    # White space before the mark is left to the model; any other expression has no one text.
    fixed = pattern.removeprefix(r"\s*") if isinstance(pattern, str) else ""
    if not fixed or set(re.sub(r"\\\W", "", fixed)) & set(r".^$*+?{}[]|()\\"):
        return None
    return re.sub(r"\\(\W)", r"\1", fixed)


def _is_read(template: dict[str, Any], marks: tuple[str, str]) -> bool:
    """Return True if the template parses calls that are written as `_native` forces them, and sees no content there."""
    begin, end = marks
    text = f'{begin}\n{{"name": "f", "arguments": {{"a": 1}}}}\n{end}'
    parser = TemplateParser(template, "")
    pieces = parser.feed(f"{text}\n{text}") + parser.finish()
    read = [(call.name, call.arguments) for call in pieces.calls]
    return read == [("f", '{"a": 1}')] * 2 and not pieces.content


def template_of(model: Model, tokenizer: Tokenizer, given: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """Find the response template of a model, and name its origin: the operator, the tokenizer, or transformers."""
    if given is not None:
        return given, "--response-template"
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return own, "the tokenizer"
    try:
        # In its own server, which needs packages that ours does not.
        from transformers.cli.serving.utils import get_response_template
    except ImportError as error:  # packages of transformers' own server
        return None, f"none: transformers' table needs {error.name}"
    return get_response_template(tokenizer, model), f"transformers, for {model.config.model_type}"
