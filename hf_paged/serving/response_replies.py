"""Schemas of the answers of /v1/responses for /openapi.json. The answers themselves are built in response_form.py."""

from __future__ import annotations

from typing import Any, Literal

from hf_paged.serving.replies import ChatLogprob, Reply, ResponseUsage


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[ChatLogprob]


class ReasoningText(Reply):
    type: Literal["reasoning_text"]
    text: str


class ResponseMessage(Reply):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseReasoning(Reply):
    id: str
    type: Literal["reasoning"]
    summary: list[None]
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class ResponseCall(Reply):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


ResponseItem = ResponseMessage | ResponseReasoning | ResponseCall


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Reply):
    code: str
    message: str


class ResponseReasoningOptions(Reply):
    effort: str | None
    summary: None


class ResponseText(Reply):
    format: dict[str, Any]
    verbosity: str | None


class ResponseObject(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: ResponseReasoningOptions
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float | None
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(Reply):
    """type: such as response.output_text.delta, which says which of the other fields there are."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: ResponseItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatLogprob] | None = None
    name: str | None = None
    arguments: str | None = None
