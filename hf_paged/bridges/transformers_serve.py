"""`transformers serve --continuous-batching` on our engine: the manager that its HTTP handlers work with.

The routes, the fields and the texts stay those of transformers. What each request's generation config says is done for
that request.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from transformers.cli.serving import utils

from hf_paged.annotations import Tokenizer
from hf_paged.bridges.cb_options import engine_options, longest_request
from hf_paged.errors import EngineStopped, QueueFull
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import CompletionOutput
from hf_paged.serving.sampling_options import Submission
from hf_paged.serving.worker import EngineWorker


def get_manager(function: Callable[..., Any], state: Any, args: Any, kwargs: Any) -> Any:
    """Instead of GenerationState.get_manager: requests that use continuous batching get a PagedGenerateManager."""
    given = inspect.signature(function).bind(state, *args, **kwargs).arguments
    model_id = given["model_id"]
    if not given.get("use_cb", False):
        return function(state, *args, **kwargs)
    manager = state._cb_manager
    if not isinstance(manager, PagedGenerateManager) or state._cb_model_id != model_id:
        if manager is not None:
            manager.stop()
        state._cb_manager, state._cb_model_id = PagedGenerateManager(state._cb_config), model_id
    return state._cb_manager


def build_generation_config(function: Callable[..., Any], handler: Any, args: Any, kwargs: Any) -> Any:
    """Instead of BaseHandler._build_generation_config: the request's seed is its own, not one for the whole process."""
    call = inspect.signature(function).bind(handler, *args, **kwargs)
    if not call.arguments.get("use_cb", False):
        return function(handler, *args, **kwargs)
    body = call.arguments["body"]
    call.arguments["body"] = {**body, "seed": None}
    config = function(*call.args, **call.kwargs)
    config.use_cache = True  # it was switched off for transformers' own cache
    if body.get("seed") is not None:
        config.seed = body["seed"]
    return config


@dataclass(frozen=True, slots=True)
class _Answer:
    """An output as transformers' streamer reads it."""

    generated_tokens: list[int]


class _Canceller:
    """The object by which transformers' streamer cancels its request."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None

    def cancel_request(self, request_id: str) -> None:
        if self.task is not None:
            self.task.cancel()


class PagedGenerateManager(utils.BaseGenerateManager):
    """Serves the requests for one model. Its methods are called on the event loop of the server."""

    def __init__(self, cb_config: Any = None) -> None:
        self._config = cb_config
        self._model: Any = None
        self._engine: Engine | None = None
        self._worker: EngineWorker | None = None

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Start an engine with the first request, and a new one after the model has been loaded anew."""
        if self._model is model:
            return
        # The former engine goes first, because both may not fit into memory.
        self.stop()
        self._engine = engine_options(self._config).open(model)
        limit = 0 if self._config is None else self._config.max_queue_size
        self._worker = EngineWorker(self._engine, max_in_flight=limit or sys.maxsize)
        self._worker.start()
        self._model = model

    def is_alive(self) -> bool:
        return self._worker is None or self._worker.is_alive

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.join()
        self._model = self._engine = self._worker = None

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """A queue of texts and what else the parser makes of them, and a streamer with the number of tokens."""
        tokenizer = getattr(processor, "tokenizer", processor)
        changes = self._changes(tokenizer, inputs, gen_config)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Any]()
        canceller = _Canceller()
        streamer = utils.CBStreamer(
            canceller,  # type: ignore[arg-type]  # the one method that it calls
            request_id,
            tokenizer._tokenizer,
            loop,
            pieces,
            response_parser=response_parser,
        )

        async def stream() -> None:
            try:
                async with aclosing(changes):
                    async for output in changes:
                        streamer.put(_Answer(output.token_ids))  # type: ignore[arg-type]
            except Exception as error:  # whatever it is, the stream ends with the error
                pieces.put_nowait(utils._StreamError(getattr(error, "detail", None) or str(error)))
            streamer.end()

        canceller.task = task = loop.create_task(stream())
        if (handling := asyncio.current_task()) is not None:
            # The streamer hears only of a client that leaves while the answer waits for a text, not of one that leaves
            # while a text is sent. The task of the HTTP request ends in both cases.
            handling.add_done_callback(lambda _: task.cancel())
        return pieces, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict[str, Any], gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """(text, length of the prompt, generated tokens). Raises HTTPException for a request that cannot be served."""
        tokens: list[int] = []
        async with aclosing(self._changes(getattr(processor, "tokenizer", processor), inputs, gen_config)) as changes:
            async for output in changes:
                tokens = output.token_ids
        return processor.decode(tokens, skip_special_tokens=True), len(inputs["input_ids"]), tokens

    def _changes(
        self, tokenizer: Tokenizer, inputs: dict[str, Any], config: Any
    ) -> AsyncGenerator[CompletionOutput, None]:
        """Changes of the first output of a request, which is aborted if they are not read to the end.

        Lowers `config.max_new_tokens` to what the model and the memory allow: the handlers ask for 1,024 where a
        request says nothing, and read from the config whether the answer was cut off.
        """
        worker, engine = self._worker, self._engine
        if worker is None or engine is None:
            raise RuntimeError("init_cb() comes first")
        if not worker.is_alive:
            raise utils.CBWorkerDeadError(f"the engine has stopped: {worker.error}")
        room = longest_request(engine, config) - len(inputs["input_ids"])
        if room > 0 and config.max_new_tokens is not None:
            # In the handler's own config, which it reads afterwards; the request gets a copy.
            config.max_new_tokens = min(config.max_new_tokens, room)
        engine.tokenizer = tokenizer
        options = RequestOptions(generation_config=copy.deepcopy(config))
        return _run(worker, Submission(list(inputs["input_ids"]), options))


async def _run(worker: EngineWorker, submission: Submission) -> AsyncGenerator[CompletionOutput, None]:
    """Yield the growing output. Raises CBWorkerDeadError if the engine stops, HTTPException for a refused request."""
    try:
        requests = await asyncio.to_thread(worker.prepare, [submission])
        job = worker.open(requests)
        try:
            while changes := await job.changes():
                output = changes[0]
                if output.error is not None:
                    raise RuntimeError(f"the request failed: {output.error}")
                if output.outputs:
                    yield output.outputs[0]
        finally:
            job.close()
    except QueueFull as error:
        raise HTTPException(429, str(error)) from error
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    except RuntimeError as error:  # EngineStopped, or the closed engine's own
        if worker.is_alive and not isinstance(error, EngineStopped):
            raise
        raise utils.CBWorkerDeadError(str(error)) from error
