"""Records that the engine returns for a request: its tokens, their log-probabilities, and its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_paged.errors import EngineError


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, in seconds of `time.monotonic()`, and what it met; None = has not happened yet.

    Attributes:
        arrival_time: When the request was made.
        first_token_time: When the step that generated its first token delivered it.
        finish_time: When it ended, for whatever reason.
        start_time: When a step first took it in.
        num_preemptions: How often it lost its blocks (PagedAttention, section 4.5). 0 until it has ended.
        num_cached_tokens: Tokens of the prompt that its start found in the prefix cache. 0 until it has ended.
        weight_versions: `Engine.weight_version` at its first step and at its end. None until it has ended, and if no
            step took it in.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        from hf_paged import Engine

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}) as engine:
            [output] = engine.generate([[1, 5, 6]], GenerationConfig(max_new_tokens=4))
        print(f"{output.metrics.time_to_first_token:.3f} s to the first token, {output.metrics.latency:.3f} s in all")
        ```
    """

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    start_time: float | None = None  # of its first step
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    weight_versions: tuple[int, int] | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from the arrival to the first step."""
        return None if self.start_time is None else self.start_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from the arrival to the end."""
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

    Attributes:
        index: Number of the sample or beam in the request, from 0.
        cumulative_logprob: Sum of `logprobs`.
        score: The beam's length-penalised score; None for a sample.
        finish_reason: Why it has ended, or None. "eos", "stop" (a stop string or another criterion), "length",
            "deadline", "abort" or "error".

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        from hf_paged import Engine

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        sampling = GenerationConfig(max_new_tokens=4, do_sample=True, num_return_sequences=2)
        with Engine(model, {"num_blocks": 64}) as engine:
            [output] = engine.generate([[1, 5, 6]], sampling, logprobs=3)
        for completion in output.outputs:
            print(completion.index, completion.token_ids, completion.finish_reason)
            likeliest_first_token, its_logprob = completion.top_logprobs[0][0]
        ```
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
        """Everything generated so far, without the prompt, an EOS token included."""
        tokens: list[int] = self._copy("token_ids")
        return tokens

    @property
    def new_token_ids(self) -> list[int]:
        """The tokens since the last output that the same reader (a stream, or the callers of `step`) got."""
        tokens, first = self._lists[:2]
        return tokens[first + self._start + self._num_delivered : first + self._stop]

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far: `len(token_ids)`, without a copy of the list."""
        return self._stop - self._start

    @property
    def logprobs(self) -> list[float]:
        """The natural-log probability of each token under the model's own distribution, computed in fp32."""
        logprobs: list[float] = self._copy("logprobs")
        return logprobs

    @property
    def processed_logprobs(self) -> list[float] | None:
        """The natural-log probability of each token after the logits processors; None without `output_scores=True`."""
        logprobs: list[float] | None = self._copy("processed_logprobs")
        return logprobs

    @property
    def top_logprobs(self) -> list[TopLogprobs] | None:
        """The k most likely tokens at each place under the model's own distribution; None without `logprobs=k`."""
        top: list[TopLogprobs] | None = self._copy("top_logprobs")
        return top

    def since(self, start: int) -> CompletionOutput:
        """Return the same output without its first tokens, which are not copied.

        Args:
            start: How many of the tokens are left out; more than there are leaves none.

        Returns:
            An output whose lists begin later. `cumulative_logprob` is still that of all tokens.

        Example:
            ```python
            assert completion.since(3).token_ids == completion.token_ids[3:]
            ```
        """
        # Delivered tokens are counted from the first token that the output shows.
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

    Beams appear in `outputs` when they are final, samples grow from step to step. If the request failed, the `outputs`
    that it left unfinished have finish_reason "error" and the tokens generated until then.

    Attributes:
        request_id: The id that `Engine.add_request` took or made.
        prompt_token_ids: The prompt without padding. Of an encoder-decoder model, what the decoder began with.
        outputs: The samples or beams, sorted by `index`.
        finished: Whether this is the last output of the request.
        metrics: Its times, and how often it was preempted.
        error: Why it failed, or None.
        exception: The cause with its traceback; None if there was no exception.
        prompt_logprobs: With the request's `prompt_logprobs=k`, the log-probability of each token of the prompt after
            the ones before it. None for the first token, and for those not computed yet or not asked for.
        prompt_top_logprobs: The k most likely tokens in each of these places.
        result: What the request's `task` gives; None without one, and until it has it.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        from hf_paged import Engine

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}) as engine:
            for output in engine.stream([[1, 5, 6]], GenerationConfig(max_new_tokens=4)):
                print(output.request_id, output.outputs[0].new_token_ids, output.finished)
        ```
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
    result: Any = None

    def raise_for_error(self) -> RequestOutput:
        """Return the output itself, unless its request failed.

        Returns:
            This output, so that calls can be chained.

        Raises:
            EngineError: If the request failed. Its `__cause__` is `exception`.

        Example:
            ```python
            print(output.raise_for_error().outputs[0].token_ids)
            ```
        """
        if self.error is not None:
            raise EngineError([self]) from self.exception
        return self
