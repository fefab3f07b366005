"""The formats of OpenAI's transcriptions: text, subtitles, and JSON with or without segments."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from hf_paged.annotations import Tokenizer
from hf_paged.generation.requests.outputs import RequestOutput
from hf_paged.serving.choices import REASONS, Delta
from hf_paged.serving.forms import Form, Plain
from hf_paged.serving.parsing import Trimmed
from hf_paged.serving.problems import Json
from hf_paged.serving.speech import Merged, Segment, Speech, Stride
from hf_paged.serving.text import Detokenizer

Format = Literal["json", "text", "verbose_json", "srt", "vtt"]
TIMED: tuple[Format, ...] = ("verbose_json", "srt", "vtt")
MEDIA_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
"""Content types of the formats that are no JSON."""


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments).strip()


def plain(segments: Sequence[Segment], kind: Format) -> str:
    """Write segments in a format of MEDIA_TYPES."""
    if kind == "text":
        return text_of(segments) + "\n"
    mark = "," if kind == "srt" else "."
    # A cue without text would end the one before it, or show nothing.
    texts = [(each, text) for each in segments if (text := _cue(each.text))]
    cues = [f"{_clock(each.start, mark)} --> {_clock(each.end, mark)}\n{text}\n" for each, text in texts]
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
    # Rounded once, so that 59.9996 s are a minute, and not 60 seconds of one.
    thousandths = round(seconds * 1000)
    whole, rest = divmod(thousandths, 1000)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}{mark}{rest:03d}"


class Transcript:
    """Text of a file, growing with the windows' answers; a `Reading` (see answers.py). Not for the event loop.

    segments: of the whole file, when all windows have been answered.
    """

    def __init__(
        self,
        speech: Speech,
        tokenizer: Tokenizer,
        strides: Mapping[int, Stride],
        languages: Mapping[int, str],
        num_windows: int,
        *,
        has_times: bool,
        streams: bool,
    ) -> None:
        """strides, languages: by place; those of windows that have been answered are there, languages where the model
        was asked for them."""
        self._speech = speech
        self._strides = strides
        self._languages = languages
        self._num_windows = num_windows
        self._has_times = has_times
        self._answers: dict[int, list[int]] = {}  # of finished windows
        self._growing = _GrowingText(speech, tokenizer, is_single=num_windows == 1) if streams else None
        self.segments: list[Segment] = []
        self.completion_tokens = self.cached_tokens = 0

    @property
    def are_finished(self) -> bool:
        return len(self._answers) == self._num_windows

    @property
    def seconds(self) -> float:
        return self._speech.seconds(self._strides.values())

    def update(self, outputs: Mapping[int, RequestOutput]) -> list[Delta]:
        """Take the windows' outputs, by place. With `streams`, the deltas together have the text."""
        deltas = []
        for place, output in outputs.items():
            (best, *_) = output.outputs
            if output.finished:
                self._answers[place] = best.token_ids
                self.completion_tokens += best.num_tokens
                self.cached_tokens += output.metrics.num_cached_tokens
                reason = REASONS.get(best.finish_reason, "stop")
                deltas.append(Delta(0, "", [], [], finish_reason=reason))
            if self._growing is not None:
                text = self._growing.add(place, best.token_ids, self._languages.get(place), output.finished)
                deltas += [Delta(0, text, [], [])] if text else []
        # Merged as a whole: windows that overlap decide together what is said between them.
        if self.are_finished:
            places = range(self._num_windows)
            strides, answers = [self._strides[each] for each in places], [self._answers[each] for each in places]
            languages = [self._languages.get(each) for each in places]
            self.segments = self._speech.heard(strides, answers, languages, has_times=self._has_times)
            if self._growing is not None and (rest := text_of(self.segments)[self._growing.length :]):
                deltas.append(Delta(0, rest, [], []))
        return deltas


class _GrowingText:
    """The text of a file up to where later tokens cannot change it: of one window token by token, of several up to
    their overlap."""

    def __init__(self, speech: Speech, tokenizer: Tokenizer, *, is_single: bool) -> None:
        self._speech = speech
        self._detokenizer = Detokenizer(tokenizer)
        self._trimmed = Trimmed()
        self._is_single = is_single
        self._known = 0  # tokens of the single window
        self._merged = Merged()
        self._waiting: dict[int, tuple[list[int], str | None]] = {}  # finished, behind one that is not
        self._language: str | None = None
        self._next = 0
        self._is_settling = True  # until a window has times: that one has to be read with all others
        self.length = 0
        """Characters of the text so far."""

    def add(self, place: int, tokens: list[int], language: str | None, is_finished: bool) -> str:
        """tokens: all of the window so far. Returns what is new."""
        words: list[int] = []
        if self._is_single:
            words = [token for token in tokens[self._known :] if self._speech.is_word(token)]
            self._known = len(tokens)
        elif is_finished:
            self._waiting[place] = tokens, language
            # In the order of the file, though windows end in any.
            while self._is_settling and self._next in self._waiting:
                words += self._settled(*self._waiting.pop(self._next))
        text = self._trimmed.push(self._detokenizer.push(words))
        self.length += len(text)
        return text

    def _settled(self, tokens: list[int], language: str | None) -> list[int]:
        words = [token for token in tokens if self._speech.is_word(token)]
        self._next += 1
        self._is_settling = words == tokens[: len(words)]
        ended = self._merged.end() if language != self._language else []  # see `Speech.heard`
        self._language = language
        return ended + self._merged.add(words) if self._is_settling else ended


@dataclass(slots=True)
class TranscriptForm(Form):
    """OpenAI's answers to the audio routes. languages: of the windows by place, where the model was asked; language:
    the client's."""

    transcript: Transcript
    kind: Format
    task: str
    temperature: float
    language: str | None
    languages: Mapping[int, str]

    def chunks(self, delta: Delta) -> list[Json]:
        return [{"type": "transcript.text.delta", "delta": delta.text}] if delta.text else []

    def closing(self, usage: Json) -> list[Json]:
        return [{"type": "transcript.text.done", "text": text_of(self.transcript.segments), "usage": self._usage()}]

    def whole(self, deltas: Sequence[Delta], usage: Json) -> Json | Plain:
        segments, seconds = self.transcript.segments, self.transcript.seconds
        if self.kind in MEDIA_TYPES:
            return Plain(plain(segments, self.kind).encode(errors="replace"), MEDIA_TYPES[self.kind])
        if self.kind == "json":
            return {"text": text_of(segments), "usage": self._usage()}
        language = "en" if self.task == "translate" else self.language or self.languages.get(0)
        made = verbose(
            segments,
            task=self.task,
            language=Speech.language_name(language),
            seconds=seconds,
            temperature=self.temperature,
        )
        return {**made, "usage": self._usage()}

    def _usage(self) -> Json:
        """Count seconds of audio, rounded up, as OpenAI does."""
        return {"type": "duration", "seconds": ceil(self.transcript.seconds)}
