"""Token ids of callers: their prompts as lists, without padding. Raises ValueError for what is none."""

from __future__ import annotations

from collections.abc import Mapping, Set
from numbers import Integral
from typing import Any

import torch

from hf_paged.annotations import Model, Tokenizer
from hf_paged.generation.validation import (
    check_prompts,
    check_token_range,
    is_integer,
    prompt_limit,
    refuse_meta,
    refuse_placeholders,
    shown,
)


def as_prompts(prompts: Any, attention_mask: Any) -> list[tuple[Any, Any]]:
    """Each prompt with its mask (None: no padding).

    prompts: a list of prompts, or an int tensor [num_prompts, length]. attention_mask: None, a tensor of the same shape
    or a list with one mask (or None) for each prompt.
    """
    _refuse_other_kinds("prompts", prompts, "lists of token ids ([tokenizer(text).input_ids])")
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


def _refuse_other_kinds(name: str, given: Any, wanted: str) -> None:
    """Raises ValueError for what has items, but no token ids in their order."""
    kind = type(given).__name__
    if isinstance(given, (str, bytes, bytearray)):
        raise ValueError(f"{name}={shown(given)} is text; give {wanted}")
    if isinstance(given, Mapping):
        raise ValueError(f"{name} is a {kind}; give its token ids, {name}['input_ids'], and its attention_mask")
    if isinstance(given, Set):
        raise ValueError(f"{name}={shown(given)} is a {kind}, which has no order; give a list")


def as_prompt(
    model: Model, prompt_ids: Any, attention_mask: Any = None, tokenizer: Tokenizer | None = None
) -> list[int]:
    """Token ids without padding.

    attention_mask: 1 for a token of the prompt, 0 for padding, which may appear only at the ends. Raises ValueError for
    an invalid prompt, for padding tokens without a mask, and for placeholders of images or audio.
    """
    ids = token_ids(model, prompt_ids, attention_mask, tokenizer)
    refuse_placeholders(model, ids)
    return ids


def token_ids(model: Model, prompt_ids: Any, attention_mask: Any, tokenizer: Tokenizer | None) -> list[int]:
    """The same, for a prompt that may have placeholders of images or audio."""
    if _is_plain_prompt(model, prompt_ids) and attention_mask is None:
        ids: list[int] = prompt_ids[:]
    else:
        given = _prompt_tensor(model, prompt_ids)
        # A tensor without contents cannot be moved, so it is refused before.
        refuse_meta(given, "prompt_ids")
        given = given.cpu()
        check_prompts(model, given, "prompt_ids")
        given = given.to(torch.int64)
        if attention_mask is not None:
            kept: list[int] = _without_padding(given, attention_mask)[0].tolist()
            return kept
        ids = given[0].tolist()
    # A row of a padded batch without its mask would be answered as if the padding were text.
    pads = _pad_tokens(model, tokenizer)
    for name, token in (("begins", ids[0]), ("ends", ids[-1])):
        if token in pads:
            raise ValueError(
                f"prompt_ids {name} with the padding token {token}; leave padding out, or give the prompt's "
                "attention_mask (ones, if the token is text)"
            )
    return ids


def _is_plain_prompt(model: Model, prompt_ids: Any) -> bool:
    """Return True if the prompt is a list of valid ids, short enough to need no closer look.

    (The same check by tensors takes ten times as long.)
    """
    if type(prompt_ids) is not list or set(map(type, prompt_ids)) != {int}:
        return False
    limit = prompt_limit(model)
    is_short = limit is None or len(prompt_ids) <= limit
    return is_short and min(prompt_ids) >= 0 and max(prompt_ids) < model.get_input_embeddings().weight.shape[0]


def _prompt_tensor(model: Model, prompt_ids: Any) -> torch.Tensor:
    """int [1, length]. What is a tensor already is not checked against the model."""
    _refuse_other_kinds("prompt_ids", prompt_ids, "token ids (tokenizer(text).input_ids)")
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
        # In float32, 1 - 1e-9 would become 1, and no longer be refused.
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


def _pad_tokens(model: Model, tokenizer: Tokenizer | None) -> set[int]:
    """Ids that can be nothing but padding: those that end or begin texts are left out."""
    sources = [model.generation_config, *([] if tokenizer is None else [tokenizer])]
    marks: set[Any] = set()
    for source in sources:
        for name in ("eos_token_id", "bos_token_id"):
            value = getattr(source, name, None)
            marks.update(value if isinstance(value, (list, tuple)) else [value])
    return {pad for source in sources if (pad := getattr(source, "pad_token_id", None)) is not None} - marks


# As it is now: others may replace it by one that computes something, which plain `generate` does not call here.
_TO = torch.Tensor.to


def copied_input(value: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """A copy, because the encoder runs later and others may find what it makes of this. Raises ValueError."""
    refuse_meta(value, f"inputs[{name!r}]")
    if value.layout is not torch.strided:
        raise ValueError(f"inputs[{name!r}] has the layout {value.layout}; give a dense tensor")
    return _TO(value.detach(), device, copy=True)
