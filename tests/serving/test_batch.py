"""`hf-paged run --input`: a file of requests in OpenAI's batch format, whose answers resume."""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

import hf_paged
from hf_paged.cli.main import main
from hf_paged.serving import batch, loading
from tests.serving.harness import NAME, QA, chat_ids, plain, shared_model, text_of, tokenizer

CHAT = [{"role": "user", "content": "What does str.capitalize() do?"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 5}),
    "many": ("/v1/completions", {"prompt": [[5], [6], [7]], "max_tokens": 3}),
    "wrong": ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    "unknown": ("/v1/completions", {"model": "gpt-9", "prompt": "x"}),
    "ranking": ("/v1/rerank", {"query": "x", "documents": ["y"]}),
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
    written = output.read_bytes().splitlines(True) if output.exists() else []
    return status, [json.loads(each) for each in written if each.endswith(b"\n")]


@pytest.mark.smoke
def test_each_request_has_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Also one that has to wait until no other is in flight: three prompts, where three may be."""
    monkeypatch.setenv("HF_PAGED_API_KEY", "secret")
    status, found = answer(tmp_path, lines(), "--max-in-flight", "3")
    assert status == 0 and "6 of 6 requests: 18 tokens, 2 refused" in capsys.readouterr().err
    answers = {each["custom_id"]: each["response"] for each in found}
    refused = {"wrong": 422, "unknown": 404}
    assert {name: each["status_code"] for name, each in answers.items()} == dict.fromkeys(BODIES, 200) | refused
    assert answers["unknown"]["body"]["error"].keys() == {"message", "type", "param", "code"}
    [expected] = plain(chat_ids(CHAT), max_new_tokens=5)
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == text_of(expected)
    assert len(answers["many"]["body"]["choices"]) == 3


@pytest.mark.parametrize("end", ["kill", "interrupt", "engine", "disk"])
def test_a_run_continues_where_another_ended(tmp_path: Path, monkeypatch: Any, capsys: Any, end: str) -> None:
    """After two answers: the others are asked, and a line that was not written to its end. Then no model loads."""
    output, take = tmp_path / "out.jsonl", batch.Batch._take
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def ends(self: Any, *given: Any) -> None:
        take(self, *given)
        if self._progress.answered + self._progress.refused == 2:
            if end == "interrupt":
                signal.raise_signal(signal.SIGINT)
            elif end == "disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (output.stat().st_size + 9, most[1]))
            else:
                self._replica._service.worker.error = RuntimeError("the disk is on fire")

    if end != "kill":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a test before this one may have left another
        monkeypatch.setattr(batch.Batch, "_take", ends)
    status, first = answer(tmp_path, lines(), "--max-in-flight", "4")
    resource.setrlimit(resource.RLIMIT_FSIZE, most)
    if end == "kill":
        output.write_bytes(b"".join(output.read_bytes().splitlines(True)[:3])[:-40])
        first = first[:2]
    else:
        error = capsys.readouterr().err
        assert ("the disk is on fire" in error) == (end == "engine") and "the same command answers the others" in error
        assert ("out.jsonl cannot be written: File too large" in error) == (end == "disk")
        monkeypatch.setattr(batch.Batch, "_take", take)
    assert status == {"kill": 0, "interrupt": 130}.get(end, 1)
    status, found = answer(tmp_path, lines())
    assert status == 0 and found[: len(first)] == first and 2 <= len(first) < len(found)
    assert sorted(each["custom_id"] for each in found) == sorted(BODIES)
    monkeypatch.setattr(loading, "load_engine", None)
    assert answer(tmp_path, lines()) == (0, found)


def test_what_fails_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By the next run, or at once where the status says that it may succeed then."""
    ask, faults = batch.Batch._ask, {"chat": 500, "many": 503}

    async def faulty(self: Any, line: batch.Line) -> Any:
        if status := faults.pop(line.custom_id, 0):
            return batch.Answer(status, "x", b'{"error": {"message": "no luck"}}')
        return await ask(self, line)

    monkeypatch.setattr(batch.Batch, "_ask", faulty)
    status, found = answer(tmp_path, lines())
    assert status == 1 and len(found) == 5 and "; 1 failed (no luck); the same command" in capsys.readouterr().err
    status, found = answer(tmp_path, lines())
    assert status == 0 and found[-1]["custom_id"] == "chat" and found[-1]["response"]["status_code"] == 200


@pytest.mark.parametrize("source", ["-", "/dev/fd/{}"])
def test_a_pipe_and_a_window(monkeypatch: pytest.MonkeyPatch, capsysbinary: Any, source: str) -> None:
    """No more requests are read than may be in flight. The output has answers only, one in each line."""
    open_now, most, ask = 0, 0, batch.Batch._ask

    async def watched(self: Any, line: batch.Line) -> Any:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        answer = await ask(self, line)
        open_now -= 1
        return answer

    monkeypatch.setattr(batch.Batch, "_ask", watched)
    text = "".join(json.dumps({**lines()[0], "custom_id": f"{number}\u2028"}) + "\n\n" for number in range(9))
    reader, writer = os.pipe()
    os.write(writer, text.encode())  # which a pipe holds
    os.close(writer)
    monkeypatch.setattr("sys.stdin", os.fdopen(reader))
    argv = ["run", "--input", source.format(reader), "--output", "-", QA, "--served-model-name", NAME]
    assert main([*argv, "--max-in-flight", "3"]) == 0
    written, progress = map(bytes.decode, capsysbinary.readouterr())
    assert sorted(json.loads(each)["custom_id"] for each in written.splitlines()) == [f"{n}\u2028" for n in range(9)]
    assert most == 3 and "hf-paged: 1 of 9 requests" in progress
    monkeypatch.setattr(batch, "answer_file", lambda *_: signal.raise_signal(signal.SIGINT))
    assert main(argv) == 130 and capsysbinary.readouterr().err == b"\nhf-paged: interrupted\n"


def test_what_is_wrong_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(loading, "load_engine", None)
    for changes, words in (
        ({"custom_id": "chat"}, "line 6: custom_id='chat' is that of line 1 too"),
        ({"custom_id": None}, "custom_id=None"),
        ({"url": "/v1/files"}, "'/v1/files' is not served; use POST and one of /v1/chat"),
        ({"method": "GET"}, "'GET'"),
        ({"body": {"stream": True}}, "whole answer"),
    ):
        assert answer(tmp_path, lines(**changes)) == (2, [])
        assert re.search(words, capsys.readouterr().err)
    file, other, broken, config = (str(tmp_path / name) for name in ("in.jsonl", "other.jsonl", "broken", "config"))
    Path(file).write_text(json.dumps(lines()[0]))
    Path(other).write_text(json.dumps(lines()[0]) + "\n")
    Path(config).write_text('{"id": 1}')
    Path(broken).write_text('[]\n{"custom_id": \n' + "[" * 10**6 + "\nx" * 9)
    with open(tmp_path / "busy.jsonl", "a") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        for given, words in (
            ([file, "--output", file, QA], "has the requests"),
            ([file, "--output", other, QA], "line 1 of .*other.jsonl is no answer"),
            ([file, "--output", config, QA], "line 1 of .*config is no answer"),
            ([file, "--output", "x", "--serving", QA], "--default and --serving are for programs"),
            ([file, "--output", "x", QA, "--port", "1", "--api-key", "k"], "--port, --api-key: for a server"),
            ([file, "--output", busy.name, QA], "another run writes"),
            ([broken, "--output", "-", QA], "12 of the lines .*line 1: no object.*line 2: no JSON.*; 7 more"),
            ([file, QA], "belong together"),
            ([file, "--output", "x", QA, "--tensor-parallel-size", "2"], "one process"),
            ([file, "--output", "x", QA, "--prot", "2"], "No such option"),
        ):
            assert main(["run", "--input", *given]) == 2
            error = capsys.readouterr().err
            assert re.search(words, error) and error.count("\n") == 1, error
    assert Path(config).read_text() == '{"id": 1}'
