"""From a body to the engine: what long and strange prompts cost, and what refuses a request before it is queued."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as THEIR_TEMPLATES
from transformers.utils.chat_parsing import ResponseParser

from hf_paged.generation.requests.sequence import FinishReason
from hf_paged.serving.answer_format import AnswerFormat, Calls, Tool
from hf_paged.serving.parsing import lenient
from hf_paged.serving.processors import OccurrencePenalty, StopText
from hf_paged.serving.recipe import completion_recipe
from hf_paged.serving.schema import CompletionRequest
from hf_paged.serving.settings import Limits
from tests.noted import note_calls
from tests.serving.chats import RESPONSES, TEMPLATE, TOOLS
from tests.serving.harness import NAME, Ended, Running, before_encoding, serving
from tests.waiting import Gate, until

QUESTION = [{"role": "user", "content": "Hello"}]
SERVER = {"chat_template": TEMPLATE, "response_template": RESPONSES}


def chat(server: Running, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", **{"messages": QUESTION, "max_tokens": 2, **fields})


def test_a_mark_takes_a_bounded_number_of_spaces_with_it() -> None:
    """The time for a longer run would grow with the square of its length."""
    for template in (RESPONSES, *THEIR_TEMPLATES.values()):
        for field in lenient(template)["fields"].values():
            for key in ("open_pattern", "close_pattern"):
                assert not field.get(key, "").startswith((r"\s*", r"\s+"))
    answers = AnswerFormat.of(RESPONSES)
    calls = Calls((Tool("f", {"type": "object"}, False, {}),), is_forced=False, max_calls=None)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for size in (1, 10, 10_000):
        parser = answers.parser("<|assistant|>", calls)
        text = f"yes{' ' * 300}{call}{' ' * 300}{call} no{' ' * 300}<|eos|>"
        pieces = [parser.feed(text[place : place + size]) for place in range(0, len(text), size)] + [parser.finish()]
        assert "".join(each.content for each in pieces).split() == ["yes", "no"]
        assert not any(each.content.endswith(" ") for each in pieces)
        assert [part.name for each in pieces for part in each.calls] == ["f", "f"]


def test_the_prompt_is_read_once_and_not_on_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = note_calls(monkeypatch, ResponseParser, "_consume_prefix", lambda *_: threading.current_thread().name)
    answer = chat(server, n=8, temperature=1, messages=[*QUESTION, {"role": "assistant", "content": "<think>so "}])
    assert answer.status_code == 200
    assert len(threads) == 1 and threads[0].startswith("hf-paged-tokenizer")


def test_a_prompt_that_the_template_cannot_read(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """As brackets within brackets in a tool call. It is refused before the engine has it."""

    def broken(self: Any, prefix: str) -> None:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(ResponseParser, "_consume_prefix", broken)
    opened: list[Any] = []
    monkeypatch.setattr(server.service.worker, "open", opened.append)
    answer = chat(server, tools=TOOLS)
    assert answer.status_code == 400 and "cannot read the end of the prompt" in answer.json()["error"]["message"]
    assert not opened


def test_the_schema_of_a_tool_matters_where_a_grammar_has_it(server: Running) -> None:
    word = {"type": "string", "format": "email", "minLength": 1}
    schema = {"type": "object", "properties": {"a": word, "b": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert chat(server, tools=tools).status_code == 200
    strict = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    for fields in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}):
        error = chat(server, **fields)
        assert error.status_code == 400 and error.json()["error"]["code"] == "invalid_grammar"
        assert error.json()["error"]["param"] == "tools" and "tools: f: " in error.json()["error"]["message"]


def test_tokenizing_takes_a_place(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service, "_num_preparing", server.service.settings.limits.in_flight)
    for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        answer = server.post(path, **fields)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"


def test_a_deadline_before_the_engine_has_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def wait(text: str) -> None:
        assert go_on.wait(120)

    before_encoding(monkeypatch, wait)
    with serving(limits=Limits(request_seconds=0.01)) as running:
        answer = running.post("/v1/completions", prompt="x")
        go_on.set()
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline"
        running.assert_idle()


def test_the_engine_gets_all_that_a_request_asks_for(server: Running) -> None:
    service = server.service
    settings = replace(service.settings, priorities=True, limits=Limits(request_seconds=75.0))
    served = replace(service.served, settings=settings)
    fields: dict[str, Any] = {"priority": 3, "echo": True, "logprobs": 2, "seed": 5, "max_tokens": 6, "stop": ["."]}
    body = CompletionRequest(prompt=[5, 6, 7], presence_penalty=1.0, **fields)
    (request,) = service.worker.prepare(completion_recipe(body, served, None).submissions)
    assert request.group.priority == 3 and request.time_limits == [(75.0, FinishReason.DEADLINE)]
    assert request.options.logprobs == 2 and request.group.task is not None
    assert request.max_length == 9 and request.generator is not None and request.generator.initial_seed() == 5
    assert [type(each) for each in request.processors] == [OccurrencePenalty]
    assert StopText in map(type, request.criteria)


def test_a_client_that_goes_while_a_pause_holds_its_request_back(server: Running) -> None:
    gate, worker, engine = Gate(server.engine, 0), server.service.worker, server.engine
    before = engine.stats().generated_tokens
    stream = server.client.completions.create(model=NAME, prompt="x", max_tokens=3, stream=True)
    pause = server.on_loop(worker.pause("wait"))
    until(lambda: worker.is_paused)
    with Ended("disconnected") as gone:
        late = server.connect()
        body = b'{"prompt": "late"}'
        late.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        late.sendall(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        until(lambda: engine.stats().num_waiting == 1)
        late.close()
        gone.wait()
    gate.open()
    assert list(stream)
    pause.result(120)
    assert server.http.post("/resume").status_code == 200
    assert server.post("/v1/completions", prompt="x", max_tokens=1, ignore_eos=True).status_code == 200
    assert engine.stats().generated_tokens <= before + 4
    server.assert_idle()
