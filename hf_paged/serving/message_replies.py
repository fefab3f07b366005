"""Schemas of the answers of /v1/messages for /openapi.json. The answers themselves are built in message_form.py."""

from __future__ import annotations

from typing import Any, Literal

from hf_paged.serving.replies import Reply


class AnthropicBlock(Reply):
    """type: says which of the other fields there are."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class AnthropicUsage(Reply):
    """input_tokens: without those that the cache had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


AnthropicReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: AnthropicReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicDelta(Reply):
    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: AnthropicReason | None = None
    stop_sequence: str | None = None


class AnthropicFailure(Reply):
    type: str
    message: str


class AnthropicError(Reply):
    type: Literal["error"]
    error: AnthropicFailure


class AnthropicEvent(Reply):
    """type: says which of the other fields there are."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]
    message: AnthropicMessage | None = None
    index: int | None = None
    content_block: AnthropicBlock | None = None
    delta: AnthropicDelta | None = None
    usage: AnthropicUsage | None = None
    error: AnthropicFailure | None = None


class AnthropicCount(Reply):
    input_tokens: int
