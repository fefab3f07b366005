"""Fields that this server knows and does not serve: each is refused with what to do instead, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.schema import ChatRequest, CompletionRequest, Message, OtherPart

_FUNCTIONS = "use tools and tool_choice, which replace it"
_TEXT_ONLY = "only text is served; leave this field out"


def _given(value: Any) -> bool:
    return value not in (None, [], {}, False)


Refusals = dict[str, tuple[Callable[[Any], bool], str]]
"""Name of a field -> whether a value asks for something, and what to do instead."""

COMMON: Refusals = {
    "store": (_given, "nothing is stored; leave this field out"),
    "service_tier": (lambda value: value not in (None, "auto", "default"), "there is one tier; leave this field out"),
    "safety_identifier": (_given, "nothing is stored; `user` stands in the log, so use that"),
    "prompt_cache_key": (_given, "common prefixes are found by content; use cache_salt to keep prefixes apart"),
}

_CHAT: Refusals = {
    **COMMON,
    "functions": (_given, _FUNCTIONS),
    "function_call": (lambda value: value not in (None, "none", "auto"), _FUNCTIONS),
    "reasoning_effort": (
        lambda value: value is not None,
        "this is an option of the chat template here; use chat_template_kwargs",
    ),
    "verbosity": (lambda value: value not in (None, "medium"), "leave it out, and ask for short answers in a message"),
    "modalities": (lambda value: value not in (None, ["text"]), _TEXT_ONLY),
    "audio": (_given, _TEXT_ONLY),
    "prediction": (_given, "predicted outputs are not served; leave this field out"),
    "web_search_options": (lambda value: value is not None, "this server fetches nothing; leave this field out"),
    "metadata": (_given, "nothing is stored; leave this field out"),
}

_COMPLETION: Refusals = {
    "suffix": (_given, "completions within a text are not served; leave this field out"),
}

_MESSAGE = ("function_call", "refusal", "audio", "annotations")
_ROLES = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}


def refuse(body: Any, refusals: Refusals) -> None:
    """Raises Problem (400) for the first of these fields with which the body asks for something."""
    for name, (is_asked, remedy) in refusals.items():
        if is_asked(getattr(body, name)):
            raise not_served(f"{name}: {remedy}", param=name)


def check_served(body: ChatRequest | CompletionRequest) -> None:
    """Raises Problem (400) for a field that would have to be ignored."""
    refuse(body, _CHAT if isinstance(body, ChatRequest) else _COMPLETION)
    if isinstance(body, ChatRequest):
        check_messages(body.messages)


def check_messages(messages: list[Message]) -> None:
    """Raises Problem (400) for messages with anything but text and tool calls."""
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role == "function":
            raise not_served(f"{where}.role='function': use the role 'tool', which replaces it", param="messages")
        for name, role in _ROLES.items():
            if _given(getattr(message, name)) and message.role != role:
                raise Problem(400, f"{where}.{name} is for messages of the role {role!r}", param="messages")
        for name in _MESSAGE:
            if _given(getattr(message, name)):
                raise not_served(f"{where}.{name}: only text is served", param="messages")
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, OtherPart):
                raise not_served(f"{where}: a part of type {part.type!r}; only text is served", param="messages")
        if message.content is None and not message.tool_calls:
            raise Problem(400, f"{where} has no content", param="messages")
