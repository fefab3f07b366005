"""Requests of clients: OpenAI's fields and those that vLLM's clients know. Any other field is refused (422), except
within the messages of a conversation (`Sent`).

Checks of single values stand here; what depends on the model or the server's limits is checked in recipe.py. pydantic
makes an error of each value that is wrong, so lists end at their first one and objects have few keys: otherwise one
large body would keep the event loop busy for seconds. Of several types that a field may have, the value's own kind
chooses one (`ByKind`), so that errors are about what the client meant.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    field_validator,
    model_validator,
)

from hf_paged.serving.problems import Problem

# Lists and objects cost more than their text: each is an object that Python's garbage collector visits.
MAX_CONTAINERS = 2**16
# Programs that follow a value call themselves once for each level; Python's own limit of calls is 1,000.
MAX_DEPTH = 128
# As long as a whole body may be (`settings.Limits.body`).
_MAX_STRING = 4 * 2**20
_MAX_KEYS = 200  # of an object with known keys; no request has as many
_MAX_BIASES = 2**16
# torch's generators take seeds of 64 bits, with or without a sign.
_INT64 = 2**63

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

_KINDS = {
    str: "a string",
    list: "a list",
    dict: "an object",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def kind_of(given: Any) -> str:
    """Name the kind of a JSON value in words."""
    return _KINDS.get(type(given), type(given).__name__)


def check_containers(data: bytes, what: str, param: str | None = None) -> None:
    """Raise Problem (400) for JSON with too many lists and objects, or in another encoding than UTF-8.

    These are what costs: each is an object of Python's that its garbage collector visits.
    """
    if b"\0" in data:  # as all other encodings of JSON have
        raise Problem(400, f"{what} is not JSON in UTF-8", param=param)
    if data.count(b"[") + data.count(b"{") <= MAX_CONTAINERS:
        return
    # Only now, because most bodies have few brackets, also within strings.
    bare = _STRING.sub(b"", data)
    count = bare.count(b"[") + bare.count(b"{")
    if count > MAX_CONTAINERS:
        raise Problem(400, f"{what} has {count} lists and objects; at most {MAX_CONTAINERS} are read", param=param)


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raise ValueError if lists and objects are nested too deeply for programs that follow them."""
    if not isinstance(value, dict | list):
        return
    if not left:
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    for each in value.values() if isinstance(value, dict) else value:
        check_depth(each, left - 1)


ByKind = Discriminator(kind_of)
AString, AList, AnObject, ABoolean = Tag("a string"), Tag("a list"), Tag("an object"), Tag("true or false")
_TEXTS, _IDS, _LISTS_OF_IDS = "a list of strings", "a list of token ids", "a list of lists of token ids"
TAGS = frozenset((*_KINDS.values(), _TEXTS, _IDS, _LISTS_OF_IDS))
"""Parts of the places of errors that are no field, key or number."""


def _prompt_kind(given: Any) -> str:
    if not isinstance(given, list) or not given:
        return _TEXTS if given == [] else kind_of(given)
    kinds: dict[type, str] = {str: _TEXTS, list: _LISTS_OF_IDS}
    # By its first item: the error then says what the others should have been.
    return kinds.get(type(given[0]), _IDS)


_Value = TypeVar("_Value")
Items = Annotated[list[_Value], Field(fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(max_length=_MAX_STRING)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
AtLeastOne = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Bias = Annotated[Number, Field(ge=-100, le=100)]


Temperature = Annotated[Number, Field(ge=0, le=100), AfterValidator(lambda given: given if given >= 1e-3 else 0.0)]
"""Below a thousandth, where scores would overflow, it is 0: greedy search, which it comes nearest to."""


def _few(given: Any) -> Any:
    """The value. Raises ValueError for an object with too many keys to look at each."""
    if isinstance(given, dict) and len(given) > _MAX_KEYS:
        raise ValueError(f"an object with {len(given)} keys; no request has more than {_MAX_KEYS}")
    return given


def _is_json(given: dict[str, Any]) -> dict[str, Any]:
    """The value. Raises ValueError for one that an answer cannot repeat: its strings are no Unicode, or it has NaN."""
    # First: json.dumps would raise RecursionError, which pydantic takes for no refusal.
    check_depth(given)
    try:
        json.dumps(given, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(f"a JSON object is needed: {error}") from error
    return given


def _is_printable(given: str) -> str:
    if not given.isprintable():  # a line end would begin a line of the log
        raise ValueError(f"{given[:100]!r} has characters that cannot be printed")
    return given


def _is_shallow(given: Any) -> Any:
    check_depth(given)
    return given


JSONSchema = Annotated[dict[str, Any], AfterValidator(_is_json)]
TemplateKwargs = Annotated[dict[str, Any], AfterValidator(_is_shallow)]
Hint = Annotated[str, Field(max_length=1024)]
Texts = Annotated[dict[Hint, Text], BeforeValidator(_few)]
"""Values that are texts, by name. With bounds, because pydantic lets strings that are no Unicode pass without."""


@dataclass(frozen=True, slots=True)
class Warper:
    """Marks a field that is the option of this name of a GenerationConfig, for requests that sample. neutral: the value
    that changes nothing."""

    neutral: float


class Body(BaseModel):
    """A request's body: no unknown field, no number that is not finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, given: Any) -> Any:
        return _few(given)


class Sent(Body):
    """A part of a conversation, which clients send back unchanged, whoever made it. Unknown fields say nothing to the
    model, and are left out."""

    model_config = ConfigDict(extra="ignore")


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
    logits_processors: Annotated[dict[str, TemplateKwargs], BeforeValidator(_few)] | None = None
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


Prompts = Annotated[
    Annotated[Text, AString]
    | Annotated[Items[Text], Field(min_length=1), Tag(_TEXTS)]
    | Annotated[TokenIds, Tag(_IDS)]
    | Annotated[Items[TokenIds], Field(min_length=1), Tag(_LISTS_OF_IDS)],
    Discriminator(_prompt_kind),
]
"""One prompt or several, as texts or token ids."""


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    add_special_tokens: bool = True
    suffix: str | None = None


class TextPart(Sent):
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


MediaText = Annotated[str, Field(max_length=2**28)]
"""Longer than a body may be."""


class MediaURL(Sent):
    """Data, as a data URL, or where it is fetched."""

    url: MediaText


class ImageURL(MediaURL):
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Sent):
    type: Literal["image_url"]
    image_url: ImageURL
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return self.image_url.url


class VideoPart(Sent):
    type: Literal["video_url"]
    video_url: MediaURL

    @property
    def url(self) -> str:
        return self.video_url.url


class AudioURLPart(Sent):
    type: Literal["audio_url"]
    audio_url: MediaURL

    @property
    def url(self) -> str:
        return self.audio_url.url


class AudioData(Sent):
    """Base64 of an audio file. format: a hint; the file may have any format that is read."""

    data: MediaText
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioPart(Sent):
    type: Literal["input_audio"]
    input_audio: AudioData

    @property
    def url(self) -> str:
        return f"data:audio/{self.input_audio.format};base64,{self.input_audio.data}"


MediaPart = ImagePart | VideoPart | AudioURLPart | AudioPart
KINDS: dict[type, Literal["image", "video", "audio"]] = {
    ImagePart: "image",
    VideoPart: "video",
    AudioURLPart: "audio",
    AudioPart: "audio",
}


class OtherPart(BaseModel):
    """A part of a message that is neither text nor media. It is parsed to be refused by name."""

    model_config = ConfigDict(extra="allow")

    type: Literal["file", "refusal"]


Content = Annotated[
    Annotated[Text, AString]
    | Annotated[Items[Annotated[TextPart | MediaPart | OtherPart, Field(discriminator="type")]], AList],
    ByKind,
]
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

    lora_name: Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_is_printable)]
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
