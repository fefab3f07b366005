"""Recipes: what the engine has to do for an HTTP request, and how its answer is put together.

Everything is checked here against the model and the limits, before anything is queued. The options are those of
transformers' GenerationConfig, so that an answer is what `generate` returns for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from math import log2
from typing import Any, NamedTuple

from transformers import GenerationConfig

from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.constraints import Constraint
from hf_paged.features.grammar.grammar import Grammar
from hf_paged.features.media.media import placeholder_of
from hf_paged.generation.request_options import RequestOptions
from hf_paged.serving import schema
from hf_paged.serving.answer_format import Calls, Tool
from hf_paged.serving.attachments import Attached
from hf_paged.serving.parsing import Parser
from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.processors import OccurrencePenalty, StopText
from hf_paged.serving.refusals import check_served, note_unused
from hf_paged.serving.schema import ChatRequest, CompletionRequest, Options, Sampling, Warper
from hf_paged.serving.served import ServedModel
from hf_paged.serving.settings import Settings

_WARPERS = {
    name: mark.neutral
    for name, field in Options.model_fields.items()
    for mark in field.metadata
    if type(mark) is Warper
}
# The largest finite number of fp32 is a little less than 2^128, and the least normal one 2^-126.
_MAX_EXPONENT = 126
# OpenAI's default for /v1/completions.
_COMPLETION_TOKENS = 16


class Submission(NamedTuple):
    """One request to the engine."""

    prompt_ids: list[int]
    options: RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """submissions: one for each prompt; empty if nothing has to be generated. audio_tokens: those of the prompts that
    stand for audio.

    n: choices for each prompt. copies: they are all its one output (greedy search). ranked: more
    samples are made, and the n likeliest are returned. logprobs: how many alternatives (None: no log-probabilities).
    texts: the prompts, for `echo`. scores_prompts: with `echo`, the log-probabilities of the prompts too. is_dry: what
    is generated is dropped; it is computed for the prompt's log-probabilities. user: for the log.
    eos_token_ids: those that end an answer. has_sound: a file is transcribed, and there are no prompts.
    constraint: what each answer has to be, before `constrained` has made processors of it. new_parser: of an answer's
    text, as a message; None: it is the content.
    """

    model: str
    prompts: list[list[int]]
    submissions: list[Submission]
    audio_tokens: int = 0
    n: int = 1
    copies: bool = False
    ranked: bool = False
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    stream: bool = False
    user: str | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    scores_prompts: bool = False
    is_dry: bool = False
    texts: list[str] = field(default_factory=list)
    eos_token_ids: tuple[int, ...] = ()
    has_sound: bool = False
    constraint: Constraint | None = None
    new_parser: Callable[[], Parser] | None = None

    @property
    def inputs(self) -> dict[str, Any]:
        """Return the model's inputs for the media of the prompt, by name."""
        return dict(self.submissions[0].options.inputs or {}) if self.submissions else {}

    @property
    def reads_once(self) -> bool:
        """Return True if only final outputs are needed. A stop string has to be seen as soon as it is there."""
        return not (self.stream or self.stops)

    def constrained(self, compiled: Any) -> Recipe:
        """Return a recipe with the compiled constraint in each submission. Raises Problem (400)."""
        try:
            grammar = Grammar(compiled, self.eos_token_ids, is_bounded=True)
        except ValueError as error:
            raise Problem(400, f"this model cannot follow a grammar: {error}") from error
        made = [
            Submission(prompt, replace(options, logits_processor=[grammar, *(options.logits_processor or ())]))
            for prompt, options in self.submissions
        ]
        return replace(self, submissions=made)


def completion_recipe(body: CompletionRequest, served: ServedModel, key_digest: bytes | None) -> Recipe:
    """Make the recipe of a completion. It tokenizes; not for the event loop. Raises Problem."""
    served.check_reads_text()
    check_served(body)
    if body.prompt_logprobs is not None:
        raise not_served("prompt_logprobs: use echo=true with logprobs", param="prompt_logprobs")
    if body.echo and served.model.config.is_encoder_decoder:
        raise Problem(400, "echo=true: this model's encoder reads the prompt; leave it out", param="echo")
    _check_limits(body, served)
    many = many_of(body.prompt)
    prompts = ids_of(body.prompt, "prompt", served, width=_width(body), add_special_tokens=body.add_special_tokens)
    texts = [each if isinstance(each, str) else served.decode(each) for each in many] if body.echo else []
    # With echo it asks for the prompt's log-probabilities.
    if body.max_tokens == 0 and not body.echo:
        raise Problem(400, "max_tokens=0 generates nothing; raise it, or send echo=true", param="max_tokens")
    recipe = _recipe(
        body,
        served,
        prompts,
        key_digest,
        limit=body.max_tokens,
        default=_COMPLETION_TOKENS,
        texts=texts,
        skip_special_tokens=body.skip_special_tokens,
    )
    return _with_constraint(recipe, body, _content_of(body))


def chat_recipe(body: ChatRequest, served: ServedModel, key_digest: bytes | None, attached: Attached) -> Recipe:
    """Make the recipe of a chat with `attached` media. It tokenizes; not for the event loop. Raises Problem."""
    served.check_reads_text()
    check_served(body)
    _check_limits(body, served)
    check_count(1, served, width=_width(body))
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if limit == 0:
        raise Problem(400, "max_tokens=0 generates nothing; raise it", param="max_tokens")
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        # A request's own argument for the template says the same thing more exactly.
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if "reasoning_effort" not in str(served.chat_template):
            note_unused("reasoning_effort", "the chat template does not have it")
    text = served.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
        tools=_tools_of(body),
    )
    prompt, inputs = served.prompt_of(text, attached, add_special_tokens=body.add_special_tokens)
    default = served.settings.limits.new_tokens
    calls, answers = _calls_of(body), served.answers
    # The marks around reasoning and tool calls may be special tokens.
    skip = body.skip_special_tokens and answers.template is None
    # Otherwise the whole text is content.
    has_parts = answers.template is not None or (calls is not None and calls.is_forced)
    recipe = _recipe(
        body,
        served,
        [prompt],
        key_digest,
        limit=limit,
        default=default,
        texts=[],
        skip_special_tokens=skip,
        inputs=inputs,
        is_content=answers.is_content(text, calls) if has_parts and body.stops else None,
    )
    if has_parts:
        # The prompt is read here, once for all choices, because it may be long.
        recipe = replace(recipe, new_parser=partial(deepcopy, answers.parser(text, calls)))
    placeholder = placeholder_of(served.model, "audio") if attached.recordings else None
    if placeholder is not None:
        recipe = replace(recipe, audio_tokens=prompt.count(placeholder))
    # What the answer has to be needs the rendered prompt: its reasoning may have begun there.
    content = _content_of(body)
    if content is None and calls is None:
        return recipe
    return _with_constraint(recipe, body, answers.constraint(text, content, calls))


def _with_constraint(recipe: Recipe, body: Sampling, constraint: Constraint | None) -> Recipe:
    if constraint is None or not recipe.submissions:
        return recipe
    _check_end(body)
    return replace(recipe, constraint=constraint)


def _recipe(
    body: CompletionRequest | ChatRequest,
    served: ServedModel,
    prompts: list[list[int]],
    key_digest: bytes | None,
    *,
    limit: int | None,
    default: int,
    texts: list[str],
    skip_special_tokens: bool,
    inputs: dict[str, Any] | None = None,
    is_content: Callable[[str], bool] | None = None,
) -> Recipe:
    name, adapter = served.adapter_of(body.model)
    is_chat = isinstance(body, ChatRequest)
    # A grammar ends an answer by a token, which a model without EOS has to borrow from its chats.
    needs_end = is_chat or (not served.eos_token_ids and _content_of(body) is not None)
    ends = served.turn_ends if needs_end else served.eos_token_ids
    options = _Options(body, served, skip_special_tokens=skip_special_tokens, is_content=is_content, ends=ends)
    logprobs = _num_logprobs(body, served)
    echo = isinstance(body, CompletionRequest) and bool(body.echo)
    scores_prompts = echo and logprobs is not None
    lengths = [_new_tokens(len(prompt), limit, default, served) for prompt in prompts]
    # Before anything is queued: numbers multiply to gigabytes of JSON.
    if logprobs is not None:
        scored = sum(lengths) + (sum(map(len, prompts)) if scores_prompts else 0)
        _check_scores(options.width * scored * (logprobs + 1), served)
    submissions = [
        options.submission(
            prompt,
            # Log-probabilities of a prompt alone need a step, and a step generates a token.
            length or 1,
            adapter=adapter,
            cache_salt=salt_of(key_digest, body.cache_salt),
            client=client_named(served.settings, key_digest, body.user),
            priority=body.priority,
            logprobs=logprobs or None,
            prompt_logprobs=logprobs if scores_prompts else None,
            deadline=served.settings.limits.request_seconds,
            inputs=inputs,
        )
        for prompt, length in zip(prompts, lengths)
        if length or scores_prompts
    ]
    stream = body.stream_options
    return Recipe(
        model=name,
        prompts=prompts,
        submissions=submissions,
        n=body.n or 1,
        copies=options.is_sure,
        ranked=options.width > (body.n or 1) and not body.use_beam_search,
        stops=tuple(body.stops),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        skip_special_tokens=skip_special_tokens,
        logprobs=logprobs,
        return_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        stream=bool(body.stream),
        user=body.user,
        include_usage=bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.include_usage and stream.continuous_usage_stats),
        echo=echo,
        scores_prompts=scores_prompts,
        is_dry=limit == 0,
        texts=texts,
        eos_token_ids=options.eos_token_ids,
    )


def many_of(given: Any) -> Sequence[Any]:
    """Return the prompts of a field that may have one or several, as texts or token ids."""
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def ids_of(given: Any, name: str, served: ServedModel, *, width: int = 1, add_special_tokens: bool) -> list[list[int]]:
    """Return the token ids of the prompts of the field `name`, with `width` sequences each. Raises Problem (400)."""
    many = many_of(given)
    # Before texts are tokenized, which takes long for many.
    check_count(len(many), served, width=width, param=name)
    for each in many:
        if isinstance(each, str):
            served.check_size(each, name)
        else:
            # Before they reach the model, where an id beyond the embedding ends a process with a GPU.
            served.check_ids(name, each)
    return [
        served.encode(each, add_special_tokens=add_special_tokens) if isinstance(each, str) else list(each)
        for each in many
    ]


def _width(body: Sampling) -> int:
    return max(body.n or 1, body.best_of or 1)


def check_priority(priority: int, served: ServedModel) -> None:
    """Raise Problem (400) for a priority that would change nothing."""
    if priority and not served.settings.priorities:
        raise Problem(
            400,
            f"priority={priority}: this server runs requests in the order of their arrival; leave it out, or "
            "start the server with --scheduling-policy priority",
            param="priority",
        )


def _check_limits(body: Sampling, served: ServedModel) -> None:
    """Raise Problem (400) for a priority that would change nothing, and for a grammar that is too long."""
    check_priority(body.priority, served)
    given = body.structured_outputs
    grammar = None if given is None else given.regex or given.grammar or given.json_
    if isinstance(grammar, str) and len(grammar) > served.settings.limits.grammar:  # before anything reads it
        raise Problem(
            400,
            f"structured_outputs: it has more than the {served.settings.limits.grammar} bytes that a request's grammar "
            "may have",
            param="structured_outputs",
            code="invalid_grammar",
        )


def check_count(num_prompts: int, served: ServedModel, *, width: int = 1, param: str = "prompt") -> None:
    """Raise Problem (400) for too many prompts or sequences."""
    limits = served.settings.limits
    limit = limits.sequences
    # All prompts of a request are queued together or not at all, so these never would be.
    if num_prompts > limits.in_flight:
        raise Problem(
            400,
            f"{num_prompts} prompts are more than the {limits.in_flight} that this server runs at once; send several "
            "requests",
            param=param,
        )
    if num_prompts * width > limit:
        raise Problem(
            400,
            f"{num_prompts} prompts with {width} sequences each are more than the {limit} that one request may have; "
            "send several requests",
            param="n" if width > 1 else param,
        )


def _num_logprobs(body: CompletionRequest | ChatRequest, served: ServedModel) -> int | None:
    # A chat asks with two fields, a completion with one.
    if isinstance(body, ChatRequest):
        asked, name = (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs"
    else:
        asked, name = body.logprobs, "logprobs"
    if asked is not None and asked > served.settings.limits.logprobs:
        raise Problem(
            400, f"{name}={asked}: at most {served.settings.limits.logprobs} alternatives are returned", param=name
        )
    return asked


def _check_scores(count: int, served: ServedModel) -> None:
    limit = served.settings.limits.scores
    if count > limit:
        raise Problem(
            400,
            f"up to {count} log-probabilities, alternatives and all sequences included, are more than the {limit} that "
            "one answer may have; lower logprobs, n or max_tokens, or send several requests",
            param="logprobs",
        )


def _new_tokens(prompt_length: int, limit: int | None, default: int, served: ServedModel) -> int:
    """Tokens to generate at most. Raises Problem (400) that has both numbers."""
    if prompt_length == 0:
        raise Problem(400, "the prompt is empty; give at least one token", param="prompt")
    most, longest = served.max_prompt, served.max_length
    shown, remedy = f"the prompt's {prompt_length} tokens", "shorten the prompt, or "
    # The encoder reads the prompt, and the decoder begins with one token.
    if served.model.config.is_encoder_decoder:
        if most is not None and prompt_length > most:
            text = f"{shown} go beyond the {most} of the model's encoder; shorten the prompt"
            raise Problem(400, text, param="prompt", code="context_length_exceeded")
        prompt_length, shown, remedy = 1, "the decoder's first token", ""
    if longest is None:
        return default if limit is None else limit
    if prompt_length + (1 if limit is None else limit) > longest:
        asked = "" if limit is None else f" and max_tokens={limit}"
        lower = f"lower max_tokens to {max(0, longest - prompt_length)}"
        raise Problem(
            400,
            f"{shown}{asked} go beyond the model's {longest} tokens; "
            + ("shorten the prompt" if limit is None else f"{remedy}{lower}"),
            param="max_tokens" if limit is not None and prompt_length < longest else "prompt",
            code="context_length_exceeded",
        )
    return min(default, longest - prompt_length) if limit is None else limit


def salt_of(key_digest: bytes | None, cache_salt: str | None) -> str | None:
    """Return the salt that keeps cached prefixes of different API keys and salts apart; None if there is neither."""
    if key_digest is None and cache_salt is None:
        return None
    # A zero byte between the two: no hexadecimal digest has one, so that no other pair gives the same text.
    return hashlib.sha256(b"%b\0%b" % ((key_digest or b"").hex().encode(), (cache_salt or "").encode())).hexdigest()


def client_named(settings: Settings, key_digest: bytes | None, user: str | None) -> str | None:
    """Return the client that takes turns with others: the API key if there are several, else the field `user`."""
    # A client could give many names in `user`, and have the turns of many.
    return key_digest.hex() if key_digest is not None and len(settings.api_keys) > 1 else user


class _Options:
    """The generation options of a request."""

    def __init__(
        self,
        body: Sampling,
        served: ServedModel,
        *,
        skip_special_tokens: bool,
        is_content: Callable[[str], bool] | None = None,
        ends: frozenset[int],
    ) -> None:
        self._body = body
        self._ends = ends
        self._is_content = is_content
        self._skip_special_tokens = skip_special_tokens
        self._served = served
        self._defaults = served.model.generation_config
        self._uses_checkpoint = served.settings.defaults == "auto"
        self.width = max(body.n or 1, body.best_of or 1)
        self._do_sample = self._samples()
        self.is_sure = not self._do_sample and not body.use_beam_search
        self.eos_token_ids = tuple({*ends, *(body.stop_token_ids or ())})
        self._fixed = {
            **self._lengths_and_width(),
            **self._sampling(),
            **self._tokens(),
        }

    def submission(self, prompt: list[int], max_new_tokens: int, **others: Any) -> Submission:
        """others: the options that are equal for all prompts. Raises Problem (400)."""
        return Submission(
            prompt,
            RequestOptions(
                generation_config=self._config(max_new_tokens),
                logits_processor=self._processors(len(prompt)) or None,
                stopping_criteria=self._criteria(len(prompt)) or None,
                **others,
            ),
        )

    def _config(self, max_new_tokens: int) -> Any:
        body = self._body
        if body.min_tokens > max_new_tokens:
            raise Problem(400, f"min_tokens={body.min_tokens} is more than max_tokens={max_new_tokens}")
        # Beams are ranked by a power of the length in fp32, which would be infinite or 0.
        penalty = body.length_penalty
        if penalty is not None and abs(penalty) * log2(max_new_tokens) > _MAX_EXPONENT:
            raise Problem(
                400,
                f"length_penalty={penalty}: this power of {max_new_tokens} tokens is beyond fp32; use one nearer to 0, "
                "or lower max_tokens",
                param="length_penalty",
            )
        config: Any = GenerationConfig(**self._fixed, max_new_tokens=max_new_tokens)
        # Not by the constructor: it is an attribute of ours.
        config.seed = body.seed
        return config

    def _processors(self, prompt_length: int) -> list[Any]:
        presence, frequency = self._body.presence_penalty or 0.0, self._body.frequency_penalty or 0.0
        if not presence and not frequency:
            return []
        return [OccurrencePenalty(prompt_length, presence_penalty=presence, frequency_penalty=frequency)]

    def _criteria(self, prompt_length: int) -> list[Any]:
        body = self._body
        if not body.stops:
            return []
        return [
            StopText(
                self._served.tokenizer,
                body.stops,
                prompt_length,
                min_tokens=body.min_tokens,
                skip_special_tokens=self._skip_special_tokens,
                is_content=self._is_content,
            )
        ]

    def _samples(self) -> bool:
        body = self._body
        if body.temperature is not None:
            return body.temperature > 0
        if body.use_beam_search:
            return False
        # Who sets top_p or the like wants to sample, whatever the checkpoint says.
        if any(getattr(body, name) is not None for name in _WARPERS):
            return True
        return bool(self._defaults.do_sample) if self._uses_checkpoint else True

    def _lengths_and_width(self) -> dict[str, Any]:
        body = self._body
        beams = self.width if body.use_beam_search else 1
        options: dict[str, Any] = {"num_beams": beams, "num_return_sequences": 1}
        if body.use_beam_search:
            options["num_return_sequences"] = body.n or 1
            # OpenAI has no such options; transformers' defaults hold where the checkpoint has none.
            given = {"length_penalty": body.length_penalty, "early_stopping": body.early_stopping}
            options |= {name: value for name, value in given.items() if value is not None}
        elif not self.is_sure:
            options["num_return_sequences"] = self.width
        if body.min_tokens:
            options["min_new_tokens"] = body.min_tokens
        return options

    def _sampling(self) -> dict[str, Any]:
        """Choose each option: the request's, the checkpoint's or neutral. `generate` would default to top_k=50."""
        body = self._body
        options: dict[str, Any] = {"do_sample": self._do_sample}
        if self._do_sample:
            options |= {name: self._first(getattr(body, name), name, neutral) for name, neutral in _WARPERS.items()}
            # vLLM's clients send -1 for none; transformers has 0.
            options["top_k"] = max(0, options["top_k"])
        options["repetition_penalty"] = self._first(body.repetition_penalty, "repetition_penalty", 1.0)
        return options

    def _first(self, given: Any, name: str, neutral: Any) -> Any:
        if given is None and self._uses_checkpoint:
            given = getattr(self._defaults, name, None)
        return neutral if given is None else given

    def _tokens(self) -> dict[str, Any]:
        body, vocab = self._body, self._served.vocab_size
        options: dict[str, Any] = {}
        stops = set(body.stop_token_ids or ())
        self._served.check_ids("stop_token_ids", stops)
        eos = set() if body.ignore_eos else self._ends
        if body.ignore_eos or stops or self._ends != self._served.eos_token_ids:
            # An id that no token has stands for "none": None would mean the checkpoint's.
            options["eos_token_id"] = sorted(stops | eos) or [vocab]
        if body.logit_bias:
            biases = {int(token): float(bias) for token, bias in body.logit_bias.items()}
            self._served.check_ids("logit_bias", biases)
            options["sequence_bias"] = [[[token], bias] for token, bias in biases.items()]
        if body.bad_words:
            words = [ids for word in body.bad_words for ids in self._spellings(word)]
            options["bad_words_ids"] = [*(self._defaults.bad_words_ids or ()), *words]
        if body.allowed_token_ids is not None:
            allowed = set(body.allowed_token_ids)
            self._served.check_ids("allowed_token_ids", allowed)
            also = set(self._defaults.suppress_tokens or ())
            # The checkpoint's stay forbidden, also if the request allows them.
            options["suppress_tokens"] = [token for token in range(vocab) if token not in allowed or token in also]
        return options

    def _spellings(self, word: str) -> list[list[int]]:
        """Return the tokens of a word at the beginning of a text, and those of the word within a text."""
        tokenizer, texts = self._served.tokenizer, (word, f" {word.lstrip()}")
        found = (list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
        # A spelling with a token that the model does not have cannot be generated.
        both = [ids for ids in found if max(ids, default=0) < self._served.vocab_size]
        return [list(ids) for ids in dict.fromkeys(tuple(ids) for ids in both if ids)]


# -- what the answer has to be --------------------------------------------------------------------------------


def _content_of(body: Sampling) -> Constraint | None:
    """Return the constraint on the content; None: any text. Raises Problem (400)."""
    asked, given = body.response_format, body.structured_outputs
    try:
        if isinstance(asked, schema.ObjectFormat):
            return constraints.json_object()
        if isinstance(asked, schema.SchemaFormat):
            wanted = asked.json_schema
            if wanted.schema_ is None:
                return constraints.json_object()
            return constraints.json_schema(wanted.schema_, strict=wanted.strict is not False)
        if given is not None:
            return _structured(given)
    except ValueError as error:
        name = "response_format" if given is None else "structured_outputs"
        raise Problem(400, f"{name}: {error}", param=name, code="invalid_grammar") from error
    return None


def _structured(given: schema.StructuredOutputs) -> Constraint:
    if given.json_ is not None:
        return constraints.json_schema(given.json_)
    if given.regex is not None:
        return constraints.regex(given.regex)
    if given.grammar is not None:
        return constraints.ebnf(given.grammar)
    if given.choice is not None:
        return constraints.choice(given.choice)
    return constraints.json_object()


def _tools_of(body: ChatRequest) -> list[schema.Tool]:
    """Return the tools that the model may call, which the prompt contains. Raises Problem (400)."""
    tools, asked = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    # The answer names a function by its name alone.
    for name in names:
        if names.count(name) > 1:
            raise Problem(400, f"tools: two functions have the name {name!r}", param="tools")
    if asked == "none":
        return []
    if isinstance(asked, schema.AllowedTools):
        wanted = [each.function.name for each in asked.allowed_tools.tools]
    else:
        wanted = [asked.function.name] if isinstance(asked, schema.NamedTool) else names
    for name in wanted:
        if name not in names:
            raise Problem(400, f"tool_choice: no tool has the name {name!r}", param="tool_choice")
    # A function that is to be called is chosen from all that the model knows.
    return tools if isinstance(asked, schema.NamedTool) else [tool for tool in tools if tool.function.name in wanted]


def _calls_of(body: ChatRequest) -> Calls | None:
    """The tool calls that an answer may or must have; None: it has none. Raises Problem (400)."""
    tools, asked = _tools_of(body), body.tool_choice
    if not tools:
        return None
    mode: Any = asked.allowed_tools.mode if isinstance(asked, schema.AllowedTools) else asked
    if isinstance(asked, schema.NamedTool):
        tools = [tool for tool in tools if tool.function.name == asked.function.name]
    is_forced = isinstance(asked, schema.NamedTool) or mode == "required"
    # A forced call is the whole content, so that no other constraint can hold too.
    if is_forced and body.structured_outputs is not None:
        raise Problem(
            400, "structured_outputs: tool_choice forces tool calls; leave one of both out", param="structured_outputs"
        )
    is_single = isinstance(asked, schema.NamedTool) or body.parallel_tool_calls is False
    return Calls(tuple(map(_tool, tools)), is_forced, 1 if is_single else None)


def _tool(tool: schema.Tool) -> Tool:
    function = tool.function
    parameters = {"type": "object"} if function.parameters is None else function.parameters
    return Tool(function.name, parameters, bool(function.strict), tool.model_dump(exclude_none=True))


def _check_end(body: Sampling) -> None:
    """Raise Problem (400) for options that let an answer end elsewhere than its grammar does."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise Problem(
                400, f"{name}: the schema or grammar says where the answer ends; leave one of both out", param=name
            )
