"""What stands between the socket and the routes: keys, request ids, and limits on bodies. Plain ASGI.

Starlette's own base class for middleware would hide from an answer that its client has gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import uuid
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_paged.serving.page_files import PAGE_FILES
from hf_paged.serving.problems import Problem
from hf_paged.serving.settings import Settings

log = logging.getLogger("hf_paged.serving")

_OPEN = ("/health", *PAGE_FILES)
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class Gate:
    """Checks the key, names the request, and hands on a body that has arrived whole and is not too large.

    on_answer: called with path and status when an answer begins. scope["state"] gets `request_id` (the client's
    X-Request-Id, or a new one), `key_digest` (sha256 of the key; None without keys) and `is_admin` (the key is the
    admin key, which is good for every route).
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, on_answer: Callable[[str, int], None]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in settings.api_keys]
        self._admin = None if settings.admin_key is None else _digest(settings.admin_key)
        self._limits = settings.limits
        self._on_answer = on_answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex

        has_begun = False

        async def named_send(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._on_answer(scope["path"], message["status"])
            await send(message)

        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        try:
            state["key_digest"], state["is_admin"] = self._checked_key(scope["path"], headers)
            whole = await self._with_body(receive, headers)
        except Problem as problem:
            await send_problem(named_send, problem)
            return
        try:
            await self._app(scope, whole, named_send)
        except Exception:  # of a template, a tokenizer or a model: the server goes on
            log.exception("request=%s failed", request_id)
            if has_begun:
                raise
            await send_problem(named_send, Problem(500, f"an internal error; the log has it under {request_id}"))

    def _checked_key(self, path: str, headers: Headers) -> tuple[bytes | None, bool]:
        """key_digest and is_admin. Raises Problem (401). Takes equally long for all wrong keys."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip() if kind.lower() == "bearer" else "")
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        if not self._digests or path in _OPEN:
            return None, is_admin
        if not (is_admin or any(matches)):
            raise Problem(
                401,
                "this server needs a key: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return digest, is_admin

    async def _with_body(self, receive: Receive, headers: Headers) -> Receive:
        """Reads the body. Returns a `receive` that gives it at once, and then what the server has to say."""
        limit, body = self._limits.body, bytearray()
        too_large = Problem(413, f"the body is larger than the {limit} bytes that one request may have")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            raise too_large
        if length in ("", "0") and "transfer-encoding" not in headers:
            return receive
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Problem(408, f"the body has not arrived within {self._limits.body_seconds:g} seconds") from None
        given: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        if message["type"] == "http.disconnect":
            given.append(message)

        async def replay() -> Message:
            return given.pop(0) if given else await receive()

        return replay


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def send_problem(send: Send, problem: Problem) -> None:
    body = json.dumps(problem.body()).encode()
    fixed: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    if problem.status in (408, 413):
        fixed["connection"] = "close"  # what is left of the body is not read
    headers = [(name.encode(), str(value).encode()) for name, value in fixed.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
