"""The calls of smolagents, with its model for servers like OpenAI's."""

from __future__ import annotations

from calls import base_url, run, same, task
from entry import Entry
from smolagents import ActionStep, ChatMessage, CodeAgent, MultiStepAgent, OpenAIModel, ToolCallingAgent, tool

messages = [
    ChatMessage(role=message["role"], content=[{"type": "text", "text": message["content"]}])
    for message in task.messages
]


@tool
def look_up(kind: str, builtin: bool) -> str:
    """Find the entry of a name.

    Args:
        kind: function, class or statement
        builtin: whether no import is needed
    """
    return f"{kind} {builtin}"


def model(limit: int) -> OpenAIModel:
    return OpenAIModel(task.model, api_base=base_url, api_key=task.key, max_tokens=limit, temperature=0)


def chat() -> None:
    answer = model(task.limit)(messages)
    same((answer.content, answer.token_usage.output_tokens), (task.chat, task.chat_tokens))


def chat_stream() -> None:
    same("".join(part.content or "" for part in model(task.limit).generate_stream(messages)), task.chat)


def chat_stop() -> None:
    same(model(task.limit)(messages, stop_sequences=[task.chat_stop]).content, task.chat_stopped)


def structured_output() -> None:
    form = {"name": "entry", "schema": Entry.model_json_schema()}
    answer = model(task.json_limit)(messages, response_format={"type": "json_schema", "json_schema": form})
    Entry.model_validate_json(answer.content)


def tools() -> None:
    answer = model(task.json_limit)(messages, tools_to_call_from=[look_up])
    same(answer.tool_calls[0].function.name, "look_up")


def steps(agent: MultiStepAgent) -> int:
    """How many the agent has made. Its own long prompt is not for a small model."""
    agent.prompt_templates["system_prompt"] = "Call a tool."
    agent.run(messages[0].content[0]["text"])
    return sum(isinstance(step, ActionStep) for step in agent.memory.steps)


def tools_agent() -> None:
    """Calls and their results go back to the model. It may never call the tool that ends the run."""
    for stream in (False, True):
        agent = ToolCallingAgent(
            [look_up], model(task.limit * 2), max_steps=2, stream_outputs=stream, verbosity_level=0
        )
        same(steps(agent) > 0, True)


def code_agent() -> None:
    """Its agent runs the code that the model writes, with and without a schema for it; this model writes none."""
    for schema in (False, True):
        agent = CodeAgent(
            [], model(task.limit), max_steps=1, use_structured_outputs_internally=schema, verbosity_level=0
        )
        same(steps(agent) > 0, True)


run("smolagents", chat, chat_stream, chat_stop, structured_output, tools, tools_agent, code_agent)
