"""Settings of the server: names, keys and limits. Frozen and validated; standard library only."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

DefaultsFrom = Literal["auto", "vllm"]
AUDIO_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Routes that take a form with a file in place of JSON."""

_MAY_BE_ZERO = ("logprobs", "images", "videos", "recordings", "grammar_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the requests of clients. Counts, except where a unit is given.

    in_flight: prompts that run or wait, over all clients; further requests get 429. spare_connections: that may be
    open beyond these, for refusals, /health and clients that wait. head_seconds: until a connection's next request
    header has arrived. body: bytes of a request's body; bodies: of those of all requests that have not been answered,
    beyond which only small ones are taken. body_seconds: until the body has arrived. send_seconds: how long a client
    may take nothing of what was sent to it. sequences: samples and beams of one HTTP request, over all
    its prompts. logprobs: alternatives for each token. scores: log-probabilities in one answer. new_tokens: of a chat
    request that gives no limit itself. request_seconds: from a request's arrival to its end (None: no limit).
    grammar: characters of a schema, regular expression or grammar. grammar_seconds: that a request waits for it
    (0: they are not served). audio_bytes: of the body of a request in AUDIO_PATHS, in place of `body`. audio_seconds:
    of audio in a file. audio_decode_seconds: until it has been read. `images`, `videos`, `recordings`: of a request.
    image_pixels: of an image, and of a frame. media_pixels: of all images and frames of a request. video_frames: that
    the processor takes of a video. image_seconds: for an image, until its process is killed; decode_seconds: for audio
    or a video. reader_memory: bytes of such a process. readers: how many there are for images, for the others, and
    as many for the slow ones of each.
    media_memory: bytes of what has been decoded for all requests, and of what processors have made of it for those that
    run; further ones wait. media_bytes: that a request fetches. media_seconds: until a file has arrived. fetches:
    requests that fetch at once.
    """

    # Each is a connection, and so an open file: fewer where the process may have fewer (`server._allowed`).
    in_flight: int = 1024
    spare_connections: int = 256
    head_seconds: float = 15.0
    # About a million tokens of text.
    body: int = 4 * 2**20
    # JSON takes several times its length in memory, so that bodies together need a bound of their own.
    bodies: int = 128 * 2**20
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    sequences: int = 128
    # As OpenAI's API.
    logprobs: int = 20
    # Each takes tens of bytes of JSON, whether n, logprobs or max_tokens multiplies them.
    scores: int = 2**21
    new_tokens: int = 1024
    request_seconds: float | None = None
    grammar: int = 64 * 2**10
    grammar_seconds: float = 10.0
    # As OpenAI's API.
    audio_bytes: int = 25 * 2**20
    audio_seconds: float = 3600.0
    audio_decode_seconds: float = 30.0
    images: int = 16
    videos: int = 2
    recordings: int = 4
    image_pixels: int = 4096 * 4096
    # At four bytes each, half of `media_memory`: less than the part of it that long requests have
    # (`attachments._Rooms`).
    media_pixels: int = 2**27
    video_frames: int = 256
    # An image takes a fraction of a second; audio and videos are longer.
    image_seconds: float = 10.0
    decode_seconds: float = 30.0
    reader_memory: int = 2**30
    readers: int = 2
    media_memory: int = 2**30
    media_bytes: int = 20 * 2**20
    media_seconds: float = 10.0
    fetches: int = 16

    def __post_init__(self) -> None:
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            # By the annotation: `from __future__ import annotations` leaves it as text.
            if each.type == "int":
                least = 0 if name in _MAY_BE_ZERO else 1
                if isinstance(value, bool) or not isinstance(value, int) or value < least:
                    raise ValueError(f"{name}={value!r}: an integer of at least {least} is needed")
            elif name in _MAY_BE_ZERO:
                if not 0 <= value < float("inf"):
                    raise ValueError(f"{name}={value!r}: a number of seconds, or 0, is needed")
            elif value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value!r}: a number of seconds above 0 is needed")

    @property
    def connections(self) -> int:
        return self.in_flight + self.spare_connections


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """names: of the model, the first one appears in answers. api_keys: a request needs one of them (none: no key).

    max_model_len: tokens of prompt and answer together; of a model with an encoder, tokens of the prompt, and of the
    decoder with its first one (None: as many as the model has positions). defaults: where sampling options that a
    request leaves out come from: "auto" is the checkpoint's generation config, as `generate` has it; "vllm" is OpenAI's
    values, that is sampling at temperature 1. chat_template: Jinja text in place of the tokenizer's. response_template:
    where an answer's reasoning and tool calls stand, in transformers' format, in place of the tokenizer's. admin_key:
    for the routes that change the server (None: they are off). weights_folders: from which /update_weights reads.
    priorities: requests may have one. hosts: without keys,
    the names that a request's Host header may have besides addresses and "localhost" (None: any). media_hosts:
    from which images, videos and audio are fetched: names, with a port where it is not the scheme's own (empty: nothing
    is fetched). private_media_hosts: likewise, though they have private addresses. logits_processors: names of the
    processors that requests may have, each with its class as module:Class.
    """

    names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_model_len: int | None = None
    defaults: DefaultsFrom = "auto"
    chat_template: str | None = None
    response_template: dict[str, Any] | None = None
    admin_key: str | None = None
    weights_folders: tuple[str, ...] = ()
    priorities: bool = False
    hosts: tuple[str, ...] | None = ()
    media_hosts: tuple[str, ...] = ()
    private_media_hosts: tuple[str, ...] = ()
    logits_processors: tuple[tuple[str, str], ...] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ValueError(f"names={self.names!r}: the served model needs a name")
        for key in self.api_keys:
            _check_key("an API key", key)
        if self.admin_key is not None:
            _check_key("the admin key", self.admin_key)
            if self.admin_key in self.api_keys:
                raise ValueError("the admin key is an API key too; give it to those who may change the server only")
        for folder in self.weights_folders:
            if self.admin_key is None or not Path(folder).is_dir():
                wrong = (
                    "is no folder"
                    if self.admin_key is not None
                    else "needs --admin-key too, which /update_weights asks for"
                )
                raise ValueError(f"--weights-folder {folder} {wrong}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len}: at least 2 tokens are needed")
        if self.defaults not in ("auto", "vllm"):
            raise ValueError(f"defaults={self.defaults!r}: use 'auto' or 'vllm'")
        for host in (*self.media_hosts, *self.private_media_hosts):
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is no host for media; write a name such as example.org or example.org:8080")


_HOST = re.compile(r"([a-z0-9-]+\.)*[a-z0-9-]+(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")


def _check_key(what: str, key: str) -> None:
    if not key.strip():
        raise ValueError(f"{what} is empty; leave it out, or give one that cannot be guessed")
    # Clients could not send it: headers are ASCII, and white space around a value is dropped.
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError(
            f"{what} has spaces around it, or characters that no header can have; use ASCII letters, digits"
        )


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches the host; False for any name but localhost."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, api_keys: tuple[str, ...], *, allow_no_key: bool) -> None:
    """Raise ValueError for a server that others can reach and that asks for no key."""
    if api_keys or allow_no_key or is_loopback(host):
        return
    raise ValueError(
        f"--host {host} lets other machines use this server without a key; add --api-key, or --allow-no-key if "
        "something in front of the server checks who asks"
    )
