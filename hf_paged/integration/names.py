"""The names that the installed transformers has for a model's cache, and what else differs between its versions.

Every other module uses these names, so that one line here follows a version. What a version does is read from its
functions, never from its number. Transformers 5.24 calls the argument, the output field and the entry of
`model_kwargs` "cache"; before, it was "past_key_values".
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin, SequenceBiasLogitsProcessor
from transformers.cache_utils import EncoderDecoderCache

from hf_paged.annotations import Model

_RENAMED, _OLD = "cache", "past_key_values"
_IS_RENAMED = _RENAMED in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

CACHE = _RENAMED if _IS_RENAMED else _OLD
"""The argument of a model's forward that carries K/V, the output field that returns it, and its key in the arguments of
`generate`."""

CACHE_NAMES = frozenset({_RENAMED, _OLD})
"""Both names, for tables of arguments that serve all versions."""

STATE_NAMES = ("cache_params", "state")
"""Arguments and output fields that carry states of a fixed size, where a model does not call them `CACHE`."""

OTHER_NAMES = frozenset({*STATE_NAMES, "mems", "past_buckets_states"})
"""Arguments that carry a state instead of K/V, for the reason of a refusal."""

TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments with the types of a prompt's tokens. Generated tokens attend to all former ones, whatever these are."""

EDITS_ARE_KNOWN = "multi_token_biases" in SequenceBiasLogitsProcessor.__init__.__code__.co_names
"""True if penalties and biases compute what the engine's editors do (since 5.23). Before, results differed for prompts
as short as a bias, and for scores that are not finite."""

ENCODES_MEDIA = hasattr(GenerationMixin, "_prepare_multimodal_encoder_kwargs_for_generation")
"""True if forwards take media that were encoded before (since 5.18)."""

SORTS_DRAWS = "sort" in GenerationMixin._get_top_k_continuations.__code__.co_names
"""True if beam sampling continues with the drawn tokens in the order of their scores (since 5.24); before, in the order
in which they were drawn."""

PREPARE_ENCODER = ("_maybe_prepare_encoder_kwargs_for_generation", "_prepare_encoder_decoder_kwargs_for_generation")
"""The method in which `generate` runs the encoder, in later and earlier versions of transformers."""


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call of `generate`, or None.

    If both names are given, the newer one wins, even with None, as in transformers.
    """
    return kwargs.get(_OLD if _IS_RENAMED and CACHE not in kwargs else CACHE)


def paged_part(cache: object) -> Any:
    """Return the self-attention part of a cache that may also have one for cross-attention."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def cache_argument(model: Model) -> str | None:
    """Return the argument of the model's forward that carries its cache, or None if there is none that is known."""
    parameters = forward_parameters(model)
    return next((name for name in (CACHE, *STATE_NAMES) if name in parameters), None)


def forward_parameters(model: Model) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the model's forward; of one that takes any keyword, also those of the forward that its
    class has replaced, to which it may pass them."""
    found: dict[str, inspect.Parameter] = {}
    forwards = (vars(kind)["forward"] for kind in type(model).__mro__ if "forward" in vars(kind))
    for forward in (model.forward, *forwards):
        parameters = inspect.signature(forward).parameters
        found = {**parameters, **found}
        # A forward that takes any keyword may pass it to the one that it has replaced.
        if all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            break
    return found


def has_old_name(model: Model) -> bool:
    """Tell whether the forward, which is not transformers' own, has the name that this version no longer passes."""
    parameters = inspect.signature(model.forward).parameters
    return _OLD in parameters and CACHE not in parameters


def cache_of(output: Any) -> Any:
    """Return the cache in an output of a model or of `generate`."""
    return getattr(output, CACHE)


def set_cache(output: Any, cache: Any) -> None:
    """Put a cache into an output of `generate`."""
    setattr(output, CACHE, cache)
