"""The routes of sound: what transformers' pipeline says, in OpenAI's formats, and files that hold nobody up."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.serving.harness import NAME, Running, serving
from tests.serving.test_speech import GREEDY, RATE, WISHES, Wish, extractor, model, noise, theirs, tokenizer


def file_of(samples: Any) -> tuple[str, bytes]:
    """A WAV file of 32-bit floats would keep them as they are; one of 16-bit integers is what clients send."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((np.clip(samples / 4, -1, 1) * 32767).astype("<i2").tobytes())
    return "speech.wav", data.getvalue()


def heard(file: tuple[str, bytes]) -> Any:
    """The samples of `file_of`."""
    with wave.open(io.BytesIO(file[1])) as opened:
        return np.frombuffer(opened.readframes(10**9), "<i2").astype(np.float32) / 32768


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    with serving(model=model(), own_tokenizer=tokenizer(), extractor=extractor()) as running:
        yield running


def expected(file: tuple[str, bytes], wish: Wish) -> str:
    return str(theirs(model(), heard(file), wish)["text"]).strip()


@pytest.mark.parametrize("seconds", [0.4, 2.5, 6.0])
def test_the_pipeline(server: Running, seconds: float) -> None:
    file, audio = file_of(noise(seconds)), server.client.audio
    found = audio.transcriptions.create(file=file, model=NAME)
    assert found.text == expected(file, Wish(options=GREEDY))
    assert found.usage.seconds == seconds
    assert audio.transcriptions.create(file=file, model=NAME, language="de").text == expected(file, WISHES["language"])
    assert audio.translations.create(file=file, model=NAME, extra_body={"language": "en"}).text == expected(
        file, WISHES["translation"]
    )
    beams = {"language": "en", "extra_body": {"beam_size": 3}}
    assert audio.transcriptions.create(file=file, model=NAME, **beams).text == expected(file, WISHES["beams"])
    prompted = audio.transcriptions.create(file=file, model=NAME, language="en", prompt="ABAC")
    assert prompted.text == expected(file, WISHES["prompt"])
