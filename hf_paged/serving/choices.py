"""Choices: the completions of a request as its reader sees them, text by text.

Turns the engine's outputs, which are whole, into what is new since the last time. Knows nothing of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from hf_paged.annotations import Tokenizer
from hf_paged.features.adapters.adapters import AdapterGone
from hf_paged.features.grammar.vocabulary import NOT_FOLLOWED
from hf_paged.features.media.media_memory import MediaError
from hf_paged.generation.requests.outputs import CompletionOutput, RequestOutput, TopLogprobs
from hf_paged.generation.requests.request import NOTHING_LEFT
from hf_paged.serving.parsing import CallPart, Pieces
from hf_paged.serving.problems import Problem, overdue
from hf_paged.serving.recipe import Recipe
from hf_paged.serving.text import Detokenizer, StopSearch

REASONS = {None: None, "length": "length", "abort": None, "deadline": None, "error": None}
"""Finish reason of an output -> that of its choice; "stop" if it is not here. None: the choice continues, or an error
takes its place."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, None for the first one."""

    token_ids: list[int]
    logprobs: list[float | None]
    top_logprobs: list[TopLogprobs | None]


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta is the new part of a choice: text, tokens with log-probabilities and, at its end, the finish reason.

    text: the content; a chat's reasoning and tool calls are in `reasoning` and `calls`.
    top_logprobs: the likeliest tokens in each place; empty if the recipe asks for none. stop_reason: the stop string,
    or the id of the stop token, that ended it. prompt: of the choice's prompt, with its first delta and only if the
    recipe scores prompts.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt: PromptScores | None = None
    reasoning: str = ""
    calls: Sequence[CallPart] = ()

    def is_seen(self, recipe: Recipe) -> bool:
        """Return True if a stream shows this delta. Otherwise its text is buffered, or lies within a tool call."""
        shows_tokens = recipe.logprobs is not None or recipe.return_token_ids or recipe.continuous_usage
        is_news = self.text or self.reasoning or self.calls or self.finish_reason is not None or self.prompt is not None
        return bool(recipe.new_parser is None or shows_tokens or is_news)


class Choice:
    """One completion in the making."""

    def __init__(self, index: int, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.index = index
        self._recipe = recipe
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=recipe.skip_special_tokens)
        self._stops = StopSearch(recipe.stops, include=recipe.include_stop)
        self._parser = None if recipe.new_parser is None else recipe.new_parser()
        self._calls_tools = False
        self._known = 0  # tokens that have been looked at
        self.is_finished = False

    def update(self, output: CompletionOutput) -> list[Delta]:
        """Return what the output adds to the previous one: at most one delta, and none after the end of the choice.

        With log-probabilities and a parser there is one for each token, so that the content's tokens can be told apart.
        """
        if self.is_finished:
            return []
        new = output.since(self._known)
        # Whatever else ends an output was asked for by the client, and is a stop to OpenAI's clients.
        reason = REASONS.get(output.finish_reason, "stop")
        is_apart = self._parser is not None and self._recipe.logprobs is not None
        count = new.num_tokens
        ends = [*range(1, count), count] if is_apart else [count]
        starts = [0, *ends[:-1]]
        made = (
            self._delta(output, new, slice(start, end), reason if end == count else None)
            for start, end in zip(starts, ends)
        )
        return [delta for delta in made if delta is not None]

    def _delta(self, output: CompletionOutput, new: CompletionOutput, part: slice, reason: str | None) -> Delta | None:
        """Make the delta of a part of the new output; None if it adds nothing. reason: why the choice ends after it."""
        if self.is_finished:
            return None
        tokens = new.token_ids[part]
        # The token that ends an answer has no text to show.
        is_ended_by_token = reason is not None and output.finish_reason == "eos" and not self._recipe.include_stop
        pieces, count = self._read(tokens, len(tokens) - is_ended_by_token, is_last=reason is not None)
        # Tokens behind a stop string are not the answer's; they do not count in `usage` either.
        if self._stops.found is None:
            count = len(tokens)
        else:
            reason = "stop"
        self._known += count
        self.is_finished = reason is not None
        if not count and reason is None:
            return None
        self._calls_tools = self._calls_tools or bool(pieces.calls)
        is_scored = self._recipe.logprobs is not None
        return Delta(
            self.index,
            pieces.content,
            tokens[:count],
            new.logprobs[part][:count] if is_scored else [],
            top_logprobs=(new.top_logprobs or [])[part][:count] if is_scored else [],
            finish_reason="tool_calls" if reason == "stop" and self._calls_tools else reason,
            stop_reason=self._stop_reason(output) if reason is not None else None,
            reasoning=pieces.reasoning,
            calls=pieces.calls,
        )

    def _parsed(self, text: str, *, may_stop: bool = True) -> Pieces:
        """The parts of further text. Stop strings are looked for in its content only."""
        return self._shown(Pieces(text) if self._parser is None else self._parser.feed(text), may_stop=may_stop)

    def _shown(self, pieces: Pieces, *, may_stop: bool = True) -> Pieces:
        pieces.content = self._stops.push(pieces.content, may_stop=may_stop)
        return pieces

    def _read(self, tokens: list[int], end: int, *, is_last: bool) -> tuple[Pieces, int]:
        """Read further tokens up to the end of a stop string. Returns their text, and how many were read."""
        pieces, count = Pieces(), 0
        if self._recipe.stops:
            # Token by token, because a stop string ends the answer with the token in which it ends.
            while count < end and self._stops.found is None:
                text = self._detokenizer.push(tokens[count : count + 1])
                count += 1
                pieces += self._parsed(text, may_stop=self._known + count >= self._recipe.min_tokens)
        elif not is_last:
            return self._parsed(self._detokenizer.push(tokens[:end])), end
        # What was buffered comes out only when no further token can change it.
        if is_last and self._stops.found is None:
            pieces += self._parsed(self._detokenizer.finish(tokens[count:end]))
            if self._parser is not None:
                pieces += self._shown(self._parser.finish())
            pieces.content += self._stops.finish()
        return pieces, count

    def _stop_reason(self, output: CompletionOutput) -> str | int | None:
        if self._stops.found is not None:
            return self._stops.found
        last = output.since(output.num_tokens - 1).token_ids[-1] if output.num_tokens else None
        return last if output.finish_reason == "eos" and last in self._recipe.stop_token_ids else None


class Choices:
    """All choices of a recipe: `n` for each prompt, in the order of the prompts."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._recipe = recipe
        self._choices = [Choice(index, recipe, tokenizer) for index in range(len(recipe.prompts) * recipe.n)]
        self._unscored = set(range(len(self._choices))) if recipe.scores_prompts else set()
        self.completion_tokens = 0
        self.cached_tokens = 0

    def update(self, outputs: Mapping[int, RequestOutput]) -> list[Delta]:
        """Return the new deltas. outputs: by the place of their prompt. Raises Problem for a request that failed."""
        deltas = []
        for place, output in outputs.items():
            check_output(output)
            if output.finished:
                self.cached_tokens += output.metrics.num_cached_tokens
            for number, completion in enumerate(self._chosen(output)):
                for delta in self._choices[place * self._recipe.n + number].update(completion):
                    delta = self._scored(delta, output)
                    self.completion_tokens += len(delta.token_ids)
                    deltas.append(delta)
        return deltas

    def _scored(self, delta: Delta, output: RequestOutput) -> Delta:
        """Add the prompt's scores to the first delta of a choice, and drop generated tokens if the recipe is dry."""
        # The engine generates at least one token, which nobody asked for.
        if self._recipe.is_dry:
            delta = Delta(delta.index, "", [], [], finish_reason="length" if delta.finish_reason else None)
        if delta.index not in self._unscored:
            return delta
        self._unscored.discard(delta.index)
        scores = PromptScores(output.prompt_token_ids, output.prompt_logprobs or [], output.prompt_top_logprobs or [])
        return replace(delta, prompt=scores)

    def _chosen(self, output: RequestOutput) -> list[CompletionOutput]:
        """The outputs that are returned, the best ones first."""
        recipe = self._recipe
        if recipe.copies:
            return output.outputs[:1] * recipe.n
        # Which ones are best is known at the end only.
        if recipe.ranked:
            if not output.finished:
                return []
            return sorted(output.outputs, key=lambda each: -_mean_logprob(each))[: recipe.n]
        return output.outputs

    @property
    def are_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices)


def check_output(output: RequestOutput) -> None:
    """Raise Problem for a request that failed, was aborted, or took too long."""
    error = output.error
    # The client's mistakes first; what is left is an error of the server.
    if error is not None and error.endswith(NOTHING_LEFT):  # after the name of an exception
        raise Problem(
            400,
            f"{NOTHING_LEFT}: allowed_token_ids, bad_words, logit_bias, min_tokens and the like exclude all",
            code="no_token_left",
        )
    if isinstance(output.exception, AdapterGone):
        raise Problem(404, f"the adapter was unloaded: {output.exception}", param="model", code="model_not_found")
    if isinstance(output.exception, MediaError):
        raise Problem(400, str(output.exception), param="messages", code="invalid_media")
    if error is not None and NOT_FOLLOWED in error:
        raise Problem(400, error, code="invalid_grammar")
    if error is not None:
        raise Problem(500, f"the request failed: {error}", code="generation_failed") from output.exception
    reasons = {completion.finish_reason for completion in output.outputs}
    if "abort" in reasons:
        raise Problem(503, "the request was aborted by the operator of the server", code="aborted")
    if "deadline" in reasons:
        raise overdue()


def _mean_logprob(output: CompletionOutput) -> float:
    return output.cumulative_logprob / max(1, len(output.token_ids))


def joined(deltas: Sequence[Delta], count: int) -> list[Delta]:
    """Join the deltas of each of `count` choices into one."""
    parts: list[list[Delta]] = [[] for _ in range(count)]
    for delta in deltas:
        parts[delta.index].append(delta)
    return [_one(index, some) for index, some in enumerate(parts)]


def _one(index: int, parts: list[Delta]) -> Delta:
    last = parts[-1] if parts else Delta(index, "", [], [])
    return Delta(
        index,
        "".join(part.text for part in parts),
        list(chain.from_iterable(part.token_ids for part in parts)),
        list(chain.from_iterable(part.logprobs for part in parts)),
        list(chain.from_iterable(part.top_logprobs for part in parts)),
        last.finish_reason,
        last.stop_reason,
        next((part.prompt for part in parts if part.prompt), None),
        "".join(part.reasoning for part in parts),
        list(chain.from_iterable(part.calls for part in parts)),
    )
