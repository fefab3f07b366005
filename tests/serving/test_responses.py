"""/v1/responses with OpenAI's client: the same tokens as chat completions, as items and as events."""

from __future__ import annotations

import json
from typing import Annotated, Any

import openai
import pytest
from pydantic import BaseModel, Field

from hf_paged.serving.response_replies import ResponseEvent, ResponseObject
from hf_paged.serving.responses import ResponsesRequest, chat_of
from tests.serving.harness import NAME, Running

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

from tests.serving.chats import ANSWERS, SCHEMA, TEMPLATE, TOOLS  # noqa: E402

SERVER = {"chat_template": TEMPLATE}
QUESTION = "What does str.capitalize() do?"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer."}, {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "It returns a copy."}, {"role": "user", "content": "Of what?"},
]  # fmt: skip
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def chat(server: Running, messages: list[dict[str, Any]], **fields: Any) -> Any:
    return server.post("/v1/chat/completions", messages=messages, **fields).json()


def as_items(messages: list[dict[str, Any]]) -> list[Any]:
    """As clients send a conversation: what the server has answered has parts."""
    items: list[Any] = []
    for message in messages:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        parts = [{"type": kind, "text": message["content"]}]
        items.append({"type": "message", "role": message["role"], "content": parts})
    return items


def streamed(server: Running, **fields: Any) -> list[Any]:
    """The events, each of which has the fields of its kind and the next number."""
    events = list(server.client.responses.create(model=NAME, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        ResponseEvent.model_validate(event.model_dump(exclude_unset=True))
        assert type(event).__name__ != "BaseModel"
    return events


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["string", "messages", "items"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_answer_is_that_of_a_chat(server: Running, form: str, options: dict[str, Any], stream: bool) -> None:
    if form == "string":
        messages = [MESSAGES[0], MESSAGES[1]]
        given: dict[str, Any] = {"instructions": "Answer.", "input": QUESTION}
    else:
        messages = MESSAGES
        given = {"input": MESSAGES if form == "messages" else as_items(MESSAGES)}
    extra = {"seed": 7} if options else {}
    wanted = chat(server, messages, max_tokens=20, **options, **extra)
    fields = {**given, **options, "max_output_tokens": 20, "extra_body": extra}
    if stream:
        events = streamed(server, **fields)
        answer = events[-1].response
        assert "".join(x.delta for x in events if x.type == "response.output_text.delta") == answer.output_text
    else:
        answer = server.client.responses.create(model=NAME, **fields)
        ResponseObject.model_validate(answer.model_dump(exclude_unset=True))
    (choice,) = wanted["choices"]
    assert answer.output_text == choice["message"]["content"]
    is_cut = choice["finish_reason"] == "length"
    assert answer.status == ("incomplete" if is_cut else "completed")
    assert (answer.incomplete_details.reason if is_cut else answer.incomplete_details) == (
        "max_output_tokens" if is_cut else None
    )
    assert answer.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == wanted["usage"]["completion_tokens"]
    assert answer.usage.total_tokens == wanted["usage"]["total_tokens"]
    assert answer.model == NAME and answer.error is None and answer.id.startswith("resp-")


def test_the_events_of_a_stream(server: Running) -> None:
    events = streamed(server, input=QUESTION, max_output_tokens=8)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    text = events[-1].response.output_text
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert events[2].item.content == [] and events[3].part.text == ""
    assert events[-4].text == events[-3].part.text == events[-2].item.content[0].text == text
    assert {event.item_id for event in events[3:-2]} == {events[2].item.id}
    assert events[-2].item == events[-1].response.output[0]


def test_what_was_asked_is_in_the_answer(server: Running) -> None:
    answer = server.client.responses.create(
        model=NAME, input="x", max_output_tokens=2, temperature=0.5, top_p=0.9, metadata={"a": "b"}, user="me"
    )
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 2)
    assert answer.metadata == {"a": "b"} and answer.user == "me" and answer.store is False


FLAT = [{"type": "function", **each["function"]} for each in TOOLS]


def test_a_schema_for_the_text(server: Running) -> None:
    class Entry(BaseModel):
        name: Annotated[str, Field(max_length=5)]
        n: Annotated[int, Field(ge=0, le=99)]

    answer = server.client.responses.parse(model=NAME, input=QUESTION, text_format=Entry, max_output_tokens=80)
    assert isinstance(answer.output_parsed, Entry)
    text = {"format": {"type": "json_object"}}
    whole = server.post("/v1/responses", input=QUESTION, text=text, max_output_tokens=30)
    assert whole.status_code == 200 and whole.json()["output"][0]["content"][0]["text"].startswith("{")
    assert whole.json()["text"]["format"] == {"type": "json_object"}
    asked = server.post("/v1/responses", input="x", structured_outputs={"choice": ["yes"]}, max_output_tokens=9)
    assert asked.json()["output"][0]["content"][0]["text"] == "yes"


@pytest.mark.parametrize("choice", ["required", "allowed"])
def test_calls(server: Running, choice: Any) -> None:
    if choice == "allowed":
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    fields = {"input": QUESTION, "tools": FLAT, "tool_choice": choice, "parallel_tool_calls": False}
    fields |= {"max_output_tokens": 80}
    answer = server.client.responses.create(model=NAME, **fields)
    (call,) = answer.output
    assert call.type == "function_call" and call.status == "completed" and call.call_id
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert call.name in ("look_up", "add") if choice == "required" else call.name == "add"
    events = streamed(server, **fields)
    kinds = [event.type for event in events]
    assert kinds[2] == "response.output_item.added" and events[2].item.arguments == ""
    assert set(kinds[3:-3]) == {"response.function_call_arguments.delta"}
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert "".join(event.delta for event in events[3:-3]) == events[-3].arguments == call.arguments
    assert events[-3].name == events[-2].item.name == call.name


def test_reasoning_text_and_calls_are_items(formatted: Running, content_alone: None) -> None:
    text, content, reasoning, calls = ANSWERS["all"]
    extra = {"structured_outputs": {"choice": [text]}}
    fields = {"input": QUESTION, "tools": FLAT, "max_output_tokens": 200, "extra_body": extra}
    answer = formatted.client.responses.create(model=NAME, **fields)
    events = streamed(formatted, **fields)
    for each in (answer, events[-1].response):
        first, second, *rest = each.output
        assert first.type == "reasoning" and first.content[0].text == reasoning
        assert second.type == "message" and each.output_text == content
        assert [(item.name, item.arguments) for item in rest] == calls
        assert len({item.call_id for item in rest}) == 2 and len({item.id for item in each.output}) == 4
        assert each.usage.output_tokens_details.reasoning_tokens == 1
    deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in deltas) == reasoning
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]


def test_a_conversation_comes_back_as_it_was_sent(formatted: Running) -> None:
    """The client sends the items that it got, and the results of the calls."""
    items = [
        {"role": "user", "content": QUESTION},
        {"type": "reasoning", "id": "rs-1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me"}], "id": "x"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"n": 41}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"n": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}

    calls = [call("c1", '{"n": 41}'), call("c2", '{"n": 1}')]
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "let me", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]
    wanted = chat(formatted, messages, tools=TOOLS, max_tokens=3)
    answer = formatted.client.responses.create(model=NAME, input=items, tools=FLAT, max_output_tokens=3)
    assert answer.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    body = ResponsesRequest.model_validate({"input": items, "tools": FLAT})
    given = [message.model_dump(exclude_none=True) for message in chat_of(body).messages]
    assert given == messages


REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"previous_response_id": "resp-1"}, 400), ({"conversation": "conv-1"}, 400), ({"background": True}, 400),
    ({"prompt": {"id": "x"}}, 400), ({"include": ["no.such.thing"]}, 422), ({"reasoning": {"no_such_option": 1}}, 422),
    ({"truncation": "auto"}, 400), ({"tools": [{"type": "web_search"}]}, 400),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 400),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]}]}, 400),
    ({"max_output_tokens": 0}, 422), ({"top_logprobs": 2}, 422), ({"n": 2}, 422), ({"tool_choice": "required"}, 422),
    ({"model": "gpt-5"}, 404),
]  # fmt: skip


def test_what_is_refused(server: Running) -> None:
    for fields, status in REFUSED:
        answer = server.post("/v1/responses", **{"input": "x", **fields})
        error = answer.json()["error"]
        assert answer.status_code == status, fields
        if status == 400:
            assert error["code"] == "not_served" and error["param"] == next(iter(fields)), fields


def test_what_asks_for_nothing_is_taken(server: Running) -> None:
    neutral = {
        "tools": [], "tool_choice": "auto", "store": False, "background": False, "truncation": "disabled",
        "reasoning": {"effort": None}, "text": {"format": {"type": "text"}}, "include": [], "service_tier": "auto",
        "parallel_tool_calls": True,
    }  # fmt: skip
    assert server.post("/v1/responses", input="x", max_output_tokens=2, **neutral).status_code == 200


def test_a_request_that_fails(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.serving.processors import OccurrencePenalty

    def broken(self: Any, ids: Any, scores: Any) -> Any:
        raise RuntimeError("a broken processor")

    monkeypatch.setattr(OccurrencePenalty, "__call__", broken)
    fields = {"input": "x", "extra_body": {"presence_penalty": 1.0}}
    events = streamed(server, **fields)
    assert events[-1].type == "response.failed" and "a broken processor" in events[-1].response.error.message
    assert events[-1].response.status == "failed"
    with pytest.raises(openai.InternalServerError, match="a broken processor"):
        server.client.responses.create(model=NAME, **fields)
