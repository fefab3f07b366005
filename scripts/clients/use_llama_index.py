"""The calls of LlamaIndex's client for servers like OpenAI's (llama-index-llms-openai-like)."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from calls import base_url, close, run, same, task
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

messages = [ChatMessage(**message) for message in task.messages]


def model(**options: Any) -> OpenAILike:
    given = {"is_chat_model": True, "temperature": 0, "max_tokens": task.limit, "context_window": 1024, **options}
    return OpenAILike(model=task.model, api_base=base_url, api_key=task.key, max_retries=0, **given)


class Entry(BaseModel):
    """What a name of Python is."""

    kind: Literal["function", "class", "statement"]
    builtin: bool


def look_up(kind: Literal["function", "class", "statement"], builtin: bool) -> str:
    """Find the entry of a name."""
    return f"{kind} {builtin}"


def chat() -> None:
    same(model().chat(messages).message.content, task.chat)


def chat_async() -> None:
    same(asyncio.run(model().achat(messages)).message.content, task.chat)


def chat_stream() -> None:
    same("".join(part.delta or "" for part in model().stream_chat(messages)), task.chat)


def chat_n() -> None:
    options = {"n": len(task.samples), "temperature": task.temperature, "seed": task.seed}
    answer = model().chat(messages, **options)
    same([choice.message.content for choice in answer.raw.choices], task.chat_samples)


def chat_logprobs() -> None:
    answer = model(logprobs=True, top_logprobs=2).chat(messages)
    close([each[0].logprob for each in answer.logprobs], task.chat_logprobs)


def chat_stop() -> None:
    same(model().chat(messages, stop=[task.chat_stop]).message.content, task.chat_stopped)


def completion() -> None:
    same(model(is_chat_model=False).complete(task.prompt).text, task.completion)


def completion_stream() -> None:
    parts = model(is_chat_model=False).stream_complete(task.prompt)
    same("".join(part.delta or "" for part in parts), task.completion)


def structured_output() -> None:
    """By a tool, and by a JSON schema."""
    for schema in (False, True):
        llm = model(max_tokens=task.json_limit, is_function_calling_model=True, should_use_structured_outputs=schema)
        same(type(llm.as_structured_llm(Entry).chat(messages).raw), Entry)


def tools() -> None:
    llm = model(max_tokens=task.json_limit, is_function_calling_model=True)
    tool = FunctionTool.from_defaults(look_up, fn_schema=Entry)
    answer = llm.chat_with_tools([tool], chat_history=messages, tool_required=True)
    call = llm.get_tool_calls_from_response(answer)[0]
    same((call.tool_name, tool.call(**call.tool_kwargs).content.split()[0]), ("look_up", call.tool_kwargs["kind"]))


run(
    "llama-index-llms-openai-like",
    *(chat, chat_async, chat_stream, chat_n, chat_logprobs, chat_stop),
    *(completion, completion_stream, structured_output, tools),
)
