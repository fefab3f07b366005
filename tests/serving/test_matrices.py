"""Combinations of options in the test suites of SGLang, vLLM and llama.cpp's server: what plain `generate` says."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.serving import harness
from tests.serving.harness import Running, plain, shared_model, text_of, tokenizer

TEXTS = ("The capital of", "A list is")
QUESTION = [{"role": "user", "content": "What is a list?"}]
CHAT = tuple(harness.chat_ids(QUESTION))
LENGTH = 5
SEED = 11


@cache
def ids_of(text: str) -> tuple[int, ...]:
    return tuple(harness.ids_of(text))


@cache
def rows_of(ids: tuple[int, ...], n: int, length: int = LENGTH) -> list[list[int]]:
    """What plain `generate` draws, or chooses for one answer."""
    options: dict[str, Any] = {"do_sample": False}
    if n > 1:
        options = {"do_sample": True, "top_k": 0, "temperature": 1.0, "num_return_sequences": n, "seed": SEED}
    return plain(list(ids), max_new_tokens=length, **options)


@cache
def scores_of(ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [length, vocab] of the token after each one."""
    with torch.no_grad():
        return shared_model()(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which has to end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def completed(server: Running, stream: bool, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The choices of a completion, put together if they are streamed, and the usage."""
    if not stream:
        answer = server.post("/v1/completions", **fields).json()
        return answer["choices"], answer["usage"]
    fields["stream_options"] = {"include_usage": True}
    *chunks, last = chunks_of(server.post("/v1/completions", stream=True, **fields).text)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        known = choices.setdefault(part["index"], part)
        if known is not part:
            known["text"] += part["text"]
            for name in ("finish_reason", "stop_reason"):
                known[name] = part[name]
            if "token_ids" in part:
                known["token_ids"] += part["token_ids"]
                assert part["prompt_token_ids"] is None
            for name, values in (part["logprobs"] or {}).items():
                known["logprobs"][name] = None if values is None else known["logprobs"][name] + values
    return [choices[index] for index in sorted(choices)], last["usage"]


def assert_scores(scores: dict[str, Any], prompt: tuple[int, ...], answer: list[int], echo: bool, top: int) -> None:
    """The scores of OpenAI's completions: of the answer's tokens, and of the prompt's with `echo`."""
    whole = prompt + tuple(answer)
    begin = 0 if echo else len(prompt)
    names = [tokenizer().decode([token]) for token in whole[begin:]]
    assert scores["tokens"] == names
    ends = [sum(map(len, names[:place])) for place in range(len(names))]
    assert scores["text_offset"] == ends
    table = scores_of(whole)
    for place, token in enumerate(whole[begin:], begin):
        logprob = scores["token_logprobs"][place - begin]
        if place == 0:
            assert logprob is None and (not top or scores["top_logprobs"][0] is None)
            continue
        assert logprob == pytest.approx(float(table[place - 1, token]), abs=1e-4)
        if top:
            likeliest = table[place - 1].topk(top)
            wanted = {tokenizer().decode([other]) for other in (*likeliest.indices.tolist(), token)}
            found = scores["top_logprobs"][place - begin]
            assert set(found) == wanted and found[names[place - begin]] == pytest.approx(logprob, abs=1e-4)
    if not top:
        assert scores["top_logprobs"] is None


MATRIX = list(product((False, True), (None, 0, 3), (1, 2), (1, 2), (False, True), (False, True)))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("echo", "logprobs", "num_prompts", "n", "as_ids", "stream"), MATRIX, ids=lambda v: str(v)[:1])
def test_completions(
    server: Running, echo: bool, logprobs: int | None, num_prompts: int, n: int, as_ids: bool, stream: bool
) -> None:
    prompts = [ids_of(text) for text in TEXTS[:num_prompts]]
    given: Any = [list(ids) for ids in prompts] if as_ids else list(TEXTS[:num_prompts])
    fields: dict[str, Any] = {"echo": echo, "max_tokens": LENGTH, "n": n, "return_token_ids": True}
    if logprobs is not None:
        fields["logprobs"] = logprobs
    if n > 1:
        fields |= {"temperature": 1.0, "seed": SEED}
    choices, usage = completed(server, stream, prompt=given[0] if num_prompts == 1 else given, **fields)
    assert [choice["index"] for choice in choices] == list(range(num_prompts * n))
    for place, choice in enumerate(choices):
        prompt, row = prompts[place // n], rows_of(prompts[place // n], n)[place % n]
        shown = (tokenizer().decode(prompt) if as_ids else TEXTS[place // n]) if echo else ""
        assert choice["text"] == shown + text_of(row)
        assert choice["token_ids"] == row and choice["prompt_token_ids"] == list(prompt)
        assert choice["finish_reason"] == ("stop" if row[-1] == 2 else "length")
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            assert_scores(choice["logprobs"], prompt, row, echo, logprobs)
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == sum(len(row) for ids in prompts for row in rows_of(ids, n))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_scores_of_a_prompt_alone(server: Running) -> None:
    """As lm-eval's local-completions asks for them; twice, so that the prefix is cached the second time."""
    ids = tuple(range(40, 80))
    for stream in (False, True):
        ((choice,), usage) = completed(server, stream, prompt=list(ids), max_tokens=0, echo=True, logprobs=3)
        assert_scores(choice["logprobs"], ids, [], True, 3)
        assert usage["completion_tokens"] == 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("logprobs", [None, 0, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("return_ids", [None, False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_chat(server: Running, logprobs: int | None, n: int, return_ids: bool | None, stream: bool) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "max_tokens": LENGTH, "n": n, "return_token_ids": return_ids}
    if logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": logprobs}
    if n > 1:
        fields |= {"temperature": 1.0, "seed": SEED}
    texts, ids, scores = [""] * n, [list[int]() for _ in range(n)], [list[Any]() for _ in range(n)]
    reasons: list[Any] = [None] * n
    if stream:
        chunks = chunks_of(server.post("/v1/chat/completions", stream=True, **fields).text)
        prompt_ids = chunks[0].get("prompt_token_ids")
        assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
        parts = [(choice["delta"], choice) for chunk in chunks for choice in chunk["choices"]]
        assert [part["role"] for part, _ in parts if "role" in part] == ["assistant"] * n
    else:
        answer = server.post("/v1/chat/completions", **fields).json()
        prompt_ids = answer.get("prompt_token_ids")
        parts = [(choice["message"], choice) for choice in answer["choices"]]
    for part, choice in parts:
        index = choice["index"]
        texts[index] += part.get("content") or ""
        ids[index] += choice.get("token_ids") or []
        scores[index] += (choice["logprobs"] or {"content": []})["content"]
        reasons[index] = choice["finish_reason"]
    rows = rows_of(CHAT, n)
    assert texts == [text_of(row) for row in rows]
    assert prompt_ids == (list(CHAT) if return_ids else None)
    assert ids == (rows if return_ids else [[]] * n)
    assert reasons == ["stop" if row[-1] == 2 else "length" for row in rows]
    for row, found in zip(rows, scores):
        assert [x["token"] for x in found] == ([] if logprobs is None else [tokenizer().decode([t]) for t in row])
        if found:
            assert b"".join(bytes(each["bytes"]) for each in found).decode() == tokenizer().decode(row)
        for place, each in enumerate(found):
            table = scores_of(CHAT + tuple(row))[len(CHAT) - 1 + place]
            assert each["logprob"] == pytest.approx(float(table[row[place]]), abs=1e-4)
            assert [top["logprob"] for top in each["top_logprobs"]] == pytest.approx(
                table.topk(logprobs).values.tolist(), abs=1e-4
            )


@pytest.mark.covering(1)
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("usage", [None, False, True])
@pytest.mark.parametrize("continuous", [None, False, True])
def test_stream_options(server: Running, route: str, usage: bool | None, continuous: bool | None) -> None:
    """`continuous_usage_stats` adds to `include_usage` and does nothing alone."""
    body: dict[str, Any] = {"prompt": TEXTS[0]} if route == "/v1/completions" else {"messages": QUESTION}
    options = {"include_usage": usage, "continuous_usage_stats": continuous}
    chunks = chunks_of(server.post(route, stream=True, max_tokens=LENGTH, stream_options=options, **body).text)
    *parts, last = chunks
    if not usage:
        assert last["choices"] and all("usage" not in chunk for chunk in chunks)
        return
    assert last["choices"] == [] and last["usage"]["completion_tokens"] <= LENGTH
    if continuous:
        counts = [chunk["usage"]["completion_tokens"] for chunk in parts]
        assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]
    else:
        assert all(chunk["usage"] is None for chunk in parts)
    refused = server.post(route, max_tokens=1, stream_options=options, **body)
    assert refused.status_code == 422 and "stream=true" in refused.json()["error"]["message"]


def test_tokens_and_back(server: Running) -> None:
    for place, text in enumerate(("", "a list", "日本語 🙂 é", " \n\t ", "<|eos|> x")):
        special, pieces = place % 2 == 0, place > 2
        wanted = tokenizer()(text, add_special_tokens=special)["input_ids"]
        fields = {"prompt": text, "add_special_tokens": special, "return_token_strs": pieces}
        answer = server.post("/tokenize", **fields).json()
        assert answer["tokens"] == wanted and answer["count"] == len(wanted)
        assert answer["token_strs"] == (tokenizer().convert_ids_to_tokens(wanted) if pieces else None)
        assert server.post("/detokenize", tokens=wanted).json()["prompt"] == tokenizer().decode(wanted)
