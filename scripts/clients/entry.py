"""A form for answers, and a tool with the same parameters, for the clients that take OpenAI's own structures."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Entry(BaseModel):
    """What a name of Python is."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["function", "class", "statement"]
    builtin: bool


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": Entry.model_json_schema()}}
