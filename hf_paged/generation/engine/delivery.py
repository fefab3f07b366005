"""Delivery of outputs to their readers: streams, or the callers of `Engine.step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_paged.generation.engine.stepper import Changed
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import Delivered, Request


class RequestStream(Iterator[RequestOutput]):
    """The outputs of some requests for one reader, whichever thread runs the steps; ends when all are finished.

    The reader gets the latest state of each request, once, however many steps it took. Closing the stream, from any
    thread, aborts the unfinished requests. One that is garbage collected does the same with the engine's next step.
    """

    def __init__(self, loop: Any, requests: Sequence[Request], *, finals_only: bool) -> None:
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
        output: RequestOutput | None = self._loop.read(self)
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

    def deliver(self, changed: Changed, update: Callable[[list[Request]], None]) -> None:
        """Deliver what a step has `changed`, which is then empty, and what has ended between steps. `update` is called
        first with the requests in `changed`."""
        update(list(changed))
        if self._inboxes:
            for request in changed:
                self._inboxes.get(request, self._unclaimed)[request] = None
        else:
            self._unclaimed.update(changed)
        changed.clear()
        self._deliver_ended()

    def _deliver_ended(self) -> None:
        while self.ended:
            # Delivered before it leaves the queue, so that an interrupt loses no output.
            request = next(iter(self.ended))
            self._inboxes.get(request, self._unclaimed)[request] = None
            del self.ended[request]

    def take_unclaimed(self) -> list[RequestOutput]:
        """Outputs of all requests without a reader that have changed, as they stand now.

        Nothing may end a request meanwhile. What has ended since the delivery is delivered too: its output says that it
        is finished, and no second one may.
        """
        self._deliver_ended()
        requests = list(self._unclaimed)
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
