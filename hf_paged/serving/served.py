"""The model that is served: its tokenizer, its limits and its names. Turns texts and messages into token ids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_paged.annotations import Model, Tokenizer
from hf_paged.features.adapters.adapters import BASE
from hf_paged.features.media.media import placeholder_of, sound_encoder
from hf_paged.features.tasks.methods import ModelTask
from hf_paged.generation.validation import position_limit, prompt_limit
from hf_paged.model.state import unwrapped
from hf_paged.serving.answer_format import AnswerFormat, template_of
from hf_paged.serving.attachments import Attached, parts_of
from hf_paged.serving.disagreements import disagreements, renders_tools, tokens_of, turn_ends
from hf_paged.serving.parts import KINDS, TextPart
from hf_paged.serving.problems import Problem
from hf_paged.serving.registered import Registered
from hf_paged.serving.schema import Message, Tool
from hf_paged.serving.settings import AUDIO_PATHS, Settings
from hf_paged.serving.templates import reads_parts
from hf_paged.serving.values import MAX_DEPTH, check_containers, check_depth

log = logging.getLogger("hf_paged.serving")

# A text that may be too long is encoded in pieces: the time for the whole may grow faster than its length.
_PIECE = 2**14  # characters

# What only the operator may decide, and what would change the type of the result.
_RESERVED = (
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
)

# What each kind of model answers, for the log and for refusals.
_ROUTES: dict[ModelTask, str] = {
    "generate": "completions and chats",
    "embed": "/v1/embeddings, /v1/rerank and /v1/score",
    "classify": "/v1/classify, /v1/embeddings and, with one label, /v1/rerank and /v1/score",
    "classify_tokens": "/v1/classify and /v1/embeddings",
}


@dataclass(slots=True)
class ServedModel:
    """adapters: name -> the folder it was loaded from. max_length: tokens of prompt and answer (None: no limit known);
    of a model with an encoder, tokens of its decoder. max_prompt: of a prompt alone. answers: of chats. processor: of a
    model that takes media, what makes its inputs of them (None: it takes none). kinds: of media that both take.
    reads_parts: see `reads_parts`. eos_token_ids: that end completions; turn_ends: answers in chats, and what follows a
    grammar. renders_tools: the chat template does. task: what the model computes (`Engine.task`).
    registered: logits processors that requests may name.

    A tokenizer in Python is used by one thread at a time where it encodes; decoding may run beside that.
    """

    model: Model
    tokenizer: Tokenizer
    settings: Settings
    max_length: int | None
    max_prompt: int | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    turn_ends: frozenset[int]
    created: int
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    adapters: dict[str, str] = field(default_factory=dict)
    processor: Any = None
    kinds: frozenset[str] = frozenset()
    reads_parts: bool = False
    renders_tools: bool = True
    task: ModelTask = "generate"
    registered: dict[str, Registered] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: Model,
        tokenizer: Tokenizer,
        settings: Settings,
        *,
        created: int,
        processor: Any = None,
        task: ModelTask = "generate",
    ) -> ServedModel:
        """Make the record. Raises ValueError if max_model_len is too large, or the response template of no use."""
        # Checked now, because a request beyond the positions would fail in the model.
        native, asked = position_limit(model), settings.max_model_len
        if native is not None and asked is not None and asked > native:
            raise ValueError(f"--max-model-len {asked} is more than the model's {native} positions; lower it")
        prompt_limits = [limit for limit in (asked, prompt_limit(model)) if limit is not None]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # Left over from training, they would cut or fill prompts; changing them later is not thread-safe.
            backend.no_truncation()
            backend.no_padding()
        template, source = template_of(model, tokenizer, settings.response_template)
        answers = AnswerFormat.of(template)
        chat_template = _given_template(settings, processor)
        log.info("%s: %s", type(unwrapped(model)).__name__, _ROUTES[task])
        writes = task == "generate"  # other models have no generation config
        for each in disagreements(model, tokenizer, chat_template) if writes else ():
            log.warning("files of the checkpoint disagree: %s", each)
        log.info("response template: %s%s", source, "" if answers.call else "; forced tool calls are written as JSON")
        return cls(
            model,
            tokenizer,
            settings,
            max_length=asked or native,
            max_prompt=min(prompt_limits, default=None),
            vocab_size=model.get_input_embeddings().weight.shape[0],
            eos_token_ids=tokens_of(model.generation_config.eos_token_id) if writes else frozenset(),
            turn_ends=turn_ends(model, tokenizer) if writes else frozenset(),
            created=created,
            answers=answers,
            processor=processor,
            kinds=kinds_of(model, processor),
            reads_parts=reads_parts(tokenizer, chat_template),
            renders_tools=renders_tools(tokenizer, chat_template),
            task=task,
            registered={name: Registered.of(name, place) for name, place in settings.logits_processors},
        )

    @property
    def name(self) -> str:
        return self.settings.names[0]

    @property
    def chat_template(self) -> Any:
        """Jinja text, or several texts by name; None if there is none."""
        return _given_template(self.settings, self.processor) or self.tokenizer.chat_template

    def adapter_of(self, name: str | None) -> tuple[str, str]:
        """(name to answer with, adapter) for the `model` field of a request. Raises Problem (404)."""
        if name is None or name in self.settings.names:
            return name or self.name, BASE
        # Only after the model's own names, which no adapter may have.
        if name in self.adapters:
            return name, name
        known = ", ".join(map(repr, (*self.settings.names, *self.adapters)))
        raise Problem(404, f"the model {name!r} is not served; choose {known}", param="model", code="model_not_found")

    def check_writes_text(self) -> None:
        """Raise Problem (400) for a model without a language-modelling head, or whose encoder reads something else."""
        if self.task != "generate":
            raise Problem(
                400,
                f"this model is a {self._kind}, of which no tokens follow a prompt; it has {_ROUTES[self.task]}. To "
                "generate, serve a checkpoint whose config.json names a class for causal LM in `architectures`",
                code="not_served",
            )
        kind = self.model.main_input_name
        if self.model.config.is_encoder_decoder and kind != "input_ids":
            raise Problem(
                400, f"this model's encoder reads {kind}, no text; for speech use {AUDIO_PATHS[0]}", code="not_served"
            )

    @property
    def _kind(self) -> str:
        return type(unwrapped(self.model)).__name__

    def check_reads_alone(self, routes: str) -> None:
        """Raise Problem (400) for a model that has an encoder beside its decoder."""
        if self.model.config.is_encoder_decoder:
            raise Problem(
                400,
                f"this model is a {self._kind} with an encoder, and {routes} take a decoder alone; serve one",
                code="not_served",
            )

    def check_has_labels(self, route: str) -> None:
        """Raise Problem (400) for a model whose head has no labels."""
        if self.task not in ("classify", "classify_tokens"):
            raise Problem(
                400,
                f"this model is a {self._kind}, which has no head for labels; for {route} serve a checkpoint whose "
                "config.json names a class for sequence or token classification in `architectures`",
                code="not_served",
            )

    def processors(self, asked: Mapping[str, Mapping[str, Any]], prompt: list[int]) -> list[Any]:
        """Make the logits processors that a request names, with its arguments. Raises Problem (400)."""
        made = []
        for name, arguments in asked.items():
            if name not in self.registered:
                known = ", ".join(map(repr, self.registered)) or "none; start the server with --logits-processor"
                raise Problem(
                    400,
                    f"logits_processors: {name[:99]!r} is not registered; there are {known}",
                    param="logits_processors",
                    code="not_served",
                )
            try:
                made.append(
                    self.registered[name].made(arguments, self.tokenizer, self.model.device, prompt, self.vocab_size)
                )
            except ValueError as error:
                raise Problem(400, f"logits_processors: {error}", param="logits_processors") from error
        return made

    def check_ids(self, name: str, ids: Iterable[int]) -> None:
        """Raise Problem (400) for a token of this field that the model does not have. No id is negative."""
        token = max(ids, default=0)
        if token >= self.vocab_size:
            last = self.vocab_size - 1
            raise Problem(400, f"{name}: the vocabulary has no token {token}; its last one is {last}", param=name)

    # -- prompts ------------------------------------------------------------------------------------------------

    def check_size(self, text: str, param: str = "prompt") -> None:
        """Raise Problem (400) for a text of this field that is much too long, without encoding all of it: the time for
        that may grow faster than its length. A few more tokens come from the cuts between pieces."""
        limit = self.max_prompt
        # A token has about four characters: a text that is not longer is encoded whole.
        if limit is None or len(text) <= max(4 * limit, _PIECE):
            return
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self.encode(text[start : start + _PIECE], add_special_tokens=False))
            if count > 2 * limit:
                raise Problem(
                    400,
                    f"the prompt has {len(text)} characters, of which the first {start + _PIECE} alone are more than "
                    f"the model's {limit} tokens; shorten it",
                    param=param,
                    code="context_length_exceeded",
                )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises Problem (400) for text that is no Unicode."""
        return self.encode_pair(text, None, add_special_tokens=add_special_tokens)[0]

    def encode_pair(
        self, text: str, pair: str | None, *, add_special_tokens: bool
    ) -> tuple[list[int], list[int] | None]:
        """Return the token ids of two texts that the tokenizer joins, and the types by which an encoder tells them
        apart, if it gives these. Raises Problem as `encode` does."""
        try:
            f"{text}{pair}".encode()
        except UnicodeEncodeError as error:
            raise Problem(400, f"the text is not valid Unicode: {error}") from error
        encoded = self.tokenizer(text, pair, add_special_tokens=add_special_tokens, verbose=False)
        ids = list(encoded["input_ids"])
        if max(ids, default=0) >= self.vocab_size:
            token = next(each for each in ids if each >= self.vocab_size)
            name = self.tokenizer.convert_ids_to_tokens(token)
            raise Problem(
                400,
                f"the text has {name!r}, a token of the tokenizer ({token}) that the model does not have; leave it out",
            )
        return ids, encoded.get("token_type_ids")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, Any] | None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The prompt that the chat template makes of messages. Raises Problem (400)."""
        import jinja2

        for name in kwargs or {}:
            if name in _RESERVED:
                raise Problem(
                    400, f"chat_template_kwargs: {name!r} is not for requests to decide", param="chat_template_kwargs"
                )
        if not self.chat_template:
            raise Problem(
                400,
                "this model's tokenizer has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
            )
        if tools and not self.renders_tools:
            raise Problem(
                400,
                "tools: this model's chat template does not render them, so it would not know of them; leave them out, "
                "or start the server with --chat-template FILE",
                param="tools",
                code="not_served",
            )
        # Arguments are JSON within a text, which the check of the body could not see.
        calls = (call for message in messages for call in message.tool_calls or ())
        texts = (call.function.arguments.encode(errors="replace") for call in calls)
        check_containers(b"\n".join(texts), "the arguments of the tool calls", "messages")
        # Text is a list of parts only where the template knows nothing else, or where media stand between.
        in_parts = self.reads_parts or bool(parts_of(messages))
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [_as_dict(message, in_parts=in_parts) for message in messages],
                    tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
                    chat_template=_given_template(self.settings, self.processor),
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **(kwargs or {}),
                )
            )
        except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # The template is a program over what the client sent, and refuses in its own ways.
            raise Problem(400, f"the chat template refuses these messages: {error}", param="messages") from error

    def prompt_of(
        self, text: str, attached: Attached, *, add_special_tokens: bool
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Return the token ids of rendered messages, with a placeholder for each feature of attached media, and the
        model's inputs for the media (None: there are none). Raises Problem (400)."""
        # The rendered text is what is encoded, and may be longer than what was sent.
        self.check_size(text)
        if not (given := attached.arguments()):
            return self.encode(text, add_special_tokens=add_special_tokens), None
        try:
            made = self.processor(text=[text], return_tensors="pt", add_special_tokens=add_special_tokens, **given)
            return row_of(made, self.model.dtype)
        except Exception as error:  # processors refuse in ways of their own
            raise Problem(
                400, f"the model's processor refuses these media: {error}", param="messages", code="invalid_media"
            ) from error


def _given_template(settings: Settings, processor: Any) -> Any:
    """The chat template in place of the tokenizer's; None if there is none."""
    return settings.chat_template or getattr(processor, "chat_template", None)


def row_of(made: Mapping[str, Any], dtype: Any) -> tuple[list[int], dict[str, Any]]:
    """The token ids of the one prompt in what a processor returns, and the rest, pixels and samples as `dtype`. Numbers
    of one dimension, such as the seconds between a video's frames, count positions and stay as they are. Raises
    ValueError for what is no tensor."""
    inputs: dict[str, Any] = {}
    for name, value in made.items():
        if not hasattr(value, "is_floating_point"):
            raise ValueError(f"{name} is {type(value).__name__}, where a tensor is needed")
        inputs[name] = value.to(dtype) if value.is_floating_point() and value.dim() > 1 else value
    inputs.pop("attention_mask", None)
    return inputs.pop("input_ids")[0].tolist(), inputs


def kinds_of(model: Model, processor: Any) -> frozenset[str]:
    """The kinds of media for which a processor has a part, and a model placeholders and an encoder."""
    parts = {
        "image": ["image_processor"],
        "video": ["video_processor"],
        "audio": ["audio_processor", "feature_extractor"],
    }
    return frozenset(
        kind
        for kind, names in parts.items()
        if any(getattr(processor, name, None) is not None for name in names)
        and placeholder_of(unwrapped(model), kind) is not None
        and (kind == "audio" or hasattr(unwrapped(model).base_model, f"get_{kind}_features"))
        and (kind != "audio" or sound_encoder(unwrapped(model)) is not None)
    )


def _as_dict(message: Message, *, in_parts: bool = False) -> dict[str, Any]:
    """in_parts: as templates of processors expect messages, of which some have media."""
    content: Any = message.content
    if in_parts:
        parts = content if isinstance(content, list) else [TextPart(type="text", text=content or "")]
        content = [
            {"type": KINDS[type(part)]} if type(part) in KINDS else {"type": "text", "text": part.text}
            for part in parts
        ]
    elif isinstance(content, list):
        content = "\n".join(part.text for part in content)
    made: dict[str, Any] = {"role": message.role, "content": content or ""}
    for name in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, name) is not None:
            made[name] = getattr(message, name)
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                # As chat templates expect them; OpenAI's clients send them as text.
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return made


def _arguments(text: str) -> Any:
    """Parse a call's arguments for chat templates. The text of a call that was cut off stays: agents send it back."""
    try:
        arguments = json.loads(text or "{}")
        check_depth(arguments)
    except json.JSONDecodeError:
        return text
    except (ValueError, RecursionError):
        raise Problem(
            400,
            f"messages: the arguments {text[:99]!r} of a tool call are nested more than {MAX_DEPTH} deep",
            param="messages",
        ) from None
    return arguments if isinstance(arguments, dict) else text
