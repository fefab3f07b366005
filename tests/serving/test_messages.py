"""/v1/messages: the same tokens as a chat, in Anthropic's form; budgets of reasoning; processors that an operator has
registered."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from hf_paged.serving.messages import MessagesRequest, chat_of
from hf_paged.serving.processors import ThinkingBudget
from hf_paged.serving.registered import Registered
from hf_paged.serving.replies import AnthropicEvent, AnthropicMessage
from tests.serving.chats import ANSWERS, RESPONSES, SCHEMA, TEMPLATE, TOOLS, said
from tests.serving.harness import KEY, NAME, Running, plain, serving, shared_model, tokenizer

QUESTION = "What does str.capitalize() do?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


class Without(LogitsProcessor):  # type: ignore[misc]
    """An operator's own: some tokens are never chosen."""

    def __init__(self, tokens: list[int], prompt_length: int, *, above: float = 0.5) -> None:
        self.tokens, self.above = tokens, above
        assert prompt_length > 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        made = scores.clone()
        made[:, self.tokens] = -torch.inf
        return made  # type: ignore[return-value]


PROCESSORS = (("no_repeat", "transformers:NoRepeatNGramLogitsProcessor"), ("without", f"{__name__}:Without"))
SERVER = {"chat_template": TEMPLATE, "response_template": RESPONSES, "logits_processors": PROCESSORS}


def events_of(text: str) -> list[Any]:
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    for event in events:
        AnthropicEvent.model_validate(event)
    return events


def joined(events: list[Any]) -> dict[str, Any]:
    """The message that a client puts together."""
    message = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "json")
            block[name] += delta["partial_json" if name == "json" else name]
        elif event["type"] == "content_block_stop":
            block = message["content"][event["index"]]
            if text := block.pop("json"):
                block["input"] = json.loads(text)
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    assert events[-1]["type"] == "message_stop"
    return message  # type: ignore[no-any-return]


def both(server: Running, **fields: Any) -> dict[str, Any]:
    """The message, which is the same whole and streamed."""
    fields = {"model": NAME, "messages": ASKED, "max_tokens": 200, **fields}
    whole, events = server.post("/v1/messages", **fields).json(), server.post("/v1/messages", stream=True, **fields)
    AnthropicMessage.model_validate(whole)
    streamed = joined(events_of(events.text))
    counts = [[each["usage"][f"{name}_tokens"] for name in ("input", "cache_read_input")] for each in (whole, streamed)]
    assert sum(counts[0]) == sum(counts[1])
    for each in (whole, streamed):
        for block in each["content"]:
            block.pop("id", None)
        each["usage"] = {"output_tokens": each["usage"]["output_tokens"], "prompt": sum(counts[0])}
        each.pop("id")
    assert streamed == whole
    return whole  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "system", [None, "Answer.", [{"type": "text", "text": "Answer."}]], ids=["no", "text", "block"]
)
def test_a_message_is_that_of_a_chat(server: Running, system: Any) -> None:
    chat = [*([{"role": "system", "content": "Answer."}] if system else []), *ASKED]
    wanted = server.post("/v1/chat/completions", messages=chat, max_tokens=12).json()
    made = both(server, **({"system": system} if system else {}), max_tokens=12)
    [block] = made["content"]
    choice = wanted["choices"][0]
    assert block == {"type": "text", "text": choice["message"]["content"]}
    assert made["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
    counts = [wanted["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    assert [made["usage"]["prompt"], made["usage"]["output_tokens"]] == counts
    count = server.post("/v1/messages/count_tokens", messages=ASKED, **({"system": system} if system else {}))
    assert count.json() == {"input_tokens": counts[0]}


@pytest.mark.usefixtures("content_alone")
def test_blocks(server: Running) -> None:
    text, content, reasoning, calls = ANSWERS["all"]
    tools = [{"name": each["function"]["name"], "input_schema": SCHEMA} for each in TOOLS]
    made = both(server, tools=tools, **said(text))
    assert made["content"] == [
        {"type": "thinking", "thinking": reasoning, "signature": ""}, {"type": "text", "text": content},
        *({"type": "tool_use", "name": name, "input": json.loads(arguments)} for name, arguments in calls),
    ]  # fmt: skip
    assert made["stop_reason"] == "tool_use"
    stopped = both(server, stop_sequences=["lo, w"], **said("hello, world"))
    assert stopped["content"] == [{"type": "text", "text": "hel"}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo, w")
    begun = [*ASKED, {"role": "assistant", "content": "It"}]
    options = {"add_generation_prompt": False, "continue_final_message": True, "max_tokens": 8}
    wanted = server.post("/v1/chat/completions", messages=begun, **options).json()
    assert (
        both(server, messages=begun, max_tokens=8)["content"][0]["text"] == wanted["choices"][0]["message"]["content"]
    )


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}]
)
def test_calls_are_forced(server: Running, choice: Any) -> None:
    tools = [{"type": "custom", "name": each["function"]["name"], "input_schema": SCHEMA} for each in TOOLS]
    made = both(server, tools=tools, tool_choice={"disable_parallel_tool_use": True, **choice})
    call = made["content"][-1]
    assert call["type"] == "tool_use" and set(call["input"]) == {"name", "n"}
    assert call["name"] == "add" or choice["type"] == "any"


def test_a_conversation_as_a_chat() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    link = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}], "cache_control": {}},
        {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
        {"type": "text", "text": "Go."},
    ]  # fmt: skip
    body = MessagesRequest.model_validate(
        {
            "max_tokens": 9, "metadata": {"user_id": "me"}, "output_config": {"effort": "low"}, "top_k": 3,
            "messages": [
                {"role": "user", "content": [image, link, {"type": "text", "text": "Hm?"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "so", "signature": "x"}, {"type": "text", "text": "I ask."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"n": 1}},
                ]},
                {"role": "user", "content": results},
            ],
        }
    )  # fmt: skip
    chat = chat_of(body)
    first, second, *others = (message.model_dump(exclude_none=True, exclude_defaults=True) for message in chat.messages)
    assert [part.get("text") or part["image_url"]["url"] for part in first["content"]] == [
        "data:image/png;base64,AAAA", "https://example.org/a.png", "Hm?",
    ]  # fmt: skip
    assert (second["content"], second["reasoning_content"]) == ("I ask.", "so")
    assert second["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"n": 1}'}
    assert others == [
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "c2"}, {"role": "user", "content": "Go."},
    ]  # fmt: skip
    assert (chat.user, chat.reasoning_effort, chat.top_k, chat.max_tokens) == ("me", "low", 3, 9)


def content(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "no messages": ({"messages": []}, 422), "text": ({"messages": "a"}, 422), "no turn": ({"messages": [5]}, 422),
    "no limit": ({"max_tokens": None}, 422), "nothing": ({"max_tokens": 0}, 400), "model": ({"model": "x"}, 404),
    "nan": ({"temperature": float("nan")}, 422), "role": ({"messages": [{"role": "tool", "content": "a"}]}, 422),
    "document": (content({"type": "document"}), 400), "block": (content({"type": "x"}), 422), "empty": (content(), 400),
    "no thought": ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]}]}, 400),
    "half": ({"messages": [{"role": "user", "content": "\ud800"}]}, 422), "unknown": ({"temprature": 1}, 422),
    "long": ({"messages": [{"role": "user", "content": "a " * 10**5}]}, 400), "mcp": ({"mcp_servers": [{}]}, 400),
    "a call": (content({"type": "tool_use", "id": "a", "name": "f", "input": {}}), 400),
    "image": (content({"type": "image", "source": {"type": "url", "url": "https://example.org/a"}}), 400),
    "tool": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400),
    "choice": ({"tool_choice": {"type": "any"}}, 422),
    "budget": ({"thinking": {"type": "enabled"}}, 422), "logprobs": ({"top_logprobs": 3}, 422),
    "budgets": ({"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 6}, 400),
    "processor": ({"logits_processors": {"other": {}}}, 400), "stops": ({"stop": "a", "stop_sequences": ["b"]}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(server: Running, name: str) -> None:
    body, status = WRONG[name]
    given = json.dumps({"messages": ASKED, "max_tokens": 9, **body})
    answer = server.http.post("/v1/messages", content=given, headers={"content-type": "application/json"})
    error = answer.json()
    assert answer.status_code == status and error["type"] == "error" and error["error"]["message"]
    assert error["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_keys() -> None:
    with serving(api_keys=(KEY,)) as running:
        for headers, status in (({"x-api-key": KEY}, 200), ({"x-api-key": "x"}, 401), ({}, 401)):
            running.http.headers.pop("authorization", None)
            answer = running.http.post("/v1/messages", json={"messages": ASKED, "max_tokens": 2}, headers=headers)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"


# -- budgets of reasoning ------------------------------------------------------------------------------------------

MARKS = ("<think>", "</think>")
END = tokenizer()(MARKS[1], add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("field", ["thinking_token_budget", "reasoning", "messages", "responses"])
@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_ends_with_its_budget(server: Running, field: str, budget: int) -> None:
    options: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}, "temperature": 0}
    text = f"{tokenizer().bos_token}<|user|>{QUESTION}<|assistant|><think>\n"
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    thought = plain(ids, max_new_tokens=budget)[0] if budget else []
    wanted = tokenizer().decode(plain([*ids, *thought, *END], max_new_tokens=10)[0], skip_special_tokens=True)
    if field == "messages":
        asked = {"type": "enabled", "budget_tokens": budget}
        blocks = server.post(
            "/v1/messages", messages=ASKED, thinking=asked, max_tokens=budget + len(END) + 10, temperature=0
        ).json()["content"]
        found = [block.get("thinking") or block["text"] for block in blocks]
    elif field == "responses":
        made = server.post(
            "/v1/responses", input=QUESTION, reasoning={"max_tokens": budget},
            max_output_tokens=budget + len(END) + 10, **options,
        ).json()["output"]  # fmt: skip
        found = [item["content"][0]["text"] for item in made]
    else:
        options |= {field: {"max_tokens": budget} if field == "reasoning" else budget}
        made = server.post("/v1/chat/completions", messages=ASKED, max_tokens=budget + len(END) + 10, **options).json()
        message = made["choices"][0]["message"]
        found = [part for part in (message.get("reasoning_content"), message["content"]) if part]
    assert found[-1] == wanted.strip()
    assert found[:-1] == [text for text in [tokenizer().decode(thought).strip()] if text]


def test_a_budget_of_reasoning_that_the_model_begins() -> None:
    ids = partial(tokenizer(), add_special_tokens=False)
    budget = ThinkingBudget(tokenizer(), MARKS, 2, 3, is_begun=False)
    scores = torch.zeros(1, 2048)

    def forced(answer: list[int]) -> int | None:
        made = budget(torch.tensor([[5, 6, *answer]]), scores)  # type: ignore[arg-type]
        return None if made is scores else int(made.argmax())

    begun, more = ids("\n<think>")["input_ids"], [50, 51, 52]
    assert forced(begun) is forced([*begun, *more[:2]]) is None
    for place, token in enumerate(END):
        assert forced([*begun, *more, *END[:place]]) == token
    assert forced([*begun, *more, *END]) is None, "it has ended"
    assert forced([*begun, 50, *END, 51]) is forced([*more, *more, 53, 54]) is None, "ended earlier; never begun"


def test_a_budget_without_marks_is_refused() -> None:
    with serving() as running:
        answer = running.post("/v1/chat/completions", messages=ASKED, thinking_token_budget=5)
        assert answer.status_code == 400 and "--response-template" in answer.text


# -- processors ----------------------------------------------------------------------------------------------------


def test_registered_processors(server: Running) -> None:
    ids = tokenizer()(QUESTION)["input_ids"]
    [free] = plain(ids, max_new_tokens=12, eos_token_id=5000)
    banned = sorted(set(free[:3]))
    own = Without(banned, len(ids))
    for asked, options in (
        ({"no_repeat": {"ngram_size": 1}}, {"no_repeat_ngram_size": 1}),
        ({"without": {"tokens": banned}}, {"logits_processor": [own]}),
        ({"without": {"tokens": banned, "above": 1}, "no_repeat": {"ngram_size": 2}},
         {"logits_processor": [own], "no_repeat_ngram_size": 2}),
    ):  # fmt: skip
        made = server.post(
            "/v1/completions", prompt=QUESTION, max_tokens=12, logits_processors=asked, return_token_ids=True,
            ignore_eos=True,
        )  # fmt: skip
        assert made.json()["choices"][0]["token_ids"] == plain(ids, max_new_tokens=12, eos_token_id=5000, **options)[0]


def test_arguments_of_processors_are_checked(server: Running) -> None:
    for asked, words in {
        "other": "'other' is not registered; there are 'no_repeat', 'without'", "no_repeat": "no_repeat.ngram_size",
    }.items():  # fmt: skip
        answer = server.post("/v1/completions", prompt="x", logits_processors={asked: {}})
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    wrong: list[Any] = [
        {"ngram_size": "2"}, {"ngram_size": 0}, {"ngram_size": 2, "x": 1}, {"ngram_size": None}, {"ngram_size": [2]},
    ]  # fmt: skip
    for given in wrong:
        answer = server.post("/v1/completions", prompt="x", logits_processors={"no_repeat": given})
        assert answer.status_code == 400 and "no_repeat" in answer.json()["error"]["message"], given
    answer = server.post("/v1/completions", prompt="x", logits_processors={"without": {"tokens": [10**6]}})
    assert answer.status_code == 400 and "IndexError" in answer.text, "it fails on the prompt, before it is queued"
    for place, words in {"nowhere:X": "cannot be imported", "json:dumps": "is no class", "json:X": "cannot be"}.items():
        with pytest.raises(ValueError, match=words):
            Registered.of("a", place)
    assert shared_model() is server.engine.model
