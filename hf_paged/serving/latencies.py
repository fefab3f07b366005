"""Times of requests as their outputs arrive: for the metrics, and those of the last seconds for the live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.serving.metrics import Metrics

_PATIENCE = 5.0
_SAME = 16  # values that tokens which came together add at most


class Recent:
    """Values of the last `seconds`. Keeps none while `quantiles`, which any thread may call, is not called."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._values: deque[tuple[float, float]] = deque(maxlen=20_000)
        self._until = 0.0

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


class Latencies:
    """Turns the outputs of requests into times to the first token and between tokens. For the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[str, tuple[float, int]] = {}  # when, and how many tokens there were
        self.first_token = Recent(15.0)
        self.between = Recent(3.0)

    def observe(self, outputs: Mapping[str, RequestOutput]) -> None:
        """Called with the latest state of the requests that have changed; of each request until it has finished."""
        now = time.monotonic()
        for request_id, output in outputs.items():
            count = max((each.num_tokens for each in output.outputs), default=0)
            then, before = self._seen.get(request_id, (now, 0))
            if before == 0 and count:
                self._metrics.observe_first(output)
                if (seconds := output.metrics.time_to_first_token) is not None:
                    self.first_token.add(now, seconds)
            elif count > before:
                self._metrics.observe_gap(now - then, count - before)
                self.between.add(now, (now - then) / (count - before), count - before)
            self._seen[request_id] = now, count
            if output.finished:
                self._metrics.observe_end(output)
                del self._seen[request_id]
