"""`hf-paged run --input`: a file of requests in OpenAI's batch format, answered and continued."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hf_paged
from hf_paged.cli.main import main
from hf_paged.serving import loading, replica
from tests.serving.harness import NAME, QA, chat_ids, plain, shared_model, text_of, tokenizer

CHAT = [{"role": "user", "content": "What does str.capitalize() do?"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 5}),
    "many": ("/v1/completions", {"prompt": [[5], [6], [7]], "max_tokens": 3}),
    "wrong": ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    "response": ("/v1/responses", {"input": "The if", "max_output_tokens": 4}),
}


def lines(**changes: Any) -> list[dict[str, Any]]:
    """The requests of a file. changes: of the last one."""
    made: list[dict[str, Any]] = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": NAME, **body}}
        for name, (url, body) in BODIES.items()
    ]
    return [*made[:-1], {**made[-1], **changes}]


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made = hf_paged.CacheConfig(num_blocks=256)
    monkeypatch.setattr(loading, "load_engine", lambda *_, **__: (hf_paged.Engine(shared_model(), made), tokenizer()))


def answer(tmp_path: Path, requests: list[dict[str, Any]], *flags: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and what the output has then."""
    asked, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps(each) + "\n" for each in requests))
    status = main(["run", "--input", str(asked), "--output", str(output), QA, "--served-model-name", NAME, *flags])
    return status, [json.loads(each) for each in output.read_text().splitlines()] if output.exists() else []


@pytest.mark.smoke
def test_each_request_has_its_answer(tmp_path: Path, capsys: Any) -> None:
    """Also one that alone is as large as the engine's limit: three prompts, where three may be in flight."""
    status, found = answer(tmp_path, lines(), "--max-in-flight", "3", "--api-key", "secret")
    assert status == 0 and "4 of 4 requests: 18 tokens, 1 refused" in capsys.readouterr().err
    answers = {each["custom_id"]: each["response"] for each in found}
    assert {name: each["status_code"] for name, each in answers.items()} == dict.fromkeys(BODIES, 200) | {"wrong": 422}
    [expected] = plain(chat_ids(CHAT), max_new_tokens=5)
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == text_of(expected)
    assert len(answers["many"]["body"]["choices"]) == 3


def test_a_run_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was not written to its end is asked again, those before it stay; then no model loads."""
    _, first = answer(tmp_path, lines())
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.index(b"\n", whole.index(b"\n") + 1) + 30])
    status, found = answer(tmp_path, lines())
    assert status == 0 and found[:2] == first[:2]
    assert sorted(each["custom_id"] for each in found) == sorted(BODIES)
    monkeypatch.setattr(loading, "load_engine", None)
    assert answer(tmp_path, lines()) == (0, found)


def test_an_engine_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its last answers say nothing of the requests: they are not in the output."""

    async def end(self: Any, *args: Any) -> Any:
        self._service.worker.error = RuntimeError("the disk is on fire")
        self._service.worker.end()
        yield replica.Part("x", ({"type": "http.response.start", "status": 503},))

    monkeypatch.setattr(replica.Replica, "answer", end)
    assert answer(tmp_path, lines()) == (1, [])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the disk is on fire" in error and "goes on" in error


def test_what_is_wrong_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(loading, "load_engine", None)
    for changes, words in (
        ({"custom_id": "chat"}, "line 4 of .*'chat' occurs twice"),
        ({"custom_id": None}, "custom_id=None"),
        ({"url": "/v1/embeddings"}, "'/v1/embeddings' is not served; use POST and /v1/chat"),
        ({"method": "GET"}, "'GET'"),
        ({"body": {"stream": True}}, "whole answer"),
    ):
        assert answer(tmp_path, lines(**changes)) == (2, [])
        assert re.search(words, capsys.readouterr().err)
    file, other = str(tmp_path / "in.jsonl"), str(tmp_path / "other.jsonl")
    Path(other).write_text("{}\n")
    for given, words in (
        ([file, "--output", file, QA], "has the requests"),
        ([file, "--output", other, QA], "line 1 of .*other.jsonl is no answer"),
        ([file, QA], "belong together"),
        ([file, "--output", "x", QA, "--tensor-parallel-size", "2"], "one process"),
        ([file, "--output", "x", QA, "--prot", "2"], "No such option"),
    ):
        assert main(["run", "--input", *given]) == 2
        error = capsys.readouterr().err
        assert re.search(words, error) and error.count("\n") == 1, error
