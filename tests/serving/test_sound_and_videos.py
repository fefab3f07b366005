"""Sound and videos in messages: answers like those of `generate`, and files that must be refused."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from hf_paged.serving.settings import Limits
from tests.serving import seeing
from tests.serving.harness import NAME, Running, serving
from tests.serving.seeing import QUESTION, answer_of, sound, spoken, url, video

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("av")


@pytest.fixture(scope="module")
def ears() -> Iterator[Running]:
    with serving(
        model=seeing.hearing_model(), made_tokenizer=seeing.tokenizer(), processor=seeing.hearing_processor(),
        limits=Limits(audio_seconds=10, recordings=1),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def eyes() -> Iterator[Running]:
    with serving(
        model=seeing.watching_model(), made_tokenizer=seeing.tokenizer(), processor=seeing.VideoProcessor(),
        limits=Limits(image_pixels=64 * 64, media_pixels=2 * 64 * 64),
    ) as running:  # fmt: skip
        yield running


def ask(server: Running, messages: list[Any], **options: Any) -> Any:
    return server.client.chat.completions.create(model=NAME, temperature=0, max_tokens=12, messages=messages, **options)


def heard(samples: Any) -> tuple[str, int]:
    prompt = f"<|user|><audio>{QUESTION}<|assistant|>"
    return answer_of(seeing.hearing_model(), seeing.hearing_processor(), prompt, audio=[samples])


def samples_of(data: bytes) -> Any:
    return soundfile.read(io.BytesIO(data), dtype="float32")[0]


def test_openais_client_sends_sound(ears: Running) -> None:
    data = sound()
    answer = ask(ears, spoken(data))
    assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == heard(samples_of(data))
    assert heard(samples_of(data))[0] != heard(0 * samples_of(data))[0]
    details = answer.usage.prompt_tokens_details
    text = ask(ears, [{"role": "user", "content": QUESTION}]).usage
    assert details.audio_tokens == answer.usage.prompt_tokens - text.prompt_tokens
    assert text.prompt_tokens_details.audio_tokens is None
    stream = ask(ears, spoken(data), stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in stream) == answer.choices[0].message.content


def test_kinds_of_sound(ears: Running) -> None:
    for kind in ("MP3", "FLAC", "OGG"):
        file = io.BytesIO()
        soundfile.write(file, samples_of(sound(1.5)), seeing.RATE, format=kind)
        answer = ask(ears, spoken(file.getvalue(), kind.lower()))
        assert answer.choices[0].message.content == heard(samples_of(file.getvalue()))[0], kind


def test_sound_as_a_url_and_in_responses(ears: Running) -> None:
    data = sound(0.5)
    text = heard(samples_of(data))[0]
    part = {"type": "audio_url", "audio_url": {"url": url(data, "audio/wav")}}
    question = {"type": "text", "text": QUESTION}
    assert ask(ears, [{"role": "user", "content": [part, question]}]).choices[0].message.content == text
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    content: Any = [part, {"type": "input_text", "text": QUESTION}]
    answer = ears.client.responses.create(
        model=NAME, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=12
    )
    assert answer.output_text == text and answer.usage is not None
    assert answer.usage.input_tokens == heard(samples_of(data))[1]


def wave(samples: int, rate: int = 16_000, channels: int = 1, data: bytes = b"") -> bytes:
    """A WAV file whose header claims so many samples."""
    size = 2 * channels * samples
    form = struct.pack("<HHIIHH", 1, channels, rate, 2 * channels * rate & 0xFFFFFFFF, 2 * channels, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size)
    return b"RIFF" + struct.pack("<I", len(body) + size & 0xFFFFFFFF) + body + data


def not_finite() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(1000, np.nan, np.float32), seeing.RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


HOSTILE_SOUND = {
    "10^9 samples claimed": wave(10**9), "longer than allowed": sound(11.0),
    "a thousand channels": wave(10, channels=1000, data=bytes(20_000)), "no rate": wave(10, rate=0, data=bytes(20)),
    "a huge rate": wave(10, rate=2**30, data=bytes(20)), "cut off": sound()[:1000], "head alone": sound()[:20],
    "nothing": b"", "zeros": bytes(1000), "no samples": wave(0), "no numbers": not_finite(),
    "text": b"hello, I am a sound", "html": b"<html></html>", "an image": seeing.picture(),
    "a midi file": b"MThd\0\0\0\6\0\1\0\1\0\x60MTrk" + bytes(50), "an mpeg head": b"\xff\xfb" + bytes(3),
    "an id3 tag without end": b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + bytes(100),
    "an ogg page without a stream": b"OggS" + bytes(60), "a raw file of sphere": b"NIST_1A\n   1024\n" + bytes(1010),
}  # fmt: skip


def test_what_is_no_sound_is_refused(ears: Running) -> None:
    data = sound(0.7)
    good = [ears.beside(ask, ears, spoken(data)) for _ in range(3)]
    bad = {name: ears.beside(ask, ears, spoken(each)) for name, each in HOSTILE_SOUND.items()}
    assert {each.result(120).choices[0].message.content for each in good} == {heard(samples_of(data))[0]}
    check_refusals(bad)
    ears.assert_idle()


def check_refusals(asked: dict[str, Any]) -> None:
    for name, each in asked.items():
        error = each.exception(120)
        assert isinstance(error, openai.BadRequestError) and "messages[0]" in str(error), name
        assert "Traceback" not in str(error) and "root:" not in str(error), name


def test_wrong_parts_of_sound(ears: Running) -> None:
    bad: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": "????", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav,abc"}},
        {"type": "audio_url", "audio_url": {"url": url(sound(), "image/png")}},
        {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1/a.wav"}},
    ]
    for part in bad:
        with pytest.raises(openai.BadRequestError):
            ask(ears, [{"role": "user", "content": [part]}])
    with pytest.raises(openai.UnprocessableEntityError):
        ask(
            ears, [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "aac"}}]}]
        )
    with pytest.raises(openai.BadRequestError, match="2 recordings, and a request may have 1"):
        ask(ears, spoken(sound()) + spoken(sound()))
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        ask(ears, seeing.messages(url(seeing.picture())))


def shown(data: bytes, kind: str = "video/mp4") -> list[Any]:
    part = {"type": "video_url", "video_url": {"url": url(data, kind)}}
    return [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]


def seen(data: bytes) -> tuple[str, int]:
    """By `generate`, of the first frame and the last one."""
    frames = seeing.frames_of(data)[[0, -1]]
    chosen = {"video_metadata": [None], "do_sample_frames": False}
    prompt = f"<|user|><video>{QUESTION}<|assistant|>"
    return answer_of(seeing.watching_model(), seeing.VideoProcessor(), prompt, videos=[frames], videos_kwargs=chosen)


def test_videos(eyes: Running) -> None:
    for codec, container in (
        *(("libx264", "mp4"), ("libx264", "mov"), ("libx264", "matroska"), ("libvpx-vp9", "webm"), ("libvpx", "webm")),
        *(("mpeg4", "mp4"), ("libsvtav1", "mp4")),
    ):
        data = video(codec=codec, container=container)
        answer = ask(eyes, shown(data))
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == seen(data), codec
    assert seen(data)[0] != seen(video(frames=2))[0]
    parts: Any = [{"type": "input_video", "video_url": url(data, "video/mp4")}]
    parts.append({"type": "input_text", "text": QUESTION})
    asked = [{"role": "user", "content": parts}]
    response = eyes.client.responses.create(model=NAME, input=asked, temperature=0, max_output_tokens=12)
    assert response.output_text == seen(data)[0]


PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
HOSTILE_VIDEOS = {
    "garbage": bytes(range(256)) * 40, "garbage behind a head": video()[:40] + bytes(range(256)) * 40, "nothing": b"",
    "head alone": video()[:64], "cut off": video()[:900], "a list of files": PLAYLIST,
    "a list of files behind a head": b"\0\0\0\x18ftypisom" + PLAYLIST,
    "files to be joined": b"ffconcat version 1.0\nfile '/etc/passwd'\n", "too large": video(size=128),
    "too many pixels": video(size=66), "an image": seeing.picture(), "a gif": seeing.picture(kind="GIF"),
    "a sound": sound(), "an avi": b"RIFF\xff\xff\xff\x7fAVI LIST" + bytes(100),
    "html": b"<html><video src='file:///etc/passwd'></video></html>",
    "a raw picture in matroska": video(codec="rawvideo", container="matroska"),
    "another codec": video(codec="mpeg2video", container="matroska"),
    "matroska without tracks": b"\x1aE\xdf\xa3\x9fB\x86\x81\x01" + bytes(200),
}  # fmt: skip


def test_what_is_no_video_is_refused(eyes: Running) -> None:
    data = video(frames=7)
    good = eyes.beside(ask, eyes, shown(data))
    check_refusals({name: eyes.beside(ask, eyes, shown(each)) for name, each in HOSTILE_VIDEOS.items()})
    assert good.result(120).choices[0].message.content == seen(data)[0]
    eyes.assert_idle()


def test_frames_are_limited() -> None:
    with serving(
        model=seeing.watching_model(), made_tokenizer=seeing.tokenizer(), processor=seeing.VideoProcessor(),
        limits=Limits(video_frames=1, videos=1),
    ) as running:  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="takes 2 of its 10 frames, and this server 1"):
            ask(running, shown(video()))
        with pytest.raises(openai.BadRequestError, match="2 videos, and a request may have 1"):
            ask(running, shown(video()) * 2)
