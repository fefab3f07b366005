"""Schemas of what the live page reads (/live) for /openapi.json. live.py makes it of snapshots of the engine."""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

from pydantic import create_model

from hf_paged.generation.engine.snapshots import EngineSnapshot, PoolView, RequestView, SequenceView
from hf_paged.serving.replies import Reply


class LiveServer(Reply):
    """run: changes when the server starts again. prefix_eviction: "own" is a function of the server's owner."""

    version: str
    run: str
    model: str
    architecture: str
    device: str
    dtype: str
    has_chat_template: bool
    takes_images: bool
    max_model_len: int | None
    prefix_caching: bool
    prefix_eviction: Literal["lru", "clock", "own"]


def _live(name: str, record: Any, **others: Any) -> Any:
    """The reply with the fields of a snapshot's record. others: the types of those whose JSON is another."""
    types = {**get_type_hints(record, localns={"array": list}), **others}
    fields: dict[str, Any] = {field: (types[field], ...) for field in record._fields}
    return create_model(name, __base__=Reply, __doc__=record.__doc__, **fields)


_Request = _live(
    "LiveRequest", RequestView, status=Literal["waiting", "running", "swapped"],
    sequences=list[_live("LiveSequence", SequenceView)],  # type: ignore[misc]  # mypy knows no type that a call makes
)  # fmt: skip
_Engine = _live(
    "LiveEngine", EngineSnapshot, pool=_live("LivePool", PoolView),
    requests=list[_Request],  # type: ignore[valid-type]  # as above
)  # fmt: skip


class LiveLatency(Reply):
    """Median and 95 % of the last seconds; null if there was nothing."""

    first_token: list[float] | None
    between_tokens: list[float] | None


class LiveEnded(Reply):
    """Requests that ended without and with an error; answers with a status of 400 or more."""

    finished: int
    failed: int
    refused: int


class LiveState(Reply):
    """engine: null until the first step has ended. history: of the last two minutes, without `if-none-match` only: rows
    of time, generated tokens, shares of blocks in use, shared, and in use or cached, times to first token and between
    tokens (median, 95th percentile)."""

    server: LiveServer
    engine: _Engine | None  # type: ignore[valid-type]  # mypy does not know what `create_model` makes
    latency: LiveLatency
    ended: LiveEnded
    history: list[list[float | list[float] | None]] = []  # noqa: RUF012  # pydantic copies it
