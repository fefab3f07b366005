"""Answers on the wire: whole or as server-sent events, ended when the client goes away.

Whatever ends an answer (its end, an error, a client that is gone or too slow, the server's shutdown), its job is
closed, which aborts what is unfinished.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hf_paged.serving.choices import Choices, Delta, joined
from hf_paged.serving.forms import Form, usage
from hf_paged.serving.plan import Plan
from hf_paged.serving.problems import Problem
from hf_paged.serving.worker import EngineStopped, Job


@dataclass(slots=True)
class Outcome:
    """How an answer ended, for the log: "ok", "disconnected", "slow", or the message of an error."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    status: str = "unfinished"


class JobAnswer(Response):
    """The answer to a plan, put together while the engine works on its job (None: there is nothing to generate)."""

    def __init__(
        self,
        plan: Plan,
        job: Job | None,
        choices: Choices,
        form: Form,
        *,
        send_seconds: float,
        on_end: Callable[[Outcome], None],
    ) -> None:
        """on_end: called once, when the answer has ended in any way."""
        super().__init__(media_type="text/event-stream" if plan.stream else "application/json")
        self._plan = plan
        self._job = job
        self._choices = choices
        self._form = form
        self._send_seconds = send_seconds
        self._on_end = on_end
        self._outcome = Outcome(sum(map(len, plan.prompts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_until_gone(receive))
        work = asyncio.ensure_future(self._stream(send) if self._plan.stream else self._answer(scope, receive, send))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                self._outcome.status = "ok" if self._outcome.status == "unfinished" else self._outcome.status
            else:
                self._outcome.status = "disconnected"
        except Problem as problem:
            self._outcome.status = problem.message
            raise
        except TimeoutError:  # the connection is of no use any more; uvicorn closes it
            self._outcome.status = "slow"
        finally:
            if self._job is not None:
                self._job.close()
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)
            self._outcome.completion_tokens = self._choices.completion_tokens
            self._outcome.cached_tokens = self._choices.cached_tokens
            self._on_end(self._outcome)

    async def _deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, each time that something is. Raises Problem if the request fails."""
        if self._job is None:
            yield [
                Delta(index, "", [], [], finish_reason="length")
                for index in range(len(self._plan.prompts) * self._plan.n)
            ]
            self._outcome.finish_reasons = ["length"] * len(self._plan.prompts)
            return
        try:
            while changed := await self._job.changes():
                deltas = self._choices.update(changed)
                self._outcome.finish_reasons += [delta.finish_reason for delta in deltas if delta.finish_reason]
                yield deltas
                if self._choices.are_finished:
                    return
        except EngineStopped as error:
            raise Problem(503, str(error), code="engine_stopped") from error

    def _usage(self) -> dict[str, Any]:
        return usage(self._outcome.prompt_tokens, self._choices.completion_tokens, self._choices.cached_tokens)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas = [delta async for some in self._deltas() for delta in some]
        whole = self._form.whole(joined(deltas, len(self._plan.prompts) * self._plan.n))
        answer = Response(_json({**whole, "usage": self._usage()}), media_type="application/json")
        async with asyncio.timeout(self._send_seconds):
            await answer(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [*self.raw_headers, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        headers = [(name, value) for name, value in headers if name != b"content-length"]
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": headers})
        for chunk in self._form.opening():
            await self._event(send, chunk)
        try:
            async for deltas in self._deltas():
                for delta in deltas:
                    await self._event(send, self._form.chunk(delta))
            if self._plan.include_usage:
                await self._data(send, _json({**self._form.usage_chunk(), "usage": self._usage()}))
        except Problem as problem:
            self._outcome.status = problem.message
            await self._data(send, _json(problem.body()))
        await self._data(send, "[DONE]", more=False)

    async def _event(self, send: Send, chunk: Mapping[str, Any]) -> None:
        if self._plan.include_usage:
            chunk = {**chunk, "usage": self._usage() if self._plan.continuous_usage else None}
        await self._data(send, _json(chunk))

    async def _data(self, send: Send, text: str, *, more: bool = True) -> None:
        body = f"data: {text}\n\n".encode()
        await self._send(send, {"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        """Waits while the client does not read, but not for ever."""
        async with asyncio.timeout(self._send_seconds):
            await send(message)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
