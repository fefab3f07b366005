"""Errors as OpenAI's clients expect them: a status, and a body {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""An object of JSON."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# A message may repeat what the client has sent, which may be megabytes.
_MAX_TEXT = 2000
CLIENT_GONE = 499  # nginx's status for the log; no client sees it


class Problem(Exception):
    """A request that gets an error for an answer.

    status: of HTTP. param: the field of the request that is wrong. code: for programs. headers: more of the answer's.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _short(message)  # it may repeat what the client has sent
        self.param = None if param is None else _short(param)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> Json:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


# Where answers and errors have the form of Anthropic's API; behind a proxy a prefix may come before.
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
# Of errors that OpenAI's clients know by another type.
_ANTHROPIC_TYPES = {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def body_for(path: str, problem: Problem) -> Json:
    """Return the body of an error as the clients of this path expect it."""
    return as_anthropic(problem) if path.endswith(_ANTHROPIC_PATHS) else problem.body()


def as_anthropic(problem: Problem) -> Json:
    kind = _ANTHROPIC_TYPES.get(problem.status) or problem.body()["error"]["type"]
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


def _short(text: str) -> str:
    """A text that an answer can have: JSON is sent in UTF-8, which has no half of a surrogate pair."""
    short = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return short.encode(errors="replace").decode()


def overdue() -> Problem:
    return Problem(504, "the request has taken longer than the server allows", code="deadline")


def draining() -> Problem:
    return Problem(503, "the server is shutting down", code="draining")


def not_served(message: str, param: str | None = None) -> Problem:
    """Refuse what only other servers have: a field (400, after which clients do not retry), or a route (501)."""
    return Problem(501 if param is None else 400, message, param=param, code="not_served")
