"""The JSON that the live page shows. It is made only while a page asks for it."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from typing import Any

import hf_paged
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.engine.snapshots import EngineSnapshot, RequestView
from hf_paged.generation.engine.stats import EngineStats
from hf_paged.serving.metrics import Metrics
from hf_paged.serving.problems import Json
from hf_paged.serving.served import ServedModel

SPAN = 120.0
"""Seconds of the curves."""


class Live:
    """State of one server for the live page. Any thread may use it.

    `note` keeps the figures of the last two minutes, one row a second in which steps run, for a page that is opened
    later.
    """

    def __init__(self, engine: Engine, served: ServedModel, metrics: Metrics) -> None:
        self._engine = engine
        self._served = served
        self._metrics = metrics
        self._history: deque[tuple[Any, ...]] = deque(maxlen=int(SPAN))
        self._began = time.monotonic()
        # A page that finds another one has lost its server, and begins anew.
        self._run = secrets.token_hex(4)
        self._made: tuple[str, bytes] = ("", b"")

    def note(self, stats: EngineStats) -> None:
        """Called once a second while steps run."""
        now = round(time.monotonic() - self._began, 3)
        total = max(stats.num_blocks, 1)
        shares = (stats.blocks_used, stats.blocks_shared, stats.blocks_used + stats.blocks_cached)
        self._history.append((now, stats.generated_tokens, *(count / total for count in shares), *self._quantiles()))

    def _quantiles(self) -> tuple[list[float] | None, list[float] | None]:
        return self._metrics.first_token.quantiles(0.5, 0.95), self._metrics.between.quantiles(0.5, 0.95)

    def body(self, *, with_history: bool = False) -> tuple[str, bytes]:
        """A tag, and JSON that is the same as long as the tag is, but for the history. Does not wait for a step."""
        snapshot = self._engine.snapshot()
        # Latencies are read with every snapshot, so that they are recorded while a page looks.
        metrics = self._metrics
        ended = {"finished": metrics.finished, "failed": metrics.failed, "refused": metrics.refused}
        # All that changes the JSON is in the tag, so that a page asks often and gets little.
        number = "none" if snapshot is None else snapshot.number
        tag = f'"{self._run}-{number}-{metrics.finished}-{metrics.failed}-{metrics.refused}"'
        first, between = self._quantiles()
        latency = {"first_token": first, "between_tokens": between}
        made = self._made
        if snapshot is None or made[0] != tag or with_history:
            value: Json = {
                "server": self._server(),
                "engine": None if snapshot is None else self._engine_json(snapshot),
                "latency": latency,
                "ended": ended,
            }
            # Only once for a page: it continues the history itself.
            if with_history:
                value["history"] = [row for row in self._history if row[0] > time.monotonic() - self._began - SPAN]
            made = tag, json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
            if not with_history:
                self._made = made
        return made

    def _server(self) -> Json:
        served, config = self._served, self._engine.scheduler_config
        return {
            "version": hf_paged.__version__,
            "run": self._run,
            "model": served.name,
            "architecture": type(served.model).__name__,
            "device": str(served.model.device),
            "dtype": str(served.model.dtype).removeprefix("torch."),
            "has_chat_template": bool(served.chat_template),
            "takes_images": "image" in served.kinds,
            "max_model_len": served.max_length,
            "prefix_caching": config.prefix_caching,
            "prefix_eviction": config.prefix_eviction if isinstance(config.prefix_eviction, str) else "own",
        }

    def _engine_json(self, snapshot: EngineSnapshot) -> Json:
        return {
            **snapshot._asdict(),
            "time": round(snapshot.time - self._began, 3),
            "pool": snapshot.pool._asdict(),
            "requests": [_request(request) for request in snapshot.requests],
        }


def _request(view: RequestView) -> Json:
    sequences = [{**seq._asdict(), "tables": [table.tolist() for table in seq.tables]} for seq in view.sequences]
    return {**view._asdict(), "seconds": round(view.seconds, 2), "sequences": sequences}
