"""The routes. Each is a few lines: the request is checked by its schema, and the service does the work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response

import hf_paged
from hf_paged.serving import live_replies, message_replies, replies, response_replies, schema
from hf_paged.serving.attachments import Attached
from hf_paged.serving.decisions import DecisionForm, DecisionRequest, decision_recipe
from hf_paged.serving.embeddings import EmbeddingForm, EmbeddingRequest, embedding_recipe
from hf_paged.serving.forms import ChatForm, CompletionForm
from hf_paged.serving.invalid import invalid, not_json
from hf_paged.serving.labels import ClassifyForm, ClassifyRequest, classify_recipe
from hf_paged.serving.message_form import MessageForm
from hf_paged.serving.messages import CountRequest, MessagesRequest
from hf_paged.serving.messages import chat_of as message_chat
from hf_paged.serving.middleware import Gate
from hf_paged.serving.openapi import ANTHROPIC_ERRORS, ERRORS, answers, described
from hf_paged.serving.page_files import PAGE_FILES, page_file
from hf_paged.serving.problems import CLIENT_GONE, Problem, body_for, not_served
from hf_paged.serving.ranking import RerankForm, RerankRequest, ScoreForm, ScoreRequest, pairs_recipe
from hf_paged.serving.recipe import Recipe, chat_prompt, chat_recipe, completion_recipe
from hf_paged.serving.refusals import check_messages
from hf_paged.serving.response_form import ResponseForm
from hf_paged.serving.responses import ResponsesRequest, chat_of
from hf_paged.serving.served import ServedModel
from hf_paged.serving.service import Service
from hf_paged.serving.settings import AUDIO_PATHS
from hf_paged.serving.tasks import ResultsForm, TaskRequest

if TYPE_CHECKING:
    from hf_paged.serving.transcriber import Transcriber

# Routes of other servers: what to do instead.
_ELSEWHERE = {
    **dict.fromkeys(AUDIO_PATHS, "it needs a speech model of Whisper's kind, and this model is another one"),
    "/v1/images/generations": "this server generates text from text",
    "/v1/systemone": "use /v1/decisions",
    **dict.fromkeys(("/v1/files", "/v1/batches"), "`hf-paged run --input FILE` answers a file of requests"),
    "/sleep": "stop the server instead",
    "/wake_up": "start the server instead",
}


def create_app(service: Service) -> FastAPI:
    """Make the application of a service. Its lifespan starts and stops the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:  # a server that is forced to end cancels this
            await service.stop()

    app = FastAPI(
        title="hf-paged",
        version=hf_paged.__version__,
        lifespan=lifespan,
        docs_url=None,  # it loads scripts from elsewhere
        redoc_url=None,
        responses=ERRORS,
    )
    # FastAPI's own description knows neither errors, nor events, nor keys.
    app.openapi = partial(described, app, service.settings)  # type: ignore[method-assign]
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    # Filled below. Paths that clients invent have one name in the metrics, or these would grow without end.
    known: set[str] = set()
    app.add_middleware(
        Gate,
        settings=service.settings,
        on_answer=lambda path, status: service.metrics.count_answer(path if path in known else "other", status),
    )
    _add_completions(app, service)
    for task in _TASKS:
        _add_task(app, service, task)
    _add_tokens(app, service)
    _add_state(app, service)
    _add_page(app, service)
    _add_admin(app, service)
    if service.transcriber is not None:
        _add_audio(app, service, service.transcriber)
    for path, remedy in _ELSEWHERE.items():  # after those that are served
        answer = partial(_elsewhere, path, remedy)
        app.api_route(path, methods=["GET", "POST"], include_in_schema=False)(answer)
    # Last, when all routes are there.
    known |= {str(route.path) for route in app.routes if hasattr(route, "path")}
    return app


async def _elsewhere(path: str, remedy: str) -> Response:
    raise not_served(f"{path} is not served; {remedy}")


# -- errors --------------------------------------------------------------------------------------------------------


async def _on_problem(request: Request, problem: Problem) -> Response:
    return JSONResponse(body_for(request.url.path, problem), problem.status, headers=problem.headers)


async def _on_invalid(request: Request, error: RequestValidationError) -> Response:
    if isinstance(error.body, bytes):
        return await _on_problem(request, not_json(request.headers.get("content-type", "")))
    return await _on_problem(request, invalid(error.errors(), error.body))


async def _on_http(request: Request, error: HTTPException) -> Response:
    message = str(error.detail)
    if error.status_code == 400 and error.__cause__ is not None:  # FastAPI's, for a body that json.loads does not take
        message = f"the body cannot be read as JSON: {error.__cause__}"
    if error.status_code == 404:
        message = f"there is no route {request.url.path}"
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
    return await _on_problem(request, Problem(error.status_code, message, headers=error.headers))


# -- completions ---------------------------------------------------------------------------------------------------


def _add_completions(app: FastAPI, service: Service) -> None:
    served = service.served

    @app.post("/v1/completions", responses=answers(replies.Completion, replies.Completion))
    async def completions(request: Request, body: schema.CompletionRequest) -> Response:
        def recipe(nothing: Attached) -> Recipe:
            return completion_recipe(body, served, request.state.key_digest)

        return await service.answer(recipe, CompletionForm, "cmpl", request)

    @app.post("/v1/chat/completions", responses=answers(replies.ChatCompletion, replies.ChatChunk))
    async def chat_completions(request: Request, body: schema.ChatRequest) -> Response:
        recipe = partial(chat_recipe, body, served, request.state.key_digest)
        return await service.answer(recipe, ChatForm, "chatcmpl", request, lambda: body.messages)

    @app.post(
        "/v1/responses", responses=answers(response_replies.ResponseObject, response_replies.ResponseEvent, ending=None)
    )
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        # Made once, for its media and for its recipe.
        chat = cache(partial(chat_of, body))

        def recipe(attached: Attached) -> Recipe:
            return chat_recipe(chat(), served, request.state.key_digest, attached)

        try:
            form = partial(ResponseForm, body)
            return await service.answer(recipe, form, "resp", request, lambda: chat().messages)
        except Problem as problem:
            if problem.param == "messages":  # the name that this route has for them
                problem.param = "input"
            raise

    answer = answers(message_replies.AnthropicMessage, message_replies.AnthropicEvent, ending=None)

    @app.post("/v1/messages", responses={**ANTHROPIC_ERRORS, **answer})
    async def messages(request: Request, body: MessagesRequest) -> Response:
        chat = cache(partial(message_chat, body))

        def recipe(attached: Attached) -> Recipe:
            return chat_recipe(chat(), served, request.state.key_digest, attached)

        return await service.answer(recipe, MessageForm, "msg", request, lambda: chat().messages)

    @app.post("/v1/messages/count_tokens", responses={**ANTHROPIC_ERRORS, **answers(message_replies.AnthropicCount)})
    async def count_tokens(request: Request, body: CountRequest) -> Response:
        chat = message_chat(body)
        served.adapter_of(body.model)
        check_messages(chat.messages)

        def count(attached: Attached) -> int:
            served.check_writes_text()
            return len(chat_prompt(chat, served, attached)[1])

        made = await service.tokenized(count, request, chat.messages)
        return Response(status_code=CLIENT_GONE) if made is None else JSONResponse({"input_tokens": made})

    @app.get("/v1/models", response_model=replies.ModelList)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service, name) for name in _names(service)]}

    @app.get("/v1/models/{name:path}", response_model=replies.ModelCard)
    async def model(name: str) -> dict[str, Any]:
        service.served.adapter_of(name)
        return _card(service, name)


class _TaskRoute(NamedTuple):
    """A route whose requests generate nothing. paths: the first one is described. name: of the answer's id."""

    paths: tuple[str, ...]
    body: type[TaskRequest]
    recipe: Callable[[Any, ServedModel, bytes | None], Recipe]
    form: type[ResultsForm]
    reply: type[replies.Reply]
    name: str


_RERANK, _SCORE = ("/v1/rerank", "/rerank", "/v2/rerank"), ("/v1/score", "/score")
_TASKS = (
    _TaskRoute(("/v1/embeddings",), EmbeddingRequest, embedding_recipe, EmbeddingForm, replies.EmbeddingList, "embd"),
    _TaskRoute(
        ("/v1/classify", "/classify"), ClassifyRequest, classify_recipe, ClassifyForm, replies.Classes, "classify"
    ),
    _TaskRoute(_RERANK, RerankRequest, pairs_recipe, RerankForm, replies.Ranking, "rerank"),
    _TaskRoute(_SCORE, ScoreRequest, pairs_recipe, ScoreForm, replies.Scores, "score"),
    _TaskRoute(("/v1/decisions",), DecisionRequest, decision_recipe, DecisionForm, replies.Decisions, "decision"),
)


def _add_task(app: FastAPI, service: Service, route: _TaskRoute) -> None:
    async def answer(request: Request, body: Any) -> Response:
        def recipe(nothing: Attached) -> Recipe:
            return route.recipe(body, service.served, request.state.key_digest)

        return await service.answer(recipe, partial(route.form, body, service.served), route.name, request)

    # FastAPI reads what a body has from the annotation.
    answer.__annotations__ = {"request": Request, "body": route.body, "return": Response}
    for path in route.paths:
        is_first = path == route.paths[0]
        app.post(path, responses=answers(route.reply), name=path, include_in_schema=is_first)(answer)


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
        "weight_version": service.weights.version,
        "task": served.task,
    }


def _add_audio(app: FastAPI, service: Service, transcriber: Transcriber) -> None:
    from hf_paged.serving.audio_request import AUDIO_FORM

    documented = answers(replies.Transcription, replies.TranscriptionEvent, ending=None)

    @app.post(AUDIO_PATHS[0], responses=documented, openapi_extra=AUDIO_FORM)
    async def transcriptions(request: Request) -> Response:
        return await service.transcribe(transcriber, "transcribe", request)

    @app.post(AUDIO_PATHS[1], responses=documented, openapi_extra=AUDIO_FORM)
    async def translations(request: Request) -> Response:
        return await service.transcribe(transcriber, "translate", request)


# -- tokens --------------------------------------------------------------------------------------------------------


def _add_tokens(app: FastAPI, service: Service) -> None:
    served = service.served

    # As a completion or a chat would encode it, so that the count is what the engine gets.
    def ids_of(body: schema.TokenizeRequest, attached: Attached) -> list[int]:
        if body.prompt is not None:
            served.check_size(body.prompt)
            return served.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        check_messages(body.messages or [])
        text = served.render(
            body.messages or [],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
            tools=body.tools or [],
        )
        return served.prompt_of(text, attached, add_special_tokens=bool(body.add_special_tokens))[0]

    @app.post("/tokenize", responses=answers(replies.Tokenized))
    async def tokenize(request: Request, body: schema.TokenizeRequest) -> Response:
        served.adapter_of(body.model)

        def answer(attached: Attached) -> bytes:
            ids = ids_of(body, attached)
            names = served.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            # Written in the thread that has tokenized: long lists would hold up the event loop.
            made = {"count": len(ids), "max_model_len": served.max_length, "tokens": ids, "token_strs": names}
            return to_json(made)

        made = await service.tokenized(answer, request, body.messages or ())
        if made is None:
            return Response(status_code=CLIENT_GONE)
        return Response(made, media_type="application/json")

    @app.post("/detokenize", response_model=replies.Detokenized)
    async def detokenize(request: Request, body: schema.DetokenizeRequest) -> Any:
        served.adapter_of(body.model)
        served.check_ids("tokens", body.tokens)
        text = await service.tokenized(lambda nothing: served.decode(body.tokens), request)
        return Response(status_code=CLIENT_GONE) if text is None else {"prompt": text}


# -- state ---------------------------------------------------------------------------------------------------------


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=replies.Status)
    async def health() -> dict[str, str]:
        service.check_alive()
        return {"status": "ok"}

    @app.get("/ready", response_model=replies.Status)
    async def ready() -> dict[str, str]:
        service.check_ready()
        await service.check_works()
        return {"status": "ready"}

    @app.get("/version", response_model=replies.Version)
    async def version() -> dict[str, str]:
        return {"version": hf_paged.__version__}

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})
    async def metrics() -> Response:
        return PlainTextResponse(service.metrics.text(await service.stats()), media_type=CONTENT_TYPE_LATEST)


# -- the live page -------------------------------------------------------------------------------------------------


def _add_page(app: FastAPI, service: Service) -> None:
    for path in PAGE_FILES:
        app.get(path, include_in_schema=False)(partial(_page_file, path))

    unchanged = {"description": "The tag is that of now."}

    @app.get("/live", responses={200: {"model": live_replies.LiveState}, 304: unchanged})
    async def live(request: Request) -> Response:
        """Return requests, block tables and counters as the last step left them, for the live page."""
        # A page that has a tag has the history too.
        tag, body = await service.live_body(with_history="if-none-match" not in request.headers)
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)


async def _page_file(path: str) -> Response:
    return page_file(path)


# -- changes of the server -----------------------------------------------------------------------------------------


def _add_admin(app: FastAPI, service: Service) -> None:
    def check_allowed(request: Request) -> None:
        if service.settings.admin_key is None:
            raise Problem(403, "this route changes the server; start it with --admin-key to allow that")
        if not request.state.is_admin:
            raise Problem(403, "this route changes the server and needs the admin key in place of an API key")

    allowed = [Depends(check_allowed)]

    @app.post("/pause", dependencies=allowed, response_model=replies.Status)
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True) -> dict[str, str]:
        await service.weights.pause(mode)
        # After the pause, so that no step fills it again.
        if clear_cache:
            await service.call_engine(lambda engine: engine.clear_prefix_cache())
        return {"status": "paused"}

    @app.post("/resume", dependencies=allowed, response_model=replies.Status)
    async def resume() -> dict[str, str]:
        service.weights.resume()
        return {"status": "resumed"}

    @app.get("/is_paused", dependencies=allowed, response_model=replies.Paused)
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": service.worker.is_paused}

    @app.post("/abort_requests", dependencies=allowed, response_model=replies.AbortStatus)
    async def abort_requests(body: schema.AbortRequests) -> dict[str, Any]:
        aborted = service.worker.abort(body.request_ids)
        unknown = sorted({*body.request_ids} - {*aborted})
        return {"status": "unknown" if unknown and not aborted else "aborted", "aborted": aborted, "unknown": unknown}

    @app.post("/update_weights", dependencies=allowed, response_model=replies.WeightStatus)
    async def update_weights(body: schema.UpdateWeightsRequest) -> dict[str, Any]:
        options = body.model_dump(include={"partial", "mode", "recompute"})
        version = await service.weights.update(body.path, body.version, **options)
        return {"status": "updated", "weight_version": version}

    @app.post("/reset_prefix_cache", dependencies=allowed, response_model=replies.Status)
    async def reset_prefix_cache() -> dict[str, str]:
        await service.call_engine(lambda engine: engine.clear_prefix_cache())
        return {"status": "ok"}

    @app.post("/v1/load_lora_adapter", dependencies=allowed, response_model=replies.AdapterStatus)
    async def load_lora_adapter(body: schema.LoadAdapterRequest) -> dict[str, str]:
        await service.load_adapter(body.lora_name, body.lora_path)
        return {"status": "loaded", "name": body.lora_name}

    @app.post("/v1/unload_lora_adapter", dependencies=allowed, response_model=replies.AdapterStatus)
    async def unload_lora_adapter(body: schema.UnloadAdapterRequest) -> dict[str, str]:
        await service.unload_adapter(body.lora_name)
        return {"status": "unloaded", "name": body.lora_name}
