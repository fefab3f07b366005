"""Decoders for prompts with images or videos, which transformers has encoded before the loop.

The features, the positions and the types of tokens are those that transformers prepares for the whole batch; each
prompt gets its part of them. Prompts are alike only if what they show is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.annotations import Model
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.generation.decoder import DecoderOutput, PackedDecoder, left_padding
from hf_paged.generation.prefill import compute_prompts
from hf_paged.generation.row_decoder import RowDecoder
from hf_paged.generation.shared_prompts import Prompt
from hf_paged.kernels.metadata import to_device
from hf_paged.model.media import ENCODED, TYPES, Media
from hf_paged.model.media_encoders import features_of, hear
from hf_paged.model.media_store import media_of_row


class MediaDecoder(PackedDecoder):
    """Invariant beside that of a PackedDecoder: `_deltas` has, for each sequence, what is added to the index of a later
    token to get its position."""

    _media: dict[bytes, tuple[torch.Tensor, Media]]
    _deltas: dict[int, int]

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], **_: object
    ) -> DecoderOutput:
        mask = model_kwargs.get("attention_mask")
        self._media, self._deltas = {}, {}
        padding = left_padding(mask, len(input_ids))
        shown = _media_of_batch(self._model, input_ids, padding, model_kwargs, self._expand)
        if shown is None:
            self._expand = 1
            shown = _media_of_batch(self._model, input_ids, padding, model_kwargs, 1)
        assert shown is not None
        self._shown = shown
        return self._output(self.prefill(input_ids, mask))

    def _compared(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The prompts with the keys of what they show in the place of placeholders."""
        keyed = []
        for tokens, media in zip(batch, self._shown, strict=True):
            tokens = tokens.to("cpu", torch.int64)
            keyed.append(torch.tensor(media.keyed(tokens.tolist()), dtype=torch.int64, device="cpu"))
            self._media[keyed[-1].numpy().tobytes()] = tokens, media
        return keyed

    def _compute_prompts(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        found = [self._media[prompt.tokens.numpy().tobytes()] for prompt in prompts]
        self._deltas = {seq_id: media.delta for seq_id, (_, media) in zip(seq_ids, found)}
        own = [Prompt(tokens, prompt.source, prompt.shared) for (tokens, _), prompt in zip(found, prompts)]
        return compute_prompts(self._packed, seq_ids, own, self._chunk, [media for _, media in found])  # type: ignore[arg-type]

    def _positions(self, seq_ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        deltas = [self._deltas[seq_id] for seq_id in seq_ids]
        return positions + to_device(np.array(deltas, dtype=np.int64), positions.device) if any(deltas) else positions

    def _fork(self, parent_id: int, child_id: int) -> None:
        super()._fork(parent_id, child_id)
        self._deltas[child_id] = self._deltas[parent_id]

    def reorder(self, parents: Sequence[int]) -> None:
        deltas = [None if row is None else self._deltas[row] for row in self.rows]
        super().reorder(parents)
        moved = ((row, deltas[parent]) for row, parent in zip(self.rows, parents))
        self._deltas.update({row: delta for row, delta in moved if row is not None and delta is not None})

    def give_rows(self, cache: PagedKVCache) -> None:
        super().give_rows(cache)
        cache.counts_media = True


class MediaRowDecoder(MediaDecoder, RowDecoder):
    """The same for models that keep states besides K/V."""

    def _compute_prompts(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        found = [self._media[prompt.tokens.numpy().tobytes()] for prompt in prompts]
        self._deltas = {seq_id: media.delta for seq_id, (_, media) in zip(seq_ids, found)}
        shown = [media if media.places else None for _, media in found]
        return self._begin(seq_ids, [tokens.tolist() for tokens, _ in found], media=shown)

    def _delta(self, seq_id: int) -> int:
        return self._deltas[seq_id]


def _media_of_batch(
    model: Model, input_ids: torch.Tensor, padding: Sequence[int], model_kwargs: Mapping[str, Any], expand: int
) -> list[Media] | None:
    """Assemble the media of each prompt, which has `expand` rows; None if the rows of a prompt show different media.

    They do where transformers repeats several images of a prompt one by one, as for some classes.
    """
    outputs = model_kwargs.get(ENCODED) or {}
    features = {kind: features_of(output) for kind, output in outputs.items()}
    positions = model_kwargs.get("position_ids")
    types = {name: model_kwargs[name] for name in TYPES if model_kwargs.get(name) is not None}
    done = dict.fromkeys(features, 0)
    features |= hear(model, model_kwargs, expand)  # of each prompt once: transformers expands what it has encoded
    done |= dict.fromkeys(features.keys() - done.keys(), 0)
    prompts: list[Media] = []
    for row, (ids, first) in enumerate(zip(input_ids, padding)):
        if row % expand:
            # transformers has encoded the images again for this row. They are skipped if they are the same.
            same = prompts[-1].encoded
            assert same is not None
            for kind in same.features.keys() - {"audio"}:
                pooled, start = same.features[kind].pooled, done[kind]
                done[kind] += len(pooled)
                if not torch.equal(features[kind].pooled[start : done[kind]], pooled):
                    return None
            continue
        own_types = {name: value[row : row + 1, first:] for name, value in types.items()}
        own_positions = None if positions is None or positions.ndim < 3 else positions[:, row, first:]
        prompts.append(media_of_row(model, ids[first:].tolist(), features, done, own_positions, own_types))
    # Only here is it known how many features the placeholders have taken.
    for kind, count in done.items():
        if count != len(features[kind].pooled):
            raise ValueError(
                f"the prompts have {count} placeholders of the {kind} token for {len(features[kind].pooled)} features"
            )
    return prompts
