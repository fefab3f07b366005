"""Answers as messages: content, reasoning and tool calls, found in the text as it comes.

transformers' `ResponseParser` finds them by the response template of a model. Calls that a grammar has forced on a
model without such a template are read here: `[{"name": "f", "arguments": {...}}, ...]`. Knows texts; neither tokens nor
HTTP.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

log = logging.getLogger("hf_paged.serving")

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with a model's reasoning."""

# Of white space that a mark takes with it; without a bound the time grows with the square of a run (see `lenient`).
_MAX_SPACES = 64


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of the tool call with this number. name: only with the first part. arguments: more of its JSON."""

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class Pieces:
    """Parts of a message that further text adds to it."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def __add__(self, other: Pieces) -> Pieces:
        return Pieces(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


class Parser(Protocol):
    """A parser reads the text of one answer."""

    def feed(self, text: str) -> Pieces: ...

    def finish(self) -> Pieces:
        """Return what was buffered; no text follows."""


class TemplateParser:
    """Follows a response template. Text that begins like a tool call but is not a valid one is content.

    White space around the content and the reasoning is left out, as the template's own parser does.
    """

    def __init__(
        self,
        template: dict[str, Any],
        prompt: str,
        tools: Sequence[dict[str, Any]] = (),
        *,
        marks: tuple[str, str] = ("", ""),
        max_calls: int | None = None,
    ) -> None:
        """template: of transformers. prompt: the text that the answer follows. marks: around a tool call, as far as
        they are known. max_calls: further calls are dropped (None: no limit)."""
        self._parser: Any = new_response_parser(lenient(template), prompt, tools)
        self._marks = marks
        self._max_calls = max_calls
        self._num_calls = 0
        self._texts = {"content": Trimmed(), "reasoning": Trimmed()}
        self._unread = ""  # of a region whose value is known when it ends

    def feed(self, text: str) -> Pieces:
        # It has been given up: all further text is content.
        if self._parser is None:
            return Pieces(self._texts["content"].push(text))
        try:
            events = self._parser.feed(text)
        except Exception as error:  # the template's parsers raise what they like, for what the model has written
            return self._give_up(text, error)
        return self._pieces(events, self._marks[1])

    def finish(self) -> Pieces:
        if self._parser is None:
            return Pieces()
        try:
            _, events = self._parser.finalize()
        except Exception as error:  # as in feed: a tool call that was cut off, for one
            return self._give_up("", error)
        return self._pieces(events, "")

    def _give_up(self, text: str, error: Exception) -> Pieces:
        log.info("an answer does not follow the response template: %r", error)
        # What the parser had buffered is shown, so that no text is lost.
        unread, self._unread, self._parser = self._unread, "", None
        return Pieces(self._texts["content"].push(unread + text))

    def _pieces(self, events: Iterable[dict[str, Any]], end: str) -> Pieces:
        """Turn events into pieces. end: the text that has closed a tool call among them."""
        pieces = Pieces()
        for event in events:
            name = "reasoning" if event["field"] in REASONING else event["field"]
            # A value that is known at its end only, such as the JSON of a call, cannot be shown in parts.
            if event["type"] == "region_chunk" and event["dirty"]:
                self._unread += event["text"]
            elif event["type"] == "region_chunk" and name in self._texts:
                shown = self._texts[name].push(event["text"])
                pieces += Pieces(shown) if name == "content" else Pieces("", shown)
            elif event["type"] == "region_close":
                unread, self._unread = self._unread, ""
                if name == "tool_calls":
                    read = self._calls(event["value"])
                    pieces += read or Pieces(self._texts["content"].push(self._marks[0] + unread + end))
        return pieces

    def _calls(self, value: Any) -> Pieces | None:
        """Read tool calls from a value of the template; None if these are no calls."""
        pieces = Pieces()
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return None
            if self._max_calls is None or self._num_calls < self._max_calls:
                arguments = function.get("arguments", {})
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                pieces.calls.append(CallPart(self._num_calls, function["name"], text))
                self._num_calls += 1
        return pieces


def lenient(template: dict[str, Any]) -> dict[str, Any]:
    """Change a template so that a tool call that is no JSON is read as text, not as an error.

    White space before a mark is a part of the mark up to a limit. Without one, the time for a run of spaces grows with
    the square of its length. The rest of the run is trimmed.
    """
    fields = {
        name: {key: _bounded(key, each) for key, each in spec.items()} for name, spec in template["fields"].items()
    }
    calls = fields.get("tool_calls", {})
    if calls.get("content") == "json":
        calls["content_args"] = {**calls.get("content_args", {}), "allow_non_json": True}
    return {**template, "fields": fields}


def _bounded(key: str, value: Any) -> Any:
    if key not in ("open_pattern", "close_pattern"):
        return value
    return re.sub(r"^\\s([*+])", lambda found: rf"\s{{{int(found[1] == '+')},{_MAX_SPACES}}}", value)


class Trimmed:
    """A growing text without the white space around it."""

    def __init__(self) -> None:
        self._space = ""
        self._is_begun = False

    def push(self, text: str) -> str:
        # White space is shown when text follows it.
        text = self._space + text if self._is_begun else text.lstrip()
        self._is_begun = self._is_begun or bool(text)
        shown = text.rstrip()
        self._space = text[len(shown) :]
        return shown


class ForcedCallsParser:
    """Reads what `AnswerFormat` forces without marks around calls, and gives the arguments away as they come.

    inner: finds the content, which has the calls.
    """

    BEGIN, BETWEEN, END = "[", ", ", "]"
    NAME, ARGUMENTS, CLOSE = '{"name": "', '", "arguments": ', "}"

    def __init__(self, inner: Parser) -> None:
        self._inner = inner
        self._text = ""  # not read yet, outside of arguments
        self._index = -1
        self._json: _JSONEnd | None = None  # in arguments

    def feed(self, text: str) -> Pieces:
        return self._read(self._inner.feed(text))

    def finish(self) -> Pieces:
        return self._read(self._inner.finish())

    def _read(self, pieces: Pieces) -> Pieces:
        text, pieces.content = pieces.content, ""
        while text:
            if self._json is None:
                self._text += text
                text = ""
                begin = self._text.find(self.NAME)
                end = self._text.find(self.ARGUMENTS)
                # Both are there only if the name is whole.
                if begin >= 0 and end >= 0:
                    self._index += 1
                    name = self._text[begin + len(self.NAME) : end]
                    pieces.calls.append(CallPart(self._index, json.loads(f'"{name}"'), ""))
                    self._json = _JSONEnd()
                    text, self._text = self._text[end + len(self.ARGUMENTS) :], ""
            else:
                count = self._json.push(text)
                if count:
                    pieces.calls.append(CallPart(self._index, None, text[:count]))
                if self._json.is_over:
                    self._json = None
                text = text[count:]
        return pieces


class _JSONEnd:
    """Finds the end of a JSON object in a growing text that begins with one."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = self.is_over = False

    def push(self, text: str) -> int:
        """Count the characters at the beginning of the text that belong to the object."""
        for place, letter in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif letter == "\\":
                    self._is_escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return place + 1
        return len(text)


class PlainParser:
    """All is content."""

    def feed(self, text: str) -> Pieces:
        return Pieces(text)

    def finish(self) -> Pieces:
        return Pieces()


def new_response_parser(template: Any, prompt: str, tools: Sequence[dict[str, Any]] = ()) -> Any:
    """transformers' parser of an answer to the prompt. Raises ValueError for a prompt that cannot be read."""
    from transformers.utils.chat_parsing import ResponseParser

    takes_tools = "tools" in signature(ResponseParser).parameters  # since transformers 5.23
    options: dict[str, Any] = {"tools": list(tools)} if takes_tools else {}
    # The end of the prompt may open reasoning, so that the parser has to read it.
    try:
        return ResponseParser(template, prefix=prompt, **options)
    except Exception as error:  # the template's parsers raise what they like, for what the prompt has
        if not prompt:  # it is the template that is wrong
            raise
        raise ValueError(f"the response template cannot read the end of the prompt: {error!r:.200}") from error
