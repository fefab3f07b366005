"""The program of a process that decodes clients' files: images -> RGB, audio -> samples, videos -> frames.

`media_readers` starts it and talks to it: a line of JSON and bytes each way, by standard input and output. It may use
so much memory and time, ends when its input does, and imports neither torch nor transformers.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Literal

from hf_paged.serving.audio import claims, decoded
from hf_paged.serving.problems import Problem
from hf_paged.serving.settings import Limits

Kind = Literal["image", "video", "audio"]
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_CONTAINERS = {b"ftyp": "mov", b"\x1aE\xdf\xa3": "matroska"}  # others may name files and addresses to read
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")
# Of a video. An hour at 60 frames a second has 216,000; counting more would take long.
_MAX_PACKETS = 2**20
_SCAN, _MAX_SCANS = b"\xff\xda", 100  # of a JPEG: each may draw all of its pixels again
# Of the sides: many processors enlarge an image until its shorter side has a certain length.
_MAX_RATIO = 200


class CannotDecode(Exception):
    """The message is for the client. code: for programs."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def measure(kind: Kind, data: bytes, limits: Limits) -> dict[str, Any]:
    """Measure an image (`width`, `height`; `scans` of a JPEG that draws its pixels several times), audio (`seconds`,
    and `samples` of all channels) or a video (`width`, `height`, `frames`, `fps`) without decoding it. Raises
    CannotDecode for other files, and for more than the limits allow."""
    with _errors(kind):
        if kind == "image":
            with _opened(data, limits) as picture:
                scans = data.count(_SCAN) if picture.format == "JPEG" else 1
                return {"width": picture.width, "height": picture.height} | ({"scans": scans} if scans > 1 else {})
        if kind == "audio":
            seconds, samples = claims(io.BytesIO(data), limits)
            return {"seconds": seconds, "samples": samples}
        with _video(data, limits) as (container, stream):
            # Packets are counted, not what the header says: that is what will have to be decoded.
            count = 0
            for packet in container.demux(stream):
                count += bool(packet.size)
                if count > _MAX_PACKETS:
                    raise CannotDecode(f"it has more than {_MAX_PACKETS} frames")
            if not count:
                raise CannotDecode("it has no frames")
            rate = stream.average_rate or stream.guessed_rate
            return {"width": stream.width, "height": stream.height, "frames": count, "fps": float(rate or 24)}


def read_image(data: bytes, limits: Limits) -> Any:
    """The picture, in RGB; of an animation the first one. Raises CannotDecode as `measure` does."""
    from PIL import ImageOps

    with _errors("image"), _opened(data, limits) as picture:
        if picture.mode.startswith("I"):  # Pillow would take all above 255 for white
            picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
        return ImageOps.exif_transpose(picture).convert("RGB")


def read_audio(data: bytes, rate: int, limits: Limits) -> Any:
    """fp32 [num_samples] at `rate` a second. Raises CannotDecode as `measure` does."""
    with _errors("audio"):
        return decoded(io.BytesIO(data), rate, limits)


def read_frames(data: bytes, indices: Sequence[int], limits: Limits) -> list[Any]:
    """Decode the frames of a video at ascending indices: uint8 [height, width, 3]. Raises CannotDecode as `measure`."""
    frames: list[Any] = []
    with _errors("video"), _video(data, limits) as (container, stream):
        size = (stream.width, stream.height)
        # From the beginning, because a frame depends on those before it.
        for index, frame in enumerate(container.decode(stream)):
            if (frame.width, frame.height) != size:
                raise CannotDecode(f"its frames have several sizes: {size} and {(frame.width, frame.height)}")
            while len(frames) < len(indices) and indices[len(frames)] == index:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == len(indices):
                return frames
    raise CannotDecode(f"frame {indices[len(frames)]} is missing")


@contextmanager
def _errors(kind: Kind) -> Iterator[None]:
    """Turn errors of the libraries into CannotDecode: a client's file may lead to any."""
    try:
        yield
    except CannotDecode:
        raise
    except Problem as problem:
        raise CannotDecode(problem.message.removeprefix("file: "), problem.code) from None
    except ImportError as error:
        raise CannotDecode(f"the server has not installed {error.name}, which reads it") from None
    except MemoryError:
        raise CannotDecode("reading it takes more memory than the server allows") from None
    except Exception as error:
        raise CannotDecode(f"the {kind} cannot be read: {str(error)[:200] or type(error).__name__}") from None


@contextmanager
def _opened(data: bytes, limits: Limits) -> Iterator[Any]:
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about sizes, which are checked here
        try:
            picture = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            raise CannotDecode(f"the data is no image in {', '.join(FORMATS)}") from None
        with picture:
            # Opening reads the header only; pixels come into memory later.
            _check_size(picture.width, picture.height, limits)
            if picture.format == "JPEG" and (count := data.count(_SCAN)) > _MAX_SCANS:
                raise CannotDecode(f"it is drawn in {count} scans, and {_MAX_SCANS} are read; save it anew")
            yield picture


@contextmanager
def _video(data: bytes, limits: Limits) -> Iterator[tuple[Any, Any]]:
    import av

    container = next((name for mark, name in _CONTAINERS.items() if mark in (data[:4], data[4:8])), None)
    if container is None:
        raise CannotDecode(f"it begins with {data[:8]!r}; MP4, MOV, Matroska and WebM are read")
    with av.open(io.BytesIO(data), format=container, options={"protocol_whitelist": ""}) as opened:
        if not opened.streams.video:
            raise CannotDecode("it has no pictures")
        stream = opened.streams.video[0]
        name = stream.codec_context.name if stream.codec_context is not None else "an unknown one"
        if name not in _CODECS:
            raise CannotDecode(f"its codec is {name}; {', '.join(_CODECS)} are read")
        # One: more would take the server's cores, and use up the job's processor time sooner.
        stream.thread_count = 1
        _check_size(stream.width, stream.height, limits)
        yield opened, stream


def _check_size(width: int, height: int, limits: Limits) -> None:
    if not 0 < width * height <= limits.image_pixels:
        most = limits.image_pixels
        raise CannotDecode(f"it has {width} x {height} pixels, and this server takes {most}; scale it down")
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise CannotDecode(f"it has {width} x {height} pixels: one side may be {_MAX_RATIO} times the other; cut it")


# -- the process -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Answers jobs until the input ends. argv: bytes of memory, seconds of processor time for a job."""
    memory, seconds = map(int, sys.argv[1:])
    for each in (signal.SIGINT, signal.SIGTERM):  # those of a terminal are for the server
        signal.signal(each, signal.SIG_IGN)
    # Copies of both, before libraries can write to them.
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # what libraries print is no answer
        os.dup2(nowhere, number)
    allow = _bounded(memory)
    while line := jobs.readline():
        # Anew for each job, because the limit is of the whole process.
        allow(seconds)
        job = json.loads(line)
        data = _read(jobs, job["bytes"])
        _end_after(job.get("moment", 0.0))
        try:
            reply, parts = _done(job, data)
        except CannotDecode as error:
            reply, parts = {"error": str(error), "code": error.code}, []
        except MemoryError:
            reply, parts = {"error": "reading it takes more memory than the server allows"}, []
        _end_after(0.0)
        answers.write(json.dumps({**reply, "bytes": sum(part.nbytes for part in parts)}).encode() + b"\n")
        for part in parts:
            answers.write(part)
        answers.flush()
        # Before the next job is awaited: it may be long until it comes.
        del data, parts


def _read(jobs: BinaryIO, count: int) -> bytes:
    data = jobs.read(count)
    if len(data) < count:  # the server has ended
        sys.exit()
    return data


def _done(job: dict[str, Any], data: bytes) -> tuple[dict[str, Any], list[memoryview]]:
    """Do a job; returns the answer and the bytes that follow it."""
    kind, limits = job["kind"], Limits(**job["limits"])
    if job["what"] == "measure":
        return measure(kind, data, limits), []
    if kind == "image":
        picture = read_image(data, limits)
        return {"width": picture.width, "height": picture.height}, [memoryview(picture.tobytes())]
    if kind == "audio":
        return {}, [memoryview(read_audio(data, job["rate"], limits)).cast("B")]
    frames = read_frames(data, job["indices"], limits)
    return {}, [memoryview(frame).cast("B") for frame in frames]


def _end_after(seconds: float) -> None:
    """End the process by SIGPROF after so many seconds of processor time. 0: do not."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _bounded(memory: int) -> Callable[[int], None]:
    """Limit this process. Returns a function that gives the next job so many seconds of processor time."""
    try:
        import resource
    except ImportError:  # not on this system: what is left is the server's clock
        return lambda seconds: None
    for name, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with suppress(ValueError, OSError):  # a lower one holds already, or the system has none
            resource.setrlimit(name, (most, most))

    def allow(seconds: int) -> None:
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + seconds, hard))

    return allow


if __name__ == "__main__":
    main()
