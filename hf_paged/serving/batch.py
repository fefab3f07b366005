"""Answers the requests of a file in OpenAI's batch format as the server would, and continues where a run ended.

An output file has a line for each request that has its answer: whatever ends a run, the next one asks the others. Knows
files and the application; nothing of the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, NamedTuple

from hf_paged.serving.relay import Asked
from hf_paged.serving.replica import Replica
from hf_paged.serving.service import Service

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/decisions",
)
"""Routes that a line may name as its `url`."""

STANDARD = Path("-")
"""Standard input or output in place of a file."""

# The statuses of a request that found the engine full (one that can never fit has another), or no compiler of grammars
# that was free, and seconds until it is sent again: a step is hardly shorter.
_LATER, _WAIT_SECONDS = (429, 503), 0.05
_BEGIN = b'{"id": "batch_req_'
# As many as one reads; a file of another kind has one in each line.
_MOST_FAULTS = 5


class Line(NamedTuple):
    """A request of the file: its name there, its route, and its body in JSON."""

    custom_id: str
    url: str
    body: bytes

    @classmethod
    def of(cls, text: bytes) -> Line:
        """Read a line. Raises ValueError for one that is no request."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"no JSON ({error})") from None
        if not isinstance(found, dict):
            raise ValueError("no object; write one with custom_id, method, url and body")
        custom_id, method, url, body = (found.get(name) for name in ("custom_id", "method", "url", "body"))
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError(f"custom_id={custom_id!r}; give each request a name of its own")
        if url not in ROUTES or method not in (None, "POST"):
            raise ValueError(f"{method!r} {url!r} is not served; use POST and one of {', '.join(ROUTES)}")
        if not isinstance(body, dict) or body.get("stream"):
            raise ValueError("the body asks for no whole answer; give an object without `stream`")
        return cls(custom_id, url, json.dumps(body).encode())


class Answer(NamedTuple):
    """An answer of the application. body: JSON."""

    status: int
    request_id: str
    body: bytes


@dataclass(slots=True)
class Progress:
    """Counts of requests, and of the tokens in their answers. before: of earlier runs. refused: with another status
    than 200. failed: without a line in the output, because they may succeed later. reason: why the last one failed."""

    total: int
    before: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    tokens: int = 0
    reason: str = ""

    def __str__(self) -> str:
        earlier = f", {self.before} were in the output before" if self.before else ""
        done = self.answered + self.refused
        return f"{done} of {self.total} requests: {self.tokens} tokens, {self.refused} refused{earlier}"


class OutputError(Exception):
    """The output takes no more, as on a full disk."""


def answer_file(
    requests: Path, output: Path, make: Callable[[], Service], on_answer: Callable[[Progress], None]
) -> Progress:
    """Append to `output` the answers that it lacks. make: loads the model, if there is something to answer.

    Raises ValueError for files of something else, before that, Problem if the engine ends, and OutputError.
    """
    if output != STANDARD and output.exists() and requests.exists() and output.samefile(requests):
        raise ValueError(f"{output} has the requests; give the answers another file")
    with _opened(requests) as asked:
        names = _names_in(asked, requests)
        with _appended(output) as answers:
            known = set() if output == STANDARD else _answered_in(answers, output)
            progress = Progress(len(names), before=len(known.intersection(names)))
            if progress.before < progress.total:
                service = make()
                batch = Batch(Replica(service, "batch"), answers, progress, on_answer)
                left = (line for line in _lines(asked) if line.custom_id not in known)
                asyncio.run(batch.run(left, at_once=service.settings.limits.in_flight))
    return progress


@contextmanager
def _opened(requests: Path) -> Iterator[BinaryIO]:
    """Open a file to be read twice: before a model is loaded, and as the engine has room for its requests."""
    with nullcontext(sys.stdin.buffer) if requests == STANDARD else requests.open("rb") as file:
        # Some of the standard input may have been read by another program.
        if requests != STANDARD and file.seekable():
            yield file
            return
        with TemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            yield copy


@contextmanager
def _appended(output: Path) -> Iterator[BinaryIO]:
    """Open a file to be read and appended to. Raises ValueError if another run has it open."""
    if output == STANDARD:
        yield sys.stdout.buffer
        return
    import fcntl  # exists on POSIX only, but the package can be imported elsewhere

    with output.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{output}: another run writes to it; wait for its end, or give another file") from None
        yield file


def _texts(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the text of each line that has one."""
    file.seek(0)
    return ((number, text) for number, text in enumerate(file, 1) if text.strip())


def _lines(file: BinaryIO) -> Iterator[Line]:
    return (Line.of(text) for _, text in _texts(file))


def _names_in(file: BinaryIO, path: Path) -> list[str]:
    """Return the custom_id of each request. Raises ValueError that names the lines that are none, or repeat one."""
    names: dict[str, int] = {}
    count, faults = 0, list[str]()
    for number, text in _texts(file):
        try:
            name = Line.of(text).custom_id
            if names.setdefault(name, number) != number:
                raise ValueError(f"custom_id={name!r} is that of line {names[name]} too; give each one of its own")
        except ValueError as error:
            count += 1
            if count <= _MOST_FAULTS:
                faults.append(f"line {number}: {error}")
    if faults:
        more = f"; {count - len(faults)} more" if count > len(faults) else ""
        raise ValueError(f"{path}: {count} of the lines cannot be asked: {'; '.join(faults)}{more}")
    return [*names]


def _answered_in(file: BinaryIO, path: Path) -> set[str]:
    """Return the names of the requests with an answer in this file. A last line that has no end is cut off.

    Raises ValueError for a file of something else.
    """
    found: set[str] = set()
    end = 0
    file.seek(0)
    for number, text in enumerate(file, 1):
        # Only what a run of ours has begun: the file may be another one, named by mistake.
        if not text.endswith(b"\n") and (text.startswith(_BEGIN) or _BEGIN.startswith(text)):
            file.truncate(end)
            break
        end += len(text)
        try:
            row = json.loads(text)
            row["response"]["status_code"]  # which requests lack
            found.add(row["custom_id"])
        except (ValueError, TypeError, LookupError, RecursionError):
            raise ValueError(f"line {number} of {path} is no answer of a batch; give another output") from None
    return found


class Batch:
    """A run over the lines of a file. Its output has no status that may change: 429 and 503 are sent again at once,
    others from 500 on by the next run."""

    def __init__(
        self, replica: Replica, output: BinaryIO, progress: Progress, on_answer: Callable[[Progress], None]
    ) -> None:
        """on_answer: called after each answer, which `progress` counts then."""
        self._replica = replica
        self._output = output
        self._progress = progress
        self._on_answer = on_answer
        self._turn = asyncio.Lock()

    async def run(self, lines: Iterator[Line], *, at_once: int) -> None:
        """Answer these requests. Raises what ends the engine: the output has no answers of it.

        at_once: requests that are read and have no answer yet, so that a file of any length takes little memory.
        """
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
            answer = await self._ask(line)
            if answer.status in _LATER:
                async with self._turn:  # so that one with many prompts waits for places beside no other
                    while answer.status in _LATER:
                        await asyncio.sleep(_WAIT_SECONDS)
                        answer = await self._ask(line)
            self._take(line, answer)

    async def _ask(self, line: Line) -> Answer:
        request_id, status, body = uuid.uuid4().hex, 0, b""
        headers = {
            "content-type": "application/json",
            "content-length": str(len(line.body)),
            "x-request-id": request_id,
        }
        encoded = tuple((name.encode(), value.encode()) for name, value in headers.items())
        asked = Asked("POST", line.url, b"", encoded, line.body, request_id=request_id)
        async with aclosing(self._replica.answer(asked)) as parts:
            async for part in parts:
                for message in part.messages:
                    status = message.get("status", status)
                    body += message.get("body", b"")
        self._replica.check_alive()  # else the answer says only that the engine has ended
        return Answer(status, request_id, body)

    def _take(self, line: Line, answer: Answer) -> None:
        body = json.loads(answer.body)
        if answer.status >= 500:
            self._progress.failed += 1
            self._progress.reason = body["error"]["message"]
        else:
            self._write(line, answer, body)
            usage = body.get("usage") or {}
            # After it is written: what is counted has its line.
            self._progress.answered += answer.status == 200
            self._progress.refused += answer.status != 200
            self._progress.tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
        self._on_answer(self._progress)

    def _write(self, line: Line, answer: Answer, body: object) -> None:
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
        made = {
            "id": f"batch_req_{answer.request_id}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        # In ASCII: some readers take U+2028 for the end of a line, and half of a surrogate pair has no UTF-8.
        try:
            self._output.write(json.dumps(made).encode() + b"\n")
            self._output.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # What is still buffered would fail again when the file is closed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._output.fileno())
            raise OutputError(error.strerror) from error
