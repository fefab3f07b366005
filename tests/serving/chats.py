"""What tests ask for in chats: templates, tools, schemas, and the answers that follow."""

from __future__ import annotations

from typing import Any

QUESTION: list[Any] = [{"role": "user", "content": "What does str.capitalize() do?"}]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": SCHEMA, **more}}


TOOLS = [tool("look_up"), tool("add")]

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {% if c.function.arguments is string %}cut {{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments.n + 1 }}{% endif %}]{% endfor %}{{ eos_token }}"
    "{% else %}<|user|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if thinking is defined %}<think>\n{% if not thinking %}\n</think>\n\n{% endif %}{% endif %}{% endif %}"
)

RESPONSES = {
    "defaults": {"role": "assistant"}, "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"}},
        "content": {"close_pattern": r"\s*(?:<\|eos\|>)", "content": "text"},
    },
}  # fmt: skip


def said(text: str) -> dict[str, Any]:
    """Has the model say it, where nothing is allowed beside."""
    return {"structured_outputs": {"choice": [text]}}


ANSWERS: dict[str, tuple[str, str | None, str | None, list[tuple[str, str]]]] = {
    "content": (" hello\n", "hello", None, []),
    "reasoning": ("<think>\nhm, so\n</think>\n\nyes", "yes", "hm, so", []),
    "call": ('<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>', None, None, [("add", '{"n": 1}')]),
    "all": (
        '<think>a</think>let me\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "add", "arguments": {"s": "é"}}\n</tool_call>',
        *("let me", "a", [("add", "{}"), ("add", '{"s": "é"}')]),
    ),
    "no call": ("x <tool_call>{nonsense</tool_call> y", "x<tool_call>{nonsense</tool_call> y", None, []),
    "no name": ('x <tool_call>{"n": 1}</tool_call>', 'x<tool_call>{"n": 1}</tool_call>', None, []),
    "no end": ('x <tool_call>{"name": "add", "argum', 'x<tool_call>{"name": "add", "argum', None, []),
}
