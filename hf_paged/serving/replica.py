"""One engine with its HTTP application, asked by calls in place of a socket. Does not know who calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from starlette.types import Message, Receive, Send

from hf_paged.serving.adapters import load_into
from hf_paged.serving.app import create_app
from hf_paged.serving.middleware import send_problem
from hf_paged.serving.problems import Problem
from hf_paged.serving.relay import BEAT_SECONDS, Asked, Part
from hf_paged.serving.service import Service

# A message is an event or so: enough to send several at once, and too few to fill memory.
_MOST_MESSAGES = 16
"""Unread messages of an answer, from which on the application waits, as for a slow client of a socket."""


class Replica:
    """Used on the event loop that `start` was called on.

    adapters: name -> folder; each is loaded when the first request names it. They are listed from the start.
    """

    def __init__(self, service: Service, name: str, adapters: Mapping[str, str] | None = None) -> None:
        self._service = service
        self._name = name
        self._app = create_app(service)
        self._to_load = dict(adapters or {})
        self._loading = asyncio.Lock()
        service.served.adapters |= self._to_load

    async def start(self) -> None:
        await self._service.start()

    async def stop(self) -> None:
        await self._service.stop()

    def check_alive(self) -> None:
        """Raise Problem if the engine's thread has ended."""
        self._service.check_alive()

    async def figures(self) -> dict[str, float]:
        """in_flight, waiting: requests. kv_used: share of the blocks that requests hold."""
        stats = await self._service.stats()
        return {
            "in_flight": float(self._service.worker.num_in_flight),
            "waiting": float(stats.num_waiting + stats.num_swapped),
            "kv_used": stats.blocks_used / stats.num_blocks,
        }

    async def answer(self, asked: Asked) -> AsyncGenerator[Part, None]:
        """The answer of the application. Closing the generator is what a client does that closes its connection."""
        # At once, before anything is computed: the relay knows now that the request has arrived.
        yield Part(self._name)
        messages: asyncio.Queue[Message] = asyncio.Queue(_MOST_MESSAGES)
        given: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]
        is_gone = asyncio.Event()

        async def receive() -> Message:
            if given:
                return given.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._run(asked, receive, messages.put))
        try:
            while not (work.done() and messages.empty()):
                waiting = asyncio.ensure_future(messages.get())
                # Both, because the application may end without a last message.
                done, _ = await asyncio.wait({waiting, work}, timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.done():
                    waiting.cancel()
                    if not done:
                        yield Part(self._name)
                    continue
                # All that is there in one part: a call between processes costs more than a message.
                some = [waiting.result()]
                while not messages.empty():
                    some.append(messages.get_nowait())
                yield Part(self._name, tuple(some))
            work.result()
        finally:
            is_gone.set()
            await asyncio.gather(work, return_exceptions=True)

    async def _run(self, asked: Asked, receive: Receive, send: Send) -> None:
        try:
            await self._have_adapter(asked.model)
        except Problem as problem:
            await send_problem(send, problem, asked.path)
        else:
            await self._app(_scope(asked), receive, send)

    async def _have_adapter(self, name: str | None) -> None:
        """Load the adapter of this name, unless it is loaded, or there is none. Raises Problem (500)."""
        if name not in self._to_load:
            return
        async with self._loading:
            # Again: another request may have loaded it meanwhile.
            if (folder := self._to_load.get(name)) is None:
                return
            try:
                file = await self._service.read_adapter(folder)
                await self._service.worker.call(lambda engine: load_into(engine, name, file))
            except ValueError as error:
                raise Problem(500, str(error), param="model") from error
            # Last, so that a failure is tried again with the next request.
            del self._to_load[name]


def _scope(asked: Asked) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": asked.query,
        "headers": list(asked.headers),
        "client": None,
        "server": None,
    }
