"""What the server refuses, and how: keys, limits, fields, routes. Also the small routes."""

from __future__ import annotations

import ast
import hmac
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import openai
import pytest

import hf_paged
from hf_paged.cli import serve
from hf_paged.cli.main import main
from hf_paged.serving import forms
from hf_paged.serving.refusals import note_unused
from hf_paged.serving.settings import Limits, Settings, check_exposure
from tests.forwards import before_forwards
from tests.noted import note_calls
from tests.serving.harness import ADMIN, KEY, NAME, QA, Ended, Running, before_encoding, serving, tokenizer
from tests.waiting import Gate, until

ROOT = Path(hf_paged.__file__).parent
PROMPT = "A list is"
HELLO = [{"role": "user", "content": "Hello"}]


def message(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


# -- keys ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving(api_keys=(KEY, "another"), admin=True) as running:
        yield running


def test_the_key_guards_every_route_but_probes(guarded: Running) -> None:
    bare = httpx.Client(base_url=guarded.url)
    paths = guarded.http.get("/openapi.json").json()["paths"]
    assert len(paths) >= 14
    for path, methods in {**paths, "/openapi.json": ["get"], "/no/such/route": ["get"]}.items():
        for method in methods:
            status = bare.request(method, path, json={}).status_code
            assert status == (200 if path in ("/health", "/ready") else 401), (method, path)
    for wrong in ("", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY):
        assert bare.get("/v1/models", headers={"authorization": wrong}).status_code == 401, wrong
    for right in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY}", "Bearer another"):
        assert bare.get("/v1/models", headers={"authorization": right}).json()["data"][0]["id"] == NAME
    statuses = [bare.post("/v1/messages", headers={"x-api-key": key}).status_code for key in (KEY, f"{KEY}x")]
    assert statuses == [422, 401]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_keys_keep_their_prefixes_apart(guarded: Running) -> None:
    prompt = list(range(5, 45))

    def cached(key: str) -> int:
        client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0)
        usage = client.completions.create(model=NAME, prompt=prompt, max_tokens=2).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert [cached(KEY), cached(KEY), cached("another"), cached("another")] == [0, 32, 0, 32]


def test_the_admin_key(guarded: Running, server: Running) -> None:
    """A browser sends no such header for another site's page, and who may generate may not stop others."""
    for path in ("/pause", "/resume", "/reset_prefix_cache"):
        for key, status in ((f"Bearer {ADMIN}", 200), (f"Bearer {KEY}", 403), (f"Basic {ADMIN}", 401)):
            assert guarded.http.post(path, headers={"authorization": key}).status_code == status, (path, key)
    load = {"lora_name": "a", "lora_path": "b"}
    answer = guarded.http.post("/v1/load_lora_adapter", json=load, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 403 and "admin key" in message(answer)
    bare = httpx.Client(base_url=server.url)  # no key for the other routes
    assert bare.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}).status_code == 200
    assert bare.post("/pause").status_code == 403


def test_keys_are_compared_in_constant_time(guarded: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of equal length, by the function made for it, and all of them whichever matches."""
    compared = note_calls(monkeypatch, hmac, "compare_digest", lambda one, other: (len(one), len(other)))
    for key in (KEY, "another", ADMIN, "wrong"):
        compared.clear()
        guarded.http.get("/version", headers={"authorization": f"Bearer {key}"})
        assert compared == [(32, 32)] * 3, key


def test_an_open_server_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ValueError, match="--api-key"):
            check_exposure(host, (), allow_no_key=False)
        check_exposure(host, (KEY,), allow_no_key=False)
        check_exposure(host, (), allow_no_key=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, (), allow_no_key=False)


def test_the_command_refuses_before_it_loads(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hf_paged.serving.server.Server.run", lambda self, sockets: None)  # it would serve for ever
    for argv, words in {
        ("--host", "0.0.0.0"): "--api-key", ("--api-key", " "): "API key is empty",
        ("--api-key", "abc "): "API key has spaces", ("--admin-key", ""): "admin key is empty",
        ("--api-key", "schlüssel"): "API key has spaces around it, or characters",
        ("--api-key", "a", "--admin-key", "a"): "is an API key too",
        ("--host", "192.0.2.1", "--api-key", "a"): "cannot listen on 192.0.2.1:0",
        ("--adapter", "sql"): "NAME=FOLDER", ("--adapter", "sql=/no/such/folder"): "adapter_config.json",
        ("--chat-template", "/no/such/file"): "cannot be read", ("--max-model-len", "5000"): "1024 positions",
    }.items():  # fmt: skip
        assert main(["serve", QA, "--port", "0", *argv]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_port_in_use_is_found_first_and_hides_no_wrong_option() -> None:
    """Before torch is imported."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        program = "import sys; from hf_paged.cli.main import main; status = main(sys.argv[1:]); "
        program += "print('torch' in sys.modules); sys.exit(status)"
        for options, words in (
            ((), f"cannot listen on 127.0.0.1:{port}: "),
            (("--kv-cache-memory", "4GX"), "memory size '4GX' is not understood"),
        ):
            command = [sys.executable, "-c", program, "serve", QA, "--port", port, *options]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1, result.stderr
            assert result.stdout == "False\n"


def test_settings_are_checked() -> None:
    for wrong in ({"names": ()}, {"names": ("",)}, {"names": ("a",), "max_model_len": 1}):
        with pytest.raises(ValueError):
            Settings(**wrong)
    limits = {"body": 0, "spare_connections": 0, "sequences": True, "logprobs": -1, "send_seconds": float("nan")}
    for name, value in limits.items():
        with pytest.raises(ValueError):
            Limits(**{name: value})


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited() -> Iterator[Running]:
    with serving(limits=Limits(in_flight=2, new_tokens=3, scores=1000)) as running:
        yield running


def test_bodies_have_a_limit_of_size() -> None:
    with serving(limits=Limits(body=1000)) as running:
        assert running.post("/v1/completions", prompt="x" * 2000).status_code == 413
        announced = running.connect()  # refused before it is sent
        announced.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n")
        assert announced.recv(100).startswith(b"HTTP/1.1 413")
        # As clients do that send all of it before they read.
        large = running.connect()
        large.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 9_000_000
        )
        assert large.recv(100).startswith(b"HTTP/1.1 413")


def test_fan_out_has_limits(server: Running) -> None:
    for fields in ({"n": 129}, {"best_of": 129}, {"prompt": ["x"] * 129}, {"prompt": ["x"] * 13, "n": 10}):
        answer = server.post("/v1/completions", **{"prompt": PROMPT, "temperature": 1, **fields})
        assert answer.status_code == 400 and "128" in message(answer)
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], n=10**6)
    assert answer.status_code == 400
    assert server.post("/v1/completions", prompt=[[5]] * 65, max_tokens=1).status_code == 200


def test_what_goes_beyond_the_context_is_refused_with_both_numbers(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=[5] * 1000, max_tokens=30)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "1000 tokens" in message(answer) and "max_tokens=30" in message(answer) and "1024" in message(answer)
    assert server.post("/v1/completions", prompt=[5] * 1024).status_code == 400
    # Without a limit of its own a request takes what is left.
    assert server.post("/v1/completions", prompt=[5] * 1020, ignore_eos=True).json()["usage"]["completion_tokens"] == 4


def test_text_that_is_too_long_in_any_case_is_not_tokenized(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its beginning decides, piece by piece."""
    read: list[int] = []
    before_encoding(monkeypatch, lambda text: read.append(len(text)))
    token = max((each for each in tokenizer().get_vocab() if each.isascii() and each.isalpha()), key=len)
    fields = {"max_tokens": 1}
    assert server.post("/v1/completions", prompt=token * 1000, **fields).status_code == 200
    assert max(read) == 1000 * len(token)
    text = "x" * 100_000
    for path, body in (
        ("/v1/completions", {"prompt": " " * 10**6}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        read.clear()
        answer = server.post(path, **body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert "chat" in path or str(len(body["prompt"])) in message(answer)
        assert sum(read) < 100_000


def test_what_does_not_fit_the_memory_is_refused() -> None:
    with serving(cache_config=hf_paged.CacheConfig(num_blocks=8)) as running:
        answer = running.post("/v1/completions", prompt=[5] * 100, max_tokens=100)
        assert answer.status_code == 400 and "blocks" in message(answer)
        many = running.post("/v1/completions", prompt=[[5] * 10, [5] * 100], max_tokens=100)
        assert many.status_code == 400
        running.assert_idle()


def test_a_full_queue_is_429(limited: Running) -> None:
    """All prompts of a body need a place; a body that can never have one is refused for good."""
    gate = Gate(limited.engine, 0)
    stream = limited.client.completions.create(model=NAME, prompt=PROMPT, stream=True)
    answer = limited.post("/v1/completions", prompt=["a", "b"], max_tokens=1)
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1" and "1 requests" in message(answer)
    assert answer.json()["error"]["code"] == "queue_full"
    answer = limited.post("/v1/completions", prompt=["a", "b", "c"], max_tokens=1)
    assert answer.status_code == 400 and "3 prompts" in message(answer) and "2" in message(answer)
    assert limited.service.worker.num_in_flight == 1
    gate.open()
    assert list(stream)
    assert limited.post("/v1/completions", prompt=["a", "b"], max_tokens=1).status_code == 200
    limited.assert_idle()


def test_an_answer_without_a_limit_has_the_servers(limited: Running) -> None:
    answer = limited.post("/v1/chat/completions", messages=HELLO, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 3
    answer = limited.post("/v1/completions", prompt=PROMPT, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 16  # OpenAI's default


def test_log_probabilities_have_a_limit(limited: Running) -> None:
    fields: dict[str, Any] = {"prompt": [5] * 40, "temperature": 1, "max_tokens": 10}
    for wrong in ({"logprobs": 4, "n": 21}, {"logprobs": 4, "echo": True, "n": 5}, {"logprobs": 0, "n": 101}):
        answer = limited.post("/v1/completions", **{**fields, **wrong})
        assert answer.status_code == 400 and "1000" in message(answer)
        assert answer.json()["error"]["param"] == "logprobs"
    assert limited.post("/v1/completions", **fields, logprobs=4, n=20).status_code == 200


def test_requests_have_a_place_before_they_are_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server has not the room for costs it nothing, and neither does what a client no longer waits for."""
    encoded, go_on = [], threading.Event()

    def wait(text: str) -> None:
        encoded.append(text)
        assert go_on.wait(120)

    before_encoding(monkeypatch, wait)
    with serving(limits=Limits(in_flight=2)) as running, Ended("before it was queued") as gone:
        answers: list[httpx.Response] = []
        first = threading.Thread(target=lambda: answers.append(running.post("/v1/completions", prompt="first")))
        first.start()
        until(lambda: encoded == ["first"])
        second = running.connect()
        body = b'{"prompt": "second"}'
        second.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        second.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        until(lambda: running.service._num_preparing == 2)
        answer = running.post("/v1/completions", prompt="third")
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        second.close()
        gone.wait()
        go_on.set()
        first.join(120)
        assert answers[0].status_code == 200
        assert running.post("/v1/completions", prompt="fourth").status_code == 200
        assert encoded == ["first", "fourth"]


def test_an_error_of_the_server_is_answered_as_every_other_one(server: Running, monkeypatch: Any) -> None:
    def count() -> float:
        name = 'hf_paged:http_requests_total{route="/v1/completions",status="500"} '
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    before = count()
    before_encoding(monkeypatch, mock.Mock(side_effect=ZeroDivisionError("a fault in a tokenizer")))
    with Ended("request=mine-7 failed") as logged:
        answer = server.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-7"})
        logged.wait()
    assert answer.status_code == 500 and "mine-7" in message(answer) and answer.headers["x-request-id"] == "mine-7"
    assert count() == before + 1


def test_text_that_is_no_unicode(server: Running) -> None:
    starts = {"/v1/responses": '"input": "x"', "/v1/chat/completions": f'"messages": {json.dumps(HELLO)}'}
    for path, start in starts.items():
        for metadata in ('{"a": "\\ud800"}', '{"\\ud800": "a"}'):
            body = f'{{{start}, "metadata": {metadata}}}'
            answer = server.http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 422, (path, metadata)
    for path in ("/v1/completions", "/tokenize"):
        headers = {"content-type": "application/json"}
        assert server.http.post(path, content='{"prompt": "\\ud800"}', headers=headers).status_code in (400, 422), path


def test_each_token_is_decoded_once_and_not_on_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's scores stand in each of its choices."""
    loop = server.thread.ident
    decoded = note_calls(monkeypatch, forms, "token_text", lambda _, token: (token, threading.get_ident() == loop))
    fields = {"prompt": list(range(100, 140)), "echo": True, "logprobs": 5, "n": 8, "temperature": 1, "max_tokens": 1}
    assert server.post("/v1/completions", **fields, stream=True).status_code == 200
    tokens = [token for token, _ in decoded]
    assert len(tokens) > 40 and len(set(tokens)) == len(tokens)
    assert not any(is_on_loop for _, is_on_loop in decoded)


# -- fields --------------------------------------------------------------------------------------------------------

# Of /v1/completions: each is named.
WRONG: list[tuple[dict[str, Any], int]] = [
    ({"no_such_field": 1}, 422), ({"temperature": -1}, 422), ({"top_p": 0}, 422), ({"top_p": 1.5}, 422),
    ({"top_k": -2}, 422), ({"n": 0}, 422), ({"n": True}, 422), ({"max_tokens": -1}, 422), ({"seed": 2**64}, 422),
    ({"presence_penalty": 2.5}, 422), ({"logit_bias": {"x": 1}}, 422), ({"logit_bias": {"5": 101}}, 422),
    ({"logit_bias": [[1, 1]]}, 422), ({"stop_token_ids": [99999]}, 400), ({"allowed_token_ids": []}, 422),
    ({"best_of": 1, "n": 2}, 422), ({"stream_options": {"include_usage": True}}, 422), ({"length_penalty": 1.0}, 422),
    ({"min_tokens": 20, "max_tokens": 5}, 400), ({"prompt": None}, 422), ({"model": "gpt-4"}, 404),
    ({"suffix": "x"}, 400), ({"logprobs": 21}, 400), ({"logprobs": 2, "use_beam_search": True, "n": 2}, 400),
    ({"priority": -1}, 400), ({"max_tokens": 0}, 400),
]  # fmt: skip


def test_wrong_fields_are_refused_by_name(server: Running) -> None:
    for fields, status in WRONG:
        answer = server.post("/v1/completions", **{"prompt": PROMPT, **fields})
        assert answer.status_code == status, fields
        assert next(iter(fields)) in (answer.json()["error"]["param"] or "") + message(answer), fields


KINDS: list[tuple[dict[str, Any], str, str]] = [
    ({"stop": 5}, "stop", "stop=5: a string or a list is needed"),
    ({"stop": {"a": 1}}, "stop", "stop is an object: a string or a list is needed"),
    ({"stop": ""}, "stop", 'stop="": String should have at least 1 character'),
    ({"stop": ["a", ""]}, "stop[1]", 'stop[1]="": String should have at least 1 character'),
    ({"stop": ["a"] * 17}, "stop", "stop is a list of 17: List should have at most 16 items"),
    ({"prompt": 5}, "prompt", "prompt=5: a string or a list of strings or a list of token ids or a list of lists of"),
    ({"prompt": []}, "prompt", "prompt is a list of 0: List should have at least 1 item"),
    ({"prompt": ["a", 5]}, "prompt[1]", "prompt[1]=5: Input should be a valid string"),
    ({"prompt": [5, "a"]}, "prompt[1]", 'prompt[1]="a": Input should be a valid integer'),
    ({"prompt": [[5], []]}, "prompt[1]", "prompt[1] is a list of 0: List should have at least 1 item"),
    ({"prompt": [[5], [5, -1]]}, "prompt[1][1]", "prompt[1][1]=-1: Input should be greater than or equal"),
    ({"prompt": [5, -1]}, "prompt[1]", "prompt[1]=-1: Input should be greater than or equal to 0"),
    ({"temperature": "x" * 100}, "temperature", f'temperature="{"x" * 60}"...: Input should be a valid'),
    ({"use_beam_search": True, "early_stopping": "no"}, "early_stopping", "=\"no\": Input should be 'never'"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "json=5: an object or a string is"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "content=5: a string or"),
    ({"messages": HELLO, "tool_choice": 5}, "tool_choice", "=5: a string or an object is needed"),
    ({"messages": HELLO, "tool_choice": "x"}, "tool_choice", "=\"x\": Input should be 'none', "),
    ({"messages": HELLO, "tool_choice": {}}, "tool_choice", "an object: it needs the field 'type'"),
    ({"input": 5}, "input", "input=5: a string or a list is needed"),
    ({"input": []}, "input", "input is a list of 0: List should have at least 1 item"),
]


def test_errors_are_about_the_type_that_was_meant(server: Running) -> None:
    """Where a field may have several types, the message names the field, the value, and what is allowed."""
    for fields, param, words in KINDS:
        path = "chat/completions" if "messages" in fields else "responses" if "input" in fields else "completions"
        answer = server.post(f"/v1/{path}", **({"prompt": PROMPT} if path == "completions" else {}) | fields)
        assert answer.status_code == 422 and answer.json()["error"]["param"] == param, fields
        assert words in message(answer), fields


def test_messages_that_are_none(server: Running) -> None:
    for messages in (
        *(None, "string", {}, [], [[]], ["hello"], [{}], [{"role": "user"}], [{"content": "x"}]),
        [{"role": "nobody", "content": "x"}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "unknown", "text": "x"}]}],
    ):
        answer = server.post("/v1/chat/completions", messages=messages)
        assert answer.status_code in (400, 422) and set(answer.json()) == {"error"}, messages


BODIES: list[tuple[bytes, str | None, int, str]] = [
    (b"{}", None, 415, "the header Content-Type is missing; send JSON, with 'Content-Type: application/json'"),
    (b"{}", "text/plain", 415, "the header Content-Type is text/plain; send JSON, with 'Content-Type: application/js"),
    (b"", "application/json", 422, "the body is empty; send a JSON object"),
    (b"[1]", "application/json", 422, "the body is a list; an object is needed"),
    (b"null", "application/json", 422, "the body is null; an object is needed"),
    (
        b'{"prompt": "x",\n "max_tokens": 3 "n": 1}', "application/json", 400,
        'the body is not valid JSON: Expecting \',\' delimiter, line 2, column 18, near "_tokens\\": 3 \\"n\\": 1}"',
    ),
    (b'{"prompt": "\xfc"}', "application/json", 400,
     "the body cannot be read as JSON: 'utf-8' codec can't decode byte"),
    (b"[" * 5000, "application/json", 400, "the body cannot be read as JSON: maximum recursion depth exceeded"),
    (b'{"a": "\xed\xa0\x80" x}', "application/json", 400,
     "the body is not valid JSON: Expecting ',' delimiter, line 1"),
    *((b'{"prompt": "x", "temperature": %b}' % number, "application/json", 422, "temperature")
      for number in (b"NaN", b"Infinity", b"1e999")),
    (b'{"\\ud800": 1}', "application/json", 422, 'the body: the key "\\ud800" is no Unicode'),
]  # fmt: skip


def test_bodies_that_are_no_json_are_told_what_is_wrong_and_where(server: Running) -> None:
    for body, kind, status, words in BODIES:
        headers = {} if kind is None else {"content-type": kind}
        answer = server.http.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == status, body
        assert message(answer).startswith(words), body
    for route in ("/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        answer = server.http.post(route, content="{", headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "JSON" in message(answer), route


def test_fields_within_messages_that_are_not_known(server: Running) -> None:
    """Clients send back what other servers have made, and fields of their own: they say nothing to the model."""
    content = [{"type": "text", "text": "x", "\ud800": 1, "id": "a"}]
    messages = [{"role": "user", "content": content, "id": "1"}, {"role": "user", "content": "y", "z": {"a": [1]}}]
    body = json.dumps({"messages": messages, "max_tokens": 1})
    answer = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    plain = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": "y"}]
    wanted = server.post("/v1/chat/completions", messages=plain, max_tokens=1)
    assert answer.json()["usage"]["prompt_tokens"] == wanted.json()["usage"]["prompt_tokens"]
    assert answer.json()["choices"] == wanted.json()["choices"]
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x", "b": 1}], "c": 2}
    assert server.post("/v1/responses", input=[item], max_output_tokens=1).status_code == 200


def test_a_temperature_near_zero_is_greedy(server: Running) -> None:
    """Some clients send 1e-8 for it, with which scores would overflow."""
    fields = {"prompt": "a list", "max_tokens": 8}
    greedy = server.post("/v1/completions", **fields, temperature=0).json()["choices"]
    assert server.post("/v1/completions", **fields, temperature=1e-8).json()["choices"] == greedy


def test_unknown_fields_that_have_another_name_here(server: Running) -> None:
    for name, remedy in {
        "guided_json": 'use structured_outputs={"json": ...} or response_format',
        "guided_regex": 'use structured_outputs={"regex": ...}',
        "guided_choice": 'use structured_outputs={"choice": [...]}',
        "guided_grammar": 'use structured_outputs={"grammar": ...}',
        "max_new_tokens": "use max_tokens",
        "something": "leave it out",
    }.items():
        for path, prompt in {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": HELLO}}.items():
            answer = server.post(path, **prompt, **{name: "x"})
            assert answer.status_code == 422
            assert message(answer) == f"{name}: this field is not known; {remedy}"


def test_tokens_that_the_model_does_not_have(server: Running) -> None:
    for path, field, value in (
        ("/v1/completions", "prompt", [1, 2048]), ("/v1/completions", "prompt", [[1], [2048, 1]]),
        ("/v1/completions", "stop_token_ids", [2048]), ("/v1/completions", "allowed_token_ids", [2048]),
        ("/v1/completions", "logit_bias", {"2048": 1}), ("/detokenize", "tokens", [2048]),
    ):  # fmt: skip
        answer = server.post(path, **({"prompt": "x"} if path == "/v1/completions" else {}) | {field: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field
        assert message(answer) == f"{field}: the vocabulary has no token 2048; its last one is 2047"


def test_what_is_not_served_says_so(server: Running) -> None:
    unserved: tuple[dict[str, Any], ...] = (
        {"functions": [{"name": "f"}]}, {"modalities": ["text", "audio"]}, {"web_search_options": {}},
        {"messages": [{"role": "function", "content": "1", "name": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
    )  # fmt: skip
    for fields in unserved:
        answer = server.post("/v1/chat/completions", **{"messages": HELLO, **fields})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_served", fields


def test_options_that_leave_no_token_are_the_clients_mistake(server: Running) -> None:
    none_left = {"prompt": PROMPT, "allowed_token_ids": [2], "min_tokens": 2, "max_tokens": 5}
    kinds: tuple[dict[str, Any], ...] = ({}, {"temperature": 1, "n": 3}, {"use_beam_search": True, "n": 2})
    for kind, stream in ((kinds[0], False), (kinds[1], True), (kinds[2], False)):
        answer = server.post("/v1/completions", **none_left, stream=stream, **kind)
        assert answer.status_code == (200 if stream else 400) and "no_token_left" in answer.text
        assert "server_error" not in answer.text


def test_length_penalties_beyond_the_range_of_scores(server: Running) -> None:
    fields = {"prompt": PROMPT, "use_beam_search": True, "n": 2}
    for penalty in (-100, 100):
        answer = server.post("/v1/completions", **fields, max_tokens=4, length_penalty=penalty)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "length_penalty"
        assert server.post("/v1/completions", **fields, max_tokens=2, length_penalty=penalty).status_code == 200


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"a": made}
    return made


@pytest.mark.parametrize("depth", [100, 900])
def test_what_is_nested_deeply_is_refused_before_it_is_used(server: Running, depth: int) -> None:
    schema = {"type": "object", "properties": nested(depth)}
    call = {"id": "1", "function": {"name": "f", "arguments": json.dumps(nested(depth))}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"input": "x", "chat_template_kwargs": {"a": nested(depth)}}),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"a": nested(depth)}}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
    ]
    if depth > 100:
        tools = [{"type": "function", "name": "f", "parameters": schema}]
        bodies.append(("/v1/responses", {"input": "x", "tools": tools}))
        named = {"type": "json_schema", "name": "x", "schema": schema}
        bodies.append(("/v1/responses", {"input": "x", "text": {"format": named}}))
    for path, body in bodies:
        limit = {"max_output_tokens" if "input" in body else "max_tokens": 1}
        status = server.post(path, **body, **limit).status_code
        assert status == 200 if depth == 100 else status in (400, 422), (path, body.keys())


def test_texts_that_would_be_read_for_seconds_are_refused_first(server: Running, monkeypatch: Any) -> None:
    loads, fail = json.loads, pytest.fail
    monkeypatch.setattr(json, "loads", lambda data: loads(data) if isinstance(data, bytes) else fail("it was read"))
    many = "[1]," * 2**16
    call = {"id": "1", "function": {"name": "f", "arguments": f'{{"a": [{many}1]}}'}}
    answer = server.post("/v1/chat/completions", messages=[{"role": "assistant", "tool_calls": [call]}])
    assert answer.status_code == 400 and "lists and objects" in message(answer)
    for kind in ("json", "regex", "grammar"):
        answer = server.post("/v1/completions", prompt="x", structured_outputs={kind: "(" * 70_000})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "structured_outputs"
    answer = server.post("/v1/completions", prompt="x", logit_bias={str(key): 1 for key in range(70_000)})
    assert answer.status_code == 422 and "biases" in message(answer)


def test_long_prompts_hold_up_no_short_ones(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def wait(text: str) -> None:
        assert len(text) < 100 or go_on.wait(120)

    before_encoding(monkeypatch, wait)
    long = server.beside(server.post, "/v1/completions", prompt="x" * 2**18)
    until(lambda: server.service._num_preparing == 1)
    assert server.post("/v1/completions", prompt="short", max_tokens=1).status_code == 200
    go_on.set()
    assert long.result(120).status_code == 400


def test_what_an_error_repeats_is_short(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="x", **{"k" * 10**5: 1})
    assert answer.status_code == 422 and len(answer.content) < 10_000
    answer = server.post("/v1/completions", prompt="x", model="m" * 10**5)
    assert answer.status_code == 404 and len(answer.content) < 10_000


def test_the_user_stands_in_the_log(server: Running) -> None:
    with Ended("user='an\\nother'") as logged:
        server.post("/v1/completions", prompt=PROMPT, max_tokens=1, user="an\nother")
        logged.wait()


UNUSED: dict[str, Any] = {
    "store": True, "metadata": {"run": "1"}, "service_tier": "flex", "safety_identifier": "someone",
    "prompt_cache_key": "a", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "1h"},
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_what_clients_send_by_themselves_is_taken_and_logged_once(server: Running, path: str) -> None:
    """It cannot change the tokens."""
    note_unused.cache_clear()
    fields: dict[str, Any] = {"temperature": 1, "seed": 3}
    unused = dict(UNUSED)
    if path == "/v1/completions":
        fields |= {"prompt": PROMPT, "max_tokens": 5}
    elif path == "/v1/responses":
        fields |= {"input": "Hello", "max_output_tokens": 5}
        unused |= {"max_tool_calls": 3, "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
        unused |= {"text": {"verbosity": "low"}, "stream_options": {"include_obfuscation": True}}
    else:
        fields |= {"messages": HELLO, "max_tokens": 5}
        unused |= {"verbosity": "low", "prediction": {"type": "content", "content": "x"}}
    wanted = server.post(path, **fields).json()
    with Ended("has no effect") as logged:
        answers = [server.post(path, **fields, **unused).json() for _ in range(2)]
    for answer in answers:
        for key in ("choices", "usage"):
            assert answer.get(key) == wanted.get(key)
        texts = [[part["text"] for part in item["content"]] for x in (answer, wanted) for item in x.get("output", ())]
        assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
    names = [line.split("'")[1] for line in logged.lines]
    assert len(names) == len(set(names)) and set(UNUSED) <= set(names)


def test_the_effort_of_reasoning_goes_to_the_chat_template() -> None:
    note_unused.cache_clear()
    template = "{{ reasoning_effort | default('none given') }}"
    with serving(chat_template=template) as running, Ended("no effect") as logged:

        def length(path: str, **fields: Any) -> int:
            usage = running.post(path, **fields).json()["usage"]
            return int(usage.get("prompt_tokens", usage.get("input_tokens")))

        asked = {"messages": HELLO, "max_tokens": 1}
        lengths = {text: len(tokenizer()(text, add_special_tokens=False)["input_ids"]) for text in ("high effort", "x")}
        assert length("/v1/chat/completions", **asked, reasoning_effort="high effort") == lengths["high effort"]
        kwargs = {"reasoning_effort": "x"}
        assert length("/v1/chat/completions", **asked, chat_template_kwargs=kwargs) == lengths["x"]
        effort = {"effort": "high effort"}
        answer = running.post("/v1/responses", input="a", max_output_tokens=1, reasoning=effort).json()
        assert answer["usage"]["input_tokens"] == lengths["high effort"]
        assert answer["reasoning"]["effort"] == "high effort"
        assert not logged.lines
    with serving(chat_template="{{ 'x' }}") as running, Ended("no effect", "'reasoning_effort'") as logged:
        for _ in range(2):
            assert running.post("/v1/chat/completions", **asked, reasoning_effort="low").status_code == 200
        assert len(logged.lines) == 1


def test_marks_for_caches_in_texts_are_taken(server: Running) -> None:
    plain_parts = [{"type": "text", "text": "Hello"}]
    marks = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"type": "ephemeral"}}
    lengths = [
        server.post("/tokenize", messages=[{"role": "user", "content": parts}]).json()["count"]
        for parts in (plain_parts, [{**plain_parts[0], **marks}])
    ]
    assert lengths[0] == lengths[1]


def test_probes_and_pages_answer_head(server: Running) -> None:
    assert server.http.get("/version").json() == {"version": hf_paged.__version__}
    for path in ("/health", "/ready", "/"):
        answer = server.http.head(path)
        assert answer.status_code == 200 and not answer.content


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    neutral = {
        "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "modalities": ["text"], "store": False, "service_tier": "auto", "user": "someone",
    }  # fmt: skip
    assert server.post("/v1/chat/completions", messages=HELLO, max_tokens=2, **neutral).status_code == 200


def test_requests_bring_no_templates(server: Running) -> None:
    for name in ("chat_template", "tokenize", "tools", "documents", "conversation", "return_dict", "tokenizer_kwargs"):
        answer = server.post("/v1/chat/completions", messages=HELLO, chat_template_kwargs={name: None})
        assert answer.status_code == 400 and repr(name) in message(answer)
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert server.post("/v1/chat/completions", messages=HELLO, chat_template="{{ 1 }}").status_code == 422


def test_a_template_that_refuses() -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ flavour }}"
    with serving(chat_template=template) as running:
        wrong = running.post("/v1/chat/completions", messages=[{"role": "system", "content": "x"}])
        assert wrong.status_code == 400 and "user first" in message(wrong)
        body = '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"flavour": "\\ud800"}}'
        headers = {"content-type": "application/json"}
        wrong = running.http.post("/v1/chat/completions", content=body, headers=headers)
        assert wrong.status_code == 400 and "Unicode" in message(wrong)
        kwargs = {"flavour": "sour lemon"}
        answer = running.post("/v1/chat/completions", messages=HELLO, max_tokens=2, chat_template_kwargs=kwargs).json()
        assert answer["usage"]["prompt_tokens"] == len(tokenizer()("sour lemon", add_special_tokens=False)["input_ids"])


# -- other routes --------------------------------------------------------------------------------------------------


def test_models(server: Running) -> None:
    (card,) = server.client.models.list().data
    assert (card.id, card.object, card.max_model_len) == (NAME, "model", 1024)
    assert server.client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt-4")


def test_tokenize_messages(server: Running) -> None:
    text = tokenizer().apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    chat = server.post("/tokenize", messages=HELLO).json()
    assert chat["tokens"] == tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert server.post("/tokenize").status_code == 422


def test_a_server_is_ready_if_a_forward_works(server: Running, request: pytest.FixtureRequest) -> None:
    assert server.http.get("/ready").status_code == 200  # a request of another test may have failed
    undo = before_forwards(server.engine, mock.Mock(side_effect=RuntimeError("the device is lost")))
    request.addfinalizer(undo)
    assert server.http.get("/ready").status_code == 200, "nothing is known yet"
    assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 500
    for _ in range(2):
        answer = server.http.get("/ready")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_fails"), answer.text
    assert server.http.get("/health").status_code == 200
    undo()
    assert server.http.get("/ready").status_code == 200


def test_routes_that_are_not_served(server: Running) -> None:
    for path in ("/v1/systemone", "/v1/batches", "/sleep"):
        answer = server.post(path)
        assert answer.status_code == 501 and path in message(answer)
    assert server.http.get("/nothing/here").status_code == 404
    budget = server.post("/v1/chat/completions", messages=HELLO, thinking_token_budget=5)
    assert budget.status_code == 400 and "--response-template" in message(budget)
    assert server.http.get("/v1/files").status_code == 501 and server.http.get("/v1/completions").status_code == 405
    assert message(server.http.get("/nothing/here")) == "there is no route /nothing/here"


def test_request_ids(server: Running) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT}, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    odd = server.http.post("/v1/completions", json={"prompt": PROMPT}, headers={"x-request-id": "a b\\n"})
    assert odd.headers["x-request-id"] != "a b\\n" and len(odd.headers["x-request-id"]) == 32


def test_metrics(server: Running) -> None:
    def figures() -> dict[str, float]:
        lines = server.http.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}

    before = figures()
    server.post("/v1/completions", prompt=[5] * 20, max_tokens=6, ignore_eos=True)
    after = figures()

    def grown(name: str) -> float:
        return after[f"hf_paged:{name}"] - before.get(f"hf_paged:{name}", 0)

    label = f'{{model_name="{NAME}"}}'
    assert grown(f"prompt_tokens_total{label}") == 20
    assert grown(f"generation_tokens_total{label}") == 6
    assert grown(f'request_success_total{{finished_reason="length",model_name="{NAME}"}}') == 1
    assert grown(f"time_to_first_token_seconds_count{label}") == 1
    assert grown(f"inter_token_latency_seconds_count{label}") <= 5
    assert grown(f"e2e_request_latency_seconds_count{label}") == 1
    assert grown('http_requests_total{route="/v1/completions",status="200"}') == 1
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc"):
        assert after[f"hf_paged:{name}{label}"] == 0


def test_no_pickle_and_no_torch_load_on_the_way_in() -> None:
    """And no check that `python -O` would leave out, no code of a checkpoint, no prefix found by Python's `hash`."""
    forbidden = {"pickle", "cloudpickle", "marshal", "shelve", "torch.load", "eval", "exec", "hash"}
    files = [*(ROOT / "serving").rglob("*.py"), ROOT / "cache" / "prefix_cache.py"]
    assert len(files) > 15
    for path in files:
        # The operator may allow a checkpoint's code, with a flag that the loaders hand on; a request never can.
        is_loader = path.name in ("checkpoints.py", "loading.py", "ray.py")
        assert is_loader or "trust_remote_code" not in path.read_text(), path.name
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert) or path.parent.name == "cache", f"{path.name}:{node.lineno}"
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Call):
                names = {ast.unparse(node.func)}
            else:
                continue
            assert not names & forbidden, f"{path.name}:{node.lineno}"


def test_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "fastapi" else name)
    assert main(["serve", QA]) == 2
    assert "pip install -e '.[serve]'" in capsys.readouterr().err
