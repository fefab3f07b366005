"""Parts of the messages in requests: texts, images, videos and audio, in the forms of OpenAI's clients and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hf_paged.serving.values import AList, AString, ByKind, Items, Sent, Text


class TextPart(Sent):
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


MediaText = Annotated[str, Field(max_length=2**28)]
"""Longer than a body may be."""


class MediaURL(Sent):
    """Data, as a data URL, or where it is fetched."""

    url: MediaText


class ImageURL(MediaURL):
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Sent):
    type: Literal["image_url"]
    image_url: ImageURL
    prompt_cache_breakpoint: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return self.image_url.url


class VideoPart(Sent):
    type: Literal["video_url"]
    video_url: MediaURL

    @property
    def url(self) -> str:
        return self.video_url.url


class AudioURLPart(Sent):
    type: Literal["audio_url"]
    audio_url: MediaURL

    @property
    def url(self) -> str:
        return self.audio_url.url


class AudioData(Sent):
    """Base64 of an audio file. format: a hint; the file may have any format that is read."""

    data: MediaText
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioPart(Sent):
    type: Literal["input_audio"]
    input_audio: AudioData

    @property
    def url(self) -> str:
        return f"data:audio/{self.input_audio.format};base64,{self.input_audio.data}"


MediaPart = ImagePart | VideoPart | AudioURLPart | AudioPart
KINDS: dict[type, Literal["image", "video", "audio"]] = {
    ImagePart: "image",
    VideoPart: "video",
    AudioURLPart: "audio",
    AudioPart: "audio",
}


class OtherPart(BaseModel):
    """A part of a message that is neither text nor media. It is parsed to be refused by name."""

    model_config = ConfigDict(extra="allow")

    type: Literal["file", "refusal"]


Content = Annotated[
    Annotated[Text, AString]
    | Annotated[Items[Annotated[TextPart | MediaPart | OtherPart, Field(discriminator="type")]], AList],
    ByKind,
]
