"""The thread that runs an engine's steps, and how the event loop talks to it.

The event loop never waits for a step: it leaves commands, which run between two steps, and is told what has changed.
Only the latest state of a request is kept for its reader, so a slow reader makes nothing grow.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Literal, TypeVar

from hf_paged.errors import QueueFull, RankError
from hf_paged.generation.engine.admission import RequestOptions
from hf_paged.generation.engine.engine import Engine
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import Request
from hf_paged.serving.plan import Submission

MAX_DELAY = 0.003
"""Seconds after a step, at most, until the event loop reads its outputs. By then the next step computes in native code.
Right after a step, the event loop and the Python code of the next step would wait for each other (the interpreter's
lock)."""

_Result = TypeVar("_Result")
PauseMode = Literal["abort", "wait", "keep"]


class EngineStopped(RuntimeError):
    """The engine's thread has ended; `__cause__` is the error that ended it, if it was one."""


class _Command:
    """Something for the thread to do between two steps, and the future that its caller awaits."""

    def __init__(self, call: Callable[[], Any], *, is_addition: bool = False) -> None:
        self.call = call
        self.is_addition = is_addition
        self.future: Future[Any] = Future()

    def run(self) -> None:
        try:
            result = self.call()
        except Exception as error:  # the caller's: it is raised where the command was given
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


async def _unless_cancelled(future: Future[_Result]) -> _Result:
    """The result of a future of the thread, which is not cancelled with the caller: the thread sets it in any case."""
    wrapped = asyncio.wrap_future(future)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, also if nothing awaits it
    return await asyncio.shield(wrapped)


class Job:
    """The engine's requests for one HTTP request, as its reader on the event loop sees them.

    finals_only: the reader is woken by finished outputs only.
    """

    def __init__(self, ids: Sequence[str], close: Callable[[Job], None], *, finals_only: bool) -> None:
        self.ids = tuple(ids)
        self._finals_only = finals_only
        self._places = {request_id: place for place, request_id in enumerate(ids)}
        self._close = close
        self._changed = asyncio.Event()
        self._latest: dict[int, RequestOutput] = {}
        self._unfinished = set(ids)
        self._error: Exception | None = None
        self.is_closed = False

    async def changes(self) -> dict[int, RequestOutput]:
        """The latest outputs of the requests that have changed since the last call, by their place; waits for one.

        Empty when all requests are finished and have been returned. Raises EngineStopped if the engine's thread ends,
        and the error of `fail`.
        """
        while not self._latest:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return {}
            self._changed.clear()
            await self._changed.wait()
        latest, self._latest = self._latest, {}
        return latest

    def fail(self, error: Exception) -> None:
        """The reader gets this error when it has read what has arrived. The requests run on until `close`."""
        self._error = error
        self._changed.set()

    def close(self) -> None:
        """Abort what is unfinished; nothing waits for it."""
        self.is_closed = True
        if self._unfinished:
            self._unfinished = set()
            self._close(self)

    def _receive(self, output: RequestOutput) -> None:
        if self._finals_only and not output.finished:
            return
        self._latest[self._places[output.request_id]] = output
        if output.finished:
            self._unfinished.discard(output.request_id)
        self._changed.set()

    def _engine_stopped(self, error: EngineStopped) -> None:
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
        self._thread = threading.Thread(target=self._run, name="hf-paged-engine", daemon=True)
        # The condition guards the following. It is never held during a step.
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._news: dict[str, RequestOutput] = {}  # not delivered to the event loop yet
        self._is_stopping = False
        self.error: BaseException | None = None
        # The thread's own.
        self._is_paused = False
        self._pausing: Future[None] | None = None  # a pause that has not begun: no request is added until then
        self._held: list[_Command] = []
        self._running: set[str] = set()  # ids of requests that have not finished
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
        return [
            self._engine.prepare_request(
                each.prompt_ids,
                each.config,
                RequestOptions(
                    request_id=f"req-{next(self._numbers)}",
                    priority=each.priority,
                    logits_processor=each.processors or None,
                    stopping_criteria=each.criteria or None,
                    adapter=each.adapter,
                    cache_salt=each.cache_salt,
                    logprobs=each.logprobs,
                    prompt_logprobs=each.prompt_logprobs,
                    deadline=each.deadline,
                ),
            )
            for each in submissions
        ]

    async def open(self, requests: Sequence[Request], *, finals_only: bool = False) -> Job:
        """Add all of these requests, or none. finals_only: see Job.

        Raises what `Engine.submit` does, and QueueFull beyond max_in_flight.
        """
        if len(self._jobs) + len(requests) > self._max_in_flight:
            raise self.full()
        job = Job([request.request_id for request in requests], self._abandon, finals_only=finals_only)
        self._jobs.update(dict.fromkeys(job.ids, job))
        try:
            await self._do(lambda: self._add(job, requests), is_addition=True)
        except asyncio.CancelledError:
            job.close()
            raise
        except BaseException:
            self._forget(job)
            raise
        return job

    def full(self) -> QueueFull:
        return QueueFull(f"{len(self._jobs)} requests run or wait, and {self._max_in_flight} may; send it again later")

    async def call(self, what: Callable[[Engine], _Result]) -> _Result:
        """The result of `what`, which the engine's thread calls between two steps. Raises EngineStopped."""
        return await self._do(lambda: what(self._engine))

    @property
    def is_paused(self) -> bool:
        """True from the beginning of `pause` to `resume`."""
        return self._is_paused or self._pausing is not None

    async def pause(self, mode: PauseMode) -> None:
        """Run no further step. Requests in flight are aborted, or awaited ("wait"), or kept for `resume` ("keep")."""
        await _unless_cancelled(await self._do(lambda: self._pause(mode)))

    async def resume(self) -> None:
        await self._do(self._resume)

    def resume_now(self) -> None:
        """As `resume`; nothing waits for it."""
        with suppress(EngineStopped):
            self._leave(_Command(self._resume))

    def end(self) -> None:
        """Begin `stop`: after the step in progress, readers of unfinished requests get EngineStopped."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

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
        with self._wake:
            self.error = self.error or RankError(reason)
            self._wake.notify()

    async def _do(self, call: Callable[[], _Result], *, is_addition: bool = False) -> _Result:
        command = _Command(call, is_addition=is_addition)
        self._leave(command)
        return await _unless_cancelled(command.future)

    def _leave(self, command: _Command) -> None:
        with self._wake:
            if self._is_stopping:
                raise EngineStopped("the engine has stopped") from self.error
            self._commands.append(command)
            self._wake.notify()

    def _abandon(self, job: Job) -> None:
        self._forget(job)
        with suppress(EngineStopped):  # which aborts everything
            self._leave(_Command(lambda: self._abort(job.ids)))

    def _forget(self, job: Job) -> None:
        for request_id in job.ids:
            self._jobs.pop(request_id, None)

    def _deliver(self) -> None:
        with self._wake:
            news, self._news = self._news, {}
        if not news:  # they have been delivered earlier than planned
            return
        self._on_output(news)
        for request_id, output in news.items():
            job = self._jobs.get(request_id)
            if job is not None:
                if output.finished:
                    del self._jobs[request_id]
                job._receive(output)

    def _all_ended(self, reason: EngineStopped) -> None:
        self._deliver()
        for job in set(self._jobs.values()):
            job._engine_stopped(reason)
        self._jobs.clear()
        if self.error is not None:
            self._on_death(self.error)

    # -- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                for command in commands:
                    self._obey(command)
                if self._can_step():
                    self._step()
                if self._pausing is not None and not self._engine.has_unfinished_requests():
                    self._have_paused()
            self._end(None)
        except BaseException as error:  # whatever it is, no request may wait for ever
            self._end(error)

    def _next_commands(self) -> list[_Command] | None:
        """What to do before the next step; None when the thread is to end."""
        with self._wake:
            while not (self._commands or self._can_step() or self._is_stopping or self.error):
                self._wake.wait()
            if self.error is not None:
                raise self.error
            if self._is_stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _obey(self, command: _Command) -> None:
        if command.is_addition and self._pausing is not None:
            self._held.append(command)
        else:
            command.run()

    def _can_step(self) -> bool:
        return not self._is_paused and self._engine.has_unfinished_requests()

    def _add(self, job: Job, requests: Sequence[Request]) -> None:
        if job.is_closed:  # while a pause held this back: it has been aborted already
            return
        self._engine.submit(requests)
        self._running.update(request.request_id for request in requests)

    def _abort(self, ids: Sequence[str]) -> None:
        for request_id in ids:
            self._engine.abort(request_id)

    def _step(self) -> None:
        started = time.monotonic()
        outputs = self._engine.step()
        self._running.difference_update(output.request_id for output in outputs if output.finished)
        with self._wake:
            is_due = bool(outputs) and not self._news
            self._news.update((output.request_id, output) for output in outputs)
        if is_due:
            delay = min(MAX_DELAY, (time.monotonic() - started) / 4)
            # The event loop's clock ticks in milliseconds: with a shorter delay, it would merge short steps.
            self._tell(self._deliver, after=delay if delay >= 0.001 and self._can_step() else 0.0)

    def _pause(self, mode: PauseMode) -> Future[None]:
        """The future is done when the pause has begun."""
        if self._pausing is None:
            self._pausing = Future()
        begun = self._pausing
        if mode == "abort":
            self._abort(sorted(self._running))
            while self._engine.has_unfinished_requests():
                self._step()
        if mode != "wait" or self._is_paused:
            self._have_paused()
        return begun

    def _have_paused(self) -> None:
        self._is_paused = True
        self._tell(self._deliver)
        self._go_on()

    def _resume(self) -> None:
        self._is_paused = False
        self._go_on()

    def _go_on(self) -> None:
        """A pause has begun or ended: tell those that wait for it, and queue the requests that it has held back."""
        pausing, self._pausing = self._pausing, None
        if pausing is not None:
            pausing.set_result(None)
        held, self._held = self._held, []
        for command in held:
            command.run()

    def _end(self, error: BaseException | None) -> None:
        with self._wake:
            self.error, self._is_stopping = error or self.error, True
            commands = [*self._held, *self._commands]
            self._commands.clear()
        reason = EngineStopped("the server is stopping" if error is None else f"{type(error).__name__}: {error}")
        reason.__cause__ = error
        try:
            self._engine.close()
        except Exception as failure:  # after an error it may be in any state; its readers must hear of the first one
            reason.add_note(f"closing the engine failed too: {failure!r}")
        for command in commands:
            command.future.set_exception(reason)
        if self._pausing is not None:
            self._pausing.set_exception(reason)
        self._tell(lambda: self._all_ended(reason))

    def _tell(self, callback: Callable[..., Any], *, after: float = 0.0) -> None:
        """after: seconds until the event loop calls it."""
        if self._loop is not None and not self._loop.is_closed():
            if after:
                self._loop.call_soon_threadsafe(self._loop.call_later, after, callback)
            else:
                self._loop.call_soon_threadsafe(callback)
