"""Sends requests to an OpenAI endpoint at given times, and notes when their tokens come.

Open loop: a request is sent when it is due, whether or not earlier ones have been answered. Knows HTTP and times, and
nothing of statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True, slots=True)
class Planned:
    """A request. arrival: seconds after the start. prompt: token ids or text. leaves_after: number of pieces of the
    answer after which the client goes away; None: it stays."""

    arrival: float
    prompt: list[int] | str
    output_length: int
    leaves_after: int | None = None


@dataclass(slots=True)
class Outcome:
    """A record of one request. Times are in seconds after the start of the run.

    pieces: when the parts of the answer that had text or tokens came. prompt_tokens, completion_tokens: the server's
    own counts (`usage`); None if it gave none.
    """

    arrival: float
    sent: float
    pieces: list[float] = field(default_factory=list)
    end: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    has_left: bool = False
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.has_left and self.end is not None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a server, and the fields of requests beside prompt and length.

    route: "completions" or "chat/completions". extra: further fields of the body, such as `ignore_eos`.
    """

    base_url: str
    model: str
    route: str = "completions"
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def body(self, request: Planned) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self.route == "chat/completions":
            prompt = {"messages": [{"role": "user", "content": request.prompt}]}
        options = {"max_tokens": request.output_length, "stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **prompt, **options, **self.extra}


def served_model(base_url: str, name: str | None, api_key: str | None = None) -> tuple[str, int | None]:
    """This model, or the first of /v1/models, and its `max_model_len` if the server tells it. Raises ValueError if no
    name is given and there is none, and if no server answers."""
    headers = Endpoint(base_url, "", api_key=api_key).headers
    try:
        answer = httpx.get(f"{base_url}/v1/models", headers=headers, timeout=30, trust_env=False)
        answer.raise_for_status()
        cards = answer.json()["data"]
        card = next((card for card in cards if card["id"] == name), cards[0] if name is None else {})
        longest = card.get("max_model_len")
        return name or str(card["id"]), longest if isinstance(longest, int) else None
    except httpx.TransportError as error:
        raise ValueError(f"no server answers at {base_url} ({error}); start one, or give another --base-url") from error
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        if name is not None:
            return name, None
        raise ValueError(f"{base_url}/v1/models names no model ({error}); give it with --model") from error


def run(endpoint: Endpoint, requests: Sequence[Planned], on_end: Callable[[Outcome], None] | None = None) -> Run:
    """Send the requests, which are in the order of arrival; returns when all have ended."""
    _allow_connections(len(requests))
    return asyncio.run(_run(endpoint, requests, on_end or (lambda outcome: None)))


@dataclass(frozen=True, slots=True)
class Run:
    """The outcomes, in the order of the requests, and the seconds from the start to the last end."""

    outcomes: list[Outcome]
    seconds: float


async def _run(endpoint: Endpoint, requests: Sequence[Planned], on_end: Callable[[Outcome], None]) -> Run:
    # No limit of the client's: requests are sent when they are due.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=endpoint.base_url, headers=endpoint.headers, limits=limits, timeout=None, trust_env=False
    ) as client:  # `_send` limits the time of a request as a whole
        start = time.perf_counter()
        tasks: list[asyncio.Task[Outcome]] = []
        for request in requests:
            # From the start on, so that lags do not add up.
            delay = request.arrival - (time.perf_counter() - start)
            if delay > 0:
                await asyncio.sleep(delay)
            elif len(tasks) % 32 == 31:
                await asyncio.sleep(0)  # answers are read also while many are due at once
            task = asyncio.create_task(_send(client, endpoint, request, start))
            task.add_done_callback(lambda done: on_end(done.result()))
            tasks.append(task)
        outcomes = await asyncio.gather(*tasks)
        return Run(list(outcomes), time.perf_counter() - start)


async def _send(client: httpx.AsyncClient, endpoint: Endpoint, request: Planned, start: float) -> Outcome:
    outcome = Outcome(request.arrival, time.perf_counter() - start)
    try:
        async with (
            asyncio.timeout(endpoint.timeout),
            client.stream("POST", f"/v1/{endpoint.route}", json=endpoint.body(request)) as response,
        ):
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"{response.status_code}: {' '.join(text.split())[:200]}"
            else:
                await _read(response, request, outcome, start)
    except TimeoutError:
        outcome.error = f"no end after {endpoint.timeout:g} s"
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        # The last three: an event that is JSON, but none of OpenAI's.
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.end = time.perf_counter() - start
    return outcome


async def _read(response: httpx.Response, request: Planned, outcome: Outcome, start: float) -> None:
    is_finished = False
    async with contextlib.aclosing(_events(response)) as events:  # type: ignore[type-var]
        async for event in events:
            if "error" in event and not event.get("choices"):
                outcome.error = json.dumps(event["error"])[:200]
                return
            if (usage := event.get("usage")) is not None:
                outcome.prompt_tokens, outcome.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in event.get("choices") or ():
                is_finished = is_finished or choice.get("finish_reason") is not None
                if _is_piece(choice, is_first=not outcome.pieces):
                    outcome.pieces.append(time.perf_counter() - start)
            if request.leaves_after is not None and len(outcome.pieces) >= request.leaves_after:
                outcome.has_left = True
                return
    if not is_finished:
        outcome.error = "the answer broke off without a finish_reason"


def _is_piece(choice: dict[str, Any], *, is_first: bool) -> bool:
    """Return True if an event has a token. A token may have no text; an event may only name the role, or the end."""
    delta = choice.get("delta") or {}
    if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
        return True
    return delta.get("role") is None and (is_first or choice.get("finish_reason") is None)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events, until the end or [DONE]."""
    rest = b""
    async for part in response.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)


def _allow_connections(count: int) -> None:
    """One file descriptor for each request that may be open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Beside those that Python and the event loop have.
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
