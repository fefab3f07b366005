"""The formats of OpenAI's transcriptions: text, subtitles, and JSON with or without segments."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal

from hf_paged.serving.problems import Json
from hf_paged.serving.speech import Segment

Format = Literal["json", "text", "verbose_json", "srt", "vtt"]
TIMED: tuple[Format, ...] = ("verbose_json", "srt", "vtt")
MEDIA_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
"""Of the formats that are no JSON."""


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def plain(segments: Sequence[Segment], kind: Format) -> str:
    """The formats in MEDIA_TYPES."""
    if kind == "text":
        return text_of(segments) + "\n"
    mark = "," if kind == "srt" else "."
    cues = [f"{_clock(each.start, mark)} --> {_clock(each.end, mark)}\n{_cue(each.text)}\n" for each in segments]
    if kind == "srt":
        return "\n".join(f"{number}\n{cue}" for number, cue in enumerate(cues, 1))
    return "\n".join(["WEBVTT\n", *cues])


def verbose(segments: Sequence[Segment], *, task: str, language: str, seconds: float, temperature: float) -> Json:
    """verbose_json. What the engine does not measure, the log-probabilities of segments and of silence, is null."""
    return {
        "task": task,
        "language": language,
        "duration": seconds,
        "text": text_of(segments),
        "segments": [
            {
                "id": number,
                "seek": round(each.start * 100),  # frames of 10 ms, as Whisper counts them
                "start": each.start,
                "end": each.end,
                "text": each.text,
                "temperature": temperature,
                "avg_logprob": None,
                "compression_ratio": _compression(each.text),
                "no_speech_prob": None,
            }
            for number, each in enumerate(segments)
        ],
    }


def _compression(text: str) -> float:
    data = text.encode(errors="replace")
    return len(data) / len(zlib.compress(data))


def _cue(text: str) -> str:
    """One line without an arrow: an empty line would end the cue, and an arrow begin another one."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, mark: str) -> str:
    thousandths = round(seconds * 1000)
    whole, rest = divmod(thousandths, 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{mark}{rest:03d}"
