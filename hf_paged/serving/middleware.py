"""Layers between the socket and the routes: hosts, keys, request ids, and limits on bodies. Plain ASGI.

Starlette's own base class for middleware would hide from an answer that its client has gone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import uuid
from collections.abc import Callable, Hashable
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_paged.serving.page_files import PAGE_FILES
from hf_paged.serving.problems import Problem, body_for
from hf_paged.serving.settings import AUDIO_PATHS, Settings
from hf_paged.serving.values import check_containers

log = logging.getLogger("hf_paged.serving")

# Bytes of a body that is taken however many others there are, so that short requests work beside large ones.
_SMALL = 2**16
_OPEN = ("/health", "/ready", *PAGE_FILES)
_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def client_of(request: HTTPConnection) -> Hashable:
    """Identify the client, to take turns with others: by the key, or without keys by the address."""
    return request.state.key_digest or getattr(request.client, "host", None)


class Gate:
    """Checks the host and the key, names the request, and hands on a body that has arrived whole and is not too large.

    on_answer: called with path and status when an answer begins. scope["state"] gets `request_id` (the client's
    X-Request-Id, or a new one), `key_digest` (sha256 of the key; None without keys), `is_admin` (the key is the
    admin key, which is good for every route) and `body_bytes` (the size of the body).
    """

    def __init__(self, app: ASGIApp, *, settings: Settings, on_answer: Callable[[str, int], None]) -> None:
        self._app = app
        # Digests have one length, so that comparing them tells nothing about keys.
        self._digests = [_digest(key) for key in settings.api_keys]
        self._admin = None if settings.admin_key is None else _digest(settings.admin_key)
        # A key already keeps pages of others out, which do not know it.
        self._hosts = None if settings.api_keys else settings.hosts
        self._limits = settings.limits
        self._on_answer = on_answer
        self._body_bytes = 0  # of all requests that have not been answered

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
            # Whatever answers, the client gets the id that the log has.
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
                self._on_answer(scope["path"], message["status"])
            await send(message)

        state = scope.setdefault("state", {})
        if scope["method"] == "HEAD":  # as GET; uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        # With `body_bytes` from the beginning: whatever a refused request has counted is taken back at the end.
        state |= {"request_id": request_id, "body_bytes": 0}
        try:
            try:
                # Before the body is read: who may not ask must not fill the memory.
                self._check_host(headers)
                state["key_digest"], state["is_admin"] = self._checked_key(scope["path"], headers)
                whole = await self._with_body(receive, headers, state, is_form=scope["path"] in AUDIO_PATHS)
            except Problem as problem:
                await send_problem(named_send, problem, scope["path"])
                return
            await self._app(scope, whole, named_send)
        except Exception:  # of a template, a tokenizer or a model: the server continues
            log.exception("request=%s failed", request_id)
            if has_begun:
                raise
            failure = Problem(500, f"an internal error; the log has it under {request_id}")
            await send_problem(named_send, failure, scope["path"])
        # Whatever has ended it, what is counted must be given back.
        finally:
            self._body_bytes -= state["body_bytes"]

    def _check_host(self, headers: Headers) -> None:
        """Raise Problem (403) for a host's name that is not ours, if there are no keys. A web page may have its own
        name point to this machine, in order to read answers from a browser here."""
        if self._hosts is None or "host" not in headers:  # browsers always send it
            return
        host = headers["host"]
        try:
            parts = urlsplit(f"//{host}")
            name = parts.hostname or ""
            if host.startswith("[") and host[host.index("]") + 1 :] not in ("", f":{parts.port}"):
                name = ""
            if name == "localhost" or name.endswith(".localhost") or name in self._hosts:
                return
            ipaddress.ip_address(name)
        except ValueError:
            raise Problem(
                403,
                f"the header Host names {host[:100]!r}; use this server's address, or start it with that name as "
                "--host, with --api-key or with --allow-no-key",
                code="unknown_host",
            ) from None

    def _checked_key(self, path: str, headers: Headers) -> tuple[bytes | None, bool]:
        """key_digest and is_admin. Raises Problem (401). Takes equally long for all wrong keys."""
        kind, _, key = headers.get("authorization", "").partition(" ")
        # Anthropic's clients have a header of their own for it.
        digest = _digest(key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", ""))
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        # All keys are compared, so that the time tells nothing about them.
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        if not self._digests or path in _OPEN:
            return None, is_admin
        if not (is_admin or any(matches)):
            raise Problem(
                401,
                "this server needs a key: send the header 'Authorization: Bearer KEY', or X-Api-Key",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return digest, is_admin

    async def _with_body(self, receive: Receive, headers: Headers, state: dict[str, Any], *, is_form: bool) -> Receive:
        """Reads the body. Returns a `receive` that gives it at once, and then what the server has to say. is_form: it
        has a file, and is no JSON."""
        most = self._limits.audio_bytes if is_form else self._limits.body
        length, body = headers.get("content-length", ""), bytearray()
        if length in ("", "0") and "transfer-encoding" not in headers:
            return receive
        if length.isdigit():
            # More digits are too large in any case, and Python refuses to convert thousands of them.
            self._check_size(int(length[:20]), most)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    part = message.get("body", b"")
                    body += part
                    # Counted as it comes, so that many bodies that come slowly count too.
                    state["body_bytes"] += len(part)
                    self._body_bytes += len(part)
                    self._check_size(len(body), most)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Problem(408, f"the body has not arrived within {self._limits.body_seconds:g} seconds") from None
        given: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        if message["type"] == "http.disconnect":
            given.append(message)
        elif not is_form:
            check_containers(given[0]["body"], "the body")

        # The application's own questions go to the server: whether the client is still there.
        async def replay() -> Message:
            return given.pop(0) if given else await receive()

        return replay

    def _check_size(self, length: int, most: int) -> None:
        """Raise Problem (413, 429) for a body of so many bytes."""
        limits = self._limits
        if length > most:
            raise Problem(413, f"the body is larger than the {most} bytes that one request may have")
        # Small ones always pass, so that health and short requests work beside large ones.
        if length > _SMALL and self._body_bytes > limits.bodies:
            raise Problem(
                429,
                f"the requests that are being answered have bodies of {limits.bodies} bytes; send this one later",
                code="queue_full",
                headers={"retry-after": "1"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


async def send_problem(send: Send, problem: Problem, path: str) -> None:
    """Send an error. path: of the request."""
    body = json.dumps(body_for(path, problem)).encode()
    fixed: dict[str, Any] = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    if problem.status == 408:
        fixed["connection"] = "close"  # else uvicorn reads what is left of the body, and drops it: until it has sent
        # all of it, many a client reads no answer, and closing the connection would reset it
    headers = [(name.encode(), str(value).encode()) for name, value in fixed.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
