"""Splits a request's logits processors into those it runs alone and those it may share with other requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

# Each of these treats every row of the scores on its own and ignores the tokens, so several requests can share a call.
_WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.LogitNormalization,
)


@dataclass(frozen=True, slots=True)
class SplitProcessors:
    """The processors of a request in the order in which they run: `own`, which may look at its tokens, then `warpers`.

    Requests with equal `sampling_key` can be sampled together: their warpers do the same, and either all or none of
    them have processors of their own. With `is_custom`, some processor comes from outside transformers. Nothing is
    known about it, so the request is processed alone and all its processors are `own`.
    """

    own: LogitsProcessorList
    warpers: tuple[Any, ...]
    is_custom: bool
    sampling_key: object


def split_processors(processors: LogitsProcessorList, *options: object, callers: Sequence[Any] = ()) -> SplitProcessors:
    """options: whatever else must be equal for two requests to be sampled together. callers: those of the processors
    that are the caller's objects, whose settings may change at any time."""
    if any(not type(processor).__module__.startswith("transformers.") for processor in processors):
        return SplitProcessors(processors, (), True, object())
    first = len(processors)
    keys: list[object] = []
    while first > 0 and (key := _warper_key(processors[first - 1])) is not None:
        if any(processors[first - 1] is processor for processor in callers):
            break
        keys.append(key)
        first -= 1
    own = LogitsProcessorList(processors[:first])
    return SplitProcessors(own, tuple(processors[first:]), False, (*options, bool(own), *keys))


def _warper_key(processor: Any) -> object:
    """Equal for warpers that do the same; None if the processor is not one of the known warpers."""
    settings = vars(processor)
    if type(processor) not in _WARPERS or not all(isinstance(x, (int, float)) for x in settings.values()):
        return None
    return type(processor), *sorted(settings.items())


def checked_scores(scores: Any, given: torch.Tensor) -> torch.Tensor:
    """The scores that processors returned for `given` [num_rows, vocab], if tokens can be chosen from them.

    Raises ValueError otherwise. On a GPU an index beyond the vocabulary would end the process, so the shape is checked
    on the host before any operation uses the scores.
    """
    if not isinstance(scores, torch.Tensor):
        raise ValueError(f"the logits processors returned a {type(scores).__name__}; a tensor of scores is needed")
    if scores.ndim != 2 or len(scores) != len(given) or not 0 < scores.shape[1] <= given.shape[1]:
        raise ValueError(
            f"the logits processors returned scores of shape {tuple(scores.shape)} for {tuple(given.shape)}"
        )
    return scores
