"""Inputs to try the decoder of an encoder-decoder model on, and the logits of its own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_paged.annotations import Model
from hf_paged.cache.paged_cache import plain_cache
from hf_paged.errors import UnsupportedModelError
from hf_paged.model.inputs import own_steps

_NUM_STATES = (6, 4)
"""Encoder states of the two rows of `encoder_batch`, so that a mask hides some."""


def decoder_steps(model: Model, given: dict[str, Any]) -> torch.Tensor:
    """`own_steps` over a cache as plain `generate` makes it."""
    config = model.config.get_text_config(decoder=True)
    return own_steps(model, given, EncoderDecoderCache(plain_cache(config), plain_cache(config)))


@dataclass
class EncoderStates(BaseModelOutput):
    """Outputs of an encoder, with what some encoders return besides states, because their models read it.

    pooler_output: the states that the decoder attends to, in models whose encoder calls them so.
    """

    pooler_output: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


def encoder_outputs(states: torch.Tensor) -> EncoderStates:
    """Wrap states [rows, length, width] in the record that an encoder returns."""
    return EncoderStates(last_hidden_state=states, pooler_output=states)


def encoder_batch(model: Model) -> dict[str, Any]:
    """Inputs of two rows of four tokens, with states that an encoder might have computed.

    A model of text also gets a mask that hides the padding of the shorter row.
    """
    config = model.config.get_text_config(decoder=True)
    ids = torch.tensor([[13, 11, 12, 25], [9, 27, 16, 31]], dtype=torch.int64, device=model.device) % config.vocab_size
    size = 2 * _NUM_STATES[0] * (width := encoder_width(model))
    places = torch.arange(size, dtype=torch.float32, device=model.device)
    values = torch.sin(places * 1.7) + torch.cos(places * 0.3)
    states = values.view(2, _NUM_STATES[0], width).to(model.dtype)
    inputs: dict[str, Any] = {"decoder_input_ids": ids, "encoder_outputs": encoder_outputs(states)}
    if model.main_input_name == "input_ids":
        mask = torch.ones(2, _NUM_STATES[0], dtype=torch.int64, device=model.device)
        mask[1, _NUM_STATES[1] :] = 0
        inputs["attention_mask"] = mask
    return inputs


_PADDED = ((1, 0), (0, 1), (1, 2))
"""Rows of `with_padding`: the row of `encoder_batch`, and tokens of left padding. NLLB-MoE's router reads as many
places of the last row's mask as there are rows; some of them have to be padding."""


def with_padding(given: dict[str, Any]) -> dict[str, Any]:
    """Such inputs with left padding in the decoder's prompt."""
    rows = [row for row, _ in _PADDED]
    ids = given["decoder_input_ids"][rows]
    inputs = {
        "decoder_input_ids": ids,
        "encoder_outputs": encoder_outputs(given["encoder_outputs"].last_hidden_state[rows]),
        "decoder_attention_mask": torch.ones_like(ids),
    }
    for row, (_, padding) in enumerate(_PADDED):
        inputs["decoder_attention_mask"][row, :padding] = 0
    if "attention_mask" in given:
        inputs["attention_mask"] = given["attention_mask"][rows]
    return inputs


def encoder_width(model: Model) -> int:
    """Elements of one state of the encoder."""
    own = getattr(model.get_encoder(), "config", model.config)
    for config in (own, getattr(own, "text_config", None), model.config):
        width = getattr(config, "hidden_size", None)
        if isinstance(width, int):
            return width
    raise UnsupportedModelError("the width of its encoder's states is unknown")
