"""The calls of OpenAI's Agents SDK (openai-agents), over both of OpenAI's routes."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calls import base_url, run, same, task
from entry import Entry

set_tracing_disabled(True)
MODELS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)
(question,) = (message["content"] for message in task.messages)
looked_up: list[str] = []


@function_tool
def look_up(kind: Literal["function", "class", "statement"], builtin: bool) -> str:
    """Find the entry of a name."""
    looked_up.append(kind)
    return f"{kind} {builtin}"


def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=task.key, max_retries=0)


def agents(limit: int, *, settings: dict[str, Any] | None = None, **options: Any) -> list[Agent]:
    """One for each route. Each is for one event loop."""
    chosen = ModelSettings(max_tokens=limit, temperature=0, **(settings or {}))
    return [
        Agent(name="asker", model=kind(model=task.model, openai_client=client()), model_settings=chosen, **options)
        for kind in MODELS
    ]


def one_call(choice: str) -> dict[str, Any]:
    """A small model would make calls until its limit cuts the last one off."""
    return {"tool_choice": choice, "parallel_tool_calls": False}


def answer_of(agent: Agent) -> Any:
    return asyncio.run(Runner.run(agent, question)).final_output


def chat() -> None:
    for agent in agents(task.limit):
        same(answer_of(agent), task.chat)


def chat_stream() -> None:
    async def ask(agent: Agent) -> str:
        result = Runner.run_streamed(agent, question)
        parts = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return "".join(part.delta for part in parts if part.type == "response.output_text.delta")

    for agent in agents(task.limit):
        same(asyncio.run(ask(agent)), task.chat)


def structured_output() -> None:
    for agent in agents(task.json_limit, output_type=Entry):
        same(type(answer_of(agent)), Entry)


def tools_turn() -> None:
    """The model calls the function, and answers with its result in the conversation."""
    for agent in agents(task.json_limit, tools=[look_up], settings=one_call("required")):
        before = len(looked_up)
        same((type(answer_of(agent)), len(looked_up) > before), (str, True))


def tools_stream() -> None:
    async def ask(agent: Agent) -> Any:
        result = Runner.run_streamed(agent, question)
        kinds = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
        return kinds[:2], type(result.final_output)

    for agent in agents(task.json_limit, tools=[look_up], settings=one_call("look_up")):
        same(asyncio.run(ask(agent)), (["tool_call_item", "tool_call_output_item"], str))


def another_agent() -> None:
    """A conversation is handed over to another agent, which is a tool call too."""
    for agent, other in zip(agents(task.json_limit, settings=one_call("required")), agents(task.json_limit)):
        other.name = "other"
        agent.handoffs = [other]

        same(asyncio.run(Runner.run(agent, question)).last_agent.name, "other")


run("openai-agents", chat, chat_stream, structured_output, tools_turn, tools_stream, another_agent)
