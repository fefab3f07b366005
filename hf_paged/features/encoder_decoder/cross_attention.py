"""Decoders that attend to an encoder's states too: whether they keep the K/V of those in a cache of their own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from hf_paged.annotations import Model
from hf_paged.integration.names import CACHE, cache_of
from hf_paged.model.trial import trying

_STATES = ("encoder_outputs", "encoder_hidden_states")
# What belongs to the prompt; the trial has one token.
_OF_PROMPT = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "inputs_embeds")


def cache_of_call(model: Model, paged: Cache, model_kwargs: dict[str, Any]) -> Cache:
    """Return the cache of a call: the paged cache, if necessary paired with a second one for cross-attention."""
    is_apart = model.config.is_encoder_decoder or keeps_cross_attention_apart(model, model_kwargs)
    return PagedPair(paged) if is_apart else paged


class PagedPair(EncoderDecoderCache):
    """A cache whose part for the decoder's own tokens is in blocks. beside: the other part (None: an empty one)."""

    def __init__(self, paged: Cache, beside: Cache | None = None) -> None:
        super().__init__(paged, DynamicCache() if beside is None else beside)

    def check_dynamic_cache(self, method: str) -> None:
        """A PagedKVCache has these methods too (assisted decoding crops it)."""


def keeps_cross_attention_apart(model: Model, model_kwargs: dict[str, Any]) -> bool:
    """Return True if the model wraps plain generate's DynamicCache in an EncoderDecoderCache.

    Some models do so only for a DynamicCache. Given another cache they would write the K/V of the encoder's states into
    the same layers as that of the tokens. If the call has encoder states, one token of each row is run to find out.
    """
    states = next((model_kwargs[name] for name in _STATES if model_kwargs.get(name) is not None), None)
    if states is None:
        return False
    tensor = states if isinstance(states, torch.Tensor) else states[0]
    kept = {k: v for k, v in model_kwargs.items() if k not in (*_OF_PROMPT, CACHE, "use_cache")}
    with trying(tensor.device):
        inputs = model.prepare_inputs_for_generation(
            torch.zeros(tensor.shape[0], 1, dtype=torch.int64, device=tensor.device),
            use_cache=True,
            is_first_iteration=True,
            **{CACHE: DynamicCache(config=model.config), **kept},
        )
        output = model(**inputs, return_dict=True)
    return isinstance(cache_of(output), EncoderDecoderCache)
