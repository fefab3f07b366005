"""The service behind the routes: it takes requests of one model to its engine's thread, and counts and logs them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from transformers import GenerationConfig

from hf_paged.annotations import Tokenizer
from hf_paged.features.adapters.adapters import BASE, without_adapters
from hf_paged.features.grammar.vocabulary import vocabulary_of
from hf_paged.features.ranks.ranks import num_ranks
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.engine.stats import EngineStats
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import Request as EngineRequest
from hf_paged.serving.adapter_files import AdapterFile, check_adapter
from hf_paged.serving.adapters import load_into, read_adapter, trial_logits, unload_adapter
from hf_paged.serving.answers import JobAnswer, Opened, Outcome, refusals
from hf_paged.serving.attachments import NOTHING, Attached, Attachments
from hf_paged.serving.connections import unless_gone
from hf_paged.serving.disagreements import of_adapter
from hf_paged.serving.forms import Form
from hf_paged.serving.grammars import Grammars
from hf_paged.serving.live import Live
from hf_paged.serving.metrics import Metrics
from hf_paged.serving.middleware import client_of
from hf_paged.serving.problems import CLIENT_GONE, Problem, draining, overdue
from hf_paged.serving.recipe import Recipe
from hf_paged.serving.sampling_options import Submission
from hf_paged.serving.schema import Message
from hf_paged.serving.served import ServedModel
from hf_paged.serving.settings import Settings
from hf_paged.serving.tasks import embedding_of
from hf_paged.serving.tracing import RequestSpan
from hf_paged.serving.weight_updates import WeightUpdates
from hf_paged.serving.worker import EngineWorker

if TYPE_CHECKING:
    from hf_paged.serving.speech import Task
    from hf_paged.serving.transcriber import Transcriber

log = logging.getLogger("hf_paged.serving")

_Result = TypeVar("_Result")
# One row a second is enough for curves, and does not slow steps down.
_TICK = 1.0  # seconds between two rows of the live page
# One line each ten seconds: some thousand lines a day.
_LOG_TICKS = 10
_TRIAL_SECONDS = 10.0  # for one token, computed before all waiting requests
_LONG = 2**17  # bytes; a larger body may take long to tokenize


class Service:
    """One model behind the routes. Use it only on the event loop on which `start` was called.

    `stop` closes the engine. `on_death` is called on the event loop if the engine's thread ends with an error.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        adapters: Mapping[str, str] | None = None,
        extractor: Any = None,
        processor: Any = None,
    ) -> None:
        """adapters: the names of the model's adapters, with their folders. extractor: extracts audio features, for a
        model of speech. processor: the model's processor, for a model that takes images, audio or videos."""
        self.settings = settings
        self._num_ranks = num_ranks(engine.model)
        processor = processor if self._num_ranks == 1 else None  # media are for one rank
        self.served = ServedModel.of(
            engine.model, tokenizer, settings, created=int(time.time()), processor=processor, task=engine.task
        )
        # After the tokenizer is known: an adapter's files are compared with its template and its tokens.
        for name, folder in (adapters or {}).items():
            self._add_adapter(name, folder)
        self.metrics = Metrics(self.served.name)
        self.live = Live(engine, self.served, self.metrics)
        self._engine = engine
        self.worker = EngineWorker(
            engine,
            max_in_flight=settings.limits.in_flight,
            on_death=self._died,
            on_output=self._observe,
        )
        self.weights = WeightUpdates(engine, self.worker, settings.weights_folders)
        self.is_draining = False
        # The model is suspect if a request has failed since the last trial.
        self._is_suspect, self._trying = False, asyncio.Lock()
        self.on_death: Callable[[BaseException], None] = lambda error: None
        # Threads, so that long prompts delay neither the event loop nor short ones. A tokenizer written in Python has
        # one thread only, because it is not thread-safe.
        self._tokenizing = ThreadPoolExecutor(1, "hf-paged-tokenizer")
        has_backend = hasattr(tokenizer, "backend_tokenizer")
        self._tokenizing_long = ThreadPoolExecutor(1, "hf-paged-tokenizer-long") if has_backend else self._tokenizing
        # Two more, so that images of many pixels delay neither small ones nor texts.
        self._processing, self._processing_long = (
            ThreadPoolExecutor(1, f"hf-paged-processor{suffix}") if has_backend else self._tokenizing
            for suffix in ("", "-long")
        )
        self._attachments = Attachments(settings, self.served.kinds, processor)
        marks = self.served.answers.special_marks(tokenizer)
        self._grammars = Grammars(
            partial(vocabulary_of, tokenizer, marks),
            max_bytes=settings.limits.grammar,
            seconds=settings.limits.grammar_seconds,
        )
        self._num_preparing = 0
        self.transcriber = self._transcriber(extractor)
        """None if the model does not transcribe audio files."""
        self._reporter: asyncio.Task[None] | None = None

    def _transcriber(self, extractor: Any) -> Transcriber | None:
        if extractor is None:
            return None
        # Imported here, because these modules load much of transformers that a model of text does not need.
        from hf_paged.serving.speech import Speech
        from hf_paged.serving.transcriber import Transcriber

        served = self.served
        if not Speech.is_spoken_to(served.model, served.tokenizer):
            return None
        speech = Speech(served.model, served.tokenizer, extractor, max_length=self.settings.max_model_len)
        return Transcriber(speech, served, self.worker, self._place)

    async def start(self) -> None:
        self.worker.start()
        self._reporter = asyncio.create_task(self._report())

    async def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
        # First, so that no request waits for the threads that are shut down below.
        await self.worker.stop()
        await asyncio.to_thread(self._attachments.close)
        for each in (self._tokenizing, self._tokenizing_long, self._processing, self._processing_long):
            each.shutdown(wait=True)
        if self.transcriber is not None:
            self.transcriber.close()
        await asyncio.get_running_loop().run_in_executor(None, self._grammars.close)

    def check_alive(self) -> None:
        """Raise Problem (503) if the engine's thread has ended."""
        if not self.worker.is_alive:
            error = self.worker.error
            cause = "" if error is None else f": {type(error).__name__}: {error}"
            raise Problem(503, f"the engine has stopped{cause}", code="engine_stopped")

    def check_open(self) -> None:
        """Raise Problem (503) if the server takes no requests."""
        # First, because its error gives the cause.
        self.check_alive()
        if self.is_draining:
            raise draining()

    def check_ready(self) -> None:
        """Raise Problem (503) if new requests should go elsewhere."""
        self.check_open()
        if self.worker.is_paused:
            raise Problem(503, "the server is paused; requests wait for /resume", code="paused")

    async def check_works(self) -> None:
        """Raise Problem (503) if a request has failed, and then a trial of the model without adapters fails too."""
        if not self._is_suspect or self.worker.is_paused:  # in a pause, a trial waits for its end
            return
        async with self._trying:
            # Cleared before the trial, because a request that fails meanwhile has to set it again.
            was_suspect, self._is_suspect = self._is_suspect, False
            try:
                async with asyncio.timeout(_TRIAL_SECONDS):
                    if was_suspect:
                        await self._try_model()
            except BaseException as error:
                self._is_suspect = True
                if isinstance(error, TimeoutError):
                    raise _broken(f"a trial has not ended within {_TRIAL_SECONDS:g} seconds") from None
                raise

    async def _try_model(self) -> None:
        """Compute one token. Raises Problem (503) if that fails."""
        if self.transcriber is not None:  # such a model needs audio beside its text
            try:
                await self.worker.call(lambda engine: _tried(engine.model))
            except Exception as error:  # of the model
                raise _broken(f"{type(error).__name__}: {error}") from error
            return
        config: Any = GenerationConfig(max_new_tokens=1, do_sample=False, num_beams=1, num_return_sequences=1)
        # This request runs before all waiting ones, because a load balancer that asks decides by the answer whether the
        # server gets requests.
        options = RequestOptions(adapter=BASE, priority=-(2**31), attention_mask=[1])
        if self.served.task == "generate":
            options = replace(options, generation_config=config)
        else:
            options = replace(options, task=embedding_of(self.served))
        with refusals():
            requests = await asyncio.to_thread(partial(self.worker.prepare, [Submission([0], options)]))
            # `is_more` admits the trial even if the server is full, because a full server may work well.
            job = self.worker.open(requests, finals_only=True, is_more=True)
            with closing(job):
                (output,) = (await job.changes()).values()
        if output.error is not None:
            raise _broken(output.error)

    def _observe(self, outputs: Mapping[str, RequestOutput]) -> None:
        self.metrics.observe(outputs)
        # Either the request or the model is at fault; a later trial of the base model tells which.
        self._is_suspect = self._is_suspect or any(output.error is not None for output in outputs.values())

    def drain(self) -> None:
        """Take no further requests, and let the others finish, paused ones included."""
        self.is_draining = True
        self.weights.drain()

    async def _prepared(self, what: Callable[[], _Result], request: Request, attached: Attached = NOTHING) -> _Result:
        """Run work that tokenizes or processes media in a thread, and wait for its result."""
        # Four threads, so that long work delays only work of its kind.
        if attached is not NOTHING:
            threads = self._processing_long if attached.is_long else self._processing
        else:
            threads = self._tokenizing_long if request.state.body_bytes > _LONG else self._tokenizing
        return await asyncio.get_running_loop().run_in_executor(threads, what)

    async def answer(
        self,
        make_recipe: Callable[[Attached], Recipe],
        form_of: Callable[[Recipe, Any, str, int], Form],
        name: str,
        request: Request,
        messages: Callable[[], Sequence[Message]] = list,
    ) -> Response:
        """Queue the requests of a recipe. Raises Problem if it cannot be served. name: the beginning of the answer's
        id. messages: their media are read and passed to `make_recipe`."""
        created, stack = int(time.time()), ExitStack()

        def make(attached: Attached) -> Opened:
            recipe = make_recipe(attached)
            tokenizer, answer_id = self.served.tokenizer, f"{name}-{request.state.request_id}"
            form = form_of(recipe, tokenizer, answer_id, created)
            return Opened(recipe, None, form.reading(recipe, tokenizer), form)

        return await self._answer(partial(self._open, make, request, messages, stack), name, request, stack.close)

    async def transcribe(self, transcriber: Transcriber, task: Task, request: Request) -> Response:
        """Begin to transcribe the file of a request; raises Problem if it cannot be served."""
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        return await self._answer(partial(transcriber.open, request, body, task), "transcription", request)

    async def _answer(
        self,
        open_it: Callable[[], Awaitable[Opened]],
        name: str,
        request: Request,
        on_end: Callable[[], None] = lambda: None,
    ) -> Response:
        """Return an answer. on_end: called when it has ended, or when none could begin."""
        # If no answer begins, this frees the memory of media; otherwise the answer does so at its end.
        with ExitStack() as stack:
            stack.callback(on_end)
            answer = await self._begun(open_it, name, request, on_end)
            if isinstance(answer, JobAnswer):
                stack.pop_all()
        return answer

    async def _begun(
        self, open_it: Callable[[], Awaitable[Opened]], name: str, request: Request, on_end: Callable[[], None]
    ) -> Response:
        began, request_id = asyncio.get_running_loop().time(), request.state.request_id
        # The limit counts from the arrival, so that it includes tokenizing and media.
        limit = self.settings.limits.request_seconds
        ends_at = None if limit is None else began + limit
        self.check_open()
        span = RequestSpan(name, request.headers)
        try:
            opened = await self._opened(open_it, request, ends_at)
        except Problem as problem:
            log.info("request=%s refused status=%d reason=%r", request_id, problem.status, problem.message)
            span.refused(problem.status, problem.message)
            raise
        except BaseException:
            span.refused(500, "the request was not queued")
            raise
        if opened is None:
            log.info("request=%s status='disconnected' before it was queued", request_id)
            span.refused(CLIENT_GONE, "disconnected")
            return Response(status_code=CLIENT_GONE)
        recipe = opened.recipe
        span.accepted(recipe, f"{name}-{request_id}")

        def ended(outcome: Outcome) -> None:
            on_end()
            seconds = asyncio.get_running_loop().time() - began
            span.ended(outcome, seconds)
            _log_end(request_id, recipe, outcome, seconds)

        return JobAnswer(*opened, ends_at=ends_at, on_end=ended)

    async def tokenized(
        self, what: Callable[[Attached], _Result], request: Request, messages: Sequence[Message] = ()
    ) -> _Result | None:
        """Return the result of work that tokenizes, for a request that generates nothing; None if the client has gone.
        messages: their media are read and passed to `what`. Raises Problem."""

        async def work() -> _Result:
            # This work takes a place although it generates nothing, because thousands of texts would delay requests.
            with self._place(), ExitStack() as stack:
                attached = await self._attachments.read(messages, stack, client_of(request))
                return await self._prepared(partial(what, attached), request, attached)

        with refusals():
            return await unless_gone(work(), request.receive)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Count a request that is being prepared as one in flight. Raises QueueFull if there are too many."""
        if self.worker.num_in_flight + self._num_preparing >= self.settings.limits.in_flight:
            raise self.worker.full()
        self._num_preparing += 1
        try:
            yield
        finally:
            self._num_preparing -= 1

    async def _opened(
        self, open_it: Callable[[], Awaitable[Opened]], request: Request, ends_at: float | None
    ) -> Opened | None:
        """Open the answer; None if the client has gone meanwhile.

        Raises Problem, also if the answer is not open at `ends_at`. An open answer watches its deadline itself.
        """
        with refusals():
            try:
                async with asyncio.timeout_at(ends_at):
                    return await unless_gone(open_it(), request.receive)
            except TimeoutError:
                raise overdue() from None

    async def _open(
        self,
        make: Callable[[Attached], Opened],
        request: Request,
        messages: Callable[[], Sequence[Message]],
        stack: ExitStack,
    ) -> Opened:
        """Prepare an answer, and give its requests to the engine. make: makes all parts of the answer but the job. It
        is called before the job is opened, because it may fail. stack: closed when the answer has ended."""
        with self._place():
            # Before the turn, because fetching and decoding may wait long.
            attached = await self._attachments.read(messages(), stack, client_of(request))
            async with self._attachments.turn(attached):
                parts, requests = await self._requests(partial(make, attached), request, attached)
                # Within the turn, so that only few requests at a time hold tensors for which there may be no room.
                await self._attachments.keep(parts.recipe.inputs, stack)
        if not requests:
            return parts
        return parts._replace(job=self.worker.open(requests, finals_only=parts.recipe.reads_once))

    async def _requests(
        self, make: Callable[[], Opened], request: Request, attached: Attached
    ) -> tuple[Opened, list[EngineRequest]]:
        def prepare() -> tuple[Opened, list[EngineRequest] | None]:
            # Both in one piece of work, so that a request queues for a thread once.
            parts = make()
            is_free = parts.recipe.constraint is None
            return parts, self.worker.prepare(parts.recipe.submissions) if is_free else None

        parts, requests = await self._prepared(prepare, request, attached)
        if requests is None:
            recipe = parts.recipe.constrained(await self._grammars.compiled(parts.recipe.constraint))
            requests = await self._prepared(partial(self.worker.prepare, recipe.submissions), request)
        return parts, requests

    async def call_engine(self, what: Callable[[Engine], _Result]) -> _Result:
        """Have the engine's thread call `what` between two steps. Its refusals, such as ValueError, become Problems."""
        with refusals():
            return await self.worker.call(what)

    async def stats(self) -> EngineStats:
        """Return the engine's figures without waiting for a step. Raises Problem (503) if the engine has stopped."""
        self.check_alive()
        return await asyncio.to_thread(self._engine.stats)

    async def live_body(self, *, with_history: bool) -> tuple[str, bytes]:
        """Return `Live.body`. Raises Problem (503) if the engine has stopped."""
        self.check_alive()
        return await asyncio.to_thread(partial(self.live.body, with_history=with_history))

    # -- adapters -----------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter. Raises Problem if that fails; the model is then unchanged."""
        self._check_one_rank()
        if name in (BASE, *self.settings.names, *self.served.adapters):
            raise Problem(400, f"the model name {name!r} is taken; unload it, or choose another one", param="lora_name")
        # Outside of the engine's thread, because reading may take seconds, and steps continue meanwhile.
        try:
            check_adapter(folder)
            file = await self.read_adapter(folder)
        except ValueError as error:
            raise Problem(400, str(error), param="lora_path") from error
        await self.call_engine(lambda engine: load_into(engine, name, file))
        # Only now, so that no request names it before it is loaded.
        self._add_adapter(name, folder)

    async def read_adapter(self, folder: str) -> AdapterFile:
        """Read an adapter's files while steps run. Raises ValueError."""
        return await asyncio.to_thread(read_adapter, self._engine.model, folder)

    def _add_adapter(self, name: str, folder: str) -> None:
        self.served.adapters[name] = folder
        for each in of_adapter(folder, self.served.tokenizer, self.served.chat_template):
            log.warning("adapter %r: %s", name, each)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that use it end with an error. Raises Problem (404) for an unknown name."""
        self._check_one_rank()
        if name not in self.served.adapters:
            raise Problem(404, f"no adapter {name!r} is loaded", param="lora_name", code="model_not_found")
        # First, so that no further request names it.
        del self.served.adapters[name]
        await self.call_engine(lambda engine: unload_adapter(engine.model, name))

    def _check_one_rank(self) -> None:
        if self._num_ranks > 1:
            raise Problem(
                400, f"the model is on {self._num_ranks} ranks, which load adapters at the start only (--adapter)"
            )

    # -- in the background --------------------------------------------------------------------------------------

    def _died(self, error: BaseException) -> None:
        log.critical("the engine's thread has ended: %s: %s", type(error).__name__, error, exc_info=error)
        self.on_death(error)

    async def _report(self) -> None:
        """While steps run, make a row for the live page each second, and a line in the log every ten seconds."""
        # A row or line shows the difference to the one before it.
        before, last, then = await self.stats(), 0, time.monotonic()
        for tick in count(1):
            await asyncio.sleep(_TICK)
            try:
                stats = await self.stats()
            except Problem:  # the engine has stopped, which is logged elsewhere
                return
            if stats.steps > last:
                self.live.note(stats)
            last = stats.steps
            if tick % _LOG_TICKS:
                continue
            now = time.monotonic()
            if stats.steps > before.steps:
                log.info(
                    "running=%d waiting=%d swapped=%d kv_used=%.1f%% generated=%.1f tokens/s prompts=%.1f tokens/s "
                    "prefix_hits=%.1f%%",
                    stats.num_running,
                    stats.num_waiting,
                    stats.num_swapped,
                    100 * stats.blocks_used / stats.num_blocks,
                    (stats.generated_tokens - before.generated_tokens) / (now - then),
                    (stats.prompt_tokens - before.prompt_tokens) / (now - then),
                    100 * stats.prefix_cache_hit_rate,
                )
            before, then = stats, now


def _tried(model: Any) -> None:
    with without_adapters(model):
        trial_logits(model)


def _broken(reason: str) -> Problem:
    return Problem(503, f"the model computes no tokens: {reason}", code="model_fails")


def _log_end(request_id: str, recipe: Recipe, outcome: Outcome, seconds: float) -> None:
    if outcome.cause is not None:
        log.error("request=%s failed: %r", request_id, outcome.status, exc_info=outcome.cause)
    log.info(
        "request=%s model=%s status=%r prompt_tokens=%d cached_tokens=%d completion_tokens=%d finish=%s preemptions=%d "
        "queue=%s first_token=%s seconds=%.3f user=%r",
        request_id,
        recipe.model,
        outcome.status,
        outcome.prompt_tokens,
        outcome.cached_tokens,
        outcome.completion_tokens,
        ",".join(outcome.finish_reasons) or "-",
        outcome.preemptions,
        _seconds(outcome.queue_seconds),
        _seconds(outcome.first_token_seconds),
        seconds,
        recipe.user,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
