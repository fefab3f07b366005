"""Hands HTTP requests to replicas and their answers to clients. Knows no model and not how a replica is reached.

A replica may die at any moment. As long as the client has got nothing, its request is sent to another replica; after
that the client gets an error at the end of what it has.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from hf_paged.serving.connections import unless_gone
from hf_paged.serving.middleware import send_problem
from hf_paged.serving.problems import Problem, body_for, draining, overdue
from hf_paged.serving.prompt_chain import prompt_chain
from hf_paged.serving.settings import AUDIO_PATHS

log = logging.getLogger("hf_paged.serving")

MOST_ATTEMPTS = 3
"""Replicas that one request is sent to at most: it may be the request itself that ends them."""

BEAT_SECONDS = 5.0
"""A replica that has nothing to send says so after this time, with a part that has no messages."""

SILENCE_SECONDS = 20.0
"""A replica that says nothing for this time is lost: its process hangs."""

# The status of a replica that drains or whose engine has died: another one may serve the request.
_UNAVAILABLE = 503
# Seconds after a request's end until the relay says itself what the replica should have said.
_LATE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """An HTTP request on its way to a replica.

    model, chain: see `prompt_chain`. lost: names of the replicas that have not answered it. request_id: in the header
    X-Request-Id of both the request and the answer, and in the logs.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    model: str | None = None
    chain: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an answer: the name of the replica, and messages of ASGI. The first part has no messages: it arrives when
    the replica has the request. Parts that say only that the replica is alive have none either."""

    replica: str
    messages: tuple[Message, ...] = ()


Stream = AsyncGenerator[Part, None]


class ReplicaLost(Exception):
    """The replica that had a request has died or hangs, or there was none to take it. replica: its name, if known."""

    def __init__(self, message: str, replica: str | None = None) -> None:
        super().__init__(message)
        self.replica = replica


class Relay:
    """An ASGI application that answers as a replica does.

    open_stream: asks a replica; raises ReplicaLost, also later. wait_seconds: until a replica has taken a request, for
    example while the only one is started again; then the client gets status 503. request_seconds: from a request's
    arrival to its end, however many replicas have had it (None: no limit); then the client gets status 504.
    """

    def __init__(
        self, open_stream: Callable[[Asked], Stream], *, wait_seconds: float, request_seconds: float | None = None
    ) -> None:
        self._open_stream = open_stream
        self._wait_seconds = wait_seconds
        self._seconds = None if request_seconds is None else request_seconds + _LATE_SECONDS
        self._limits: set[asyncio.Timeout] = set()  # of the requests that run
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The body is read once and kept, because several replicas may need it.
        asked = await _asked(scope, receive)
        answer = _Answer(send, asked.path)
        try:
            await unless_gone(self._in_time(self._answer(asked, answer)), receive)
        except Problem as problem:
            if not answer.has_begun:
                await send_problem(send, problem, asked.path)
            elif not await answer.break_off(problem):
                raise

    async def _in_time(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for the work. Raises Problem if it takes too long (504), or longer than the server runs (503)."""
        # A server that ends gives no time at all.
        limit = asyncio.timeout(0 if self._is_over else self._seconds)
        self._limits.add(limit)
        try:
            async with limit:
                await work
        except TimeoutError:
            raise (draining() if self._is_over else overdue()) from None
        finally:
            self._limits.discard(limit)

    def end(self) -> None:
        """The requests that run get an error for an answer, or at the end of what they have."""
        self._is_over = True
        # Their own tasks raise it, where their answers can still be ended.
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)

    async def _answer(self, asked: Asked, answer: _Answer) -> None:
        """Try replicas until an answer is sent whole. Raises Problem if none has sent it."""
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                await self._attempt(asked, answer, is_last=attempt == MOST_ATTEMPTS)
                return
            except ReplicaLost as error:
                log.warning(
                    "request=%s path=%r attempt=%d begun=%s: %s",
                    *(asked.request_id, asked.path, attempt, answer.has_begun, error),
                )
                # What the client has got cannot be taken back, so no other replica can begin anew.
                if answer.has_begun:
                    problem = Problem(503, f"the replica that answered has ended: {error}", code="replica_lost")
                    raise problem from error
                if (lost := answer.replica or error.replica) is not None:
                    asked = replace(asked, lost=(*asked.lost, lost))
        text = f"{MOST_ATTEMPTS} replicas have ended with this request, before its answer began; send it again later"
        raise Problem(503, text, code="replica_lost", headers={"retry-after": "1"})

    async def _attempt(self, asked: Asked, answer: _Answer, *, is_last: bool) -> None:
        """Send the request to a replica. Raises ReplicaLost also if it takes no requests, unless it is the last."""
        answer.begin()
        async with aclosing(self._open_stream(asked)) as stream:
            try:
                # Only until a replica has taken it: the first part says so, before anything is computed.
                async with asyncio.timeout(self._wait_seconds):
                    first = await anext(stream, None)
            except TimeoutError:
                text = f"no replica has taken the request within {self._wait_seconds:g} seconds"
                raise Problem(503, text, code="no_replica", headers={"retry-after": "5"}) from None
            if first is None:
                raise ReplicaLost("the answer ended before it began")
            answer.replica = first.replica
            while (part := await _heard(stream)) is not None:
                for message in part.messages:
                    # A replica that drains is still alive; another one may take the request.
                    if message.get("status") == _UNAVAILABLE and not is_last:
                        raise ReplicaLost("it takes no requests")
                    await answer.send(message)
        # A stream may end without an error when its process dies.
        if not answer.is_whole:
            raise ReplicaLost("the answer has no end")


async def _heard(stream: Stream) -> Part | None:
    """The next part, None at the end. Raises ReplicaLost if the replica says nothing for too long."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            return await anext(stream, None)
    except TimeoutError:
        raise ReplicaLost(f"it has said nothing for {SILENCE_SECONDS:g} seconds") from None


class _Answer:
    """An answer on its way to the client, buffered until two parts of its body are there. The first part of a stream
    only opens it; the second part of a whole answer, which is empty, closes it.

    is_numbered: the events of the stream have numbers. replica: that has the request, or had it last; the header
    X-Replica names it.
    """

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._is_stream = False
        self._num_events = 0
        self.has_begun = False
        self.begin()

    def begin(self) -> None:
        """Forget what has come, none of which was sent (`has_begun` is false)."""
        self._held: list[Message] = []
        self.is_whole = False
        self.replica: str | None = None

    async def send(self, message: Message) -> None:
        self.is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
        if self.has_begun:
            await self._pass(message)
            return
        self._held.append(message)
        # Three messages: the beginning and two parts. As long as less has come, another replica can begin anew.
        if self.is_whole or len(self._held) > 2:
            self.has_begun = True
            for each in self._held:
                await self._pass(each)

    async def _pass(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            self._is_stream = any(value.startswith(b"text/event-stream") for value in kinds)
            message = {**message, "headers": [*message["headers"], (b"x-replica", (self.replica or "").encode())]}
        await self._send(message)  # if it is cancelled, nothing was sent
        # Events end with an empty line; the error's number follows theirs.
        self._num_events += message.get("body", b"").count(b"\n\n")

    async def break_off(self, problem: Problem) -> bool:
        """End a stream with an error. False for another answer, whose connection has to be closed instead."""
        if not self._is_stream:
            return False
        failure = body_for(self._path, problem)
        if self._path == "/v1/responses":
            failure = {"type": "error", "sequence_number": self._num_events, **failure["error"]}
        # Streams whose events have names end with no mark.
        is_named = "type" in failure
        body = b"event: error\n" + _event(failure) if is_named else _event(failure) + b"data: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": body})
        return True


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def _asked(scope: Scope, receive: Receive) -> Asked:
    """Read the request for a replica. Body and id have to be there, as the middleware leaves them."""
    has_body = scope["method"] not in ("GET", "HEAD", "OPTIONS")
    body = (await receive()).get("body", b"") if has_body else b""
    # A form's chain would be that of a file, which no cache has.
    model, chain = prompt_chain(body) if body and scope["path"] not in AUDIO_PATHS else (None, ())
    request_id = scope["state"]["request_id"]
    # In place of the client's own, which may be no valid one.
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"] if name.lower() != b"x-request-id"]
    headers.append((b"x-request-id", request_id.encode()))
    query = scope.get("query_string", b"")
    return Asked(scope["method"], scope["path"], query, tuple(headers), body, model, chain, request_id=request_id)
