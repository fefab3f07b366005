"""The calls of Instructor: pydantic models through a JSON schema and through tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import instructor
import openai
from calls import base_url, run, same, task
from pydantic import BaseModel

asked = {"model": task.model, "messages": task.messages, "max_tokens": task.json_limit, "max_retries": 0}


class Entry(BaseModel):
    """What a name of Python is."""

    kind: Literal["function", "class", "statement"]
    builtin: bool


def client(mode: instructor.Mode = instructor.Mode.JSON_SCHEMA) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=base_url, api_key=task.key, max_retries=0), mode=mode)


def json_schema() -> None:
    """The parsed object is what the server wrote."""
    entry, answer = client().chat.completions.create_with_completion(response_model=Entry, **asked)
    same(entry.model_dump(), json.loads(answer.choices[0].message.content))


def json_schema_sampled() -> None:
    for seed in range(3):
        entry = client().chat.completions.create(response_model=Entry, temperature=1.5, seed=seed, **asked)
        same(isinstance(entry, Entry), True)


def json_schema_stream() -> None:
    *_, last = client().chat.completions.create_partial(response_model=Entry, **asked)
    same(last.model_dump(), client().chat.completions.create(response_model=Entry, **asked).model_dump())


def tools() -> None:
    entry, answer = client(instructor.Mode.TOOLS).chat.completions.create_with_completion(response_model=Entry, **asked)
    same(entry.model_dump(), json.loads(answer.choices[0].message.tool_calls[0].function.arguments))


def chat() -> None:
    answer = client().chat.completions.create(response_model=None, **{**asked, "max_tokens": task.limit})
    same(answer.choices[0].message.content, task.chat)


run("instructor", chat, json_schema, json_schema_sampled, json_schema_stream, tools)
