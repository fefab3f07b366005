"""The JSON of answers: OpenAI's completions and chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Protocol

from hf_paged.generation.engine.outputs import TopLogprobs
from hf_paged.serving.choices import Delta
from hf_paged.serving.plan import Plan
from hf_paged.serving.text import token_bytes, token_text

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Form(Protocol):
    """How an answer looks. Deltas come in the order of time; those of one choice in the order of its text."""

    def opening(self) -> list[dict[str, Any]]:
        """The chunks before the first delta."""

    def chunk(self, delta: Delta) -> dict[str, Any]: ...

    def usage_chunk(self) -> dict[str, Any]:
        """A chunk without choices."""

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]: ...


class _Tokens:
    """Tokens as clients see them."""

    def __init__(self, plan: Plan, tokenizer: Any) -> None:
        self._plan = plan
        self._tokenizer = tokenizer

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._plan.tokens_as_ids else token_text(self._tokenizer, token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        return token_bytes(self._tokenizer, token_id)


def _finite(logprob: float) -> float:
    return logprob if isfinite(logprob) else _LEAST_LOGPROB


class CompletionForm:
    """Of /v1/completions."""

    def __init__(self, plan: Plan, tokenizer: Any, answer_id: str, created: int) -> None:
        self._plan = plan
        self._tokens = _Tokens(plan, tokenizer)
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": plan.model}
        shows_prompt = plan.echo and not plan.scores_prompts
        self._offsets = [len(plan.texts[index // plan.n]) if shows_prompt else 0 for index in self._indices()]
        self._is_begun = [False for _ in self._indices()]

    def _indices(self) -> range:
        return range(len(self._plan.prompts) * self._plan.n)

    def opening(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(delta)]}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head, "choices": []}

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(delta) for delta in choices]}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        plan, index = self._plan, delta.index
        is_first, self._is_begun[index] = not self._is_begun[index], True
        choice: dict[str, Any] = {
            "index": index,
            "text": (plan.texts[index // plan.n] if plan.echo and is_first else "") + delta.text,
            "logprobs": None if plan.logprobs is None else self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if plan.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = plan.prompts[index // plan.n] if is_first else None
        return choice

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        tokens = list(delta.token_ids)
        logprobs: list[float | None] = [*map(_finite, delta.logprobs)]
        tops: list[TopLogprobs | None] = list(delta.top_logprobs)
        if delta.prompt is not None:
            tokens = delta.prompt.token_ids + tokens
            logprobs = [None if each is None else _finite(each) for each in delta.prompt.logprobs] + logprobs
            tops = delta.prompt.top_logprobs + tops
        names, offsets = [self._tokens.name(token) for token in tokens], []
        for name in names:
            offsets.append(self._offsets[delta.index])
            self._offsets[delta.index] += len(name)
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": self._tops(tokens, logprobs, tops) if self._plan.logprobs else None,
            "text_offset": offsets,
        }

    def _tops(
        self, tokens: list[int], logprobs: list[float | None], tops: list[TopLogprobs | None]
    ) -> list[dict[str, float] | None]:
        """For each token the likeliest ones by name, and itself. Of several with one name the likeliest counts."""
        made: list[dict[str, float] | None] = []
        for token, logprob, top in zip(tokens, logprobs, tops):
            if top is None or logprob is None:
                made.append(None)
                continue
            likeliest: dict[str, float] = {}
            for other, value in [*top, (token, logprob)]:
                likeliest.setdefault(self._tokens.name(other), _finite(value))
            made.append(likeliest)
        return made


class ChatForm:
    """Of /v1/chat/completions."""

    def __init__(self, plan: Plan, tokenizer: Any, answer_id: str, created: int) -> None:
        self._plan = plan
        self._tokens = _Tokens(plan, tokenizer)
        self._head = {"id": answer_id, "created": created, "model": plan.model, "system_fingerprint": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def opening(self) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        chunks = [
            self._chunk([{"index": index, "delta": first, "logprobs": None, "finish_reason": None}])
            for index in range(self._plan.n)
        ]
        if self._plan.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._plan.prompts[0]
        return chunks

    def chunk(self, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return self._chunk([self._choice(delta, "delta", content)])

    def usage_chunk(self) -> dict[str, Any]:
        return self._chunk([])

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]:
        made = [
            self._choice(delta, "message", {"role": "assistant", "content": delta.text, "refusal": None})
            for delta in choices
        ]
        answer = {**self._head, "object": "chat.completion", "choices": made}
        if self._plan.return_token_ids:
            answer["prompt_token_ids"] = self._plan.prompts[0]
        return answer

    def _choice(self, delta: Delta, name: str, content: dict[str, Any]) -> dict[str, Any]:
        choice = {
            "index": delta.index,
            name: content,
            "logprobs": None if self._plan.logprobs is None else self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._plan.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        content = []
        for place, (token, logprob) in enumerate(zip(delta.token_ids, delta.logprobs)):
            top = delta.top_logprobs[place] if delta.top_logprobs else []
            content.append({**self._entry(token, logprob), "top_logprobs": [self._entry(*each) for each in top]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._tokens.name(token), "logprob": _finite(logprob), "bytes": self._tokens.bytes(token)}
