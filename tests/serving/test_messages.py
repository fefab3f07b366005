"""/v1/messages: the tokens of a chat, in Anthropic's form; budgets of reasoning; processors that requests name."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from hf_paged.serving.message_replies import AnthropicEvent, AnthropicMessage
from hf_paged.serving.messages import MessagesRequest, chat_of
from hf_paged.serving.processors import ThinkingBudget
from hf_paged.serving.registered import Registered
from tests.serving.chats import ANSWERS, RESPONSES, SCHEMA, TEMPLATE, TOOLS, said
from tests.serving.harness import NAME, Running, plain, tokenizer

QUESTION = "What does str.capitalize() do?"
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


class Without(LogitsProcessor):  # type: ignore[misc]
    """An operator's own: some tokens are never chosen."""

    def __init__(self, tokens: list[int], prompt_length: int, *, above: float = 0.5) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.index_fill(1, torch.tensor(self.tokens), -torch.inf)  # type: ignore[return-value]


PROCESSORS = (("no_repeat", "transformers:NoRepeatNGramLogitsProcessor"), ("without", f"{__name__}:Without"))
SERVER = {"chat_template": TEMPLATE, "response_template": RESPONSES, "logits_processors": PROCESSORS}


def joined(text: str) -> dict[str, Any]:
    """The message that a client puts together from events."""
    lines = [block.split("\n") for block in text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name.removeprefix("event: ") for name, _ in lines] == [event["type"] for event in events]
    message, arguments = events[0]["message"], dict[int, str]()
    for event in events:
        AnthropicEvent.model_validate(event)
        index, delta = event.get("index"), event.get("delta", {})
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"])
        elif delta.get("type") == "input_json_delta":
            arguments[index] = arguments.get(index, "") + delta["partial_json"]
            message["content"][index]["input"] = arguments[index]
        elif event["type"] == "content_block_delta":
            name = delta["type"].removesuffix("_delta")
            message["content"][index][name] += delta[name]
        elif event["type"] == "message_delta":
            message |= {**delta, "usage": event["usage"]}
    for index, written in arguments.items():
        message["content"][index]["input"] = json.loads(written)
    assert events[-1]["type"] == "message_stop"
    return message  # type: ignore[no-any-return]


def both(server: Running, **fields: Any) -> dict[str, Any]:
    """The message, which is the same whole and streamed."""
    fields = {"model": NAME, "messages": ASKED, "max_tokens": 200, **fields}
    whole, events = server.post("/v1/messages", **fields).json(), server.post("/v1/messages", stream=True, **fields)
    AnthropicMessage.model_validate(whole)
    streamed = joined(events.text)
    for each in (whole, streamed):
        usage, blocks = each["usage"], each["content"]
        each["usage"] = [usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]]
        for item in (each, *blocks):
            item.pop("id", None)
    assert streamed == whole
    return whole  # type: ignore[no-any-return]


@pytest.mark.parametrize("system", ["Answer.", [{"type": "text", "text": "Answer."}]], ids=["text", "block"])
def test_a_message_is_that_of_a_chat(server: Running, system: Any) -> None:
    chat = [{"role": "system", "content": "Answer."}, *ASKED]
    wanted = server.post("/v1/chat/completions", messages=chat, max_tokens=12).json()
    made = both(server, system=system, max_tokens=12)
    [block] = made["content"]
    choice = wanted["choices"][0]
    assert block == {"type": "text", "text": choice["message"]["content"]}
    assert made["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[choice["finish_reason"]]
    counts = [wanted["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
    assert made["usage"] == counts
    count = server.post("/v1/messages/count_tokens", messages=ASKED, system=system)
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
    [block] = both(server, messages=begun, max_tokens=8)["content"]
    assert block["text"] == wanted["choices"][0]["message"]["content"]


def test_a_call_is_forced(server: Running) -> None:
    name = "a" * 128  # OpenAI's have 64 characters
    tools = [{"type": "custom", "name": each, "input_schema": SCHEMA} for each in ("b", name)]
    choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
    call = both(server, tools=tools, tool_choice=choice)["content"][-1]
    assert (call["type"], call["name"], set(call["input"])) == ("tool_use", name, {"name", "n"})


def test_a_conversation_as_a_chat() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "4"}],
        "cache_control": {},
    }
    failed = {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True}
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"n": 1}}
    turns: list[tuple[str, list[Any]]] = [
        ("user", [image, {"type": "text", "text": "Hm?"}]),
        ("assistant", [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "I ask."}, call]),
        ("user", [result, failed, {"type": "text", "text": "Go."}]),
    ]  # fmt: skip
    messages = [{"role": role, "content": blocks} for role, blocks in turns]
    more = {"metadata": {"user_id": "me"}, "output_config": {"effort": "low"}, "top_k": 3, "max_tokens": 9}
    body = MessagesRequest.model_validate({"messages": messages, **more})
    chat = chat_of(body)
    first, second, *others = (message.model_dump(exclude_none=True, exclude_defaults=True) for message in chat.messages)
    assert [part.get("text") for part in first["content"]] == [None, "Hm?"]
    assert (second["content"], second["reasoning_content"]) == ("I ask.", "so")
    assert second["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"n": 1}'}
    results = [{"role": "tool", "content": text, "tool_call_id": f"c{n}"} for n, text in ((1, "4"), (2, "Error: no"))]
    assert others == [*results, {"role": "user", "content": "Go."}]
    assert (chat.user, chat.reasoning_effort, chat.top_k, chat.max_tokens) == ("me", "low", 3, 9)


def content(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


WRONG: dict[str, tuple[dict[str, Any], int]] = {
    "no messages": ({"messages": []}, 422), "text": ({"messages": "a"}, 422), "no turn": ({"messages": [5]}, 422),
    "no limit": ({"max_tokens": None}, 422), "nothing": ({"max_tokens": 0}, 400), "model": ({"model": "x"}, 404),
    "nan": ({"temperature": float("nan")}, 422), "role": ({"messages": [{"role": "tool", "content": "a"}]}, 422),
    "document": (content({"type": "document"}), 400), "block": (content({"type": "x"}), 422),
    "empty": ({"system": "a", **content()}, 400),
    "no thought": ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": ""}]}]}, 400),
    "half": ({"messages": [{"role": "user", "content": "\ud800"}]}, 422), "unknown": ({"temprature": 1}, 422),
    "long": ({"messages": [{"role": "user", "content": "a " * 10**5}]}, 400), "mcp": ({"mcp_servers": [{}]}, 400),
    "a call": (content({"type": "tool_use", "id": "a", "name": "f", "input": {}}), 400),
    "image": (content({"type": "image", "source": {"type": "url", "url": "https://example.org/a"}}), 400),
    "name": ({"tools": [{"name": "a" * 129, "input_schema": {}}]}, 422),
    "tool": ({"tools": [{"type": "bash", "name": "x"}]}, 400), "choice": ({"tool_choice": {"type": "any"}}, 422),
    "budget": ({"thinking": {"type": "enabled"}}, 422), "logprobs": ({"top_logprobs": 3}, 422),
    "budgets": ({"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 6}, 400),
    "formats": ({**said("a"), "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, 400),
    "processor": ({"logits_processors": {"other": {}}}, 400), "stops": ({"stop": "a", "stop_sequences": ["b"]}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(server: Running, name: str) -> None:
    body, status = WRONG[name]
    given = json.dumps({"messages": ASKED, "max_tokens": 9, **body})
    answer = server.http.post("/v1/messages", content=given, headers={"content-type": "application/json"})
    error = answer.json()
    assert answer.status_code == status and error["type"] == "error" and error["error"]["message"]
    assert "messages[1]" not in error["error"]["message"]  # there is one turn
    assert error["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


MARKS = ("<think>", "</think>")
END = tokenizer()(MARKS[1], add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("field", ["thinking_token_budget", "reasoning", "messages"])
@pytest.mark.parametrize("budget", [0, 5])
def test_reasoning_ends_with_its_budget(server: Running, field: str, budget: int) -> None:
    text = f"{tokenizer().bos_token}<|user|>{QUESTION}<|assistant|><think>\n"
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    thought = plain(ids, max_new_tokens=budget)[0] if budget else []
    wanted = tokenizer().decode(plain([*ids, *thought, *END], max_new_tokens=10)[0], skip_special_tokens=True)
    options: dict[str, Any] = {"messages": ASKED, "temperature": 0, "max_tokens": budget + len(END) + 10}
    if field == "messages":
        options["thinking"] = {"type": "enabled", "budget_tokens": budget}
        blocks = server.post("/v1/messages", **options).json()["content"]
        found = [block.get("thinking") or block["text"] for block in blocks]
    else:
        options |= {field: {"max_tokens": budget} if field == "reasoning" else budget}
        options["chat_template_kwargs"] = {"thinking": True}
        message = server.post("/v1/chat/completions", **options).json()["choices"][0]["message"]
        found = [part for part in (message.get("reasoning_content"), message["content"]) if part]
    assert found == [*([tokenizer().decode(thought).strip()] if budget else []), wanted.strip()]


def test_a_budget_of_reasoning_that_the_model_begins() -> None:
    ids = partial(tokenizer(), add_special_tokens=False)
    budget = ThinkingBudget(tokenizer(), MARKS, 2, 3, is_begun=False)
    scores = torch.zeros(1, 2048)

    def forced(answer: list[int]) -> int | None:
        made = budget(torch.tensor([[5, 6, *answer]]), scores)  # type: ignore[arg-type]
        return None if made is scores else int(made.argmax())

    begun, more = ids("\n<think>")["input_ids"], [50, 51, 52]
    for place, token in enumerate(END):
        assert forced([*begun, *more, *END[:place]]) == token
    for other in ([*begun, 50, 51], [*begun, *more, *END], [*begun, 50, *END, 51], [*more, *more, 53, 54]):
        assert forced(other) is None


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
        fields = {"prompt": QUESTION, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True}
        made = server.post("/v1/completions", logits_processors=asked, **fields)
        assert made.json()["choices"][0]["token_ids"] == plain(ids, max_new_tokens=12, eos_token_id=5000, **options)[0]


def test_arguments_of_processors_are_checked(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Any, str]] = [
        ({"other": {}}, "'other' is not registered; there are 'no_repeat', 'without'"),
        *(({"no_repeat": {"ngram_size": size}}, "no_repeat") for size in ("2", 0, None, [2], 1.5)),
        ({"no_repeat": {}}, "no_repeat.ngram_size"), ({"no_repeat": {"ngram_size": 2, "x": 1}}, "no_repeat.x"),
        ({"without": {"tokens": [10**6]}}, "IndexError"),  # on the prompt, before it is queued
    ]  # fmt: skip
    for given, words in cases:
        answer = server.post("/v1/completions", prompt="x", logits_processors=given)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], given
    monkeypatch.setitem(Without.__init__.__annotations__, "above", "Unknown")
    for place, words in {"nowhere:X": "cannot be imported", "json:dumps": "is no class", "json:X": "cannot be",
                         f"{__name__}:Without": "no schema"}.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            Registered.of("a", place)
