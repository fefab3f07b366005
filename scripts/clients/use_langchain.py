"""The calls of LangChain's client (langchain-openai)."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from calls import base_url, close, run, same, task
from langchain_core.messages import convert_to_messages
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

server = {"model": task.model, "base_url": base_url, "api_key": task.key, "max_retries": 0}
messages = convert_to_messages(task.messages)


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(**{**server, "max_tokens": task.limit, "temperature": 0, **options})


class Entry(BaseModel):
    """What a name of Python is."""

    kind: Literal["function", "class", "statement"]
    builtin: bool


@tool
def look_up(kind: Literal["function", "class", "statement"], builtin: bool) -> str:
    """Find the entry of a name."""
    return f"{kind} {builtin}"


def chat() -> None:
    answer = model().invoke(messages)
    same((answer.content, answer.usage_metadata["output_tokens"]), (task.chat, task.chat_tokens))


def chat_batch() -> None:
    same([answer.content for answer in model().batch([messages] * 3)], [task.chat] * 3)


def chat_async() -> None:
    same(asyncio.run(model().ainvoke(messages)).content, task.chat)


def chat_stream() -> None:
    same("".join(part.content for part in model(stream_usage=True).stream(messages)), task.chat)


def chat_n() -> None:
    options = {"n": len(task.samples), "temperature": task.temperature, "seed": task.seed}
    answer = model(**options).generate([messages])
    same([generation.text for generation in answer.generations[0]], task.chat_samples)


def chat_logprobs() -> None:
    answer = model(logprobs=True, top_logprobs=2).invoke(messages)
    close([each["logprob"] for each in answer.response_metadata["logprobs"]["content"]], task.chat_logprobs)


def chat_stop() -> None:
    same(model().invoke(messages, stop=[task.chat_stop]).content, task.chat_stopped)


def chat_responses() -> None:
    answer = model(use_responses_api=True).invoke(messages)
    same("".join(block["text"] for block in answer.content if block["type"] == "text"), task.chat)


def completion() -> None:
    same(OpenAI(**server, max_tokens=task.limit, temperature=0).invoke(task.prompt), task.completion)


def completion_stream() -> None:
    parts = OpenAI(**server, max_tokens=task.limit, temperature=0).stream(task.prompt)
    same("".join(parts), task.completion)


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        same(
            type(model(max_tokens=task.json_limit).with_structured_output(Entry, method=method).invoke(messages)), Entry
        )


def tools() -> None:
    bound = model(max_tokens=task.json_limit).bind_tools([look_up], tool_choice="any")
    (call,) = bound.bind(parallel_tool_calls=False).invoke(messages).tool_calls
    same((call["name"], look_up.invoke(call["args"]).split()[0]), ("look_up", call["args"]["kind"]))


def tools_turn() -> None:
    """The call and its result go back to the model."""
    asked = model(max_tokens=task.json_limit).bind_tools([look_up], tool_choice="look_up").invoke(messages)
    results = [look_up.invoke(call) for call in asked.tool_calls]
    same(bool(results) and bool(model(max_tokens=4).invoke([*messages, asked, *results]).content), True)


run(
    "langchain-openai",
    *(chat, chat_batch, chat_async, chat_stream, chat_n, chat_logprobs, chat_stop, chat_responses),
    *(completion, completion_stream, structured_output, tools, tools_turn),
)
