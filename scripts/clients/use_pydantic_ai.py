"""The calls of Pydantic AI, over both of OpenAI's routes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

from calls import base_url, run, same, task
from entry import Entry
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

MODELS = (OpenAIChatModel, OpenAIResponsesModel)
(question,) = (message["content"] for message in task.messages)


def agents(limit: int, *, settings: dict[str, Any] | None = None, **options: Any) -> list[Agent]:
    """One for each route."""
    provider = OpenAIProvider(base_url=base_url, api_key=task.key)
    chosen = {"max_tokens": limit, "temperature": 0, **(settings or {})}
    return [Agent(kind(task.model, provider=provider), model_settings=chosen, **options) for kind in MODELS]


def chat() -> None:
    for agent in agents(task.limit):
        result = agent.run_sync(question)
        same(result.output.strip(), task.chat.strip())
        same(result.usage.output_tokens, task.chat_tokens)


def chat_stream() -> None:
    async def ask(agent: Agent) -> str:
        async with agent.run_stream(question) as result:
            return [text async for text in result.stream_text(debounce_by=None)][-1]

    for agent in agents(task.limit):
        same(asyncio.run(ask(agent)).strip(), task.chat.strip())


def structured_output() -> None:
    """By a tool, which is the default, and by a JSON schema."""
    for form in (Entry, ToolOutput(Entry), NativeOutput(Entry, strict=True)):
        for agent in agents(task.json_limit, output_type=form):
            same(type(agent.run_sync(question).output), Entry)


def structured_stream() -> None:
    async def ask(agent: Agent) -> Any:
        async with agent.run_stream(question) as result:
            return await result.get_output()

    for agent in agents(task.json_limit, output_type=Entry):
        same(type(asyncio.run(ask(agent))), Entry)


def tools_turn() -> None:
    """The model calls the function, and answers with its result in the conversation."""
    looked_up: list[str] = []

    def look_up(kind: Literal["function", "class", "statement"], builtin: bool) -> str:
        """Find the entry of a name."""
        looked_up.append(kind)
        return f"{kind} {builtin}"

    for agent in agents(task.json_limit, tools=[look_up], settings={"extra_body": {"tool_choice": "required"}}):
        before = len(looked_up)
        with contextlib.suppress(UsageLimitExceeded):  # it has to call it in every answer
            agent.run_sync(question, usage_limits=UsageLimits(request_limit=2))
        same(len(looked_up) > before, True)


def prompted() -> None:
    """The schema is in the prompt, with response_format=json_object; what the model makes of it is its own."""
    for agent in agents(task.json_limit, output_type=PromptedOutput(Entry), retries=0):
        with contextlib.suppress(UnexpectedModelBehavior):
            agent.run_sync(question)


run("pydantic-ai-slim", chat, chat_stream, structured_output, structured_stream, tools_turn, prompted)
