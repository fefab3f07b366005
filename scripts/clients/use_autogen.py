"""The calls of AutoGen's client and agent (autogen-ext, autogen-agentchat)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from calls import base_url, run, same, task
from entry import Entry

(question,) = (message["content"] for message in task.messages)
messages = [UserMessage(content=question, source="user")]
ABLE = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
_Result = TypeVar("_Result")


def look_up(kind: Literal["function", "class", "statement"], builtin: bool) -> str:
    """Find the entry of a name."""
    return f"{kind} {builtin}"


tool = FunctionTool(look_up, description="find the entry of a name")


def with_client(limit: int, call: Callable[[Any], Awaitable[_Result]]) -> _Result:
    async def use() -> _Result:
        client = OpenAIChatCompletionClient(
            model=task.model,
            base_url=base_url,
            api_key=task.key,
            max_retries=0,
            max_tokens=limit,
            temperature=0,
            model_info={**ABLE, "family": ModelFamily.UNKNOWN},
        )
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(use())


def chat() -> None:
    answer = with_client(task.limit, lambda client: client.create(messages))
    same((answer.content, answer.usage.completion_tokens), (task.chat, task.chat_tokens))


def chat_stream() -> None:
    async def ask(client: Any) -> str:
        return "".join([part async for part in client.create_stream(messages) if isinstance(part, str)])

    same(with_client(task.limit, ask), task.chat)


def structured_output() -> None:
    answer = with_client(task.json_limit, lambda client: client.create(messages, json_output=Entry))
    Entry.model_validate_json(answer.content)


def tools_turn() -> None:
    """The call and its result go back to the model."""

    async def ask(client: Any) -> Any:
        asked = await client.create(messages, tools=[tool], tool_choice="required")
        results = [
            FunctionExecutionResult(
                content=await tool.run_json({"kind": "class", "builtin": True}, CancellationToken()),
                name=call.name,
                call_id=call.id,
                is_error=False,
            )
            for call in asked.content
        ]
        turn = [
            AssistantMessage(content=asked.content, source="model"),
            FunctionExecutionResultMessage(content=results),
        ]
        last = await client.create([*messages, *turn], tools=[tool], extra_create_args={"max_tokens": 8})
        return asked.content[0].name, type(last.content)

    same(with_client(task.json_limit, ask), ("look_up", str))


def agent() -> None:
    async def ask(client: Any) -> Any:
        return (await AssistantAgent("asker", client, tools=[look_up]).run(task=question)).messages[-1].type

    same(with_client(task.limit, ask), "TextMessage")


run("autogen-ext", chat, chat_stream, structured_output, tools_turn, agent)
