"""EngineLoop: the one loop of an engine. Takes in requests, runs steps, pauses, keeps deadlines, delivers outputs.

Knows requests; never prompts, options or models. `engine.py` makes the requests. Callers of `Engine.step`, streams, the
server's thread and the manager of continuous batching are its clients.

Ctrl-C may come between any two lines, in a step as in what callers ask for. So whatever has been begun may be done
again, and a record leaves its queue only when all that it stands for has been done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Literal

import torch

from hf_paged.config import SchedulerConfig
from hf_paged.errors import EngineStopped, QueueFull, described
from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.snapshots import EngineSnapshot, Watch
from hf_paged.generation.engine.stepper import Changed, Stepper
from hf_paged.generation.engine.weight_methods import WeightVersions
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import Delivered, Request
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus
from hf_paged.locks import refuse_after_fork
from hf_paged.registry import Drafting

HaltMode = Literal["abort", "wait", "keep"]
"""A halt's treatment of requests in flight: abort them, let them end, or keep all for later."""


class RequestStream(Iterator[RequestOutput]):
    """The outputs of some requests for one reader, whichever thread runs the steps; ends when all are finished.

    The reader gets the latest state of each request, once, however many steps it took. Closing the stream, from any
    thread, aborts the unfinished requests. One that is garbage collected does the same with the engine's next step.
    """

    def __init__(self, loop: EngineLoop, requests: Sequence[Request], *, finals_only: bool) -> None:
        """finals_only: finished outputs only."""
        self.requests = requests
        self.changed: Changed = {}  # since the reader last looked
        self.unfinished = set(requests)
        self.outputs: dict[Request, RequestOutput] = {}  # made, and not read yet
        self.is_closed = False
        self._loop = loop
        self._finals_only = finals_only
        self._delivered: dict[Request, Delivered] = {}

    def __next__(self) -> RequestOutput:
        output = self._loop.read(self)
        if output is None:
            raise StopIteration
        return output

    def take(self) -> None:
        """Make the outputs of what has changed. No request may change meanwhile."""
        for request in self.changed:
            if request not in self.unfinished:
                continue  # it had ended before this delivery, and the reader has its last output
            is_finished = request.metrics.finish_time is not None
            if is_finished or not self._finals_only:
                self.outputs[request] = request.output(self._delivered)
            if is_finished:
                self.unfinished.discard(request)
        self.changed.clear()

    def abandon(self) -> None:
        """Close it with the engine's next step. Takes no lock, as a finalizer must not."""
        if not self.is_closed:
            self.is_closed = True
            self._loop.drop(self.requests)

    def close(self) -> None:
        self.abandon()
        self._loop.settle()

    def __del__(self) -> None:
        self.abandon()


class Delivery:
    """Sends each request that has changed to its reader, or else to the next `Engine.step`."""

    def __init__(self) -> None:
        self.ended: Changed = {}  # between steps: aborted, failed or out of time; not delivered yet
        self._inboxes: dict[Request, Changed] = {}
        self._unclaimed: Changed = {}
        self._delivered: dict[Request, Delivered] = {}  # what the callers of `step` have got of unfinished requests

    def __bool__(self) -> bool:
        """True while something waits for a step to deliver it."""
        return bool(self.ended or self._unclaimed)

    def add(self, stream: RequestStream) -> None:
        """From now on its requests are delivered to it."""
        self._inboxes.update(dict.fromkeys(stream.requests, stream.changed))

    def has_reader(self, request: Request) -> bool:
        return request in self._inboxes

    def forget(self, requests: Sequence[Request]) -> None:
        """Deliver nothing more of these requests."""
        for request in requests:
            self._inboxes.pop(request, None)
            self._unclaimed.pop(request, None)
            self._delivered.pop(request, None)
            # Also those that ended between steps: nobody is left to read them.
            self.ended.pop(request, None)

    def deliver(self, changed: Changed, update: Callable[[Request], None]) -> Changed:
        """Deliver what a step has `changed`, which is then empty, and what has ended between steps; returns both.
        `update` is called first for each request in `changed`."""
        for request in list(changed):
            update(request)
        # A copy, because `changed` is emptied while the outputs are read from this.
        delivered = changed.copy()
        if self._inboxes:
            for request in delivered:
                self._inboxes.get(request, self._unclaimed)[request] = None
        else:
            self._unclaimed.update(delivered)
        changed.clear()
        self._deliver_ended(delivered)
        return delivered

    def _deliver_ended(self, delivered: Changed) -> None:
        while self.ended:
            # Delivered before it leaves the queue, so that an interrupt loses no output.
            request = next(iter(self.ended))
            delivered[request] = self._inboxes.get(request, self._unclaimed)[request] = None
            del self.ended[request]

    def take_unclaimed(self, delivered: Changed) -> list[RequestOutput]:
        """Outputs of all requests without a reader, and of those just delivered, as they stand now.

        Nothing may end a request meanwhile. What has ended since the delivery is delivered too: its output says that it
        is finished, and no second one may.
        """
        self._deliver_ended(delivered)
        requests = {**self._unclaimed, **delivered}
        outputs = [request.output(self._delivered) for request in requests]
        self._unclaimed.clear()
        for request, output in zip(requests, outputs):
            if output.finished:
                self._delivered.pop(request, None)
        return outputs

    def clear(self) -> None:
        self.ended.clear()
        self._unclaimed.clear()
        self._delivered.clear()


# `_door` is released before further arrivals are admitted, so that threads that add or abort wait only briefly.
_ARRIVALS_AT_ONCE = 64


class EngineLoop:
    """Takes in requests, runs steps, and ends requests, for any number of threads.

    There are two locks. `_lock` belongs to the thread that runs a step or reads outputs. `_door` is held for
    microseconds by any thread that adds or aborts a request. Invariant: queues, block tables and tokens change only in
    a step (`_is_stepping`, set under `_door` by the holder of `_lock`), or under `_door` while no step is in progress.
    What callers ask for during a step waits in `_arriving` and `_deferred` until it ends; `_settle` carries it out.
    The caller's code (processors, streamers) never runs under `_door`.

    Steps run in the thread that asks for outputs (`step`, `read`), or in one that gives itself to them (`run`). No step
    begins while a thread has paused the engine (`_pauses`), nor, in `run`, while it is halted (`_halt`).
    """

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler, runner: Runner, speculation: Drafting) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._requests: dict[str, Request] = {}  # all unfinished ones, by id
        self._delivery = Delivery()
        is_async = bool(config.async_scheduling)
        self._stepper = Stepper(scheduler, runner, self._requests, speculation, is_async=is_async)
        self._watch = Watch(scheduler, runner, self._stepper, self._requests)
        # Reentrant, because processors, streamers and handlers of signals may call the engine within a step.
        self._lock: Any = threading.RLock()
        self._door: Any = threading.RLock()
        self._work = threading.Condition(self._door)  # there is something to do for `run`
        self._pauses: list[threading.Thread] = []  # the threads that have paused the engine, one entry for each pause
        self._pause_ended = threading.Condition(self._lock)
        self._is_stepping = False
        self._code_followed = -1
        self._deferred: deque[Callable[[], None]] = deque()
        self._reserved: set[Request] = set()  # have an id and a place; their streamers are getting the prompt
        self._arriving: dict[Request, None] = {}  # not in the scheduler yet
        self._held: dict[Request, None] = {}  # came while a halt lets others end; they arrive when it has begun
        self._streams_to_end: deque[Request] = deque()  # finished; `end` of their streamers is due
        self._timed: list[tuple[float, int, Request, FinishReason]] = []  # a heap of the times at which requests end
        self._numbers = count()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._halt: Future[None] | None = None  # done when it has begun
        self._halt_mode: HaltMode = "keep"
        self._end_of_run: Literal["now", "when idle"] | BaseException | None = None
        self._closed = False
        self._prompt_tokens = 0
        self._versions = WeightVersions()
        refuse_after_fork(self, "_lock", "_door")

    # -- requests come and go -----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of these requests, or none.

        A request's `deadline` and `max_time` count from its arrival.

        Args:
            requests: What `Engine.prepare_request` has made.

        Raises:
            ValueError: For an id in use.
            QueueFull: If `max_waiting` is too small for all of them; try again later.
        """
        # Without `_door`: it reads nothing that changes.
        for request in requests:
            self._scheduler.check(request.group)
        with self._door:
            self._check_open()
            self._settle()  # streams that were given up free their places
            self._check_room(requests)
            for request in requests:
                self._requests[request.request_id] = request
                if request.streamer is None:
                    self._arrive(request)
                else:
                    self._reserved.add(request)
                for seconds, reason in request.time_limits:
                    entry = (request.group.arrival + seconds, next(self._numbers), request, reason)
                    heappush(self._timed, entry)
                self._prompt_tokens += request.prompt_length
            self._work.notify_all()
        # Outside of `_door`, because both run the streamers of callers.
        self._end_streams()
        if self._reserved:
            self._begin_streams(requests)

    def _arrive(self, request: Request) -> None:
        lets_end = self._halt is not None and not self._halt.done()
        # The reader of a stream runs steps itself, which no halt stops.
        is_held = lets_end and not self._delivery.has_reader(request)
        (self._held if is_held else self._arriving)[request] = None

    def _check_room(self, requests: Sequence[Request]) -> None:
        ids = [request.request_id for request in requests]
        for index, request_id in enumerate(ids):
            if request_id in self._requests or request_id in ids[:index]:
                raise ValueError(f"request_id {request_id!r} is in use; choose another one")
        most = self._scheduler.config.max_waiting
        # Requests that have not arrived yet count too, or a burst would pass the limit.
        waiting = self._scheduler.num_waiting + self.num_arriving
        if most is not None and waiting + len(requests) > most:
            raise QueueFull(f"{waiting} requests wait already (max_waiting={most})")

    @property
    def num_arriving(self) -> int:
        """Requests that the scheduler does not have yet."""
        return len(self._arriving) + len(self._held) + len(self._reserved)

    def _begin_streams(self, requests: Sequence[Request]) -> None:
        """Give the prompts to the streamers, which are the caller's code, and then queue the requests."""
        reserved = [request for request in requests if request in self._reserved]
        try:
            for request in reserved:
                request.begin_stream()
        except BaseException:
            self.drop(requests)
            self.settle()
            raise
        finally:
            with self._door:
                self._reserved.difference_update(reserved)
                for request in reserved:
                    if not request.group.is_finished:
                        self._arrive(request)
                    elif request.streamer is not None:  # aborted meanwhile
                        self._streams_to_end.append(request)
            self._end_streams()

    def abort(self, request_id: str) -> bool:
        """End a request in any state, without waiting for a step in progress.

        The step in progress, or else the next one, returns its last RequestOutput, with finish_reason "abort" and the
        tokens generated so far. The id may be used again after that step.

        Args:
            request_id: The request's id.

        Returns:
            False if it is unknown or finished.

        Example:
            ```python
            request_id = engine.add_request(prompt, config)
            assert engine.abort(request_id)
            [output] = engine.step()
            assert output.outputs[0].finish_reason == "abort"
            ```
        """
        with self._door:
            request = self._requests.get(request_id)
        if request is not None:
            # Noted first: a step in progress does it at its end, otherwise `settle` does it now.
            self._deferred.append(partial(self._abort, request))
            self.settle()
            self._wake()
        return request is not None

    def _wake(self) -> None:
        with self._door:
            self._work.notify_all()

    def settle(self) -> None:
        """Carry out what callers have asked for, unless a step is in progress."""
        self._settle_and(lambda: None)
        self._end_streams()

    def _settle_and(self, then: Callable[[], None]) -> None:
        """Carry out what callers have asked for, in several short holds of `_door`, and `then` in the last of them."""
        is_settled = False
        while not is_settled:
            with self._door:
                is_settled = self._settle()
                if is_settled:
                    then()
            if not is_settled:
                time.sleep(1e-4)  # a lock that is taken again at once is not given to a thread that waits

    def _settle(self) -> bool:
        """Carry out what callers have asked for, up to a limited number of arrivals. Returns whether that was all.
        Needs `_door`."""
        for _ in range(_ARRIVALS_AT_ONCE):
            if not self._arriving or self._is_stepping:
                break
            # Admitted before it leaves the queue, so that an interrupt loses no request.
            request = next(iter(self._arriving))
            try:
                self._admit(request)
            except Exception as error:  # of a policy, which must not keep those behind it from arriving
                self._fail(request, f"the policy failed: {described(error)}", error)
            self._arriving.pop(request, None)
        else:
            return False
        while self._deferred and not self._is_stepping:
            # Called before it leaves the queue: after an interrupt it is called again, which does no harm.
            self._deferred[0]()
            self._deferred.popleft()
            self._work.notify_all()
        return True

    def _admit(self, request: Request) -> None:
        """Hand a request to the scheduler, unless it is there."""
        group = request.group
        if not group.is_finished and self._scheduler.get(group.request_id) is not group:
            self._scheduler.enqueue(group)

    def _abort(self, request: Request) -> None:
        if self._requests.get(request.request_id) is request:
            self._end(request, FinishReason.ABORT, None)

    def drop(self, requests: Sequence[Request]) -> None:
        """Abort the unfinished ones of these requests, and deliver no further outputs of any. Takes no lock.

        It happens with the next step or `settle`.

        Args:
            requests: Finished or not.
        """
        self._deferred.append(partial(self._drop, requests))

    def _drop(self, requests: Sequence[Request]) -> None:
        for request in requests:
            # Aborted before the reader is forgotten, so that the last output goes to nobody else.
            self._abort(request)
        self._delivery.forget(requests)

    # -- streams ------------------------------------------------------------------------------------------------

    def follow(self, stream: RequestStream) -> None:
        """Queue the stream's requests as `submit` does. Their outputs are for it alone.

        Args:
            stream: The reader, which is closed if the requests are refused.
        """
        # Before they are queued: a step of another thread would deliver them to its own caller.
        self._delivery.add(stream)
        try:
            self.submit(stream.requests)
        except BaseException:
            stream.close()
            raise

    def read(self, stream: RequestStream) -> RequestOutput | None:
        """Return the next output of a stream; run steps until there is one, in turns with other threads.

        Args:
            stream: The reader.

        Returns:
            The latest state of one of its requests; None if all outputs have been read.
        """
        while True:
            with self._lock:
                if stream.is_closed:
                    return None
                if stream.outputs:
                    return stream.outputs.pop(next(iter(stream.outputs)))
                if stream.unfinished:
                    self._fill(stream)
                else:
                    stream.close()

    def _fill(self, stream: RequestStream) -> None:
        """Needs `_lock`."""
        if not stream.changed:
            try:
                self._step()
            except BaseException:
                stream.close()
                raise
        with self._door:  # no request ends meanwhile
            stream.take()

    def has_unfinished_requests(self) -> bool:
        """Return whether a step would have requests to compute or outputs to deliver.

        Returns:
            True until each request has ended and its last output is delivered.
        """
        return bool(self._requests or self._stepper.changed or self._delivery)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None, exception: BaseException | None = None
    ) -> None:
        """Finish a request from outside its own decoding; its output waits for the next step."""
        request.stop_all(reason)
        request.error, request.exception = error, exception
        self._scheduler.finish_group(request.group, reason)
        self._delivery.ended[request] = None
        self._close_request(request)

    def _fail(self, request: Request, error: str, exception: BaseException | None) -> None:
        self._end(request, FinishReason.ERROR, error, exception)

    def _close_request(self, request: Request) -> None:
        self._held.pop(request, None)
        if request.streamer is not None and request not in self._streams_to_end:
            self._streams_to_end.append(request)
        request.metrics = replace(
            request.metrics,
            finish_time=time.monotonic(),
            num_preemptions=request.group.num_preemptions,
            num_cached_tokens=request.group.num_cached_tokens,
            weight_versions=self._versions.since(request.metrics.start_time),
        )
        if self._requests.get(request.request_id) is request:
            # Nobody is left to read tokens that were sampled ahead.
            if len(self._requests) == 1:
                self._stepper.close()
            del self._requests[request.request_id]  # last: until then, all of this is done again

    def _end_streams(self) -> None:
        """Call `end` of the streamers of finished requests. It is the caller's code, so never under `_door`."""
        while True:
            try:
                request = self._streams_to_end.popleft()
            except IndexError:  # empty, or another thread took the last one
                return
            request.end_stream()

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step: schedule, compute and sample once for all requests that fit (PagedAttention, section 5).

        Returns:
            Snapshots of the outputs that have changed since the last call, also in steps of other callers (`generate`,
            a stream). Requests that a stream follows are left out.

        Raises:
            RuntimeError: Inside a step of this engine, if this thread has paused it or put it to sleep, and if it is
                closed.

        Example:
            ```python
            engine.add_request(prompt, config)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    print(output.outputs[0].num_tokens, output.finished)
            ```
        """
        with self._lock:
            delivered = self._step()
            # Nothing may end a request while its output is made.
            with self._door:
                outputs = self._delivery.take_unclaimed(delivered)
        return outputs

    def _step(self) -> Changed:
        """Run a step and deliver what has changed; returns the requests that have. Needs `_lock`."""
        self._check_not_stepping()
        while self._pauses:
            if self.is_paused_here:
                raise RuntimeError(
                    "this thread has paused the engine: leave `with engine.pause()` first, or call wake()"
                )
            self._pause_ended.wait()
        # Again: while it waited for the pause, others had the lock, and may have closed the engine.
        self._check_open()
        self._check_not_stepping()
        try:
            self._settle_and(self._begin_step)
            if self._scheduler.has_unfinished():
                with torch.no_grad():
                    if self._runner.look() != self._code_followed or self._scheduler.may_admit:
                        self._follow_model()
                    self._stepper.step()
        finally:
            try:
                delivered = self._delivery.deliver(self._stepper.changed, self._follow_up)
            finally:
                self._is_stepping = False
        # What was asked for during the step is done now, and not when the next one comes.
        self.settle()
        if self._watch.is_on:
            with self._door:
                self._watch.after_step(self._prompt_tokens)
        return delivered

    @property
    def is_paused_here(self) -> bool:
        """True if this thread is inside `pause`, and so must not wait for a step."""
        return threading.current_thread() in self._pauses

    # -- a thread that gives itself to the steps ------------------------------------------------------------------

    def run(self, deliver: Callable[[list[RequestOutput], float], None]) -> None:
        """Run steps as requests come, until `end_run`.

        The thread waits while there is nothing to do. Between steps it does what `call` has asked for.

        Args:
            deliver: Gets what `step` returns, and the seconds that it took.
        """
        try:
            while self._await_work():
                # Between two steps, also while the engine is halted; one leaves the queue when it is answered.
                while self._calls:
                    self._answer(*self._calls[0])
                    self._calls.popleft()
                if self._may_step:
                    began = time.monotonic()
                    outputs = self.step()
                    deliver(outputs, time.monotonic() - began)
                # After the step, which may have ended the last request that the halt waits for.
                with self._door:
                    if self._halt_is_due:
                        self._end_waiting(self._halt)
        finally:
            self._end_of_run = None

    def _answer(self, function: Callable[[], Any], future: Future[Any]) -> None:
        if future.done() or not (future.running() or future.set_running_or_notify_cancel()):
            return
        try:
            result = function()
        except BaseException as error:  # the caller's: it is raised where the call was asked for
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)

    def _await_work(self) -> bool:
        """Wait for something to do. False: `run` ends."""
        with self._door:
            while True:
                if isinstance(self._end_of_run, BaseException):
                    raise self._end_of_run
                is_idle = not self._calls and not self.has_unfinished_requests()
                if self._closed or self._end_of_run == "now" or (self._end_of_run and is_idle):
                    return False
                if self._calls or self._may_step or self._halt_is_due:
                    return True
                self._work.wait()

    @property
    def _may_step(self) -> bool:
        is_halted = self._halt is not None and self._halt.done()
        return not is_halted and not self._pauses and self.has_unfinished_requests()

    def end_run(self, when: Literal["now", "when idle"] | BaseException | None = "now") -> None:
        """Let `run` return, or raise.

        Args:
            when: "now" = after the step in progress; "when idle" = when all requests have ended; an error = `run`
                raises it. None takes an earlier call back.
        """
        with self._door:
            # An end "when idle" takes no earlier one back, which ends sooner.
            if self._end_of_run is None or when != "when idle":
                self._end_of_run = when
            self._work.notify_all()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread in `run` call a function between two steps, also while the engine is halted.

        Args:
            function: What is called.

        Returns:
            Its result to be, which is EngineStopped if the engine is closed before.
        """
        with self._door:
            self._check_open()
            future: Future[Any] = Future()
            self._calls.append((function, future))
            self._work.notify_all()
            return future

    def halt(self, mode: HaltMode) -> Future[None]:
        """Let `run` run no further step until `go_on`.

        Requests that come meanwhile wait. A halt takes the place of the one before; who waits for that waits for this
        one.

        Args:
            mode: What happens to the requests in flight: "abort" them, "wait" until they have ended, or "keep" them for
                later.

        Returns:
            A future that is done when the halt has begun.
        """
        with self._door:
            self._check_open()
            if self._halt is None or (mode == "abort" and self._halt.done()):
                self._halt = Future()
                self._halt.set_running_or_notify_cancel()  # who waits for it cannot cancel it for others
                self._halt_mode = mode
            elif self._halt.done() or self._halt_mode != "abort" or mode != "keep":
                self._halt_mode = mode
            if mode == "abort":
                # Another thread may end a request meanwhile.
                in_flight = [request for request in list(self._requests.values()) if request not in self._held]
                self._deferred.extend(partial(self._abort, request) for request in in_flight)
            self._work.notify_all()
            return self._halt

    def go_on(self) -> None:
        """End the halt."""
        with self._door:
            halt, self._halt = self._halt, None
            self._end_waiting(halt)

    @property
    def is_halted(self) -> bool:
        """True from the beginning of `halt` to `go_on`."""
        return self._halt is not None

    @property
    def _halt_is_due(self) -> bool:
        """Needs `_door`."""
        if self._halt is None or self._halt.done():
            return False
        others = len(self._requests) > len(self._held) or self._stepper.changed or self._delivery
        return self._halt_mode == "keep" or not others

    def _end_waiting(self, halt: Future[None] | None) -> None:
        """The halt has begun, or ends before: what it has held back arrives. Needs `_door`."""
        self._arriving.update(self._held)
        self._held.clear()
        if halt is not None and not halt.done():
            halt.set_result(None)
        self._work.notify_all()

    # -- between steps ------------------------------------------------------------------------------------------

    def _follow_model(self) -> None:
        """Called before a step that may start a request, and one before which the model's code has changed, until
        `_code_followed` is the number that `Runner.look` returns."""

    def _begin_step(self) -> None:
        self._end_overdue()
        self._shut()

    def _shut(self) -> None:
        """From now on, what callers ask for waits."""
        self._is_stepping = True

    def _between_steps(self, call: Callable[[], None]) -> None:
        """Run `call` while nothing else changes the state, as in a step. Needs `_lock`."""
        self._check_not_stepping()
        try:
            self._settle_and(self._shut)
            with torch.no_grad():
                call()
        finally:
            self._is_stepping = False
        self._end_streams()

    def _end_overdue(self) -> None:
        """End the requests whose deadline has passed, and those whose `max_time` has passed while they wait. A running
        request looks at its own `max_time` after each token. Needs `_door`."""
        # Requests that end early leave their entries. Cleaned at twice the size, an entry costs a constant time.
        if len(self._timed) > 2 * len(self._requests) + 64:
            self._timed = [entry for entry in self._timed if not entry[2].group.is_finished]
            heapify(self._timed)
        running: list[tuple[float, int, Request, FinishReason]] = []
        while self._timed and self._timed[0][0] <= time.monotonic():
            entry = self._timed[0]
            _, _, request, reason = entry
            if self._requests.get(request.request_id) is request:
                if reason is FinishReason.DEADLINE or request.group.status is not SeqStatus.RUNNING:
                    self._end(request, reason, None)
                else:
                    running.append(entry)  # it may be preempted before its next token, and wait
            heappop(self._timed)
        for entry in running:
            heappush(self._timed, entry)

    def _follow_up(self, request: Request) -> None:
        """Stream the new tokens of a request, and close it if it has ended."""
        metrics = request.metrics
        if metrics.finish_time is not None and self._requests.get(request.request_id) is not request:
            return  # closed, and not only in part
        if metrics.first_token_time is None and request.error is None:
            request.metrics = replace(metrics, first_token_time=time.monotonic())
        if request.streamer is not None:
            request.tell_streamer()
        if request.group.status is SeqStatus.FINISHED:
            self._close_request(request)
        elif request.error is not None:
            self._fail(request, request.error, request.exception)

    def snapshot(self) -> EngineSnapshot | None:
        """Return the requests and their block tables between two steps. It does not wait for a step in progress.

        During a step, it returns what it was at the end of the last step, or earlier: the engine makes at most five
        snapshots in a second, and none after five seconds without a call.

        Returns:
            A record of the pool, the requests with their block tables, the last events and the counters. None if there
            is none yet: the first step since such calls began is in progress, or the engine is closed.

        Example:
            ```python
            snapshot = engine.snapshot()
            print(snapshot.pool.blocks, [request.id for request in snapshot.requests])
            ```
        """
        with self._door:
            self._watch.ask()
            # Within a step, tables change under the reader; the step makes the snapshot at its end.
            if not self._is_stepping and not self._closed:
                self._settle()
                self._watch.refresh(self._prompt_tokens)
            latest = self._watch.latest
        self._end_streams()
        return latest

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of the block tables or queues does not hold, between two steps.

        Raises:
            AssertionError: If one does not hold, which is a mistake of hf_paged.
        """
        self.settle()
        with self._lock, self._door:
            self._scheduler.check_integrity()
            ended = {request.request_id for request in self._stepper.changed if request.group.is_finished}
            arriving = {request.request_id for request in (*self._arriving, *self._held, *self._reserved)}
            scheduled = {group.request_id for group in self._scheduler.groups}
            assert set(self._requests) - ended - arriving == scheduled
            self._runner.check_integrity()

    def _shut_down(self) -> None:
        """Abort everything and take nothing more. Needs `_lock`."""
        self._check_not_stepping()
        with self._door:
            # First, so that no thread adds a request behind those that are aborted.
            self._closed = True
            try:
                while not self._settle():
                    pass
                for request in list(self._requests.values()):
                    self._abort(request)
                self._stepper.changed.clear()
                self._delivery.clear()
            finally:
                while self._calls:
                    _refuse(self._calls[0][1])
                    self._calls.popleft()
                if self._halt is not None:
                    _refuse(self._halt)
                self._work.notify_all()
        self._end_streams()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this engine is closed; make a new one")

    def _check_not_stepping(self) -> None:
        """Needs `_lock`, so that a step in progress is one of this thread."""
        if self._is_stepping:
            raise RuntimeError(
                "processors, stopping criteria and handlers of signals may add and abort requests, nothing else"
            )


def _refuse(future: Future[Any]) -> None:
    if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
        future.set_exception(EngineStopped("the engine was closed"))
