"""Processes that decode media: limits of memory and time, processes that die, and who waits for whom."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import ExitStack, closing
from typing import Any

import openai
import pytest
from PIL import Image

from hf_paged.serving import media_readers
from hf_paged.serving.attachments import _Room, _Rooms
from hf_paged.serving.media_reader import CannotDecode
from hf_paged.serving.media_readers import MediaReaders
from hf_paged.serving.settings import Limits
from hf_paged.serving.turns import Turns
from tests.forwards import before_forwards
from tests.serving.harness import NAME, Running, serving
from tests.serving.seeing import expected, messages, model, picture, png, processor, tokenizer, url
from tests.versions.marks import needs_media
from tests.waiting import must, until

SLOW = "import sys, time; sys.stdin.buffer.readline(); time.sleep(600)"
DEAD = "import os; os._exit(3)"
LIAR = "import sys; print('{\"bytes\": 99999999999}', flush=True); sys.stdin.read()"
TALKER = "import sys; print('hello', flush=True); sys.stdin.read()"


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that are started from here on."""
    found: list[Any] = []
    own = media_readers.Popen

    def start(*args: Any, **options: Any) -> Any:
        found.append(own(*args, **options))
        return found[-1]

    monkeypatch.setattr(media_readers, "Popen", start)
    return found


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """MediaReaders that are started from here on run this program ("": their own)."""
    own = media_readers.Popen

    def use(program: str) -> None:
        def start(command: list[str], **options: Any) -> Any:
            return own([command[0], "-c", program] if program else command, **options)

        monkeypatch.setattr(media_readers, "Popen", start)

    return use


@needs_media
def test_none_is_started_for_texts(started: list[Any]) -> None:
    with serving(model=model(), made_tokenizer=tokenizer(), processor=processor()) as server:
        question = [{"role": "user", "content": "Hello?"}]
        server.client.chat.completions.create(model=NAME, messages=question, max_tokens=4)
        assert not started
        ask(server, url(picture()))
        assert len(started) == 1
        pids = [each.pid for each in started]
        assert all(map(is_there, pids))
    assert not any(map(is_there, pids))


def ask(server: Running, *urls: str, new: int = 12) -> Any:
    return server.client.chat.completions.create(model=NAME, temperature=0, max_tokens=new, messages=messages(*urls))


def size_of(made: MediaReaders, data: bytes) -> Any:
    return made.measure("image", data).result(120)[0]


def test_a_process_is_used_again(started: list[Any]) -> None:
    with closing(MediaReaders(Limits(readers=2), 60.0)) as made:
        asked = [made.measure("image", picture(shade)) for shade in range(9)]
        assert all(each.result(120)[0] == {"width": 40, "height": 30} for each in asked)
        assert len(started) <= 2
        reply, pixels = made.decode("image", picture()).result(120)
        assert len(pixels) == 3 * reply["width"] * reply["height"] == 3600
        with pytest.raises(CannotDecode, match="no image"):
            size_of(made, b"hello")
        assert len(started) <= 2


def test_what_goes_wrong_is_an_error_of_one_file(running: Callable[[str], None]) -> None:
    for program in (SLOW, DEAD, LIAR, TALKER):
        is_slow = program == SLOW
        with closing(MediaReaders(Limits(), 0.5 if is_slow else 60.0)) as made:
            running(program)
            with pytest.raises(CannotDecode, match="not read within 0.5 seconds" if is_slow else "too much"):
                size_of(made, picture())
    with closing(MediaReaders(Limits(), 60.0)) as made:
        running("")
        assert size_of(made, picture())


def test_a_process_that_was_killed(started: list[Any]) -> None:
    with closing(MediaReaders(Limits(), 60.0)) as made:
        size_of(made, picture())
        started[0].send_signal(signal.SIGKILL)
        started[0].wait()
        assert size_of(made, picture()) and len(started) == 2


@pytest.mark.slow
def test_processor_time(started: list[Any]) -> None:
    """A decoder that computes for too long ends by itself: after a second, whatever the clock says."""
    busy = "import hf_paged.serving.media_reader as d; d._done = lambda *_: [0 for _ in iter(int, 1)]; d.main()"
    own = media_readers.Popen
    with closing(MediaReaders(Limits(), 240.0)) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            media_readers,
            "Popen",
            lambda command, **options: own([*command[:2], "-c", busy, command[4], "1"], **options),
        )
        with pytest.raises(CannotDecode):
            size_of(made, picture())
    assert started[0].returncode == -signal.SIGPROF, "it has had its moment"
    assert started[1].returncode in (-signal.SIGXCPU, -signal.SIGKILL)


def endless_scans(count: int) -> bytes:
    """A small JPEG of 16 megapixels that draws its last scan again and again."""
    file = io.BytesIO()
    Image.new("RGB", (4096, 4096), (120, 80, 40)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * count + data[-2:]


@pytest.mark.slow
def test_an_image_without_end() -> None:
    with closing(MediaReaders(Limits(), 120.0)) as made:
        with pytest.raises(CannotDecode, match=r"drawn in 1\d\d scans, and 100 are read"):
            size_of(made, endless_scans(120))
        data = endless_scans(80)
        assert len(data) < 2**19 and size_of(made, data)["width"] == 4096
        made._seconds = 2.0
        with pytest.raises(CannotDecode, match=r"too much memory or time|not read within"):
            made.decode("image", data).result(120)
        made._seconds = 120.0
        assert size_of(made, picture())


@needs_media
def test_a_small_picture_waits_for_no_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a lane, where what is drawn many times is not tried first, nor for room."""
    has_begun, is_open, measured, measure = threading.Event(), threading.Event(), [], MediaReaders.measure
    read = MediaReaders._read
    monkeypatch.setattr(MediaReaders, "_read", lambda *args: (has_begun.set(), is_open.wait(120), read(*args)))
    monkeypatch.setattr(MediaReaders, "measure", lambda *args: measured.append(measure(*args)) or measured[-1])
    with serving(
        model=model(), made_tokenizer=tokenizer(), processor=processor(), limits=Limits(media_memory=2**27)
    ) as server:
        large = [server.beside(ask, server, url(endless_scans(5), "image/jpeg")) for _ in range(2)]
        until(lambda: len(measured) == 2 and all(each.done() for each in measured))
        must(has_begun.wait(120), "it is not read in the slow lane")
        assert ask(server, url(picture())).choices[0].message.content == expected(picture())[0]
        assert not any(each.done() for each in large)
        is_open.set()
        assert all(each.result(120) for each in large)


def test_a_client_that_goes(started: list[Any]) -> None:
    slow = endless_scans(80)
    with closing(MediaReaders(Limits(readers=1), 60.0)) as made:
        for options in ({}, {"is_long": True}):
            reading = made.decode("image", slow, **options)
            until(lambda: reading._process is not None)  # noqa: B023
            process = reading._process
            reading.cancel()
            assert process.wait(60) == -signal.SIGKILL
            assert isinstance(reading.exception(60), CannotDecode)
        waits = [made.decode("image", slow, is_long=True) for _ in range(3)]
        assert waits[2].cancel() and waits[1].cancel()
        assert size_of(made, picture())


def ogg_without_end() -> bytes:
    """A second of Ogg, and 16 MiB, for half a minute, in which each four bytes look like the beginning of a page."""
    data = io.BytesIO()
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(data, [0.0] * 16_000, 16_000, format="OGG")
    return data.getvalue() + b"OggS" * 2**22


def test_a_header_without_end() -> None:
    """It takes processor time for ever; others do not wait."""
    with closing(MediaReaders(Limits(readers=1), 60.0)) as made:
        endless = ogg_without_end()
        bad = [made.measure("audio", endless, "a") for _ in range(2)]
        assert made.measure("audio", endless[:5000], "b").result(120)[0]["seconds"] == 1
        assert not bad[-1].done()
        for each in reversed(bad):
            each.cancel()
        with pytest.raises((CannotDecode, CancelledError)):
            bad[-1].result(60)


def test_clients_take_turns() -> None:
    order: list[str] = []
    has_begun, is_open = threading.Event(), threading.Event()

    class Piece:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self) -> None:
            if self.name == "first":
                has_begun.set()
                must(is_open.wait(120), "nobody opens")
            order.append(self.name)

        def abandon(self) -> None:
            order.append(f"not {self.name}")

    turns = Turns(1, "test")
    turns.add("a", Piece("first"))
    must(has_begun.wait(120), "it has not begun")
    for client, name in zip("aaabbc", ("a1", "a2", "a3", "b1", "b2", "c1")):
        turns.add(client, Piece(name))
    is_open.set()
    until(lambda: len(order) == 7)
    assert order == ["first", "a1", "b1", "c1", "a2", "b2", "a3"]
    turns.close()
    turns.add("a", Piece("a4"))
    assert order[-1] == "not a4"


def test_memory() -> None:
    """What takes more than a process may have is refused, and the process goes on."""
    limits = Limits(reader_memory=300 * 2**20, image_pixels=2**27)
    with closing(MediaReaders(limits, 60.0)) as made:
        with pytest.raises(CannotDecode):
            made.decode("image", png(11_000, 11_000)).result(120)
        assert size_of(made, picture())


def test_the_end_does_not_wait_for_a_decoder(running: Callable[[str], None], started: list[Any]) -> None:
    made = MediaReaders(Limits(), 60.0)
    running(SLOW)
    asked = [made.measure("image", picture()) for _ in range(5)]
    until(lambda: len(made._busy) == 2)
    made.close()
    assert all(each.cancelled() or isinstance(each.exception(0), CannotDecode) for each in asked)
    assert not made._busy and not made._idle


@pytest.mark.slow
@needs_media
def test_other_requests_beside_a_hung_decoder(running: Callable[[str], None]) -> None:
    running(SLOW)
    with serving(model=model(), made_tokenizer=tokenizer(), processor=processor()) as server:
        hung = [server.beside(ask, server, url(picture())) for _ in range(2)]
        busy = server.service._attachments._readers["image"]._busy
        until(lambda: len(busy) == 2)
        question = [{"role": "user", "content": "Hello?"}]
        answer = server.client.chat.completions.create(model=NAME, messages=question, max_tokens=4)
        assert answer.choices and not any(each.done() for each in hung)
        for process in list(busy):
            process.kill()  # as the end of its time does
        assert all("too much memory or time" in str(each.exception(120)) for each in hung)
        running("")
        assert ask(server, url(picture(2))).choices[0].message.content == expected(picture(2))[0]
        server.assert_idle()
        rooms = server.service._attachments._decoded_room
        assert not rooms.short._used and not rooms.long._used


class Waiting:
    """A processor that waits for an event before it processes large images."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.has_begun = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(processor(), name)

    def __call__(self, images: Any, **others: Any) -> Any:
        if images[0].width > 2000:
            self.has_begun.set()
            must(self.is_open.wait(120), "nobody opens")
        return processor()(images=images, **others)


@needs_media
def test_memory_is_given_back(started: list[Any]) -> None:
    """By answers that end, streams whose client goes, and refusals."""
    with serving(model=model(), made_tokenizer=tokenizer(), processor=processor()) as server:
        decoded, room = server.service._attachments._decoded_room.short, server.service._attachments._made
        ask(server, url(picture()))
        with pytest.raises(openai.BadRequestError):
            ask(server, url(picture()), new=100_000)  # more than the model has, which is known after the image
        stream = server.client.chat.completions.create(
            model=NAME, messages=messages(url(picture())), max_tokens=400, stream=True
        )
        next(iter(stream))
        assert room._used > 0
        stream.close()
        until(lambda: room._used == decoded._used == 0)
        count = server.post("/tokenize", model=NAME, messages=messages(url(picture())), add_special_tokens=False)
        assert count.json()["count"] == expected(picture())[1]
        until(lambda: room._used == decoded._used == 0)


@pytest.mark.slow
def test_tiny_images_wait_for_what_the_processor_makes_of_them() -> None:
    """An image of one pixel is a large one for the model."""
    one = sum(each.nbytes for each in processor()(text=["<image>"], images=[_dot()], return_tensors="pt").values())
    limits, most = Limits(media_memory=4 * one), 0

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, server.service._attachments._made._used)

    with serving(model=model(), made_tokenizer=tokenizer(), processor=processor(), limits=limits) as server:
        undo = before_forwards(server.engine, watch)
        asked = [server.beside(ask, server, url(picture(index, size=(1, 1)))) for index in range(12)]
        answers = [each.result(120).choices[0].message.content for each in asked]
        undo()
    assert answers == [expected(picture(index, size=(1, 1)))[0] for index in range(12)]
    assert 0 < most <= 4 * one


def _dot() -> Any:
    return Image.new("RGB", (1, 1))


def test_a_long_request_leaves_the_limit_to_short_ones() -> None:
    async def run() -> None:
        rooms, long, short = _Rooms(100), ExitStack(), ExitStack()
        await rooms.take(90, long, is_long=True)
        await rooms.take(10, short, is_long=False)
        waiting = asyncio.ensure_future(rooms.take(1, short, is_long=False))
        await asyncio.sleep(0)
        assert not waiting.done(), "there would be 101"
        long.close()
        await waiting

    asyncio.run(run())


def test_room() -> None:
    """Requests wait while there is none; one that is larger than all of it runs alone; a cancelled one is gone."""

    async def run() -> None:
        room, first, second, third = _Room(10), ExitStack(), ExitStack(), ExitStack()
        await room.take(8, first)
        waiting = asyncio.ensure_future(room.take(50, second))
        gone = asyncio.ensure_future(room.take(5, third))
        await asyncio.sleep(0)
        assert not waiting.done() and room._used == 8
        gone.cancel()
        small = [asyncio.ensure_future(room.take(2, third)) for _ in range(2)]
        await asyncio.sleep(0)
        assert room._used == 8, "small ones do not pass the large one"
        first.close()
        await waiting
        assert room._used == 50 and not any(each.done() for each in small)
        second.close()
        await asyncio.gather(*small)
        assert room._used == 4
        behind = asyncio.ensure_future(room.take(5, second))
        waiting = asyncio.ensure_future(room.take(8, first))
        await behind
        behind = asyncio.ensure_future(room.take(1, second))
        await asyncio.sleep(0)
        assert room._used == 9
        waiting.cancel()
        await behind
        assert room._used == 10, "the one before it is gone"
        waiting = asyncio.ensure_future(room.take(10, first))
        await asyncio.sleep(0)
        third.close()
        second.close()  # which gives room to one that is cancelled before it goes on
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert room._used == 0

    asyncio.run(run())


def test_environment() -> None:
    """A decoder has neither the server's keys nor its libraries."""
    code = (
        "import os, sys, json, hf_paged.serving.media_reader\n"
        "assert not {'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "print(json.dumps({'bytes': 0, 'keys': list(os.environ)}), flush=True); sys.stdin.read()"
    )
    own = media_readers.Popen
    with pytest.MonkeyPatch.context() as patch, closing(MediaReaders(Limits(), 60.0)) as made:
        patch.setenv("HF_PAGED_API_KEY", "secret")
        patch.setenv("HF_TOKEN", "secret")
        patch.setattr(media_readers, "Popen", lambda c, **options: own([*c[:2], "-c", code], **options))
        assert not {"HF_PAGED_API_KEY", "HF_TOKEN"} & set(size_of(made, b"")["keys"])
