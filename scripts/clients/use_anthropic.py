"""The calls of Anthropic's Python client."""

from __future__ import annotations

import anthropic
from calls import fails, run, same, task
from entry import TOOL, Entry

client = anthropic.Anthropic(api_key=task.key, base_url=task.url, max_retries=0)
asked = {"model": task.model, "messages": task.messages, "max_tokens": task.limit}
function = TOOL["function"]
tools = [{"name": function["name"], "input_schema": function["parameters"]}]
called = {**asked, "max_tokens": task.json_limit, "tools": tools}
called |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}  # several may be cut off


def message() -> None:
    answer = client.messages.create(**asked)
    same(answer.content[0].text, task.chat)
    same(answer.usage.output_tokens, task.chat_tokens)


def message_stream() -> None:
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    same((text, final.content[0].text, final.usage.output_tokens), (task.chat, task.chat, task.chat_tokens))


def stop() -> None:
    answer = client.messages.create(**asked, stop_sequences=[task.chat_stop])
    same((answer.content[0].text, answer.stop_reason), (task.chat_stopped, "stop_sequence"))
    same(answer.stop_sequence, task.chat_stop)


def tool() -> None:
    answer = client.messages.create(**called)
    Entry.model_validate(answer.content[-1].input)
    same((answer.stop_reason, answer.content[-1].name), ("tool_use", function["name"]))
    result = {"type": "tool_result", "tool_use_id": answer.content[-1].id, "content": "done"}
    turns = [*task.messages, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    more = client.messages.create(**{**asked, "messages": turns}, tools=tools)
    same(more.role, "assistant")


def tool_stream() -> None:
    with client.messages.stream(**called) as stream:
        final = stream.get_final_message()
    Entry.model_validate(final.content[-1].input)


def count() -> None:
    counted = client.messages.count_tokens(model=task.model, messages=task.messages).input_tokens
    usage = client.messages.create(**asked).usage
    same(counted, usage.input_tokens + (usage.cache_read_input_tokens or 0))


def errors() -> None:
    fails(anthropic.NotFoundError, lambda: client.messages.create(**{**asked, "model": "another"}))
    fails(anthropic.BadRequestError, lambda: client.messages.create(**{**asked, "max_tokens": 0}))
    wrong = anthropic.Anthropic(api_key="wrong", base_url=task.url, max_retries=0)
    fails(anthropic.AuthenticationError, lambda: wrong.messages.create(**asked))


run("anthropic", message, message_stream, stop, tool, tool_stream, count, errors)
