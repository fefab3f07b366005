"""The constraint on the content of an answer, and the tools that it may or must call."""

from __future__ import annotations

from typing import Any

from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.constraints import Constraint
from hf_paged.serving import schema
from hf_paged.serving.answer_format import Calls, Tool
from hf_paged.serving.problems import Problem
from hf_paged.serving.schema import ChatRequest, Sampling


def content_of(body: Sampling) -> Constraint | None:
    """Return the constraint on the content; None: any text. Raises Problem (400)."""
    asked, given = body.response_format, body.structured_outputs
    try:
        if isinstance(asked, schema.ObjectFormat):
            return constraints.json_object()
        if isinstance(asked, schema.SchemaFormat):
            wanted = asked.json_schema
            if wanted.schema_ is None:
                return constraints.json_object()
            return constraints.json_schema(wanted.schema_, strict=wanted.strict is not False)
        if given is not None:
            return _structured(given)
    except ValueError as error:
        name = "response_format" if given is None else "structured_outputs"
        raise Problem(400, f"{name}: {error}", param=name, code="invalid_grammar") from error
    return None


def _structured(given: schema.StructuredOutputs) -> Constraint:
    if given.json_ is not None:
        return constraints.json_schema(given.json_)
    if given.regex is not None:
        return constraints.regex(given.regex)
    if given.grammar is not None:
        return constraints.ebnf(given.grammar)
    if given.choice is not None:
        return constraints.choice(given.choice)
    return constraints.json_object()


def tools_of(body: ChatRequest) -> list[schema.Tool]:
    """Return the tools that the model may call, which the prompt contains. Raises Problem (400)."""
    tools, asked = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    # The answer names a function by its name alone.
    for name in names:
        if names.count(name) > 1:
            raise Problem(400, f"tools: two functions have the name {name!r}", param="tools")
    if asked == "none":
        return []
    if isinstance(asked, schema.AllowedTools):
        wanted = [each.function.name for each in asked.allowed_tools.tools]
    else:
        wanted = [asked.function.name] if isinstance(asked, schema.NamedTool) else names
    for name in wanted:
        if name not in names:
            raise Problem(400, f"tool_choice: no tool has the name {name!r}", param="tool_choice")
    # A function that is to be called is chosen from all that the model knows.
    return tools if isinstance(asked, schema.NamedTool) else [tool for tool in tools if tool.function.name in wanted]


def calls_of(body: ChatRequest) -> Calls | None:
    """The tool calls that an answer may or must have; None: it has none. Raises Problem (400)."""
    tools, asked = tools_of(body), body.tool_choice
    if not tools:
        return None
    mode: Any = asked.allowed_tools.mode if isinstance(asked, schema.AllowedTools) else asked
    if isinstance(asked, schema.NamedTool):
        tools = [tool for tool in tools if tool.function.name == asked.function.name]
    is_forced = isinstance(asked, schema.NamedTool) or mode == "required"
    # A forced call is the whole content, so that no other constraint can hold too.
    if is_forced and body.structured_outputs is not None:
        raise Problem(
            400, "structured_outputs: tool_choice forces tool calls; leave one of both out", param="structured_outputs"
        )
    is_single = isinstance(asked, schema.NamedTool) or body.parallel_tool_calls is False
    return Calls(tuple(map(_tool, tools)), is_forced, 1 if is_single else None)


def _tool(tool: schema.Tool) -> Tool:
    function = tool.function
    parameters = {"type": "object"} if function.parameters is None else function.parameters
    return Tool(function.name, parameters, bool(function.strict), tool.model_dump(exclude_none=True))


def check_end(body: Sampling) -> None:
    """Raise Problem (400) for options that let an answer end elsewhere than its grammar does."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise Problem(
                400, f"{name}: the schema or grammar says where the answer ends; leave one of both out", param=name
            )
