"""Fields that this server knows and does not serve: each is refused with what to do instead, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.schema import ChatRequest, CompletionRequest, Message, OtherPart

_TOOLS = "tool calls are not served; describe the tools in a message, and leave this field out"
_GRAMMAR = (
    "structured output is not served; generate with a constraint of your own through hf_paged.Engine "
    "(logits_processor=...), or leave this field out"
)
_TEXT_ONLY = "only text is served; leave this field out"


def _given(value: Any) -> bool:
    return value not in (None, [], {}, False)


def _not_text(value: Any) -> bool:
    return value is not None and value != {"type": "text"}


_CHAT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_given, _TOOLS),
    "tool_choice": (lambda value: value not in (None, "none", "auto"), _TOOLS),
    "functions": (_given, _TOOLS),
    "function_call": (lambda value: value not in (None, "none", "auto"), _TOOLS),
    "parallel_tool_calls": (lambda value: value is False, _TOOLS),
    "response_format": (_not_text, _GRAMMAR),
    "structured_outputs": (_given, _GRAMMAR),
    "reasoning_effort": (
        lambda value: value is not None,
        "this is an option of the chat template here; use chat_template_kwargs",
    ),
    "verbosity": (lambda value: value not in (None, "medium"), "leave it out, and ask for short answers in a message"),
    "modalities": (lambda value: value not in (None, ["text"]), _TEXT_ONLY),
    "audio": (_given, _TEXT_ONLY),
    "prediction": (_given, "predicted outputs are not served; leave this field out"),
    "web_search_options": (_given, "this server fetches nothing; leave this field out"),
    "store": (_given, "nothing is stored; leave this field out"),
    "metadata": (_given, "nothing is stored; leave this field out"),
    "service_tier": (lambda value: value not in (None, "auto", "default"), "there is one tier; leave this field out"),
    "safety_identifier": (_given, "nothing is stored; `user` stands in the log"),
    "prompt_cache_key": (_given, "common prefixes are found by content; use cache_salt to keep prefixes apart"),
}

_COMPLETION: dict[str, tuple[Callable[[Any], bool], str]] = {
    "suffix": (_given, "completions within a text are not served; leave this field out"),
    "response_format": (_not_text, _GRAMMAR),
    "structured_outputs": (_given, _GRAMMAR),
}

_MESSAGE = ("tool_calls", "tool_call_id", "function_call", "refusal", "audio")


def check_served(body: ChatRequest | CompletionRequest) -> None:
    """Raises Problem (400) for a field that would have to be ignored."""
    for name, (is_asked, remedy) in (_CHAT if isinstance(body, ChatRequest) else _COMPLETION).items():
        if is_asked(getattr(body, name)):
            raise not_served(f"{name}: {remedy}", param=name)
    if isinstance(body, ChatRequest):
        check_messages(body.messages)


def check_messages(messages: list[Message]) -> None:
    """Raises Problem (400) for messages with anything but text."""
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role in ("tool", "function"):
            raise not_served(f"{where}.role={message.role!r}: tool calls are not served", param="messages")
        for name in _MESSAGE:
            if _given(getattr(message, name)):
                raise not_served(f"{where}.{name}: only text is served", param="messages")
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, OtherPart):
                raise not_served(f"{where}: a part of type {part.type!r}; only text is served", param="messages")
        if message.content is None:
            raise Problem(400, f"{where} has no content", param="messages")
