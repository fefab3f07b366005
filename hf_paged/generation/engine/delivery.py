"""Delivery: which outputs are due to which reader, and what callers ask for while a step is in progress.

Knows requests and their outputs; never queues, block tables or the model.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from hf_paged.generation.engine.outputs import RequestOutput
from hf_paged.generation.sampling.request import Request

Inbox = dict[Request, None]
"""Requests that have changed since their reader last looked, in the order of change."""


class StepGuard:
    """The lock of an engine, and the calls that wait until no step is in progress.

    A logits processor or a streamer runs inside a step, on the thread that holds the lock. What it asks for must not
    change the batch under that step, so it is deferred.
    """

    def __init__(self) -> None:
        self.lock: threading.RLock | ForkedLock = threading.RLock()
        self.is_stepping = False
        self._deferred: deque[Callable[[], None]] = deque()
        _guards.add(self)

    @property
    def is_forked(self) -> bool:
        """Whether this process got the engine by a fork, so that it cannot use it."""
        return isinstance(self.lock, ForkedLock)

    def defer(self, call: Callable[[], None]) -> None:
        """Have it called by the next `settle`. Takes no lock: any thread may call this, a finalizer too."""
        self._deferred.append(call)

    def settle(self) -> None:
        """Make the deferred calls, unless a step is in progress. Needs the lock."""
        while self._deferred and not self.is_stepping:
            self._deferred.popleft()()


class ForkedLock:
    """The lock of an engine in a forked child: a thread of the parent may have held the real one at the fork, and would
    hold it for ever."""

    def __enter__(self) -> None:
        raise RuntimeError(
            "this engine was made before the process was forked and works in the parent only; make an engine in the "
            "child (with DataLoader in worker_init_fn, with gunicorn --preload in post_fork), or start processes with "
            "'spawn'"
        )

    def __exit__(self, *_: object) -> None: ...


_guards: weakref.WeakSet[StepGuard] = weakref.WeakSet()


def _after_fork() -> None:
    for guard in list(_guards):
        guard.lock = ForkedLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Delivery:
    """Sends each request that has changed to its reader: the stream that follows it, or else the next `Engine.step`.

    The engine's lock guards all of it. A request leaves `changed` or `ended` only after it has been delivered, so
    that a step interrupted by Ctrl-C loses no output.
    """

    def __init__(self) -> None:
        self.changed: dict[Request, None] = {}  # got tokens in a step; not delivered yet
        self.ended: list[Request] = []  # aborted or failed; not delivered yet
        self._inboxes: dict[Request, Inbox] = {}
        self._unclaimed: Inbox = {}

    def __bool__(self) -> bool:
        """True while something waits for a step to deliver it."""
        return bool(self.changed or self.ended or self._unclaimed)

    def open_inbox(self, requests: list[Request]) -> Inbox:
        """From now on these requests are delivered here."""
        inbox: Inbox = {}
        self._inboxes.update(dict.fromkeys(requests, inbox))
        return inbox

    def forget(self, requests: list[Request]) -> None:
        """Deliver nothing more of these requests."""
        for request in requests:
            self._inboxes.pop(request, None)
            self._unclaimed.pop(request, None)
        dropped = set(requests)
        self.ended = [request for request in self.ended if request not in dropped]

    def deliver(self, update: Callable[[Request], None]) -> dict[Request, None]:
        """Deliver everything; returns what was delivered. `update` is called first for each request in `changed`."""
        delivered: dict[Request, None] = {}
        while self.changed:
            request = next(iter(self.changed))
            update(request)
            self._put(request, delivered)
            del self.changed[request]
        while self.ended:
            self._put(self.ended[0], delivered)
            del self.ended[0]
        return delivered

    def _put(self, request: Request, delivered: dict[Request, None]) -> None:
        self._inboxes.get(request, self._unclaimed)[request] = None
        delivered[request] = None

    def take_unclaimed(self, delivered: dict[Request, None]) -> list[RequestOutput]:
        """Outputs of all requests that no stream follows, and of those just delivered, as they stand now."""
        outputs = [request.output() for request in {**self._unclaimed, **delivered}]
        self._unclaimed.clear()
        return outputs

    def clear(self) -> None:
        self.changed.clear()
        self.ended.clear()
        self._unclaimed.clear()


class RequestStream(Iterator[RequestOutput]):
    """The outputs of some requests for one reader, whichever thread runs the steps; ends when all are finished.

    Closing it, from any thread, aborts the unfinished requests. A stream that is garbage collected does the same with
    the engine's next step.
    """

    def __init__(
        self,
        requests: list[Request],
        inbox: Inbox,
        guard: StepGuard,
        *,
        step: Callable[[], object],
        drop: Callable[[list[Request]], None],
        finals_only: bool,
    ) -> None:
        """step: runs one step of the engine. drop: aborts requests and delivers nothing more of them.

        finals_only: return finished outputs only.
        """
        self.requests = requests
        self._inbox = inbox
        self._guard = guard
        self._step = step
        self._drop = drop
        self._finals_only = finals_only
        self._unfinished = set(requests)
        self._outputs: deque[RequestOutput] = deque()
        self._is_closed = False

    def __next__(self) -> RequestOutput:
        while True:
            with self._guard.lock:
                if self._is_closed:
                    raise StopIteration
                if self._outputs:
                    return self._outputs.popleft()
                if self._unfinished:
                    self._read()
                else:
                    self.close()

    def _read(self) -> None:
        if not self._inbox:
            try:
                self._step()
            except BaseException:
                self.close()
                raise
        # Outputs are made here, so that a request that changed several times appears once, in its latest state.
        for request in self._inbox:
            is_finished = request.metrics.finish_time is not None
            if is_finished:
                self._unfinished.discard(request)
            if is_finished or not self._finals_only:
                self._outputs.append(request.output())
        self._inbox.clear()

    def abandon(self) -> None:
        """Close it with the engine's next step, without waiting for the step in progress."""
        if not self._is_closed:
            self._is_closed = True
            drop, requests = self._drop, self.requests
            self._guard.defer(lambda: drop(requests))

    def close(self) -> None:
        self.abandon()
        with self._guard.lock:
            self._guard.settle()

    def __del__(self) -> None:
        self.abandon()
