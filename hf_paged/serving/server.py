"""Runs the application with uvicorn: sockets, signals, draining, and an exit status for an engine that has died."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from hf_paged.annotations import Tokenizer
from hf_paged.generation.engine.engine import Engine
from hf_paged.serving.app import create_app
from hf_paged.serving.connections import BoundedProtocol
from hf_paged.serving.service import Service
from hf_paged.serving.settings import Limits, Settings
from hf_paged.serving.sockets import listen as listen

log = logging.getLogger("hf_paged.serving")

# Not 0, so that whoever started the server starts another one.
EXIT_ENGINE_DIED = 1
_LAST_SECONDS = 5.0  # from the end of the requests to the end of their connections
_OTHER_FILES = 256  # open files that are no connections
_AT_ONCE = 8  # connections taken in one turn of the event loop: it can close others before the next ones
_BACKLOG = 2048  # connections that wait in the kernel
# A line for each connection that cannot be taken would be thousands in a second.
_LOG_SECONDS = 10.0
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server(uvicorn.Server):
    """uvicorn's, with signals of its own: the first one drains, the second one ends what is running."""

    def __init__(self, config: uvicorn.Config, service: Service, *, drain_seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_seconds = drain_seconds
        self._num_signals = 0
        self._logs_again_at = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again when it has shut down, so that a clean end were no success.

        Further signals are ignored from then on, so that the exit status stays what it is.
        """
        loop, caught = asyncio.get_running_loop(), [signal.SIGTERM, signal.SIGINT]
        try:
            for each in caught:
                loop.add_signal_handler(each, self.handle_exit, each, None)
        except (ValueError, RuntimeError):  # not in the main thread: whoever runs it sets `should_exit`
            caught = []
        try:
            yield
        finally:
            # Between its two handlers, a signal would end the process with another exit status.
            signal.pthread_sigmask(signal.SIG_BLOCK, caught)
            for each in caught:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        count = len(self._service.settings.api_keys)
        for each in self.servers:
            for one in each.sockets:
                # asyncio's `backlog` is also how many it takes at once. A copy: asyncio hides the socket's `listen`.
                with socket.socket(fileno=os.dup(one.fileno())) as listening:
                    listening.listen(_BACKLOG)
                host, port = one.getsockname()[:2]
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                log.info("running on %s (the live page; Ctrl-C ends the server)", url)
                log.info("OpenAI's routes: %s/v1", url)
        log.info("API key: %s", f"clients must send it ({count} known)" if count else "none is asked for")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn would cancel what runs, with a traceback each
            # Aborted: nobody is left to read, and closing would wait.
            for each in list(self.server_state.connections):
                each.transport.abort()
            await self.lifespan.shutdown()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A line now and then where asyncio would log each connection that it could not take, with a traceback."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_RESOURCES:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._logs_again_at:
            self._logs_again_at = time.monotonic() + _LOG_SECONDS
            log.error("connections cannot be taken now: %s", error)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Take no further requests and finish those that run, for a while. A second signal ends them, a third one ends
        the connections too. Called on the event loop."""
        self._num_signals += 1
        if self._num_signals == 1:
            log.info("signal %d: draining, %d requests in flight", sig, self._service.worker.num_in_flight)
            self._service.drain()
            asyncio.get_running_loop().call_later(self._drain_seconds, self._end_requests)
            self.should_exit = True
        elif self._num_signals == 2:
            self._end_requests()
        else:
            self.force_exit = True

    def _end_requests(self) -> None:
        """Their clients get an error, and `_LAST_SECONDS` to read it; then connections are closed."""
        log.info("ending %d requests", self._service.worker.num_in_flight)
        self._service.worker.end()
        asyncio.get_running_loop().call_later(_LAST_SECONDS, setattr, self, "force_exit", True)


def make_server(
    service: Service, *, host: str, port: int, drain_seconds: float = 30.0, log_level: str = "info"
) -> Server:
    """A server that ends when the service's engine dies. Run it with `run` or `serve`."""
    limits = service.settings.limits
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,  # the service logs each request
        # Longer than the server's own limits, which end requests with an error first.
        timeout_graceful_shutdown=drain_seconds + 2 * _LAST_SECONDS,  # type: ignore[arg-type]  # a number for asyncio
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=64 * 1024,
        http=partial(BoundedProtocol, limits=limits),  # type: ignore[arg-type]  # which is called
        ws="none",
        backlog=_AT_ONCE,
        server_header=False,
    )
    server = Server(config, service, drain_seconds=drain_seconds)

    def on_death(error: BaseException) -> None:
        server.should_exit = True

    service.on_death = on_death
    return server


def run_server(
    engine: Engine,
    tokenizer: Tokenizer,
    settings: Settings,
    *,
    sockets: Sequence[socket.socket],
    adapters: Mapping[str, str] | None = None,
    extractor: Any = None,
    processor: Any = None,
    drain_seconds: int = 30,
    log_level: str = "info",
) -> int:
    """Serve until a signal, or until the engine's thread ends. Returns the exit status. Signals are ignored then.

    sockets: of `listen`. adapters: name -> folder of those that the model has. extractor, processor: as for Service.
    drain_seconds: how long requests may take to finish after the first signal; then they end with an error.
    """
    # Before the service is made, whose limits are those that the process may have.
    limits = _allowed(settings.limits)
    service = Service(engine, tokenizer, replace(settings, limits=limits), adapters, extractor, processor)
    host, port = sockets[0].getsockname()[:2]
    server = make_server(service, host=host, port=port, drain_seconds=drain_seconds, log_level=log_level)
    server.run(sockets=list(sockets))
    return EXIT_ENGINE_DIED if service.worker.error is not None or not server.started else 0


def _allowed(limits: Limits) -> Limits:
    """These limits, with as many connections as this process may have: each one is an open file.

    Raises the soft limit, which is often no more than 1,024.
    """
    try:
        import resource
    except ImportError:  # not on this system
        return limits
    infinity = resource.RLIM_INFINITY
    # Sockets are not all: checkpoints, logs and pipes of processes are files too.
    wanted = limits.connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == infinity else min(wanted, hard)
    if soft != infinity and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most == wanted:
        return limits
    free = most - len(list(Path("/dev/fd").iterdir()))
    # A few in any case, so that `/health` still answers.
    connections = max(4, free - min(_OTHER_FILES, free // 2))
    spare = min(limits.spare_connections, connections // 2)
    lower = replace(limits, spare_connections=spare, in_flight=min(limits.in_flight, connections - spare))
    log.warning(
        "this process may have %d open files: so %d requests may run or wait, on %d connections; raise `ulimit -n`",
        *(most, lower.in_flight, lower.connections),
    )
    return lower
