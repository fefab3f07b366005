"""Images, videos and sound in prompts: the features that take the place of placeholder tokens, and positions.

A model of transformers takes features that were computed before (`mm_encoder_outputs`), in the order of the
placeholders in its row of tokens. So a packed step gets those of its own tokens. Knows models and tensors; never block
tables.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_paged.errors import UnsupportedModelError
from hf_paged.model.overrides import Override, Overrides, Patch
from hf_paged.model.spans import Span, reach_of, spans_of, types_of

KINDS = ("image", "video", "audio")
ENCODED = "mm_encoder_outputs"
TYPES = ("token_type_ids", "mm_token_type_ids")
_ARGUMENTS = frozenset({ENCODED, *TYPES, "video_second_per_grid", "second_per_grid_ts"})


@dataclass(frozen=True, slots=True)
class Features:
    """Of the placeholders of one kind in a prompt, in their order.

    pooled [num_placeholders, hidden_size]. deep: further features of the same shape, for several layers (None: the
    model has none). in_list: whether the model expects a list of tensors, and not one. record: the class of its output.
    argument: the argument of the model's forward in whose place they are given (None: `mm_encoder_outputs`).
    """

    pooled: torch.Tensor
    deep: list[torch.Tensor] | None
    in_list: bool
    record: type
    argument: str | None = None

    def rows(self, start: int, stop: int) -> Features:
        deep = None if self.deep is None else [layer[start:stop] for layer in self.deep]
        return replace(self, pooled=self.pooled[start:stop], deep=deep)

    def output(self) -> Any:
        """What the model takes."""
        fields: dict[str, Any] = {"pooler_output": self._shaped(self.pooled)}
        if self.deep is not None:
            fields["deepstack_features"] = [self._shaped(layer) for layer in self.deep]
        if self.argument is not None:  # some models read sound from there (Qwen2.5-Omni)
            fields["last_hidden_state"] = fields["pooler_output"]
        return self.record(**fields)

    def _shaped(self, rows: torch.Tensor) -> Any:
        return [rows] if self.in_list else rows[None]


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


class Media:
    """The images, videos and sound of one prompt.

    inputs: the tensors that the processor has made of them. places: the positions of the placeholders of each kind in
    the prompt, in ascending order. `encoded` is set when the model's encoders have run.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], places: dict[str, list[int]]) -> None:
        self.inputs = dict(inputs)
        self.places = places
        self.encoded: Encoded | None = None

    @property
    def delta(self) -> int:
        assert self.encoded is not None
        return self.encoded.delta

    @property
    def num_placeholders(self) -> int:
        return sum(map(len, self.places.values()))

    def keyed(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens with the keys of the media in the place of placeholders."""
        assert self.encoded is not None
        keyed = list(token_ids)
        for place, key in self.encoded.keys.items():
            keyed[place] = key
        return keyed

    def undivided(self, start: int, count: int) -> int:
        """How many tokens from `start` on, at most `count`, end before or behind a run, and not within one."""
        assert self.encoded is not None
        for first, last in self.encoded.spans or ():
            if first < start + count <= last:
                return max(first - start, 0)
        return count

    @property
    def longest_run(self) -> int:
        """Tokens that one step must compute together."""
        assert self.encoded is not None
        return max((last - first + 1 for first, last in self.encoded.spans or ()), default=1)

    def part(self, start: int, stop: int) -> MediaPart:
        """What a forward of the prompt's tokens from `start` to `stop` takes."""
        assert self.encoded is not None
        features = {}
        for kind, places in self.places.items():
            first = sum(place < start for place in places)
            count = sum(place < stop for place in places) - first
            if count:
                features[kind] = self.encoded.features[kind].rows(first, first + count)
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
    """Of one sequence in a step: the prompt's tokens from `start` to `stop`, the features among them, their positions
    int64 [k, stop - start] (None: their indices), their types [stop - start] by name, and the last position int32
    [stop - start] that each attends to (None: its own)."""

    start: int
    stop: int
    features: dict[str, Features]
    positions: torch.Tensor | None
    types: dict[str, torch.Tensor]
    reach: np.ndarray | None


def step_arguments(parts: Sequence[MediaPart]) -> dict[str, Any]:
    """What the model's forward gets beside the tokens of these sequences, which are one row in this order."""
    kinds = [kind for kind in KINDS if any(kind in part.features for part in parts)]
    arguments: dict[str, Any] = {}
    for kind in kinds:
        features = joined([part.features[kind] for part in parts if kind in part.features])
        if features.argument is None:
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


def reach_of_step(parts: Sequence[MediaPart]) -> np.ndarray | None:
    """int32 [num_tokens] of these sequences, which are one row in this order; None: no token attends to a later one."""
    found = [part.reach for part in parts if part.reach is not None]
    assert len(found) in (0, len(parts))  # it depends on the model alone
    return np.concatenate(found) if found else None


def _positions(part: MediaPart, count: int, device: torch.device) -> torch.Tensor:
    if part.positions is not None:
        return part.positions
    return torch.arange(part.start, part.stop, dtype=torch.int64, device=device).expand(count, -1)


def placeholders(model: Any, prompt: Sequence[int]) -> dict[str, list[int]]:
    """The positions of the placeholders of each kind in a prompt that has some."""
    places = {}
    for kind in KINDS:
        token = placeholder_of(model, kind)
        if token is not None and (own := [place for place, each in enumerate(prompt) if each == token]):
            places[kind] = own
    return places


def placeholder_of(model: Any, kind: str) -> int | None:
    """The token in the place of an image, a video or a sound; None if the config names none."""
    for name in (f"{kind}_token_id", f"{kind}_token_index"):
        token = getattr(model.config, name, None)
        if isinstance(token, int):
            return token
    return None


def takes_media(model: Any) -> bool:
    """Whether the model's forward takes features that were computed before, or asks `get_audio_features` for them."""
    return _takes_features(getattr(type(model), "forward", None)) or _sound_argument(model) is not None


def takes_images(model: Any) -> bool:
    """Whether the model's forward takes the features of images."""
    return _takes_features(getattr(type(model), "forward", None)) and hasattr(model.base_model, "get_image_features")


@functools.lru_cache(maxsize=64)
def _takes_features(forward: Any) -> bool:
    return forward is not None and ENCODED in inspect.signature(forward).parameters


def _sound_argument(model: Any) -> str | None:
    """The argument of the forward that `get_audio_features` encodes; None if the model hears nothing in this way, or
    its features depend on the prompt (`input_ids`) or are drawn at random (`sample`)."""
    return _sound_argument_of(getattr(type(model.base_model), "get_audio_features", None))


@functools.lru_cache(maxsize=64)
def _sound_argument_of(function: Any) -> str | None:
    names = () if function is None else inspect.signature(function).parameters
    if "input_ids" in names or "sample" in names:
        return None
    return next((name for name in names if name in SOUNDS), None)


SOUNDS = ("input_features", "input_values")
_CARRIED = "_hf_paged_features"


def _carrier(features: Features) -> torch.Tensor:
    """In a step, what the forward gets in the place of a sound and passes to `get_audio_features`."""
    carrier = features.pooled.new_zeros(1)
    setattr(carrier, _CARRIED, [features.output()])
    return carrier


def check_heard(model: Any, arguments: Mapping[str, Any]) -> None:
    """After a forward with `step_arguments`: raises UnsupportedModelError if it has not asked for the sound in them."""
    if any(getattr(given, _CARRIED, None) for given in arguments.values()):
        raise UnsupportedModelError(f"{type(model).__name__} encodes sound in a way of its own")


def sound_overrides(model: Any) -> tuple[Override, ...]:
    """In a packed step, `get_audio_features` returns the features that its argument carries."""
    owners = [module for module in model.modules() if hasattr(type(module), "get_audio_features")]
    patches = (Patch(vars(owner), "get_audio_features", functools.partial(_heard, owner)) for owner in owners)
    return (Overrides(patches),) if owners else ()


def _heard(owner: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `get_audio_features`, which other threads may call outside of a packed step."""
    for given in (*args, *kwargs.values()):
        if hasattr(given, _CARRIED):
            return getattr(given, _CARRIED).pop()
    return type(owner).get_audio_features(owner, *args, **kwargs)


def arguments_of(model: Any) -> frozenset[str]:
    """The arguments of its forward that `MediaDecoder` understands in a call of `generate`: what transformers makes of
    images and videos, and sound."""
    if not takes_media(model):
        return frozenset()
    if _sound_argument(model) is None:
        return _ARGUMENTS
    return _ARGUMENTS | {*inspect.signature(model.base_model.get_audio_features).parameters, _MASK}


def hear(model: Any, inputs: Mapping[str, Any], step: int) -> dict[str, Features]:
    """The features of the sound among the arguments of a forward, of every `step`-th row; empty: there is none."""
    argument = _sound_argument(model)
    if argument is None or inputs.get(argument) is None:
        return {}
    heard = {name: value for name, value in _of_encoder(model, "audio", inputs).items() if torch.is_tensor(value)}
    return {"audio": _sound_features(model, {name: value[::step] for name, value in heard.items()})}


def _units(model: Any, inputs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The inputs of the encoders, image by image (or by the parts in which a processor has cut one) where their tensors
    show where each ends; those of videos and sound are one unit."""
    own = _of_encoder(model, "image", inputs)
    rest = {name: value for kind in KINDS[1:] for name, value in _of_encoder(model, kind, inputs).items()}
    rest = {name: value for name, value in rest.items() if name not in own}
    images = [own] if own else []
    grids = own.get("image_grid_thw")
    if grids is not None and "pixel_values" in own and set(own) == {"pixel_values", "image_grid_thw"}:
        patches = own["pixel_values"].split(grids.prod(dim=1).tolist())
        images = [{"pixel_values": p, "image_grid_thw": g[None]} for p, g in zip(patches, grids)]
    elif grids is None and len({len(value) for value in own.values()}) == 1:
        count = len(next(iter(own.values())))
        images = [{name: value[i : i + 1] for name, value in own.items()} for i in range(count)]
    return [*images, *([rest] if rest else [])]


def _of_encoder(model: Any, kind: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    function = getattr(model.base_model, f"get_{kind}_features", None)
    names = set() if function is None else set(inspect.signature(function).parameters)
    if kind == "audio" and names:
        names.add(_MASK)
    return {name: value for name, value in inputs.items() if name in names}


_MASK = "input_features_mask"


def _features_of(model: Any, unit: Mapping[str, torch.Tensor]) -> dict[str, Features]:
    """Run the model's own encoders."""
    outputs = model._prepare_multimodal_encoder_kwargs_for_generation(dict(unit))["mm_encoder_outputs"]
    found = {kind: features_of(output) for kind, output in outputs.items()}
    if "audio" not in found and (heard := _of_encoder(model, "audio", unit)):
        found["audio"] = _sound_features(model, heard)
    return found


def _sound_features(model: Any, heard: dict[str, torch.Tensor]) -> Features:
    """The features of sound. Where the encoder takes no mask, the mask of the inputs is that of its features."""
    encode = model.base_model.get_audio_features
    mask = None if _MASK in inspect.signature(encode).parameters else heard.pop(_MASK, None)
    output = encode(**heard, return_dict=True)
    features = replace(features_of(output), argument=_sound_argument(model))
    return features if mask is None else replace(features, pooled=output.pooler_output[mask.bool()])


def positions_of(model: Any, prompt: Sequence[int], media: Media) -> tuple[torch.Tensor | None, int]:
    """The positions [k, length] of the prompt's tokens, and what is added to the index of later ones: see `Encoded`."""
    like = next(iter(media.inputs.values()))
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=like.device)
    core = model.base_model
    former = getattr(core, "rope_deltas", None)
    try:
        positions = model._prepare_position_ids_for_generation(
            ids, {"attention_mask": torch.ones_like(ids), **media.inputs}
        )
        delta = getattr(core, "rope_deltas", None)
    finally:
        if hasattr(core, "rope_deltas"):
            core.rope_deltas = former
    if positions.ndim < 3 or delta is None:
        return None, 0
    if not goes_on_evenly(positions):
        raise ValueError(
            "the prompt ends within an image or a video, after whose last token the model counts rows and columns from "
            "different positions; end it with a token of text"
        )
    return positions[:, 0], _later(positions[:, 0])


def goes_on_evenly(positions: torch.Tensor) -> bool:
    """Whether the tokens after these, which count on from the last one, have one position each. positions [k, num_rows,
    length], as `generate` has them: the index of a token, if k is 4, and the positions in time, height and width."""
    last = positions[-3:, :, -1]
    return bool((last == last[0]).all())


def _later(positions: torch.Tensor) -> int:
    """What is added to the index of a later token to get its position. positions [k, length]."""
    return int(positions[-1, -1]) + 1 - positions.shape[1]


def media_of_row(
    model: Any,
    ids: Sequence[int],
    features: Mapping[str, Features],
    done: dict[str, int],
    positions: torch.Tensor | None,
    types: Mapping[str, torch.Tensor],
) -> Media:
    """What a row of a batch shows, whose images and videos transformers has encoded. ids: its tokens, without padding.
    features: of the whole batch, of which the rows before this one have `done`. positions: see `Encoded`. types: of
    tokens, by name."""
    found = placeholders(model, ids)
    if set(features) == {"video"} and set(found) == {"image"}:
        found = {"video": found["image"]}  # as in `MediaStore.encode`
    media = Media({}, {kind: places for kind, places in found.items() if kind in features})
    own: dict[str, Features] = {}
    keys: dict[int, int] = {}
    for kind, places in media.places.items():
        first, done[kind] = done[kind], done[kind] + len(places)
        own[kind] = features[kind].rows(first, done[kind])
        rows = [own[kind].pooled, *(own[kind].deep or ())]
        digest = _digest({str(number): tensor for number, tensor in enumerate(rows)})
        keys.update({place: _key(each) for place, each in zip(places, _numbered(digest, len(places)))})
    known = types_of(model, types)
    spans = spans_of(model, known, len(ids))
    keys |= _keys_of_runs(ids, keys, spans or ())
    keys |= _keys_of_positions(ids, keys, positions)
    delta = 0 if positions is None else _later(positions)
    media.encoded = Encoded(own, keys, positions, delta, known, spans)
    return media


class MediaStore:
    """The features of the media that were used last, by their contents, within `MAX_BYTES`."""

    MAX_BYTES = 1 << 28

    def __init__(self) -> None:
        self.num_encoded = self.num_hits = 0  # images, and other units
        self._kept: OrderedDict[tuple[bytes, Hashable], dict[str, Features]] = OrderedDict()

    def encode(self, model: Any, prompt: Sequence[int], media: Media, computed_with: Hashable) -> Encoded:
        """computed_with: another value for other weights or adapters. Raises ValueError if the numbers of features and
        of placeholders differ, and what the model raises."""
        found: dict[str, list[Features]] = {}
        digests: dict[str, list[bytes]] = {}  # one for each feature
        for unit in _units(model, media.inputs):
            digest = _digest(unit)
            for kind, features in self._unit(model, unit, (digest, computed_with)).items():
                found.setdefault(kind, []).append(features)
                digests.setdefault(kind, []).extend(_numbered(digest, len(features.pooled)))
        if set(digests) == {"video"} and set(media.places) == {"image"}:
            media.places = {"video": media.places["image"]}  # GLM-4.1V writes the image token for videos too
        _check_counts({kind: len(own) for kind, own in digests.items()}, media.places)
        keys = {
            place: _key(digest) for kind, places in media.places.items() for place, digest in zip(places, digests[kind])
        }
        types = types_of(model, media.inputs)
        spans = spans_of(model, types, len(prompt))
        keys |= _keys_of_runs(prompt, keys, spans or ())
        positions, delta = positions_of(model, prompt, media)
        keys |= _keys_of_positions(prompt, keys, positions)
        pooled = {kind: joined(own) for kind, own in found.items()}
        return Encoded(pooled, keys, positions, delta, types, spans)

    def clear(self) -> None:
        self._kept.clear()

    def move(self, former: Hashable, now: Hashable) -> None:
        """What was `computed_with` the former value is as good with the other one."""
        kept = [(digest, now if each == former else each, own) for (digest, each), own in self._kept.items()]
        self._kept = OrderedDict(((digest, each), own) for digest, each, own in kept)

    def _unit(self, model: Any, unit: Mapping[str, torch.Tensor], key: tuple[bytes, Hashable]) -> dict[str, Features]:
        features = self._kept.pop(key, None)
        if features is None:
            self.num_encoded += 1
            features = _features_of(model, unit)
        else:
            self.num_hits += 1
        self._kept[key] = features
        while len(self._kept) > 1 and sum(map(_num_bytes, self._kept.values())) > self.MAX_BYTES:
            self._kept.popitem(last=False)
        return features


def _keys_of_runs(prompt: Sequence[int], keys: Mapping[int, int], spans: Sequence[Span]) -> dict[int, int]:
    """Of tokens that attend to later ones: their K/V depends on all tokens of their run."""
    found = {}
    for first, last in spans:
        digest = hashlib.sha256()
        for place in range(first, last + 1):
            digest.update(repr((place in keys, keys.get(place, prompt[place]))).encode())
        own = _numbered(digest.digest(), last + 1 - first)
        found.update({place: _key(each) for place, each in enumerate(own, first)})
    return found


def _keys_of_positions(
    prompt: Sequence[int], keys: Mapping[int, int], positions: torch.Tensor | None
) -> dict[int, int]:
    """Of tokens whose position is not their index, on which their K/V depends too: of equal frames of videos it is
    another at another rate."""
    found = {}
    for place, own in enumerate([] if positions is None else positions[-3:].T.tolist()):
        if own != [place] * 3:
            told = repr((place in keys, keys.get(place, prompt[place]), own))
            found[place] = _key(hashlib.sha256(told.encode()).digest())
    return found


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def _numbered(digest: bytes, count: int) -> list[bytes]:
    return [hashlib.sha256(digest + number.to_bytes(8, "big")).digest() for number in range(count)]


def _check_counts(counts: Mapping[str, int], places: Mapping[str, list[int]]) -> None:
    for kind in KINDS:
        wanted, given = len(places.get(kind, ())), counts.get(kind, 0)
        if wanted == given:
            continue
        if not given:
            raise ValueError(f"the prompt has placeholders of the {kind} token, but inputs has no {kind}")
        if not wanted:
            raise ValueError(f"inputs has {kind} features, but the prompt has no placeholder of the {kind} token")
        raise ValueError(
            f"the prompt has {wanted} placeholders of the {kind} token, but the {kind} has {given} features; use the "
            "model's processor for both"
        )


def _num_bytes(features: Mapping[str, Features]) -> int:
    return sum(tensor.nbytes for own in features.values() for tensor in (own.pooled, *(own.deep or ())))


def features_of(output: Any) -> Features:
    pooled, deep = output.pooler_output, getattr(output, "deepstack_features", None)
    layers = None if deep is None else [_flat(layer) for layer in deep]
    return Features(_flat(pooled), layers, not torch.is_tensor(pooled), type(output))


def _flat(features: Any) -> torch.Tensor:
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def _digest(inputs: Mapping[str, torch.Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name, tensor in sorted(inputs.items()):
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
