"""Runs the application with uvicorn: signals, draining, and an exit status that says whether the engine lived."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn

from hf_paged.generation.engine.engine import Engine
from hf_paged.serving.app import create_app
from hf_paged.serving.service import Service
from hf_paged.serving.settings import Settings

log = logging.getLogger("hf_paged.serving")

EXIT_ENGINE_DIED = 1


class Server(uvicorn.Server):
    """uvicorn's, with signals of its own: the first one drains, the second one ends what is running."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again when it has shut down, so that a clean end were no success."""
        loop, caught = asyncio.get_running_loop(), [signal.SIGTERM, signal.SIGINT]
        try:
            for each in caught:
                loop.add_signal_handler(each, self.handle_exit, each, None)
        except (ValueError, RuntimeError):  # not in the main thread: whoever runs it sets `should_exit`
            caught = []
        try:
            yield
        finally:
            for each in caught:
                loop.remove_signal_handler(each)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Take no further requests, finish those that run. A second signal ends them."""
        if self.should_exit:
            self.force_exit = True
            return
        log.info("signal %d: draining, %d requests in flight", sig, self._service.worker.num_in_flight)
        self._service.is_draining = True
        self.should_exit = True


def run_server(
    engine: Engine,
    tokenizer: Any,
    settings: Settings,
    *,
    host: str,
    port: int,
    adapters: Mapping[str, str] | None = None,
    drain_seconds: int = 30,
    log_level: str = "info",
    max_connections: int = 1024,
) -> int:
    """Serve until a signal, or until the engine's thread ends. Returns the exit status.

    adapters: name -> folder of those that the model has. drain_seconds: how long requests may take to finish after the
    first signal; then they are aborted.
    """
    service = Service(engine, tokenizer, settings, adapters)
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        log_level=log_level,
        access_log=False,  # the service logs each request
        timeout_graceful_shutdown=drain_seconds,
        timeout_keep_alive=5,
        limit_concurrency=max_connections,
        h11_max_incomplete_event_size=64 * 1024,
        http="h11",
        ws="none",
        server_header=False,
    )
    server = Server(config, service)

    def on_death(error: BaseException) -> None:
        server.should_exit = True

    service.on_death = on_death
    server.run()
    return EXIT_ENGINE_DIED if service.worker.error is not None or not server.started else 0
