"""What the engine tells its callers: outputs of requests, their times, and the engine's figures. Records only."""

from __future__ import annotations

from dataclasses import dataclass


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
    """A request as it stands after a step. `error` says why a request with finish_reason "error" failed.

    Beams appear in `outputs` when they are final, samples grow from step to step.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one moment. Block counts are sums over layer groups: free + used + cached == num_blocks.

    used: referenced by a sequence; shared: by more than one; cached: kept by the prefix cache only; swapped: host
    blocks that hold preempted sequences. kv_bytes_reserved: size of the pool; kv_bytes_touched: of the blocks that have
    ever been handed out (on a CPU the system gives memory for no more than these). kv_waste_ratio: share of the used
    blocks' slots that hold no token (what Figure 2 of the paper measures). kv_bytes_saved_by_sharing: bytes that the
    same sequences would take in addition without sharing. graph_replays: those of the steps that a CUDA graph computed.
    Counters count since the start.
    """

    num_blocks: int
    blocks_free: int
    blocks_used: int
    blocks_shared: int
    blocks_cached: int
    blocks_swapped: int
    num_running: int
    num_waiting: int
    num_swapped: int
    cow_copies: int
    kv_bytes_reserved: int
    kv_bytes_touched: int
    kv_bytes_used: int
    kv_bytes_saved_by_sharing: int
    kv_waste_ratio: float
    preemptions_recompute: int
    preemptions_swap: int
    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    steps: int
    graph_replays: int

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.prefix_cache_hit_tokens / self.prefix_cache_query_tokens if self.prefix_cache_query_tokens else 0.0
