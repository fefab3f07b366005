"""The bounds of connections: their number, the time until a request's header has come, the time without reading.

uvicorn limits the time between two requests only, closing a transport waits until the client has read everything, and
uvicorn does not see that a client goes which has sent anything after its request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from hf_paged.serving.settings import Limits

log = logging.getLogger("hf_paged.serving")

_RESET = struct.pack("ii", 1, 0)  # linger for 0 seconds: what the kernel holds for the client is dropped too
# Bytes of further requests that a client may send before it has its answer: they are kept in memory.
_MAX_AHEAD = 64 * 1024


class BoundedProtocol(H11Protocol):
    """Closes a connection if the next request's header does not arrive in time, or if the client reads nothing.

    With more than `limits.connections` of them, the one that has waited longest for a header is closed. So sockets that
    send nothing keep no request out, and `/health` answers however many requests run.
    """

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0

    # -- the header ---------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Return True if no request has begun, or the last one has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` whenever the socket does not take everything
        self._await_head()
        if len(self.connections) > self._limits.connections:
            self._make_room()

    def _make_room(self) -> None:
        # uvicorn's set has those too that are closing already.
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        if len(open_ones) > self._limits.connections:
            idle = (each for each in open_ones if isinstance(each, BoundedProtocol) and each.is_idle)
            # Requests are never cut off for a new connection.
            min(idle, key=lambda each: each._idle_since).transport.abort()  # this one, if all others are busy

    def handle_events(self) -> None:
        super().handle_events()
        if not self.is_idle:
            self._cancel("_head_timer")
            if self.flow.read_paused and not self.cycle.more_body:
                self._read_ahead()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            self._await_head()

    def _read_ahead(self) -> None:
        """Buffer bytes that follow an unanswered request, and read on: else the client's end would go unseen."""
        if len(self.conn.trailing_data[0]) > _MAX_AHEAD:
            log.info("the client at %s has sent more than %d bytes before its answer; cut off", self.client, _MAX_AHEAD)
            # Closing it would wait until the client has read, which it does not.
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def _await_head(self) -> None:
        self._idle_since = self.loop.time()
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self.transport.abort)

    # -- the answer ---------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._cancel("_write_timer")
        super().resume_writing()

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._limits.send_seconds, self._look_at_reader, left)

    def _look_at_reader(self, before: int) -> None:
        # Progress resets the clock, however little it is, so that slow lines are no slow clients.
        if self.transport.get_write_buffer_size() < before:
            self._await_reader()
            return
        log.info("the client at %s has read nothing for %g seconds; cut off", self.client, self._limits.send_seconds)
        if self.scope is not None:
            self.scope["state"]["is_cut_off"] = True
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    # -- the end ------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel("_head_timer")
        self._cancel("_write_timer")
        super().connection_lost(exc)

    def _cancel(self, name: str) -> None:
        timer = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


_Result = TypeVar("_Result")


async def unless_gone(work: Coroutine[Any, Any, _Result], receive: Receive) -> _Result | None:
    """The result of the work; None if the client has gone before. The work is then cancelled."""
    gone, working = asyncio.ensure_future(until_gone(receive)), asyncio.ensure_future(work)
    try:
        await asyncio.wait({gone, working}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        # Both are awaited, so that neither runs on after the answer.
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
