"""A server of the shipped checkpoint on a free port, in a thread of this process, and what plain `generate` says."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged.serving.app import create_app
from hf_paged.serving.server import Server
from hf_paged.serving.service import Service
from hf_paged.serving.settings import Settings

QA = str(Path(__file__).parent.parent.parent / "examples" / "pydoc-lm-qa")
NAME = "pydoc"
KEY = "a-key-of-the-tests"


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(QA)


def new_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(QA, dtype=torch.float32).eval()


@cache
def shared_model() -> Any:
    return new_model()


def plain(prompt_ids: list[int], **options: Any) -> list[list[int]]:
    """The tokens that `generate` alone returns after the prompt, one list for each sequence, without padding."""
    seed = options.pop("seed", None)
    if seed is not None:
        torch.manual_seed(seed)
    ids = torch.tensor([prompt_ids])
    rows = shared_model().generate(ids, attention_mask=torch.ones_like(ids), **options)[:, len(prompt_ids) :].tolist()
    eos = options.get("eos_token_id", 2)
    ends = {eos} if isinstance(eos, int) else set(eos)
    return [row[: next((place + 1 for place, token in enumerate(row) if token in ends), len(row))] for row in rows]


def text_of(token_ids: list[int]) -> str:
    return str(tokenizer().decode(token_ids, skip_special_tokens=True))


class Running:
    """A server that runs, and its clients."""

    def __init__(self, server: Server, service: Service, engine: hf_paged.Engine, url: str) -> None:
        self.server, self.service, self.engine, self.url = server, service, engine, url
        self.loop: Any = None
        keys = service.settings.api_keys
        self.headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        self.http = httpx.Client(base_url=url, headers=self.headers, timeout=60)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=keys[0] if keys else "none", max_retries=0)

    def call(self, what: Callable[[hf_paged.Engine], Any]) -> Any:
        """Run it in the engine's thread, after everything that was asked of it before."""
        return asyncio.run_coroutine_threadsafe(self.service.worker.call(what), self.loop).result(60)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def assert_idle(self) -> None:
        """No request is left, and no block is used but by the prefix cache."""
        assert self.service.worker.num_in_flight == 0
        stats = self.call(lambda engine: (engine.check_integrity(), engine.stats())[1])
        assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.blocks_used) == (0, 0, 0, 0)


@contextmanager
def serving(
    *,
    cache_config: Any = None,
    scheduler_config: Any = None,
    model: Any = None,
    adapters: dict[str, str] | None = None,
    drain_seconds: int = 30,
    **settings: Any,
) -> Iterator[Running]:
    """Start a server, and stop it as a signal would. model: None = the one that all tests share."""
    engine = hf_paged.Engine(
        model or shared_model(), cache_config or hf_paged.CacheConfig(num_blocks=1024), scheduler_config
    )
    service = Service(engine, tokenizer(), Settings(names=(NAME,), **settings), adapters)
    config = uvicorn.Config(
        create_app(service),
        host="127.0.0.1",
        port=0,
        log_level="warning",
        http="h11",
        ws="none",
        timeout_graceful_shutdown=drain_seconds,
    )
    server = Server(config, service)
    started, loops = threading.Event(), []
    begin = server.startup

    async def startup(**kwargs: Any) -> None:
        await begin(**kwargs)
        loops.append(asyncio.get_running_loop())
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, name="test-server")
    thread.start()
    assert started.wait(60)
    port = server.servers[0].sockets[0].getsockname()[1]
    running = Running(server, service, engine, f"http://127.0.0.1:{port}")
    running.loop = loops[0]
    try:
        yield running
    finally:
        running.http.close()
        running.client.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


class Ended(logging.Handler):
    """Waits for lines of the server's log that contain certain words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self._words = words
        self._found = threading.Semaphore(0)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if all(word in line for word in self._words):
            self.lines.append(line)
            self._found.release()

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            assert self._found.acquire(timeout=60), f"no log line with {self._words}"

    def __enter__(self) -> Ended:
        log = logging.getLogger("hf_paged.serving")
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hf_paged.serving").removeHandler(self)


class Gate:
    """Lets the engine run a given number of steps; the next one waits, in the middle of a step as it were."""

    def __init__(self, engine: hf_paged.Engine, steps: int) -> None:
        self._engine = engine
        self._permits = threading.Semaphore(steps)
        self._step = engine.step
        engine.step = self._gated  # type: ignore[method-assign]

    def _gated(self) -> Any:
        assert self._permits.acquire(timeout=120)
        return self._step()

    def open(self) -> None:
        self._engine.step = self._step  # type: ignore[method-assign]
        self._permits.release(1000)
