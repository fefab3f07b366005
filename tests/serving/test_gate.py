"""What the checks before the routes read of a request, without a socket: a check that is missing shows at once."""

from __future__ import annotations

import asyncio
from typing import Any

from hf_paged.serving.middleware import Gate
from hf_paged.serving.settings import Limits, Settings

SECONDS = 60  # that a test waits for what is never to happen


def status_of(limits: Limits, receive: Any, length: bytes = b"5") -> int:
    """Of the answer to a request whose body is to come from `receive`."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        gate = Gate(app, settings=Settings(names=("m",), limits=limits), on_answer=lambda path, status: None)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"content-length", length)]}
        await asyncio.wait_for(gate(scope, receive, send), SECONDS)

    asyncio.run(run())
    return int(sent[0]["status"])


def test_a_body_that_fits() -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * 5, "more_body": False}

    assert status_of(Limits(body=5), receive) == 200


def test_an_announced_body_that_is_too_large_is_not_read() -> None:
    async def receive() -> Any:
        raise AssertionError("the body was read")

    for length in (b"6", b"9" * 500):
        assert status_of(Limits(body=5), receive, length) == 413


def test_a_body_of_more_than_was_announced_is_read_up_to_the_limit() -> None:
    parts: list[bytes] = []

    async def receive() -> Any:
        parts.append(b"x")
        return {"type": "http.request", "body": b"x", "more_body": len(parts) < 100}

    assert status_of(Limits(body=5), receive) == 413 and len(parts) == 6


def test_a_body_that_does_not_end_has_a_limit_of_time() -> None:
    """Also where a part of it comes now and then."""

    async def silent() -> Any:
        await asyncio.Event().wait()

    async def slow() -> Any:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"", "more_body": True}

    for receive in (silent, slow):
        assert status_of(Limits(body_seconds=0.02), receive) == 408
