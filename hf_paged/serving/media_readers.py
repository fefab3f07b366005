"""Processes that decode images, sound and videos, with limits of memory and time: see `media_reader`, which they run.

None is started before the first file. One that dies, or takes too long, is replaced, and its request gets an error.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import hf_paged
from hf_paged.serving.media_reader import CannotDecode, Kind
from hf_paged.serving.settings import Limits

_CPU_SHARE = 0.75  # of the time for a job: a process that computes all the time ends by itself before it is killed
_MAX_LINE = 2**16
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "SYSTEMROOT")  # no keys


class MediaReaders:
    """Used from any thread."""

    def __init__(self, limits: Limits, seconds: float) -> None:
        """seconds: for a file, until its process is killed."""
        self._limits = limits
        self._seconds = seconds
        names = ("audio_seconds", "audio_decode_seconds", "image_pixels")
        self._shown = {name: value for name, value in asdict(limits).items() if name in names}
        self._threads = ThreadPoolExecutor(limits.readers, "hf-paged-media")
        self._idle: list[Popen[bytes]] = []
        self._busy: set[Popen[bytes]] = set()
        self._is_closed = False

    def measure(self, kind: Kind, source: bytes | str) -> Future[dict[str, Any]]:
        """See `media_reader.measure`. source: the file; a str is base64."""
        return self._threads.submit(lambda: self._ask(source, what="measure", kind=kind)[0])

    def decode(self, kind: Kind, source: bytes | str, **more: Any) -> Future[tuple[dict[str, Any], bytearray]]:
        """An image's `width` and `height` and its pixels in RGB; a sound's samples (fp32), for which `more` has `rate`;
        the frames (RGB) of a video at the `indices` in `more`. Raises CannotDecode."""
        return self._threads.submit(self._ask, source, what="decode", kind=kind, **more)

    def close(self) -> None:
        """End the processes, and with them what is being decoded."""
        self._is_closed = True
        for each in [*self._idle, *self._busy]:
            with suppress(OSError):
                each.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for each in self._idle:
            _end(each)

    def _ask(self, source: bytes | str, **job: Any) -> tuple[dict[str, Any], bytearray]:
        data = source if isinstance(source, bytes) else _from_base64(source)
        process = self._taken()
        seconds = self._seconds
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        is_sound = False
        try:
            reply = _exchange(process, {**job, "limits": self._shown}, data, self._limits.media_memory)
            is_sound = True
        except (OSError, ValueError):  # it has ended, or says something else
            if late.is_set():
                raise CannotDecode(f"it was not read within {seconds:g} seconds") from None
            raise CannotDecode("reading it took too much memory or time, or made the decoder fail") from None
        finally:
            timer.cancel()
            timer.join()
            self._busy.discard(process)
            if is_sound and not late.is_set() and not self._is_closed:
                self._idle.append(process)
            else:
                _end(process)
        if "error" in reply[0]:
            raise CannotDecode(str(reply[0]["error"]))
        return reply

    def _taken(self) -> Popen[bytes]:
        process: Popen[bytes] | None = None
        with suppress(IndexError):  # another thread may take the last one
            while (process := self._idle.pop()).poll() is not None:
                _end(process)
        if process is None or process.poll() is not None:
            process = self._started()
        self._busy.add(process)
        if self._is_closed:
            process.kill()
        return process

    def _started(self) -> Popen[bytes]:
        seconds = max(1, int(_CPU_SHARE * self._seconds))
        folders = [str(Path(hf_paged.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
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
    """Its input and its output."""
    return process.stdin, process.stdout


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
