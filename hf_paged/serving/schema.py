"""Requests of clients: OpenAI's fields and those that vLLM's clients know. Any other field is refused (422), except
within the messages of a conversation (`Sent`).

What depends on the model or the server's limits is checked in recipe.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from hf_paged.serving.parts import Content
from hf_paged.serving.values import (
    ABoolean,
    AList,
    AnObject,
    AString,
    AtLeastOne,
    Bias,
    Body,
    ByKind,
    Count,
    Hint,
    Items,
    JSONSchema,
    Number,
    Printable,
    Prompts,
    Sent,
    StopString,
    Temperature,
    TemplateKwargs,
    Text,
    Texts,
    TokenId,
    TokenIds,
    few,
)

# One for each token of many vocabularies, and few enough to look at each.
_MAX_BIASES = 2**16
# torch's generators take seeds of 64 bits, with or without a sign.
_INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Warper:
    """Marks a field that is the option of this name of a GenerationConfig, for requests that sample. neutral: the value
    that changes nothing."""

    neutral: float


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class ObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Text | None = None
    schema_: JSONSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's constraints. Exactly one is given."""

    json_: Annotated[Annotated[JSONSchema, AnObject] | Annotated[Text, AString], ByKind] | None = Field(
        None, alias="json"
    )
    json_object: bool | None = None
    regex: Text | None = None
    grammar: Text | None = None
    choice: Annotated[Items[Text], Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [name for name, value in self if value not in (None, False)]
        if len(given) != 1:
            raise ValueError("give one of json, json_object, regex, grammar and choice")
        return self


class Options(Body):
    """Fields of all requests for text. The last ones change no token; see refusals.py."""

    model: str | None = None
    stream: bool | None = None
    min_tokens: Count = 0
    temperature: Annotated[Temperature | None, Warper(1.0)] = None
    top_p: Annotated[Annotated[Number, Field(gt=0, le=1)] | None, Warper(1.0)] = None
    top_k: Annotated[Annotated[int, Field(ge=-1, lt=2**31, strict=True)] | None, Warper(0)] = None
    min_p: Annotated[Annotated[Number, Field(ge=0, le=1)] | None, Warper(0.0)] = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64, strict=True)] | None = None
    stop: (
        Annotated[
            Annotated[StopString, AString] | Annotated[Items[StopString], Field(max_length=16), AList],
            ByKind,
        ]
        | None
    ) = None
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31, strict=True)] = 0
    structured_outputs: StructuredOutputs | None = None
    logits_processors: Annotated[dict[str, TemplateKwargs], BeforeValidator(few)] | None = None
    user: Hint | None = None
    store: bool | None = None
    metadata: Annotated[Texts, Field(max_length=16)] | None = None
    service_tier: Hint | None = None
    safety_identifier: Hint | None = None
    prompt_cache_key: Hint | None = None
    prompt_cache_retention: Hint | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(dict.fromkeys(self.stop or ()))


class Sampling(Options):
    """Fields of both kinds of completions."""

    n: AtLeastOne | None = None
    best_of: AtLeastOne | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    logit_bias: dict[str, Bias] | None = None
    stop_token_ids: Annotated[Items[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool = False
    bad_words: Annotated[Items[StopString], Field(max_length=1024)] | None = None
    allowed_token_ids: TokenIds | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[Number, Field(ge=-100, le=100)] | None = None
    early_stopping: Annotated[Annotated[bool, ABoolean] | Annotated[Literal["never"], AString], ByKind] | None = None
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _first_wrong_bias(cls, given: Any) -> Any:
        """There may be a bias for each token of a vocabulary; pydantic would make an error of each wrong one."""
        if isinstance(given, dict) and len(given) > _MAX_BIASES:
            raise ValueError(f"{len(given)} biases; at most {_MAX_BIASES} are taken")
        for key, bias in given.items() if isinstance(given, dict) else ():
            if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError(f"the key {str(key)[:40]!r} is not a token id")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {key} is not a number from -100 to 100")
        return given

    @model_validator(mode="after")
    def _together(self) -> Sampling:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise ValueError(f"best_of={best_of} is less than n={n}; raise it, or leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        # The best ones are chosen by all of their tokens.
        if self.stream and best_of is not None and best_of > n and not self.use_beam_search:
            raise ValueError(
                f"best_of={best_of} with n={n} cannot be streamed: which ones are best is known at the end"
            )
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs use_beam_search=true")
        if self.structured_outputs is not None and not isinstance(self.response_format, TextFormat | None):
            raise ValueError("response_format and structured_outputs exclude each other")
        return self


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    add_special_tokens: bool = True
    suffix: str | None = None


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class CalledFunction(Sent):
    name: FunctionName
    arguments: Text


class ToolCall(Sent):
    """A call that an assistant's message of the conversation has."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Count | None = None  # clients send back what they have got


class Message(Sent):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[Items[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    annotations: list[Any] | None = None
    _place: str | None = PrivateAttr(default=None)

    def at(self, place: str) -> Message:
        """Note where the client has sent what this message is made of."""
        self._place = place
        return self

    def place(self, number: int) -> str:
        """Return the message's name in errors. number: of the message in its list."""
        return self._place or f"messages[{number}]"


class FunctionDefinition(Body):
    name: FunctionName
    description: Text | None = None
    parameters: JSONSchema | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionNamed(Body):
    name: FunctionName


class NamedTool(Body):
    """One function, which is to be called."""

    type: Literal["function"]
    function: FunctionNamed


class ToolChoices(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=128)]


class AllowedTools(Body):
    """Some of the functions."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolChoices


Messages = Annotated[Items[Message], Field(min_length=1, max_length=4096)]


class Templated(Body):
    """Fields that decide how messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Annotated[Items[Tool], Field(max_length=128)] | None = None

    @model_validator(mode="after")
    def _one_end(self) -> Templated:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt exclude each other; send add_generation_prompt=false"
            )
        return self


class Conversation(Options):
    """Fields of both a chat request and a request to /v1/responses, whose tools have different forms."""

    top_logprobs: Count | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: Count | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    @model_validator(mode="after")
    def _has_tools(self) -> Conversation:
        if not getattr(self, "tools", None) and getattr(self, "tool_choice", None) not in (None, "none", "auto"):
            raise ValueError("tool_choice needs tools")
        return self


class ReasoningOptions(Body):
    """max_tokens: another name of thinking_token_budget."""

    effort: Hint | None = None
    max_tokens: Count | None = None


class ChatRequest(Sampling, Conversation, Templated):
    """POST /v1/chat/completions."""

    messages: Messages
    add_special_tokens: bool = False
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], AString]
            | Annotated[NamedTool | AllowedTools, Field(discriminator="type"), AnObject],
            ByKind,
        ]
        | None
    ) = None
    functions: Items[dict[str, Any]] | None = None
    function_call: Annotated[Annotated[str, AString] | Annotated[dict[str, Any], AnObject], ByKind] | None = None
    reasoning_effort: Hint | None = None
    reasoning: ReasoningOptions | None = None
    verbosity: Hint | None = None
    modalities: Items[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _chat_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        # OpenAI's old and new name of one limit: clients send one, or both with one value.
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(f"max_tokens={both[0]} and max_completion_tokens={both[1]} contradict each other")
        return self


class TokenizeRequest(Templated):
    """POST /tokenize, with a text, or with messages as in a chat request."""

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Items[TokenId]


class LoadAdapterRequest(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256), Printable]
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]


class UpdateWeightsRequest(Body):
    """POST /update_weights."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    version: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    partial: bool = False
    mode: Literal["abort", "wait", "keep"] = "wait"
    recompute: bool = True


class AbortRequests(Body):
    """POST /abort_requests. request_ids: those of the header X-Engine-Request-Ids; none of them = all requests."""

    request_ids: Items[str] = Field(default_factory=list)


class UnloadAdapterRequest(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
