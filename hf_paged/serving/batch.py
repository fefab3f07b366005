"""Answers the requests of a file in OpenAI's batch format as the server would, and goes on where a run was ended.

An output file has a line for each request that has its answer: whatever ends a run, the next one asks the others. Knows
files and the application; nothing of the engine.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from hf_paged.serving.relay import Asked
from hf_paged.serving.replica import Replica
from hf_paged.serving.service import Service

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""Routes that a line may name as its `url`."""

_LATER = 429
_WAIT_SECONDS = 0.05  # until a request is sent again that found the engine full


@dataclass(frozen=True, slots=True)
class Line:
    """A request of the file: its name there, its route, and its body in JSON."""

    custom_id: str
    url: str
    body: bytes


class Answer(NamedTuple):
    """What the application has answered. body: JSON."""

    status: int
    request_id: str
    body: bytes


@dataclass(slots=True)
class Ended:
    """Counts of requests, and of the tokens in their answers. before: of earlier runs. refused: with another status
    than 200."""

    total: int
    before: int = 0
    answered: int = 0
    refused: int = 0
    tokens: int = 0

    def __str__(self) -> str:
        earlier = f", {self.before} were in the output before" if self.before else ""
        done = self.answered + self.refused
        return f"{done} of {self.total} requests: {self.tokens} tokens, {self.refused} refused{earlier}"


def answer_file(requests: Path, output: Path, make: Callable[[], Service], show: Callable[[str], None]) -> Ended:
    """Append to `output` the answers that it lacks. make: loads the model, if there is something to answer.

    Raises ValueError for files of something else, before that, and Problem if the engine ends.
    """
    if output.exists() and output.samefile(requests):
        raise ValueError(f"{output} has the requests; give the answers another file")
    known = answered_in(output)
    names = [line.custom_id for line in read_lines(requests)]
    ended = Ended(len(names), before=len(known.intersection(names)))
    if ended.before < ended.total:
        service = make()
        with output.open("a", encoding="utf-8") as file:
            batch = Batch(Replica(service, "batch"), file, ended, lambda: show(str(ended)))
            left = (line for line in read_lines(requests) if line.custom_id not in known)
            asyncio.run(batch.run(left, at_once=service.settings.limits.in_flight))
    return ended


def read_lines(path: Path) -> Iterator[Line]:
    """Read the requests of a file. Raises ValueError for a line that is none, or that repeats an earlier one's name."""
    known: set[str] = set()
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                line = _line(text, f"line {number} of {path}")
                if line.custom_id in known:
                    raise ValueError(f"line {number} of {path}: the custom_id {line.custom_id!r} occurs twice")
                known.add(line.custom_id)
                yield line


def _line(text: bytes, place: str) -> Line:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{place} is no object; write one with custom_id, method, url and body")
    custom_id, url, body = (found.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"{place}: custom_id={custom_id!r}; give each request a name of its own")
    if url not in ROUTES or found.get("method", "POST") != "POST":
        raise ValueError(f"{place}: {found.get('method')!r} {url!r} is not served; use POST and {' or '.join(ROUTES)}")
    if not isinstance(body, dict) or body.get("stream"):
        raise ValueError(f"{place}: the body is no request for a whole answer; give an object without `stream`")
    return Line(custom_id, url, json.dumps(body).encode())


def answered_in(path: Path) -> set[str]:
    """Return the names of the requests with an answer in this file. A last line that has no end is cut off.

    Raises ValueError for a file of something else.
    """
    if not path.exists():
        return set()
    found: set[str] = set()
    with path.open("rb+") as file:
        end = 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(text)
            try:
                found.add(json.loads(text)["custom_id"])
            except (ValueError, TypeError, LookupError):
                raise ValueError(f"line {number} of {path} is no answer of a batch; give another output") from None
    return found


class Batch:
    """A run over the lines of a file. Its output has no 429: a request that finds the engine full is sent again."""

    def __init__(self, replica: Replica, output: IO[str], ended: Ended, on_answer: Callable[[], None]) -> None:
        """on_answer: called after each answer, which `ended` counts then."""
        self._replica = replica
        self._output = output
        self._ended = ended
        self._on_answer = on_answer
        self._in_flight, self._begun = 0, 0
        self._turn = asyncio.Lock()

    async def run(self, lines: Iterator[Line], *, at_once: int) -> None:
        """Answer these requests. Raises what ends the engine: the output has no answers of it."""
        await self._replica.start()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._answer_each(lines))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._replica.stop()

    async def _answer_each(self, lines: Iterator[Line]) -> None:
        for line in lines:  # which all tasks share
            answer, _ = await self._ask(line)
            if answer.status == _LATER:
                answer = await self._ask_again(line)
            self._replica.check_alive()  # else the answer says only that the engine has ended
            self._write(line, answer)

    async def _ask_again(self, line: Line) -> Answer:
        """Ask until the engine takes the request, or until it refuses it though it has no other."""
        async with self._turn:  # else two that each fill the engine would wait for one another
            while True:
                await asyncio.sleep(_WAIT_SECONDS)
                answer, was_alone = await self._ask(line)
                if answer.status != _LATER or was_alone:
                    return answer

    async def _ask(self, line: Line) -> tuple[Answer, bool]:
        """The answer, and whether no other request was in flight meanwhile."""
        request_id, status, body = uuid.uuid4().hex, 0, b""
        self._in_flight += 1
        self._begun += 1
        begun, is_first = self._begun, self._in_flight == 1
        headers = {
            "content-type": "application/json",
            "content-length": str(len(line.body)),
            "x-request-id": request_id,
        }
        encoded = tuple((name.encode(), value.encode()) for name, value in headers.items())
        model = json.loads(line.body).get("model")
        asked = Asked("POST", line.url, b"", encoded, line.body, model=model, request_id=request_id)
        async with aclosing(self._replica.answer(asked)) as parts:
            async for part in parts:
                for message in part.messages:
                    status = message.get("status", status)
                    body += message.get("body", b"")
        self._in_flight -= 1
        return Answer(status, request_id, body), is_first and begun == self._begun

    def _write(self, line: Line, answer: Answer) -> None:
        body: dict[str, Any] = json.loads(answer.body)
        self._ended.answered += answer.status == 200
        self._ended.refused += answer.status != 200
        usage = body.get("usage") or {}
        self._ended.tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
        made = {
            "id": f"batch_req_{answer.request_id}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        self._output.write(json.dumps(made, ensure_ascii=False) + "\n")
        self._output.flush()
        self._on_answer()
