"""Images, videos and audio in prompts: the features that take the place of placeholder tokens, and positions.

A model of transformers takes features that were computed before (`mm_encoder_outputs`), in the order of the
placeholders in its row of tokens. So a packed step gets those of its own tokens. Knows models and tensors; never block
tables.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from hf_paged.annotations import Model
from hf_paged.errors import LayersChanged, UnsupportedModelError
from hf_paged.features.media.inner_encoders import audio_features, encodes_inside
from hf_paged.features.media.spans import Span, reach_of
from hf_paged.model.overrides import Override, Overrides, Patch
from hf_paged.model.packed import Beside
from hf_paged.sockets import Attachment, Parts

KINDS = ("image", "video", "audio")
ENCODED = "mm_encoder_outputs"
EMBEDDED = "hf_paged_embedded"
"""In place of an argument: features that stand among the embeddings of a step's tokens."""


@dataclass(frozen=True, slots=True)
class Features:
    """Features of all placeholders of one kind in a prompt, in their order.

    pooled [num_placeholders, size]. deep: further features of the same shape, for several layers (None: the model has
    none). shape: whether the model expects a list of tensors, one tensor of this shape, or one with a batch before it.
    record: the class of its output. argument: the argument of the model's forward in whose place they are given (None:
    `mm_encoder_outputs`). field: of the record, where the model reads `pooled` (None: it reads `deep` alone). layers:
    which layers get `deep` (None: the model knows).
    """

    pooled: torch.Tensor
    deep: list[torch.Tensor] | None
    shape: Literal["list", "rows", "batch"]
    record: type
    argument: str | None = None
    field: str | None = "pooler_output"
    layers: tuple[int, ...] | None = None

    def rows(self, start: int, stop: int) -> Features:
        deep = None if self.deep is None else [layer[start:stop] for layer in self.deep]
        return replace(self, pooled=self.pooled[start:stop], deep=deep)

    def copy(self) -> Features:
        deep = None if self.deep is None else [layer.clone() for layer in self.deep]
        return replace(self, pooled=self.pooled.clone(), deep=deep)

    def output(self) -> Any:
        """Return the features in the record that the model expects from its encoder."""
        fields: dict[str, Any] = {} if self.field is None else {self.field: self._shaped(self.pooled)}
        if self.deep is not None:
            deep: Sequence[Any] = [self._shaped(layer) for layer in self.deep]
            fields["deepstack_features"] = deep if self.layers is None else list(zip(self.layers, deep))
        # Some models read audio from there (Qwen2.5-Omni).
        if self.argument is not None:
            fields["last_hidden_state"] = self._shaped(self.pooled)
        return self.record(**fields)

    def _shaped(self, rows: torch.Tensor) -> Any:
        return {"list": [rows], "rows": rows, "batch": rows[None]}[self.shape]


def joined(parts: Sequence[Features]) -> Features:
    """The features of several sequences of a step."""
    first = parts[0]
    if len(parts) == 1:
        return first
    deep = None
    if first.deep is not None:
        deep = [torch.cat(list(layers)) for layers in zip(*(part.deep or () for part in parts))]
    return replace(first, pooled=torch.cat([part.pooled for part in parts]), deep=deep)


@dataclass(frozen=True, slots=True)
class Encoded:
    """features: by kind. keys: by the index of a token of the prompt, the number that is compared in its place: another
    one for other media or positions. positions int64 [k, length] of the prompt's tokens, where the model counts
    otherwise than by ones (None: it does not). delta: what is added to the index of a later token to get its position.
    types: what the model's masks depend on (see `spans.types_of`). spans: the runs of tokens that attend to one another
    both ways (None: there are no types)."""

    features: dict[str, Features]
    keys: dict[int, int]
    positions: torch.Tensor | None
    delta: int
    types: dict[str, torch.Tensor]
    spans: list[Span] | None

    @property
    def longest_run(self) -> int:
        """Tokens that one step must compute together."""
        return max((last - first + 1 for first, last in self.spans or ()), default=1)


# Each call of `keyed` asks again for those of all tokens before.
@functools.lru_cache(maxsize=1 << 16)
def key_at(is_medium: bool, key: int, position: tuple[int, ...]) -> int:
    """The number that is compared in the place of a token whose position is not its index. key: the token, or the key
    of what a placeholder shows."""
    return key_of(hashlib.sha256(repr((is_medium, key, position)).encode()).digest())


def key_of(digest: bytes) -> int:
    """The number that is compared in the place of a token."""
    # 64 bits, as many as a token in the digests of blocks.
    return int.from_bytes(digest[:8], "big", signed=True)


@dataclass(eq=False, slots=True)
class Unit:
    """Media that are encoded in one piece: an image, or all videos and audio of a prompt.

    num_placeholders: about as many features as it has. digest: of its inputs.
    """

    inputs: dict[str, torch.Tensor]
    digest: bytes
    num_placeholders: int
    features: dict[str, Features] | None = None


class Media(Attachment):
    """The images, videos and audio of one prompt.

    inputs: the tensors that the processor has made of them. places: the positions of the placeholders of each kind in
    the prompt, in ascending order. salt: what is kept of prompts with another one is not used. `encoded` is set when
    the model's encoders have run for all `units`, which are those of the inputs if the encoders are `encoded_with` the
    value that they have now.
    """

    reads_prompt = True  # a later token may look like a placeholder

    def __init__(
        self, inputs: Mapping[str, torch.Tensor], places: dict[str, list[int]], salt: str | None = None
    ) -> None:
        self.inputs = dict(inputs)
        self.places = places
        self.salt = salt
        self.units: list[Unit] = []
        self.encoded_with: Hashable = None
        self.encoded: Encoded | None = None

    @property
    def num_missing(self) -> int:
        """Placeholders whose features are to be computed."""
        if not self.units:
            return self.num_placeholders
        return sum(unit.num_placeholders for unit in self.units if unit.features is None)

    @property
    def delta(self) -> int:
        assert self.encoded is not None
        return self.encoded.delta

    @property
    def num_placeholders(self) -> int:
        return sum(map(len, self.places.values()))

    def drop_features(self) -> None:
        """No later step reads the prompt, unless `encoded` is set to None before: then the encoders run again."""
        if self.encoded is not None:
            self.encoded.features.clear()
            for unit in self.units:
                unit.features = None

    def keyed(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens of the prompt and of an answer, with the keys that are compared in their place."""
        assert self.encoded is not None
        keyed = list(token_ids)
        for place, key in self.encoded.keys.items():
            keyed[place] = key
        if self.encoded.positions is not None and (delta := self.delta):
            start = self.encoded.positions.shape[1]
            keyed[start:] = [key_at(False, keyed[i], (i + delta,) * 3) for i in range(start, len(keyed))]
        return keyed

    def undivided(self, start: int, count: int) -> int:
        """Return the largest number of tokens from `start`, at most `count`, that does not cut a run of tokens."""
        assert self.encoded is not None
        for first, last in self.encoded.spans or ():
            if first < start + count <= last:
                return max(first - start, 0)
        return count

    def part(self, start: int, stop: int) -> MediaPart:
        """Return the features, positions and types for a forward of the prompt's tokens from `start` to `stop`."""
        assert self.encoded is not None
        features = {}
        for kind, places in self.places.items():
            first, last = bisect_left(places, start), bisect_left(places, stop)
            if first < last:
                features[kind] = self.encoded.features[kind].rows(first, last)
        positions = self.encoded.positions
        spans = self.encoded.spans
        return MediaPart(
            start,
            stop,
            features,
            None if positions is None else positions[:, start:stop],
            {name: types[0, start:stop] for name, types in self.encoded.types.items()},
            None if spans is None else reach_of(spans, start, stop),
        )


@dataclass(frozen=True, slots=True)
class MediaPart:
    """The prompt's tokens from `start` to `stop` that one sequence computes in a step, and their media.

    features: by kind, of the placeholders among them. positions: int64 [k, stop - start] (None: their indices). types:
    [stop - start] by name. reach: int32 [stop - start], the last position that each attends to (None: its own).
    """

    start: int
    stop: int
    features: dict[str, Features]
    positions: torch.Tensor | None
    types: dict[str, torch.Tensor]
    reach: np.ndarray | None

    @property
    def attends_both_ways(self) -> bool:
        """Return True if some of its tokens attend to later tokens."""
        return self.reach is not None and bool((self.reach > np.arange(self.start, self.stop)).any())


def step_arguments(parts: Sequence[MediaPart]) -> dict[str, Any]:
    """Make the forward's media arguments for these sequences, packed into one row in this order."""
    kinds = [kind for kind in KINDS if any(kind in part.features for part in parts)]
    arguments: dict[str, Any] = {}
    for kind in kinds:
        features = joined([part.features[kind] for part in parts if kind in part.features])
        if features.argument == EMBEDDED:
            arguments[EMBEDDED] = features.pooled
        elif features.argument is None:
            arguments.setdefault("mm_encoder_outputs", {})[kind] = features.output()
        else:
            arguments[features.argument] = _carrier(features)
    counted = next((part.positions for part in parts if part.positions is not None), None)
    if counted is not None:
        rows = [_positions(part, len(counted), counted.device) for part in parts]
        arguments["position_ids"] = torch.cat(rows, dim=1)[:, None]
    for name in parts[0].types:
        arguments[name] = torch.cat([part.types[name] for part in parts])[None]
    return arguments


def show(parts: Parts, media: Sequence[Media | None]) -> None:
    """Give each part of a run its media, or None."""
    parts.extra["media"] = media
    if any(media):
        parts.extra["beside"] = functools.partial(_shown_in_step, parts)


def _shown_in_step(parts: Parts, model: Model, compute: Callable[[Beside], torch.Tensor]) -> torch.Tensor:
    """The logits of a packed step of prompts. Raises UnsupportedModelError."""
    ends = map(int.__add__, parts.starts, parts.lengths)
    shown = [each.part(start, end) for each, start, end in zip(parts.extra["media"], parts.starts, ends)]
    arguments = step_arguments(shown)
    given = functools.partial(embedded, model, beside=arguments)
    try:
        logits = compute(Beside(given, reach_of_step(shown), sound_overrides(model)))
        check_heard(model, arguments)
    except LayersChanged:
        raise
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"with images, videos or audio: {error}; use model.generate without a paged cache"
        ) from error
    return logits


def reach_of_step(parts: Sequence[MediaPart]) -> np.ndarray | None:
    """int32 [num_tokens] of these sequences, which are one row in this order; None: no token attends to a later one."""
    found = [part.reach for part in parts if part.reach is not None]
    assert len(found) in (0, len(parts))  # it depends on the model alone
    return np.concatenate(found) if found else None


def _positions(part: MediaPart, count: int, device: torch.device) -> torch.Tensor:
    if part.positions is not None:
        return part.positions
    return torch.arange(part.start, part.stop, dtype=torch.int64, device=device).expand(count, -1)


def placeholders(model: Model, prompt: Sequence[int]) -> dict[str, list[int]]:
    """The positions of the placeholders of each kind in a prompt that has some."""
    places = {}
    for kind in KINDS:
        token = placeholder_of(model, kind)
        if token is not None and (own := [place for place, each in enumerate(prompt) if each == token]):
            places[kind] = own
    return places


def placeholder_of(model: Model, kind: str) -> int | None:
    """The token in the place of an image, a video or an audio clip; None if the config names none."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        token = getattr(model.config, name, None)
        if isinstance(token, int):
            return token
    return None


def takes_media(model: Model) -> bool:
    """Return True if the model's forward takes features computed before, or asks `get_audio_features` for audio."""
    return _takes_features(getattr(type(model), "forward", None)) or sound_argument(model) is not None


def takes_images(model: Model) -> bool:
    """Return True if the model's forward takes the features of images."""
    return _takes_features(getattr(type(model), "forward", None)) and hasattr(model.base_model, "get_image_features")


@functools.lru_cache(maxsize=64)
def _takes_features(forward: Any) -> bool:
    return forward is not None and ENCODED in inspect.signature(forward).parameters


def sound_encoder(model: Model) -> Callable[..., Any] | None:
    """Return the audio encoder: `get_audio_features`, or ours for a model that encodes audio inside its forward."""
    core = model.base_model
    if encodes_inside(core):
        return functools.partial(audio_features, core)
    own: Callable[..., Any] | None = getattr(core, "get_audio_features", None)
    return own


def sound_argument(model: Model) -> str | None:
    """The argument of the forward that `sound_encoder` encodes; None if the model hears nothing in this way, or its
    features depend on the prompt (`input_ids`) or are drawn at random (`sample`)."""
    core = model.base_model
    return _sound_argument_of(
        audio_features if encodes_inside(core) else getattr(type(core), "get_audio_features", None)
    )


def place_of_sound(model: Model) -> str | None:
    """The argument of the forward in whose place a step gives the features of audio."""
    return EMBEDDED if encodes_inside(model.base_model) else sound_argument(model)


def embedded(model: Model, input_ids: torch.Tensor, beside: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put audio features in the place of placeholder embeddings, for models that encode audio only in their forward.

    For other models, `beside` (arguments besides the tokens) is returned as it is. input_ids: int64 [1, num_tokens].
    """
    if EMBEDDED not in beside:
        return beside
    embeddings = model.get_input_embeddings()(input_ids)
    is_sound = torch.eq(input_ids, placeholder_of(model, "audio")).unsqueeze(-1)  # type: ignore[arg-type]
    features = beside[EMBEDDED].to(embeddings)
    rest = {name: value for name, value in beside.items() if name != EMBEDDED}
    return {**rest, "inputs_embeds": embeddings.masked_scatter(is_sound, features)}


@functools.lru_cache(maxsize=64)
def _sound_argument_of(function: Any) -> str | None:
    names = () if function is None else inspect.signature(function).parameters
    if "input_ids" in names or "sample" in names:
        return None
    return next((name for name in names if name in AUDIO_INPUTS), None)


AUDIO_INPUTS = ("input_features", "input_values")
_CARRIED = "_hf_paged_features"


def _carrier(features: Features) -> torch.Tensor:
    """In a step, what the forward gets in the place of audio and passes to `get_audio_features`."""
    carrier = features.pooled.new_zeros(1)
    setattr(carrier, _CARRIED, [features.output()])
    return carrier


def check_heard(model: Model, arguments: Mapping[str, Any]) -> None:
    """After a forward with `step_arguments`: raises UnsupportedModelError if it has not asked for the audio in them."""
    if any(getattr(given, _CARRIED, None) for given in arguments.values()):
        raise UnsupportedModelError(f"{type(model).__name__} encodes audio in a way of its own")


def sound_overrides(model: Model) -> tuple[Override, ...]:
    """In a packed step, `get_audio_features` returns the features that its argument carries."""
    owners = [module for module in model.modules() if hasattr(type(module), "get_audio_features")]
    patches = (Patch(vars(owner), "get_audio_features", functools.partial(_heard, owner)) for owner in owners)
    return (Overrides(patches),) if owners else ()


def _heard(owner: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `get_audio_features`, which other threads may call outside of a packed step."""
    for given in (*args, *kwargs.values()):
        if hasattr(given, _CARRIED):
            # Taken out, so that what was not asked for shows in `check_heard`.
            return getattr(given, _CARRIED).pop()
    return type(owner).get_audio_features(owner, *args, **kwargs)
