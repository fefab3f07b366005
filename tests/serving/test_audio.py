"""Files of sound: what is read of each kind, and that hostile ones are refused before they cost anything."""

from __future__ import annotations

import io
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soundfile

from hf_paged.serving.audio import decoded
from hf_paged.serving.problems import Problem
from hf_paged.serving.settings import Limits

RATE = 16_000
LIMITS = Limits(audio_seconds=60)


def tone(seconds: float = 1.0, rate: int = RATE, channels: int = 1) -> Any:
    """fp32, [num_samples] or [num_samples, channels]; each channel has another pitch."""
    times = np.arange(round(seconds * rate)) / rate
    waves = [0.4 * np.sin(2 * np.pi * 220 * (each + 1) * times) for each in range(channels)]
    return np.stack(waves, axis=1).astype(np.float32) if channels > 1 else waves[0].astype(np.float32)


def written(samples: Any, rate: int = RATE, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", rate, samples[:1].size or 1, subtype, format=kind) as sound:
        for start in range(0, len(samples), 2**16):  # libsndfile 1.2 crashes where it writes much Ogg at once
            sound.write(samples[start : start + 2**16])
    return file.getvalue()


def read(data: bytes, limits: Limits = LIMITS) -> Any:
    return decoded(io.BytesIO(data), RATE, limits)


def refusal(data: bytes, limits: Limits = LIMITS) -> Problem:
    with pytest.raises(Problem) as caught:
        read(data, limits)
    assert caught.value.param == "file"
    return caught.value


def test_kinds() -> None:
    for kind, subtype in (
        *(("WAV", subtype) for subtype in ("PCM_16", "PCM_24", "FLOAT", "ULAW")),
        *((kind, None) for kind in ("FLAC", "OGG", "MP3")),
    ):
        data = written(tone(), kind=kind, subtype=subtype)
        expected = soundfile.read(io.BytesIO(data), dtype="float32")[0]
        assert read(data).shape == expected.shape
        assert np.abs(read(data) - expected).max() <= (1e-5 if kind == "MP3" else 0)  # which is not exact


def test_channels_are_averaged() -> None:
    stereo = tone(channels=2)
    assert np.array_equal(read(written(stereo, subtype="FLOAT")), stereo.mean(axis=1))


def test_rates() -> None:
    """A long file is resampled in parts, with the same result."""
    for rate in (8_000, 22_050, 48_000):
        samples = read(written(tone(12, rate), rate, subtype="FLOAT"))
        assert abs(len(samples) - 12 * RATE) <= 1
        inner = slice(RATE, 11 * RATE)  # filters have edges
        assert np.abs(samples[inner] - tone(12)[inner]).max() < 1e-3


def test_broken_files_and_other_kinds() -> None:
    for data in (b"", b"RIFF\x24\0\0\0WAVE", b"fLaC" + b"\0" * 64, b"OggS" * 99, b"ID3" + b"\xff" * 99):
        assert refusal(data).status == 400
    for data in (b"hello, world", b"\x1aE\xdf\xa3 webm", b"FORM\0\0\0\0AIFF", b"\0" * 4096, b"M"):
        assert refusal(data).code == "unsupported_audio"


def test_every_cut() -> None:
    """A file that ends early or has wrong bytes is read or refused; nothing else is raised."""
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        data = written(tone(0.2), kind=kind)
        for place in range(0, len(data), max(1, len(data) // 40)):
            for broken in (data[:place], data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :]):
                try:
                    assert read(broken).dtype == np.float32
                except Problem as problem:
                    assert problem.status == 400


def claims(data: bytes, num_bytes: int) -> bytes:
    """A WAV file whose header claims so many bytes of samples."""
    place = data.index(b"data") + 4
    return data[:place] + struct.pack("<I", num_bytes) + data[place + 4 :]


def test_wave_that_claims_more_than_it_has() -> None:
    problem = refusal(claims(written(tone()), 2 * 10**9))
    assert problem.status == 400 and "claims 2000000000 bytes" in problem.message


def test_wave_that_came_through_a_pipe() -> None:
    """Its writer could not know its length."""
    data = written(tone())
    assert np.array_equal(read(claims(data, 0xFFFFFFFF)), read(data))


def flac_claiming(num_samples: int) -> bytes:
    data = bytearray(written(tone(), kind="FLAC"))
    fields = int.from_bytes(data[18:26])  # rate, channels, bits, and 36 bits of samples
    data[18:26] = (fields >> 36 << 36 | num_samples).to_bytes(8)
    return bytes(data)


def test_flac_that_claims_more_than_it_has() -> None:
    assert read(flac_claiming(RATE)).shape == (RATE,)
    assert refusal(flac_claiming(2 * RATE)).code == "invalid_audio"


def test_length_is_refused_before_memory_is_taken() -> None:
    tracemalloc.start()
    try:
        problem = refusal(flac_claiming(10**9))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert (problem.status, problem.code) == (400, "audio_too_long") and "62500 seconds" in problem.message


@pytest.mark.slow
def test_hours_of_silence() -> None:
    data = written(np.zeros(2 * 3600 * 4_000, np.float32), 4_000, "OGG")
    assert len(data) < 2**21
    assert refusal(data, Limits()).code == "audio_too_long"


def test_limits_of_time_and_shape() -> None:
    data = written(tone(9))
    problem = refusal(data, replace(LIMITS, audio_decode_seconds=1e-9))
    assert "within 1e-09 seconds" in problem.message
    assert "more than 1024 parts" in refusal(data[:12] + b"junk\0\0\0\0" * 1025 + data[12:]).message
    blocks = b"\x01\0\0\0" * 1025
    assert "more than 1024 blocks" in refusal(b"fLaC" + blocks + written(tone(), kind="FLAC")[4:]).message
    few = replace(LIMITS, audio_seconds=10)
    assert "1152000 samples in 8 channels; at most 960000" in refusal(written(tone(3, 48_000, 8), 48_000), few).message
    assert "9 channels" in refusal(written(tone(channels=9))).message
    assert "2000 samples a second" in refusal(written(tone(rate=2_000), 2_000)).message
    for factor in ("nan", "1e20"):
        assert "not finite" in refusal(written(tone() * np.float32(factor), subtype="FLOAT")).message
    assert "no samples" in refusal(written(tone(0))).message
