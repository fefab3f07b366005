"""What the server refuses, and how: keys, limits, fields, routes. Also the small routes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import hf_paged
from hf_paged.cli.main import main
from hf_paged.serving.settings import Limits, Settings, check_exposure
from tests.serving.harness import KEY, NAME, QA, Gate, Running, serving, tokenizer

ROOT = Path(hf_paged.__file__).parent
PROMPT = "A list is"


def message(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


# -- keys ----------------------------------------------------------------------------------------------------------


def test_the_key_guards_every_route_but_health() -> None:
    with serving(api_keys=("another", KEY), admin=True) as running:
        bare = httpx.Client(base_url=running.url)
        assert bare.get("/health").status_code == 200
        paths = running.http.get("/openapi.json").json()["paths"]
        assert len(paths) >= 14
        for path, methods in {**paths, "/openapi.json": ["get"], "/no/such/route": ["get"]}.items():
            for method in methods:
                for headers in ({}, {"authorization": f"Bearer {KEY}x"}, {"authorization": KEY}):
                    status = bare.request(method, path, headers=headers, json={}).status_code
                    assert status == (200 if path == "/health" else 401), (method, path)
        assert running.client.models.list().data[0].id == NAME
        running.client.completions.create(model=NAME, prompt=PROMPT, max_tokens=2)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_keys_keep_their_prefixes_apart() -> None:
    with serving(api_keys=(KEY, "another")) as running:
        prompt = list(range(5, 45))

        def cached(key: str) -> int:
            client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)
            usage = client.completions.create(model=NAME, prompt=prompt, max_tokens=2).usage
            return int(usage.prompt_tokens_details.cached_tokens)

        assert [cached(KEY), cached(KEY), cached("another"), cached("another")] == [0, 32, 0, 32]


def test_an_open_server_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(ValueError, match="--api-key"):
            check_exposure(host, (), allow_no_key=False)
        check_exposure(host, (KEY,), allow_no_key=False)
        check_exposure(host, (), allow_no_key=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, (), allow_no_key=False)


def test_the_command_refuses_before_it_loads(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in {
        ("--host", "0.0.0.0"): "--api-key",
        ("--api-key", " "): "API key is empty",
        ("--adapter", "sql"): "NAME=FOLDER",
        ("--adapter", "sql=/no/such/folder"): "adapter_config.json",
        ("--chat-template", "/no/such/file"): "cannot be read",
        ("--max-model-len", "5000"): "1024 positions",
    }.items():
        assert main(["serve", QA, *argv]) == 2
        assert words in capsys.readouterr().err


def test_settings_are_checked() -> None:
    for wrong in ({"names": ()}, {"names": ("",)}, {"names": ("a",), "max_model_len": 1}):
        with pytest.raises(ValueError):
            Settings(**wrong)
    for wrong in ({"body": 0}, {"sequences": True}, {"logprobs": -1}, {"send_seconds": float("nan")}):
        with pytest.raises(ValueError):
            Limits(**wrong)


# -- limits --------------------------------------------------------------------------------------------------------


def test_bodies_have_a_limit_of_size() -> None:
    with serving(limits=Limits(body=1000)) as running:
        assert running.post("/v1/completions", prompt="x" * 2000).status_code == 413
        chunks = (b"x" * 100 for _ in range(50))
        assert running.http.post("/v1/completions", content=chunks).status_code == 413


def test_bodies_have_a_limit_of_time() -> None:
    with serving(limits=Limits(body_seconds=0.05)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_fan_out_has_limits(server: Running) -> None:
    for fields in ({"n": 129}, {"best_of": 129}, {"prompt": ["x"] * 129}, {"prompt": ["x"] * 13, "n": 10}):
        answer = server.post("/v1/completions", **{"prompt": PROMPT, "temperature": 1, **fields})
        assert answer.status_code == 400 and "128" in message(answer)
    answer = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], n=10**6)
    assert answer.status_code == 400


def test_what_goes_beyond_the_context_is_refused_with_both_numbers(server: Running) -> None:
    answer = server.post("/v1/completions", prompt=[5] * 1000, max_tokens=30)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "1000 tokens" in message(answer) and "max_tokens=30" in message(answer) and "1024" in message(answer)
    assert server.post("/v1/completions", prompt=[5] * 1024).status_code == 400
    # Without a limit of its own a request takes what is left.
    assert server.post("/v1/completions", prompt=[5] * 1020, ignore_eos=True).json()["usage"]["completion_tokens"] == 4


def test_what_does_not_fit_the_memory_is_refused() -> None:
    with serving(cache_config=hf_paged.CacheConfig(num_blocks=8)) as running:
        answer = running.post("/v1/completions", prompt=[5] * 100, max_tokens=100)
        assert answer.status_code == 400 and "blocks" in message(answer)
        many = running.post("/v1/completions", prompt=[[5] * 10, [5] * 100], max_tokens=100)
        assert many.status_code == 400
        running.assert_idle()


def test_a_full_queue_is_429() -> None:
    with serving(limits=Limits(in_flight=1)) as running:
        gate = Gate(running.engine, 0)
        stream = running.client.completions.create(model=NAME, prompt=PROMPT, stream=True)
        answer = running.post("/v1/completions", prompt=PROMPT)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1" and "1 requests" in message(answer)
        gate.open()
        assert list(stream)
        assert running.post("/v1/completions", prompt=PROMPT).status_code == 200
        running.assert_idle()


# -- fields --------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], int]] = [
    ({"no_such_field": 1}, 422),
    ({"temperature": -1}, 422),
    ({"temperature": 1e-9}, 422),
    ({"temperature": "hot"}, 422),
    ({"top_p": 0}, 422),
    ({"top_p": 1.5}, 422),
    ({"top_k": -2}, 422),
    ({"n": 0}, 422),
    ({"n": True}, 422),
    ({"max_tokens": -1}, 422),
    ({"seed": 2**64}, 422),
    ({"presence_penalty": 2.5}, 422),
    ({"logit_bias": {"x": 1}}, 422),
    ({"logit_bias": {"5": 101}}, 422),
    ({"logit_bias": {"99999": 1}}, 400),
    ({"stop": ""}, 422),
    ({"stop": ["a"] * 17}, 422),
    ({"stop_token_ids": [99999]}, 400),
    ({"allowed_token_ids": []}, 422),
    ({"best_of": 1, "n": 2}, 422),
    ({"stream_options": {"include_usage": True}}, 422),
    ({"length_penalty": 1.0}, 422),
    ({"min_tokens": 20, "max_tokens": 5}, 400),
    ({"prompt": []}, 422),
    ({"prompt": [99999]}, 400),
    ({"prompt": [-1]}, 422),
    ({"prompt": None}, 422),
    ({"model": "gpt-4"}, 404),
    ({"suffix": "x"}, 400),
    ({"response_format": {"type": "json_object"}}, 400),
    ({"structured_outputs": {"regex": "a"}}, 400),
    ({"logprobs": 21}, 400),
]


@pytest.mark.parametrize(("fields", "status"), WRONG, ids=lambda value: str(value)[:50])
def test_wrong_fields_are_refused_by_name(server: Running, fields: dict[str, Any], status: int) -> None:
    answer = server.post("/v1/completions", **{"prompt": PROMPT, **fields})
    assert answer.status_code == status
    assert next(iter(fields)) in message(answer) or status in (400, 404)


def test_numbers_that_are_not_finite(server: Running) -> None:
    for number in ("NaN", "Infinity", "1e999"):
        body = f'{{"prompt": "x", "temperature": {number}}}'
        answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422
    answer = server.http.post("/v1/completions", content="{", headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "JSON" in message(answer)


HELLO = [{"role": "user", "content": "Hello"}]
UNSERVED: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tool_choice": "required"},
    {"functions": [{"name": "f"}]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"structured_outputs": {"choice": ["a"]}},
    {"reasoning_effort": "low"},
    {"modalities": ["text", "audio"]},
    {"web_search_options": {}, "store": True},
    {"messages": [{"role": "tool", "content": "1", "tool_call_id": "x"}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
]


@pytest.mark.parametrize("fields", UNSERVED, ids=lambda value: str(value)[:40])
def test_what_is_not_served_says_so(server: Running, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/chat/completions", **{"messages": HELLO, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_served"


def test_fields_that_ask_for_nothing_are_taken(server: Running) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "user": "someone",
    }
    assert server.post("/v1/chat/completions", messages=HELLO, max_tokens=2, **neutral).status_code == 200


def test_requests_bring_no_templates(server: Running) -> None:
    for kwargs in ({"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"tools": []}):
        answer = server.post("/v1/chat/completions", messages=HELLO, chat_template_kwargs=kwargs)
        assert answer.status_code == 400
    assert server.post("/v1/chat/completions", messages=HELLO, chat_template="{{ 1 }}").status_code == 422


def test_a_template_that_refuses() -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ flavour }}"
    with serving(chat_template=template) as running:
        wrong = running.post("/v1/chat/completions", messages=[{"role": "system", "content": "x"}])
        assert wrong.status_code == 400 and "user first" in message(wrong)
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


def test_tokenize(server: Running) -> None:
    ids = tokenizer()(PROMPT)["input_ids"]
    answer = server.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids) and len(answer["token_strs"]) == len(ids)
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": tokenizer().decode(ids)}
    text = tokenizer().apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    chat = server.post("/tokenize", messages=HELLO).json()
    assert chat["tokens"] == tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert server.post("/tokenize").status_code == 422
    assert server.post("/detokenize", tokens=[99999]).status_code == 400


def test_version_and_state(server: Running) -> None:
    assert server.http.get("/version").json() == {"version": hf_paged.__version__}
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200


def test_routes_that_are_not_served(server: Running) -> None:
    for path in ("/v1/embeddings", "/v1/responses", "/v1/messages", "/sleep"):
        answer = server.post(path)
        assert answer.status_code == 501 and path in message(answer)
    assert server.http.get("/nothing/here").status_code == 404
    assert server.http.get("/v1/completions").status_code == 405
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
    for path in (ROOT / "serving").glob("*.py"):
        text = path.read_text()
        assert not any(word in text for word in ("pickle", "torch.load", "eval(", "exec(", "assert ")) or path.name in (
            "worker.py",
        ), path.name


def test_the_command_says_what_to_install() -> None:
    code = (
        "import sys\nsys.modules['fastapi'] = None\nimport importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'fastapi' else find(name, *a)\n"
        f"from hf_paged.cli.main import main\nsys.exit(main(['serve', {QA!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 2 and "pip install 'hf-paged[serve]'" in done.stderr
