"""The JSON of answers: OpenAI's completions and chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from math import isfinite
from typing import Any, NamedTuple
from uuid import uuid4

from hf_paged.annotations import Tokenizer
from hf_paged.generation.requests.outputs import TopLogprobs
from hf_paged.serving.choices import Choices, Delta, PromptScores, joined
from hf_paged.serving.parsing import CallPart
from hf_paged.serving.problems import Json, Problem
from hf_paged.serving.recipe import Recipe
from hf_paged.serving.text import token_bytes, token_text

# JSON has no infinity.
_LEAST_LOGPROB = -9999.0
_Entries = tuple[list[str], list[float | None], list[dict[str, float] | None]]  # names, log-probabilities, likeliest


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    audio_tokens: int = 0,
    weight_versions: tuple[int, int] | None = None,
) -> Json:
    """audio_tokens: those of the prompt, which only prompts with audio show. weight_versions: of the first step and of
    the end, which only show if the weights were updated."""
    audio = {"audio_tokens": audio_tokens} if audio_tokens else {}
    versions = {"weight_versions": weight_versions} if weight_versions and any(weight_versions) else {}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, **audio},
        **versions,
    }


class Plain(NamedTuple):
    """An answer that is no JSON."""

    body: bytes
    media_type: str


class Form:
    """A form turns deltas into the JSON of an answer. Deltas come in order of time, those of a choice in order of text.

    names_events: the events of a stream have the names that are in their `type`. ending: data of its last event, if
    that is no JSON.
    """

    names_events = False
    ending: bytes | None = None
    is_long = False
    """True for answers with many numbers, which are not written on the event loop."""

    def reading(self, recipe: Recipe, tokenizer: Tokenizer) -> Any:
        """Return what turns outputs into deltas: `answers.Reading`."""
        return Choices(recipe, tokenizer)

    def opening(self) -> list[Json]:
        """The events before the first delta."""
        return []

    def chunks(self, delta: Delta) -> list[Json]:
        raise NotImplementedError

    def closing(self, usage: Json) -> list[Json]:
        """The events after the last delta. usage: of chat completions."""
        raise NotImplementedError

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json | Plain:
        """The answer that is not streamed."""
        raise NotImplementedError

    def failure(self, problem: Problem) -> Json:
        """The event for an error after the beginning."""
        return problem.body()


class _CompletionEvents(Form):
    """Stream events that both kinds of completions share."""

    ending = b"[DONE]"
    _recipe: Recipe

    def usage_chunk(self) -> Json:
        """A chunk without choices."""
        raise NotImplementedError

    def closing(self, usage: Json) -> list[Json]:
        return [{**self.usage_chunk(), "usage": usage}] if self._recipe.include_usage else []


class _Tokens:
    """Tokens as clients see them: `name(token_id)`, `bytes(token_id)`. Each is decoded once for an answer."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        # Kept for an answer, because the same tokens come again, and decoding one takes longer than looking it up.
        self.name = cache("token_id:{}".format if recipe.tokens_as_ids else partial(token_text, tokenizer))
        self.bytes = cache(partial(token_bytes, tokenizer))


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else _LEAST_LOGPROB


class CompletionForm(_CompletionEvents):
    """The form of answers of /v1/completions."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, answer_id: str, created: int) -> None:
        self._recipe = recipe
        self._tokens = _Tokens(recipe, tokenizer)
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": recipe.model}
        # With log-probabilities the prompt's tokens are entries themselves, so that offsets begin with them.
        shows_prompt = recipe.echo and not recipe.scores_prompts
        self._offsets = [len(recipe.texts[index // recipe.n]) if shows_prompt else 0 for index in self._indices()]
        self._of_prompts: dict[int, _Entries] = {}
        self._is_begun = [False for _ in self._indices()]

    def _indices(self) -> range:
        return range(len(self._recipe.prompts) * self._recipe.n)

    def chunks(self, delta: Delta) -> list[Json]:
        return [{**self._head, "choices": [self._choice(delta)]}]

    def usage_chunk(self) -> Json:
        return {**self._head, "choices": []}

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        choices = [self._choice(delta) for delta in joined(deltas, len(self._indices()))]
        return {**self._head, "choices": choices, "usage": usage}

    def _choice(self, delta: Delta) -> Json:
        recipe, index = self._recipe, delta.index
        is_first, self._is_begun[index] = not self._is_begun[index], True
        choice: Json = {
            "index": index,
            "text": (recipe.texts[index // recipe.n] if recipe.echo and is_first else "") + delta.text,
            "logprobs": None if recipe.logprobs is None else self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if recipe.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = recipe.prompts[index // recipe.n] if is_first else None
        return choice

    def _logprobs(self, delta: Delta) -> Json:
        names, logprobs, tops = self._entries(delta.token_ids, delta.logprobs, delta.top_logprobs)
        if delta.prompt is not None:
            before = self._prompt_entries(delta.index // self._recipe.n, delta.prompt)
            names, logprobs, tops = before[0] + names, before[1] + logprobs, before[2] + tops
        offsets = list(accumulate(map(len, names), initial=self._offsets[delta.index]))
        self._offsets[delta.index] = offsets.pop()
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": tops if self._recipe.logprobs else None,
            "text_offset": offsets,
        }

    def _prompt_entries(self, place: int, prompt: PromptScores) -> _Entries:
        """Return the log-probabilities of a prompt, made once for all its choices."""
        if place not in self._of_prompts:
            self._of_prompts[place] = self._entries(prompt.token_ids, prompt.logprobs, prompt.top_logprobs)
        return self._of_prompts[place]

    def _entries(
        self, tokens: list[int], logprobs: Sequence[float | None], tops: Sequence[TopLogprobs | None]
    ) -> _Entries:
        finite = [None if each is None else _finite(each) for each in logprobs]
        return (
            [self._tokens.name(token) for token in tokens],
            finite,
            self._tops(tokens, finite, tops) if self._recipe.logprobs else [],
        )

    def _tops(
        self, tokens: list[int], logprobs: list[float | None], tops: Sequence[TopLogprobs | None]
    ) -> list[dict[str, float] | None]:
        """For each token the likeliest ones by name, and itself. Of several with one name the likeliest counts."""
        made: list[dict[str, float] | None] = []
        for token, logprob, top in zip(tokens, logprobs, tops):
            if top is None or logprob is None:
                made.append(None)
                continue
            likeliest: dict[str, float] = {}
            for other, value in [*top, (token, logprob)]:
                # Best first, so that the first of a name is the likeliest.
                likeliest.setdefault(self._tokens.name(other), _finite(value))
            made.append(likeliest)
        return made


class ChatForm(_CompletionEvents):
    """The form of answers of /v1/chat/completions."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, answer_id: str, created: int) -> None:
        self._recipe = recipe
        self._scores_of = chat_scores(recipe, tokenizer)
        self._head = {"id": answer_id, "created": created, "model": recipe.model, "system_fingerprint": None}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def opening(self) -> list[Json]:
        first = {"role": "assistant", "content": ""}
        chunks = [
            self._chunk([{"index": index, "delta": first, "logprobs": None, "finish_reason": None}])
            for index in range(self._recipe.n)
        ]
        if self._recipe.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._recipe.prompts[0]
        return chunks

    def chunks(self, delta: Delta) -> list[Json]:
        content: Json = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.calls:
            content["tool_calls"] = [{"index": part.index, **_call_part(part)} for part in delta.calls]
        return [self._chunk([self._choice(delta, "delta", content)])]

    def usage_chunk(self) -> Json:
        return self._chunk([])

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json:
        made = [self._choice(delta, "message", self._message(delta)) for delta in joined(deltas, self._recipe.n)]
        answer = {**self._head, "object": "chat.completion", "choices": made, "usage": usage}
        if self._recipe.return_token_ids:
            answer["prompt_token_ids"] = self._recipe.prompts[0]
        return answer

    def _message(self, delta: Delta) -> Json:
        message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        calls: list[Json] = []
        for part in delta.calls:
            # The first part of a call has its name; others continue its arguments.
            if part.index == len(calls):
                calls.append(_call_part(part))
            else:
                calls[part.index]["function"]["arguments"] += part.arguments
        if calls:
            message |= {"content": delta.text or None, "tool_calls": calls}
        return message

    def _choice(self, delta: Delta, name: str, content: Json) -> Json:
        choice = {
            "index": delta.index,
            name: content,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._recipe.logprobs is not None:
            choice["logprobs"] = {"content": self._scores_of(delta), "refusal": None}
        if self._recipe.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice


def chat_scores(recipe: Recipe, tokenizer: Tokenizer) -> Callable[[Delta], list[Json]]:
    """The log-probabilities of a delta's tokens as chat completions have them, one entry for each token."""
    tokens = _Tokens(recipe, tokenizer)

    def entry(token: int, logprob: float) -> Json:
        return {"token": tokens.name(token), "logprob": _finite(logprob), "bytes": tokens.bytes(token)}

    def entries(delta: Delta) -> list[Json]:
        tops = delta.top_logprobs or [[]] * len(delta.token_ids)
        return [
            {**entry(token, logprob), "top_logprobs": [entry(*each) for each in top]}
            for token, logprob, top in zip(delta.token_ids, delta.logprobs, tops)
        ]

    return entries


def _call_part(part: CallPart) -> Json:
    if part.name is None:
        return {"function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
