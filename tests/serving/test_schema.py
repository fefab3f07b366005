"""Bodies that are wrong in many places: their errors are few, for the event loop waits while pydantic makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from hf_paged.serving import schema
from hf_paged.serving.responses import ResponsesRequest
from tests.serving.harness import Running

MANY = 5000
HELLO = [{"role": "user", "content": "Hello"}]
BODIES = [
    schema.CompletionRequest, schema.ChatRequest, ResponsesRequest, schema.TokenizeRequest, schema.DetokenizeRequest,
    schema.LoadAdapterRequest,
]  # fmt: skip
WRONG: list[tuple[Any, dict[str, Any]]] = [
    (schema.CompletionRequest, {"prompt": [{}] * MANY}), (schema.CompletionRequest, {"prompt": [[{}] * MANY] * 2}),
    (schema.CompletionRequest, {"prompt": "x", "logit_bias": {str(number): "much" for number in range(MANY)}}),
    (schema.CompletionRequest, {"prompt": "x", "logit_bias": {f"x{number}": 1 for number in range(MANY)}}),
    (schema.CompletionRequest, {"prompt": "x", "allowed_token_ids": [-1] * MANY}),
    (schema.ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}] * 2}),
    (schema.ChatRequest, {"messages": HELLO, "metadata": {str(number): 1 for number in range(MANY)}}),
    (schema.ChatRequest, {"messages": HELLO, "functions": [1] * MANY}), (ResponsesRequest, {"input": [{}] * 4000}),
    (ResponsesRequest, {"input": [{"role": "user", "content": [{}] * MANY}] * 2}),
    (ResponsesRequest, {"input": "x", "metadata": {str(number): 1 for number in range(MANY)}}),
    (schema.DetokenizeRequest, {"tokens": ["x"] * MANY}),
    *((body, {f"x{number}": 1 for number in range(MANY)}) for body in BODIES),
]  # fmt: skip


def test_a_body_has_few_errors() -> None:
    for place, (body, fields) in enumerate(WRONG):
        with pytest.raises(ValidationError) as caught:
            body.model_validate(fields)
        assert caught.value.error_count() < 100, place


def schemas_in(each: Any) -> Iterator[dict[str, Any]]:
    if isinstance(each, dict):
        if isinstance(each.get("type"), str):
            yield each
        each = list(each.values())
    for inner in each if isinstance(each, list) else ():
        yield from schemas_in(inner)


def test_every_list_ends_at_its_first_error() -> None:
    for body in BODIES:
        schemas: Any = body.__pydantic_core_schema__
        lists = [each for each in schemas_in(schemas) if each["type"] == "list"]
        checked = [each for each in lists if each.get("items_schema", {"type": "any"})["type"] != "any"]
        assert checked or body is schema.LoadAdapterRequest
        assert all(each.get("fail_fast") for each in checked), body


def test_there_may_be_a_bias_for_each_token() -> None:
    biases = {str(token): -100 if token % 2 else 0.5 for token in range(MANY)}
    assert schema.CompletionRequest(prompt="x", logit_bias=biases).logit_bias == biases
    for wrong in (True, float("nan"), 101, None, "1", [1]):
        with pytest.raises(ValidationError, match="the bias of token 7 is not a number from -100 to 100"):
            schema.CompletionRequest(prompt="x", logit_bias={"7": wrong})


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


PLACES: list[tuple[str, dict[str, Any], str]] = [
    # pydantic's place has the name of the chosen type too, which may be the name of a field.
    ("chat/completions", part(type="image_url"), "messages[0].content[0].image_url: Field required"),
    ("chat/completions", part(type="image_url", image_url={"url": 5}), "messages[0].content[0].image_url.url=5: Input"),
    ("chat/completions", part(type="image_url", image_url="x"), 'messages[0].content[0].image_url="x": an object is'),
    ("chat/completions", part(type="text", text=5), "messages[0].content[0].text=5: Input"),
    ("chat/completions", part(type="text", text="x", cache_control=5), "messages[0].content[0].cache_control=5: "),
    (
        "chat/completions", {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name: Field required",
    ),
    ("chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].f"),
    (
        "chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "y": 1}}]},
        "tools[0].function.y: this field is not known; leave it out",
    ),
    ("chat/completions", part(type="image_url", image_url={}), "messages[0].content[0].image_url.url: Field required"),
    ("responses", {"input": "x", "text": {"z": 1}}, "text.z: this field is not known; leave it out"),
    ("responses", {"input": [{"role": "user"}]}, "input[0].content: Field required"),
    ("responses", {"input": [{"type": "x"}]}, "input[0] is an object: Input tag 'x' found using 'type' does not match"),
]  # fmt: skip


def test_the_error_names_the_value_that_is_wrong(server: Running) -> None:
    for route, fields, words in PLACES:
        answer = server.post(f"/v1/{route}", **fields)
        assert answer.status_code == 422 and answer.json()["error"]["message"].startswith(words), words
