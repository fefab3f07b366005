"""A server of the shipped checkpoint on a free port, in a thread of this process, and what plain `generate` says."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_paged
from hf_paged.serving.served import ServedModel
from hf_paged.serving.server import Server, make_server
from hf_paged.serving.service import Service
from hf_paged.serving.settings import Limits, Settings
from tests.waiting import must, until

_Result = TypeVar("_Result")
QA = str(Path(__file__).parent.parent.parent / "examples" / "pydoc-lm-qa")
NAME = "pydoc"
KEY = "a-key-of-the-tests"
ADMIN = "the-admin-key-of-the-tests"
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # for clients: each would read all certificates of the machine


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


def ids_of(text: str) -> list[int]:
    return list(tokenizer()(text)["input_ids"])


def chat_ids(messages: list[Any]) -> list[int]:
    """Of a chat's prompt."""
    return list(tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def text_of(token_ids: list[int]) -> str:
    return str(tokenizer().decode(token_ids, skip_special_tokens=True))


def before_encoding(patch: pytest.MonkeyPatch, call: Callable[[str], object]) -> None:
    """From here on servers call this with each text before they tokenize it. It may wait, or raise."""
    own = ServedModel.encode

    def encode(self: ServedModel, text: str, **options: Any) -> list[int]:
        call(text)
        return own(self, text, **options)

    patch.setattr(ServedModel, "encode", encode)


class Impatient(asyncio.SelectorEventLoop):
    """uvicorn looks each tenth of a second whether it is to end, and then waits for another one: here, a hundredth."""

    def call_later(self, delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        return super().call_later(0.01 if delay == 0.1 else delay, *args, **options)


class Running:
    """A server that runs, and its clients."""

    def __init__(self, server: Server, service: Service, engine: hf_paged.Engine, url: str) -> None:
        self.server, self.service, self.engine, self.url = server, service, engine, url
        self.loop: Any = None
        self.thread: Any = None
        self._connections: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(thread_name_prefix="test-client")
        key = next((key for key in (service.settings.admin_key, *service.settings.api_keys) if key), "none")
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120, verify=NO_TLS)
        clients = openai.DefaultHttpxClient(verify=NO_TLS)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=clients)

    def connect(self) -> socket.socket:
        """A bare connection, that ends with the test at the latest."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=120)
        self._connections.append(connection)
        return connection

    def send_signal(self) -> None:
        """What SIGTERM does in a process of its own."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)

    def on_loop(self, what: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Start it on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(what, self.loop)

    def call(self, what: Callable[[hf_paged.Engine], Any]) -> Any:
        """Run it in the engine's thread, after everything that was asked of it before."""
        return self.on_loop(self.service.worker.call(what)).result(120)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def beside(self, what: Callable[..., _Result], *args: Any, **options: Any) -> Future[_Result]:
        """Call it in a thread of its own."""
        return self._threads.submit(what, *args, **options)

    def await_command(self) -> None:
        """Until something waits for the end of the step in progress."""
        until(lambda: is_asked(self.engine))

    def close(self) -> None:
        self.http.close()
        self.client.close()
        for connection in self._connections:
            connection.close()
        self._threads.shutdown(wait=False)

    def assert_idle(self) -> None:
        """No request is left, no pause, and no block is used but by the prefix cache."""
        was_paused = self.service.worker.is_paused
        if was_paused:  # lifted, so that no later test waits for it
            self.loop.call_soon_threadsafe(self.service.weights.resume)
        assert not was_paused and self.service.worker.num_in_flight == 0
        stats = self.call(lambda engine: (engine.check_integrity(), engine.stats())[1])
        assert (stats.num_running, stats.num_waiting, stats.num_swapped, stats.blocks_used) == (0, 0, 0, 0)


def is_asked(engine: hf_paged.Engine) -> bool:
    """Whether something waits for the end of the step in progress."""
    return bool(engine._calls or engine._deferred or engine._arriving) or engine.is_halted


def patient(limits: Limits) -> Limits:
    """With ten minutes in place of the seconds that a client, or a process of ours, has by default: a busy machine is
    no slow client."""
    default = Limits()
    of_work = ("grammar_seconds", "audio_decode_seconds", "image_seconds", "decode_seconds", "media_seconds")
    names = ("head_seconds", "body_seconds", "send_seconds", *of_work)
    return replace(limits, **{name: 600.0 for name in names if getattr(limits, name) == getattr(default, name)})


@contextmanager
def serving(
    *, cache_config: Any = None, scheduler_config: Any = None, model: Any = None,
    adapters: dict[str, str] | None = None, drain_seconds: float = 30, admin: bool = False,
    limits: Limits | None = None, made_tokenizer: Any = None, extractor: Any = None, processor: Any = None,
    **settings: Any,
) -> Iterator[Running]:  # fmt: skip
    """Start a server, and stop it as a signal would. model: None = the one that all tests share. admin: with an admin
    key, which the clients send. limits: those of time are ten minutes where the test leaves the defaults.
    extractor: of a model that hears. processor: of one that takes images."""
    engine = hf_paged.Engine(
        model or shared_model(), cache_config or hf_paged.CacheConfig(num_blocks=1024), scheduler_config
    )
    service = Service(
        engine, made_tokenizer or tokenizer(),
        Settings(names=(NAME,), admin_key=ADMIN if admin else None, limits=patient(limits or Limits()), **settings),
        adapters, extractor, processor,
    )  # fmt: skip
    server = make_server(service, host="127.0.0.1", port=0, drain_seconds=drain_seconds, log_level="warning")
    started, loops = threading.Event(), []
    begin = server.startup

    async def startup(*args: Any, **kwargs: Any) -> None:
        await begin(*args, **kwargs)
        loops.append(asyncio.get_running_loop())
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    server.config.timeout_keep_alive = 600  # no client's idle connection ends during a slow test

    def run() -> None:
        with asyncio.Runner(loop_factory=Impatient) as runner:
            runner.run(server.serve())

    thread = threading.Thread(target=run, name="test-server", daemon=True)
    thread.start()
    try:
        must(started.wait(120), "the server has not started")
        port = server.servers[0].sockets[0].getsockname()[1]
        running = Running(server, service, engine, f"http://127.0.0.1:{port}")
        running.loop, running.thread = loops[0], thread
        with closing(running):
            yield running
    finally:
        server.should_exit = True
        thread.join(120)
        must(not thread.is_alive(), "the server has not ended")


class Ended(logging.Handler):
    """Waits for lines of the server's log that contain certain words."""

    def __init__(self, *words: str) -> None:
        super().__init__()
        self._words = words
        self._found = threading.Semaphore(0)
        self.lines: list[str] = []
        self.traces: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if all(word in line for word in self._words):
            self.lines.append(line)
            self.traces.append("".join(traceback.format_exception(record.exc_info[1])) if record.exc_info else "")
            self._found.release()

    def wait(self, count: int = 1) -> None:
        for _ in range(count):
            must(self._found.acquire(timeout=120), f"no log line with {self._words}")

    def __enter__(self) -> Ended:
        log = logging.getLogger("hf_paged.serving")
        log.setLevel(logging.INFO)
        log.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hf_paged.serving").removeHandler(self)
