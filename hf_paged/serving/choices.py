"""Choices: the completions of a request as its reader sees them, text by text.

Turns the engine's outputs, which are whole, into what is new since the last time. Knows nothing of JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_paged.generation.engine.outputs import CompletionOutput, RequestOutput, TopLogprobs
from hf_paged.serving.plan import Plan
from hf_paged.serving.problems import Problem
from hf_paged.serving.text import Detokenizer, StopSearch

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of a prompt's tokens, None for the first one."""

    token_ids: list[int]
    logprobs: list[float | None]
    top_logprobs: list[TopLogprobs | None]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice has got: text, tokens with their log-probabilities, and, if it has ended, why.

    top_logprobs: the likeliest tokens in each place; empty if the plan asks for none. stop_reason: the stop string, or
    the id of the stop token, that ended it. prompt: of the choice's prompt, with its first delta and only if the plan
    scores prompts.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt: PromptScores | None = None


class Choice:
    """One completion in the making."""

    def __init__(self, index: int, plan: Plan, tokenizer: Any) -> None:
        self.index = index
        self._plan = plan
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=plan.skip_special_tokens)
        self._stops = StopSearch(plan.stops, include=plan.include_stop)
        self._known = 0  # tokens that have been looked at
        self.is_finished = False

    def update(self, output: CompletionOutput) -> Delta | None:
        """What is new in the output, which has at least the tokens of the last one. None: nothing."""
        if self.is_finished:
            return None
        start, tokens = self._known, output.token_ids
        reason = _REASONS.get(output.finish_reason or "")
        is_ended_by_token = output.finish_reason == "eos" and not self._plan.include_stop
        text = self._read(tokens, len(tokens) - is_ended_by_token, is_last=reason is not None)
        if self._stops.found is None:
            self._known = len(tokens)
        if self._stops.found is not None:
            reason = "stop"
        self.is_finished = reason is not None
        if start == self._known and reason is None:
            return None
        new = slice(start, self._known)
        return Delta(
            self.index,
            text,
            tokens[new],
            output.logprobs[new],
            top_logprobs=(output.top_logprobs or [])[new],
            finish_reason=reason,
            stop_reason=self._stop_reason(output) if reason is not None else None,
        )

    def _read(self, tokens: list[int], end: int, *, is_last: bool) -> str:
        """The text of further tokens; `_known` is moved behind them, or behind the token that ended a stop string."""
        shown = ""
        if self._plan.stops:
            while self._known < end and self._stops.found is None:
                piece = self._detokenizer.push(tokens[self._known : self._known + 1])
                self._known += 1
                shown += self._stops.push(piece, may_stop=self._known >= self._plan.min_tokens)
        elif not is_last:
            return self._detokenizer.push(tokens[self._known : end])
        if is_last and self._stops.found is None:
            rest = self._detokenizer.finish(tokens[self._known : end])
            shown += self._stops.push(rest) + self._stops.finish()
        return shown

    def _stop_reason(self, output: CompletionOutput) -> str | int | None:
        if self._stops.found is not None:
            return self._stops.found
        last = output.token_ids[-1] if output.token_ids else None
        return last if output.finish_reason == "eos" and last in self._plan.stop_token_ids else None


class Choices:
    """All choices of a plan: `n` for each prompt, in the order of the prompts."""

    def __init__(self, plan: Plan, tokenizer: Any) -> None:
        self._plan = plan
        self._choices = [Choice(index, plan, tokenizer) for index in range(len(plan.prompts) * plan.n)]
        self._unscored = set(range(len(self._choices))) if plan.scores_prompts else set()
        self.completion_tokens = 0
        self.cached_tokens = 0

    def update(self, outputs: Mapping[int, RequestOutput]) -> list[Delta]:
        """What is new in the outputs, by the place of their prompt. Raises Problem for a request that failed."""
        deltas = []
        reads_all_at_once = not (self._plan.stream or self._plan.stops)
        for place, output in outputs.items():
            if reads_all_at_once and not output.finished:
                continue
            if output.error is not None:
                raise Problem(500, f"the request failed: {output.error}", code="generation_failed")
            if output.finished:
                self.cached_tokens += output.metrics.num_cached_tokens
            for number, completion in enumerate(self._chosen(output)):
                if completion.finish_reason == "abort":
                    raise Problem(503, "the request was aborted by the operator of the server", code="aborted")
                if completion.finish_reason == "deadline":
                    raise Problem(504, "the request has taken longer than the server allows", code="deadline")
                if (delta := self._choices[place * self._plan.n + number].update(completion)) is not None:
                    delta = self._scored(delta, output)
                    self.completion_tokens += len(delta.token_ids)
                    deltas.append(delta)
        return deltas

    def _scored(self, delta: Delta, output: RequestOutput) -> Delta:
        """The delta with what is due of its prompt, and without what was generated if that is to be dropped."""
        if self._plan.is_dry:
            delta = Delta(delta.index, "", [], [], finish_reason="length" if delta.finish_reason else None)
        if delta.index not in self._unscored:
            return delta
        self._unscored.discard(delta.index)
        scores = PromptScores(output.prompt_token_ids, output.prompt_logprobs or [], output.prompt_top_logprobs or [])
        return replace(delta, prompt=scores)

    def _chosen(self, output: RequestOutput) -> list[CompletionOutput]:
        """The outputs that are returned, the best ones first."""
        plan = self._plan
        if plan.copies:
            return output.outputs[:1] * plan.n
        if plan.ranked:
            if not output.finished:
                return []
            return sorted(output.outputs, key=lambda each: -_mean_logprob(each))[: plan.n]
        return output.outputs

    @property
    def are_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices)


def _mean_logprob(output: CompletionOutput) -> float:
    return output.cumulative_logprob / max(1, len(output.token_ids))


def joined(deltas: list[Delta], count: int) -> list[Delta]:
    """One for each of `count` choices, with all that its deltas have."""
    whole = [Delta(index, "", [], []) for index in range(count)]
    for delta in deltas:
        before = whole[delta.index]
        whole[delta.index] = Delta(
            delta.index,
            before.text + delta.text,
            before.token_ids + delta.token_ids,
            before.logprobs + delta.logprobs,
            before.top_logprobs + delta.top_logprobs,
            delta.finish_reason,
            delta.stop_reason,
            before.prompt or delta.prompt,
        )
    return whole
