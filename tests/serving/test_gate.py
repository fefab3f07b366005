"""What the checks before the routes read of a request, without a socket: a check that is missing shows at once."""

from __future__ import annotations

import asyncio
from typing import Any

from hf_paged.serving.middleware import Gate
from hf_paged.serving.settings import Limits, Settings
from hf_paged.serving.values import MAX_CONTAINERS

SECONDS = 60  # that a test waits for what is never to happen


async def app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})


def status_of(
    limits: Limits, receive: Any, length: bytes = b"5", *, host: bytes = b"localhost", **settings: Any
) -> int:
    """Of the answer to a request whose body is to come from `receive`."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        gate = Gate(
            app, settings=Settings(names=("m",), limits=limits, **settings), on_answer=lambda path, status: None
        )
        headers = [(b"content-length", length), (b"host", host)]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await asyncio.wait_for(gate(scope, receive, send), SECONDS)

    asyncio.run(run())
    return int(sent[0]["status"])


def test_a_body_is_read_up_to_the_limit() -> None:
    """And not at all if more is announced, whatever comes then."""
    for length, sent, status, read in (
        (b"5", 5, 200, 5),
        (b"5", 100, 413, 6),
        (b"6", 5, 413, 0),
        (b"9" * 500, 5, 413, 0),
    ):
        parts: list[bytes] = []

        async def receive() -> Any:
            parts.append(b"x")  # noqa: B023
            return {"type": "http.request", "body": b"x", "more_body": len(parts) < sent}  # noqa: B023

        assert status_of(Limits(body=5), receive, length) == status and len(parts) == read


def test_a_body_that_does_not_end_has_a_limit_of_time() -> None:
    """Also where a part of it comes now and then."""

    async def silent() -> Any:
        await asyncio.Event().wait()

    async def slow() -> Any:
        await asyncio.sleep(0.001)
        return {"type": "http.request", "body": b"", "more_body": True}

    for receive in (silent, slow):
        assert status_of(Limits(body_seconds=0.02), receive) == 408


OURS = (b"localhost", b"LOCALHOST:80", b"a.localhost", b"127.0.0.1:8000", b"10.1.2.3", b"[::1]:8000")
NAMED = (b"evil.example", b"evil.example:8000", b"localhost@evil.example")
FOREIGN = (*NAMED, b"localhost.evil.example", b"", b"[::1", b"[::1].evil.example", b"[::1]evil")


def test_without_keys_the_host_has_to_be_ours() -> None:
    """Else a web page could have its own name point to this machine, and read what the server answers."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    for host in (*OURS, *FOREIGN):
        assert status_of(Limits(), receive, host=host) == (200 if host in OURS else 403), host
        named = host in OURS or host in NAMED
        assert status_of(Limits(), receive, host=host, hosts=("evil.example",)) == (200 if named else 403), host
    assert status_of(Limits(), receive, host=FOREIGN[0], hosts=None) == 200
    with_key = status_of(Limits(), receive, host=FOREIGN[0], api_keys=("a-key",))
    assert with_key == 401  # browsers do not send it for another page


def test_unfinished_bodies_have_a_bound_together() -> None:
    """Small ones are taken all the same."""
    part, sent = 2**15, []

    async def run() -> None:
        settings = Settings(names=("m",), limits=Limits(bodies=10 * part))
        gate, go_on = Gate(app, settings=settings, on_answer=lambda path, status: sent.append(status)), asyncio.Event()

        async def ask(parts: int, *, ends: bool) -> None:
            left = [b" " * part] * parts

            async def receive() -> Any:
                if not left and not ends:
                    await go_on.wait()
                return {
                    "type": "http.request",
                    "body": left.pop() if left else b"",
                    "more_body": bool(left or not ends),
                }

            async def send(message: Any) -> None:
                pass

            headers = [(b"transfer-encoding", b"chunked")]
            scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
            await gate(scope, receive, send)

        slow = [asyncio.ensure_future(ask(4, ends=False)) for _ in range(3)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert sent == [429] and gate._body_bytes <= 10 * part
        await ask(1, ends=True)
        await ask(4, ends=True)
        assert sent == [429, 200, 429]
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert gate._body_bytes == 0
        await ask(4, ends=True)
        assert sent[3:] == [200]

    asyncio.run(run())


def body_status(body: bytes) -> int:
    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    return status_of(Limits(), receive, str(len(body)).encode())


def test_json_with_too_many_values_is_not_parsed() -> None:
    many = MAX_CONTAINERS
    for item in (b"[1],", b"{},", b'{"a":"[["},', b'["\\"[\\\\"],'):  # brackets in texts are no lists
        assert body_status(b"[" + item * (many - 1) + b"1]") == 200
        assert body_status(b"[" + item * many + b"1]") == 400
    assert body_status(b"[" * (many + 1)) == 400
    assert body_status(b'"' + b"[" * 2 * many) == 200  # no JSON, which the parser will say
    assert body_status('["a"]'.encode("utf-16")) == 400
