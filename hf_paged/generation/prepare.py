"""Turns a request into what transformers' `generate` would have run for it alone.

`generate` itself does the work, up to its decoding loop: defaults, validation, special tokens, length limits, logits
processors and stopping criteria are its own. Only the loop is replaced, by one that takes notes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_paged.generation.validation import check_prompts, position_limit
from hf_paged.integration import hook


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request after `generate`'s preparation. input_ids int64 [num_rows, prompt_length], all rows alike.

    own_processors: those of `logits_processor` that are the caller's objects.
    """

    input_ids: torch.Tensor
    generation_config: Any
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    uses_beams: bool
    own_processors: tuple[Any, ...] = ()


class _NoteTaker:
    """Stands in for the model inside `generate`; its decoding methods note their arguments and decode nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.prepared: PreparedRequest | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """The engine's memory is not this call's."""

    def _note(self, uses_beams: bool, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        self.prepared = PreparedRequest(
            input_ids,
            kwargs["generation_config"],
            kwargs["logits_processor"],
            kwargs["stopping_criteria"],
            uses_beams,
        )
        return input_ids

    def _sample(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self._note(False, input_ids, kwargs)

    def _beam_search(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self._note(True, input_ids, kwargs)

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError(
            "assisted decoding and prompt lookup roll the cache back, which the engine does not do; "
            "use model.generate(..., cache_implementation='paged')"
        )


def as_prompt(model: Any, prompt_ids: Any) -> torch.Tensor:
    """Token ids as int64 [1, length]. Raises ValueError for what is no prompt of this model."""
    if isinstance(prompt_ids, str):
        raise ValueError(f"prompt_ids={prompt_ids!r} is text; give token ids (tokenizer(text).input_ids)")
    if not isinstance(prompt_ids, torch.Tensor):
        ids = list(prompt_ids)
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        wrong = [token for token in ids if isinstance(token, bool) or not isinstance(token, Integral)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} in the prompt is no token id; integers are needed")
        prompt_ids = torch.tensor(ids, dtype=torch.int64)
    if prompt_ids.ndim == 1:
        prompt_ids = prompt_ids[None]
    if prompt_ids.ndim == 2 and prompt_ids.shape[0] > 1:
        raise ValueError(f"prompt_ids has shape {tuple(prompt_ids.shape)}: one request is one prompt; add one for each")
    check_prompts(model, prompt_ids, "prompt_ids")
    return prompt_ids.to(torch.int64)


_REFUSED = ("output_attentions", "output_hidden_states", "output_logits", "assistant_early_exit", "token_healing")


def _refuse(generation_config: Any) -> None:
    for name in _REFUSED:
        if getattr(generation_config, name, None):
            hint = " (a request's output has log-probabilities)" if name == "output_logits" else ""
            raise ValueError(
                f"{name}={getattr(generation_config, name)!r}: the engine does not do this{hint}; use generate"
            )


def prepare_request(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    *,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    tokenizer: Any = None,
) -> PreparedRequest:
    """input_ids int64 [1, prompt_length]. Raises ValueError on options that the engine cannot honour."""
    _refuse(generation_config)
    if getattr(generation_config, "use_cache", None) is False:
        raise ValueError("use_cache=False contradicts a paged cache; drop it")
    notes = _NoteTaker(model)
    generate = hook.original("generate") if hook.is_installed() else GenerationMixin.generate
    generate(
        notes,
        input_ids,
        generation_config=generation_config,
        attention_mask=torch.ones_like(input_ids),
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        tokenizer=tokenizer,
    )
    prepared = notes.prepared
    if prepared is None:
        raise ValueError("this generation mode has no decoding loop of transformers' own; use model.generate")
    _refuse(prepared.generation_config)  # with what the model's own has
    length, limit = prepared.generation_config.max_length, position_limit(model)
    if limit is not None and length > limit:
        raise ValueError(
            f"{input_ids.shape[1]} prompt tokens and max_length={length} go beyond the model's max_position_embeddings="
            f"{limit}; shorten the prompt or lower max_new_tokens"
        )
    return replace(prepared, own_processors=tuple(logits_processor or ()))
