"""The routes of sound: what transformers' pipeline says, in OpenAI's formats, and files that hold nobody up."""

from __future__ import annotations

import asyncio
import io
import math
import wave
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.serving import middleware
from hf_paged.serving.loading import load_engine, load_extractor
from hf_paged.serving.relay import Relay
from hf_paged.serving.replica import Replica
from hf_paged.serving.service import Service
from hf_paged.serving.settings import Limits, Settings
from tests.forwards import before_forwards
from tests.serving.harness import NAME, Ended, Running, serving
from tests.serving.hearing import RATE, extractor, model, noise, tokenizer
from tests.serving.test_speech import GREEDY, WISHES, Wish, theirs
from tests.waiting import Gate, until


def file_of(samples: Any) -> tuple[str, bytes]:
    """A WAV file of 32-bit floats would keep them as they are; one of 16-bit integers is what clients send."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((np.clip(samples / 4, -1, 1) * 32767).astype("<i2").tobytes())
    return "speech.wav", data.getvalue()


def flac(samples: Any) -> tuple[str, bytes]:
    data = io.BytesIO()
    soundfile.write(data, samples, RATE, format="FLAC")
    return "speech.flac", data.getvalue()


def heard(file: tuple[str, bytes]) -> Any:
    """The samples of `file_of`."""
    with wave.open(io.BytesIO(file[1])) as opened:
        return np.frombuffer(opened.readframes(10**9), "<i2").astype(np.float32) / 32768


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with serving(model=model(), made_tokenizer=tokenizer(), extractor=extractor()) as running:
        yield running


def expected(file: tuple[str, bytes], wish: Wish) -> str:
    return str(theirs(model(), heard(file), wish)["text"]).strip()


@pytest.mark.slow
def test_the_pipeline(server: Running) -> None:
    seconds = 2.5
    file, audio = file_of(noise(seconds)), server.client.audio
    found = audio.transcriptions.create(file=file, model=NAME)
    assert found.text == expected(file, Wish(options=GREEDY))
    assert found.usage.seconds == math.ceil(seconds)
    assert audio.transcriptions.create(file=file, model=NAME, language="de").text == expected(file, WISHES["language"])
    assert audio.translations.create(file=file, model=NAME, extra_body={"language": "en"}).text == expected(
        file, WISHES["translation"]
    )
    beams = {"language": "en", "extra_body": {"beam_size": 3}}
    assert audio.transcriptions.create(file=file, model=NAME, **beams).text == expected(file, WISHES["beams"])
    prompted = audio.transcriptions.create(file=file, model=NAME, language="en", prompt="ABAC")
    assert prompted.text == expected(file, WISHES["prompt"])


# -- formats -------------------------------------------------------------------------------------------------------


def test_segments(server: Running) -> None:
    seconds = 2.5
    file, wish = file_of(noise(seconds)), WISHES["times"]
    chunks = theirs(model(), heard(file), wish)["chunks"]
    create = server.client.audio.transcriptions.create
    found = create(
        file=file, model=NAME, language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (found.language, found.duration, found.usage.seconds) == ("english", seconds, 3)
    assert [(x.text, x.start) for x in found.segments] == [(c["text"], c["timestamp"][0] or 0.0) for c in chunks]
    assert [each.end for each in found.segments] == [
        seconds if chunk["timestamp"][1] is None else chunk["timestamp"][1] for chunk in chunks
    ]
    assert found.text == "".join(chunk["text"] for chunk in chunks).strip() and found.text
    for kind, media, mark in (("srt", "application/x-subrip", "1\n00:0"), ("vtt", "text/vtt", "WEBVTT\n\n00:0")):
        answer = post(server, file, language="en", response_format=kind)
        assert answer.headers["content-type"].startswith(media) and answer.text.startswith(mark)
        assert answer.text.count(" --> ") == sum(bool(chunk["text"].strip()) for chunk in chunks) > 1
        assert create(file=file, model=NAME, language="en", response_format=kind) == answer.text
    plain = create(file=file, model=NAME, language="en", response_format="text")
    assert plain == create(file=file, model=NAME, language="en").text + "\n"


def test_the_language_that_was_heard(server: Running) -> None:
    file = file_of(noise(0.4))
    (language,) = {"english", "german"} & {post(server, file, response_format="verbose_json").json()["language"]}
    code = {"english": "en", "german": "de"}[language]
    assert post(server, file, language=code).json() == post(server, file).json()
    translated = post(server, file, "/v1/audio/translations", response_format="verbose_json").json()
    assert (translated["task"], translated["language"]) == ("translate", "english")


def post(server: Running, file: tuple[str, bytes], path: str = "/v1/audio/transcriptions", **fields: Any) -> Any:
    return server.http.post(path, files={"file": file}, data={"model": NAME, **fields})


def test_streams(server: Running) -> None:
    file = file_of(noise(1.5))
    for fields in ({"language": "en"}, {"extra_body": {"beam_size": 2}}):
        create = server.client.audio.transcriptions.create
        *deltas, done = create(file=file, model=NAME, stream=True, **fields)
        whole = create(file=file, model=NAME, **fields).text
        assert {delta.type for delta in deltas} == {"transcript.text.delta"} and done.type == "transcript.text.done"
        assert "".join(delta.delta for delta in deltas) == done.text == whole and whole


@pytest.mark.slow
def test_the_text_of_a_long_file_comes_window_by_window() -> None:
    """Whatever the windows do to each other, no delta is taken back."""
    own = model(suppress_tokens=[*range(61, 99)])  # no times, which random models write also where none are asked for
    with serving(model=own, made_tokenizer=tokenizer(), extractor=extractor()) as server:
        create = server.client.audio.transcriptions.create
        *deltas, done = create(file=file_of(noise(5.0)), model=NAME, language="en", stream=True)
        assert len(deltas) > 2 and "".join(delta.delta for delta in deltas) == done.text
        assert done.text == create(file=file_of(noise(5.0)), model=NAME, language="en").text


def test_a_stream_begins_before_its_end(server: Running) -> None:
    gate = Gate(server.engine, 12)
    stream = iter(server.client.audio.transcriptions.create(file=file_of(noise(0.4)), model=NAME, stream=True))
    first = next(stream)
    assert first.delta
    gate.open()
    *_, done = stream
    assert done.text.startswith(first.delta) and len(done.text) > len(first.delta)


def test_sampling(server: Running) -> None:
    file = file_of(noise(0.4))
    texts = [post(server, file, temperature="1.0", seed=str(seed)).json()["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


# -- windows -------------------------------------------------------------------------------------------------------


def test_windows_share_steps_and_encoders(server: Running) -> None:
    before = server.engine.stats()
    most = 0

    def note(_: Any) -> None:
        nonlocal most
        most = max(most, server.service.worker.num_in_flight)

    undo = before_forwards(server.engine, note)
    try:
        post(server, file_of(noise(11.03)[::-1]))  # no other test has this
    finally:
        undo()
    after = server.engine.stats()
    assert most == 16
    count = 17
    assert after.encoder_inputs - before.encoder_inputs == count  # for the language and the text of each window
    assert after.generated_tokens - before.generated_tokens > count
    assert after.steps - before.steps < (after.generated_tokens - before.generated_tokens) / 2


@pytest.mark.slow
def test_many_files_at_once(server: Running) -> None:
    files = [file_of(noise(0.3 + 0.4 * place)) for place in range(4)]
    alone = [post(server, file, language="en").json() for file in files]
    together = [server.beside(post, server, file, language="en") for file in files]
    assert [each.result(120).json() for each in together] == alone


def test_an_operator_that_aborts() -> None:
    with serving(model=model(), made_tokenizer=tokenizer(), extractor=extractor(), admin=True) as server:
        for fields in ({}, {"stream": "true"}):
            gate = Gate(server.engine, 10)
            pending = server.beside(post, server, file_of(noise(2.5)), language="en", **fields)
            gate.wait()
            pausing = server.beside(server.http.post, "/pause?mode=abort")
            server.await_command()
            gate.open()
            assert pausing.result(120).status_code == 200
            answer = pending.result(120)
            assert "aborted by the operator" in answer.text and answer.status_code == (200 if fields else 503)
            server.http.post("/resume")


def test_a_client_that_goes(server: Running) -> None:
    gate = Gate(server.engine, 30)
    with Ended("status='disconnected'") as ended:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(
                "/v1/audio/transcriptions",
                files={"file": flac(np.zeros(160 * RATE, np.float32))},
                data={"stream": "true", "language": "en"},
                timeout=httpx.Timeout(120, read=0.2),
            )
        gate.open()
        ended.wait()
    until(lambda: server.service.worker.num_in_flight == 0)
    assert server.service._num_preparing == 0 and server.service.transcriber._seconds == 0


# -- refusals ------------------------------------------------------------------------------------------------------


def refusal(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


HOSTILE = {
    "nothing": (b"", "0 bytes"), "text": (b"hello, world", "it begins with"),
    "a header alone": (b"RIFF\x24\0\0\0WAVE", "it cannot be read"), "zeros": (b"\0" * 4096, "it begins with"),
}  # fmt: skip


def test_hostile_files(server: Running) -> None:
    """They are refused at once, and tokens of another request go on meanwhile."""
    gate = Gate(server.engine, 4)
    stream = iter(server.client.audio.transcriptions.create(file=file_of(noise(0.4)), model=NAME, stream=True))
    for data, words in HOSTILE.values():  # the engine is held: nothing of this needs it
        status, message = refusal(post(server, ("speech.wav", data)))
        assert status == 400 and message.startswith("file: ") and words in message
        gate.pass_on(1)
    gate.open()
    assert [*stream][-1].type == "transcript.text.done"


FIELDS = {
    "words": ("1", 422, "words: this field is not known"),
    "chunking_strategy": ("server_vad", 400, "chunking_strategy: windows have the length"),
    "include[]": ("logprobs", 400, "include: log-probabilities"),
    "response_format": ("diarized_json", 422, "response_format"), "temperature": ("-1", 422, "temperature"),
    "beam_size": ("0", 422, "beam_size"), "stream": ("maybe", 422, "stream"), "language": ("fr", 400, "language='fr'"),
    "model": ("gpt-9", 404, "the model 'gpt-9' is not served"), "prompt": ("<|endoftext|>", 400, "prompt: "),
    "timestamp_granularities[]": ("segment", 400, "use verbose_json"),
}  # fmt: skip


def test_fields(server: Running) -> None:
    file = file_of(noise(0.4))
    for name, (value, status, words) in FIELDS.items():
        found = refusal(post(server, file, **{name: value}))
        assert found[0] == status and words in found[1], name


def test_fields_together(server: Running) -> None:
    file = file_of(noise(0.4))
    words = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    assert refusal(post(server, file, **words)) == (
        400,
        "timestamp_granularities[]=word needs the model's attention weights, which are not kept; use segment",
    )
    assert "is made of the whole text" in refusal(post(server, file, stream="true", response_format="srt"))[1]
    status, message = refusal(post(server, file, beam_size="129"))
    assert status == 400 and "at most 128 beams" in message


def test_forms(server: Running) -> None:
    path = "/v1/audio/transcriptions"
    status, message = refusal(server.post(path, model=NAME))
    assert status == 415 and "send multipart/form-data" in message
    assert refusal(server.http.post(path))[0] == 415
    whole = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\nabc\r\n--x--\r\n'
    bodies = {
        whole[:-6]: (400, "no end"), b"": (400, "no end"), whole.replace(b"; name=", b"; eman="): (400, "has no name"),
        whole[:-5] + b"\r\n" + whole: (400, "several are given"),
        whole.replace(b'"file"', b'"model"'): (422, "file: it is missing"),
        whole.replace(b'"file"', b'"model"')[:-5] + b"\r\n" + whole.replace(b'"file"', b'"model"'): (
            422, "given twice",
        ),
        whole.replace(b'"file"', b'"model"').replace(b"abc", b"\xff"): (400, "no text in UTF-8"),
        whole[:-5] + (b"\r\n" + whole[:-5]) * 70 + b"--\r\n": (400, "more than 64"),
    }  # fmt: skip
    for body, expected in bodies.items():
        answer = server.http.post(path, content=body, headers={"content-type": "multipart/form-data; boundary=x"})
        status, message = refusal(answer)
        assert status == expected[0] and expected[1] in message
    kind = f"multipart/form-data; boundary={'x' * 9000}"
    status, message = refusal(server.http.post(path, content=whole, headers={"content-type": kind}))
    assert status == 400 and "the form cannot be read" in message


def test_routes_for_text(server: Running) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/responses", {"input": "Hello"}),
    ):
        status, message = refusal(server.post(path, model=NAME, **body))
        assert status == 400 and "reads input_features, no text; for speech use /v1/audio/transcriptions" in message


def test_limits() -> None:
    limits = Limits(audio_bytes=2**15, audio_seconds=2, in_flight=3)
    options = {"model": model(), "made_tokenizer": tokenizer(), "extractor": extractor(), "limits": limits}
    with serving(**options, api_keys=("k",)) as server:
        assert post(server, flac(np.zeros(RATE, np.float32))).status_code == 200
        assert refusal(post(server, file_of(noise(3.0))))[0] == 413
        status, message = refusal(post(server, flac(np.zeros(3 * RATE, np.float32))))
        assert status == 400 and "at most 2 are read" in message
        assert httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": b"x"}).status_code == 401
        gate = Gate(server.engine, 1)
        some = [server.beside(post, server, flac(np.zeros(RATE, np.float32)), language="en") for _ in range(3)]
        until(lambda: server.service.worker.num_in_flight + server.service._num_preparing >= 3)
        answer = post(server, file_of(noise(0.4)))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        gate.open()
        assert {each.result(120).status_code for each in some} <= {200, 429}


def test_the_server_itself_reads_no_file(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither header nor samples: processes do, which can be killed (`test_media_processes.py`)."""
    file = file_of(noise(0.4))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("libsndfile is called in the server's process")

    monkeypatch.setattr(soundfile, "SoundFile", refuse)
    assert post(server, file, language="en").json()["text"] == expected(file, Wish(language="en", options=GREEDY))


def test_a_file_that_takes_too_long() -> None:
    options = {"model": model(), "made_tokenizer": tokenizer(), "extractor": extractor()}
    with serving(**options, limits=Limits(request_seconds=0.2)) as server:
        post(server, file_of(noise(0.4)))
        gate = Gate(server.engine, 2)
        assert refusal(post(server, flac(np.zeros(20 * RATE, np.float32)), language="en"))[0] == 504
        gate.open()
        until(lambda: server.service.worker.num_in_flight == 0)


def test_a_place_is_given_back(server: Running) -> None:
    """Also where the limit of time comes just when a file has been opened, so that its answer never begins."""
    service, file = server.service, file_of(noise(2.5))
    sent = httpx.Request("POST", server.url, files={"file": file})
    body, request = (
        sent.read(),
        SimpleNamespace(headers=sent.headers, state=SimpleNamespace(key_digest=None), client=None),
    )

    async def opened() -> tuple[int, int]:
        made = await service.transcriber.open(request, body, "transcribe")
        assert made.job is not None
        return service._num_preparing, service.transcriber._seconds

    assert server.on_loop(opened()).result(120) == (1, 3)
    until(lambda: (service._num_preparing, service.transcriber._seconds) == (0, 0))


def test_replicas() -> None:
    """The body is larger than one of JSON may be, and has zeros."""
    data = io.BytesIO()
    soundfile.write(data, np.tile(noise(1.4)[:, None], (12, 8)), 192_000, format="WAV")
    assert len(data.getvalue()) > Limits().body
    sent = httpx.Request("POST", "http://localhost/v1/audio/transcriptions", files={"file": ("a.wav", data.getvalue())})
    messages: list[Any] = [{"type": "http.request", "body": sent.read(), "more_body": False}]
    headers = [(name.lower(), value) for name, value in sent.headers.raw]
    got: list[Any] = []

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        got.append(message)

    async def run() -> None:
        settings = Settings(names=(NAME,))
        engine = Engine(model(), CacheConfig(num_blocks=256))
        replica = Replica(Service(engine, tokenizer(), settings, extractor=extractor()), "one")
        await replica.start()
        try:
            relay = Relay(replica.answer, wait_seconds=60)
            middle = middleware.Gate(relay, settings=settings, on_answer=lambda path, status: None)
            await middle({"type": "http", "method": "POST", "path": sent.url.path, "headers": headers}, receive, send)
        finally:
            await replica.stop()

    asyncio.run(run())
    assert got[0]["status"] == 200 and b"".join(message.get("body", b"") for message in got).startswith(b'{"text":')


def test_a_server_that_ends() -> None:
    """A file that is being transcribed is transcribed to its end; no further one is taken."""
    with serving(model=model(), made_tokenizer=tokenizer(), extractor=extractor()) as server:
        gate = Gate(server.engine, 5)
        pending = server.beside(post, server, file_of(noise(11.0)), language="en")
        gate.wait()
        server.send_signal()
        until(lambda: server.service.is_draining)
        gate.open()
        assert pending.result(120).status_code == 200


@pytest.mark.slow
def test_from_a_folder(tmp_path: Any) -> None:
    for each in (model(), tokenizer(), extractor()):
        each.save_pretrained(tmp_path)
    engine, found = load_engine(
        str(tmp_path), CacheConfig(num_blocks=64), SchedulerConfig(), dtype="float32", device="cpu"
    )
    engine.close()
    assert type(engine.model).__name__ == "WhisperForConditionalGeneration"
    assert found.get_vocab()["<|de|>"] == 53
    assert load_extractor(str(tmp_path), engine.model).n_samples == RATE


def test_the_description(server: Running) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    form = paths["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert {"file", "language", "response_format", "beam_size"} <= set(form["properties"])
