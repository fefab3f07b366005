"""Audio encoders that a model has within its forward, without a method for them (Qwen2-Audio).

Its own forward encodes: it runs up to its language model, and what it would give that in the place of the placeholders
are the features. So no line of the model's is repeated here. Knows modules and tensors; never prompts.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling

MASK = "feature_attention_mask"


@functools.lru_cache(maxsize=64)
def _encodes_inside(forward: Any) -> bool:
    return {"input_features", MASK} <= inspect.signature(forward).parameters.keys()


def encodes_inside(inner: nn.Module) -> bool:
    """Return True if the inner model can encode audio only in its forward, with the parts that this module reads."""
    tower = getattr(inner, "audio_tower", None)
    has_parts = hasattr(tower, "_get_feat_extract_output_lengths") and "language_model" in inner._modules
    return has_parts and not hasattr(inner, "get_audio_features") and _encodes_inside(type(inner).forward)


class _Ears(nn.Module):
    """In the place of the language model: returns what it is given."""

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def audio_features(
    inner: Any, input_features: torch.Tensor, feature_attention_mask: torch.Tensor, return_dict: bool = True
) -> BaseModelOutputWithPooling:
    """Encode audio as `get_audio_features` does in other models: pooler_output [num_features, size], clips in order."""
    lengths = inner.audio_tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))[1]
    audio = inner.config.audio_token_id
    ids = torch.full((1, 1 + int(lengths.sum())), audio, dtype=torch.int64, device=input_features.device)
    ids[0, 0] = int(audio == 0)  # a token of text: a row of one token would not be looked at
    hearing: Any = copy.copy(inner)  # of its own, so that no other thread sees what is exchanged
    own = vars(hearing)
    own["_modules"] = {**inner._modules, "language_model": _Ears()}
    own["get_input_embeddings"] = inner.get_input_embeddings
    output = hearing.forward(
        input_ids=ids,
        input_features=input_features,
        feature_attention_mask=feature_attention_mask,
        attention_mask=torch.ones_like(ids),
        return_dict=return_dict,
    )
    return BaseModelOutputWithPooling(pooler_output=output.last_hidden_state[0, 1:])
