"""What stands between clients and replicas, without Ray: relay, replica, prompts' chains, numbers of replicas."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

import hf_paged
from hf_paged.serving import relay as relay_module
from hf_paged.serving import replica as replica_module
from hf_paged.serving.middleware import Gate
from hf_paged.serving.prompt_chain import BLOCK_BYTES, MOST_BLOCKS, prompt_chain
from hf_paged.serving.proxy import JsonErrors
from hf_paged.serving.relay import MOST_ATTEMPTS, Asked, Part, Relay, ReplicaLost
from hf_paged.serving.replica import Replica
from hf_paged.serving.scaling import Pressure, wanted_replicas
from hf_paged.serving.service import Service
from hf_paged.serving.settings import Settings
from tests.serving.harness import NAME, plain, shared_model, text_of, tokenizer

STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
WHOLE = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
BUSY = {"type": "http.response.start", "status": 503, "headers": []}


def body(text: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


# -- relay -------------------------------------------------------------------------------------------------------------


class Replicas:
    """Each attempt gets the next of some answers; an exception among the messages is raised there."""

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = list(answers)
        self.asked: list[Asked] = []
        self.num_closed = 0
        self.is_waiting = False

    async def open(self, asked: Asked) -> AsyncGenerator[Part, None]:
        self.asked.append(asked)
        name = f"replica-{len(self.asked)}"
        try:
            for message in [None, *self._answers.pop(0)]:
                if isinstance(message, Exception):
                    raise message
                if message == "for ever":
                    self.is_waiting = True
                    await asyncio.Event().wait()
                yield Part(name, () if message is None else (message,))
        finally:
            self.num_closed += 1


def relayed(
    replicas: Any, path: str = "/v1/completions", given: bytes = b'{"model": "m"}', *, leaves: bool = False,
    seconds: float | None = None, ends: bool = False, waits: float = 120,
) -> list[dict[str, Any]]:  # fmt: skip
    """What the client gets. leaves: it closes at once. seconds: for the request. ends: the server ends afterwards.
    waits: seconds for a replica to take it."""
    got: list[dict[str, Any]] = []
    names: list[bytes] = []
    events = [{"type": "http.request", "body": given, "more_body": False}]

    async def receive() -> Any:
        if events:
            return events.pop()
        await asyncio.sleep(0 if leaves else 1000)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if names_of := [value for name, value in message.get("headers", ()) if name == b"x-replica"]:
            names.extend(names_of)
            message = {**message, "headers": [each for each in message["headers"] if each[0] != b"x-replica"]}
        got.append(message)

    async def run() -> None:
        relay = Relay(replicas.open, wait_seconds=waits, request_seconds=seconds)
        scope = {
            "type": "http", "method": "POST", "path": path, "headers": [(b"a", b"b")], "state": {"request_id": "r"},
        }  # fmt: skip
        request = asyncio.ensure_future(relay(scope, receive, send))
        while ends and not replicas.is_waiting:
            await asyncio.sleep(0)
        if ends:
            relay.end()
        await asyncio.wait_for(request, 120)

    asyncio.run(run())
    assert names == [f"replica-{len(replicas.asked)}".encode()] * len(names), "it is named which replica answers"
    return got


def text(got: list[dict[str, Any]]) -> bytes:
    return b"".join(message.get("body", b"") for message in got)


def test_an_answer_passes_as_it_is() -> None:
    for head in (STREAM, WHOLE):
        messages = [head, body(b"a"), body(b"b"), body(b"", more=False)]
        replicas = Replicas(messages)
        assert relayed(replicas) == messages and replicas.num_closed == 1
        (asked,) = replicas.asked
        assert (asked.method, asked.path, asked.model) == ("POST", "/v1/completions", "m")
        assert asked.headers == ((b"a", b"b"), (b"x-request-id", b"r"))


BROKEN: list[list[Any]] = [
    [ReplicaLost("dead")],
    [STREAM, ReplicaLost("dead")],
    [STREAM, body(b"opening"), ReplicaLost("dead")],
    [WHOLE, body(b"{}")],  # its end is missing
    [],
    [BUSY, body(b"draining", more=False)],
    # What says nothing is lost too.
    ["for ever"],
    [STREAM, "for ever"],
    [STREAM, body(b"opening"), "for ever"],
]


def test_what_has_not_begun_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sees nothing of it, and the next replica is told which one to avoid."""
    good = [STREAM, body(b"x"), body(b"", more=False)]
    for broken in BROKEN:
        monkeypatch.setattr(relay_module, "SILENCE_SECONDS", 0.01 if "for ever" in broken else 60)
        replicas = Replicas(broken, good)
        assert relayed(replicas) == good, broken
        assert [asked.lost for asked in replicas.asked] == [(), ("replica-1",)] and replicas.num_closed == 2


def test_a_stream_that_has_begun_ends_with_an_error() -> None:
    got = relayed(Replicas([STREAM, body(b""), body(b"data: 1\n\n"), ReplicaLost("dead")]))
    assert got[:3] == [STREAM, body(b""), body(b"data: 1\n\n")]
    event, done = got[-1]["body"].decode().removeprefix("data: ").split("\n\ndata: ")
    error = json.loads(event)["error"]
    assert error["code"] == "replica_lost" and "dead" in error["message"]
    assert done == "[DONE]\n\n" and "more_body" not in got[-1]


def test_events_of_responses_are_numbered() -> None:
    begun = body(b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n")
    got = relayed(Replicas([STREAM, begun, begun, ReplicaLost("dead")]), "/v1/responses")
    name, event = got[-1]["body"].decode().split("\n", 1)
    assert name == "event: error" and json.loads(event.removeprefix("data: "))["sequence_number"] == 4


def test_the_third_replica_is_the_last() -> None:
    """A request that ends its replicas ends three of them; of replicas that refuse, the last one's answer is passed."""
    replicas = Replicas(*[[STREAM, ReplicaLost("dead")]] * 9)
    got = relayed(replicas)
    assert got[0]["status"] == 503 and json.loads(text(got))["error"]["code"] == "replica_lost"
    assert len(replicas.asked) == MOST_ATTEMPTS == 3
    refused = [BUSY, body(b"draining", more=False)]
    assert relayed(Replicas(refused, refused, refused)) == refused


def test_no_replica_takes_it() -> None:
    class Nobody:
        asked = ()

        async def open(self, asked: Asked) -> AsyncGenerator[Part, None]:
            await asyncio.Event().wait()
            yield Part("never")

    got = relayed(Nobody(), waits=0.05)
    assert got[0]["status"] == 503 and json.loads(text(got))["error"]["code"] == "no_replica"


def test_a_request_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many replicas have had it."""
    monkeypatch.setattr(relay_module, "_LATE_SECONDS", 0.0)
    got = relayed(Replicas([ReplicaLost("dead")], [STREAM, "for ever"]), seconds=0.02)
    assert got[0]["status"] == 504 and json.loads(text(got))["error"]["code"] == "deadline"


@pytest.mark.parametrize("is_stream", [True, False])
def test_requests_that_outlive_the_server_get_an_error(is_stream: bool) -> None:
    """A stream that has begun ends with it, and another answer is one."""
    begun = [STREAM, body(b"opening"), body(b"text")] if is_stream else [WHOLE]
    got = relayed(Replicas([*begun, "for ever"]), ends=True)
    if is_stream:
        assert got[:3] == begun and text(got).endswith(b"data: [DONE]\n\n")
        assert b'"code": "draining"' in text(got)
    else:
        assert got[0]["status"] == 503 and json.loads(text(got))["error"]["code"] == "draining"


def test_errors_of_the_proxy_are_json() -> None:
    """An answer in plain text, or none; what an application has sent passes."""

    def answered(path: str, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        got: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            for message in messages:
                await send(message)

        async def send(message: Any) -> None:
            got.append(message)

        scope = {"type": "http", "path": path, "headers": [(b"x-request-id", b"r")]}
        asyncio.run(JsonErrors(app)(scope, None, send))  # type: ignore[arg-type]
        return got

    def plain_text(status: int) -> list[dict[str, Any]]:
        head = {"type": "http.response.start", "status": status, "headers": [[b"content-type", b"text/plain"]]}
        return [head, body(b"words", more=False)]

    for messages, status in (([], 503), (plain_text(404), 503), (plain_text(429), 429)):
        got = answered("/v1/models", *messages)
        assert len(got) == 2 and got[0]["status"] == status and (b"x-request-id", b"r") in got[0]["headers"]
        assert json.loads(text(got))["error"]["code"] == "proxy"
    assert answered("/-/healthz", *plain_text(404)) == plain_text(404)
    good = [WHOLE, body(b"{}", more=False)]
    assert answered("/v1/models", *good) == good


def test_a_client_that_leaves_ends_its_request() -> None:
    replicas = Replicas([STREAM, "for ever"])
    assert relayed(replicas, leaves=True) == [] and replicas.num_closed == 1


# -- replica -----------------------------------------------------------------------------------------------------------


def on_replica(what: Any, adapters: dict[str, str] | None = None) -> Any:
    """The result of `what(replica, service)`, a coroutine function."""

    async def run() -> Any:
        engine = hf_paged.Engine(shared_model(), hf_paged.CacheConfig(num_blocks=256))
        service = Service(engine, tokenizer(), Settings(names=(NAME,)))
        replica = Replica(service, "one", adapters)
        await replica.start()
        try:
            return await what(replica, service)
        finally:
            await replica.stop()

    return asyncio.run(run())


def completion(**fields: Any) -> Asked:
    given = json.dumps({"model": NAME, "prompt": "A function definition", "max_tokens": 8, **fields}).encode()
    return Asked("POST", "/v1/completions", b"", ((b"content-type", b"application/json"),), given, *prompt_chain(given))


async def collected(replica: Replica, asked: Asked) -> list[Any]:
    parts = [part async for part in replica.answer(asked)]
    assert parts[0] == Part("one") and {part.replica for part in parts} == {"one"}
    return [message for part in parts for message in part.messages]


def test_a_replica_answers_as_the_server_does() -> None:
    async def calls(replica: Replica, service: Service) -> Coroutine[Any, Any, Any]:
        replica.check_alive()
        whole = await collected(replica, completion())
        stream = await collected(replica, completion(stream=True))
        wrong = await collected(replica, completion(no_such_field=1))
        return whole, stream, wrong, await replica.figures()  # type: ignore[return-value]

    whole, stream, wrong, figures = on_replica(calls)
    ids = tokenizer()("A function definition")["input_ids"]
    expected = text_of(plain(ids, max_new_tokens=8)[0])
    assert json.loads(text(whole))["choices"][0]["text"] == expected
    events = [line.removeprefix("data: ") for line in text(stream).decode().split("\n\n") if line]
    assert "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1]) == expected
    assert wrong[0]["status"] == 422 and figures["kv_used"] == figures["waiting"] == figures["in_flight"] == 0


@pytest.mark.parametrize("given", [b"mine", b"not an id"])
def test_a_request_has_one_id(given: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The client, the logs and the replica have the same one."""

    async def calls(replica: Replica, service: Service) -> Any:
        async def dying(asked: Asked) -> AsyncGenerator[Part, None]:
            yield Part("two")
            raise ReplicaLost("dead")

        attempts = [dying, replica.answer]
        gate = Gate(
            Relay(lambda asked: attempts.pop(0)(asked), wait_seconds=60),
            settings=Settings(names=(NAME,)),
            on_answer=lambda path, status: None,
        )
        asked, got = completion(), []
        length = (b"content-length", str(len(asked.body)).encode())
        headers = [*asked.headers, length, (b"x-request-id", given)]
        messages = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            got.append(message)

        await gate({"type": "http", "method": "POST", "path": asked.path, "headers": headers}, receive, send)
        return got

    with caplog.at_level("INFO", "hf_paged.serving"):
        got = on_replica(calls)
    (told,) = [value.decode() for name, value in got[0]["headers"] if name == b"x-request-id"]
    assert (told == "mine") == (given == b"mine")
    assert json.loads(text(got))["id"] == f"cmpl-{told}"
    lines = [line for line in caplog.messages if "begun=False" in line or "completion_tokens" in line]
    assert len(lines) == 2 and all(f"request={told} " in line for line in lines)


@pytest.mark.slow
def test_a_reader_that_does_not_read_on_holds_up_its_own_answer() -> None:
    """What waits for it does not grow: the application waits, and then sends what has come together since."""

    async def calls(replica: Replica, service: Service) -> None:
        stream = replica.answer(completion(stream=True, max_tokens=400, ignore_eos=True))
        first = [await anext(stream), await anext(stream)]
        while service.worker.num_in_flight:  # the engine does not wait
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        rest = [part async for part in stream]
        messages = [message for part in [*first, *rest] for message in part.messages]
        assert len(messages) < 100 and max(len(part.messages) for part in rest) <= 17
        events = [line.removeprefix("data: ") for line in text(messages).decode().split("\n\n") if line]
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length" and events[-1] == "[DONE]"

        stream = replica.answer(completion(stream=True, max_tokens=900, ignore_eos=True))
        await anext(stream), await anext(stream)
        async with asyncio.timeout(60):
            await stream.aclose()  # while the application waits
        assert service.worker.num_in_flight == 0

    on_replica(calls)


def test_a_replica_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BEAT_SECONDS", 0.001)

    async def calls(replica: Replica, service: Service) -> list[Part]:
        held, stream = threading.Event(), replica.answer(completion())
        blocked = asyncio.ensure_future(service.worker.call(lambda engine: held.wait(60)))  # no step runs
        parts = [await anext(stream) for _ in range(4)]
        held.set()
        await blocked
        return [*parts, *[part async for part in stream]]

    parts = on_replica(calls)
    assert parts[:4] == [Part("one")] * 4 and any(part.messages for part in parts)


def test_a_caller_that_closes_the_stream_aborts() -> None:
    async def calls(replica: Replica, service: Service) -> None:
        async with aclosing(replica.answer(completion(stream=True, max_tokens=900))) as parts:
            async for part in parts:
                if len(part.messages) and part.messages[0]["type"] == "http.response.body":
                    break
        assert service.worker.num_in_flight == 0
        assert await service.worker.call(lambda engine: engine.stats().num_running) == 0

    on_replica(calls)


def test_an_adapter_that_cannot_be_loaded() -> None:
    """It is listed from the start, and a request that names it gets the reason."""

    async def calls(replica: Replica, service: Service) -> Any:
        models = await collected(replica, Asked("GET", "/v1/models", b"", (), b""))
        return models, await collected(replica, completion(model="lora"))

    models, refused = on_replica(calls, {"lora": "/no/such/folder"})
    assert [card["id"] for card in json.loads(text(models))["data"]] == [NAME, "lora"]
    assert refused[0]["status"] == 500 and "/no/such/folder" in text(refused).decode()


# -- chains of prompts -------------------------------------------------------------------------------------------------

LONG = "".join(map(chr, range(33, 33 + 90))) * 3


def chain(**fields: Any) -> tuple[int, ...]:
    return prompt_chain(json.dumps(fields).encode())[1]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def test_a_conversation_begins_alike() -> None:
    """The chain of a later turn begins with that of an earlier one, up to the last block."""
    first = [{"role": "system", "content": LONG}, {"role": "user", "content": "a"}]
    later = [*first, {"role": "assistant", "content": LONG}, {"role": "user", "content": "b"}]
    one, other = chain(model="m", messages=first), chain(model="m", messages=later, temperature=1)
    assert len(one) > 3 and other[: len(one)] == one and len(other) > len(one)
    assert common(one, chain(model="n", messages=first)) == common(one, chain(model="m", messages=later[1:])) == 0
    assert common(one, chain(model="m", messages=first, cache_salt="s")) == 0
    assert common(one, chain(model="m", messages=first, tools=[{"type": "function"}])) == 0


def test_prompts_of_all_kinds() -> None:
    assert chain(prompt=LONG) == chain(prompt=[LONG, "other"]) != chain(prompt=LONG[1:])
    tokens = list(range(1000, 1100))
    assert chain(prompt=tokens) == chain(prompt=[tokens, [1]]) and len(chain(prompt=tokens)) == 400 // BLOCK_BYTES
    assert common(chain(prompt=tokens), chain(prompt=[*tokens[:50], 7, *tokens[51:]])) == 200 // BLOCK_BYTES
    assert common(chain(instructions=LONG, input="a" * 99), chain(instructions=LONG, input="b" * 99)) >= 3
    assert len(chain(prompt="x" * BLOCK_BYTES * (MOST_BLOCKS + 9))) == MOST_BLOCKS


def test_a_body_without_a_prompt() -> None:
    odd = (b'{"prompt": ""}', b'{"prompt": [[]], "model": 3}', b'{"prompt": [-1, 1.5]}')
    for given in (b"", b"no JSON", b"[1]", b"{}", *odd):
        assert prompt_chain(given) == (None, ()), given


def test_wanted_replicas() -> None:
    for pressures, current, wanted in (
        ([], 0, 1),
        ([], 2, 2),  # they start
        ([(0, 0.1), (0, 0.1), (0, 0.1)], 3, 1),
        ([(0, 0.8), (0, 0.7)], 2, 2),
        ([(0, 0.95), (0, 0.95)], 2, 3),
        ([(8, 0.95), (0, 0.2)], 2, 3),
        ([(4, 0.1)], 1, 2),  # requests wait for a place in the step
        ([(0, 0.8)], 2, 2),  # the second one starts
        ([(100, 1.0)] * 2, 2, 5),
    ):
        found = wanted_replicas([Pressure(*each) for each in pressures], current=current, least=1, most=5)
        assert found == wanted, pressures
