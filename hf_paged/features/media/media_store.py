"""Features of the images, videos and audio in prompts, stored by content, with keys that tell them apart.

Knows models and tensors; never block tables.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

import torch

from hf_paged.annotations import Model
from hf_paged.errors import MediaError
from hf_paged.features.media.media import (
    KINDS,
    Encoded,
    Features,
    Media,
    Unit,
    joined,
    key_at,
    key_of,
    placeholders,
    show,
)
from hf_paged.features.media.media_batches import encoded_together
from hf_paged.features.media.media_encoders import of_encoder
from hf_paged.features.media.spans import Span, spans_of, types_of


def media_of_row(
    model: Model,
    ids: Sequence[int],
    features: Mapping[str, Features],
    done: dict[str, int],
    positions: torch.Tensor | None,
    types: Mapping[str, torch.Tensor],
) -> Media:
    """Assemble the media of one row of a batch from features that are encoded already.

    ids: its tokens, without padding. features: of the whole batch. done: how many the former rows have taken, by kind;
    those of this row are added. positions: see `Encoded`. types: of tokens, by name.
    """
    found = placeholders(model, ids)
    if set(features) == {"video"} and set(found) == {"image"}:
        # GLM-4.1V writes the image token for videos too.
        found = {"video": found["image"]}  # as in `MediaStore.encode`
    media = Media({}, {kind: places for kind, places in found.items() if kind in features})
    own: dict[str, Features] = {}
    keys: dict[int, int] = {}
    for kind, places in media.places.items():
        first, done[kind] = done[kind], done[kind] + len(places)
        own[kind] = features[kind].rows(first, done[kind])
        rows = [own[kind].pooled, *(own[kind].deep or ())]
        digest = _digest({str(number): tensor for number, tensor in enumerate(rows)})
        keys.update({place: key_of(each) for place, each in zip(places, _numbered(digest, len(places)))})
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
    show = staticmethod(show)

    def __init__(self) -> None:
        self.num_encoded = self.num_hits = 0  # images, and other units
        self._kept: OrderedDict[tuple[bytes, Hashable], dict[str, Features]] = OrderedDict()

    def encode(
        self,
        model: Model,
        asked: Sequence[Media],
        computed_with: Hashable,
        budget: int,
        spent: int = 0,
        *,
        alone: bool = False,
    ) -> tuple[int, dict[Unit, Exception]]:
        """Encode units of these media, in their order, until features for about `budget` placeholders are computed, of
        which `spent` are done, but one unit at least. Returns the number that are done then, and the units that failed.

        computed_with: another value for other weights or adapters. alone: each unit has a call of the encoder.
        """
        due: dict[bytes, list[Unit]] = {}  # those with the same contents
        # In the order of the requests, so that none is passed over for a smaller one.
        for unit in _missing(model, asked, computed_with):
            kept = self._kept.get((unit.digest, computed_with))
            if kept is not None:
                self._kept.move_to_end((unit.digest, computed_with))
                self.num_hits += 1
                unit.features = kept
            elif unit.digest in due:
                due[unit.digest].append(unit)
            # One unit at least, or a unit larger than the budget would wait for ever.
            elif spent and spent + unit.num_placeholders > budget:
                break
            else:
                spent += unit.num_placeholders
                due[unit.digest] = [unit]
        failed: dict[Unit, Exception] = {}
        for first, result in encoded_together(model, [alike[0] for alike in due.values()], alone=alone):
            alike = due[first.digest]
            if isinstance(result, Exception):
                failed.update(dict.fromkeys(alike, result))
                continue
            self.num_encoded += 1
            self.num_hits += len(alike) - 1
            for unit in alike:
                unit.features = result
            self._keep((first.digest, computed_with), result)
        return spent, failed

    def complete(self, model: Model, prompt: Sequence[int], media: Media) -> Encoded:
        """Join the features of a prompt whose units are all encoded.

        Raises MediaError if the numbers of features and of placeholders differ.
        """
        found: dict[str, list[Features]] = {}
        digests: dict[str, list[bytes]] = {}  # one for each feature
        for unit in media.units:
            for kind, features in (unit.features or {}).items():
                found.setdefault(kind, []).append(features)
                digests.setdefault(kind, []).extend(_numbered(kind.encode() + unit.digest, len(features.pooled)))
        if set(digests) == {"video"} and set(media.places) == {"image"}:
            # GLM-4.1V writes the image token for videos too.
            media.places = {"video": media.places["image"]}
        _check_counts({kind: len(own) for kind, own in digests.items()}, media.places)
        keys = {
            place: key_of(digest)
            for kind, places in media.places.items()
            for place, digest in zip(places, digests[kind])
        }
        types = types_of(model, media.inputs)
        spans = spans_of(model, types, len(prompt))
        # Runs first: positions are added to the keys of what tokens show.
        keys |= _keys_of_runs(prompt, keys, spans or ())
        positions, delta = positions_of(model, prompt, media)
        keys |= _keys_of_positions(prompt, keys, positions)
        pooled = {kind: joined(own) for kind, own in found.items()}
        return Encoded(pooled, keys, positions, delta, types, spans)

    def clear(self) -> None:
        self._kept.clear()

    def move(self, former: Hashable, now: Hashable) -> None:
        """Keep features that were `computed_with` the value `former` as valid for `now`."""
        kept = [(digest, now if each == former else each, own) for (digest, each), own in self._kept.items()]
        self._kept = OrderedDict(((digest, each), own) for digest, each, own in kept)

    def _keep(self, key: tuple[bytes, Hashable], features: dict[str, Features]) -> None:
        self._kept[key] = features
        # The last one stays in any case: its prompt is about to read it.
        while len(self._kept) > 1 and sum(map(_num_bytes, self._kept.values())) > self.MAX_BYTES:
            self._kept.popitem(last=False)


def _num_bytes(features: Mapping[str, Features]) -> int:
    return sum(tensor.nbytes for own in features.values() for tensor in (own.pooled, *(own.deep or ())))


def _missing(model: Model, asked: Sequence[Media], computed_with: Hashable) -> list[Unit]:
    """The units without features. What was computed with other weights or adapters is dropped, of all media: also of
    those for which the budget leaves nothing."""
    for media in asked:
        if not media.units or media.encoded_with != computed_with:
            media.units, media.encoded_with = _divided(model, media), computed_with
    return [unit for media in asked for unit in media.units if unit.features is None]


def _divided(model: Model, media: Media) -> list[Unit]:
    parts = _units(model, media.inputs)
    sizes = [sum(tensor.nbytes for tensor in part.values()) for part in parts]
    total = max(sum(sizes), 1)
    return [
        Unit(part, _digest(part, media.salt), -(-media.num_placeholders * n // total)) for part, n in zip(parts, sizes)
    ]


def _units(model: Model, inputs: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The inputs of the encoders, image by image (or by the parts in which a processor has cut one) where their tensors
    show where each ends; those of videos and audio are one unit."""
    own = of_encoder(model, "image", inputs)
    rest = {name: value for kind in KINDS[1:] for name, value in of_encoder(model, kind, inputs).items()}
    rest = {name: value for name, value in rest.items() if name not in own}
    try:
        images = _images(own)
    except (IndexError, RuntimeError, TypeError):  # of wrong shapes, for which the encoder has an error of its own
        images = [own]
    return [*images, *([rest] if rest else [])]


def _images(own: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    grids = own.get("image_grid_thw")
    if grids is not None and set(own) == {"pixel_values", "image_grid_thw"}:
        patches = own["pixel_values"].split(grids.prod(dim=1).tolist())
        return [{"pixel_values": p, "image_grid_thw": g[None]} for p, g in zip(patches, grids)]
    if grids is None and len({len(value) for value in own.values()}) == 1:
        count = len(next(iter(own.values())))
        return [{name: value[i : i + 1] for name, value in own.items()} for i in range(count)]
    return [own] if own else []


def positions_of(model: Model, prompt: Sequence[int], media: Media) -> tuple[torch.Tensor | None, int]:
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
            # A call of `generate` by others may count on it.
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
    """Return True if each later token has the same position in time, height and width, counted on from the last token.

    positions: [k, num_rows, length] as in `generate`: the index of a token, if k is 4, then time, height and width.
    """
    last = positions[-3:, :, -1]
    return bool((last == last[0]).all())


def _later(positions: torch.Tensor) -> int:
    """Return the offset from the index of a later token to its position. positions: [k, length]."""
    return int(positions[-1, -1]) + 1 - positions.shape[1]


def _keys_of_runs(prompt: Sequence[int], keys: Mapping[int, int], spans: Sequence[Span]) -> dict[int, int]:
    """Make keys for tokens that attend to later tokens: their K/V depends on their whole run."""
    found = {}
    for first, last in spans:
        digest = hashlib.sha256()
        for place in range(first, last + 1):
            digest.update(repr((place in keys, keys.get(place, prompt[place]))).encode())
        own = _numbered(digest.digest(), last + 1 - first)
        found.update({place: key_of(each) for place, each in enumerate(own, first)})
    return found


def _keys_of_positions(
    prompt: Sequence[int], keys: Mapping[int, int], positions: torch.Tensor | None
) -> dict[int, int]:
    """Make keys for tokens whose position is not their index: their K/V depends on the position too.

    Equal frames of a video, for example, have other positions at another frame rate.
    """
    found = {}
    for place, own in enumerate([] if positions is None else positions[-3:].T.tolist()):
        if own != [place] * 3:
            found[place] = key_at(place in keys, keys.get(place, prompt[place]), tuple(own))
    return found


def _numbered(digest: bytes, count: int) -> list[bytes]:
    return [hashlib.sha256(digest + number.to_bytes(8, "big")).digest() for number in range(count)]


def _check_counts(counts: Mapping[str, int], places: Mapping[str, list[int]]) -> None:
    for kind in KINDS:
        wanted, given = len(places.get(kind, ())), counts.get(kind, 0)
        if wanted == given:
            continue
        if not given:
            raise MediaError(f"the prompt has placeholders of the {kind} token, but inputs has no {kind}")
        if not wanted:
            raise MediaError(f"inputs has {kind} features, but the prompt has no placeholder of the {kind} token")
        raise MediaError(
            f"the prompt has {wanted} placeholders of the {kind} token, but the {kind} has {given} features; use the "
            "model's processor for both"
        )


def _digest(inputs: Mapping[str, torch.Tensor], salt: str | None = None) -> bytes:
    digest = hashlib.sha256(b"" if salt is None else repr(salt).encode())
    for name, tensor in sorted(inputs.items()):
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
