"""POST /v1/responses: what clients send, and the chat request that it stands for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hf_paged.serving import schema
from hf_paged.serving.parts import AudioPart, ImagePart, ImageURL, MediaPart, MediaText, MediaURL, TextPart, VideoPart
from hf_paged.serving.problems import not_served
from hf_paged.serving.refusals import Refusals, note_unused, refuse
from hf_paged.serving.schema import (
    AllowedTools,
    CalledFunction,
    ChatRequest,
    Conversation,
    FunctionDefinition,
    FunctionName,
    FunctionNamed,
    Message,
    NamedSchema,
    NamedTool,
    ObjectFormat,
    ReasoningOptions,
    TextFormat,
    Tool,
    ToolCall,
    ToolChoices,
)
from hf_paged.serving.values import AList, AnObject, AString, AtLeastOne, Body, ByKind, Count, Hint, Items, Sent, Text

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


class TextContent(Sent):
    """A part of a message. What an answer's part has beside its text changes no prompt."""

    type: Literal["input_text", "output_text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImageContent(Sent):
    type: Literal["input_image"]
    image_url: MediaText | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None

    def part(self, where: str) -> ImagePart:
        """Make the image's part of a chat message. Raises Problem (400) for a stored image."""
        if self.image_url is None:
            raise not_served(f"{where}: an image without image_url; write it as a data URL", param="input")
        # Without validation: the values have been checked as those of this route.
        image = ImageURL.model_construct(url=self.image_url, detail=self.detail)
        return ImagePart.model_construct(type="image_url", image_url=image)


class VideoContent(Sent):
    """As `input_image`; OpenAI has none."""

    type: Literal["input_video"]
    video_url: MediaText

    def part(self, where: str) -> VideoPart:
        return VideoPart.model_construct(type="video_url", video_url=MediaURL.model_construct(url=self.video_url))


class AudioContent(AudioPart):
    def part(self, where: str) -> AudioPart:
        return AudioPart.model_construct(type=self.type, input_audio=self.input_audio)


MediaContent = ImageContent | VideoContent | AudioContent


class OtherContent(BaseModel):
    """A part that is neither text nor media. It is parsed to be refused by name, as other classes with such a name."""

    model_config = ConfigDict(extra="allow")

    type: Literal["input_file", "refusal"]


Content = Annotated[TextContent | MediaContent | OtherContent, Field(discriminator="type")]
Contents = Annotated[Annotated[Text, AString] | Annotated[Items[Content], AList], ByKind]


class _OfAnAnswer(Sent):
    """Clients send an answer's items back with these fields."""

    id: Id | None = None
    status: str | None = None


class MessageItem(_OfAnAnswer):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents
    phase: str | None = None


class CallItem(_OfAnAnswer):
    """A call that the model has made earlier."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    arguments: Text


class CallOutputItem(_OfAnAnswer):
    type: Literal["function_call_output"]
    call_id: Id
    output: Contents


class ReasoningContent(Sent):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(_OfAnAnswer):
    """Reasoning of the model in an earlier turn. Most chat templates leave it out of the prompt."""

    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)] | None = None
    content: Items[ReasoningContent] | None = None
    encrypted_content: None = None


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
    # As dicts, before pydantic chooses a class by `type`.
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


class ToolName(FunctionNamed):
    type: Literal["function"]


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


class Reasoning(ReasoningOptions):
    """summary: of the reasoning, which is returned whole."""

    summary: Hint | None = None
    generate_summary: Hint | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ResponsesRequest(Conversation):
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
    include: Annotated[Items[_Includable], Field(max_length=16)] | None = None
    stream_options: ResponseStreamOptions | None = None
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
        if self.structured_outputs is not None and not isinstance(_format(self.text), TextFormat | None):
            raise ValueError("text.format and structured_outputs exclude each other")
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
    """The chat request for the same answer. Its values have been checked as those of the body. Raises Problem."""
    # Before anything is converted, so that errors name this route's fields.
    refuse(body, _REFUSED)
    for name in set(body.include or ()) - {_LOGPROBS}:
        note_unused(f"include: {name}", "an answer has text and calls of functions only")
    return ChatRequest.model_construct(
        **{name: getattr(body, name) for name in Conversation.model_fields},
        messages=messages_of(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        response_format=_format(body.text),
        verbosity=None if body.text is None else body.text.verbosity,
        reasoning=body.reasoning,
        tools=_tools(body),
        tool_choice=_choice(body.tool_choice),
        logprobs=True if _LOGPROBS in (body.include or ()) else None,
    )


def _message(role: str, content: str | list[TextPart | MediaPart] | None = None, **others: Any) -> Message:
    return Message.model_construct(role=role, content=content, **others)


def messages_of(given: str | list[Any], instructions: str | None = None) -> list[Message]:
    """Return the messages of a text or of items. An answer's reasoning, text and calls, which are items of their own,
    are one message. Raises Problem (400)."""
    made: list[Message] = []
    if instructions is not None:
        made.append(_message("system", instructions))
    if isinstance(given, str):
        return [*made, _message("user", given)]
    # It comes before the message or call to which it belongs.
    reasoning: str | None = None
    for number, item in enumerate(given):
        where = f"input[{number}]"
        if isinstance(item, OtherItem):
            raise not_served(f"{where}: an item of type {item.type!r}; only text and functions are", param="input")
        if isinstance(item, ReasoningItem):
            reasoning = "".join(part.text for part in item.content or ())
            continue
        if isinstance(item, CallOutputItem):
            made.append(_message("tool", text_of(item.output, f"{where}.output"), tool_call_id=item.call_id).at(where))
            continue
        if isinstance(item, MessageItem):
            made.append(_message(item.role, _content(item.content, f"{where}.content")).at(where))
        # Several calls in a row belong to one message, unless reasoning lies between them.
        elif not made or made[-1].role != "assistant" or reasoning is not None:
            made.append(_message("assistant").at(where))
        if isinstance(item, CallItem):
            function = CalledFunction.model_construct(name=item.name, arguments=item.arguments)
            call = ToolCall.model_construct(id=item.call_id, function=function)
            made[-1].tool_calls = [*(made[-1].tool_calls or ()), call]
        if reasoning and made[-1].role == "assistant":
            made[-1].reasoning_content = reasoning
        reasoning = None
    return made


def _content(content: str | list[Any], where: str) -> str | list[TextPart | MediaPart]:
    """Text, or text and media."""
    if isinstance(content, str) or not any(isinstance(part, MediaContent) for part in content):
        return text_of(content, where)
    return [
        part.part(where)
        if isinstance(part, MediaContent)
        else TextPart.model_construct(type="text", text=text_of([part], where))
        for part in content
    ]


def text_of(content: str | list[Any], where: str) -> str:
    """Return the text of content that may have nothing else. Raises Problem (400)."""
    if isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part, TextContent):
            raise not_served(f"{where}: a part of type {part.type!r}; it may have text only", param="input")
    return "\n".join(part.text for part in content)


def _format(text: TextOptions | None) -> Any:
    given = None if text is None else text.format
    if isinstance(given, SchemaFormat):
        return schema.SchemaFormat.model_construct(type="json_schema", json_schema=given)
    if given is None:
        return None
    return TextFormat(type="text") if given.type == "text" else ObjectFormat(type="json_object")


def _tools(body: ResponsesRequest) -> list[Tool] | None:
    for tool in body.tools or ():
        if isinstance(tool, OtherTool):
            raise not_served(f"tools: this server runs no tools, so it has no {tool.type!r}", param="tools")
    if body.tools is None:
        return None
    return [Tool.model_construct(type="function", function=tool) for tool in body.tools]


def _choice(given: Any) -> Any:
    if isinstance(given, ToolName):
        return NamedTool.model_construct(type="function", function=given)
    if isinstance(given, ToolNames):
        choices = ToolChoices.model_construct(mode=given.mode, tools=[_choice(tool) for tool in given.tools])
        return AllowedTools.model_construct(type="allowed_tools", allowed_tools=choices)
    return given
