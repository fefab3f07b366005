"""Decides the route of a paged generate call: packed rows, or transformers' loop and the reason why.

Each function names an obstacle to packed rows, or returns None. Nothing is decided by a model's name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.watching import replaced_method
from hf_paged.integration.names import CACHE, TYPES
from hf_paged.model.support import SupportReport, draws_dropout, rotary_limit
from hf_paged.model.trial import Refusal, attempt

# What a packed row can carry. Anything else in the model's arguments goes to transformers' loop, which passes it on.
_PACKED_KWARGS = frozenset({"attention_mask", "position_ids", "logits_to_keep", "use_cache", CACHE})


@dataclass(frozen=True, slots=True)
class Asked:
    """A paged call of `generate` as transformers has prepared it.

    model_kwargs: of the model's forward. mode: how the call decodes, in transformers' words. num_prompts: rows of the
    batch, of which each has `expand` beams or samples. prompt_length: tokens of each, padding included.
    """

    model: Model
    report: SupportReport
    config: Any
    model_kwargs: dict[str, Any]
    mode: str
    num_prompts: int
    prompt_length: int

    @property
    def expand(self) -> int:
        return int(max(self.config.num_beams, self.config.num_return_sequences))

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.expand

    @property
    def cache(self) -> Any:
        """The cache that the caller has given, or None."""
        return self.model_kwargs.get(CACHE)

    @property
    def mask(self) -> torch.Tensor | None:
        return self.model_kwargs.get("attention_mask")

    @property
    def returns_cache(self) -> bool:
        return bool(self.config.return_dict_in_generate) or self.config.is_assistant

    @property
    def new_columns(self) -> int:
        """Columns of input_ids that the given cache lacks, as transformers' loop counts them; 0 if that is unclear.

        The ids are those of the whole conversation, or only the new ones; the mask always covers the whole one.
        """
        mask, columns, length = self.mask, self.prompt_length, self.cache.get_seq_length()
        covered = mask.shape[1] if mask is not None else getattr(self.config, "_mask_length", -1)
        if covered == columns:
            return int(columns - length)
        return columns if covered == columns + length else 0


def argument_obstacle(model: Model, report: SupportReport, kwargs: dict[str, Any]) -> str | None:
    """An obstacle in the model or in the arguments of `generate`."""
    from transformers import GenerationMixin

    if kwargs.get("custom_generate") is not None:
        return "custom_generate is a callable that drives the model itself"
    for name in ("_sample", "_beam_search", "_prefill"):
        if name in vars(model) or getattr(type(model), name) is not getattr(GenerationMixin, name):
            return f"{report.model} has a {name} of its own"
    if _goes_on_otherwise(model):
        return f"{report.model} has a _update_model_kwargs_for_generation of its own"
    if kwargs.get("position_ids") is not None:
        return "position_ids are given explicitly"
    if model.training and draws_dropout(model):
        return "the model is in training mode, where dropout depends on the batch layout"
    return None


def call_obstacle(asked: Asked, carried: Collection[str] = ()) -> str | None:
    """An obstacle in the call's final generation config, in the arguments of the model's forward, or in a given cache.
    carried: further arguments that a packed row can carry."""
    model, report, config = asked.model, asked.report, asked.config
    obstacle = mode_obstacle(config, asked.mode) or _argument_of_forward(asked, carried)
    if obstacle is None and config.prefill_chunk_size and not report.native:
        obstacle = f"prefill_chunk_size splits prompts, and {report.reason}"
    if obstacle is None and _prepares_otherwise(model):
        obstacle = f"{report.model} prepares the inputs of a step in a way of its own"
    obstacle = obstacle or _layout_obstacle(report, config.max_length, asked.mask)
    return obstacle if asked.cache is None else obstacle or _cache_obstacle(asked)


def _cache_obstacle(asked: Asked) -> str | None:
    """An obstacle in the given cache."""
    cache, mask, num_rows = asked.cache, asked.mask, asked.num_rows
    if not asked.report.native:
        return asked.report.reason
    if type(cache) is not PagedKVCache:
        return f"{CACHE} is a {type(cache).__name__}, which may do more than keep K/V in blocks"
    if cache.counts_media:
        return f"the rows of {CACHE} show images, after which the model counts positions in a way of its own"
    if not cache.is_even:
        return f"the layers of {CACHE} hold different numbers of tokens"
    if asked.new_columns < 1:
        return f"input_ids and attention_mask do not continue {CACHE}"
    if not cache.num_rows:  # an empty cache takes any rows
        return None
    # A cache is never repeated for beams or samples: each row of the call continues its own.
    if cache.num_rows != num_rows:
        return f"{CACHE} has {cache.num_rows} rows, the call {num_rows}"
    padding = [0] * num_rows if mask is None else (mask == 0).sum(dim=1).tolist()
    if padding != cache.padding:
        return f"attention_mask has {padding} zeros, but the rows of {CACHE} {cache.padding} of padding"
    if asked.report.native_length is not None:
        return _layout_obstacle(asked.report, asked.config.max_length + cache.get_seq_length(), mask)
    return None


def mode_obstacle(config: Any, mode: str) -> str | None:
    """An obstacle in how the call decodes, or in what it returns."""
    if mode not in ("greedy_search", "sample", "beam_search", "beam_sample"):
        return f"{mode.replace('_', ' ')} rolls the cache back"
    if config.is_assistant:
        return "this model drafts for another one"
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name):
            return f"{name} shows tensors of the padded batch"
    return None


def _argument_of_forward(asked: Asked, carried: Collection[str]) -> str | None:
    for name, value in asked.model_kwargs.items():
        # An empty dictionary is no input: transformers adds one for the images of a prompt that has none.
        is_empty = value is None or (isinstance(value, dict) and not value)
        if not is_empty and name not in _PACKED_KWARGS and name not in carried:
            return f"the model is given {name}"
    if asked.mask is not None and asked.mask.ndim != 2:
        return "the attention mask is not a padding mask"
    if asked.mask is not None and not is_left_padding(asked.mask):
        return "the attention mask is not left padding"
    return None


def patches_inputs(model: Model) -> bool:
    """Return True if other code has set `prepare_inputs_for_generation` on this model.

    Raises UnsupportedModelError for an adapter that brings its K/V in a cache of its own.
    """
    name = "prepare_inputs_for_generation"
    if name in vars(model):
        # Patched on this model, as PEFT does for prompts of virtual tokens.
        adapter = getattr(getattr(vars(model)[name], "__self__", None), "active_peft_config", None)
        kind = getattr(adapter, "peft_type", None)
        if kind in ("PREFIX_TUNING", "CARTRIDGE"):
            raise UnsupportedModelError(
                f"the {kind.value} adapter brings its K/V in a cache of its own; call generate without "
                "cache_implementation"
            )
        return True
    return False


def _prepares_otherwise(model: Model) -> bool:
    """Return True if `prepare_inputs_for_generation` may make other inputs than the support probe saw.

    Packed rows do not call this method.
    """
    from transformers import GenerationMixin

    name = "prepare_inputs_for_generation"
    if patches_inputs(model) or replaced_method(model, name) is not None:
        return True
    # Rotary factors that change with the length make some models start their cache anew on the way.
    own = getattr(type(model), name) is not getattr(GenerationMixin, name)
    return own and rotary_limit(model) is not None


def _goes_on_otherwise(model: Model) -> bool:
    """Return True if the model may update the next step's arguments in a way of its own that packed rows would miss.

    The types of generated tokens do not count: packed rows do not read them, as these tokens attend to all former ones.
    """
    from transformers import GenerationMixin
    from transformers.utils.generic import ModelOutput

    name = "_update_model_kwargs_for_generation"
    if name in vars(model):
        return True
    own, plain = getattr(type(model), name), getattr(GenerationMixin, name)
    if own is plain:
        return False
    outputs = ModelOutput(logits=torch.zeros(1, 3, 1, dtype=torch.float32, device="cpu"))
    row = torch.arange(3, dtype=torch.int64, device="cpu")[None]
    of_tokens = dict.fromkeys(("position_ids", *TYPES), row)
    given = {"attention_mask": torch.ones_like(row), **of_tokens, "use_cache": True}
    results = attempt(lambda: [update(model, outputs, dict(given)) for update in (own, plain)])
    if isinstance(results, Refusal):
        # It wants more than that.
        return True
    read = [{name: value for name, value in result.items() if name not in TYPES} for result in results]
    tensors = [{name: value for name, value in each.items() if torch.is_tensor(value)} for each in read]
    rest = [{name: value for name, value in each.items() if not torch.is_tensor(value)} for each in read]
    same = tensors[0].keys() == tensors[1].keys() and rest[0] == rest[1]
    return not (same and all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items()))


def is_left_padding(mask: torch.Tensor) -> bool:
    """mask [rows, length]: zeros, then ones, in every row."""
    binary = (mask == 0) | (mask == 1)
    return bool(binary.all() & (mask[:, 1:] >= mask[:, :-1]).all())


def _layout_obstacle(report: SupportReport, max_length: int, mask: torch.Tensor | None) -> str | None:
    """A property of this batch that changes what the model computes for it."""
    if report.native_length is not None and max_length > report.native_length:
        return f"the rotary embedding changes with the length beyond {report.native_length} tokens"
    if report.counts_padding and mask is not None and not bool(mask.all()):
        return "the model numbers tokens with the left padding"
    return None
