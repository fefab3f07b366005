"""Fields that this server knows and does not serve.

What would change an answer is refused with what to do instead. What cannot change its tokens is accepted, because
clients send it by themselves, and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from hf_paged.serving.parts import ImagePart, OtherPart
from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.schema import ChatRequest, CompletionRequest, Message

log = logging.getLogger("hf_paged.serving")

_FUNCTIONS = "use tools and tool_choice, which replace it"
_TEXT_ONLY = "only text is served; leave this field out"


def _given(value: Any) -> bool:
    return value not in (None, [], {}, False)


Refusals = dict[str, tuple[Callable[[Any], bool], str]]
"""Name of a field -> whether a value asks for something, and what to do instead."""

_PREFIXES = "prefixes are found by content and kept while memory lasts; cache_salt keeps them apart"
_NEUTRAL = {
    "store": "nothing is stored",
    "metadata": "nothing is stored",
    "service_tier": "there is one tier",
    "safety_identifier": "nothing is stored; `user` is in the log",
    "prompt_cache_key": _PREFIXES,
    "prompt_cache_retention": _PREFIXES,
    "prompt_cache_options": _PREFIXES,
    "verbosity": "ask for short answers in a message",
    "prediction": "it would change the speed only",
    "max_tool_calls": "this server runs no tools",
}

_CHAT: Refusals = {
    "functions": (_given, _FUNCTIONS),
    "function_call": (lambda value: value not in (None, "none", "auto"), _FUNCTIONS),
    "modalities": (lambda value: value not in (None, ["text"]), _TEXT_ONLY),
    "audio": (_given, _TEXT_ONLY),
    "web_search_options": (lambda value: value is not None, "this server fetches nothing; leave this field out"),
}

_COMPLETION: Refusals = {
    "suffix": (_given, "completions within a text are not served; leave this field out"),
}

_MESSAGE = ("function_call", "refusal", "audio", "annotations")
_ROLES = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}


# Once for a field, because a client sends it with each request.
@cache
def note_unused(name: str, reason: str) -> None:
    log.info("the field %r of a request has no effect: %s", name, reason)


def refuse(body: Any, refusals: Refusals) -> None:
    """Raise Problem (400) for the first of these fields with which the body asks for something. Notes neutral ones."""
    for name, (is_asked, remedy) in refusals.items():
        if is_asked(getattr(body, name)):
            raise not_served(f"{name}: {remedy}", param=name)
    for name, reason in _NEUTRAL.items():
        if _given(getattr(body, name, None)):
            note_unused(name, reason)


def check_served(body: ChatRequest | CompletionRequest) -> None:
    """Raise Problem (400) for a field that would have to be ignored."""
    refuse(body, _CHAT if isinstance(body, ChatRequest) else _COMPLETION)
    if isinstance(body, ChatRequest):
        check_messages(body.messages)


def check_messages(messages: list[Message]) -> None:
    """Raise Problem (400) for messages with anything but text, media and tool calls."""
    for number, message in enumerate(messages):
        where = message.place(number)
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
                raise not_served(
                    f"{where}: a part of type {part.type!r}; text, images, audio and videos are served",
                    param="messages",
                )
            if isinstance(part, ImagePart) and part.image_url.detail not in (None, "auto"):
                note_unused("detail", "the model's processor decides how much of an image the model sees")
        if message.content is None and not message.tool_calls:
            raise Problem(400, f"{where} has no content", param="messages")
