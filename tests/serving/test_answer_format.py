"""The format of answers: what a response template says, what grammars allow, and what parsers find, piece by piece."""

from __future__ import annotations

from typing import Any

import pytest

from hf_paged.features.grammar import constraints
from hf_paged.features.grammar.vocabulary import Matcher, vocabulary_of
from hf_paged.serving.answer_format import AnswerFormat, Calls, Tool, template_of
from hf_paged.serving.parsing import Parser, Pieces
from tests.generation.grammars import accepts, tokenizer
from tests.serving.chats import ANSWERS, RESPONSES

ARGUMENTS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = tuple(Tool(name, ARGUMENTS, strict=False, definition={}) for name in ("f", "g"))
FREE, FORCED, ONE = (Calls(TOOLS, *rest) for rest in ((False, None), (True, None), (True, 1)))
PLAIN, FORMAT = AnswerFormat.of(None), AnswerFormat.of(RESPONSES)
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
OTHER = CALL.replace('"f"', '"g"')
JSON = '{"name": "f", "arguments": {"n": 1}}'
YES = constraints.choice(["yes"])


def test_the_marks_of_a_template() -> None:
    assert FORMAT.reasoning == ("<think>", "</think>") and FORMAT.call == ("<tool_call>", "</tool_call>")
    fields: dict[str, Any] = RESPONSES["fields"]  # type: ignore[assignment]
    calls = fields["tool_calls"]
    for changed in (
        {"open_pattern": r"<tool_\w+>"},
        {"content": "kv-lines"},
        {"transform": {"type": "function", "function": {"name": "x", "arguments": "{content}"}}},
    ):
        other = {**RESPONSES, "fields": {**fields, "tool_calls": {**calls, **changed}}}
        assert AnswerFormat.of(other).call is None
    assert AnswerFormat.of({**RESPONSES, "fields": {"content": {}}}) == AnswerFormat(
        {**RESPONSES, "fields": {"content": {}}}
    )


def test_transformers_own_templates() -> None:
    """Those of Qwen 3 have a call in JSON; those of Qwen 3.5 do not."""

    class Model:
        def __init__(self, model_type: str) -> None:
            self.config = type("Config", (), {"model_type": model_type})()

    def of(model_type: str) -> AnswerFormat:
        template, _ = template_of(Model(model_type), object(), None)
        return AnswerFormat.of(template)

    assert of("llama") == PLAIN
    assert of("qwen3").call == ("<tool_call>", "</tool_call>") and of("qwen3").reasoning == ("<think>", "</think>")
    assert of("qwen3_5").call is None and of("qwen3_5").template is not None


ALLOWED: list[tuple[AnswerFormat, str, Any, Calls | None, list[str], list[str]]] = [
    (PLAIN, "<|assistant|>", YES, None, ["yes"], ["no", "<think>a</think>yes"]),
    (PLAIN, "<|assistant|>", YES, FREE, ["yes"], [CALL]),
    (PLAIN, "<|assistant|>", None, FORCED, [f"[{JSON}]", f"[{JSON}, {JSON}]"], ["[]", CALL, JSON]),
    (PLAIN, "<|assistant|>", None, ONE, [f"[{JSON}]"], [f"[{JSON}, {JSON}]"]),
    (FORMAT, "<|assistant|>", YES, None, ["yes", "<think>a</think>yes", "<think>\na\n</think>\n\nyes"],
        ["a</think>yes"]),
    (FORMAT, "<|assistant|><think>\n", YES, None, ["a</think>yes", "</think>\n\nyes"], ["yes", "a"]),
    (FORMAT, "<|assistant|><think>\n\n</think>\n\n", YES, None, ["yes"], ["<think>a</think>yes", "a</think>yes"]),
    (FORMAT, "<|assistant|>", YES, FREE, ["yes", CALL, f"<think>a</think>{CALL}\n{OTHER}"], [f"yes{CALL}"]),
    (FORMAT, "<|assistant|>", None, FORCED, [CALL, f"{CALL}\n{OTHER}", f"<think>a</think>\n{CALL}"], ["yes", ""]),
    (FORMAT, "<|assistant|>", None, ONE, [CALL], [f"{CALL}\n{OTHER}", CALL.replace("1", '"x"')]),
    (FORMAT, "<|assistant|>", None, Calls(TOOLS, False, 1), ["yes", f"yes {CALL}"], [CALL + CALL]),
]  # fmt: skip


def test_what_grammars_allow() -> None:
    for place, (answers, prompt, content, calls, fitting, others) in enumerate(ALLOWED):
        constraint = answers.constraint(prompt, content, calls)
        assert constraint is not None
        found = [text for text in (*fitting, *others) if accepts(constraint, text)]
        assert found == fitting, place


def test_marks_may_be_special_tokens() -> None:
    """A grammar allows them where the format has them, and other special tokens nowhere."""
    fields: dict[str, Any] = {**RESPONSES["fields"]}  # type: ignore[dict-item]
    fields["reasoning_content"] = {"open": "<|user|>", "close": "<|assistant|>", "content": "text"}
    answers = AnswerFormat.of({**RESPONSES, "start_anchor": "<|bos|>", "fields": fields})
    marks = answers.special_marks(tokenizer())
    assert marks == {"<|user|>", "<|assistant|>"} and FORMAT.special_marks(tokenizer()) == frozenset()
    constraint = answers.constraint("<|bos|>", YES, None)
    assert constraint is not None
    begin, end, yes, pad = (
        tokenizer()(text, add_special_tokens=False)["input_ids"]
        for text in ("<|user|>", "<|assistant|>", "yes", "<|pad|>")
    )
    for vocabulary, is_allowed in ((vocabulary_of(tokenizer(), marks), True), (vocabulary_of(tokenizer()), False)):
        for tokens, fits in (([*begin, *end, *yes], is_allowed), ([*begin, *pad, *end, *yes], False)):
            matcher = Matcher(vocabulary.compiled(constraint), [2])
            matcher.advance(tokens)
            assert matcher.is_complete() is fits


def test_answers_that_are_free() -> None:
    assert PLAIN.constraint("", None, None) is None and PLAIN.constraint("", None, FREE) is None
    assert FORMAT.constraint("", None, FREE) is None
    strict = Calls((Tool("f", ARGUMENTS, strict=True, definition={}),), False, None)
    constraint = FORMAT.constraint("<|assistant|>", None, strict)
    assert constraint is not None
    assert accepts(constraint, f"a {CALL} b") and not accepts(constraint, CALL.replace("1", '"x"'))


def read(parser: Parser, text: str, size: int) -> Pieces:
    pieces = Pieces()
    for start in range(0, len(text), size):
        pieces += parser.feed(text[start : start + size])
    return pieces + parser.finish()


def calls_in(pieces: Pieces) -> list[tuple[str, str]]:
    made: dict[int, tuple[str, str]] = {}
    for part in pieces.calls:
        name, arguments = made.get(part.index, (part.name or "", ""))
        made[part.index] = name, arguments + part.arguments
    return list(made.values())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pieces_of_any_size(size: int) -> None:
    for text, content, reasoning, calls in ANSWERS.values():
        pieces = read(FORMAT.parser("<|assistant|>", FREE), text, size)
        assert (pieces.content, pieces.reasoning, calls_in(pieces)) == (content or "", reasoning or "", calls)
    hard = '{"n": "}\\"]{", "m": [{}]}'
    text = (
        f'[{{"name": "f", "arguments": {hard}}}, {{"name": "g", "arguments": {{}}}}, {{"name": "g", "arguments": {{"a'
    )
    pieces = read(PLAIN.parser("", FORCED), text, size)
    assert calls_in(pieces) == [("f", hard), ("g", "{}"), ("g", '{"a')] and pieces.content == ""


@pytest.mark.parametrize("prompt", ["<|assistant|>", "<|assistant|><think>\n", "<|assistant|><think>a</think>"])
def test_where_the_content_is(prompt: str) -> None:
    """What a criterion over an answer's tokens asks: it agrees with the parser."""
    given = AnswerFormat.of(RESPONSES)
    tools = Calls((Tool("f", {}, False, {}),), False, None)
    follows = given.is_content(prompt, tools)
    assert follows is not None
    for begin in ("", "hm", "a <think>", "<think>so", "<think>so</think>", "so</think>yes", "x <tool_call>\n{"):
        parser = given.parser(prompt, tools)
        parser.feed(begin)
        assert follows(begin) is bool(parser.feed("\0").content), begin
    assert AnswerFormat().is_content(prompt, None) is None
    assert not AnswerFormat().is_content(prompt, Calls(tools.tools, True, None))("")  # type: ignore[misc]


def test_the_prompt_may_begin_the_answer() -> None:
    pieces = read(FORMAT.parser("<|user|>x<|assistant|><think>\n", None), "hm</think>yes", 2)
    assert (pieces.reasoning, pieces.content) == ("hm", "yes")
