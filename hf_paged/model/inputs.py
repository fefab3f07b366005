"""Inputs to try a model on, and those of a step of generate for a model that prepares its own."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_paged.annotations import Model
from hf_paged.cache.paged_cache import plain_cache
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.names import CACHE, cache_argument
from hf_paged.model.devices import device_of
from hf_paged.model.packed_step import uncompiled
from hf_paged.model.trial import Refusal, attempt


def step_positions(
    model: Model, ids: torch.Tensor, positions: torch.Tensor | None, *, is_first: bool
) -> torch.Tensor | None:
    """The `position_ids` that a step of generate passes for tokens at `positions` int64 [batch, length].

    Some models start from another number. None: the model leaves `position_ids` out and computes positions itself.
    """
    from transformers import GenerationMixin

    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    is_own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if not is_own or not takes_ordinary_inputs(model):
        return positions
    inputs = model.prepare_inputs_for_generation(
        ids, position_ids=positions, use_cache=True, is_first_iteration=is_first
    )
    given: torch.Tensor | None = inputs.get("position_ids")
    return given


# Trials use smaller ids, and reading a whole embedding would take long.
_FIRST_ROWS = 64


def trial_ids(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """The ids for a trial, those replaced whose row of the embedding has NaN or infinite numbers: results would compare
    with nothing, though no prompt may ever have the token."""

    def look() -> torch.Tensor:
        weight = model.get_input_embeddings().weight[:_FIRST_ROWS].detach()
        is_finite: torch.Tensor = weight.float().isfinite().all(-1)
        # Where ranks share the weights, each must choose the same ids.
        return is_finite.full_tensor() if hasattr(is_finite, "full_tensor") else is_finite.to(ids.device)

    is_finite = attempt(look)  # it may have no such embedding, one of its own class, or one that is offloaded
    if isinstance(is_finite, Refusal) or len(usable := is_finite.nonzero()[:, 0]) in (0, len(is_finite)):
        return ids
    return torch.where(is_finite[ids], ids, usable[ids % len(usable)])


def takes_ordinary_inputs(model: Model) -> bool:
    """Return True if the model has transformers' generate: prepare_inputs_for_generation gets ordinary arguments."""
    from transformers import GenerationMixin

    return type(model).generate is GenerationMixin.generate


@torch.no_grad()
def makes_own_state(model: Model) -> bool:
    """Tell whether the model, given no cache, makes a state of a class of its own and returns it.

    It is run on two tokens, because the argument may have the same name as that of a cache of transformers.
    """
    name = cache_argument(model)
    if name is None or model._supports_default_dynamic_cache():
        return False
    ids = torch.ones(1, 2, dtype=torch.int64, device=device_of(model))
    output = attempt(lambda: model(input_ids=ids, use_cache=True, return_dict=True))
    state = None if isinstance(output, Refusal) else getattr(output, name, None)
    return state is not None and not isinstance(state, Cache)


def refuse_own_inputs(model: Model, batch: dict[str, torch.Tensor]) -> None:
    """Refuse a model whose prepare_inputs_for_generation does not return what transformers' default returns."""
    from transformers import DynamicCache, GenerationMixin

    if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        return
    numbers: list[torch.Tensor | None] = []
    # The first step and a later one: some models number the tokens anew in each.
    for prefill in (True, False):
        options: dict[str, Any] = {
            **batch,
            CACHE: DynamicCache(config=model.config),
            "use_cache": True,
            "logits_to_keep": 1,
            "is_first_iteration": prefill,
            "next_sequence_length": None if prefill else 1,
        }
        own = model.prepare_inputs_for_generation(**options)
        plain: dict[str, Any] = GenerationMixin.prepare_inputs_for_generation(model, **options)
        numbers.append(own.get("position_ids"))
        # Positions are left to the comparison of logits.
        for name in (own.keys() | plain.keys()) - {"position_ids"}:
            a, b = own.get(name), plain.get(name)
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                same = torch.equal(a, b)
            else:
                same = a is b or (not isinstance(a or b, torch.Tensor) and (a or None) == (b or None))
            if not same:
                raise UnsupportedModelError(f"its prepare_inputs_for_generation makes its own {name}")
    first, later = numbers
    if (first is None) != (later is None) or (
        first is not None and later is not None and not torch.equal(first[..., -1:], later)
    ):
        raise UnsupportedModelError("its prepare_inputs_for_generation numbers the tokens again at every step")


# -- rows to try a model on ----------------------------------------------------------------------------------------

LENGTHS = (5, 3)
"""Tokens of the two rows of `padded_batch`. They differ, so that a trial has a row with left padding."""


def padded_batch(model: Model) -> dict[str, torch.Tensor]:
    """Inputs of two left-padded rows: int64 [2, 5] each."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    # Different tokens, so that an exchange of two shows.
    ids = torch.tensor([[13, 11, 12, 25, 14], [0, 0, 27, 16, 31]], dtype=torch.int64, device=device_of(model)) % vocab
    ids = trial_ids(model, ids)
    mask = torch.ones_like(ids)
    mask[1, : LENGTHS[0] - LENGTHS[1]] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return batch


def without_padding(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row of `padded_batch` alone."""
    return [{name: each[row : row + 1, -length:] for name, each in batch.items()} for row, length in enumerate(LENGTHS)]


def step_inputs(model: Model, given: dict[str, Any], past: Any, start: int, stop: int) -> dict[str, Any]:
    """Make the arguments that generate passes to the forward of tokens `start` to `stop - 1`."""
    is_first = start == 0
    ids, *beside = of_tokens = _of_tokens(given)
    inputs = {name: each[:, :stop] if name in (ids, *beside) else each for name, each in given.items()}
    options: dict[str, Any] = {CACHE: past, "use_cache": True}
    if of_tokens is _OF_TOKENS[0] and not takes_ordinary_inputs(model):
        return {name: each if name == "attention_mask" else each[:, start:] for name, each in inputs.items()} | options
    # Of the class: PEFT puts a method of its own in place of it during a call.
    made: dict[str, Any] = type(model).prepare_inputs_for_generation(
        model, inputs.pop(ids), **inputs, **options, is_first_iteration=is_first,
        next_sequence_length=None if is_first else stop - start,
    )  # fmt: skip
    return made


_OF_TOKENS = ("input_ids", "attention_mask", "position_ids"), ("decoder_input_ids", "decoder_attention_mask")
"""Arguments with a column for each token, the ids first: of most models, and of a decoder beside an encoder."""


def _of_tokens(given: dict[str, Any]) -> tuple[str, ...]:
    return next(names for names in _OF_TOKENS[::-1] if names[0] in given or names is _OF_TOKENS[0])


def own_steps(model: Model, given: dict[str, Any] | None = None, past: Any = None) -> torch.Tensor:
    """Logits of the last position after a prefill of all tokens but the last, and after a step with the last one: [2 *
    rows, vocab]. given: `padded_batch` if None. past: the cache; that of plain `generate` without an encoder if None.
    """
    past = plain_cache(model.config) if past is None else past
    # Some models write to what they are given.
    given = padded_batch(model) if given is None else copy.deepcopy(given)
    end = given[_of_tokens(given)[0]].shape[1]
    logits = []
    for start, stop in ((0, end - 1), (end - 1, end)):
        inputs = step_inputs(model, given, past, start, stop)
        logits.append(uncompiled(model)(**inputs, return_dict=True).logits[:, -1])
    return torch.cat(logits)
