"""Structured output and tool calls over HTTP, as plain `generate` gives them, and grammars that are to do harm."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

import hf_paged
from hf_paged.cli.main import main
from hf_paged.features.grammar.constraints import json_schema, regex
from hf_paged.serving import grammars
from hf_paged.serving.problems import Problem
from hf_paged.serving.settings import Limits
from tests.serving.chats import ANSWERS, QUESTION, SCHEMA, TEMPLATE, TOOLS, said, tool
from tests.serving.harness import NAME, QA, Running, chat_ids, plain, serving, text_of, tokenizer

SERVER = {"chat_template": TEMPLATE}
REGEX = r"[A-C]{2,4}-\d{2}!"
EBNF = 'root ::= "str" | "list" (", " "int"){1,2}'


def expected(length: int, seed: int | None = None, eos: Any = 2, **options: Any) -> list[str]:
    """The texts of `generate` with a grammar; `options` of both."""
    names = ("json_schema", "json_object", "regex", "grammar", "choice")
    made = hf_paged.grammar(tokenizer(), **{name: options.pop(name) for name in names if name in options})
    rows = plain(
        chat_ids(QUESTION), max_new_tokens=length, seed=seed, logits_processor=[made], **{"do_sample": False, **options}
    )
    return [text_of(row) for row in rows]


# -- structured output ---------------------------------------------------------------------------------------------

NAMED = {"name": "x", "schema": SCHEMA, "strict": True}
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, {"json_schema": SCHEMA}),
    "json_object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "json": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
    "regex": ({"structured_outputs": {"regex": REGEX}}, {"regex": REGEX}),
    "grammar": ({"structured_outputs": {"grammar": EBNF}}, {"grammar": EBNF}),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
}
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 0}


def test_answers_are_those_of_generate(server: Running) -> None:
    create, wide = server.client.chat.completions.create, {"max_tokens": 60, "temperature": 1.5, "n": 3}
    for fields, options in ASKED.values():
        one = create(model=NAME, messages=QUESTION, max_tokens=30, extra_body=fields).choices[0]
        assert [one.message.content] == expected(30, **options)
    fields, options = ASKED["json_schema"]
    extra = {**fields, "seed": 3}
    several = create(model=NAME, messages=QUESTION, **wide, extra_body=extra).choices
    wanted = expected(60, seed=3, num_return_sequences=3, **SAMPLED, **options)
    assert [choice.message.content for choice in several] == wanted
    streamed = ["", "", ""]
    for chunk in create(model=NAME, messages=QUESTION, **wide, stream=True, extra_body=extra):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == wanted
    extra = {**fields, "use_beam_search": True}
    beams = create(model=NAME, messages=QUESTION, max_tokens=60, n=2, extra_body=extra).choices
    assert [choice.message.content for choice in beams] == expected(60, num_beams=2, num_return_sequences=2, **options)


def test_the_clients_own_parsing(server: Running) -> None:
    class Entry(BaseModel):
        word: Annotated[str, Field(max_length=5)]  # the toy model might write one word for ever
        is_known: bool

    parsed = server.client.chat.completions.parse(model=NAME, messages=QUESTION, response_format=Entry, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, Entry)
    assert parsed.choices[0].finish_reason == "stop"


def test_completions_take_them_too(server: Running) -> None:
    extra = {"structured_outputs": {"regex": REGEX}, "stop_token_ids": [301]}
    answer = server.client.completions.create(model=NAME, prompt=["A list", "x"], max_tokens=40, extra_body=extra)
    for choice in answer.choices:
        assert re.fullmatch(REGEX, choice.text) and choice.finish_reason == "stop"


REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, 400),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, 422),
    ({"response_format": {"type": "xml"}}, 422),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, 422),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, 400),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400), ({"structured_outputs": {}}, 422),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 422), ({"structured_outputs": {"regex": "(a"}}, 400),
    ({"structured_outputs": {"grammar": "root ::= other"}}, 400), ({"structured_outputs": {"json": "{"}}, 400),
    ({"structured_outputs": {"json": "[" * 100_000}}, 400), ({"tool_choice": "required"}, 422),
    ({"tools": [tool("f"), tool("f")]}, 400),
    ({"tools": [tool("f", parameters={"type": "no"})], "tool_choice": "required"}, 400),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, 400),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, 400),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, 422), ({"tools": [tool("a b")]}, 422),
]  # fmt: skip


def test_what_cannot_be_followed_is_refused(server: Running) -> None:
    for fields, status in REFUSED:
        answer = server.post("/v1/chat/completions", messages=QUESTION, max_tokens=5, **fields)
        assert answer.status_code == status and answer.json()["error"]["message"], fields


def test_hostile_grammars_do_no_harm(server: Running) -> None:
    """Each is refused or followed; the server serves the next request."""
    wide = {f"p{i}": {"type": ["string", "null"]} for i in range(900)}
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(900)}
    hostile: dict[str, dict[str, Any]] = {
        "counted properties": {"json": json.dumps({"type": "object", "properties": wide, "minProperties": 450})},
        "parentheses": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
        "schemas": {"json": '{"items": ' * 900 + "{}" + "}" * 900},
        "references": {"json": json.dumps({"$defs": {**chain, "d900": {}}, "$ref": "#/$defs/d0"})},
        "numbers": {"json": json.dumps({"type": "integer", "minimum": -(10**300), "maximum": 10**308})},
        "patterns": {"json": json.dumps({"allOf": [{"pattern": f"(a|b)*a(a|b){{{i}}}c"} for i in range(16)]})},
        "repetitions": {"regex": "((a{1,900}){1,900}){1,900}"},
        "doubling": {
            "grammar": "\n".join(["root ::= a0", *(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60)), 'a60 ::= "x"'])
        },
        "left recursion": {"json": '{"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"}'},
        "size": {"regex": "a" * 70_000},
    }
    found = {}
    for name, outputs in hostile.items():
        body = {"messages": QUESTION, "max_tokens": 3, "structured_outputs": outputs}
        answer = server.post("/v1/chat/completions", **body)
        found[name] = answer.status_code
        if name == "size":
            assert "65536" in answer.json()["error"]["message"]
    refused = ("counted properties", "parentheses", "schemas", "references", "numbers", "patterns", "size")
    assert set(found.values()) <= {200, 400} and all(found[name] == 400 for name in refused), found
    assert server.http.get("/health").status_code == 200
    body = {"messages": QUESTION, "structured_outputs": {"choice": ["still", "there"]}}
    assert server.post("/v1/chat/completions", **body).status_code == 200


@pytest.mark.slow
def test_a_grammar_that_is_slow_to_follow_is_the_clients_fault(server: Running) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"grammar": "root ::= root root | root root root | [a-z]*"}}
    fields |= {"messages": QUESTION, "max_tokens": 200, "logit_bias": {"2": -100}}
    answer = server.post("/v1/chat/completions", **fields)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_grammar"
    assert "it takes too long" in answer.json()["error"]["message"]


def test_a_schema_without_an_answer_is_refused(server: Running) -> None:
    for more, schema in (
        ({"n": 2, "temperature": 1.0}, {"type": "string", "pattern": "^a$", "minLength": 2}),
        ({"stream": True}, {"type": "integer", "minimum": 4, "maximum": 3}),
    ):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = server.post("/v1/chat/completions", messages=QUESTION, response_format=wanted, **more)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_grammar"


class Unread(dict[str, Any]):
    """A schema of many properties, of which few may be looked at."""

    num_read = 0

    def items(self) -> Any:
        for pair in super().items():
            Unread.num_read += 1
            assert Unread.num_read < 100_000
            yield pair


def test_a_large_schema_is_refused_before_it_is_read() -> None:
    schema = {"type": "object", "properties": Unread({f"p{i}": {} for i in range(350_000)})}
    asked = grammars.Grammars(lambda: pytest.fail("it is compiled"), max_bytes=2**16, seconds=120.0)
    with pytest.raises(Problem, match="65536 characters"):
        asyncio.run(asked.compiled(json_schema(schema)))
    asked.close()


def test_abandoned_grammars_leave_the_queue() -> None:
    """Clients that have gone: what waits for a thread is not compiled, and the next client's grammar is."""
    gate, compiled = threading.Event(), []

    class Slow:
        def known(self, constraint: Any) -> None:
            return None

        def compiled(self, constraint: Any) -> str:
            compiled.append(constraint["regex"])
            gate.wait(60)
            return "made"

    async def ask() -> str:
        asked = grammars.Grammars(Slow, max_bytes=100, seconds=120.0)  # type: ignore[arg-type]
        tasks = [asyncio.create_task(asked.compiled(regex(f"a{number}"))) for number in range(20)]
        while len(compiled) < 2:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert asked._num_waiting == 0
        gate.set()
        made = await asked.compiled(regex("b"))
        asked.close()
        return str(made)

    assert asyncio.run(ask()) == "made" and len(compiled) == 3


def test_few_grammars_wait_for_the_compiler(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(word: str) -> Any:
        fields = {"structured_outputs": {"choice": [word]}}
        return server.post("/v1/chat/completions", messages=QUESTION, max_tokens=3, **fields)

    assert ask("compiled").status_code == 200
    monkeypatch.setattr(grammars, "_MAX_WAITING", 0)
    answer = ask("another one")
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "queue_full"
    assert ask("compiled").status_code == 200  # it need not wait


def test_they_can_be_switched_off() -> None:
    with serving(limits=Limits(grammar_seconds=0), chat_template=TEMPLATE) as running:
        answer = running.post("/v1/chat/completions", messages=QUESTION, response_format={"type": "json_object"})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_served"
        assert running.post("/v1/chat/completions", messages=QUESTION, max_tokens=2, tools=TOOLS).status_code == 200


# -- tools, with a model that has no format for them ---------------------------------------------------------------


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    made = []
    for call in message.tool_calls or []:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMA)
        assert call.type == "function" and call.id.startswith("call_")
        made.append((call.function.name, arguments))
    return made


def test_calls_are_forced(server: Running) -> None:
    create = server.client.chat.completions.create
    for fields, names in (
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"look_up", "add"}),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, {"add"}),
    ):
        answer = create(model=NAME, messages=QUESTION, tools=TOOLS, max_tokens=80, **fields)
        (choice,) = answer.choices
        ((name, _),) = calls_of(choice.message)
        assert name in names and choice.finish_reason == "tool_calls" and choice.message.content is None
        several = create(model=NAME, messages=QUESTION, tools=TOOLS, max_tokens=80, n=3, temperature=1.5, **fields)
        assert all(len(calls_of(choice.message)) == 1 for choice in several.choices)
    only = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    }
    fields = {"tools": TOOLS, "tool_choice": only, "parallel_tool_calls": False, "max_tokens": 80}
    message = server.post("/v1/chat/completions", messages=QUESTION, **fields).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"]


def test_the_clients_own_streams(server: Running) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80}
    with server.client.chat.completions.stream(model=NAME, messages=QUESTION, **fields) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert len(calls_of(choice.message)) == 1 and choice.finish_reason == "tool_calls"


def test_where_the_model_is_free_it_writes_text(server: Running) -> None:
    create = server.client.chat.completions.create
    alone = create(model=NAME, messages=QUESTION, max_tokens=30).choices[0].message.content
    for choice in ("auto", "none"):
        answer = create(model=NAME, messages=QUESTION, max_tokens=30, tools=TOOLS, tool_choice=choice).choices[0]
        assert answer.message.content and answer.message.tool_calls is None
        assert (answer.message.content == alone) is (choice == "none"), "else the prompt has the tools"


# -- a model with a format -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["content", "all"])
def test_answers_are_taken_apart(formatted: Running, content_alone: None, case: str) -> None:
    text, content, reasoning, calls = ANSWERS[case]
    fields: dict[str, Any] = {"model": NAME, "messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
    answer = formatted.client.chat.completions.create(**fields, extra_body=said(text))
    message = answer.choices[0].message
    read = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert (message.content, getattr(message, "reasoning_content", None), read) == (content, reasoning, calls)
    assert answer.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    streamed: dict[str, str] = {"content": "", "reasoning_content": ""}
    parts, reasons = [], []
    for chunk in formatted.client.chat.completions.create(**fields, stream=True, extra_body=said(text)):
        delta = chunk.choices[0].delta
        for name in streamed:
            streamed[name] += getattr(delta, name, None) or ""
        parts += [(part.index, part.function.name, part.function.arguments) for part in delta.tool_calls or []]
        reasons.append(chunk.choices[0].finish_reason)
    assert streamed == {"content": content or "", "reasoning_content": reasoning or ""}
    assert parts == [(index, *call) for index, call in enumerate(calls)]
    assert reasons[-1] == answer.choices[0].finish_reason and set(reasons[:-1]) == {None}


STOPPED = {
    "Question:": ("<think>Question: which?</think>Paris. Question: next?", "Paris. ", "Question: which?", []),
    "add": (ANSWERS["call"][0], None, None, ANSWERS["call"][3]),
    "and": ("<think>this and that</think>neither", "neither", "this and that", []),
    "nk>": ("<think>so</think>a nk> b", "a ", "so", []),
}


def test_stop_strings_count_in_the_content(formatted: Running, content_alone: None) -> None:
    """They leave reasoning and tool calls whole, which clients do not see as text."""
    fields: dict[str, Any] = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
    for stop, (text, content, reasoning, calls) in STOPPED.items():
        answer = formatted.post("/v1/chat/completions", **fields, stop=[stop], **said(text)).json()["choices"][0]
        message = answer["message"]
        read = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert (message["content"], message.get("reasoning_content"), read) == (content, reasoning, calls)
        assert answer["stop_reason"] == (stop if content and content[-1] == " " else None)


def test_without_tools_a_call_is_text(formatted: Running, content_alone: None) -> None:
    text = ANSWERS["call"][0]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        body = {"messages": QUESTION, "max_tokens": 100, **said(text), **fields}
        message = formatted.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
        assert message["content"] == text and "tool_calls" not in message


def test_forced_calls_have_the_models_format(formatted: Running) -> None:
    """The prompt has the reasoning, which this model might never end."""
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"max_tokens": 120, "return_token_ids": True, "chat_template_kwargs": {"thinking": False}}
    answer = formatted.post("/v1/chat/completions", messages=QUESTION, **fields).json()["choices"][0]
    text = tokenizer().decode(answer["token_ids"])
    assert text.startswith('<tool_call>\n{"name": "') and answer["finish_reason"] == "tool_calls"
    assert len(answer["message"]["tool_calls"]) == 1


def test_conversations_with_calls(formatted: Running) -> None:
    """Tools, calls and their results reach the template as it expects them: arguments as objects."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": 41}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    ids = formatted.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    text = tokenizer().decode(ids)
    assert "[add 42]" in text and "<|user|>42" in text and '"name": "look_up"' in text
    assert formatted.post("/v1/chat/completions", messages=messages, tools=TOOLS, max_tokens=2).status_code == 200
    for cut in ('{"n": ', "[1]"):  # agents send back what the model wrote, also a call that its limit has cut off
        call["function"]["arguments"] = cut  # type: ignore[index]
        ids = formatted.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
        assert f"[add cut {cut}]" in tokenizer().decode(ids)
        assert formatted.post("/v1/chat/completions", messages=messages, max_tokens=2).status_code == 200
    for deep in ('{"n":' * 200 + "1" + "}" * 200, "[" * 100000):
        call["function"]["arguments"] = deep  # type: ignore[index]
        wrong = formatted.post("/v1/chat/completions", messages=messages, max_tokens=2)
        assert wrong.status_code == 400
    call["function"]["arguments"] = '{"m": 1}'  # type: ignore[index]
    wrong = formatted.post("/v1/chat/completions", messages=messages, max_tokens=2)
    assert wrong.status_code == 400 and "the chat template refuses" in wrong.json()["error"]["message"]
    wrong = formatted.post("/v1/chat/completions", messages=[{**messages[1], "role": "user"}], max_tokens=2)
    assert wrong.status_code == 400 and "assistant" in wrong.json()["error"]["message"]


def test_a_wrong_response_template_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="response_template"), serving(response_template={"fields": {}}):
        pass
    path = tmp_path / "template.json"
    for text, words in (
        ("{", "cannot be used"),
        ('{"fields": {}}', "non-empty"),
        ("[]", "must be a dict"),
        (None, "cannot be read"),
    ):
        path.unlink(missing_ok=True)
        if text is not None:
            path.write_text(text)
        assert main(["serve", QA, "--response-template", str(path)]) == 2
        assert words in capsys.readouterr().err
