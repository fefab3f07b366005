"""Schemas of the server's answers for /openapi.json: OpenAI's objects with some fields of vLLM's.

The answers themselves are built in forms.py; the tests compare the two. Those of /v1/responses, /v1/messages and /live
are in files of their own.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]
"""Reasons why an answer ends, in the words of OpenAI's clients."""


class Reply(BaseModel):
    """An answer has these fields and no others. A field with a default may be missing."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetails(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: ErrorDetails


# -- completions ---------------------------------------------------------------------------------------------------


class PromptTokensDetails(Reply):
    cached_tokens: int
    audio_tokens: int | None = None


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    weight_versions: tuple[int, int] | None = None


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Reply):
    """Whole: with `usage` and finished choices. A chunk of a stream has the choices that have grown."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class EmbeddingVector(Reply):
    """embedding: in base64, numbers of 32 bits, the lowest byte first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Reply):
    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


class LabelledInput(Reply):
    """label, probs: of a token classifier, one for each token."""

    index: int
    label: str | list[str | None] | None
    probs: list[float] | list[list[float]]
    num_classes: int


class Classes(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[LabelledInput]
    usage: EmbeddingUsage


class RankedText(Reply):
    text: str


class RankedDocument(Reply):
    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Reply):
    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class PairScore(Reply):
    index: int
    object: Literal["score"]
    score: float


class Scores(Reply):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage


class AudioUsage(Reply):
    type: Literal["duration"]
    seconds: int


class AudioSegment(Reply):
    id: int
    seek: int
    start: float
    end: float
    text: str
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None


class Transcription(Reply):
    """Transcription of a file. Only verbose_json has more than text and usage; text, srt and vtt are no JSON."""

    text: str
    usage: AudioUsage
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[AudioSegment] | None = None


class TranscriptionEvent(Reply):
    """delta: the text that is new; at the end, text: all of it."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: AudioUsage | None = None


class ChatToken(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Reply):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Reply):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class FunctionPart(Reply):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(Reply):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPart


class MessagePart(Reply):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChunkChoice(Reply):
    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


# -- decisions -----------------------------------------------------------------------------------------------------


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class PredicateAnswer(Reply):
    type: Literal["predicate"]
    name: str | None
    probability: float


class OptionProbability(Reply):
    value: str | bool
    probability: float


class ChoiceAnswer(Reply):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    probabilities: list[OptionProbability]
    confidence: float


class LevelProbability(Reply):
    value: int
    label: str
    probability: float


class ScoreAnswer(Reply):
    """score: the mean of the levels, of which the first one is 0."""

    type: Literal["score"]
    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float


class Decisions(Reply):
    """confidence: the probability of the likeliest label among all tokens."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: ResponseUsage


# -- other routes --------------------------------------------------------------------------------------------------


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["hf-paged"]
    root: str
    parent: str | None
    max_model_len: int | None
    weight_version: int
    task: Literal["generate", "embed", "classify", "classify_tokens"]


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Reply):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Reply):
    prompt: str


class Status(Reply):
    status: str


class AbortStatus(Status):
    """unknown: ids of no request in flight; status is "unknown" if that is all that was asked for."""

    aborted: list[str]
    unknown: list[str]


class AdapterStatus(Status):
    name: str


class WeightStatus(Status):
    weight_version: int


class Paused(Reply):
    is_paused: bool


class Version(Reply):
    version: str
