"""Errors of Ray Serve's proxy as OpenAI's clients expect them. Plain ASGI, in the proxy's process; knows no model."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hf_paged.serving.middleware import send_problem
from hf_paged.serving.problems import Problem

_OWN_PATHS = "/-/"  # of Ray's proxy: /-/routes, /-/healthz
_OWN_TEXTS = {
    404: "no application serves this path now",
    408: "the request has taken longer than Ray Serve allows",
    429: "too many requests wait",
    500: "the process that handed on the request has ended",
    503: "nothing takes the request now",
}


def middlewares() -> list[Middleware]:
    """Return the middleware of Ray's proxy, which finds this by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""
    return [Middleware(JsonErrors)]


class JsonErrors:
    """Middleware around all answers of the proxy.

    It begins no answer when the process of an application has ended, and answers in plain text for a path that no
    application serves, also because it has just ended or not begun: both become 503 in JSON, after which clients try
    again. So do its other refusals, with their own status. Applications of hf_paged have no plain text.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_OWN_PATHS):
            await self._app(scope, receive, send)
            return
        has_begun = is_replaced = False

        def problem(status: int) -> Problem:
            name = Headers(scope=scope).get("x-request-id")  # which the proxy has given to a request without one
            headers = {"retry-after": "1", **({"x-request-id": name} if name else {})}
            text = f"{_OWN_TEXTS[status]}; send it again later"
            return Problem(503 if status in (404, 500) else status, text, code="proxy", headers=headers)

        async def checked_send(message: Message) -> None:
            nonlocal has_begun, is_replaced
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=[tuple(each) for each in message["headers"]])
                has_begun = True
                if status in _OWN_TEXTS and headers.get("content-type", "").startswith("text/plain"):
                    is_replaced = True
                    await send_problem(send, problem(status), scope["path"])
            if not is_replaced:
                await send(message)

        # An application whose process has ended begins no answer, and raises nothing here.
        await self._app(scope, receive, checked_send)
        if not has_begun:
            await send_problem(send, problem(500), scope["path"])
