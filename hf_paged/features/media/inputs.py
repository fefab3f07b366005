"""Turn callers' images, videos and audio of a prompt into tensors of one row."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.features.media.media import KINDS, Media, placeholders, takes_media
from hf_paged.generation.prompts import copied_input
from hf_paged.integration.names import CACHE_NAMES, ENCODES_MEDIA, TYPES
from hf_paged.model.devices import device_of
from hf_paged.versions import installed


def media_of(
    model: Model, prompt: list[int], inputs: Mapping[str, Any], *, can_run: bool, salt: str | None = None
) -> Media:
    """The images, videos and audio of a prompt. inputs: what the model's processor returns beside `input_ids`, for this
    prompt. can_run: whether the engine computes such prompts. salt: the request's `cache_salt`. Raises ValueError for
    what is no such input, and for a prompt without placeholders."""
    kind = type(model).__name__
    if not takes_media(model):
        raise ValueError(f"inputs has {min(inputs)!r}: {kind} takes no such inputs in the engine; leave it out")
    if not ENCODES_MEDIA:
        raise ValueError(
            f"inputs has {min(inputs)!r}, but transformers {installed()} encodes media in each forward, whose tokens "
            "the engine cannot share; use transformers 5.18 or newer, or paged model.generate"
        )
    if not can_run:
        raise ValueError(f"inputs has {min(inputs)!r}: a model on several ranks takes texts only; use one process")
    known = _names_of(model)
    tensors: dict[str, torch.Tensor] = {}
    device = device_of(model)
    for name, value in inputs.items():
        if name == "attention_mask":
            raise ValueError("inputs has 'attention_mask'; give it as the request's own attention_mask")
        # An input that no part of the model reads would change nothing, and nobody would notice.
        if name not in known:
            raise ValueError(f"inputs has {name!r}, which {kind} does not take; leave it out")
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"inputs[{name!r}] is a {type(value).__name__}; a tensor is needed")
        # The mask has taken padding out of the prompt, but not out of this tensor.
        if name in TYPES and value.shape != (1, len(prompt)):
            size = f"[1, {len(prompt)}] is needed, for the tokens of the prompt without padding"
            raise ValueError(f"inputs[{name!r}] has the shape {list(value.shape)}; {size}")
        tensors[name] = copied_input(value, name, device)
    places = placeholders(model, prompt)
    if not places:
        raise ValueError(
            f"inputs has {min(inputs)!r}, but the prompt has no placeholders; use the model's processor for both"
        )
    return Media(tensors, places, salt)


def _names_of(model: Model) -> set[str]:
    """The inputs of the model's forward and of its encoders."""
    encoders = [getattr(model.base_model, f"get_{kind}_features", None) for kind in KINDS]
    functions = [type(model).forward, *(each for each in encoders if each is not None)]
    names = {name for function in functions for name in signature(function).parameters}
    return (names | {"mm_token_type_ids"}).difference(_OF_STEP)


_OF_STEP = (
    "self", "kwargs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", *CACHE_NAMES, "labels",
    "use_cache", "logits_to_keep", "mm_encoder_outputs", "output_attentions", "output_hidden_states", "return_dict",
    "cache_position", "rope_deltas",
)  # fmt: skip
