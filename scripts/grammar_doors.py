"""The ways in through which a constraint reaches a model: `generate`, an engine, a server. Each is a function that
takes questions, and says for each one what was answered.

The model is tiny and random, with one of two byte-level vocabularies: a trained one, and one of random pieces.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from transformers import AutoTokenizer, GenerationConfig

import hf_paged
from hf_paged.features.grammar import constraints
from scripts.server_process import CHECKPOINT, serving
from tests import models
from tests.generation import random_constraints

VOCABULARIES = ("trained", "pieces")
LENGTH = 100  # tokens of the longest answer
PROMPT = "Write it:"
_CLOSING = set('"}],:0123456789')
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 1.3, "top_k": 0},
    "samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5, "top_k": 0},
    "few": {"do_sample": True, "num_return_sequences": 2, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "drawn beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 3, "temperature": 1.3, "top_k": 0},
}


@dataclass(frozen=True)
class Question:
    """A constraint that is asked for. kind: the argument of `hf_paged.grammar`. time: how often it was asked before."""

    number: int
    kind: str
    given: Any
    strict: bool = True
    time: int = 0

    @property
    def mode(self) -> str:
        return list(MODES)[(self.number // len(VOCABULARIES) + self.time) % len(MODES)]

    @property
    def is_for_tools(self) -> bool:
        """Whether it is a schema of objects, as a tool's arguments are."""
        return isinstance(self.given, dict) and self.given.get("type") == "object"

    @property
    def seed(self) -> int:
        return self.number * 100 + self.time


@dataclass
class Answers:
    """refused: why there are none. failed: why they ended early. texts: those that have come to their end."""

    refused: str | None = None
    failed: str | None = None
    texts: list[str] = field(default_factory=list)
    cut: int = 0


@cache
def tokenizer_of(vocabulary: str) -> Any:
    made = (
        AutoTokenizer.from_pretrained(CHECKPOINT) if vocabulary == "trained" else random_constraints.bytes_tokenizer(0)
    )
    made.pad_token = made.pad_token or made.eos_token
    made.chat_template = _TEMPLATE
    return made


@cache
def _model(vocabulary: str) -> Any:
    tokenizer = tokenizer_of(vocabulary)
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "num_hidden_layers": 1}
    return models.build("llama", **sizes, **special, initializer_range=0.3)


@cache
def _closing(vocabulary: str) -> dict[int, float]:
    """Biases of tokens, with which random answers come to their end."""
    tokenizer = tokenizer_of(vocabulary)
    ids = [index for index in range(len(tokenizer)) if set(tokenizer.decode([index])) <= _CLOSING]
    return {**dict.fromkeys(ids, 2.0), tokenizer.eos_token_id: 4.0}


def _grammar(question: Question, vocabulary: str) -> Any:
    strict = {"strict": question.strict} if question.kind == "json_schema" else {}
    return hf_paged.grammar(tokenizer_of(vocabulary), **{question.kind: question.given}, **strict)


def _config(question: Question, vocabulary: str) -> Any:
    tokenizer = tokenizer_of(vocabulary)
    config = GenerationConfig(
        max_new_tokens=LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        sequence_bias=[[[index], bias] for index, bias in _closing(vocabulary).items()],
        **MODES[question.mode],
    )
    config.seed = question.seed
    return config


def _add(answers: Answers, tokens: list[int], vocabulary: str) -> None:
    tokenizer = tokenizer_of(vocabulary)
    if tokenizer.eos_token_id in tokens:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
        answers.texts.append(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
    else:
        answers.cut += 1


def repeated(questions: list[Question], times: int) -> Iterator[Question]:
    """All of them in turns, each with another mode every time."""
    for each in range(times):
        for question in questions:
            yield replace(question, time=each)


# -- the masks alone -----------------------------------------------------------------------------------------------


def matcher(questions: Iterable[Question], vocabulary: str) -> Iterator[tuple[Question, Answers]]:
    """Four answers to each, drawn from what the masks allow."""
    drawn = random_constraints.Answers(tokenizer_of(vocabulary))
    for question in questions:
        answers = Answers()
        if question.kind == "json_schema":
            constraint = constraints.json_schema(question.given, strict=question.strict)
        else:
            constraint = constraints.regex(question.given)
        try:
            answers.texts = drawn.some(constraint, random.Random(question.seed), 4)
            answers.cut = 4 - len(answers.texts)
        except UnicodeDecodeError as error:
            answers.failed = str(error)
        except ValueError as error:
            answers.refused = str(error)
        yield question, answers


# -- generate ------------------------------------------------------------------------------------------------------


def generate(questions: Iterable[Question], vocabulary: str) -> Iterator[tuple[Question, Answers]]:
    """A call for each: one prompt, or two of different lengths; with prompt lookup where that is possible."""
    model, tokenizer = _model(vocabulary), tokenizer_of(vocabulary)
    tokenizer.padding_side = "left"
    for question in questions:
        answers = Answers()
        try:
            processor = _grammar(question, vocabulary)
        except ValueError as error:
            answers.refused = str(error)
            yield question, answers
            continue
        prompts = [PROMPT, f"Now. {PROMPT}"] if question.number % 3 else [PROMPT]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        more: dict[str, Any] = {}
        if len(prompts) == 1 and question.mode in ("greedy", "sample"):
            more = {"prompt_lookup_num_tokens": 3}
        torch.manual_seed(question.seed)
        try:
            rows = model.generate(
                **inputs,
                generation_config=_config(question, vocabulary),
                logits_processor=[processor],
                cache_implementation="paged",
                **more,
            )
        except ValueError as error:
            answers.failed = str(error)
        else:
            for row in rows[:, inputs["input_ids"].shape[1] :].tolist():
                _add(answers, row, vocabulary)
        yield question, answers


# -- an engine -----------------------------------------------------------------------------------------------------


def engine(questions: Iterable[Question], vocabulary: str) -> Iterator[tuple[Question, Answers]]:
    """Up to 256 requests run at once, with so little memory that some are preempted."""
    prompt = tokenizer_of(vocabulary)(PROMPT)["input_ids"]
    cache_config = hf_paged.CacheConfig(block_size=8, num_blocks=800, swap_memory="1MiB")
    running = hf_paged.Engine(_model(vocabulary), cache_config, hf_paged.SchedulerConfig(max_num_seqs=256))
    asked: dict[str, Question] = {}
    left = iter(questions)
    with closing(running):
        while True:
            while len(asked) < 256 and (question := next(left, None)) is not None:
                try:
                    processor = _grammar(question, vocabulary)
                except ValueError as error:
                    yield question, Answers(refused=str(error))
                    continue
                request = running.add_request(prompt, _config(question, vocabulary), logits_processor=[processor])
                asked[request] = question
            if not asked:
                break
            for output in running.step():
                if output.finished:
                    answers = Answers(failed=output.error)
                    for each in output.outputs if output.error is None else ():
                        _add(answers, list(each.token_ids), vocabulary)
                    yield asked.pop(output.request_id), answers
        stats = running.stats()
    print(
        f"engine: {stats.preemptions_recompute + stats.preemptions_swap} preemptions, {stats.blocks_used} blocks used"
    )


# -- a server ------------------------------------------------------------------------------------------------------


def server(questions: Iterable[Question], vocabulary: str) -> Iterator[tuple[Question, Answers]]:
    """48 clients at once, of a server in a process of its own. Says how its memory grows."""
    questions = list(questions)
    with tempfile.TemporaryDirectory() as folder:
        _model(vocabulary).save_pretrained(folder)
        tokenizer_of(vocabulary).save_pretrained(folder)
        with serving("--max-num-seqs", "128", checkpoint=Path(folder)) as running:
            process = psutil.Process(running.pid)
            for tenth in range(10):
                done = len(questions) * (tenth + 1) // 10
                yield from asyncio.run(_asked(running.url, questions[len(questions) * tenth // 10 : done], vocabulary))
                size, threads, files = process.memory_info().rss / 2**20, process.num_threads(), process.num_fds()
                print(f"server, {done} requests: {size:.1f} MiB, {threads} threads, {files} files", flush=True)
            found = httpx.get(f"{running.url}/metrics", timeout=60).text.splitlines()
            print(*(line for line in found if "blocks_used" in line and not line.startswith("#")), sep="\n")
        if running.status or any("Traceback" in line for line in running.lines):
            raise SystemExit(f"the server has failed:\n{''.join(running.lines[-40:])}")


async def _asked(url: str, questions: list[Question], vocabulary: str) -> list[tuple[Question, Answers]]:
    limit = asyncio.Semaphore(48)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=48)) as client:

        async def ask(question: Question) -> tuple[Question, Answers]:
            async with limit:
                return question, await _answers(client, question, vocabulary)

        return await asyncio.gather(*map(ask, questions))


def _body(question: Question, vocabulary: str) -> tuple[str, dict[str, Any]]:
    """The path, and the body of the request. A schema is a response format, a structured output or a tool's."""
    mode = MODES[question.mode]
    body: dict[str, Any] = {
        "max_tokens": LENGTH,
        "logit_bias": {str(index): bias for index, bias in _closing(vocabulary).items()},
        "seed": question.seed,
        "temperature": mode.get("temperature", 1.0) if mode["do_sample"] else 0,
        "n": mode.get("num_return_sequences", 1),
        "stream": random.Random(question.seed).random() < 0.3,
    }
    if "num_beams" in mode:
        body |= {"use_beam_search": True, "temperature": 0}
    body |= {name: mode[name] for name in ("top_k", "top_p", "repetition_penalty") if mode.get(name)}
    given, way = question.given, (question.number + question.time) % 4
    if question.kind == "json_schema" and isinstance(given, dict):
        if way == 0 and question.is_for_tools:
            function = {"name": "f", "parameters": given, "strict": question.strict}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = {"type": "function", "function": {"name": "f"}}
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": PROMPT}]}
        if way < 3 or not question.strict:
            named = {"name": "x", "schema": given, "strict": question.strict}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
            if way == 1:
                return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": PROMPT}]}
            return "/v1/completions", {**body, "prompt": PROMPT}
    if question.kind == "json_schema":
        body["structured_outputs"] = {"json": given if isinstance(given, dict) else json.dumps(given)}
    else:
        body["structured_outputs"] = {question.kind: given}
    return "/v1/completions", {**body, "prompt": PROMPT}


async def _answers(client: httpx.AsyncClient, question: Question, vocabulary: str) -> Answers:
    path, body = _body(question, vocabulary)
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    response = await client.post(path, json=body)
    text = response.content.decode()
    if response.status_code != 200:
        error = json.loads(text)["error"]
        if response.status_code == 400 and error["code"] == "invalid_grammar":
            is_late = "it takes too long" in error["message"]
            return Answers(**{"failed" if is_late else "refused": error["message"]})
        raise SystemExit(f"status {response.status_code}: {error}\n{json.dumps(body)}")
    for line in text.split("\n"):  # and nowhere else: httpx takes U+2028 for the end of a line
        event = line.removeprefix("data: ")
        if not event.startswith("{"):
            continue
        read = json.loads(event)
        if "error" in read:
            return Answers(failed=read["error"]["message"])
        for choice in read["choices"]:
            texts[choice["index"]] += _text(choice)
            if choice.get("finish_reason"):
                reasons[choice["index"]] = choice["finish_reason"]
    answers = Answers()
    for index, reason in reasons.items():
        if reason in ("stop", "tool_calls"):
            answers.texts.append(texts[index])
        else:
            answers.cut += 1
    return answers


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("delta") or choice.get("message") or choice
    calls = said.get("tool_calls") or []
    return (
        "".join(call["function"].get("arguments") or "" for call in calls)
        or said.get("text")
        or said.get("content")
        or ""
    )
