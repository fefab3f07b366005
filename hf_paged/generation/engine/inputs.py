"""The prompts of requests, and what they give an encoder: arguments of callers -> token ids, and tensors of one row."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Set
from numbers import Integral
from typing import Any

import torch

from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.validation import (
    check_prompts,
    check_token_range,
    is_integer,
    position_limit,
    refuse_meta,
    refuse_placeholders,
    shown,
)
from hf_paged.model.devices import device_of
from hf_paged.model.encoder_rows import EncoderArguments


def as_prompts(prompts: Any, attention_mask: Any) -> list[tuple[Any, Any]]:
    """Each prompt with its mask (None: no padding).

    prompts: a list of prompts, or an int tensor [num_prompts, length]. attention_mask: None, a tensor of the same shape
    or a list with one mask (or None) for each prompt.
    """
    if isinstance(prompts, str):
        raise ValueError(f"prompts={shown(prompts)} is text; give lists of token ids ([tokenizer(text).input_ids])")
    if isinstance(prompts, Mapping):
        raise ValueError(
            f"prompts is a {type(prompts).__name__}; give its token ids, prompts['input_ids'], and its attention_mask"
        )
    if isinstance(prompts, Set):
        raise ValueError(f"prompts={shown(prompts)} is a {type(prompts).__name__}, which has no order; give a list")
    try:
        rows = list(prompts)  # a tensor without dimensions raises TypeError as well
    except TypeError:
        raise ValueError(f"prompts={shown(prompts)}: a list of prompts is needed, such as [[5, 6, 7]]") from None
    if not rows:
        raise ValueError("prompts=[]: give at least one prompt")
    if isinstance(rows[0], Integral) or (isinstance(rows[0], torch.Tensor) and rows[0].ndim == 0):
        raise ValueError(f"prompts={shown(prompts)} is a single prompt; put it into a list: [prompt]")
    if attention_mask is None:
        return [(row, None) for row in rows]
    masks = list(attention_mask)
    if len(masks) != len(rows):
        raise ValueError(f"attention_mask has {len(masks)} rows for {len(rows)} prompts; give one for each")
    return list(zip(rows, masks))


def as_prompt(model: Any, prompt_ids: Any, attention_mask: Any = None, tokenizer: Any = None) -> list[int]:
    """Token ids without padding.

    attention_mask: 1 for a token of the prompt, 0 for padding, which may appear only at the ends. Raises ValueError for
    an invalid prompt, for padding tokens without a mask, and for placeholders of images or sound.
    """
    ids = _token_ids(model, prompt_ids, attention_mask, tokenizer)
    refuse_placeholders(model, ids)
    return ids


def _token_ids(model: Any, prompt_ids: Any, attention_mask: Any, tokenizer: Any) -> list[int]:
    if _is_plain_prompt(model, prompt_ids) and attention_mask is None:
        ids: list[int] = prompt_ids[:]
    else:
        given = _prompt_tensor(model, prompt_ids)
        refuse_meta(given, "prompt_ids")
        given = given.cpu()
        check_prompts(model, given, "prompt_ids")
        given = given.to(torch.int64)
        if attention_mask is not None:
            kept: list[int] = _without_padding(given, attention_mask)[0].tolist()
            return kept
        ids = given[0].tolist()
    pads = _pad_tokens(model, tokenizer)
    for name, token in (("begins", ids[0]), ("ends", ids[-1])):
        if token in pads:
            raise ValueError(
                f"prompt_ids {name} with the padding token {token}; leave padding out, or give the prompt's "
                "attention_mask (ones, if the token is text)"
            )
    return ids


def _is_plain_prompt(model: Any, prompt_ids: Any) -> bool:
    """Whether it is a list of token ids that needs no closer look. (Tensors take ten times as long.)"""
    if type(prompt_ids) is not list or set(map(type, prompt_ids)) != {int}:
        return False
    limit = position_limit(model)
    is_short = limit is None or len(prompt_ids) <= limit
    return is_short and min(prompt_ids) >= 0 and max(prompt_ids) < model.get_input_embeddings().weight.shape[0]


def _prompt_tensor(model: Any, prompt_ids: Any) -> torch.Tensor:
    """int [1, length]. What is a tensor already is not checked against the model."""
    if isinstance(prompt_ids, (str, bytes, bytearray)):
        raise ValueError(f"prompt_ids={shown(prompt_ids)} is text; give token ids (tokenizer(text).input_ids)")
    if isinstance(prompt_ids, Mapping):
        raise ValueError(f"prompt_ids is a {type(prompt_ids).__name__}; give its token ids, prompt_ids['input_ids']")
    if isinstance(prompt_ids, Set):
        raise ValueError(
            f"prompt_ids={shown(prompt_ids)} is a {type(prompt_ids).__name__}, which has no order; give a list"
        )
    if not isinstance(prompt_ids, torch.Tensor):
        try:
            ids = list(prompt_ids)
        except TypeError:
            raise ValueError(f"prompt_ids={shown(prompt_ids)}: a list of token ids is needed") from None
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        wrong = [token for token in ids if not is_integer(token)]
        if wrong:
            raise ValueError(f"{shown(wrong[0])} in the prompt is not a token id; integers are needed")
        check_token_range(model, min(ids), max(ids), "prompt_ids")
        prompt_ids = torch.tensor(ids, dtype=torch.int64, device="cpu")
    if prompt_ids.ndim == 1:
        prompt_ids = prompt_ids[None]
    if prompt_ids.ndim == 2 and prompt_ids.shape[0] > 1:
        raise ValueError(f"prompt_ids has shape {tuple(prompt_ids.shape)}: one request is one prompt; add one for each")
    return prompt_ids  # type: ignore[no-any-return]


def _without_padding(ids: torch.Tensor, attention_mask: Any) -> torch.Tensor:
    """ids int64 [1, length]; attention_mask [length] or [1, length], a tensor or a list."""
    try:
        mask = torch.as_tensor(attention_mask, dtype=torch.float64, device=ids.device).reshape(-1)
        is_binary = bool(((mask == 0) | (mask == 1)).all())
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"attention_mask={shown(attention_mask)}: ones and zeros are needed, one a token") from None
    if mask.numel() != ids.shape[1] or not is_binary:
        raise ValueError(
            f"attention_mask={shown(attention_mask)}: ones and zeros are needed, one for each of the {ids.shape[1]} "
            "tokens of the prompt"
        )
    kept = mask.nonzero().flatten()
    if not len(kept):
        raise ValueError("attention_mask is all zeros: an empty prompt; leave it out")
    first, last = int(kept[0]), int(kept[-1])
    if last - first + 1 != len(kept):
        raise ValueError(
            f"attention_mask={shown(mask.long().tolist())} has zeros between ones; padding may appear only at the ends"
        )
    return ids[:, first : last + 1]


def _pad_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids that can be nothing but padding: those that end or begin texts are left out."""
    sources = [model.generation_config, *([] if tokenizer is None else [tokenizer])]
    marks: set[Any] = set()
    for source in sources:
        for name in ("eos_token_id", "bos_token_id"):
            value = getattr(source, name, None)
            marks.update(value if isinstance(value, (list, tuple)) else [value])
    return {pad for source in sources if (pad := getattr(source, "pad_token_id", None)) is not None} - marks


# -- encoders -------------------------------------------------------------------------------------------------------


def encoder_inputs(model: Any, prompt_ids: Any, options: RequestOptions, tokenizer: Any) -> dict[str, torch.Tensor]:
    """What `generate` gets for this row of an encoder-decoder model, on the model's device.

    prompt_ids: the encoder's text, [] where it has none. Raises ValueError for what is no tensor of one row, for what
    belongs to a call of `generate` and not to a row, and for a prompt that is missing or that the encoder cannot read.
    Names that the model does not take are refused by `generate` itself.
    """
    device, kind = device_of(model), type(model).__name__
    inputs: dict[str, torch.Tensor] = {}
    for name, value in (options.inputs or {}).items():
        if name in _OF_CALL or name in ("input_ids", "inputs_embeds"):
            remedy = "give the text as the prompt" if name.startswith("input") else "give what the encoder reads"
            raise ValueError(f"inputs has {name!r}, which is no input of a row in the engine; {remedy}")
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != 1:
            size = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"inputs[{name!r}] is {size}; a tensor of one row is needed, [1, ...]")
        refuse_meta(value, f"inputs[{name!r}]")
        inputs[name] = value.to(device)
    reads_text = model.main_input_name == "input_ids"
    is_empty = isinstance(prompt_ids, (list, tuple)) and not prompt_ids
    if not reads_text and not is_empty:
        raise ValueError(
            f"the encoder of {kind} reads {model.main_input_name}, no text; give the prompt [] and "
            f"inputs={{{model.main_input_name!r}: ...}}; what the decoder begins with is inputs['decoder_input_ids']"
        )
    if not reads_text and model.main_input_name not in inputs:
        raise ValueError(f"inputs has no {model.main_input_name!r}, which the encoder of {kind} reads")
    if reads_text:
        mask = inputs.pop("attention_mask", None)
        ids = as_prompt(model, prompt_ids, options.attention_mask if mask is None else mask, tokenizer)
        inputs["input_ids"] = torch.tensor([ids], dtype=torch.int64, device=device)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    elif options.attention_mask is not None:
        raise ValueError("attention_mask is that of a text; that of other inputs is inputs['attention_mask']")
    if "decoder_input_ids" in inputs:
        check_prompts(model.get_decoder(), inputs["decoder_input_ids"], "decoder_input_ids")
    elif hasattr(model, "_retrieve_init_tokens"):
        inputs["decoder_input_ids"] = _own_start(model, inputs, options.generation_config)
    return inputs


_OF_CALL = (
    "encoder_outputs",
    "past_key_values",
    "decoder_attention_mask",
    "decoder_inputs_embeds",
    "labels",
    "use_cache",
)


@torch.no_grad()
def _own_start(model: Any, inputs: Mapping[str, torch.Tensor], generation_config: Any) -> torch.Tensor:
    """The tokens with which Whisper's own `generate` begins: its language, which may have to be heard, and task."""
    config = copy.deepcopy(model.generation_config)
    for name in ("language", "task", "return_timestamps", "is_multilingual"):
        value = getattr(generation_config, name, None)
        if value is not None or not hasattr(config, name):
            setattr(config, name, value)
    features = inputs[model.main_input_name]
    start = model._retrieve_init_tokens(features, 1, config, model.config, features.shape[-1], {})
    return torch.as_tensor(start, dtype=torch.int64, device=features.device).reshape(1, -1)


def digest_of(encoder: EncoderArguments, root: bytes) -> bytes:
    """Equal for equal inputs under the same root."""
    digest = hashlib.sha256(root)
    for name, tensor in [(encoder.name, encoder.tensor), *sorted(encoder.others.items())]:
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
