"""Answers on the wire: whole or as server-sent events, ended when the client goes away.

Whatever ends an answer (its end, an error, a client that is gone or cut off, the server's shutdown), its job is closed,
which aborts what is unfinished. Sending waits while the client does not read; connections.py ends that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hf_paged.errors import EngineStopped, QueueFull
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.serving.choices import Delta
from hf_paged.serving.connections import until_gone
from hf_paged.serving.forms import Form, Plain, usage
from hf_paged.serving.problems import Json, Problem, overdue
from hf_paged.serving.recipe import Recipe
from hf_paged.serving.worker import Outputs

_Result = TypeVar("_Result")
# Tokens that are not turned into text on the event loop, which could send nothing meanwhile.
_LONG = 512


@dataclass(slots=True)
class Outcome:
    """A record of how an answer went, for the log.

    status: "ok", "disconnected", "slow" (the client did not read), the message of an error, or "unfinished" (the server
    cancelled it). cause: of an error of the server. Over all prompts: queue_seconds is the longest wait for a first
    step, first_token_seconds the time to the first of all tokens (None: there was none).
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    preemptions: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    weight_versions: tuple[int, int] | None = None
    status: str = "unfinished"
    cause: BaseException | None = None
    _begun: set[str] = field(default_factory=set)  # requests that have their first token

    def note(self, outputs: Iterable[RequestOutput]) -> None:
        """Record outputs that have changed. The times of a request change until its first token and at its end only."""
        for output in outputs:
            if output.request_id in self._begun and not output.finished:
                continue
            metrics = output.metrics
            if (waited := metrics.queue_time) is not None:
                self.queue_seconds = max(waited, self.queue_seconds or 0.0)
            if (first := metrics.time_to_first_token) is not None:
                self.first_token_seconds = min(first, self.first_token_seconds or first)
                self._begun.add(output.request_id)
            self.preemptions += metrics.num_preemptions  # known when the request has finished
            if (versions := metrics.weight_versions) is not None:
                first, last = self.weight_versions or versions
                self.weight_versions = min(first, versions[0]), max(last, versions[1])


class Reading(Protocol):
    """A reader turns outputs into deltas and counts their tokens; see `choices.Choices`."""

    completion_tokens: int
    cached_tokens: int

    def update(self, outputs: Mapping[int, RequestOutput]) -> list[Delta]: ...

    @property
    def are_finished(self) -> bool: ...


class Opened(NamedTuple):
    """The parts from which an answer is made. job: None if there is nothing to generate."""

    recipe: Recipe
    job: Outputs | None
    choices: Reading
    form: Form


class JobAnswer(Response):
    """The answer to a recipe, put together while the engine works on its job (None: there is nothing to generate)."""

    def __init__(
        self,
        recipe: Recipe,
        job: Outputs | None,
        choices: Reading,
        form: Form,
        *,
        ends_at: float | None,
        on_end: Callable[[Outcome], None],
    ) -> None:
        """ends_at: time of the event loop after which it ends with an error (None: no limit). on_end: called once, when
        the answer has ended in any way."""
        self._engine_ids = {"x-engine-request-ids": ",".join(job.ids)} if job is not None and job.ids else {}
        super().__init__(
            media_type="text/event-stream" if recipe.stream else "application/json", headers=self._engine_ids
        )
        self._recipe = recipe
        self._job = job
        self._choices = choices
        self._form = form
        self._ends_at = ends_at
        self._on_end = on_end
        self._outcome = Outcome(sum(map(len, recipe.prompts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Both at once: nothing else tells that the client is gone while the engine computes.
        gone = asyncio.ensure_future(until_gone(receive))
        work = asyncio.ensure_future(self._stream(send) if self._recipe.stream else self._answer(send))
        limit = self._limit()
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                self._outcome.status = "ok" if self._outcome.status == "unfinished" else self._outcome.status
            else:
                self._outcome.status = "disconnected"
            # Whatever ended first, a client that is cut off has been too slow.
            if scope["state"].get("is_cut_off"):
                self._outcome.status = "slow"
        except Problem as problem:
            self._failed(problem)
            raise
        finally:
            if limit is not None:
                limit.cancel()
            if self._job is not None:
                # Whatever has ended the answer, nothing of it is computed any further.
                self._job.close()
            gone.cancel()
            work.cancel()
            # Both have ended before the outcome is read, which they write.
            await asyncio.gather(gone, work, return_exceptions=True)
            self._outcome.completion_tokens = self._choices.completion_tokens
            self._outcome.cached_tokens = self._choices.cached_tokens
            self._on_end(self._outcome)

    def _limit(self) -> asyncio.TimerHandle | None:
        """Schedule the end of the answer at `ends_at`; the engine's own deadline needs a step."""
        if self._ends_at is None or self._job is None:
            return None
        return asyncio.get_running_loop().call_at(self._ends_at, self._job.fail, overdue())

    def _failed(self, problem: Problem) -> None:
        if self._job is not None:
            self._job.close()  # before the client is told
        self._outcome.status = problem.message
        self._outcome.cause = problem.__cause__ if problem.status == 500 else None

    async def _deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield the new deltas (perhaps none) whenever outputs have changed. Raises Problem if the request fails."""
        if self._job is None:
            yield [
                Delta(index, "", [], [], finish_reason="length")
                for index in range(len(self._recipe.prompts) * self._recipe.n)
            ]
            self._outcome.finish_reasons = ["length"] * len(self._recipe.prompts)
            return
        try:
            while changed := await self._job.changes():
                # Noted before the text is made, because that may fail.
                self._outcome.note(changed.values())
                whole = (each for output in changed.values() if output.finished for each in output.outputs)
                is_long = sum(each.num_tokens for each in whole) > _LONG or self._recipe.has_sound
                deltas = await _made(partial(self._choices.update, changed), is_long=is_long)
                self._outcome.finish_reasons += [delta.finish_reason for delta in deltas if delta.finish_reason]
                yield deltas
                if self._choices.are_finished:
                    return
        except EngineStopped as error:
            raise Problem(503, str(error), code="engine_stopped") from error

    def _usage(self) -> Json:
        outcome, choices = self._outcome, self._choices
        counts = outcome.prompt_tokens, choices.completion_tokens, choices.cached_tokens, self._recipe.audio_tokens
        return usage(*counts, outcome.weight_versions)

    async def _answer(self, send: Send) -> None:
        deltas = [delta async for some in self._deltas() for delta in some]

        def whole() -> Plain:
            made = self._form.whole(deltas, self._usage())
            return made if isinstance(made, Plain) else Plain(to_json(made), "application/json")

        is_long = self._recipe.logprobs is not None or self._recipe.has_sound or self._form.is_long
        body, kind = await _made(whole, is_long=is_long)
        answer = Response(body, media_type=kind, headers=self._engine_ids)
        await send({"type": "http.response.start", "status": 200, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})  # waits until the client has taken what it was sent

    async def _stream(self, send: Send) -> None:
        # Proxies such as nginx would keep events back until they have many.
        headers = [*self.raw_headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_on(send, self._events(self._with_usage(self._form.opening())))
        try:
            async for deltas in self._deltas():
                for delta in deltas:
                    if not delta.is_seen(self._recipe):
                        continue
                    events_of = partial(self._events_of, delta)
                    if events := await _made(events_of, is_long=delta.prompt is not None):
                        await _send_on(send, events)
            await _send_on(send, self._events(self._form.closing(self._usage())))
        # The status has been sent, so the error is an event.
        except Problem as problem:
            self._failed(problem)
            await _send_on(send, self._events([self._form.failure(problem)]))
        last = b"" if self._form.ending is None else b"data: %b\n\n" % self._form.ending
        await _send_on(send, last, more=False)

    def _events_of(self, delta: Delta) -> bytes:
        return self._events(self._with_usage(self._form.chunks(delta)))

    def _events(self, chunks: Iterable[Mapping[str, Any]]) -> bytes:
        """Write chunks as server-sent events."""
        lines = []
        for chunk in chunks:
            if self._form.names_events:
                lines.append(b"event: %b\n" % chunk["type"].encode())
            lines.append(b"data: %b\n\n" % _one_line(to_json(chunk)))
        return b"".join(lines)

    def _with_usage(self, chunks: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
        if not self._recipe.include_usage:
            return chunks
        usage = self._usage() if self._recipe.continuous_usage else None
        return [{**chunk, "usage": usage} for chunk in chunks]


@contextmanager
def refusals() -> Iterator[None]:
    """The engine's refusals, as Problems."""
    try:
        yield
    except QueueFull as error:
        raise Problem(429, str(error), code="queue_full", headers={"retry-after": "1"}) from error
    except ValueError as error:
        raise Problem(400, str(error)) from error
    except EngineStopped as error:
        raise Problem(503, str(error), code="engine_stopped") from error


def _one_line(data: bytes) -> bytes:
    """JSON without the characters at which some clients end a line, such as httpx's `iter_lines`. Server-sent
    events do not end a line there. In JSON they occur in strings only."""
    for character in ("\x85", "\u2028", "\u2029"):
        data = data.replace(character.encode(), b"\\u%04x" % ord(character))
    return data


async def _send_on(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _made(make: Callable[[], _Result], *, is_long: bool) -> _Result:
    """Make something, in a thread if `is_long`: with many tokens or numbers it would stop the event loop."""
    return await asyncio.to_thread(make) if is_long else make()
