"""The routes of speech, over HTTP: what OpenAI's client gets, and what hostile files cost."""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import hf_paged
from hf_paged.serving.settings import Limits
from tests.serving.harness import NAME, Running, serving
from tests.serving.hearing import RATE, extractor, model, noise, tokenizer

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"


@functools.cache
def heard_model() -> Any:
    return model()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = Limits(audio_seconds=60, audio_bytes=4 * 2**20)
    with speech_server(limits=limits) as running:
        yield running


def speech_server(**options: Any) -> Any:
    cache = hf_paged.CacheConfig(num_blocks=1000, block_size=4)
    return serving(
        model=heard_model(), made_tokenizer=tokenizer(), extractor=extractor(), cache_config=cache, **options
    )


def wav(samples: Any, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def samples_of(data: bytes) -> Any:
    """As the server reads them."""
    from hf_paged.serving.audio import decoded

    return decoded(io.BytesIO(data), RATE, Limits())


def post(server: Running, data: bytes, route: str = TRANSCRIBE, **fields: Any) -> Any:
    return server.http.post(route, data=fields, files={"file": ("sound.wav", data)})


def expected(data: bytes, **generate: Any) -> dict[str, Any]:
    """What transformers' pipeline says."""
    pipe = transformers.AutomaticSpeechRecognitionPipeline(
        model=heard_model(), tokenizer=tokenizer(), feature_extractor=extractor(), chunk_length_s=1, device="cpu"
    )
    times = generate.pop("return_timestamps", None)
    options = {"do_sample": False, "num_beams": 1, "force_unique_generate_call": True, "max_new_tokens": None}
    made: dict[str, Any] = pipe(samples_of(data), return_timestamps=times, generate_kwargs=options | generate)
    return made


@functools.cache
def spoken() -> bytes:
    """A sentence of some seconds."""
    program = shutil.which("espeak-ng") or shutil.which("espeak")
    if program is None:
        return wav(noise(2.7))
    text = "The quick brown fox jumps over the lazy dog."
    return subprocess.run([program, "--stdout", text], check=True, capture_output=True).stdout


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("language", [None, "en"])
def test_openais_client_gets_the_text_of_the_pipeline(server: Running, language: str | None, beams: int) -> None:
    given = {} if language is None else {"language": language}
    answer = server.client.audio.transcriptions.create(
        model=NAME, file=("spoken.wav", spoken()), extra_body={"beam_size": beams}, **given
    )
    plain = expected(spoken(), num_beams=beams, task="transcribe", **given)
    assert answer.text == plain["text"].strip() and len(set(answer.text)) > 3
    server.assert_idle()


def test_another_language_is_heard(server: Running) -> None:
    answer = post(server, spoken(), TRANSLATE)
    assert answer.json()["text"] == expected(spoken(), task="translate")["text"].strip()
    assert answer.json()["usage"] == {"type": "duration", "seconds": -(-len(samples_of(spoken())) // RATE)}


def test_formats(server: Running) -> None:
    timed = expected(spoken(), language="en", task="transcribe", return_timestamps=True)
    answers = {kind: post(server, spoken(), language="en", response_format=kind) for kind in FORMATS}
    assert {kind: answer.headers["content-type"].split(";")[0] for kind, answer in answers.items()} == FORMATS
    verbose = answers["verbose_json"].json()
    assert (verbose["task"], verbose["language"]) == ("transcribe", "english")
    assert verbose["text"] == timed["text"].strip()
    assert [segment["text"] for segment in verbose["segments"]] == [chunk["text"] for chunk in timed["chunks"]]
    assert len(timed["chunks"]) > 1
    starts = [chunk["timestamp"][0] for chunk in timed["chunks"]]
    assert [segment["start"] for segment in verbose["segments"]] == starts
    assert answers["srt"].text.count(" --> ") == answers["vtt"].text.count(" --> ") == len(timed["chunks"])
    assert answers["vtt"].text.startswith("WEBVTT\n")
    assert answers["text"].text == answers["json"].json()["text"] + "\n"


FORMATS = {
    "json": "application/json", "verbose_json": "application/json", "text": "text/plain",
    "srt": "application/x-subrip", "vtt": "text/vtt",
}  # fmt: skip


def test_samples_have_a_seed(server: Running) -> None:
    texts = [post(server, spoken(), language="en", temperature=1.0, seed=seed).json()["text"] for seed in (1, 1, 2, 2)]
    assert texts[0] == texts[1] != texts[2] == texts[3]


@pytest.mark.parametrize("seconds", [0.5, 2.7])
def test_streams_add_up(server: Running, seconds: float) -> None:
    data = wav(noise(seconds))
    stream = server.client.audio.transcriptions.create(model=NAME, file=("a.wav", data), language="en", stream=True)
    events = list(stream)
    whole = post(server, data, language="en").json()
    assert [event.type for event in events] == ["transcript.text.delta"] * (len(events) - 1) + ["transcript.text.done"]
    assert events[-1].text == whole["text"] == "".join(event.delta for event in events[:-1])
    assert len(events) > 3 or seconds > 1
    server.assert_idle()


def huge_claim() -> bytes:
    """A header of 10^9 samples, and a few."""
    data = bytearray(wav(noise(0.1)))
    data[4:8], data[40:44] = (2_000_000_036).to_bytes(4, "little"), (2_000_000_000).to_bytes(4, "little")
    return bytes(data)


HOSTILE: dict[str, Any] = {
    "0 bytes": (b"", 400, "0 bytes"),
    "text": (b"hello, world" * 99, 415, "begins with"),
    "header alone": (b"RIFF\x00\x00\x00\x00WAVE", 400, "file:"),
    "cut": (wav(noise(1.0))[:-999], 400, "claims"),
    "10^9 samples claimed": (huge_claim(), 400, "claims"),
    "FLAC without frames": (b"fLaC" + b"\0" * 60, 400, "file:"),
    "Ogg of zeros": (b"OggS" + b"\0" * 200, 400, "file:"),
    "MP3 of noise": (b"ID3" + bytes(range(256)) * 40, 400, "file:"),
    "no samples": (wav(np.zeros(0)), 400, "no samples"),
    "too long": (wav(np.zeros(61 * RATE)), 400, "at most 60"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(server: Running, name: str) -> None:
    data, status, words = HOSTILE[name]
    for stream in ("false", "true"):
        answer = post(server, data, stream=stream)
        error = answer.json()["error"]
        assert answer.status_code == status and words in error["message"] and error["param"] == "file", error
    server.assert_idle()


def test_hours_of_silence_are_refused_by_what_the_file_says(server: Running) -> None:
    import soundfile

    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 8000, 1, format="FLAC") as sound:
        for _ in range(180):
            sound.write(np.zeros(8000 * 60, np.float32))
    began = time.perf_counter()
    answer = post(server, file.getvalue())
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "audio_too_long"
    assert time.perf_counter() - began < 5


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "format": ({"response_format": "xml"}, 422, "response_format"),
    "unknown": ({"words": "1"}, 422, "words"),
    "temperature": ({"temperature": "9"}, 422, "temperature"),
    "nan": ({"temperature": "nan"}, 422, "temperature"),
    "beams": ({"beam_size": "999"}, 400, "beam_size"),
    "beams that sample": ({"beam_size": "2", "temperature": "1"}, 400, "beam_size"),
    "language": ({"language": "klingon"}, 400, "language"),
    "model": ({"model": "other"}, 404, "model"),
    "words": ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, 400, "timestamp_granularities"),
    "times": ({"timestamp_granularities[]": "segment"}, 400, "timestamp_granularities"),
    "include": ({"include[]": "logprobs"}, 400, "include"),
    "stream": ({"stream": "true", "response_format": "srt"}, 400, "stream"),
    "prompt": ({"prompt": "<|endoftext|>"}, 400, "prompt"),
    "twice": ({"language": ["en", "de"]}, 422, "language"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields(server: Running, name: str) -> None:
    fields, status, param = WRONG[name]
    answer = post(server, spoken(), **fields)
    error = answer.json()["error"]
    assert answer.status_code == status and error["param"].startswith(param) and param in error["message"], error


def test_wrong_bodies(server: Running) -> None:
    http = server.http
    assert http.post(TRANSCRIBE, json={"file": "a"}).status_code == 415
    assert http.post(TRANSCRIBE, data={"model": NAME}).status_code == 415
    assert http.post(TRANSCRIBE, files={"sound": ("a", b"a")}).status_code == 422
    broken = http.post(TRANSCRIBE, content=b"--x\r\nabc", headers={"content-type": "multipart/form-data; boundary=x"})
    assert broken.status_code in (400, 422)
    nothing = http.post(TRANSCRIBE, content=b"", headers={"content-type": "multipart/form-data; boundary=x"})
    assert nothing.status_code in (400, 422)
    two = [("file", ("a", spoken())), ("file", ("b", spoken()))]
    assert http.post(TRANSCRIBE, files=two).status_code == 400
    large = http.post(TRANSCRIBE, files={"file": ("a", b"\0" * (5 * 2**20))})
    assert large.status_code == 413
    server.assert_idle()


def test_text_is_refused_by_name(server: Running) -> None:
    answers = [
        server.post("/v1/completions", prompt="hello"),
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}]),
    ]
    for answer in answers:
        assert answer.status_code == 400 and TRANSCRIBE in answer.json()["error"]["message"]


def test_a_model_of_text_has_no_such_route() -> None:
    with serving() as running:
        answer = post(running, spoken())
        assert answer.status_code == 501 and "reads no sound" in answer.json()["error"]["message"]


def test_many_files_at_once(server: Running) -> None:
    """Their windows run together; each answer is that of the file alone."""
    files = [wav(noise(0.3 + 0.4 * place)) for place in range(8)]
    alone = [post(server, data, language="en").json() for data in files]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda data: post(server, data, language="en").json(), files))
    assert together == alone
    server.assert_idle()


def test_a_long_file_has_few_windows_at_a_time(server: Running) -> None:
    data = wav(noise(25.0))
    counts = []
    with server.http.stream(
        "POST", TRANSCRIBE, data={"language": "en", "stream": "true"}, files={"file": ("a.wav", data)}
    ) as answer:
        for _ in answer.iter_bytes():
            counts.append(server.service.worker.num_in_flight)
    assert 1 < max(counts) <= 16
    assert (
        post(server, data, language="en").json()["text"]
        == expected(data, language="en", task="transcribe")["text"].strip()
    )


def test_a_client_that_leaves_ends_its_windows(server: Running) -> None:
    data = wav(noise(40.0))
    with server.http.stream(
        "POST", TRANSCRIBE, data={"language": "en", "stream": "true"}, files={"file": ("a.wav", data)}
    ) as answer:
        assert answer.status_code == 200
        next(answer.iter_bytes())
    deadline = time.monotonic() + 60
    while server.service.worker.num_in_flight and time.monotonic() < deadline:
        time.sleep(0.05)
    server.assert_idle()


def test_other_requests_go_on_while_files_are_read(server: Running) -> None:
    """Files that take long to read, from several clients, do not hold up /health."""
    import soundfile

    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 48_000, 8, format="FLAC") as sound:
        for _ in range(55):
            sound.write(np.random.default_rng(0).normal(0, 0.001, (48_000, 8)).astype(np.float32))
    large = file.getvalue()
    if len(large) > 4 * 2**20:
        large = wav(noise(59.0))
    waits = []
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(post, server, large, language="en") for _ in range(3)]
        while not all(answer.done() for answer in answers):
            began = time.perf_counter()
            assert server.http.get("/health").status_code == 200
            waits.append(time.perf_counter() - began)
            time.sleep(0.02)
    assert {answer.result().status_code for answer in answers} == {200}
    assert max(waits) < 2


def test_the_commands_files(tmp_path: Path) -> None:
    """What `hf-paged serve FOLDER` loads of a checkpoint of speech."""
    from hf_paged.model.loading import load_model
    from hf_paged.serving.loading import load_extractor

    heard_model().save_pretrained(tmp_path)
    extractor().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert type(loaded) is type(heard_model())
    assert load_extractor(str(tmp_path), loaded).n_samples == RATE
    assert torch.equal(loaded.proj_out.weight, heard_model().proj_out.weight)
