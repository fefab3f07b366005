"""The calls of CrewAI: its model alone, and an agent, whose own prompts stand around the question."""

from __future__ import annotations

import contextlib
import os
import sys

os.environ["CREWAI_DISABLE_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "true"  # which would wait for its network

from calls import base_url, run, same, task
from crewai import LLM, Agent
from entry import Entry

(question,) = (message["content"] for message in task.messages)


def model(limit: int, **options: object) -> LLM:
    return LLM(
        model=f"openai/{task.model}", base_url=base_url, api_key=task.key, temperature=0, max_tokens=limit, **options
    )


def chat() -> None:
    same(model(task.limit).call(task.messages).strip(), task.chat.strip())


def chat_stream() -> None:
    same(model(task.limit, stream=True).call(task.messages).strip(), task.chat.strip())


def structured_output() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # CrewAI prints, and ends no line
        answer = model(task.json_limit, response_format=Entry).call(task.messages)
    same(type(answer if isinstance(answer, Entry) else Entry.model_validate_json(answer)), Entry)


def agent() -> None:
    made = Agent(role="librarian", goal="answer", backstory="knows Python", llm=model(task.limit), max_iter=1)
    same(bool(made.kickoff(question).raw), True)


run("crewai", chat, chat_stream, structured_output, agent)
