"""EngineCore: the steps of an engine over its requests, shared by any number of threads.

Knows requests; never prompts, options or models. `engine.py` makes the requests.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

import torch

from hf_paged.config import SchedulerConfig
from hf_paged.errors import QueueFull
from hf_paged.generation.engine.outputs import RequestOutput
from hf_paged.generation.engine.pauses import Pauses
from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.sequence import FinishReason, SeqStatus
from hf_paged.generation.engine.snapshots import EngineSnapshot, Watch
from hf_paged.generation.engine.stepper import Stepper
from hf_paged.generation.sampling.request import Delivered, Request
from hf_paged.locks import RefusingLock

Inbox = dict[Request, None]
"""Requests that have changed since their reader last looked, in the order of change."""


class Delivery:
    """Sends each request that has changed to its reader: the stream that follows it, or else the next `Engine.step`.

    A request leaves `changed` or `ended` only after it has been delivered, so that a step interrupted by Ctrl-C loses
    no output.
    """

    def __init__(self) -> None:
        self.changed: dict[Request, None] = {}  # got tokens in a step; not delivered yet
        self.ended: list[Request] = []  # aborted, failed or out of time; not delivered yet
        self._inboxes: dict[Request, Inbox] = {}
        self._unclaimed: Inbox = {}
        self._delivered: dict[Request, Delivered] = {}  # what the callers of `step` have got of unfinished requests

    def __bool__(self) -> bool:
        """True while something waits for a step to deliver it."""
        return bool(self.changed or self.ended or self._unclaimed)

    def open_inbox(self, requests: Sequence[Request]) -> Inbox:
        """From now on these requests are delivered here."""
        inbox: Inbox = {}
        self._inboxes.update(dict.fromkeys(requests, inbox))
        return inbox

    def forget(self, requests: Sequence[Request]) -> None:
        """Deliver nothing more of these requests."""
        for request in requests:
            self._inboxes.pop(request, None)
            self._unclaimed.pop(request, None)
            self._delivered.pop(request, None)
        dropped = set(requests)
        self.ended = [request for request in self.ended if request not in dropped]

    def deliver(self, update: Callable[[Request], None]) -> dict[Request, None]:
        """Deliver everything; returns what was delivered. `update` is called first for each request in `changed`."""
        for request in list(self.changed):
            update(request)
        delivered = self.changed.copy()
        if self._inboxes:
            for request in delivered:
                self._inboxes.get(request, self._unclaimed)[request] = None
        else:
            self._unclaimed.update(delivered)
        self.changed.clear()
        self._deliver_ended(delivered)
        return delivered

    def _deliver_ended(self, delivered: dict[Request, None]) -> None:
        while self.ended:
            self._put(self.ended[0], delivered)
            del self.ended[0]

    def _put(self, request: Request, delivered: dict[Request, None]) -> None:
        self._inboxes.get(request, self._unclaimed)[request] = None
        delivered[request] = None

    def take_unclaimed(self, delivered: dict[Request, None]) -> list[RequestOutput]:
        """Outputs of all requests that no stream follows, and of those just delivered, as they stand now.

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
        self.changed.clear()
        self.ended.clear()
        self._unclaimed.clear()
        self._delivered.clear()


_ARRIVALS_AT_ONCE = 64


class EngineCore:
    """Takes in requests, runs steps, and ends requests.

    There are two locks. `_lock` belongs to the thread that runs a step or reads outputs. `_door` is held for
    microseconds by any thread that adds or aborts a request. Invariant: queues, block tables and tokens change only in
    a step (`_is_stepping`, set under `_door` by the holder of `_lock`), or under `_door` while no step is in progress.
    What callers ask for during a step waits in `_arriving` and `_deferred` until it ends; `_settle` carries it out.
    The caller's code (processors, streamers) never runs under `_door`.
    """

    def __init__(
        self, config: SchedulerConfig, scheduler: Scheduler, runner: Runner, follow_weights: Callable[[], None]
    ) -> None:
        """follow_weights: called before each step; takes note of changes of the model."""
        self._scheduler = scheduler
        self._runner = runner
        self._follow_weights = follow_weights
        self._requests: dict[str, Request] = {}  # all unfinished ones, by id
        self._delivery = Delivery()
        self._stepper = Stepper(
            scheduler,
            runner,
            self._requests,
            self._delivery.changed,
            self._fail,
            is_async=bool(config.async_scheduling),
        )
        self._watch = Watch(scheduler, runner, self._stepper, self._requests)
        self._lock: Any = threading.RLock()
        self._door: AbstractContextManager[object] = threading.RLock()
        self._pauses = Pauses(self._lock)
        self._is_stepping = False
        self._deferred: deque[Callable[[], None]] = deque()
        self._reserved: set[Request] = set()  # have an id and a place; their streamers are getting the prompt
        self._arriving: dict[Request, None] = {}  # not in the scheduler yet
        self._streams_to_end: deque[Request] = deque()  # finished; `end` of their streamers is due
        self._timed: list[tuple[float, int, Request, FinishReason]] = []  # a heap of the times at which requests end
        self._numbers = count()
        self._closed = False
        self._prompt_tokens = 0
        _cores.add(self)

    # -- requests come and go -----------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of these requests, or none: raises ValueError for an id in use and QueueFull.

        A request's `deadline` and `max_time` count from its arrival.
        """
        for request in requests:
            self._scheduler.check(request.group)
        with self._door:
            self._check_open()
            self._settle()  # streams that were given up free their places
            self._check_room(requests)
            for request in requests:
                self._requests[request.request_id] = request
                if request.streamer is None:
                    self._arriving[request] = None
                else:
                    self._reserved.add(request)
                for seconds, reason in request.time_limits:
                    entry = (request.group.arrival + seconds, next(self._numbers), request, reason)
                    heappush(self._timed, entry)
                self._prompt_tokens += request.prompt_length
        self._end_streams()
        if self._reserved:
            self._begin_streams(requests)

    def _check_room(self, requests: Sequence[Request]) -> None:
        ids = [request.request_id for request in requests]
        for index, request_id in enumerate(ids):
            if request_id in self._requests or request_id in ids[:index]:
                raise ValueError(f"request_id {request_id!r} is in use; choose another one")
        most = self._scheduler.config.max_waiting
        waiting = self._scheduler.num_waiting + len(self._arriving) + len(self._reserved)
        if most is not None and waiting + len(requests) > most:
            raise QueueFull(f"{waiting} requests wait already (max_waiting={most})")

    def _begin_streams(self, requests: Sequence[Request]) -> None:
        """Give the prompts to the streamers, which are the caller's code, and then queue the requests."""
        reserved = [request for request in requests if request in self._reserved]
        try:
            for request in reserved:
                request.begin_stream()
        except BaseException:
            self._discard(requests)
            raise
        finally:
            with self._door:
                self._reserved.difference_update(reserved)
                for request in reserved:
                    if not request.group.is_finished:
                        self._arriving[request] = None
                    elif request.streamer is not None:  # aborted meanwhile
                        self._streams_to_end.append(request)
            self._end_streams()

    def abort(self, request_id: str) -> bool:
        """End a request in any state, without waiting for a step in progress. False if it is unknown or finished.

        The step in progress, or else the next one, returns its last RequestOutput, with finish_reason "abort" and the
        tokens generated so far. The id may be used again after that step.
        """
        with self._door:
            request = self._requests.get(request_id)
        if request is not None:
            self._deferred.append(partial(self._abort, request))
            self._settle_now()
        return request is not None

    def _settle_now(self) -> None:
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
            request = next(iter(self._arriving))
            self._admit(request)
            self._arriving.pop(request, None)
        else:
            return False
        while self._deferred and not self._is_stepping:
            self._deferred[0]()  # all of them may be repeated: Ctrl-C in one does not lose it
            self._deferred.popleft()
        return True

    def _admit(self, request: Request) -> None:
        """Hand a request to the scheduler, unless it is there. Repeated if Ctrl-C interrupts it."""
        group = request.group
        if not group.is_finished and self._scheduler.get(group.request_id) is not group:
            self._scheduler.enqueue(group)

    def _abort(self, request: Request) -> None:
        if self._requests.get(request.request_id) is request:
            self._end(request, FinishReason.ABORT, None)

    def _drop(self, requests: Sequence[Request]) -> None:
        """Abort the unfinished ones of these requests, and deliver no further outputs of any."""
        for request in requests:
            self._abort(request)
        self._delivery.forget(requests)

    def _discard(self, requests: Sequence[Request]) -> None:
        """`_drop` as soon as no step is in progress."""
        self._deferred.append(partial(self._drop, requests))
        self._settle_now()

    def has_unfinished_requests(self) -> bool:
        """True while a step would have requests to compute or outputs to deliver."""
        return bool(self._requests or self._delivery)

    def _end(
        self, request: Request, reason: FinishReason, error: str | None, exception: BaseException | None = None
    ) -> None:
        """Finish a request from outside its own decoding; its output waits for the next step."""
        self._admit(request)
        request.stop_all(reason)
        request.error, request.exception = error, exception
        self._scheduler.finish_group(request.group, reason)
        self._close_request(request)
        self._delivery.ended.append(request)

    def _fail(self, request: Request, error: str, exception: BaseException | None) -> None:
        self._end(request, FinishReason.ERROR, error, exception)

    def _close_request(self, request: Request) -> None:
        # It may be gone already, if an interrupt struck a previous attempt.
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        if not self._requests:
            self._stepper.close()
        if request.streamer is not None:
            self._streams_to_end.append(request)
        request.metrics = replace(
            request.metrics,
            finish_time=time.monotonic(),
            num_preemptions=request.group.num_preemptions,
            num_cached_tokens=request.group.num_cached_tokens,
        )

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
        """Run one step; returns snapshots of the outputs that have changed.

        They include outputs that changed in steps of other callers (`generate`, a stream), but not those of requests
        that a stream follows.
        """
        with self._lock:
            delivered = self._step()
            with self._door:
                outputs = self._delivery.take_unclaimed(delivered)
        return outputs

    def _step(self) -> dict[Request, None]:
        """Run a step and deliver what has changed; returns the requests that have. Needs `_lock`."""
        self._check_not_stepping()
        if self._pauses.owners:
            self._pauses.wait()
        self._check_open()
        self._check_not_stepping()
        try:
            self._settle_and(self._begin_step)
            if self._scheduler.has_unfinished():
                with torch.no_grad():
                    self._follow_weights()
                    self._stepper.step()
        finally:
            try:
                delivered = self._delivery.deliver(self._follow_up)
            finally:
                self._is_stepping = False
        self._settle_now()
        if self._watch.is_on:
            with self._door:
                self._watch.after_step(self._prompt_tokens)
        return delivered

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
            heappop(self._timed)  # last: Ctrl-C before it loses no deadline
        for entry in running:
            heappush(self._timed, entry)

    def _follow_up(self, request: Request) -> None:
        """Stream the new tokens of a request, and close it if it has ended. Repeated if Ctrl-C interrupts it."""
        if request.metrics.finish_time is not None:
            return
        if request.metrics.first_token_time is None:
            request.metrics = replace(request.metrics, first_token_time=time.monotonic())
        if request.streamer is not None:
            request.tell_streamer()
        if request.group.is_finished:
            self._close_request(request)
        elif request.error is not None:
            self._fail(request, request.error, request.exception)

    def snapshot(self) -> EngineSnapshot | None:
        """The requests and their block tables between two steps. Does not wait for a step in progress.

        During a step it is that of the end of the last step, or an older one: at most five are made in a second. None
        until the first step after the call has ended. While this is not called, nothing is made.
        """
        with self._door:
            self._watch.ask()
            if not self._is_stepping and not self._closed:
                self._settle()
                self._watch.refresh(self._prompt_tokens)
            latest = self._watch.latest
        self._end_streams()
        return latest

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the block tables or queues does not hold (between two steps)."""
        self._settle_now()
        with self._lock, self._door:
            self._scheduler.check_integrity()
            # After an interrupt, a request may have ended in the scheduler alone.
            ended = {request.request_id for request in self._delivery.changed if request.group.is_finished}
            arriving = {request.request_id for request in (*self._arriving, *self._reserved)}
            scheduled = {group.request_id for group in self._scheduler.groups}
            assert set(self._requests) - ended - arriving == scheduled
            self._runner.check_integrity()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed; make a new one")

    def _check_not_stepping(self) -> None:
        """Needs `_lock`, so that a step in progress is one of this thread."""
        if self._is_stepping:
            raise RuntimeError("a logits processor or stopping criterion may add and abort requests, nothing else")


_cores: weakref.WeakSet[EngineCore] = weakref.WeakSet()


def _after_fork() -> None:
    """Refuse the engine in a forked child: a thread of the parent may have held its locks at the fork, and would hold
    them forever."""
    for core in list(_cores):
        core._lock = core._door = RefusingLock(
            "this engine was made before the process was forked and works in the parent only; make an engine in the "
            "child (with DataLoader in worker_init_fn, with gunicorn --preload in post_fork), or start processes with "
            "'spawn'"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
