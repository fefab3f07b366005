"""EngineLoop: the one loop of an engine. Runs steps, pauses, delivers outputs; `arrivals.py` has what comes and goes.

Knows requests; never prompts, options or models. `engine.py` makes the requests. Callers of `Engine.step`, streams, the
server's thread and the manager of continuous batching are its clients.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from hf_paged.errors import EngineStopped
from hf_paged.generation.engine.arrivals import Arrivals, HaltMode
from hf_paged.generation.engine.delivery import RequestStream
from hf_paged.generation.engine.snapshots import EngineSnapshot
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import Request
from hf_paged.generation.requests.sequence import SeqStatus


class EngineLoop(Arrivals):
    """Runs steps, for any number of threads.

    Steps run in the thread that asks for outputs (`step`, `read`), or in one that gives itself to them (`run`). No step
    begins while a thread has paused the engine (`_pauses`), nor, in `run`, while it is halted (`_halt`).
    """

    # -- streams ------------------------------------------------------------------------------------------------

    def follow(self, stream: RequestStream) -> None:
        """Queue the stream's requests as `submit` does. Their outputs are for it alone. If they are refused, the stream
        is closed."""
        # Before they are queued: a step of another thread would deliver them to its own caller.
        self._delivery.add(stream)
        try:
            self.submit(stream.requests)
        except BaseException:
            stream.close()
            raise

    def read(self, stream: RequestStream) -> RequestOutput | None:
        """Return the next output of a stream, the latest state of one of its requests; None if all have been read. Runs
        steps until there is one, in turns with other threads."""
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

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step: schedule, compute and sample once for all requests that fit (PagedAttention, section 5).

        Returns:
            Snapshots of the outputs that have changed since the last call, also in steps of other callers (`generate`,
            a stream). The requests of such callers are left out: their outputs are for that reader alone.

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
            self._step()
            # Nothing may end a request while its output is made.
            with self._door:
                outputs = self._delivery.take_unclaimed()
        return outputs

    def _step(self) -> None:
        """Run a step and deliver what has changed. Needs `_lock`."""
        self._check_not_stepping()
        while self._pauses and not self._closed:
            if self.is_paused_here:
                raise RuntimeError(
                    "this thread has paused the engine: leave `with engine.pause()` first, or call wake()"
                )
            self._pause_ended.wait()
        # Again: while it waited for the pause, others had the lock.
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
                self._delivery.deliver(self._stepper.changed, self._follow_up)
            finally:
                self._is_stepping = False
        # What was asked for during the step is done now, and not when the next one comes.
        self.settle()
        if self._watch.is_on:
            with self._door:
                self._watch.after_step(self._prompt_tokens)

    @property
    def is_paused_here(self) -> bool:
        """True if this thread is inside `pause`, and so must not wait for a step."""
        return threading.current_thread() in list(self._pauses.values())

    # -- a thread that gives itself to the steps ------------------------------------------------------------------

    def run(self, deliver: Callable[[list[RequestOutput], float], None]) -> None:
        """Run steps as requests come, until `end_run`. `deliver` gets what `step` returns, and the seconds it took.

        The thread waits while there is nothing to do. Between steps it does what `call` has asked for.
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
                        self._end_waiting(self._halt, has_begun=True)
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
        """Let `run` return after the step in progress, or when all requests have ended, or let it raise an error. None
        takes an earlier call back."""
        with self._door:
            # An end "when idle" takes no earlier one back, which ends sooner.
            if self._end_of_run is None or when != "when idle":
                self._end_of_run = when
            self._work.notify_all()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Have the thread in `run` call a function between two steps, also while the engine is halted. Returns its
        result to be, which is EngineStopped if the engine is closed before."""
        with self._door:
            self._check_open()
            future: Future[Any] = Future()
            self._calls.append((function, future))
            self._work.notify_all()
            return future

    def halt(self, mode: HaltMode, *, ends_kept: bool = False) -> Future[bool]:
        """Let `run` run no further step until `go_on`. Returns a future that is True when the halt has begun, and False
        if `go_on` comes before.

        Requests that come meanwhile wait. Those in flight are aborted, end before ("wait"), or are kept for later. A
        halt takes the place of the one before; who waits for that waits for this one. ends_kept: "wait" lets requests
        end that a halt has kept; without it, a halt that has begun suffices.
        """
        with self._door:
            self._check_open()
            is_anew = mode == "abort" or (ends_kept and mode == "wait" and self._halt_mode == "keep")
            if self._halt is None or (self._halt.done() and is_anew):
                self._halt = Future()
                self._halt.set_running_or_notify_cancel()  # who waits for it cannot cancel it for others
                self._halt_mode = mode
            elif not self._halt.done() and (self._halt_mode != "abort" or mode != "keep"):
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
            self._end_waiting(halt, has_begun=False)

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

    def _end_waiting(self, halt: Future[bool] | None, *, has_begun: bool) -> None:
        """The halt has begun, or ends before: what it has held back arrives. Needs `_door`."""
        self._release()
        if halt is not None and not halt.done():
            halt.set_result(has_begun)
        self._work.notify_all()

    # -- between steps ------------------------------------------------------------------------------------------

    def _follow_model(self) -> None:
        """Called before a step that may start a request, and one before which the model's code has changed, until
        `_code_followed` is the number that `Runner.look` returns."""

    def _begin_step(self) -> None:
        self._end_overdue()
        self._shut()

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

    def _follow_up(self, requests: list[Request]) -> None:
        """Stream the new tokens of requests, and close those that have ended."""
        for request in requests:
            metrics = request.metrics
            if metrics.finish_time is not None and self._requests.get(request.request_id) is not request:
                continue  # closed, and not only in part
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
        """Raise AssertionError if an invariant of the block tables or queues does not hold, between two steps."""
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
                self._pause_ended.notify_all()
        self._end_streams()


def _refuse(future: Future[Any]) -> None:
    if not future.done() and (future.running() or future.set_running_or_notify_cancel()):
        future.set_exception(EngineStopped("the engine was closed"))
