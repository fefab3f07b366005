"""transformers' continuous batching on our engine: the manager that `generate_batch` and other callers work with.

transformers' own callers keep their code: `init_continuous_batching` returns a ContinuousBatchingManager whose requests
run on a `hf_paged.Engine`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_paged.annotations import Model
from hf_paged.bridges.cb_options import engine_options, longest_request
from hf_paged.errors import EngineStopped
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import CompletionOutput, RequestOutput
from hf_paged.generation.validation import check_generation, check_generation_config
from hf_paged.threads import SteppingThread

_CACHED = "_cached_continuous_batching_manager"  # transformers' name for it
# As long as transformers waits for a full queue.
_PUT_SECONDS = 10


def init_continuous_batching(function: Callable[..., Any], model: Model, args: Any, kwargs: Any) -> PagedManager:
    """Instead of ContinuousMixin.init_continuous_batching."""
    given = inspect.signature(function).bind(model, *args, **kwargs).arguments
    config, batching = given.get("generation_config"), given.get("continuous_batching_config")
    if batching is None:
        batching = getattr(config or model.generation_config, "continuous_batching_config", None)
    cached = getattr(model, _CACHED, None)
    # A cached manager serves again only if it would be made in the same way.
    if isinstance(cached, PagedManager) and batching in (None, cached.continuous_batching_config):
        cached.set_generation_config(config)
        return cached
    if cached is not None:
        model.destroy_cached_continuous_batching_manager()
    return PagedManager(model, config, batching or ContinuousBatchingConfig())


@dataclass(slots=True)
class _Pending:
    """A request on its way to the engine, and what its outputs need."""

    request_id: str
    input_ids: list[int]
    config: Any
    streaming: bool
    times: list[list[float]] | None  # of the tokens of each output; None: they are not wanted
    created: float = field(default_factory=time.perf_counter)
    started: float = -1.0
    engine_id: str = ""  # the request's id in the engine, which no earlier request has had

    @property
    def num_outputs(self) -> int:
        return self.config.num_return_sequences or 1


class _Router(OutputRouter):
    """transformers' router, whose handlers get every result from the latest one on, in order.

    A handler goes with the last result of its request, or when its event loop has been closed.
    """

    def register(self, request_id: str, handler: Callable[[GenerationOutput], None]) -> None:
        """Must be called on the handler's event loop."""
        loop, results = asyncio.get_running_loop(), self.output_queue
        with self._lock:
            # Under both locks, so that no result comes between those that were waiting and the handler.
            with results.mutex:
                early = [output for output in results.queue if output.request_id == request_id]
                for output in early:
                    results.queue.remove(output)
            self.result_handlers[request_id] = handler, loop
            # Results are cumulative: an earlier one must not follow a later one.
            for output in early[-1:]:
                self._hand_over(output)

    def deliver(self, output: GenerationOutput) -> None:
        with self._lock:
            if output.request_id in self.result_handlers:
                self._hand_over(output)
            else:
                self.output_queue.put(output)

    def _hand_over(self, output: GenerationOutput) -> None:
        handler, loop = self.result_handlers[output.request_id]
        if output.is_finished():
            del self.result_handlers[output.request_id]
        try:
            loop.call_soon_threadsafe(handler, output)
        except RuntimeError:  # the event loop has been closed
            self.result_handlers.pop(output.request_id, None)


class PagedManager(ContinuousBatchingManager):
    """Runs the requests of transformers' continuous batching on an engine, in a thread of its own.

    Each request has the generation config that the manager has when the request is added, with the request's own
    changes. The requests of one `add_requests` join in the same step. Results equal those of `model.generate`.
    """

    def __init__(self, model: Model, generation_config: Any, continuous_batching_config: Any) -> None:
        # Not super().__init__: it chooses an attention and sizes a cache. The attributes are those its methods use.
        if getattr(model, "_device_mesh", None) is not None:
            raise ValueError("the model is spread over several devices, which hf_paged's engine does not serve")
        self.model = model.eval()
        self.continuous_batching_config = copy.deepcopy(continuous_batching_config)  # the caller may change it
        self._options = engine_options(continuous_batching_config)
        self.set_generation_config(generation_config)
        self.background_thread_status = BackgroundThreadStatus()
        self.output_router = _Router()
        # Requests that are to join in the same step, or the id of one that is cancelled.
        self.input_queue: queue.Queue[list[_Pending] | str] = queue.Queue(continuous_batching_config.max_queue_size)
        self.batch_processor = None
        self.warmed_up = self.is_tp_driver = True
        self._original_attn_impl = None
        self._generation_thread: threading.Thread | None = None
        self._request_lock = threading.Lock()
        self._request_counter = 0
        self._seeds, self._numbers = itertools.count(), itertools.count()
        self._engine: Engine | None = None
        self._running: dict[str, _Pending] = {}  # by request id; the thread's own
        self._stop_wanted = threading.Event()
        self._sending = threading.Lock()  # a command is queued and its call asked for before the run may end
        self._keeps_engine = False

    def set_generation_config(self, config: Any) -> None:
        """Use this config, or the model's own, for requests that are added from now on. Raises ValueError."""
        check_generation_config(config)
        config = copy.deepcopy(config if config is not None else self.model.generation_config)
        config.use_cache, config.cache_implementation = True, None  # callers of transformers' manager change them
        config.eos_token_id = self._eos(config.eos_token_id)
        if self._returns_logprobs:
            config.output_scores = True
        limits = self._options.scheduler_config.for_device(self.model.device.type)
        check_generation(self.model, RequestOptions(generation_config=config), limits, tokenizer=None)
        self.generation_config = config
        self.num_return_sequences = config.num_return_sequences or 1

    def _eos(self, given: object) -> Any:
        """transformers writes -1 for "no EOS". None means the model's own, as in `generate`."""
        if given is None:
            return None
        tokens = [token for token in (given if isinstance(given, (list, tuple)) else [given]) if token >= 0]
        return tokens or [self.model.get_input_embeddings().weight.shape[0]]  # a token that does not exist

    @property
    def _returns_logprobs(self) -> bool:
        """Return True if outputs have log-probabilities of tokens, taken after the processors as transformers does."""
        return bool(self.continuous_batching_config.return_logprobs)

    # -- start and end ------------------------------------------------------------------------------------------

    def switch_to_cb_friendly_attn(self, model: Model, auto_switch_to_flash: bool = True) -> None:
        """Do nothing: the engine has its own attention."""

    def warmup(self) -> None:
        """Do nothing: there is nothing to compile or capture beforehand."""

    def start(self) -> None:
        if self.is_running():
            return
        self.background_thread_status.clear()
        self._stop_wanted.clear()
        self._keeps_engine = False
        self._engine = self._engine or self._options.open(self.model)
        self._engine.end_run(None)  # of a session before
        self._engine.call(partial(self._obey, self._engine))  # what has been queued before
        run = partial(self._run, self._engine)
        self._generation_thread = SteppingThread(run, "hf-paged-continuous-batching", self._end_with_program)
        self._generation_thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Finish the requests, or with `hard_stop` end them with an error; then end the thread and free its memory,
        unless it is kept for the next session. Raises RuntimeError inside `pause`, which the requests would wait for.
        """
        if self._generation_thread is None:
            return
        engine = self._engine  # the thread may let it go meanwhile
        if engine is not None and engine.is_paused_here:
            raise RuntimeError("this thread has paused the manager: leave `with manager.pause()` first")
        self._keeps_engine = keep_for_next_session
        self._stop_wanted.set()
        # A command that is being queued is still obeyed.
        with self._sending:
            if engine is not None:
                engine.end_run("now" if hard_stop else "when idle")
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session:
            setattr(self.model, _CACHED, self)

    def _end_with_program(self) -> None:
        """`stop`, also inside a pause, and without waiting for a thread that queues a request."""
        self._stop_wanted.set()
        if (engine := self._engine) is not None:
            engine.end_run("now")

    def destroy(self) -> None:
        """Finish the requests, end the thread and free all memory."""
        self.stop()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def pause(self) -> AbstractContextManager[None]:
        """Run no step inside the `with` block, so that the weights may change; see `Engine.pause`."""
        if self._engine is None or not self.is_running():
            raise RuntimeError("the manager does not run, so there is nothing to pause; start it first")
        return self._engine.pause()

    # -- requests -----------------------------------------------------------------------------------------------

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: object,
    ) -> list[str]:
        """Queue requests, which join in the same step; returns their ids. See `add_request`."""
        requests: list[_Pending] = []
        for ids in inputs:
            config = self._config(max_new_tokens, None, logit_processor_kwargs)
            requests.append(self._request(ids, None, config, streaming, record_timestamps))
        self._send_to_thread(requests)
        return [request.request_id for request in requests]

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: object,
    ) -> str:
        """Queue a request; returns its id.

        logit_processor_kwargs: further fields of the request's generation config. Raises ValueError for an unknown one,
        RuntimeError if the manager takes no requests. What is wrong with the prompt is said in the request's result.
        """
        config = self._config(max_new_tokens, eos_token_id, logit_processor_kwargs)
        request = self._request(input_ids, request_id, config, streaming, record_timestamps)
        self._send_to_thread([request])
        return request.request_id

    def cancel_request(self, request_id: str) -> None:
        """End a request; it gives no further result, as in transformers."""
        self._send_to_thread(request_id)

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """As transformers' method. The callback also gets the latest result from before it was registered."""
        self.output_router.register(request_id, callback)

    def _request(
        self, input_ids: list[int], request_id: str | None, config: Any, streaming: bool, record_timestamps: bool
    ) -> _Pending:
        denial = self.background_thread_status.can_accept_new_requests()
        if denial is not None or self._stop_wanted.is_set():
            raise RuntimeError(denial or "the manager is stopping and takes no requests")
        if request_id is None:
            with self._request_lock:
                request_id = f"req_{self._request_counter}"
                self._request_counter += 1
        request = _Pending(request_id, list(input_ids), config, streaming, None)
        if record_timestamps:
            request.times = [[] for _ in range(request.num_outputs)]
        return request

    def _config(self, max_new_tokens: int | None, eos_token_id: Any, changes: dict[str, Any]) -> Any:
        """The config of a request."""
        config = copy.copy(self.generation_config)
        known = vars(GenerationConfig())
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"{name}={value!r}: a GenerationConfig has no such field")
            setattr(config, name, value)
        if max_new_tokens is not None:
            config.max_new_tokens = max_new_tokens
        if config.max_new_tokens is not None:
            config.max_length = None
        if eos_token_id is not None:
            config.eos_token_id = self._eos(eos_token_id)
        seed = self.continuous_batching_config.seed
        if seed is not None:
            config.seed = seed + next(self._seeds)
        return config

    def _send_to_thread(self, command: list[_Pending] | str) -> None:
        """Queue a command for the engine's thread. Raises queue.Full, as transformers, if the queue stays full."""
        with self._sending:
            self.input_queue.put(command, timeout=_PUT_SECONDS)
            engine = self._engine
            try:
                if engine is not None:
                    engine.call(partial(self._obey, engine))
            except EngineStopped:
                self._end_queued("the manager was stopped")

    # -- in the thread ------------------------------------------------------------------------------------------

    def _run(self, engine: Engine) -> None:
        try:
            engine.run(lambda outputs, _: self._deliver(outputs))
            # The engine may be kept for the next session, without these.
            for request in self._running.values():
                engine.abort(request.engine_id)
            self._end_all("the manager was stopped before this request was complete")
        except BaseException as error:  # whatever it is, no caller may wait for ever
            self._keeps_engine = False
            self._end_all(f"{type(error).__name__}: {error}")
            self.background_thread_status.record_fatal_error(error)
        finally:
            if not self._keeps_engine:
                engine.close()
                self._engine = None
            self.background_thread_status.mark_as_stopped()

    def _obey(self, engine: Engine) -> None:
        """Do what is queued, between two steps."""
        with suppress(queue.Empty):
            while True:
                command = self.input_queue.get_nowait()
                if isinstance(command, str):
                    self._cancel(engine, command)
                else:
                    self._join(engine, command)

    def _cancel(self, engine: Engine, request_id: str) -> None:
        request = self._running.pop(request_id, None)
        if request is not None:
            engine.abort(request.engine_id)

    def _join(self, engine: Engine, requests: list[_Pending]) -> None:
        # One by one, so that a wrong one is refused alone.
        for request in requests:
            try:
                if request.request_id in self._running:
                    raise ValueError(f"request_id {request.request_id!r} is in use; choose another one")
                config = self._bounded(engine, request.config)
                # The output of a request that was cancelled may come after its id has been given to another one.
                request.engine_id = f"{request.request_id}/{next(self._numbers)}"
                engine.add_request(request.input_ids, config, request_id=request.engine_id)
            except Exception as error:  # the caller's: it is this request's result
                self._fail(request, str(error))
            else:
                request.started = time.perf_counter()
                self._running[request.request_id] = request

    def _bounded(self, engine: Engine, config: Any) -> Any:
        """The config; one without any limit ends where the model or the memory ends, as in transformers."""
        if config.max_new_tokens is not None or config.max_length is not None:
            return config
        config = copy.copy(config)
        config.max_length = longest_request(engine, config)
        return config

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._deliver_one(output)

    def _deliver_one(self, output: RequestOutput) -> None:
        request = self._running.get(output.request_id.rpartition("/")[0])
        if request is None or request.engine_id != output.request_id:
            return  # cancelled
        if output.finished:
            del self._running[request.request_id]
        now = time.perf_counter()
        for place, completion in enumerate(output.outputs):
            if request.times is not None:
                times = request.times[place]
                times += [now] * (completion.num_tokens - len(times))
            if output.finished or request.streaming:
                self._send(request, place, completion, output)
        if output.finished:  # one that failed may have fewer outputs than were asked for
            self._fail(request, output.error or "the request failed", first=len(output.outputs))

    def _send(self, request: _Pending, place: int, completion: CompletionOutput, output: RequestOutput) -> None:
        status = RequestStatus.DECODING
        if output.finished:
            status = RequestStatus.FINISHED if output.error is None else RequestStatus.FAILED
        self.output_router.deliver(
            GenerationOutput(
                _name(request.request_id, place),
                prompt_ids=request.input_ids,
                generated_tokens=list(completion.token_ids),
                logprobs=list(completion.processed_logprobs or []) if self._returns_logprobs else [],
                error=output.error,
                status=status,
                created_time=request.created,
                lifespan=(request.started, time.perf_counter() if output.finished else -1),
                timestamps=None if request.times is None else list(request.times[place]),
            )
        )

    def _fail(self, request: _Pending, error: str, first: int = 0) -> None:
        """Deliver the error as the result of each sequence of the request, from the `first` on."""
        for place in range(first, request.num_outputs):
            self.output_router.deliver(
                GenerationOutput(
                    _name(request.request_id, place),
                    prompt_ids=request.input_ids,
                    error=error,
                    status=RequestStatus.FAILED,
                    created_time=request.created,
                    lifespan=(request.started, time.perf_counter()),
                )
            )

    def _end_all(self, error: str) -> None:
        """Fail what is unfinished, and what is still queued."""
        running, self._running = list(self._running.values()), {}
        for request in running:
            self._fail(request, error)
        self._end_queued(error)

    def _end_queued(self, error: str) -> None:
        with suppress(queue.Empty):
            while True:
                command = self.input_queue.get_nowait()
                for request in () if isinstance(command, str) else command:
                    self._fail(request, f"the manager has ended: {error}")


def _name(request_id: str, place: int) -> str:
    """Name a sequence as transformers does if a request returns several."""
    return f"{request_id}__child#{place - 1}" if place else request_id
