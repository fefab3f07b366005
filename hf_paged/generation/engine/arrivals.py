"""Arrivals: takes in the requests of an engine, and ends them when they are aborted, fail or run out of time.

Ctrl-C may come between any two lines, in a step as in what callers ask for. So whatever has been begun may be done
again, and a record leaves its queue only when all that it stands for has been done.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Literal

from hf_paged.config import SchedulerConfig
from hf_paged.errors import EngineStopped, QueueFull, described
from hf_paged.generation.engine.delivery import Delivery
from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.snapshots import Watch
from hf_paged.generation.engine.stepper import Stepper
from hf_paged.generation.requests.request import Request
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus
from hf_paged.locks import refuse_after_fork
from hf_paged.registry import Drafting

HaltMode = Literal["abort", "wait", "keep"]
"""A halt's treatment of requests in flight: abort them, let them end, or keep all for later."""

SLEEP = "sleep"
"""The engine's sleep among its pauses."""

# `_door` is released before further arrivals are admitted, so that threads that add or abort wait only briefly.
_ARRIVALS_AT_ONCE = 64


class WeightVersions:
    """The numbers that the weights have had, with the times from which they had them. The first one is 0."""

    def __init__(self) -> None:
        self._since = [float("-inf")]
        self._numbers = [0]

    @property
    def latest(self) -> int:
        return self._numbers[-1]

    def add(self, number: int) -> None:
        self._since.append(time.monotonic())
        self._numbers.append(number)

    def since(self, began: float | None) -> tuple[int, int] | None:
        """The numbers at that time and now; None for a time that has not come."""
        if began is None:
            return None
        return self._numbers[bisect_right(self._since, began) - 1], self.latest


class Arrivals:
    """Takes in requests, and ends them, for any number of threads: the state of an engine's loop.

    There are two locks. `_lock` belongs to the thread that runs a step or reads outputs. `_door` is held for
    microseconds by any thread that adds or aborts a request. Invariant: queues, block tables and tokens change only in
    a step (`_is_stepping`, set under `_door` by the holder of `_lock`), or under `_door` while no step is in progress.
    What callers ask for during a step waits in `_arriving` and `_deferred` until it ends; `_settle` carries it out.
    The caller's code (processors, streamers) never runs under `_door`.
    """

    def __init__(self, config: SchedulerConfig, scheduler: Scheduler, runner: Runner, drafting: Drafting) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._requests: dict[str, Request] = {}  # all unfinished ones, by id
        self._delivery = Delivery()
        is_async = bool(config.async_scheduling)
        self._stepper = Stepper(scheduler, runner, self._requests, drafting, is_async=is_async)
        self._watch = Watch(scheduler, runner, self._stepper, self._requests)
        # Reentrant, because processors, streamers and handlers of signals may call the engine within a step.
        self._lock: Any = threading.RLock()
        self._door: Any = threading.RLock()
        self._work = threading.Condition(self._door)  # there is something to do for `run`
        self._pauses: dict[object, threading.Thread] = {}  # each pause, or `SLEEP`, and the thread that has begun it
        self._pause_ended = threading.Condition(self._lock)
        self._is_stepping = False
        self._code_followed = -1
        self._deferred: deque[Callable[[], None]] = deque()
        self._reserved: set[Request] = set()  # have an id and a place; their streamers are getting the prompt
        self._arriving: dict[Request, None] = {}  # not in the scheduler yet
        self._held: dict[Request, None] = {}  # came while a halt lets others end; may be in `_reserved` too
        self._streams_to_end: deque[Request] = deque()  # finished; `end` of their streamers is due
        self._timed: list[tuple[float, int, Request, FinishReason]] = []  # a heap of the times at which requests end
        self._numbers = count()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._halt: Future[bool] | None = None  # done when it has begun
        self._halt_mode: HaltMode = "keep"
        self._end_of_run: Literal["now", "when idle"] | BaseException | None = None
        self._closed = False
        self._prompt_tokens = 0
        self._versions = WeightVersions()
        refuse_after_fork(self, "_lock", "_door")

    # -- requests come and go -----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of these requests of `prepare_request`, or none. Raises ValueError for an id in use, and QueueFull.

        A request's `deadline` and `max_time` count from its arrival.
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
                # Decided now: a halt that comes while a streamer gets the prompt lets this request end.
                if self._is_late(request):
                    self._held[request] = None
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
        if self._reserved:
            self._begin_streams(requests)
        else:
            self._end_streams()

    def _is_late(self, request: Request) -> bool:
        """Return whether a halt that lets others end holds a new request back. Needs `_door`."""
        lets_end = self._halt is not None and not self._halt.done()
        # The reader of a stream runs steps itself, which no halt stops.
        return lets_end and not self._delivery.has_reader(request)

    def _arrive(self, request: Request) -> None:
        if request not in self._held:  # until its halt has begun, or ends before (`_release`)
            self._arriving[request] = None

    def _release(self) -> None:
        """Let what a halt has held back arrive. A request whose streamer is getting the prompt arrives after that.
        Needs `_door`."""
        self._arriving.update((request, None) for request in self._held if request not in self._reserved)
        self._held.clear()

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
        return len(self._arriving) + len(self._held.keys() | self._reserved)

    def _begin_streams(self, requests: Sequence[Request]) -> None:
        """Give the prompts to the streamers, which are the caller's code, and then queue the requests."""
        reserved = [request for request in requests if request in self._reserved]
        try:
            self._end_streams()
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
        """Abort the unfinished ones of these requests, and deliver no further outputs of any. Takes no lock: it happens
        with the next step or `settle`."""
        self._deferred.append(partial(self._drop, requests))

    def _drop(self, requests: Sequence[Request]) -> None:
        for request in requests:
            # Aborted before the reader is forgotten, so that the last output goes to nobody else.
            self._abort(request)
        self._delivery.forget(requests)

    # -- requests end -------------------------------------------------------------------------------------------

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

    def _shut(self) -> None:
        """From now on, what callers ask for waits."""
        self._is_stepping = True

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStopped("this engine is closed; make a new one")

    def _check_not_stepping(self) -> None:
        """Needs `_lock`, so that a step in progress is one of this thread."""
        if self._is_stepping:
            raise RuntimeError(
                "processors, stopping criteria and handlers of signals may add and abort requests, nothing else"
            )
