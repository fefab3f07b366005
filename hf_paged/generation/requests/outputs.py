"""What the engine returns for a request: its tokens, their log-probabilities, and its times. Records only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_paged.errors import EngineError


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of `time.monotonic()`; None = has not happened yet."""

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    start_time: float | None = None  # of its first step
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def queue_time(self) -> float | None:
        return None if self.start_time is None else self.start_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finish_time is None else self.finish_time - self.arrival_time


TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one place and their log-probabilities, best first."""


class Lists(NamedTuple):
    """The lists of one sample or beam, which are only appended to. Outputs share them and copy what is read of them.

    token_ids: the generated tokens from index `first` on, after the prompt. The other lists have an entry for each of
    these tokens; None: the request has not asked for them.
    """

    token_ids: list[int]
    first: int
    logprobs: list[float]
    processed_logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None


@dataclass(slots=True, eq=False, repr=False)
class CompletionOutput:
    """One sample or beam of a request, read-only. Its lists are copied when they are read first.

    token_ids: everything generated so far, without the prompt, an EOS token included. new_token_ids: those since the
    last output that the same reader (a stream, or the callers of `step`) got. logprobs: natural-log probability of each
    token under the model's own distribution (fp32); processed_logprobs: under the distribution after the logits
    processors, when the request set `output_scores=True`; top_logprobs: for each token the k most likely ones under the
    model's own distribution, when the request set `logprobs=k`. score: the beam's length-penalised score.
    finish_reason: "eos", "stop" (a stop string or another criterion), "length", "deadline", "abort", "error", or None.
    """

    index: int
    _lists: Lists
    _stop: int  # the output has the tokens from `_start` to `_stop - 1` of all that were generated
    cumulative_logprob: float
    score: float | None = None
    finish_reason: str | None = None
    _num_delivered: int = 0  # how many of the tokens the reader has got before
    _start: int = 0
    _copies: dict[str, Any] | None = field(default=None, init=False)  # of the lists that have been read

    def _copy(self, name: str) -> Any:
        """This output's part of a list; the same object in every call."""
        copies = self._copies
        if copies is None:  # made when a list is read first, because few outputs are read
            copies = self._copies = {}
        if name not in copies:
            items = getattr(self._lists, name)
            first = self._lists.first if name == "token_ids" else 0
            copies[name] = None if items is None else items[first + self._start : first + self._stop]
        return copies[name]

    @property
    def token_ids(self) -> list[int]:
        tokens: list[int] = self._copy("token_ids")
        return tokens

    @property
    def new_token_ids(self) -> list[int]:
        tokens, first = self._lists[:2]
        return tokens[first + self._start + self._num_delivered : first + self._stop]

    @property
    def num_tokens(self) -> int:
        """len(token_ids)"""
        return self._stop - self._start

    @property
    def logprobs(self) -> list[float]:
        logprobs: list[float] = self._copy("logprobs")
        return logprobs

    @property
    def processed_logprobs(self) -> list[float] | None:
        logprobs: list[float] | None = self._copy("processed_logprobs")
        return logprobs

    @property
    def top_logprobs(self) -> list[TopLogprobs] | None:
        top: list[TopLogprobs] | None = self._copy("top_logprobs")
        return top

    def since(self, start: int) -> CompletionOutput:
        """The same without the first `start` tokens; copies nothing of them."""
        delivered = max(0, self._num_delivered - start)
        start = min(self._start + start, self._stop)
        return CompletionOutput(
            self.index,
            self._lists,
            self._stop,
            self.cumulative_logprob,
            self.score,
            self.finish_reason,
            delivered,
            start,
        )

    def _values(self) -> dict[str, Any]:
        names = ("index", "token_ids", "logprobs", "cumulative_logprob", "score", "finish_reason")
        return {name: getattr(self, name) for name in (*names, "processed_logprobs", "top_logprobs")}

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, CompletionOutput) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        own = Lists(self.token_ids, 0, self.logprobs, self.processed_logprobs, self.top_logprobs)
        others = (self.cumulative_logprob, self.score, self.finish_reason, self._num_delivered)
        return CompletionOutput, (self.index, own, self.num_tokens, *others)

    def __repr__(self) -> str:
        return f"CompletionOutput({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"


@dataclass(slots=True)  # frozen, it would take four times as long to make: half a millisecond in a step of 256 rows
class RequestOutput:
    """A request as it stands after a step, read-only.

    Beams appear in `outputs` when they are final, samples grow from step to step. If the request failed, `error` says
    why, `exception` is the cause with its traceback (None if there was no exception), and the `outputs` that it left
    unfinished have finish_reason "error" and the tokens generated until then.

    prompt_logprobs: with the request's `prompt_logprobs=k`, the log-probability of each token of the prompt after the
    ones before it (None for the first token, and for those not computed yet); prompt_top_logprobs: the k most likely
    tokens in each place.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    exception: BaseException | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[TopLogprobs | None] | None = None

    def raise_for_error(self) -> RequestOutput:
        """The output itself; raises EngineError if the request failed."""
        if self.error is not None:
            raise EngineError([self]) from self.exception
        return self
