"""Prepares a request as transformers' `generate` would if it ran alone.

`generate` itself does the work up to its decoding loop: defaults, validation, special tokens, length limits, logits
processors and stopping criteria. Only the loop is replaced, by one that records its arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria

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

    @property
    def max_length(self) -> int:
        """Tokens, prompt included, after which the request has ended."""
        limits = [c.max_length for c in self.stopping_criteria if type(c) is MaxLengthCriteria]
        return min([self.generation_config.max_length, *limits])


class StopStrings:
    """The criteria for stop strings of one tokenizer, kept because each takes hundreds of milliseconds to make.

    A criterion has no state, so requests may share it. A tokenizer that has got more tokens gets new ones.
    """

    MAX_KEPT = 16  # a table has some numbers for each token of the vocabulary

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[int, tuple[str, ...]], StopStringCriteria] = OrderedDict()  # by last use
        self._tokenizer: Any = None

    def criterion(self, tokenizer: Any, strings: str | list[str]) -> StopStringCriteria:
        if tokenizer is not self._tokenizer:
            self._made.clear()
            self._tokenizer = tokenizer
        key = (len(tokenizer), (strings,) if isinstance(strings, str) else tuple(strings))
        if key not in self._made:
            self._made[key] = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
            if len(self._made) > self.MAX_KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]


class _NoteTaker:
    """Takes the place of the model in `generate`. Its decoding methods record their arguments and decode nothing."""

    def __init__(self, model: Any, stop_strings: StopStrings) -> None:
        self._model = model
        self._stop_strings = stop_strings
        self.prepared: PreparedRequest | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """No cache: the engine has its own memory."""

    def _get_stopping_criteria(
        self, generation_config: Any, stopping_criteria: Any, tokenizer: Any = None, **kwargs: Any
    ) -> StoppingCriteriaList:
        """transformers' own, but for stop strings, whose criterion is a kept one."""
        strings = generation_config.stop_strings
        # transformers prefers a criterion of the caller's to the config's strings.
        is_own = any(type(each) is StopStringCriteria for each in stopping_criteria or ())
        if strings is None or tokenizer is None or is_own:
            return self._model._get_stopping_criteria(generation_config, stopping_criteria, tokenizer, **kwargs)
        criterion = self._stop_strings.criterion(tokenizer, strings)
        others = copy(generation_config)
        others.stop_strings = None
        criteria = self._model._get_stopping_criteria(others, stopping_criteria, tokenizer, **kwargs)
        criteria.append(criterion)
        return criteria

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


def prepare_request(
    model: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    *,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    tokenizer: Any = None,
    stop_strings: StopStrings,
) -> PreparedRequest:
    """input_ids int64 [1, prompt_length]. The arguments have been checked, as far as `validation` does. stop_strings:
    the criteria for stop strings that earlier requests have made.

    Raises ValueError on options that transformers refuses.
    """
    notes = _NoteTaker(model, stop_strings)
    generate = hook.original("generate") if hook.is_installed() else GenerationMixin.generate
    try:
        generate(
            notes,
            input_ids,
            generation_config=generation_config,
            attention_mask=torch.ones_like(input_ids),
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer,
        )
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        # Nothing of the caller's runs in there: an option of a type that transformers does not check.
        raise ValueError(
            f"an option of the generation config cannot be used: {type(error).__name__}: {error}"
        ) from error
    prepared = notes.prepared
    if prepared is None:
        raise ValueError("this generation mode has no decoding loop of transformers' own; use model.generate")
    return replace(prepared, own_processors=tuple(logits_processor or ()))
