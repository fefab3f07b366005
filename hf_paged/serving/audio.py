"""Audio files -> samples, by libsndfile. Knows no model and no HTTP but its errors.

What a file says of itself is checked before memory is taken for it, and what it has while it is read, block by block.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hf_paged.serving.problems import Problem
from hf_paged.serving.settings import Limits

Samples = NDArray[np.float32]

NEEDED = ("soundfile", "soxr", "python_multipart")
# The limits of length and time are checked after each block: 1.4 s of audio at 48 kHz.
_BLOCK = 2**16  # frames
# As many as 7.1 surround has.
_MAX_CHANNELS = 8
_MAX_PARTS = 1024  # before the samples; each costs time
_SAMPLES = 96_000  # of all channels for each second that a file may have: stereo at 48,000 a second
_LOUDEST = 2.0**32  # of samples as integers too; squares of much larger ones are infinite
# The header's rate decides how many samples resampling makes.
_RATES = range(4_000, 192_001)
# Bytes. Programs that write a WAV file to a pipe do not know its size, and claim as many, or more.
_UNKNOWN_SIZE = 0x7FFFF000


def check_installed() -> None:
    """Raise Problem (501) without the packages that read audio."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise Problem(
            501,
            f"audio files need {', '.join(missing)}: pip install -e '.[audio]' in a checkout of hf_paged",
            code="not_installed",
        )


def claims(file: BinaryIO, limits: Limits) -> tuple[float, int]:
    """Read the seconds, and the samples of all channels, from the file's header; `decoded` reads no more than these.
    Takes milliseconds for an honest file. Raises Problem as `decoded` does."""
    import soundfile

    _check_kind(file)
    try:
        with soundfile.SoundFile(file) as sound:
            _check_claims(sound, limits)
            return sound.frames / sound.samplerate, sound.frames * sound.channels
    except soundfile.LibsndfileError as error:
        raise _unreadable(error) from None
    finally:
        file.seek(0)


def decoded(file: BinaryIO, rate: int, limits: Limits) -> Samples:
    """The samples of a WAV, FLAC, Ogg or MP3 file, its channels averaged: fp32, [num_samples] at `rate` a second.

    Blocks for `limits.audio_decode_seconds` at most; not for the event loop. Raises Problem (400) for a file of another
    format, and for one that is broken, empty, too long, or takes too long to read.
    """
    import soundfile
    import soxr

    # A deadline and no count of bytes: a small file may take long to decode.
    ends_at = time.monotonic() + limits.audio_decode_seconds
    _check_kind(file)
    try:
        with soundfile.SoundFile(file) as sound:
            _check_claims(sound, limits)
            # By blocks, so that a long file is never there at its own rate as a whole.
            stream = None if sound.samplerate == rate else soxr.ResampleStream(sound.samplerate, rate, 1, "float32")
            parts = []
            for mono in _blocks(sound, limits, ends_at):
                parts.append(mono if stream is None else stream.resample_chunk(mono))
            if stream is not None:
                parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    except soundfile.LibsndfileError as error:
        raise _unreadable(error) from None
    samples = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not len(samples):
        raise _bad("it has no samples")
    return samples


def _bad(reason: str, code: str = "invalid_audio") -> Problem:
    return Problem(400, f"file: {reason}", param="file", code=code)


def _unreadable(error: Any) -> Problem:
    return _bad(f"it cannot be read: {error.error_string}")


def _check_kind(file: BinaryIO) -> None:
    """Raise Problem for a file that is empty, or begins as no known kind does. libsndfile has readers of many more
    kinds, but fewer people test these."""
    head = file.read(12)
    file.seek(0)
    if not head:
        raise _bad("it has 0 bytes")
    is_wave = head[:4] == b"RIFF" and head[8:] == b"WAVE"
    is_mpeg = head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0)
    if not (is_wave or is_mpeg or head[:4] in (b"fLaC", b"OggS")):
        raise Problem(
            400, f"file: it begins with {head[:4]!r}; WAV, FLAC, Ogg and MP3 are read", param="file",
            code="unsupported_audio",
        )  # fmt: skip
    if is_wave:
        _check_wave(file)
    if head[:4] == b"fLaC":
        _check_flac(file)


def _check_wave(file: BinaryIO) -> None:
    """Raise Problem (400) for a WAV file that ends before its samples do: libsndfile would read what is there."""
    size = file.seek(0, 2)
    place = 12
    for _ in range(_MAX_PARTS):
        if place + 8 > size:
            break
        file.seek(place)
        name, length = struct.unpack("<4sI", file.read(8))
        place += 8
        if name == b"data":
            if size - place < length < _UNKNOWN_SIZE:
                raise _bad(f"its header claims {length} bytes of samples, and {size - place} are there")
            break
        place += length + length % 2
    else:
        raise _bad(f"it has more than {_MAX_PARTS} parts before its samples")
    file.seek(0)


def _check_flac(file: BinaryIO) -> None:
    """Raise Problem (400) for more blocks of metadata than files have."""
    file.seek(4)
    for _ in range(_MAX_PARTS):
        head = file.read(4)
        if len(head) < 4 or head[0] & 0x80:  # the last one
            break
        file.seek(int.from_bytes(head[1:]), 1)
    else:
        raise _bad(f"it has more than {_MAX_PARTS} blocks of metadata")
    file.seek(0)


def _check_claims(sound: Any, limits: Limits) -> None:
    """Raise Problem (400) for a header with too many channels or samples, or an unusual rate."""
    if not 1 <= sound.channels <= _MAX_CHANNELS:
        raise _bad(f"it has {sound.channels} channels; at most {_MAX_CHANNELS} are read")
    if sound.samplerate not in _RATES:
        raise _bad(f"it has {sound.samplerate} samples a second; {_RATES[0]} to {_RATES[-1]} are read")
    _check_length(sound.frames, sound.samplerate, limits)
    # Channels multiply the work, so that seconds alone do not bound it.
    if sound.frames * sound.channels > _SAMPLES * limits.audio_seconds:
        raise _bad(
            f"it has {sound.frames * sound.channels} samples in {sound.channels} channels; at most "
            f"{_SAMPLES * limits.audio_seconds:.0f} are read. Send fewer channels, or a lower rate",
            "audio_too_long",
        )


def _check_length(frames: int, rate: int, limits: Limits) -> None:
    if frames > limits.audio_seconds * rate:
        raise _bad(
            f"it has {frames / rate:.0f} seconds of audio or more; at most {limits.audio_seconds:g} are read. Send it "
            "in parts",
            "audio_too_long",
        )


def _blocks(sound: Any, limits: Limits, ends_at: float) -> Iterator[Samples]:
    """The file's samples, fp32, at its own rate. Raises Problem (400)."""
    count = 0
    while len(block := sound.read(_BLOCK, dtype="float32", always_2d=True)):
        count += len(block)
        _check_length(count, sound.samplerate, limits)
        if time.monotonic() > ends_at:
            raise _bad(f"it was not read within {limits.audio_decode_seconds:g} seconds", "audio_too_long")
        if not (np.abs(block) <= _LOUDEST).all():
            raise _bad(f"it has samples that are not finite, or beyond {_LOUDEST:g}; send samples from -1 to 1")
        yield block.mean(axis=1)
    # A file that was cut off is not answered as if it were whole.
    if count < sound.frames:
        raise _bad(f"its header claims {sound.frames} samples, and {count} are there")
