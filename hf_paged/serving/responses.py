"""POST /v1/responses: what clients send, and the chat request that it stands for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.refusals import Refusals, note_unused, refuse
from hf_paged.serving.schema import (
    AList,
    AnObject,
    AString,
    AtLeastOne,
    Body,
    ByKind,
    ChatRequest,
    Count,
    FunctionDefinition,
    FunctionName,
    Hint,
    Items,
    NamedSchema,
    Options,
    StructuredOutputs,
    TemplateKwargs,
    Text,
)

_LOGPROBS = "message.output_text.logprobs"
# More of an answer's items: of tools, which do not run here, or of reasoning, which is returned as text.
_Includable = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Id = Annotated[str, Field(max_length=256)]


class TextContent(Body):
    """A part of a message. What an answer's part has beside its text changes no prompt."""

    type: Literal["input_text", "output_text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class OtherContent(BaseModel):
    """A part that is no text. It is parsed to be refused by name, as the other classes with such a name."""

    model_config = ConfigDict(extra="allow")

    type: Literal["input_image", "input_file", "input_audio", "refusal"]


Content = Annotated[TextContent | OtherContent, Field(discriminator="type")]
Contents = Annotated[Annotated[Text, AString] | Annotated[Items[Content], AList], ByKind]


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents
    id: Id | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Body):
    """A call that the model has made earlier."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    arguments: Text
    id: Id | None = None
    status: str | None = None


class CallOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Id
    output: Contents
    id: Id | None = None
    status: str | None = None


class ReasoningContent(Body):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Body):
    """What the model has thought earlier. Most chat templates leave it out of the prompt."""

    type: Literal["reasoning"]
    id: Id | None = None
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: Items[ReasoningContent] | None = None
    encrypted_content: None = None
    status: str | None = None


class OtherItem(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal[
        "item_reference",
        "file_search_call",
        "web_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "custom_tool_call",
        "custom_tool_call_output",
        "compaction",
    ]


def _completed(given: Any) -> Any:
    """An item without a type is a message. Clients send back all fields of an answer's items; None stands for none."""
    if not isinstance(given, dict):
        return given
    return {"type": "message", **{name: value for name, value in given.items() if value is not None}}


Item = Annotated[
    Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem | OtherItem, Field(discriminator="type")],
    BeforeValidator(_completed),
]


class FunctionTool(FunctionDefinition):
    type: Literal["function"]


class OtherTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: Literal[
        "file_search",
        "web_search",
        "web_search_preview",
        "computer",
        "computer_use_preview",
        "code_interpreter",
        "image_generation",
        "local_shell",
        "shell",
        "apply_patch",
        "mcp",
        "custom",
    ]


OneTool = Annotated[FunctionTool | OtherTool, Field(discriminator="type")]


class ToolName(Body):
    type: Literal["function"]
    name: FunctionName


class ToolNames(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ToolName], Field(min_length=1, max_length=128)]


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(NamedSchema):
    type: Literal["json_schema"]


class TextOptions(Body):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Hint | None = None


class Reasoning(Body):
    """summary: of the reasoning, which is returned whole."""

    effort: Hint | None = None
    summary: Hint | None = None
    generate_summary: Hint | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesRequest(Options):
    """POST /v1/responses."""

    input: Annotated[
        Annotated[Text, AString] | Annotated[Items[Item], Field(min_length=1, max_length=4096), AList], ByKind
    ]
    instructions: Text | None = None
    max_output_tokens: AtLeastOne | None = None
    text: TextOptions | None = None
    tools: Annotated[Items[OneTool], Field(max_length=128)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], AString]
            | Annotated[ToolName | ToolNames, Field(discriminator="type"), AnObject],
            ByKind,
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    include: Annotated[Items[_Includable], Field(max_length=16)] | None = None
    top_logprobs: Count | None = None
    stream_options: ResponseStreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning: Reasoning | None = None
    max_tool_calls: Count | None = None
    # Refused unless they ask for nothing.
    previous_response_id: str | None = None
    conversation: Annotated[Annotated[str, AString] | Annotated[dict[str, Any], AnObject], ByKind] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None
    truncation: Hint | None = None

    @model_validator(mode="after")
    def _scores_are_asked_for(self) -> ResponsesRequest:
        if self.top_logprobs is not None and _LOGPROBS not in (self.include or ()):
            raise ValueError(f"top_logprobs needs include=[{_LOGPROBS!r}]")
        return self


_STORED = "nothing is stored; send the whole conversation as input"
_REFUSED: Refusals = {
    "previous_response_id": (lambda value: value is not None, _STORED),
    "conversation": (lambda value: value is not None, _STORED),
    "prompt": (lambda value: value is not None, "no prompts are stored; send instructions and input"),
    "background": (lambda value: value is True, "answers are not kept; leave this field out, or use stream=true"),
    "truncation": (lambda value: value not in (None, "disabled"), "shorten the input, or leave this field out"),
}


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The chat request for the same answer. Raises Problem."""
    refuse(body, _REFUSED)
    fields = {name: getattr(body, name) for name in Options.model_fields}
    options = body.text or TextOptions()
    scored = _LOGPROBS in (body.include or ())
    for name in set(body.include or ()) - {_LOGPROBS}:
        note_unused(f"include: {name}", "an answer has text and calls of functions only")
    try:
        return ChatRequest.model_validate(
            {
                **fields,
                "messages": _messages(body),
                "max_completion_tokens": body.max_output_tokens,
                "response_format": _format(options),
                "structured_outputs": body.structured_outputs,
                "verbosity": options.verbosity,
                "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
                "tools": _tools(body),
                "tool_choice": _choice(body.tool_choice),
                "parallel_tool_calls": body.parallel_tool_calls,
                "logprobs": scored or None,
                "top_logprobs": body.top_logprobs,
                "chat_template_kwargs": body.chat_template_kwargs,
            }
        )
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise Problem(422, message, code="invalid_field") from error


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """An answer's reasoning, text and calls, which are items of their own here, are one message."""
    made: list[dict[str, Any]] = []
    if body.instructions is not None:
        made.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    reasoning: str | None = None
    for number, item in enumerate(body.input):
        where = f"input[{number}]"
        if isinstance(item, OtherItem):
            raise not_served(f"{where}: an item of type {item.type!r}; only text and functions are", param="input")
        if isinstance(item, ReasoningItem):
            reasoning = "".join(part.text for part in item.content or ())
            continue
        if isinstance(item, CallOutputItem):
            output = _text(item.output, f"{where}.output")
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            continue
        if isinstance(item, MessageItem):
            made.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
        elif not made or made[-1]["role"] != "assistant" or reasoning is not None:
            made.append({"role": "assistant"})
        if isinstance(item, CallItem):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            made[-1].setdefault("tool_calls", []).append(call)
        if reasoning and made[-1]["role"] == "assistant":
            made[-1]["reasoning_content"] = reasoning
        reasoning = None
    return made


def _text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if isinstance(part, OtherContent):
            raise not_served(f"{where}: a part of type {part.type!r}; only text is served", param="input")
    return "\n".join(part.text for part in content)


def _format(options: TextOptions) -> dict[str, Any] | None:
    if isinstance(options.format, SchemaFormat):
        given = options.format.model_dump(by_alias=True, exclude={"type"})
        return {"type": "json_schema", "json_schema": given}
    return None if options.format is None else {"type": options.format.type}


def _tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    for tool in body.tools or ():
        if isinstance(tool, OtherTool):
            raise not_served(f"tools: this server runs no tools, so it has no {tool.type!r}", param="tools")
    if body.tools is None:
        return None
    return [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools]


def _choice(given: Any) -> Any:
    if isinstance(given, ToolName):
        return {"type": "function", "function": {"name": given.name}}
    if isinstance(given, ToolNames):
        tools = [_choice(tool) for tool in given.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.mode, "tools": tools}}
    return given
