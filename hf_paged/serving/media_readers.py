"""Processes that decode images, audio and videos, with limits of memory and time: see `media_reader`, which they run.

None is started before the first file. One that dies, or takes too long, is replaced, and its request gets an error.
Clients take turns, and each file is tried for a moment first: what needs longer begins again in a lane of its own, so
that files which end fast, the many, wait for no slow ones.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

import hf_paged
from hf_paged.serving.media_reader import CannotDecode, Kind
from hf_paged.serving.settings import Limits
from hf_paged.serving.turns import Turns

# Seconds of processor time in which a photo, or a minute of audio, is read.
_MOMENT = 0.5
# Of the time for a job: a process that computes all the time ends by itself before it is killed.
_CPU_SHARE = 0.75
# An answer is a few numbers, or an error of some hundred characters.
_MAX_LINE = 2**16
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "SYSTEMROOT")  # no keys


class Reading(Future[tuple[dict[str, Any], bytearray]]):
    """The future result of reading a file. `cancel` also kills the process that works for it, if there is one."""

    def __init__(
        self, source: bytes | str, job: dict[str, Any], client: Hashable, run: Callable[[Reading], None]
    ) -> None:
        super().__init__()
        self.source, self.job, self.client = source, job, client
        self._run = run
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._is_given_up = False

    def run(self) -> None:
        if not (self.running() or self.set_running_or_notify_cancel()):
            return
        if self._is_given_up:  # while it waited for the slow lane
            self.set_exception(CannotDecode("nobody waits for it"))
        else:
            self._run(self)

    def cancel(self) -> bool:
        # Even if it cannot be cancelled any more, the process that works for nobody ends.
        is_done = super().cancel()
        with self._lock:
            self._is_given_up = True
            if self._process is not None:
                self._process.kill()
        return is_done

    def abandon(self) -> None:
        """End a reading that will not be run, with an error."""
        if not super().cancel():
            self.set_exception(CannotDecode("the server is stopping"))

    @contextmanager
    def by(self, process: Popen[bytes]) -> Iterator[None]:
        """Within the block, let `cancel` end this process, which works for the reading."""
        with self._lock:
            self._process = process
            if self._is_given_up:
                process.kill()
        try:
            yield
        finally:
            with self._lock:
                self._process = None


class _TooSlow(Exception):
    """A file was not read within `_MOMENT`, so it belongs into the slow lane."""


class MediaReaders:
    """Reads files in processes, in a fast and a slow lane. Used from any thread."""

    def __init__(self, limits: Limits, seconds: float) -> None:
        """seconds: for a file, until its process is killed."""
        self._limits = limits
        self._seconds = seconds
        names = ("audio_seconds", "audio_decode_seconds", "image_pixels")
        self._shown = {name: value for name, value in asdict(limits).items() if name in names}
        self._fast = Turns(limits.readers, "hf-paged-media")
        self._slow = Turns(limits.readers, "hf-paged-media-slow")
        self._idle: list[Popen[bytes]] = []
        self._busy: set[Popen[bytes]] = set()
        self._is_closed = False

    def measure(self, kind: Kind, source: bytes | str, client: Hashable = None) -> Reading:
        """See `media_reader.measure`; no bytes come with it. source: the file; a str is base64. client: takes turns
        with others."""
        return self._begun(self._fast, source, {"what": "measure", "kind": kind}, client)

    def decode(
        self, kind: Kind, source: bytes | str, client: Hashable = None, *, is_long: bool = False, **more: Any
    ) -> Reading:
        """An image's `width` and `height` and its pixels in RGB; audio samples (fp32), for which `more` has `rate`;
        the frames (RGB) of a video at the `indices` in `more`. is_long: it will take more than a moment. Raises
        CannotDecode."""
        return self._begun(
            self._slow if is_long else self._fast, source, {"what": "decode", "kind": kind, **more}, client
        )

    def close(self) -> None:
        """End the processes, and with them what is being decoded."""
        # First, so that no thread starts another process.
        self._is_closed = True
        for each in [*self._idle, *self._busy]:
            with suppress(OSError):
                each.kill()
        self._fast.close()
        self._slow.close()
        for each in self._idle:
            _end(each)

    def _begun(self, lane: Turns, source: bytes | str, job: dict[str, Any], client: Hashable) -> Reading:
        reading = Reading(source, job, client, self._try if lane is self._fast else self._read)
        lane.add(client, reading)
        return reading

    def _try(self, reading: Reading) -> None:
        """Read a file in the fast lane; after `_MOMENT`, move it to the slow lane."""
        try:
            reading.set_result(self._ask(reading, moment=_MOMENT))
        # It begins again there: nothing of a process that was ended can be kept.
        except _TooSlow:
            reading._run = self._read
            self._slow.add(reading.client, reading)
        except BaseException as error:
            reading.set_exception(error)

    def _read(self, reading: Reading) -> None:
        try:
            reading.set_result(self._ask(reading))
        except BaseException as error:
            reading.set_exception(error)

    def _ask(self, reading: Reading, moment: float = 0.0) -> tuple[dict[str, Any], bytearray]:
        """moment: seconds of processor time until it raises _TooSlow; 0: no such limit."""
        source = reading.source
        data = source if isinstance(source, bytes) else _from_base64(source)
        process = self._taken()
        seconds = self._seconds
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        # By the clock, because a process that waits uses no processor time.
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        is_sound = False
        try:
            with reading.by(process):
                job = {**reading.job, "limits": self._shown, "moment": moment}
                reply = _exchange(process, job, data, self._limits.media_memory)
            is_sound = True
        except (OSError, ValueError):  # it has ended, or says something else
            if late.is_set():
                raise CannotDecode(f"it was not read within {seconds:g} seconds") from None
            if moment and _has_used_up(process):
                raise _TooSlow from None
            raise CannotDecode("reading it took too much memory or time, or made the decoder fail") from None
        finally:
            timer.cancel()
            # The timer may be about to kill the process, which must not be given to another file.
            timer.join()
            self._busy.discard(process)
            # A process is used again only if it has answered, in time, and still runs.
            if is_sound and not late.is_set() and not self._is_closed and process.poll() is None:
                self._idle.append(process)
            else:
                _end(process)
        if "error" in reply[0]:
            raise CannotDecode(str(reply[0]["error"]), reply[0].get("code"))
        return reply

    def _taken(self) -> Popen[bytes]:
        process: Popen[bytes] | None = None
        with suppress(IndexError):  # another thread may take the last one
            while (process := self._idle.pop()).poll() is not None:
                _end(process)
        if process is None or process.poll() is not None:
            process = self._started()
        self._busy.add(process)
        # `close` may have looked at the processes just before.
        if self._is_closed:
            process.kill()
        return process

    def _started(self) -> Popen[bytes]:
        seconds = max(1, int(_CPU_SHARE * self._seconds))
        folders = [str(Path(hf_paged.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        # An environment of its own: no keys, and one thread for numpy.
        return Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "hf_paged.serving.media_reader",
                str(self._limits.reader_memory),
                str(seconds),
            ],
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env={**kept, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )


def _exchange(
    process: Popen[bytes], job: Mapping[str, Any], data: bytes, most: int
) -> tuple[dict[str, Any], bytearray]:
    """The answer to a job, and at most `most` bytes that follow it. Raises OSError or ValueError if the process ends,
    or answers otherwise than `media_reader` does."""
    jobs, answers = _pipes(process)
    # All of it before the answer is read: the process reads the file first.
    jobs.write(json.dumps({**job, "bytes": len(data)}).encode() + b"\n")
    jobs.write(data)
    jobs.flush()
    reply = json.loads(answers.readline(_MAX_LINE))
    if not (isinstance(reply, dict) and isinstance(reply.get("bytes"), int) and 0 <= reply["bytes"] <= most):
        raise ValueError(f"{str(reply)[:100]} is no answer of a decoder")
    payload = bytearray(reply.pop("bytes"))
    if answers.readinto(payload) != len(payload):
        raise ValueError("the decoder has ended")
    return reply, payload


def _pipes(process: Popen[bytes]) -> tuple[Any, Any]:
    """Return the process's input and output."""
    return process.stdin, process.stdout


def _has_used_up(process: Popen[bytes]) -> bool:
    """Return True if SIGPROF has ended the process: it used up the processor time of its job."""
    with suppress(TimeoutExpired):
        return process.wait(1.0) == -signal.SIGPROF
    return False


def _end(process: Popen[bytes]) -> None:
    process.kill()
    for pipe in _pipes(process):
        with suppress(OSError):
            pipe.close()
    process.wait()


_SPACE = re.compile(r"[\t\n\f\r ]+")


def _from_base64(text: str) -> bytes:
    try:
        text = _SPACE.sub("", text)  # as browsers do: `base64` and MIME write lines, and padding may be missing
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise CannotDecode(f"the data is not base64: {error}") from None
