"""POST /v1/messages and /v1/messages/count_tokens: what Anthropic's clients send, and the chat request that it stands
for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from hf_paged.serving import schema
from hf_paged.serving.parts import ImagePart, ImageURL, MediaText, TextPart
from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.refusals import Refusals, note_unused, refuse
from hf_paged.serving.schema import (
    CalledFunction,
    ChatRequest,
    Conversation,
    FunctionNamed,
    Message,
    NamedSchema,
    NamedTool,
    Tool,
    ToolCall,
)
from hf_paged.serving.values import AList, AString, Body, ByKind, Count, Hint, Items, JSONSchema, Sent, StopString, Text

Id = Annotated[str, Field(max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]  # twice as long as OpenAI's


class TextBlock(Sent):
    type: Literal["text"]
    text: Text


class Base64Source(Sent):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: MediaText

    @property
    def link(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class URLSource(Sent):
    type: Literal["url"]
    url: MediaText

    @property
    def link(self) -> str:
        return self.url


class ImageBlock(Sent):
    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]

    def part(self) -> ImagePart:
        """Make the image's part of a chat message."""
        # Without validation: the values have been checked as those of this route.
        return ImagePart.model_construct(
            type="image_url", image_url=ImageURL.model_construct(url=self.source.link, detail=None)
        )


class ThinkingBlock(Sent):
    """Reasoning of an earlier turn. Most chat templates leave it out of the prompt."""

    type: Literal["thinking"]
    thinking: Text


class ToolUseBlock(Sent):
    type: Literal["tool_use"]
    id: Id
    name: ToolName
    input: JSONSchema


class OtherBlock(BaseModel):
    """A block of what only other servers have. It is parsed to be refused by name."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "document",
        "search_result",
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "tool_reference",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
    ]


ResultContent = Annotated[TextBlock | ImageBlock | OtherBlock, Field(discriminator="type")]


class ToolResultBlock(Sent):
    type: Literal["tool_result"]
    tool_use_id: Id
    content: Annotated[Annotated[Text, AString] | Annotated[Items[ResultContent], AList], ByKind] | None = None
    is_error: bool = False


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock, Field(discriminator="type")
]


class Turn(Sent):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[Text, AString] | Annotated[Items[Block], AList], ByKind]

    @property
    def blocks(self) -> list[Any]:
        if isinstance(self.content, str):
            return [TextBlock.model_construct(type="text", text=self.content)]
        return self.content


class FunctionTool(Sent):
    """A tool of the client's own. What else it says is about loading it later, or about caches."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: JSONSchema
    strict: bool | None = None


class OtherTool(BaseModel):
    """A tool that Anthropic runs, or defines."""

    model_config = ConfigDict(extra="allow")

    type: Hint


def _tool_kind(given: Any) -> str:
    kind = given.get("type") if isinstance(given, dict) else None
    return "custom" if kind in (None, "custom") else "other"


OneTool = Annotated[
    Annotated[FunctionTool, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_tool_kind)
]


class AnyChoice(Body):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool = False


class OneChoice(Body):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


class NoChoice(Body):
    type: Literal["none"]


class Budget(Body):
    type: Literal["enabled"]
    budget_tokens: Count
    display: Hint | None = None


class NoBudget(Body):
    type: Literal["disabled", "adaptive", "between_tools"]
    display: Hint | None = None


class JSONFormat(Body):
    type: Literal["json_schema"]
    schema_: JSONSchema = Field(alias="schema")


class OutputConfig(Body):
    effort: Hint | None = None
    format: JSONFormat | None = None


class User(Sent):
    user_id: Hint | None = None


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens: all that decides the prompt."""

    messages: Annotated[Items[Turn], Field(min_length=1, max_length=100_000)]
    system: Annotated[Annotated[Text, AString] | Annotated[Items[TextBlock], AList], ByKind] | None = None
    tools: Annotated[Items[OneTool], Field(max_length=128)] | None = None
    tool_choice: Annotated[AnyChoice | OneChoice | NoChoice, Field(discriminator="type")] | None = None
    thinking: Annotated[Budget | NoBudget, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[Items[StopString], Field(max_length=16)] | None = None
    metadata: User | None = None  # type: ignore[assignment]  # another object than OpenAI's
    top_logprobs: None = None  # answers have no place for them
    cache_control: dict[str, Any] | None = None
    speed: Hint | None = None
    inference_geo: Hint | None = None
    diagnostics: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Items[Any] | None = None
    context_management: Any = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Count


_REFUSED: Refusals = {
    "container": (lambda value: value is not None, "this server runs no tools; leave this field out"),
    "mcp_servers": (bool, "this server runs no tools; leave this field out"),
    "context_management": (lambda value: value is not None, "shorten the messages, or leave this field out"),
}
_NEUTRAL = {
    "cache_control": "prefixes are found by content",
    "speed": "there is one speed",
    "inference_geo": "there is one place",
    "diagnostics": "nothing is stored",
}
# Fields that this route has under another name, or in another form.
_OWN = {"metadata", "stop", "user", "thinking_token_budget", "chat_template_kwargs", "parallel_tool_calls"}


def chat_of(body: CountRequest) -> ChatRequest:
    """The chat request for the same answer. Its values have been checked as those of the body. Raises Problem."""
    refuse(body, _REFUSED)
    for name, reason in _NEUTRAL.items():
        if getattr(body, name) is not None:
            note_unused(name, reason)
    if body.stop_sequences and body.stops:
        raise Problem(400, "stop and stop_sequences are one field; leave stop out", param="stop")
    messages, output = _messages(body), body.output_config or OutputConfig()
    if output.format is not None and body.structured_outputs is not None:
        raise Problem(
            400,
            "output_config.format and structured_outputs exclude each other; leave one of both out",
            param="structured_outputs",
        )
    # An answer continues a text of the assistant that comes last.
    is_begun = messages[-1].role == "assistant" and not messages[-1].tool_calls
    kwargs, budget = _reasoning(body)
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in Conversation.model_fields if name not in _OWN},
        messages=messages,
        max_tokens=getattr(body, "max_tokens", None),
        stop=body.stop_sequences or body.stop,
        user=(body.metadata.user_id if body.metadata else None) or body.user,
        add_generation_prompt=not is_begun,
        continue_final_message=is_begun,
        chat_template_kwargs=kwargs,
        thinking_token_budget=budget,
        reasoning_effort=output.effort,
        response_format=None if output.format is None else _format(output.format),
        tools=_tools(body),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=False if getattr(body.tool_choice, "disable_parallel_tool_use", False) else None,
    )


def _reasoning(body: CountRequest) -> tuple[dict[str, Any] | None, int | None]:
    """Return the arguments of the chat template, and the budget of reasoning."""
    asked, budget = body.thinking, body.thinking_token_budget
    if asked is not None and asked.display is not None:
        note_unused("thinking.display", "an answer has its reasoning whole")
    if asked is not None and asked.type in ("adaptive", "between_tools"):
        note_unused("thinking.type", "the model alone decides when it reasons")
    if isinstance(asked, Budget):
        if budget not in (None, asked.budget_tokens):
            raise Problem(
                400,
                f"thinking_token_budget={budget} contradicts thinking.budget_tokens={asked.budget_tokens}",
                param="thinking",
            )
        budget = asked.budget_tokens
    if asked is None or asked.type not in ("enabled", "disabled"):
        return body.chat_template_kwargs, budget
    # As the templates of several families name the switch; others ignore what they do not know.
    switches = dict.fromkeys(("enable_thinking", "thinking"), asked.type == "enabled")
    return {**switches, **(body.chat_template_kwargs or {})}, budget


def _format(given: JSONFormat) -> Any:
    named = NamedSchema.model_construct(name="answer", schema_=given.schema_, strict=True)
    return schema.SchemaFormat.model_construct(type="json_schema", json_schema=named)


def _tools(body: CountRequest) -> list[Tool] | None:
    for tool in body.tools or ():
        if isinstance(tool, OtherTool):
            raise not_served(f"tools: this server runs no tools, so it has no {tool.type!r}", param="tools")
    if body.tools is None:
        return None
    return [
        Tool.model_construct(
            type="function",
            function=schema.FunctionDefinition.model_construct(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in body.tools
        if isinstance(tool, FunctionTool)
    ]


def _choice(given: Any) -> Any:
    if isinstance(given, OneChoice):
        return NamedTool.model_construct(type="function", function=FunctionNamed.model_construct(name=given.name))
    return None if given is None else {"auto": "auto", "any": "required", "none": "none"}[given.type]


# -- messages ------------------------------------------------------------------------------------------------------


def _messages(body: CountRequest) -> list[Message]:
    made: list[Message] = []
    if body.system is not None:
        made.append(_message("system", body.system if isinstance(body.system, str) else _joined(body.system)))
    for number, turn in enumerate(body.messages):
        made += [message.at(f"messages[{number}]") for message in _of_turn(turn, f"messages[{number}]")]
    return made


def _message(role: str, content: Any = None, **others: Any) -> Message:
    return Message.model_construct(role=role, content=content, **others)


def _joined(blocks: list[Any]) -> str:
    return "\n".join(block.text for block in blocks)


_ROLES: dict[type, str] = {
    ToolResultBlock: "user",
    ImageBlock: "user",
    ToolUseBlock: "assistant",
    ThinkingBlock: "assistant",
}


def _of_turn(turn: Turn, where: str) -> Iterator[Message]:
    """Yield the messages of a turn: the results of tools, which are messages of their own, and the rest."""
    parts: list[Any] = []
    calls, reasoning = list[ToolCall](), ""
    for block in turn.blocks:
        if isinstance(block, OtherBlock):
            raise not_served(
                f"{where}: a block of type {block.type!r} is not served; give its content as text", param="messages"
            )
        if _ROLES.get(type(block), turn.role) != turn.role:
            raise Problem(
                400, f"{where}: a block of type {block.type!r} in a turn of the {turn.role}", param="messages"
            )
        if isinstance(block, ToolResultBlock):
            yield _message("tool", _result(block, where), tool_call_id=block.tool_use_id)
        elif isinstance(block, ToolUseBlock):
            function = CalledFunction.model_construct(
                name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)
            )
            calls.append(ToolCall.model_construct(id=block.id, function=function))
        elif isinstance(block, ThinkingBlock):
            reasoning += block.thinking
        else:
            parts.append(block)
    # The results of tools may be all of a turn; any other turn is a message, even if nothing is in it.
    if parts or calls or reasoning or not any(isinstance(block, ToolResultBlock) for block in turn.blocks):
        yield _message(turn.role, _content(parts), tool_calls=calls or None, reasoning_content=reasoning or None)


def _content(blocks: list[Any]) -> Any:
    """Text, or text and images; None if there is nothing."""
    if not any(isinstance(block, ImageBlock) for block in blocks):
        return _joined(blocks) if blocks else None
    return [
        block.part() if isinstance(block, ImageBlock) else TextPart.model_construct(type="text", text=block.text)
        for block in blocks
    ]


def _result(block: ToolResultBlock, where: str) -> str:
    """Return what a tool has returned, as text. Templates have no place for errors, so that the text says it."""
    content = block.content
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, TextBlock):
            raise not_served(f"{where}: a {part.type!r} in a tool's result; only text is", param="messages")
    text = content if isinstance(content, str) else _joined(content or [])
    return f"Error: {text}" if block.is_error else text
