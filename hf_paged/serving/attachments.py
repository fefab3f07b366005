"""Images, audio and videos in messages: URLs and data -> pixels and samples.

Files are fetched and decoded before the prompt is made. What each would take in memory is known before it is decoded,
and what the processor makes of it only afterwards. Requests wait for one another, so that all that has been decoded,
and all that processors have made, each stays within a limit, but for what a few processors have just made.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from hf_paged.serving.fetching import CannotFetch, Fetcher
from hf_paged.serving.media_reader import CannotDecode, Kind
from hf_paged.serving.media_readers import MediaReaders
from hf_paged.serving.parts import KINDS, MediaPart
from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.schema import Message
from hf_paged.serving.settings import Settings

_DATA = re.compile(r"data:(image|audio|video)/[a-z0-9.+-]+(;[^;,]*)*;base64,", re.IGNORECASE)
# Pixels or samples beyond which a processor takes long: 2,048 x 2,048, or four minutes of audio at 16 kHz.
_LONG = 2**22
# Processors that have made something for which there may be no room: so much may be beyond the limit.
_TURNS = 2
# Of a pixel in a picture of Pillow, and of a sample in fp32.
_BYTES = 4
_NAMES = {"image": "images", "audio": "recordings", "video": "videos"}

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Attached:
    """The media of a request, in the order of its messages. images: pictures of PIL. videos: uint8 [frames, height,
    width, 3], and transformers' metadata for each. `recordings`: fp32 [num_samples] at `rate`. size: pixels and samples
    of all of them."""

    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    video_metadata: list[Any] = field(default_factory=list)
    recordings: list[Any] = field(default_factory=list)
    rate: int = 0
    size: int = 0

    @property
    def is_long(self) -> bool:
        return self.size > _LONG

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for the model's processor; empty without media."""
        made: dict[str, Any] = {}
        if self.images:
            made["images"] = self.images
        if self.videos:  # their frames have been chosen by the processor's own rule
            made["videos"] = self.videos
            made["videos_kwargs"] = {"video_metadata": self.video_metadata, "do_sample_frames": False}
        if self.recordings:
            made["audio"] = self.recordings
            made["audio_kwargs"] = {"sampling_rate": self.rate}
        return made


NOTHING = Attached()


def parts_of(messages: Sequence[Message]) -> list[tuple[Kind, MediaPart, str]]:
    """List each medium of the messages: its kind, its part, and the message as errors name it."""
    found: list[tuple[Kind, MediaPart, str]] = []
    for number, message in enumerate(messages):
        for part in message.content if isinstance(message.content, list) else ():
            if kind := KINDS.get(type(part)):
                found.append((kind, part, message.place(number)))  # type: ignore[arg-type]  # which has this type
    return found


@dataclass(slots=True)
class _File:
    """url: where it is (empty: it is here). source: its bytes, or their base64. size: what `media_reader.measure` says.
    indices: of a video's frames."""

    kind: Kind
    where: str
    url: str
    source: bytes | str
    size: dict[str, Any] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)

    @property
    def num_pixels(self) -> int:
        frames = {"image": 1, "video": len(self.indices), "audio": 0}[self.kind]
        return frames * int(self.size.get("width", 0)) * int(self.size.get("height", 0))


# Pixels that a file draws for which a moment is not enough: scans of a JPEG may draw all of them again.
_SLOW = 2**25


class Attachments:
    """Reads the media of requests, for one processor (None: the model takes none). Used on the event loop."""

    def __init__(self, settings: Settings, kinds: frozenset[str], processor: Any) -> None:
        self._limits = settings.limits
        self._kinds = kinds
        self._processor = processor
        self._rate = rate_of(processor)
        self._fetcher = Fetcher(settings)
        limits = settings.limits
        others = MediaReaders(limits, limits.decode_seconds)  # which take longer; images do not wait for them
        self._readers = {"image": MediaReaders(limits, limits.image_seconds), "audio": others, "video": others}
        self._decoded_room = _Rooms(limits.media_memory)
        self._made = _Room(settings.limits.media_memory)  # of what processors have made; waits for answers only
        self._turns = {is_long: asyncio.Semaphore(_TURNS) for is_long in (False, True)}

    def close(self) -> None:
        """Blocks until no process is left."""
        self._fetcher.close()
        for each in self._readers.values():
            each.close()

    async def read(self, messages: Sequence[Message], stack: ExitStack, client: Hashable = None) -> Attached:
        """Fetch and decode the media of messages. stack: closing it releases the memory that is counted for them.
        client: takes turns with others. Raises Problem (400) for media that cannot be read, are too many, or that the
        model does not take."""
        parts = parts_of(messages)
        if not parts:
            return NOTHING
        self._check(parts)
        files = [_file(*each) for each in parts]
        try:
            async with self._fetcher.fetched([each.url for each in files if each.url]) as fetched:
                for each in files:
                    each.source = fetched.get(each.url, each.source)
                return await self._decoded(files, stack, client)
        except CannotFetch as error:
            file = next(each for each in files if each.url == error.url)
            raise _wrong(file, f"{_short(file.url)!r}: {error}") from None

    async def _decoded(self, files: list[_File], stack: ExitStack, client: Hashable) -> Attached:
        # Measured first: the memory for all of them is known before one is decoded.
        for each in files:
            each.size, _ = await _result(each, self._readers[each.kind].measure(each.kind, each.source, client))
            if each.kind == "video":
                each.indices = self._chosen(each)
        num_pixels = sum(each.num_pixels for each in files)
        # Before the request waits for room that it may not have.
        if num_pixels > self._limits.media_pixels:
            raise Problem(
                400,
                f"the images and frames of this request have {num_pixels} pixels, and one may have "
                f"{self._limits.media_pixels}; send fewer, or smaller ones",
                param="messages",
            )
        num_samples = sum(int(each.size["seconds"] * self._rate) for each in files if each.kind == "audio")
        size = num_pixels + num_samples
        await self._decoded_room.take(_BYTES * size, stack, is_long=size > _LONG)
        return await self._read(files, size, client)

    def turn(self, attached: Attached) -> AbstractAsyncContextManager[None]:
        """Make others wait from before the request's processor runs until `keep` has returned."""
        return nullcontext() if attached is NOTHING else self._turns[attached.is_long]

    async def keep(self, inputs: Mapping[str, Any], stack: ExitStack) -> None:
        """Count these inputs as the request's memory, in place of the media that `read` returned. Waits until there is
        room for them."""
        # What was decoded goes first: waiting for room while holding some could keep others from theirs for ever.
        stack.close()
        if inputs:
            await self._made.take(2 * sum(each.nbytes for each in inputs.values()), stack)  # the engine copies them

    def _check(self, parts: Sequence[tuple[Kind, MediaPart, str]]) -> None:
        """Raise Problem (400) for media that the model does not take, or for too many."""
        for kind, name in _NAMES.items():
            count, most = sum(each[0] == kind for each in parts), getattr(self._limits, name)
            if count and kind not in self._kinds:
                raise not_served(f"this model takes no {name}; leave them out", param="messages")
            if count > most:
                raise Problem(400, f"{count} {name}, and a request may have {most}; send fewer", param="messages")

    def _chosen(self, file: _File) -> list[int]:
        """The frames that the model's processor takes of a video."""
        chooser = self._processor.video_processor
        indices = list(range(file.size["frames"]))
        if getattr(chooser, "do_sample_frames", True):
            try:
                indices = [int(each) for each in chooser.sample_frames(metadata=_metadata(file))]
            except Exception as error:  # processors refuse in ways of their own
                raise _wrong(file, f"the model's processor refuses this video: {error}") from error
        if not 0 < len(indices) <= self._limits.video_frames:
            raise _wrong(
                file,
                f"the model's processor takes {len(indices)} of its {file.size['frames']} frames, and this server "
                f"{self._limits.video_frames}; send a shorter one",
            )
        # Frames are decoded in order; a processor may have chosen them in another one.
        return sorted(indices)

    async def _read(self, files: Sequence[_File], size: int, client: Hashable) -> Attached:
        made = Attached(rate=self._rate, size=size)
        for file in files:  # one after the other: the files of other requests are decoded in between
            more: dict[str, Any] = {"rate": self._rate} if file.kind == "audio" else {"indices": file.indices}
            is_long = file.kind == "image" and file.num_pixels * int(file.size.get("scans", 1)) > _SLOW
            work = self._readers[file.kind].decode(file.kind, file.source, client, is_long=is_long, **more)
            reply, data = await _result(file, work)
            # The file's bytes are not needed any more, and may be many.
            file.source = b""
            if file.kind == "image":
                from PIL import Image

                size_of = (reply["width"], reply["height"])
                made.images.append(await asyncio.to_thread(Image.frombytes, "RGB", size_of, data))  # copies all of it
            elif file.kind == "audio":
                made.recordings.append(np.frombuffer(data, dtype=np.float32))
            else:
                shape = (len(file.indices), file.size["height"], file.size["width"], 3)
                made.videos.append(np.frombuffer(data, dtype=np.uint8).reshape(shape))
                made.video_metadata.append(_metadata(file))
        return made


def rate_of(processor: Any) -> int:
    """Return the samples a second of the model's audio."""
    own = getattr(processor, "audio_processor", None) or getattr(processor, "feature_extractor", None)
    return int(getattr(own, "sampling_rate", 16_000))


def _metadata(file: _File) -> Any:
    from transformers.video_utils import VideoMetadata

    size = file.size
    return VideoMetadata(
        total_num_frames=size["frames"],
        fps=size["fps"],
        width=size["width"],
        height=size["height"],
        duration=size["frames"] / size["fps"],
        video_backend="pyav",
        frames_indices=file.indices or None,
    )


def _file(kind: Kind, part: MediaPart, where: str) -> _File:
    """Find the file of a part: a URL, or data. Raises Problem (400) for a URL of another kind."""
    url = part.url
    if url[:8].lower().startswith(("http://", "https://")):
        return _File(kind, where, url, b"")
    if (head := _DATA.match(url[:256])) is None or head[1].lower() != kind:
        file = _File(kind, where, "", b"")
        # Shortened, because a data URL may have megabytes.
        raise _wrong(file, f"url is {_short(url)!r}; write data:{kind}/...;base64,...")
    return _File(kind, where, "", url[head.end() :])


async def _result(file: _File, work: Future[_Result]) -> _Result:
    """Wait for a result. Raises Problem (400) where the work raises CannotDecode."""
    try:
        return await asyncio.wrap_future(work)
    except CannotDecode as error:
        raise _wrong(file, str(error)) from None


def _wrong(file: _File, text: str) -> Problem:
    return Problem(400, f"{file.where}: {text}", param=file.where.partition("[")[0], code=f"invalid_{file.kind}")


def _short(url: str) -> str:
    return url[:40] + ("..." if len(url) > 40 else "")


class _Room:
    """Counts bytes. A request waits until there is room for its own; one that is larger than all of it runs alone.
    Who came first gets room first, so that small ones do not pass a large one for ever."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int, stack: ExitStack) -> None:
        """Wait for room for `count` bytes, and reserve it until the stack is closed."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # those behind it
            else:  # it has got its room, and will not use it
                self._give(count)
            raise
        stack.callback(self._give, count)

    def _give(self, count: int) -> None:
        self._used -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.done():  # else its request is gone
                if self._used and self._used + count > self.most:
                    return
                self._used += count
                turn.set_result(None)
            self._waiting.popleft()


class _Rooms:
    """Room for what is decoded: a quarter for short requests, the rest for long ones, which hold theirs while they are
    decoded. A long one that needs more takes it from the short ones, so that all together stay within the limit."""

    def __init__(self, most: int) -> None:
        self.short, self.long = _Room(most // 4), _Room(most - most // 4)

    async def take(self, count: int, stack: ExitStack, *, is_long: bool) -> None:
        await (self.long if is_long else self.short).take(count, stack)
        if is_long and (rest := count - self.long.most) > 0:
            await self.short.take(rest, stack)
