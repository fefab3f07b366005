"""The inputs besides tokens that a step of generate passes to a model which prepares its own inputs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.names import CACHE, cache_argument
from hf_paged.model.devices import device_of


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
    try:
        weight = model.get_input_embeddings().weight[:_FIRST_ROWS].detach()
        is_finite = weight.float().isfinite().all(-1).to(ids.device)
        usable = is_finite.nonzero()[:, 0]
    except Exception:  # it has no such embedding, one of a class of its own, or one that is not here (offloaded)
        return ids
    if len(usable) in (0, len(is_finite)):
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
    try:
        state = getattr(model(input_ids=ids, use_cache=True, return_dict=True), name, None)
    except Exception:  # of the model, which needs more than tokens
        return False
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
