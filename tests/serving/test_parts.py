"""Answers that a response template takes apart: parts, their log-probabilities, and what clients send back of them."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import Response

from hf_paged.generation.requests.outputs import RequestMetrics, RequestOutput
from hf_paged.serving import answers, schema
from hf_paged.serving.responses import ResponsesRequest
from hf_paged.serving.text import Detokenizer
from tests.serving.chats import QUESTION, RESPONSES, TEMPLATE, TOOLS, said
from tests.serving.harness import NAME, Running

pytestmark = pytest.mark.usefixtures("content_alone")
SERVER = {"chat_template": TEMPLATE, "response_template": RESPONSES}
CALL = '<think>a</think>let me\n<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_log_probabilities_of_its_text(server: Running, stream: bool) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "max_output_tokens": 60}
    extra = said("<think>so it is</think>yes and no")
    made = server.client.responses.create(model=NAME, input="x", stream=stream, extra_body=extra, **fields)
    answer = list(made)[-1].response if stream else made
    reasoning, message = answer.output
    assert reasoning.content[0].text == "so it is" and message.content[0].text == "yes and no"
    tokens = "".join(each.token for each in message.content[0].logprobs)
    assert tokens == "</think>yes and no<|eos|>"


def test_a_stream_has_no_empty_chunks(server: Running) -> None:
    fields = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 200, "extra_body": said(CALL)}
    chunks = list(server.client.chat.completions.create(model=NAME, stream=True, **fields))
    deltas = [chunk.choices[0] for chunk in chunks]
    assert all(each.finish_reason or each.delta.model_dump(exclude_none=True) for each in deltas)
    assert deltas[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{"best_of": 8}, {"n": 4}, {"n": 4, "stop": "never"}], ids=str)
def test_long_answers_do_not_become_text_on_the_event_loop(server: Running, monkeypatch: Any, fields: Any) -> None:
    monkeypatch.setattr(answers, "_LONG", 20)
    on_loop: list[int] = []
    push, finish, loop = Detokenizer.push, Detokenizer.finish, server.thread.ident

    def noted(what: Any) -> Any:
        def read(self: Detokenizer, tokens: Any = ()) -> str:
            on_loop.append(len(tokens) if threading.get_ident() == loop else 0)
            return str(what(self, tokens))

        return read

    monkeypatch.setattr(Detokenizer, "push", noted(push))
    monkeypatch.setattr(Detokenizer, "finish", noted(finish))
    answer = server.post("/v1/completions", prompt="x", temperature=1, max_tokens=10, ignore_eos=True, **fields)
    assert answer.status_code == 200 and on_loop
    # With a stop string, each step's tokens are read when they are there.
    assert max(on_loop) <= (1 if "stop" in fields else 0)


def test_the_log_has_the_longest_wait_of_all_prompts() -> None:
    def output(name: str, *, finished: bool = False, **times: float) -> RequestOutput:
        metrics = RequestMetrics(10.0, num_preemptions=int(finished), **times)  # type: ignore[arg-type]
        return RequestOutput(name, [1], [], finished, metrics)

    outcome = answers.Outcome(prompt_tokens=2)
    outcome.note([output("a", start_time=11.0)])
    outcome.note([output("a", start_time=11.0, first_token_time=12.0)])
    outcome.note([output("a", start_time=11.0, first_token_time=12.0), output("b", start_time=15.0)])
    assert (outcome.queue_seconds, outcome.first_token_seconds) == (5.0, 2.0)
    outcome.note([output("b", start_time=15.0, first_token_time=16.0, finished=True)])
    assert (outcome.queue_seconds, outcome.first_token_seconds, outcome.preemptions) == (5.0, 2.0, 1)


def test_clients_send_back_what_they_have_got(server: Running) -> None:
    """As their own classes write it down, with the fields that are None."""
    body: dict[str, Any] = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
    message = server.client.chat.completions.create(model=NAME, **body, extra_body=said(CALL)).choices[0].message
    sent = [message.model_dump(), ChatCompletionMessage(role="assistant", content="x", annotations=[]).model_dump()]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    answer = server.post("/v1/chat/completions", messages=[*QUESTION, sent[0], result, sent[1], *QUESTION])
    assert answer.status_code == 200, answer.text
    response: Response = server.client.responses.create(
        model=NAME,
        input="x",
        extra_body={"tools": [{"type": "function", **TOOLS[0]["function"]}], **said(CALL.replace("add", "look_up"))},
    )
    items = [item.model_dump() for item in response.output]
    assert {item["type"] for item in items} == {"reasoning", "message", "function_call"}
    ResponsesRequest.model_validate({"input": [{"role": "user", "content": "x"}, *items]})
    assert schema.CompletionRequest(prompt="x", echo=None).echo is None
    wrong = server.post("/v1/chat/completions", messages=[{**sent[1], "annotations": [{"type": "url_citation"}]}])
    assert wrong.status_code == 400 and "annotations" in wrong.json()["error"]["message"]


def test_a_schema_that_no_answer_could_repeat(server: Running) -> None:
    bodies = {
        "/v1/responses": '{"input": "x", "tool_choice": "none", "tools": [{"type": "function", "name": "f", '
        '"parameters": {"description": %s}}]}',
        "/v1/chat/completions": '{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
        '"json_schema", "json_schema": {"name": "f", "schema": {"description": %s}}}}',
    }
    for value, (path, body) in product((r'"\ud800"', "NaN", "-Infinity"), bodies.items()):
        answer = server.http.post(path, content=body % value, headers={"content-type": "application/json"})
        assert answer.status_code == 422 and "a JSON object is needed" in answer.json()["error"]["message"]
