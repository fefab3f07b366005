"""The routes. Each is a few lines: the request is checked by its schema, and the service does the work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

import hf_paged
from hf_paged.serving import schema
from hf_paged.serving.forms import ChatForm, CompletionForm
from hf_paged.serving.middleware import Gate
from hf_paged.serving.plan import chat_plan, completion_plan
from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.refusals import check_messages
from hf_paged.serving.service import Service

# Routes of other servers: what to do instead.
_ELSEWHERE = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/embeddings": "this server generates text; compute embeddings with the model itself",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/audio/transcriptions": "this server generates text from text",
    "/v1/audio/translations": "this server generates text from text",
    "/v1/images/generations": "this server generates text from text",
    "/v1/systemone": "ask a question in /v1/chat/completions",
    "/v1/decisions": "ask a question in /v1/chat/completions",
    "/v1/rerank": "this server generates text",
    "/v1/score": "this server generates text",
    "/sleep": "stop the server instead",
    "/wake_up": "start the server instead",
}


def create_app(service: Service) -> FastAPI:
    """The application for one service, which it starts and stops."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="hf-paged",
        version=hf_paged.__version__,
        lifespan=lifespan,
        docs_url=None,  # it loads scripts from elsewhere
        redoc_url=None,
        responses={422: {"description": "A field is unknown or its value is out of range."}},
    )
    app.add_exception_handler(Problem, _on_problem)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _on_invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http)  # type: ignore[arg-type]
    known: set[str] = set()
    app.add_middleware(
        Gate,
        api_keys=service.settings.api_keys,
        limits=service.settings.limits,
        on_answer=lambda path, status: service.metrics.count_answer(path if path in known else "other", status),
    )
    _add_completions(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    _add_admin(app, service)
    for path, remedy in _ELSEWHERE.items():
        app.post(path, include_in_schema=False)(partial(_elsewhere, path, remedy))
    known |= {str(route.path) for route in app.routes if hasattr(route, "path")}
    return app


async def _elsewhere(path: str, remedy: str) -> Response:
    raise not_served(f"{path} is not served; {remedy}")


# -- errors --------------------------------------------------------------------------------------------------------


async def _on_problem(request: Request, problem: Problem) -> Response:
    return JSONResponse(problem.body(), problem.status, headers=problem.headers)


async def _on_invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this field is not known; leave it out"
    if first["type"] == "json_invalid":
        return await _on_problem(request, Problem(400, f"the body is not valid JSON: {message} ({place})"))
    text = f"{place}: {message}" if place else message
    return await _on_problem(request, Problem(422, text, param=place or None, code="invalid_field"))


async def _on_http(request: Request, error: HTTPException) -> Response:
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no route {request.url.path}"
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    return await _on_problem(request, Problem(error.status_code, message, headers=error.headers))


# -- completions ---------------------------------------------------------------------------------------------------


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, body: schema.CompletionRequest) -> Response:
        plan = partial(completion_plan, body, service.served, request.state.key_digest)
        return await service.answer(plan, CompletionForm, "cmpl", request.state.request_id)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: schema.ChatRequest) -> Response:
        plan = partial(chat_plan, body, service.served, request.state.key_digest)
        return await service.answer(plan, ChatForm, "chatcmpl", request.state.request_id)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, name) for name in _names(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.served.adapter_of(name)
        return _card(service, name)


def _names(service: Service) -> list[str]:
    return [*service.settings.names, *service.served.adapters]


def _card(service: Service, name: str) -> dict[str, Any]:
    served = service.served
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "hf-paged",
        "root": served.adapters.get(name, served.name),
        "parent": served.name if name in served.adapters else None,
        "max_model_len": served.max_length,
    }


# -- tokens --------------------------------------------------------------------------------------------------------


def _add_tokens(app: FastAPI, service: Service) -> None:
    served = service.served

    def ids_of(body: schema.TokenizeRequest) -> list[int]:
        if body.prompt is not None:
            return served.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        check_messages(body.messages or [])
        text = served.render(
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
        )
        return served.encode(text, add_special_tokens=bool(body.add_special_tokens))

    @app.post("/tokenize")
    async def tokenize(body: schema.TokenizeRequest) -> dict[str, Any]:
        served.adapter_of(body.model)
        ids = await service.prepared(partial(ids_of, body))
        names = served.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": served.max_length, "tokens": ids, "token_strs": names}

    @app.post("/detokenize")
    async def detokenize(body: schema.DetokenizeRequest) -> dict[str, Any]:
        served.adapter_of(body.model)
        for token in body.tokens:
            if token >= served.vocab_size:
                raise Problem(400, f"tokens: the vocabulary has no token {token}", param="tokens")
        return {"prompt": await service.prepared(partial(served.decode, body.tokens))}


# -- state ---------------------------------------------------------------------------------------------------------


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        service.check_alive()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        service.check_ready()
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": hf_paged.__version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(await service.stats()), media_type=CONTENT_TYPE_LATEST)


# -- changes of the server -----------------------------------------------------------------------------------------


def _add_admin(app: FastAPI, service: Service) -> None:
    def check_allowed() -> None:
        if not service.settings.admin:
            raise Problem(403, "this route changes the server; start it with --admin-routes to allow that")

    @app.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> dict[str, str]:
        check_allowed()
        await service.call_engine(service.worker.pause(mode))
        if clear_cache:
            await service.call_engine(service.worker.call(lambda engine: engine.clear_prefix_cache()))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        check_allowed()
        await service.call_engine(service.worker.resume())
        return {"status": "resumed"}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, str]:
        check_allowed()
        await service.call_engine(service.worker.call(lambda engine: engine.clear_prefix_cache()))
        return {"status": "ok"}

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: schema.LoadAdapterRequest) -> dict[str, str]:
        check_allowed()
        await service.load_adapter(body.lora_name, body.lora_path)
        return {"status": "loaded", "name": body.lora_name}

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: schema.UnloadAdapterRequest) -> dict[str, str]:
        check_allowed()
        await service.unload_adapter(body.lora_name)
        return {"status": "unloaded", "name": body.lora_name}
