"""`transformers serve --continuous-batching` on our engine, against plain generate."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import plugin
from tests import conftest, models

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "openai", "httpx")):
    pytest.skip("needs the packages of transformers[serving]", allow_module_level=True)

import httpx

from tests.serving.harness import QA, is_asked, plain, text_of, tokenizer
from tests.waiting import Gate, until


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from transformers.cli.serve import Serve

    log = logging.getLogger("transformers")
    level = log.level
    hf_paged.install_serving()
    served = Serve(
        force_model=QA,
        continuous_batching=True,
        cb_num_blocks=512,
        cb_block_size=16,
        device="cpu",
        dtype="float32",
        host="127.0.0.1",
        port=0,
        chat_template_kwargs=None,
        reasoning="auto",
        log_level="error",  # of the whole process
        non_blocking=True,
    )
    log.setLevel(level)
    until(lambda: served.server.started or not served._thread.is_alive())
    port = served.server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        served.client = client
        yield served
    served.kill_server()
    hf_paged.uninstall_serving()
    assert conftest.blocks_in_use() == 0


def complete(server: Any, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = server.client.post("/v1/completions", json={"model": QA, "prompt": prompt, "max_tokens": 12, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def expected(prompt: str, **options: Any) -> str:
    ids = tokenizer()(prompt)["input_ids"]
    return text_of(plain(ids, **{"max_new_tokens": 12, "do_sample": False, **options})[0])


def events(server: Any, route: str, **body: Any) -> Iterator[dict[str, Any]]:
    with server.client.stream("POST", route, json={"model": QA, "stream": True, **body}) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def manager_of(server: Any) -> Any:
    from hf_paged.bridges.transformers_serve import PagedGenerateManager

    manager = server._generation_state._cb_manager
    assert isinstance(manager, PagedGenerateManager)
    return manager


def test_it_is_our_engine_and_the_text_is_plain_generates(server: Any) -> None:
    answer = complete(server, "The if statement")
    assert answer["choices"][0]["text"] == expected("The if statement")
    assert answer["usage"]["completion_tokens"] == 12 and answer["choices"][0]["finish_reason"] == "length"
    assert manager_of(server).is_alive() and server.client.get("/health").status_code == 200


def text_in(piece: dict[str, Any]) -> str:
    return "".join(choice.get("text") or "" for choice in piece["choices"])


def test_streams_are_the_same_text(server: Any) -> None:
    """The first words come while the engine is in the middle of the request."""
    complete(server, "The", max_tokens=1)  # after which there is an engine
    gate = Gate(manager_of(server)._engine, 6)
    pieces = events(server, "/v1/completions", prompt="A function", max_tokens=12)
    begin = next(text for text in map(text_in, pieces) if text)
    gate.open()
    assert begin + "".join(map(text_in, pieces)) == expected("A function")


def test_every_request_has_its_own_options(server: Any) -> None:
    options = json.dumps({"max_new_tokens": 9, "do_sample": False, "repetition_penalty": 1.8, "eos_token_id": 2})
    answer = complete(server, "A class", generation_config=options, max_tokens=None)
    assert answer["choices"][0]["text"] == expected("A class", max_new_tokens=9, repetition_penalty=1.8)
    sampling = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 9, "top_k": 0, "eos_token_id": 2}
    with ThreadPoolExecutor(4) as threads:  # at once: a seed of the process would not do
        seeded = [
            threads.submit(
                complete, server, "A class", generation_config=json.dumps(sampling), seed=seed, max_tokens=None
            )
            for seed in range(4)
        ]
    for seed, drawn in enumerate(seeded):
        assert drawn.result()["choices"][0]["text"] == expected("A class", **sampling, seed=seed)
    text = expected("The if statement")
    chat = [{"role": "user", "content": "What does str.capitalize() do?"}]
    ids = tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = text_of(plain(ids, max_new_tokens=20, do_sample=False)[0])
    stop = whole.split()[2]
    answer = server.client.post(
        "/v1/chat/completions", json={"model": QA, "messages": chat, "max_tokens": 20, "stop": [stop]}
    ).json()
    content = answer["choices"][0]["message"]["content"]
    assert whole.startswith(content) and stop in content and len(content) < len(whole)
    assert complete(server, "The if statement")["choices"][0]["text"] == text  # nothing was left of the others


def test_a_seed_is_not_that_of_the_process(server: Any) -> None:
    from transformers import GenerationConfig
    from transformers.cli.serving.utils import BaseHandler

    handler = object.__new__(BaseHandler)
    handler.generation_state = server._generation_state
    body = {"seed": 7}
    before = torch.get_rng_state()
    made = handler._build_generation_config(body, GenerationConfig(), use_cb=True)
    assert torch.equal(torch.get_rng_state(), before) and made.seed == 7 and body == {"seed": 7}


def test_the_default_length_is_cut_to_what_the_model_has(server: Any) -> None:
    limit = manager_of(server)._model.config.max_position_embeddings
    prompt = "a list "
    while len(tokenizer()(prompt)["input_ids"]) < limit - 12:
        prompt += "of "
    answer = complete(server, prompt, max_tokens=10**6, generation_config=json.dumps({"eos_token_id": 2**20}))
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == limit


def test_a_request_that_cannot_be_served_is_its_own_error(server: Any) -> None:
    long = server.client.post("/v1/completions", json={"model": QA, "prompt": "word " * 3000, "max_tokens": 4})
    assert long.status_code == 400 and "max_position_embeddings" in long.json()["detail"]
    pieces = list(events(server, "/v1/completions", prompt="word " * 3000, max_tokens=4))
    assert "max_position_embeddings" in json.dumps(pieces)
    assert complete(server, "The if statement")["choices"][0]["text"] == expected("The if statement")


def test_a_client_that_goes_away_ends_its_request(server: Any) -> None:
    complete(server, "The", max_tokens=1)
    engine = manager_of(server)._engine
    before = engine.stats().generated_tokens
    gate = Gate(engine, 6)
    options = json.dumps({"max_new_tokens": 800, "do_sample": False, "eos_token_id": 2**20})
    pieces = events(server, "/v1/completions", prompt="The", generation_config=options)
    assert next(text for text in map(text_in, pieces) if text)
    gate.wait()
    pieces.close()
    until(lambda: is_asked(engine))  # to abort it after the step
    gate.open()
    until(lambda: not engine.has_unfinished_requests())
    assert engine.stats().blocks_used == 0 and engine.stats().generated_tokens == before + 7


def test_a_client_that_goes_away_while_a_text_is_sent(server: Any) -> None:
    """The generator of the answer does not wait for a text then, and nothing tells it that it is not read on."""
    complete(server, "The", max_tokens=1)
    engine, worker = manager_of(server)._engine, manager_of(server)._worker
    options = json.dumps({"max_new_tokens": 800, "do_sample": False, "eos_token_id": 2**20})
    body = json.dumps({"model": QA, "prompt": "The", "stream": True, "generation_config": options})
    given = [{"type": "http.request", "body": body.encode(), "more_body": False}]
    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"},
        **{"query_string": b"", "headers": [(b"content-type", b"application/json")], "http_version": "1.1"},
        **{"scheme": "http", "root_path": "", "server": None, "client": None},
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    gate = Gate(engine, 6)

    async def ask() -> None:
        is_gone, is_first = asyncio.Event(), True

        async def receive() -> dict[str, Any]:
            if given:
                return given.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal is_first
            if message["type"] == "http.response.body" and is_first:
                is_first = False
                await asyncio.to_thread(gate.wait)
                is_gone.set()
                await asyncio.to_thread(until, lambda: is_asked(engine))  # to abort it after the step

        await server.server.config.loaded_app(scope, receive, send)

    gc.disable()  # it would find the generator some time
    try:
        asyncio.run_coroutine_threadsafe(ask(), worker._loop).result(240)
    finally:
        gc.enable()
        gate.open()
    until(lambda: not engine.has_unfinished_requests())
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("is_prepared", [False, True])
def test_an_engine_that_stops_meanwhile_is_unavailable(is_prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig
    from transformers.cli.serving.utils import CBWorkerDeadError

    from hf_paged.bridges.transformers_serve import PagedGenerateManager
    from hf_paged.serving.worker import EngineWorker

    manager, prepare = PagedGenerateManager(), EngineWorker.prepare

    def stopping(worker: Any, submissions: Any) -> Any:
        requests = prepare(worker, submissions) if is_prepared else None
        manager.stop()
        return requests or prepare(worker, submissions)

    async def main() -> None:
        manager.init_cb(models.shared("llama"), None)
        await manager.generate_non_streaming(None, tokenizer(), {"input_ids": [5, 6]}, GenerationConfig(), "x")

    monkeypatch.setattr(EngineWorker, "prepare", stopping)
    with pytest.raises(CBWorkerDeadError):
        asyncio.run(main())


def test_an_unknown_version_is_refused(monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    from transformers.cli.serving import utils

    hf_paged.uninstall_serving()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(utils.GenerationState, "get_manager", lambda self, model: None)
            with pytest.raises(RuntimeError, match=r"GenerationState\.get_manager takes"):
                hf_paged.install_serving()
            assert "hf_paged" not in utils.BaseHandler._build_generation_config.__code__.co_filename
    finally:
        hf_paged.install_serving()


def test_after_uninstalling_it_is_transformers_own() -> None:
    from transformers.cli.serving.utils import CBGenerateManager, GenerationState

    was_installed = plugin.is_serving_installed()
    hf_paged.uninstall_serving()
    try:
        state = GenerationState(continuous_batching=True)
        assert type(state.get_manager("a", use_cb=True)) is CBGenerateManager
        hf_paged.install_serving()
        from hf_paged.bridges.transformers_serve import PagedGenerateManager

        assert type(state.get_manager("a", use_cb=True)) is PagedGenerateManager  # it takes the other's place
        assert type(state.get_manager("a")) is not PagedGenerateManager
    finally:
        hf_paged.install_serving() if was_installed else hf_paged.uninstall_serving()
