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
from typing import Any

from hf_paged.features.grammar.constraints import Constraint
from hf_paged.features.grammar.grammar import Grammar
from hf_paged.features.media.media import placeholder_of
from hf_paged.serving.attachments import Attached
from hf_paged.serving.parsing import Parser
from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.processors import ThinkingBudget
from hf_paged.serving.refusals import check_served, note_unused
from hf_paged.serving.sampling_options import SamplingOptions, Submission
from hf_paged.serving.schema import ChatRequest, CompletionRequest, Sampling
from hf_paged.serving.served import ServedModel
from hf_paged.serving.settings import Settings
from hf_paged.serving.wanted import calls_of, check_end, content_of, tools_of

# OpenAI's default for /v1/completions.
_COMPLETION_TOKENS = 16


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
    served.check_writes_text()
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
    return _with_constraint(recipe, body, content_of(body))


def chat_recipe(body: ChatRequest, served: ServedModel, key_digest: bytes | None, attached: Attached) -> Recipe:
    """Make the recipe of a chat with `attached` media. It tokenizes; not for the event loop. Raises Problem."""
    served.check_writes_text()
    check_served(body)
    _check_limits(body, served)
    check_count(1, served, width=_width(body))
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if limit == 0:
        raise Problem(400, "max_tokens=0 generates nothing; raise it", param="max_tokens")
    text, prompt, inputs = chat_prompt(body, served, attached)
    default = served.settings.limits.new_tokens
    calls, answers = calls_of(body), served.answers
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
        thinking=_thinking_of(body, served, text),
    )
    if has_parts:
        # The prompt is read here, once for all choices, because it may be long.
        recipe = replace(recipe, new_parser=partial(deepcopy, answers.parser(text, calls)))
    placeholder = placeholder_of(served.model, "audio") if attached.recordings else None
    if placeholder is not None:
        recipe = replace(recipe, audio_tokens=prompt.count(placeholder))
    # What the answer has to be needs the rendered prompt: its reasoning may have begun there.
    content = content_of(body)
    if content is None and calls is None:
        return recipe
    return _with_constraint(recipe, body, answers.constraint(text, content, calls))


def chat_prompt(
    body: ChatRequest, served: ServedModel, attached: Attached
) -> tuple[str, list[int], dict[str, Any] | None]:
    """Return the prompt of a chat as text and as token ids, and the model's inputs for its media. Raises Problem."""
    kwargs = dict(body.chat_template_kwargs or {})
    effort = body.reasoning.effort if body.reasoning and body.reasoning_effort is None else body.reasoning_effort
    if effort is not None:
        # A request's own argument for the template says the same thing more exactly.
        kwargs.setdefault("reasoning_effort", effort)
        if "reasoning_effort" not in str(served.chat_template):
            note_unused("reasoning_effort", "the chat template does not have it")
    text = served.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=kwargs,
        tools=tools_of(body),
    )
    return text, *served.prompt_of(text, attached, add_special_tokens=body.add_special_tokens)


def _thinking_of(body: ChatRequest, served: ServedModel, text: str) -> Callable[[int], Any] | None:
    """Return what makes the processor that ends reasoning, for a prompt of this text. Raises Problem (400)."""
    other = None if body.reasoning is None else body.reasoning.max_tokens
    budget, marks = body.thinking_token_budget if other is None else other, served.answers.reasoning
    if budget is None:
        return None
    if budget != (body.thinking_token_budget if body.thinking_token_budget is not None else budget):
        raise Problem(
            400,
            f"thinking_token_budget={body.thinking_token_budget} and reasoning.max_tokens={budget} "
            "contradict each other",
            param="thinking_token_budget",
        )
    if marks is None:
        raise not_served(
            "thinking_token_budget: no marks are known that this model writes around its reasoning; leave the budget "
            "out, or start the server with --response-template FILE",
            param="thinking_token_budget",
        )
    is_begun = served.answers.reasons(text)
    if is_begun is False:
        return None  # the prompt has all of it
    return partial(ThinkingBudget, served.tokenizer, marks, budget=budget, is_begun=bool(is_begun))


def _with_constraint(recipe: Recipe, body: Sampling, constraint: Constraint | None) -> Recipe:
    if constraint is None or not recipe.submissions:
        return recipe
    check_end(body)
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
    thinking: Callable[[int], Any] | None = None,
) -> Recipe:
    name, adapter = served.adapter_of(body.model)
    is_chat = isinstance(body, ChatRequest)
    # A grammar ends an answer by a token, which a model without EOS has to borrow from its chats.
    needs_end = is_chat or (not served.eos_token_ids and content_of(body) is not None)
    ends = served.turn_ends if needs_end else served.eos_token_ids
    options = SamplingOptions(
        body, served, skip_special_tokens=skip_special_tokens, is_content=is_content, ends=ends, thinking=thinking
    )
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
    """Return the token ids of the prompts of the field `name`, with `width` sequences each (0: they generate nothing).
    Raises Problem (400)."""
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
