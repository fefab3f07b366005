"""The routes of speech: a client's file -> windows -> requests to the engine -> what these say together.

Files are read in threads of their own, so that a hostile or a long one holds up neither the event loop nor the
tokenizer. The windows of a file are requests like any others: they run beside each other and beside those of other
clients, and end with the client.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import to_json
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hf_paged.errors import EngineStopped
from hf_paged.generation.request_options import RequestOptions
from hf_paged.serving.audio import Samples, check_installed, decoded
from hf_paged.serving.connections import unless_gone
from hf_paged.serving.invalid import invalid
from hf_paged.serving.problems import Json, Problem, not_served, overdue
from hf_paged.serving.recipe import Submission, salt_of
from hf_paged.serving.refusals import note_unused
from hf_paged.serving.schema import AtLeastOne, Body, Hint, Number, Text
from hf_paged.serving.service import CLIENT_GONE, Service, refusals
from hf_paged.serving.speech import Question, Segment, Speech, Task, Window, Wish
from hf_paged.serving.transcripts import MEDIA_TYPES, TIMED, Format, plain, text_of, verbose

log = logging.getLogger("hf_paged.serving")

_READERS = 2  # threads that read files
_WINDOWS = 16  # of a file, that the engine has at a time: those of a long one would hold up all later requests
_FILES_OF_FULL_LENGTH = 4  # sound of so many may be in memory at once
_MANY_FIELDS = 64

_Result = TypeVar("_Result")
Ended = Callable[[str, int], None]
"""Gets how the work on a file has ended, in a word or a message, and the number of tokens."""

_NOT_SERVED = {
    "include[]": "log-probabilities of speech are not returned; leave it out",
    "known_speaker_names[]": "speakers are not told apart; leave it out",
    "known_speaker_references[]": "speakers are not told apart; leave it out",
}


class SpeechRequest(Body):
    """The fields of both routes besides the file. A form has texts, which are read as what the field is."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=False)

    model: Hint | None = None
    language: Hint | None = None
    prompt: Text | None = None
    response_format: Format = "json"
    temperature: Annotated[Number, Field(ge=0, le=2)] = 0.0
    granularities: list[Literal["segment", "word"]] = Field([], alias="timestamp_granularities[]", max_length=2)
    stream: bool = False
    beam_size: Annotated[AtLeastOne, Field(strict=False)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    chunking_strategy: Hint | None = None


@dataclass(frozen=True, slots=True)
class _Upload:
    """What a client has sent. adapter: of the model that it names, whose name in answers is `model`."""

    wanted: SpeechRequest
    file: UploadFile
    model: str
    adapter: str
    salt: str | None


@dataclass(slots=True)
class _Heard:
    """What is known of a file's first windows. language: of the first one."""

    windows: list[Window]
    tokens: list[list[int]]
    language: str | None


class Transcriptions:
    """The speech of one service. extractor: of the model's checkpoint, which makes features of samples (None: the
    checkpoint has none)."""

    def __init__(self, service: Service, extractor: Any) -> None:
        served = service.served
        self._service = service
        self._limits = service.settings.limits
        is_speech = extractor is not None and Speech.is_spoken_to(served.model, served.tokenizer)
        self._speech = Speech(served.model, served.tokenizer, extractor) if is_speech else None
        self._threads = ThreadPoolExecutor(_READERS, "hf-paged-audio")
        self._seconds = 0.0  # of sound in memory

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def answer(self, task: Task, request: Request) -> Response:
        """The answer to a request for `task`. Raises Problem."""
        began, request_id = asyncio.get_running_loop().time(), request.state.request_id
        limit = self._limits.request_seconds
        ends_at = None if limit is None else began + limit
        self._service.check_open()
        speech = self._speech
        if speech is None:
            raise not_served(f"{request.url.path}: this model does not write down speech as Whisper's kind does")
        check_installed()
        upload = await self._read_form(request)

        def ended(status: str, num_tokens: int) -> None:
            seconds = asyncio.get_running_loop().time() - began
            log.info(
                "request=%s model=%s status=%r completion_tokens=%d seconds=%.3f",
                *(request_id, upload.model, status, num_tokens, seconds),
            )

        work = _Work(self, speech, upload, task, ends_at, ended)
        if not upload.wanted.stream:
            answer = await unless_gone(work.whole(), request.receive)
            return Response(status_code=CLIENT_GONE) if answer is None else answer
        events = work.events()

        async def begin() -> bytes:
            return await anext(events)  # a file that is refused has a status of its own

        first = await unless_gone(begin(), request.receive)
        if first is None:
            await events.aclose()
            return Response(status_code=CLIENT_GONE)
        return _Events(first, events)

    async def _read_form(self, request: Request) -> _Upload:
        """Raises Problem."""
        kind = request.headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            raise Problem(415, "a form with a file is needed (multipart/form-data)", param="file")
        try:
            form = await request.form(max_files=1, max_fields=_MANY_FIELDS, max_part_size=2**20)
        except MultiPartException as error:
            raise Problem(400, f"the form cannot be read: {error.message}") from error
        given: dict[str, Any] = {}
        for name in form:
            values = form.getlist(name)
            if name.endswith("[]"):
                given[name] = values
            elif len(values) > 1:
                raise Problem(422, f"{name}: it is given {len(values)} times", param=name, code="invalid_field")
            else:
                given[name] = values[0]
        file = given.pop("file", None)
        if not isinstance(file, UploadFile):
            raise Problem(422, "file: a file of sound is needed", param="file", code="invalid_field")
        for name, remedy in _NOT_SERVED.items():
            if name in given:
                raise not_served(f"{name}: {remedy}", param=name)
        if "timestamp_granularities" in given:  # as some clients name it
            given["timestamp_granularities[]"] = form.getlist("timestamp_granularities")
            del given["timestamp_granularities"]
        try:
            wanted = SpeechRequest.model_validate(given)
        except ValidationError as error:
            raise invalid([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error
        self._check(wanted)
        model, adapter = self._service.served.adapter_of(wanted.model)
        return _Upload(wanted, file, model, adapter, salt_of(request.state.key_digest, None))

    def _check(self, wanted: SpeechRequest) -> None:
        """Raises Problem (400) for what cannot be served together."""
        if "word" in wanted.granularities:
            raise not_served(
                "timestamp_granularities[]: times of words need attention weights, which the engine does not keep; "
                "ask for segments",
                param="timestamp_granularities[]",
            )
        if wanted.granularities and wanted.response_format not in TIMED:
            raise Problem(
                400,
                f"timestamp_granularities[]: response_format={wanted.response_format!r} has no times; use verbose_json",
                param="timestamp_granularities[]",
            )
        if wanted.stream and wanted.response_format not in ("json", "text"):
            raise Problem(
                400,
                f"stream=true: response_format={wanted.response_format!r} is made of the whole text; use json",
                param="stream",
            )
        if wanted.beam_size > 1 and wanted.temperature:
            raise Problem(400, "beam_size: beams do not sample; leave temperature out", param="beam_size")
        if wanted.beam_size > self._limits.sequences:
            raise Problem(
                400, f"beam_size={wanted.beam_size}: at most {self._limits.sequences} are searched", param="beam_size"
            )
        if wanted.chunking_strategy not in (None, "auto"):
            raise not_served(
                "chunking_strategy: windows have the length of the model's input; leave it out",
                param="chunking_strategy",
            )
        if wanted.chunking_strategy == "auto":
            note_unused("chunking_strategy", "windows have the length of the model's input")

    # -- what the work on a file needs --------------------------------------------------------------------------

    async def samples(self, upload: _Upload, speech: Speech) -> Samples:
        """Raises Problem for a file that cannot be read."""
        read = partial(decoded, upload.file.file, speech.rate, self._limits)
        with self._service.place():
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    async def some(self, windows: Iterator[Window]) -> list[Window]:
        """The next windows of a file; none at its end."""
        take = partial(islice, windows, _WINDOWS)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: list(take()))

    @contextmanager
    def holding(self, seconds: float) -> Iterator[None]:
        """For the sound of a file, while it is worked on. Raises QueueFull."""
        if self._seconds and self._seconds + seconds > _FILES_OF_FULL_LENGTH * self._limits.audio_seconds:
            raise self._service.worker.full()
        self._seconds += seconds
        try:
            yield
        finally:
            self._seconds -= seconds

    async def answers(
        self, upload: _Upload, questions: Sequence[Question], ends_at: float | None, *, in_parts: bool
    ) -> AsyncGenerator[dict[int, tuple[list[int], bool]]]:
        """Tokens of questions that have changed, by their place, and whether they are all. in_parts: also before that.
        Raises Problem."""
        options = RequestOptions(adapter=upload.adapter, cache_salt=upload.salt, deadline=self._limits.request_seconds)
        submissions = [
            Submission(
                [],
                replace(
                    options,
                    generation_config=each.generation_config,
                    inputs=each.inputs,
                    logits_processor=each.logits_processor or None,
                ),
            )
            for each in questions
        ]
        worker = self._service.worker
        with self._service.place():
            prepare = partial(worker.prepare, submissions)
            requests = await asyncio.get_running_loop().run_in_executor(self._threads, prepare)
        job = worker.open(requests, finals_only=not in_parts)
        loop = asyncio.get_running_loop()
        limit = None if ends_at is None else loop.call_at(ends_at, job.fail, overdue())
        try:
            while changed := await job.changes():
                for output in changed.values():
                    if output.error is not None:
                        raise Problem(500, f"the request failed: {output.error}", code="generation_failed")
                yield {place: (list(output.outputs[0].token_ids), output.finished) for place, output in changed.items()}
        except EngineStopped as error:
            raise Problem(503, str(error), code="engine_stopped") from error
        finally:
            if limit is not None:
                limit.cancel()
            job.close()


class _Work:
    """On one file, from its bytes to the answer."""

    def __init__(
        self, room: Transcriptions, speech: Speech, upload: _Upload, task: Task, ends_at: float | None, ended: Ended
    ) -> None:
        self._room = room
        self._speech = speech
        self._upload = upload
        self._task = task
        self._ends_at = ends_at
        self._ended = ended

    async def whole(self) -> Response:
        """Raises Problem."""
        wanted, kind = self._upload.wanted, self._upload.wanted.response_format
        async with aclosing(self._heard()) as states:
            heard = [state async for state in states][-1]
        segments = self._segments(heard)
        if kind in MEDIA_TYPES:
            return Response(plain(segments, kind), media_type=MEDIA_TYPES[kind])
        seconds = self._speech.seconds(heard.windows)
        answer: Json = {"text": text_of(segments)}
        if kind == "verbose_json":
            language, temperature = _named(heard.language), wanted.temperature
            answer = verbose(segments, task=self._task, language=language, seconds=seconds, temperature=temperature)
        return Response(to_json({**answer, "usage": _usage(seconds)}), media_type="application/json")

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of OpenAI's streams: what has been added to the text, and at last all of it. Raises Problem before
        the first one."""
        sent = before = text = ""
        try:
            async with aclosing(self._heard()) as states:
                async for heard in states:
                    text = text_of(self._segments(heard))
                    # The end of what is known may change with what follows.
                    sure = _common(before, text).rstrip("\ufffd")
                    before = text
                    if sure.startswith(sent) and len(sure) > len(sent):
                        yield _event("transcript.text.delta", delta=sure[len(sent) :])
                        sent = sure
            if text.startswith(sent) and len(text) > len(sent):
                yield _event("transcript.text.delta", delta=text[len(sent) :])
            yield _event("transcript.text.done", text=text, usage=_usage(self._speech.seconds(heard.windows)))
        except Problem as problem:
            if not sent:
                raise
            yield b"data: %b\n\n" % to_json(problem.body())
        yield b"data: [DONE]\n\n"

    def _segments(self, heard: _Heard) -> list[Segment]:
        has_times = self._upload.wanted.response_format in TIMED
        return self._speech.heard(heard.windows[: len(heard.tokens)], heard.tokens, has_times=has_times)

    async def _heard(self) -> AsyncGenerator[_Heard]:
        """What is known, each time that it is more; without `stream`, at the end. Raises Problem."""
        status, heard = "disconnected", _Heard([], [], self._upload.wanted.language)
        with ExitStack() as held:
            try:
                with refusals():
                    windows = await self._in_time(self._begun(held))
                    while some := await self._in_time(self._room.some(windows)):
                        languages, questions = await self._in_time(self._asked(some))
                        before, heard.language = heard, heard.language or languages[0]
                        async with aclosing(self._answered(questions)) as answers:
                            async for found in answers:
                                heard = replace(before, windows=before.windows + some, tokens=before.tokens + found)
                                if self._upload.wanted.stream:
                                    yield heard
                        # The features of a window are large, and read no more.
                        bare = [replace(window, features=window.features[:, :0, :0]) for window in some]
                        heard = replace(heard, windows=before.windows + bare)
                    yield heard
                status = "ok"
            except Problem as problem:
                status = problem.message
                raise
            finally:
                self._ended(status, sum(map(len, heard.tokens)))

    async def _in_time(self, work: Awaitable[_Result]) -> _Result:
        """Raises Problem (504) when the request has taken too long."""
        try:
            async with asyncio.timeout_at(self._ends_at):
                return await work
        except TimeoutError:
            raise overdue() from None

    async def _begun(self, held: ExitStack) -> Iterator[Window]:
        """The file's windows, which are made when they are asked for. held: is closed when the work has ended."""
        samples = await self._room.samples(self._upload, self._speech)
        held.enter_context(self._room.holding(len(samples) / self._speech.rate))
        return self._speech.each_window(samples)

    async def _asked(self, windows: list[Window]) -> tuple[list[str | None], list[Question]]:
        """The languages of windows, and what the engine is asked."""
        room, speech, upload = self._room, self._speech, self._upload
        languages: list[str | None] = [upload.wanted.language] * len(windows)
        if upload.wanted.language is None and speech.is_multilingual:
            asked = [speech.asks_language(window) for window in windows]
            async with aclosing(room.answers(upload, asked, self._ends_at, in_parts=False)) as answers:
                async for changed in answers:
                    for place, (tokens, _) in changed.items():
                        languages[place] = speech.language(tokens[0])
        questions = [speech.asks_text(window, self._wish(own)) for window, own in zip(windows, languages, strict=True)]
        return languages, questions

    async def _answered(self, questions: list[Question]) -> AsyncGenerator[list[list[int]]]:
        """Tokens of the first windows: of all at last; before, in a stream, with what the next one says so far."""
        in_parts = self._upload.wanted.stream
        found: list[list[int]] = [[] for _ in questions]
        is_whole = [False for _ in questions]
        async with aclosing(self._room.answers(self._upload, questions, self._ends_at, in_parts=in_parts)) as answers:
            async for changed in answers:
                for place, (tokens, is_finished) in changed.items():
                    found[place], is_whole[place] = tokens, is_finished
                if all(is_whole):
                    yield found
                elif in_parts:
                    known = found[: is_whole.index(False) + 1]
                    if known[-1]:
                        yield known

    def _wish(self, language: str | None) -> Wish:
        wanted = self._upload.wanted
        options: dict[str, Any] = {"do_sample": False, "num_beams": wanted.beam_size}
        if wanted.temperature:
            options = {"do_sample": True, "temperature": wanted.temperature, "top_k": 0, "seed": wanted.seed}
        has_times = wanted.response_format in TIMED
        return Wish(task=self._task, language=language, prompt=wanted.prompt, has_times=has_times, options=options)


class _Events(Response):
    """A stream of events, which ends with its client."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, others: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first, self._others = first, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def work() -> None:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._others:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        async with aclosing(self._others):
            await unless_gone(work(), receive)


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: %b\n\n" % to_json({"type": kind, **fields})


def _common(one: str, other: str) -> str:
    """What both begin with."""
    pairs = enumerate(zip(one, other))
    return one[: next((place for place, (own, its) in pairs if own != its), min(len(one), len(other)))]


def _usage(seconds: float) -> Json:
    return {"type": "duration", "seconds": math.ceil(seconds)}


def _named(language: str | None) -> str:
    """The language's name, as OpenAI writes it; the model's own mark for one without a name."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    code = (language or "en").strip("<|>")
    return LANGUAGES.get(code, code)
