"""Requests to the audio routes: a form (multipart/form-data) with OpenAI's fields and a file.

A field that is not here is refused by name (422). Reading takes milliseconds for each MiB; not for the event loop.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from hf_paged.serving.invalid import invalid
from hf_paged.serving.problems import Problem, not_served
from hf_paged.serving.refusals import note_unused
from hf_paged.serving.transcripts import TIMED, Format
from hf_paged.serving.values import Body, Hint, Temperature

_FILE = "file"
_LISTS = ("timestamp_granularities",)
_NOT_SERVED = {
    "include": "log-probabilities of speech are not returned",
    "known_speaker_names": "speakers are not told apart",
    "known_speaker_references": "speakers are not told apart",
}
# The form has eleven fields, one of them a list; each part is a call of the parser.
_MAX_PARTS = 64
_MAX_FIELD = 2**16  # bytes of a value that is no file


class AudioRequest(Body):
    """POST /v1/audio/transcriptions and /v1/audio/translations, without the file. beam_size, seed: not OpenAI's.
    language: of the speech, also for translations."""

    model_config = ConfigDict(strict=False)  # all values are texts

    model: str | None = None
    language: Hint | None = None
    prompt: str | None = None
    response_format: Format = "json"
    temperature: Annotated[Temperature, Field(le=2)] = 0.0
    timestamp_granularities: list[Literal["segment", "word"]] = Field(default=[])
    stream: bool = False
    beam_size: Annotated[int, Field(ge=1, lt=2**31)] = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    chunking_strategy: Hint | None = None

    @property
    def has_times(self) -> bool:
        return self.response_format in TIMED


_FORM_SCHEMA = AudioRequest.model_json_schema()
_FORM_SCHEMA["properties"] |= {_FILE: {"type": "string", "format": "binary"}}
AUDIO_FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM_SCHEMA}}}}
"""The form, for /openapi.json."""


def read_form(content_type: str, body: bytes) -> tuple[AudioRequest, bytes]:
    """The fields, and the file's bytes. Raises Problem: 415 for another kind of body, 400 for a broken one, 422 for
    what the fields say."""
    fields: dict[str, Any] = {}
    file: bytes | None = None
    for name, data in _parts(content_type, body):
        if name == _FILE:
            if file is not None:
                raise Problem(400, "file: several are given; send one request for each", param=_FILE)
            file = data
            continue
        if name in _NOT_SERVED:
            raise not_served(f"{name}: {_NOT_SERVED[name]}; leave it out", param=name)
        text = _text(name, data)
        # A form sends a list as several fields of one name.
        if name in _LISTS:
            fields.setdefault(name, []).append(text)
        elif name in fields:
            raise Problem(422, f"{name}: it is given twice", param=name, code="invalid_field")
        else:
            fields[name] = text
    try:
        asked = AudioRequest.model_validate(fields)
    except ValidationError as error:
        raise invalid([{**each, "loc": ("body", *each["loc"])} for each in error.errors()], fields) from error
    if file is None:
        raise Problem(
            422, "file: it is missing; send the recording as a file of the form", param=_FILE, code="invalid_field"
        )
    _check(asked)
    return asked, file


def _check(asked: AudioRequest) -> None:
    """Raise Problem (400) for what is not served, or not together."""
    if asked.timestamp_granularities and asked.response_format != "verbose_json":
        raise Problem(
            400,
            f"timestamp_granularities[]: response_format={asked.response_format!r} has none; use verbose_json",
            param="timestamp_granularities",
        )
    if "word" in asked.timestamp_granularities:
        text = "timestamp_granularities[]=word needs the model's attention weights, which are not kept; use segment"
        raise not_served(text, param="timestamp_granularities")
    if asked.stream and asked.response_format not in ("json", "text"):
        text = f"stream=true: response_format={asked.response_format!r} is made of the whole text; use json"
        raise Problem(400, text, param="stream")
    if asked.chunking_strategy not in (None, "auto"):
        text = "chunking_strategy: windows have the length of the model's input; leave it out"
        raise not_served(text, param="chunking_strategy")
    if asked.chunking_strategy == "auto":
        note_unused("chunking_strategy", "windows have the length of the model's input")


def _text(name: str, data: bytes) -> str:
    if len(data) > _MAX_FIELD:
        raise Problem(400, f"{name}: it has {len(data)} bytes; at most {_MAX_FIELD} are read", param=name)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, f"{name}: it is no text in UTF-8: {error}", param=name) from None


def _parts(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """Name and contents of each part; a name's [] is left out. Raises Problem (400, 415)."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        shown = content_type[:100] or "of no type"
        raise Problem(415, f"the body is {shown}; send multipart/form-data with the field `file`", code="not_a_form")
    reader = _PartReader()
    calls: Any = {
        "on_part_begin": reader.begin,
        "on_header_field": reader.read_name,
        "on_header_value": reader.read_value,
        "on_header_end": reader.end_header,
        "on_part_data": reader.read_data,
        "on_part_end": reader.end_part,
        "on_end": reader.end,
    }
    try:
        parser = MultipartParser(boundary, calls)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Problem(400, f"the form cannot be read: {error}") from None
    # The parser says nothing of a form without its last boundary.
    if not reader.is_whole:
        raise Problem(400, "the form has no end")
    made = []
    for disposition, data in reader.parts:
        name = parse_options_header(disposition)[1].get(b"name")
        if name is None:
            raise Problem(400, "a part of the form has no name")
        made.append((name.decode(errors="replace").removesuffix("[]"), data))
    return made


class _PartReader:
    """Takes what the parser calls. parts: (Content-Disposition, contents)."""

    def __init__(self) -> None:
        self.parts: list[tuple[bytes, bytes]] = []
        self.is_whole = False

    def begin(self) -> None:
        # Before the part is read.
        if len(self.parts) == _MAX_PARTS:
            raise Problem(400, f"the form has more than {_MAX_PARTS} parts")
        self._data: list[bytes] = []
        self._name = self._value = self._disposition = b""

    def read_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def read_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def read_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def end_part(self) -> None:
        self.parts.append((self._disposition, b"".join(self._data)))

    def end(self) -> None:
        self.is_whole = True
