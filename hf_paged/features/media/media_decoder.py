"""A decoder for prompts with images or videos, which transformers has encoded before the loop.

The features, the positions and the types of tokens are those that transformers prepares for the whole batch; each
prompt gets its part of them. Prompts are alike only if what they show is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.features.media.media import AUDIO_INPUTS, ENCODED, Media, show
from hf_paged.features.media.media_encoders import arguments_of, features_of, hear
from hf_paged.features.media.media_store import goes_on_evenly, media_of_row
from hf_paged.generation.decoder import DecoderOutput, PackedDecoder, left_padding
from hf_paged.generation.obstacles import Asked, call_obstacle
from hf_paged.generation.prefill import MAX_PREFILL_TOKENS
from hf_paged.generation.shared_prompts import Prompt
from hf_paged.integration.names import TYPES
from hf_paged.sockets import Parts


class MediaDecoder(PackedDecoder):
    """A PackedDecoder for prompts with media. Further invariant: `_shown` has the media of each sequence's prompt."""

    @classmethod
    def takes(cls, asked: Asked) -> bool:
        given = asked.model_kwargs
        return asked.cache is None and any(given.get(name) is not None for name in arguments_of(asked.model))

    @classmethod
    def obstacle(cls, asked: Asked) -> str | None:
        obstacle = call_obstacle(asked, arguments_of(asked.model))
        recordings = [value for name in AUDIO_INPUTS if (value := asked.model_kwargs.get(name)) is not None]
        if obstacle is None and asked.expand > 1 and any(len(each) != asked.num_rows for each in recordings):
            return "a prompt has several recordings, or none, which transformers assigns to rows in another order"
        positions = asked.model_kwargs.get("position_ids")
        if obstacle is None and positions is not None and positions.ndim == 3 and not goes_on_evenly(positions):
            return (
                "a prompt ends within an image, after which the model counts rows and columns from different positions"
            )
        return obstacle

    _alike: dict[bytes, tuple[torch.Tensor, Media]]  # prompts, by tokens and keys
    _shown: dict[int, Media]

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], **_: object
    ) -> DecoderOutput:
        mask = model_kwargs.get("attention_mask")
        self._alike, self._shown = {}, {}
        padding = left_padding(mask, len(input_ids))
        media = _media_of_batch(self._model, input_ids, padding, model_kwargs, self._expand)
        if media is None:
            self._expand = 1
            media = _media_of_batch(self._model, input_ids, padding, model_kwargs, 1)
        assert media is not None
        self._media = media
        return self._output(self.prefill(input_ids, mask))

    def _compared(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The prompts with the keys of what they show in the place of placeholders."""
        keyed = []
        for tokens, media in zip(batch, self._media, strict=True):
            tokens = tokens.to("cpu", torch.int64)
            keyed.append(torch.tensor(media.keyed(tokens.tolist()), dtype=torch.int64, device="cpu"))
            self._alike[keyed[-1].numpy().tobytes()] = tokens, media
        return keyed

    def _compute_prompts(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        """Raises ValueError if tokens that attend to one another both ways are more than a forward computes."""
        found = [self._alike[prompt.tokens.numpy().tobytes()] for prompt in prompts]
        self._shown = {seq_id: media for seq_id, (_, media) in zip(seq_ids, found)}
        runs = (media.encoded.longest_run for media in self._shown.values() if media.encoded is not None)
        # Refused before any block is taken.
        most = self._chunk or MAX_PREFILL_TOKENS
        if self._executor.is_packed and (longest := max(runs)) > most:
            raise ValueError(
                f"{longest} tokens of a prompt attend to one another both ways, and a forward computes {most} tokens "
                "of a prompt at most; raise prefill_chunk_size, or leave out cache_implementation"
            )
        own = [Prompt(tokens, prompt.source, prompt.shared) for (tokens, _), prompt in zip(found, prompts)]
        return super()._compute_prompts(seq_ids, own)

    def _undivided(self, seq_id: int, start: int, count: int) -> int:
        return self._shown[seq_id].undivided(start, count)

    def _extend(self, parts: Parts) -> None:
        media = [self._shown[seq_id] for seq_id in parts.seq_ids]
        if parts.counts is None:
            parts.extra["delta"] = [each.delta for each in media]
        else:
            # Rows without media share forwards; in a packed row all tokens have types and positions.
            show(parts, [each if self._executor.is_packed or each.places else None for each in media])

    def _fork(self, parent_id: int, child_id: int) -> None:
        super()._fork(parent_id, child_id)
        self._shown[child_id] = self._shown[parent_id]

    def returned_cache(self) -> PagedKVCache:
        cache: PagedKVCache = super().returned_cache()
        cache.counts_media = True
        return cache


def _media_of_batch(
    model: Model, input_ids: torch.Tensor, padding: Sequence[int], model_kwargs: Mapping[str, Any], expand: int
) -> list[Media] | None:
    """Assemble the media of each prompt, which has `expand` rows. None if rows of a prompt show different media.

    For some classes they do, because transformers repeats each image of a prompt instead of all of them in turn.
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
