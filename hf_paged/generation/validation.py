"""Refuses what a paged generate call can never do, before transformers starts: one line, the value, the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from hf_paged.cache.paged_cache import PagedKVCache


def check_inputs(model: Any, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for prompts, masks and options that cannot be served."""
    cache = paged_part(kwargs.get("past_key_values"))
    if cache is not None and not isinstance(cache, PagedKVCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, but cache_implementation='paged' continues a PagedKVCache; "
            "pass a hf_paged.PagedKVCache, or drop cache_implementation"
        )
    use_cache = kwargs.get("use_cache", getattr(generation_config, "use_cache", None))
    if use_cache is False:
        raise ValueError("use_cache=False contradicts cache_implementation='paged'; drop one of them")
    ids = inputs if inputs is not None else kwargs.get("input_ids")
    embeds = kwargs.get("inputs_embeds")
    mask = kwargs.get("attention_mask")
    if embeds is not None:
        if mask is not None:
            _check_mask("inputs_embeds", embeds, mask, cache)
    elif ids is not None:
        check_prompts(model, ids, "input_ids")
        if mask is not None:
            _check_mask("input_ids", ids, mask, cache)


def paged_part(cache: Any) -> Any:
    """The cache of a model's self-attention, where another one beside it is of its cross-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def prompt_length(inputs: Any, kwargs: dict[str, Any]) -> int:
    """Tokens a row that the call starts with, padding included. The inputs have been checked."""
    for given in (kwargs.get("inputs_embeds"), inputs, kwargs.get("input_ids")):
        if given is not None:
            return int(given.shape[1])
    return 1  # BOS


def check_counts(generation_config: Any) -> None:
    """Raises ValueError for counts of rows that are none."""
    for name in ("num_beams", "num_return_sequences"):
        value = getattr(generation_config, name)
        if value < 1:
            raise ValueError(f"{name}={value!r}: an integer of at least 1 is needed")


def check_pool(lengths: Sequence[int], block_size: int, num_blocks: int | None) -> None:
    """Raises ValueError if prompts of these lengths, in tokens, do not fit a pool of `num_blocks` (None: unbounded)."""
    needed = sum(-(-length // block_size) for length in lengths)
    if num_blocks is not None and needed > num_blocks:
        raise ValueError(
            f"the prompts need {needed} blocks of {block_size} tokens, the cache has num_blocks={num_blocks}; "
            "raise num_blocks, or give fewer or shorter prompts"
        )


def check_prompts(model: Any, ids: Any, name: str) -> None:
    """ids int [batch, length] of tokens the model knows, at least one row and one token."""
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"{name} is a {type(ids).__name__}; a tensor [batch, length] of token ids is needed")
    if ids.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}; [batch, length] is needed (one prompt: {name}[None])")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {ids.dtype}; integer token ids are needed")
    if ids.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}: the list of prompts is empty; give at least one prompt")
    if ids.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(ids.shape)}: the prompt is empty; give at least one token")
    low, high = int(ids.min()), int(ids.max())
    vocab = model.get_input_embeddings().weight.shape[0]
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        raise ValueError(f"token id {bad} in {name} is outside the vocabulary of {vocab} (ids 0 to {vocab - 1})")
    limit = position_limit(model)
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(
            f"{name} has {ids.shape[1]} tokens a row, the model's max_position_embeddings is {limit}; "
            "shorten the prompt"
        )


def position_limit(model: Any) -> int | None:
    """The longest sequence the model was made for; None if it says nothing, or scales its positions beyond."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0 or extends_positions(config):
        return None
    return limit


def extends_positions(config: Any) -> bool:
    """Rotary scalings that are made for running past max_position_embeddings."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return any(kind.get("rope_type", "default") not in (None, "default") for kind in kinds)


def _check_mask(name: str, given: torch.Tensor, mask: Any, cache: PagedKVCache | None) -> None:
    """`given`: input_ids [batch, length] or inputs_embeds [batch, length, hidden]."""
    if not isinstance(mask, torch.Tensor):
        raise ValueError(f"attention_mask is a {type(mask).__name__}; a tensor [batch, length] is needed")
    if mask.ndim != 2:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; generate takes a 2D padding mask")
    if cache is None and mask.shape != given.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, {name} {tuple(given.shape)}; "
            "batch and length must be the same"
        )
    empty = (mask != 0).sum(dim=1) == 0
    if bool(empty.any()):
        row = int(empty.nonzero()[0])
        raise ValueError(f"row {row} of attention_mask is all zeros: an empty prompt; leave it out of the batch")
