"""Transcriptions: from the body of a request to the engine's requests for the windows of its file.

Files are decoded in processes (`media_readers`), and windows made in a thread. A few windows of a file are with the
engine at a time: they share steps with each other and with all other requests, and no long file keeps others waiting
behind all of its windows.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from transformers import GenerationConfig

from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.serving.answers import Opened, refusals
from hf_paged.serving.audio import Samples, check_installed
from hf_paged.serving.audio_request import AudioRequest, read_form
from hf_paged.serving.choices import check_output
from hf_paged.serving.media_reader import CannotDecode
from hf_paged.serving.media_readers import MediaReaders, Reading
from hf_paged.serving.middleware import client_of
from hf_paged.serving.problems import Problem
from hf_paged.serving.recipe import Recipe, client_named, salt_of
from hf_paged.serving.sampling_options import Submission
from hf_paged.serving.served import ServedModel
from hf_paged.serving.speech import Question, Speech, Stride, Task, Window, Wish
from hf_paged.serving.transcripts import Transcript, TranscriptForm
from hf_paged.serving.worker import EngineWorker, Job, Outputs

_Result = TypeVar("_Result")
# Enough to fill steps, and few enough that a long file does not keep others waiting behind all of its windows.
_WINDOWS = 16  # of a file, that the engine has at a time
_LONG = 2**23  # samples of all channels, which take more than a moment to decode
# At 16,000 samples a second in fp32, four hours take 0.9 GB.
_FILES = 4  # of the greatest length, whose samples are in memory


class Transcriber:
    """Used on the event loop, but for what it does in its threads.

    place: a context in which a request is prepared, so that no more of them wait than may run; raises QueueFull.
    """

    def __init__(
        self,
        speech: Speech,
        served: ServedModel,
        worker: EngineWorker,
        place: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._speech = speech
        self._served = served
        self._worker = worker
        self._place = place
        self._thread = ThreadPoolExecutor(1, "hf-paged-audio")
        limits = served.settings.limits
        self._readers = MediaReaders(limits, limits.audio_decode_seconds)
        self._seconds = 0  # of audio in memory

    def close(self) -> None:
        """Wait for the thread; end the processes."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._readers.close()

    async def open(self, request: Request, body: bytes, task: Task) -> Opened:
        """Reads the request and its file. Raises Problem, and QueueFull."""
        check_installed()
        with ExitStack() as stack:
            stack.enter_context(self._place())
            content_type = request.headers.get("content-type", "")
            asked, file = await _in(self._thread, partial(read_form, content_type, body))
            client = client_of(request)
            # The header first: it says how many seconds will come into memory.
            size, _ = await _read(self._readers.measure("audio", file, client))
            seconds = ceil(size["seconds"])
            name, adapter = self._served.adapter_of(asked.model)
            wish = self._wish(asked, task)
            await _in(self._thread, partial(self._speech.check, wish))
            # Counted before they are decoded, so that too many seconds never come into memory.
            self._take(seconds)
            stack.callback(self._take, -seconds)
            rate, is_long = self._speech.rate, size["samples"] > _LONG
            _, data = await _read(self._readers.decode("audio", file, client, rate=rate, is_long=is_long))
            samples = np.frombuffer(data, dtype=np.float32)
            held = stack.pop_all()  # until the answer ends
        options = RequestOptions(
            adapter=adapter,
            cache_salt=salt_of(request.state.key_digest, None),
            client=client_named(self._served.settings, request.state.key_digest, None),
            deadline=self._served.settings.limits.request_seconds,
        )
        job = WindowsJob(
            self._speech,
            samples,
            wish,
            partial(self._ask, options),
            partial(_in, self._thread),
            reads_once=not (asked.stream and asked.beam_size == 1),
            on_close=held.close,
        )
        recipe = Recipe(model=name, prompts=[], submissions=[], stream=asked.stream, has_sound=True)
        transcript = Transcript(
            self._speech,
            self._served.tokenizer,
            job.strides,
            job.languages,
            job.num_windows,
            has_times=asked.has_times,
            streams=asked.stream,
        )
        form = TranscriptForm(transcript, asked.response_format, task, asked.temperature, asked.language, job.languages)
        return Opened(recipe, job, transcript, form)

    def _take(self, seconds: int) -> None:
        """Count audio that comes into memory, or, below 0, leaves it. Raises Problem (429) for too much at a time."""
        most = _FILES * self._served.settings.limits.audio_seconds
        # A single window is short, and waits for no long file.
        if seconds > self._speech.window_seconds and self._seconds + seconds > most:
            text = f"files of {self._seconds} seconds of audio are being transcribed; send this one later"
            raise Problem(429, text, code="queue_full", headers={"retry-after": "1"})
        self._seconds += seconds

    def _wish(self, asked: AudioRequest, task: Task) -> Wish:
        limit = self._served.settings.limits.sequences
        if asked.beam_size > limit:
            raise Problem(400, f"beam_size={asked.beam_size}: at most {limit} beams are searched", param="beam_size")
        options: dict[str, Any] = {"num_beams": asked.beam_size, "do_sample": asked.temperature > 0}
        if asked.temperature > 0:
            options |= {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        return Wish(
            task=task,
            language=asked.language,
            prompt=asked.prompt,
            has_times=asked.has_times,
            options=options,
            seed=asked.seed,
        )

    async def _ask(self, options: RequestOptions, question: Question, finals_only: bool) -> Job:
        """Queue the question. Raises Problem."""
        config: GenerationConfig = question.generation_config
        filled = replace(
            options,
            generation_config=config,
            inputs=question.inputs,
            logits_processor=question.logits_processor or None,
        )
        with refusals():
            requests = await _in(self._thread, partial(self._worker.prepare, [Submission([], filled)]))
            return self._worker.open(requests, finals_only=finals_only, is_more=True)


async def _read(reading: Reading) -> tuple[dict[str, Any], bytearray]:
    """Wait for the result of reading a file; cancelling the request ends its process. Raises Problem (400)."""
    try:
        return await asyncio.wrap_future(reading)
    except CannotDecode as error:
        raise Problem(400, f"file: {error}", param="file", code=error.code or "invalid_audio") from None


async def _in(thread: ThreadPoolExecutor, what: Callable[[], _Result]) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(thread, what)


class WindowsJob(Outputs):
    """The engine's requests for the windows of one file: a window's place among them stands for its text. A window
    whose language is not known is asked for it first. Its reader may get a Problem too.

    ask: queues a question. in_thread: calls something in a thread. reads_once: the reader is woken by finished outputs
    only. on_close: called once, also if this is forgotten.
    """

    def __init__(
        self,
        speech: Speech,
        samples: Samples,
        wish: Wish,
        ask: Callable[[Question, bool], Any],
        in_thread: Callable[[Callable[[], Any]], Any],
        *,
        reads_once: bool,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__()
        self._speech = speech
        self._wish = wish
        self._ask = ask
        self._in_thread = in_thread
        self._reads_once = reads_once
        # By a finalizer, because a job that nobody reads is never closed.
        self._give_back = weakref.finalize(self, on_close)
        self._windows = speech.windows(samples)
        self.num_windows = speech.count(len(samples))
        self.strides: dict[int, Stride] = {}
        """By place; of all windows when all have been answered."""
        self.languages: dict[int, str] = {}
        """By place, where the model was asked for them."""
        self._num_unfinished = self.num_windows
        self._free = asyncio.Semaphore(_WINDOWS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: set[Job] = set()

    async def changes(self) -> dict[int, RequestOutput]:
        # Begun by the first reader, so that a refused request makes no windows.
        if not self._tasks and self._num_unfinished and self._error is None:
            self._begin(self._all())
        return await super().changes()

    @property
    def is_finished(self) -> bool:
        return not self._num_unfinished

    def close(self) -> None:
        for job in self._jobs:
            job.close()
        for task in self._tasks:
            task.cancel()
        self._give_back()

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self.fail(error)

    async def _all(self) -> None:
        for place in range(self.num_windows):
            # Before the window is made: its features take memory.
            await self._free.acquire()
            self._begin(self._one(place, await self._in_thread(partial(next, self._windows))))

    async def _one(self, place: int, window: Window) -> None:
        self.strides[place] = window.stride
        language = self._wish.language
        if language is None and self._speech.is_multilingual:
            question = await self._in_thread(partial(self._speech.asks_language, window))
            (output,) = [output async for output in self._outputs(question, finals_only=True)]
            language = self.languages[place] = self._speech.language(output.outputs[0].token_ids[0])
        question = await self._in_thread(
            partial(self._speech.asks_text, window, replace(self._wish, language=language))
        )
        async for output in self._outputs(question, finals_only=self._reads_once):
            # Before the output is put, whose reader asks whether it is the last one.
            self._num_unfinished -= output.finished
            self.put(place, output)
        self._free.release()

    async def _outputs(self, question: Question, *, finals_only: bool) -> Any:
        """Yield the outputs of a question as they come. Raises Problem if it fails."""
        job = await self._ask(question, finals_only)
        self._jobs.add(job)
        try:
            while changed := await job.changes():
                check_output(changed[0])
                yield changed[0]
        finally:
            job.close()
            self._jobs.discard(job)
