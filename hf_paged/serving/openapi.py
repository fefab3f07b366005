"""/openapi.json: FastAPI's description of the routes, with errors, the events of streams, and keys."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from hf_paged.serving import message_replies, replies, response_replies
from hf_paged.serving.problems import Json
from hf_paged.serving.settings import Settings

_SCHEMAS = "#/components/schemas/"
_OPEN = ("/health", "/ready")

_ERRORS = {
    400: "The request cannot be served; the message says why.",
    401: "The server needs a key.",
    403: "The route changes the server, and the key is not the admin key; or the header Host has an unknown name.",
    404: "The model or adapter is not served.",
    408: "The body has not arrived in time.",
    409: "The server was resumed before its pause began.",
    413: "The body is too large.",
    415: "The body is of another type: JSON is needed, or a form with a file.",
    422: "A field is unknown, or its value is out of range.",
    429: "Too many requests run or wait; the header Retry-After says when to try again.",
    500: "The request has failed.",
    503: "The engine has stopped, the server ends, or its operator has aborted the request.",
    504: "The request has taken longer than the server allows.",
}
# Of errors and of events in streams, which routes name without their classes.
_NAMED = (
    *(replies.ErrorReply, message_replies.AnthropicError),
    *(replies.ChatChunk, response_replies.ResponseEvent, replies.TranscriptionEvent, message_replies.AnthropicEvent),
)
_Replies = dict[int | str, Json]


def _errors(kind: type[replies.Reply]) -> _Replies:
    # By its name: of a class, FastAPI would make a validator for each of 600 routes and statuses, at each start.
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + kind.__name__}}}
    return {status: {"description": text, "content": content} for status, text in _ERRORS.items()}


ERRORS, ANTHROPIC_ERRORS = _errors(replies.ErrorReply), _errors(message_replies.AnthropicError)


def answers(
    whole: type[replies.Reply], event: type[replies.Reply] | None = None, *, ending: str | None = "[DONE]"
) -> _Replies:
    """The documentation of a route that answers `whole`, or with stream=true a stream.

    event: of the stream, whose other events are errors. ending: what the last event says in place of JSON.
    """
    made: Json = {"model": whole, "description": "The answer."}
    if event is not None:
        kinds = [{"$ref": _SCHEMAS + kind.__name__} for kind in (event, replies.ErrorReply)]
        data: Json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
        if ending is not None:
            data = {"anyOf": [{"const": ending}, data]}
        fields = {"event": {"type": "string"}, "data": {"type": "string", **data}}
        schema = {"type": "object", "required": ["data"], "properties": fields}  # of each event
        made["content"] = {"text/event-stream": {"schema": schema}}
        made["description"] = "The answer; with stream=true its parts, as server-sent events."
    return {200: made}


def described(app: FastAPI, settings: Settings) -> Json:
    """The document, which is kept from the first call on."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        named = [(each, "serialization") for each in _NAMED]
        _, extra = models_json_schema(named, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
        components = made["components"]
        # Those of routes last, so that they win: they are the ones that the routes name.
        components["schemas"] = {**extra["$defs"], **components["schemas"]}
        if settings.api_keys:
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{"key": []}]
            for path in _OPEN:
                made["paths"][path]["get"]["security"] = []
        app.openapi_schema = made
    return app.openapi_schema
