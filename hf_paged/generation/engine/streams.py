"""RequestStream: the outputs of some requests, for one reader; and a progress bar."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from hf_paged.generation.engine.core import EngineCore, Inbox
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.generation.requests.request import Delivered, Request


class RequestStream(Iterator[RequestOutput]):
    """The outputs of some requests for one reader, whichever thread runs the steps; ends when all are finished.

    Closing it, from any thread, aborts the unfinished requests. A stream that is garbage collected does the same with
    the engine's next step.
    """

    def __init__(self, requests: list[Request], inbox: Inbox, core: EngineCore, *, finals_only: bool) -> None:
        """inbox: where the requests are delivered. finals_only: return finished outputs only."""
        self.requests = requests
        self._inbox = inbox
        self._core = core
        self._finals_only = finals_only
        self._unfinished = set(requests)
        self._outputs: deque[RequestOutput] = deque()
        self._delivered: dict[Request, Delivered] = {}  # what the reader has got
        self._is_closed = False

    def __next__(self) -> RequestOutput:
        output = None
        while output is None:
            with self._core._lock:
                if self._is_closed:
                    raise StopIteration
                if self._outputs:
                    output = self._outputs.popleft()
                elif self._unfinished:
                    self._read()
                else:
                    self.close()
        return output

    def _read(self) -> None:
        if not self._inbox:
            try:
                self._core._step()
            except BaseException:
                self.close()
                raise
        # Outputs are made here, so that a request that changed several times appears once, in its latest state.
        with self._core._door:  # no request ends meanwhile
            for request in self._inbox:
                if request not in self._unfinished:
                    continue  # it had ended before this delivery, and the reader has its last output
                is_finished = request.metrics.finish_time is not None
                if is_finished:
                    self._unfinished.discard(request)
                if is_finished or not self._finals_only:
                    self._outputs.append(request.output(self._delivered))
            self._inbox.clear()

    def abandon(self) -> None:
        """Close it with the engine's next step. Takes no lock, as a finalizer must not."""
        if not self._is_closed:
            self._is_closed = True
            self._core._deferred.append(partial(self._core._drop, self.requests))

    def close(self) -> None:
        self.abandon()
        self._core._settle_now()

    def __del__(self) -> None:
        self.abandon()


def progress_bar(total: int, wanted: bool | None) -> Any:
    """Counts requests on stderr. wanted: None = on a terminal."""
    from tqdm.auto import tqdm

    wanted = sys.stderr.isatty() if wanted is None else wanted
    return tqdm(total=total, unit="request", disable=not wanted)
