"""The thread that runs an engine's steps, and how the event loop talks to it.

The event loop never waits for a step: requests arrive between two of them, and it is told what has changed. Only the
latest state of a request is kept for its reader, so a slow reader makes nothing grow.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from hf_paged.errors import EngineStopped, QueueFull, RankError
from hf_paged.generation.engine.arrivals import HaltMode
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import Request
from hf_paged.serving.sampling_options import Submission
from hf_paged.threads import SteppingThread

MAX_DELAY = 0.003
"""Seconds after a step, at most, until the event loop reads its outputs. By then the next step computes in native code.
Right after a step, the event loop and the Python code of the next step would wait for each other (the interpreter's
lock)."""

_Result = TypeVar("_Result")


class Outputs:
    """Outputs of the engine for one HTTP request, as its reader on the event loop sees them. ids: of the requests, in
    order."""

    def __init__(self, ids: Sequence[str] = ()) -> None:
        self.ids = tuple(ids)
        self._changed = asyncio.Event()
        self._latest: dict[int, RequestOutput] = {}
        self._error: Exception | None = None

    async def changes(self) -> dict[int, RequestOutput]:
        """The latest outputs of the requests that have changed since the last call, by their place; waits for one.

        Empty when all requests are finished and have been returned. Raises the error of `fail`.
        """
        while not self._latest:
            if self._error is not None:
                raise self._error
            if self.is_finished:
                return {}
            # Cleared before it waits: what comes after that sets it again.
            self._changed.clear()
            await self._changed.wait()
        latest, self._latest = self._latest, {}
        return latest

    @property
    def is_finished(self) -> bool:
        raise NotImplementedError

    def put(self, place: int, output: RequestOutput) -> None:
        self._latest[place] = output
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """The reader gets the first such error when it has read what has arrived. The requests run on until `close`."""
        self._error = self._error or error
        self._changed.set()

    def close(self) -> None:
        """Abort what is unfinished; nothing waits for it."""
        raise NotImplementedError


class Job(Outputs):
    """The engine's requests for one HTTP request. If the engine's thread ends, they fail with EngineStopped.

    finals_only: the reader is woken by finished outputs only.
    """

    def __init__(self, ids: Sequence[str], close: Callable[[Job], None], *, finals_only: bool) -> None:
        super().__init__(ids)
        self._finals_only = finals_only
        self._places = {request_id: place for place, request_id in enumerate(ids)}
        self._close = close
        self._unfinished = set(ids)

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    def close(self) -> None:
        if self._unfinished:
            self._unfinished = set()
            self._close(self)

    def receive(self, output: RequestOutput) -> None:
        if self._finals_only and not output.finished:
            return
        if output.finished:
            self._unfinished.discard(output.request_id)
        self.put(self._places[output.request_id], output)

    def engine_stopped(self, error: EngineStopped) -> None:
        self._unfinished = set()  # nothing is left to abort
        self.fail(error)


class EngineWorker:
    """Owns the thread. Its methods are called on the event loop that `start` was called on.

    engine: used by no other thread from `start` on; closed when the thread ends. max_in_flight: requests that run or
    wait. on_death: called on the event loop if an error ends the thread. on_output: called on the event loop with the
    latest outputs, of requests that were abandoned too.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_in_flight: int,
        on_death: Callable[[BaseException], None] = lambda error: None,
        on_output: Callable[[Mapping[str, RequestOutput]], None] = lambda outputs: None,
    ) -> None:
        self._engine = engine
        self._max_in_flight = max_in_flight
        self._on_death = on_death
        self._on_output = on_output
        self._numbers = itertools.count()  # safe in several threads
        self._jobs: dict[str, Job] = {}  # by request id; the event loop's
        self._loop: asyncio.AbstractEventLoop | None = None
        # A thread of its own kind: a program that ends must not end it in the middle of torch's code.
        self._thread = SteppingThread(self._run, "hf-paged-engine", self.end)
        self._news: dict[str, RequestOutput] = {}  # not delivered to the event loop yet
        self._news_lock = threading.Lock()
        self._is_stopping = False
        self.error: BaseException | None = None
        engine.when_ranks_fail(self._lose)

    # -- on the event loop --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    @property
    def num_in_flight(self) -> int:
        return len(self._jobs)

    def prepare(self, submissions: Sequence[Submission]) -> list[Request]:
        """The longer part of adding requests, in any thread. Raises what `Engine.add_request` does."""
        try:
            return [
                self._engine.prepare_request(prompt, replace(options, request_id=f"req-{next(self._numbers)}"))
                for prompt, options in submissions
            ]
        except EngineStopped:
            raise self._stopped() from self.error

    def open(self, requests: Sequence[Request], *, finals_only: bool = False, is_more: bool = False) -> Job:
        """Add all of these requests, or none. finals_only: see Job. is_more: they belong to an answer that has begun,
        which max_in_flight does not end.

        Raises what `Engine.submit` does, and QueueFull beyond max_in_flight.
        """
        if len(self._jobs) + len(requests) > self._max_in_flight and not is_more:
            raise self.full()
        self._check_open()
        job = Job([request.request_id for request in requests], self._abandon, finals_only=finals_only)
        try:
            self._engine.submit(requests)
        except EngineStopped:
            raise self._stopped() from self.error
        # After they are queued, so that a refusal leaves nothing behind.
        self._jobs.update(dict.fromkeys(job.ids, job))  # their first outputs are read later, on this event loop
        return job

    def full(self) -> QueueFull:
        return QueueFull(f"{len(self._jobs)} requests run or wait, and {self._max_in_flight} may; send it again later")

    async def call(self, what: Callable[[Engine], _Result]) -> _Result:
        """Have the engine's thread call `what` between two steps; returns the result. Raises EngineStopped."""
        self._check_open()
        return await self._result(self._engine.call(lambda: what(self._engine)))

    @property
    def is_paused(self) -> bool:
        """True from the beginning of `pause` to `resume`."""
        return self._engine.is_halted

    async def pause(self, mode: HaltMode, *, ends_kept: bool = False) -> bool:
        """Run no further step. Requests in flight are aborted, or awaited ("wait"), or kept for `resume` ("keep").

        ends_kept: "wait" awaits those, too, that a pause has kept. Returns False if `resume` comes before it begins.
        """
        self._check_open()
        has_begun = await self._result(self._engine.halt(mode, ends_kept=ends_kept))
        # Before the caller hears of the pause: a delivery that is planned for later has the last outputs.
        self._deliver()
        return has_begun

    def resume(self) -> None:
        self._check_open()
        self._engine.go_on()

    def abort(self, ids: Sequence[str]) -> list[str]:
        """Abort requests by the engine's ids, or all if there are none, and return those that were in flight. Their
        readers get what has been generated."""
        return [request_id for request_id in ids or list(self._jobs) if self._engine.abort(request_id)]

    def end(self) -> None:
        """Begin `stop`: after the step in progress, readers of unfinished requests get EngineStopped."""
        # Before the thread is told, so that nothing is added behind it.
        self._is_stopping = True
        self._engine.end_run()

    async def stop(self) -> None:
        """Abort everything, close the engine and end the thread. Idempotent."""
        self.end()
        await asyncio.to_thread(self._thread.join)

    def join(self) -> None:
        """`stop` for callers that cannot await it; from any thread."""
        self.end()
        self._thread.join()

    def _lose(self, reason: str) -> None:
        """Another process without which no step can run has failed; from any thread. The thread ends with this error,
        as soon as it can."""
        self.error = self.error or RankError(reason)
        self._engine.end_run(self.error)

    def _check_open(self) -> None:
        if self._is_stopping:
            raise self._stopped()

    def _stopped(self) -> EngineStopped:
        error = self.error
        stopped = EngineStopped("the server is stopping" if error is None else f"{type(error).__name__}: {error}")
        stopped.__cause__ = error
        return stopped

    async def _result(self, future: Future[_Result]) -> _Result:
        """The result of a future of the engine, which is not cancelled with the caller: the thread sets it anyway."""
        wrapped = asyncio.wrap_future(future)
        wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, also if nothing awaits it
        try:
            return await asyncio.shield(wrapped)
        except EngineStopped:
            raise self._stopped() from self.error

    def _abandon(self, job: Job) -> None:
        for request_id in job.ids:
            # First, so that its last output finds no reader.
            self._jobs.pop(request_id, None)
            self._engine.abort(request_id)

    def _deliver(self) -> None:
        with self._news_lock:
            # Only the exchange is locked: the thread must not wait for readers.
            news, self._news = self._news, {}
        if not news:  # they have been delivered earlier than planned
            return
        self._on_output(news)
        for request_id, output in news.items():
            job = self._jobs.get(request_id)
            if job is not None:
                if output.finished:
                    del self._jobs[request_id]
                job.receive(output)

    def _all_ended(self, reason: EngineStopped) -> None:
        # What has been computed first: readers get it before the error.
        self._deliver()
        for job in set(self._jobs.values()):
            job.engine_stopped(reason)
        self._jobs.clear()
        if self.error is not None:
            self._on_death(self.error)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._engine.run(self._receive)
        except BaseException as error:  # whatever it is, no request may wait for ever
            self.error = self.error or error
        # From now on requests are refused: no step would compute them.
        self._is_stopping = True
        reason = self._stopped()
        try:
            self._engine.close()
        except Exception as failure:  # after an error it may be in any state; its readers must hear of the first one
            reason.add_note(f"closing the engine failed too: {failure!r}")
        self._tell(lambda: self._all_ended(reason))

    def _receive(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        with self._news_lock:
            # One call for all that comes until it runs.
            is_due = bool(outputs) and not self._news
            self._news.update((output.request_id, output) for output in outputs)
        if is_due:
            delay = min(MAX_DELAY, seconds / 4)
            # The event loop's clock ticks in milliseconds: with a shorter delay, it would merge short steps.
            goes_on = self._engine.has_unfinished_requests()
            self._tell(self._deliver, after=delay if delay >= 0.001 and goes_on else 0.0)

    def _tell(self, callback: Callable[..., Any], *, after: float = 0.0) -> None:
        """after: seconds until the event loop calls it."""
        if self._loop is not None and not self._loop.is_closed():
            if after:
                self._loop.call_soon_threadsafe(self._loop.call_later, after, callback)
            else:
                self._loop.call_soon_threadsafe(callback)
