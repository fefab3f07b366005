"""What the engine returns for a request: its tokens, their log-probabilities, and its times. Records only."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged.errors import EngineError


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of `time.monotonic()`; None = has not happened yet."""

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        return None if self.finish_time is None else self.finish_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample or beam of a request.

    token_ids: everything generated so far, without the prompt, an EOS token included. logprobs: natural-log
    probability of each under the model's own distribution (fp32); processed_logprobs: under the distribution after
    the logits processors, when the request set `output_scores=True`. score: the beam's length-penalised score.
    finish_reason: "eos", "stop" (a stop string or another criterion), "length", "abort", "error", or None.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float]
    cumulative_logprob: float
    score: float | None = None
    finish_reason: str | None = None
    processed_logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request as it stands after a step.

    Beams appear in `outputs` when they are final, samples grow from step to step. If the request failed, `error` says
    why, `exception` is the cause with its traceback (None if there was no exception), and the `outputs` that it left
    unfinished have finish_reason "error" and the tokens generated until then.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    exception: BaseException | None = None

    def raise_for_error(self) -> RequestOutput:
        """The output itself; raises EngineError if the request failed."""
        if self.error is not None:
            raise EngineError([self]) from self.exception
        return self
