"""Prometheus metrics, and the times of the last seconds for the live page.

Names are vLLM's with another prefix, so that its dashboards need that change only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from math import inf

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hf_paged.generation.engine.stats import EngineStats
from hf_paged.generation.requests.outputs import RequestOutput

_PREFIX = "hf_paged:"
# From the time between two tokens to that of a long answer.
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = tuple(float(2**power) for power in range(0, 18))
# Seconds for which values are kept after a page has asked: without a page nobody reads them.
_PATIENCE = 5.0
_SAME = 16  # values that tokens which came together add at most
_REASONS: dict[str | None, str] = {"eos": "stop"}  # as answers and vLLM have it


class Recent:
    """Values of the last `seconds`. Keeps none while `quantiles`, which any thread may call, is not called."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # A bound, whatever the load is: all of them are sorted for each look.
        self._values: deque[tuple[float, float]] = deque(maxlen=20_000)
        self._until = -inf

    def add(self, now: float, value: float, count: int = 1) -> None:
        if now <= self._until:
            self._values.extend([(now, value)] * min(count, _SAME))
        while self._values and self._values[0][0] < now - self.seconds:
            self._values.popleft()

    def quantiles(self, *shares: float) -> list[float] | None:
        """The values below which these shares of all lie; None if there are no values."""
        now = time.monotonic()
        self._until = now + _PATIENCE
        since = now - self.seconds
        values = sorted(value for when, value in list(self._values) if when >= since)
        if not values:
            return None
        return [values[min(len(values) - 1, int(share * len(values)))] for share in shares]


class Metrics:
    """Figures of one server, each with the label model_name, except for those of its routes. For the event loop."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._engine = _EngineFigures(model_name)
        self.registry.register(self._engine)
        self._name = model_name

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(_PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._between = histogram("inter_token_latency_seconds", "Between two tokens of a request.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens that a request generated.", _TOKENS)
        self.finished = self.failed = self.refused = 0  # requests that ended without and with an error; refused calls
        self._success = Counter(
            _PREFIX + "request_success", "Finished requests.", ["model_name", "finished_reason"], registry=self.registry
        )
        self._seen: dict[str, tuple[float, int]] = {}  # when, and how many tokens there were
        # A request has one first token, and many others: a few seconds hold enough of these.
        self.first_token = Recent(15.0)  # seconds to it
        self.between = Recent(3.0)  # seconds between tokens
        self._http = Counter(
            _PREFIX + "http_requests", "Answers by route and status.", ["route", "status"], registry=self.registry
        )

    def observe(self, outputs: Mapping[str, RequestOutput]) -> None:
        """Called with the latest state of the requests that have changed; of each request until it has finished."""
        now = time.monotonic()
        for request_id, output in outputs.items():
            # The longest of several samples: tokens of one step come at the same time.
            count = max((each.num_tokens for each in output.outputs), default=0)
            then, before = self._seen.get(request_id, (now, 0))
            if before == 0 and count:
                if (seconds := output.metrics.time_to_first_token) is not None:
                    self._first_token.observe(seconds)
                    self.first_token.add(now, seconds)
            elif count > before:
                # A step may give several tokens, and the event loop may read several steps at once.
                gap = (now - then) / (count - before)  # of tokens that came together
                for _ in range(count - before):
                    self._between.observe(gap)
                self.between.add(now, gap, count - before)
            self._seen[request_id] = now, count
            if output.finished:
                self._observe_end(output)
                del self._seen[request_id]

    def _observe_end(self, output: RequestOutput) -> None:
        self.failed += output.error is not None
        self.finished += output.error is None
        if output.metrics.queue_time is not None:
            self._queue.observe(output.metrics.queue_time)
        if output.metrics.latency is not None:
            self._whole.observe(output.metrics.latency)
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(sum(each.num_tokens for each in output.outputs))
        for each in output.outputs:
            self._success.labels(self._name, _REASONS.get(each.finish_reason, each.finish_reason or "error")).inc()

    def count_answer(self, route: str, status: int) -> None:
        self.refused += status >= 400
        self._http.labels(route, str(status)).inc()

    def text(self, stats: EngineStats) -> bytes:
        """The exposition, with the engine's figures of this moment."""
        self._engine.stats = stats
        return generate_latest(self.registry)


class _EngineFigures(Collector):
    """The engine's own figures, read when they are asked for."""

    def __init__(self, model_name: str) -> None:
        self._name = model_name
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        stats = self.stats
        gauges: dict[str, tuple[str, float]] = {
            "num_requests_running": ("Requests that hold blocks.", stats.num_running),
            "num_requests_waiting": ("Requests in the queue.", stats.num_waiting),
            "num_requests_swapped": ("Requests whose blocks are in host memory.", stats.num_swapped),
            "kv_cache_usage_perc": ("Share of the blocks that sequences use, 0 to 1.", _share(stats)),
            "blocks_shared": ("Blocks in more than one block table.", stats.blocks_shared),
            "blocks": ("Blocks of the cache.", stats.num_blocks),
            "blocks_free": ("Blocks without content.", stats.blocks_free),
            "blocks_used": ("Blocks in block tables.", stats.blocks_used),
            "blocks_cached": ("Blocks that only the prefix cache keeps.", stats.blocks_cached),
            "kv_bytes_saved_by_sharing": ("Bytes more without sharing.", stats.kv_bytes_saved_by_sharing),
            "kv_waste_ratio": ("Share of the used slots without a token.", stats.kv_waste_ratio),
        }
        counters: dict[str, tuple[str, float]] = {
            "prompt_tokens": ("Tokens of all prompts.", stats.prompt_tokens),
            "generation_tokens": ("Generated tokens.", stats.generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_cache_query_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hit_tokens),
            "prefix_cache_evictions": ("Cached blocks whose memory was needed.", stats.prefix_cache_evictions),
            "cow_copies": ("Blocks copied on write.", stats.cow_copies),
            "swap_out_blocks": ("Blocks copied to host memory.", stats.blocks_swapped_out),
            "swap_in_blocks": ("Blocks copied back from host memory.", stats.blocks_swapped_in),
            "spec_decode_num_drafts": ("Drafts that steps have verified.", stats.num_drafts),
            "spec_decode_num_draft_tokens": ("Drafted tokens that steps have verified.", stats.drafted_tokens),
            "spec_decode_num_accepted_tokens": ("Drafted tokens that were right.", stats.accepted_tokens),
            "engine_steps": ("Steps of the engine.", stats.steps),
        }
        # Made when they are asked for, so that they cost steps nothing.
        for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in figures.items():
                metric = family(_PREFIX + name, text, labels=["model_name"])
                metric.add_metric([self._name], value)
                yield metric
        preemptions = CounterMetricFamily(_PREFIX + "num_preemptions", "Preemptions.", labels=["model_name", "mode"])
        preemptions.add_metric([self._name, "recompute"], stats.preemptions_recompute)
        preemptions.add_metric([self._name, "swap"], stats.preemptions_swap)
        yield preemptions
        name = "spec_decode_num_accepted_tokens_per_pos"
        positions = CounterMetricFamily(
            _PREFIX + name, "Drafted tokens that were right, by position.", labels=["model_name", "position"]
        )
        for position, count in enumerate(stats.accepted_by_position):
            positions.add_metric([self._name, str(position)], count)
        yield positions


def _share(stats: EngineStats) -> float:
    return stats.blocks_used / stats.num_blocks if stats.num_blocks else 0.0
