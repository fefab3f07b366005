"""Splits a request's logits processors into those it runs alone and those done together with other requests'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

from hf_paged.generation.sampling.editors import Editor, editor_of
from hf_paged.generation.sampling.edits import Edit, apply_edits

# Each of these treats every row of the scores on its own and ignores the tokens, so several requests can share a call.
_WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)


@dataclass(frozen=True, slots=True)
class Chain:
    """The processors of a request in the order in which they run: `own`, then editors and warpers in turn, beginning
    and ending with (possibly no) editors: len(editors) == len(warpers) + 1.

    `own` need the request's row alone. Requests with equal `sampling_key` can be sampled together: their warpers do the
    same, and either all or none of them have processors of their own; their editors may differ. With `is_custom`, some
    processor comes from outside transformers. Nothing is known about it, so the request is processed alone and all its
    processors are `own`.
    """

    own: LogitsProcessorList
    editors: tuple[tuple[Editor, ...], ...]
    warpers: tuple[Any, ...]
    is_custom: bool
    sampling_key: object

    @property
    def has_editors(self) -> bool:
        return any(self.editors)

    def edits(self, token_ids: Sequence[int]) -> list[list[Edit]]:
        """What the editors change after these tokens, prompt included. Called with ever more tokens of one text."""
        return [[edit for each in run if (edit := each.edit(token_ids)) is not None] for run in self.editors]


def chain_of(processors: LogitsProcessorList, width: int, *options: object, callers: Sequence[Any] = ()) -> Chain:
    """width: number of scores in a row. options: whatever else must be equal for two requests to be sampled together.
    callers: those of the processors that are the caller's objects, whose settings may change at any time."""
    if any(not type(processor).__module__.startswith("transformers.") for processor in processors):
        return Chain(processors, ((),), (), True, object())
    first = len(processors)
    keys: list[object] = []
    warpers: list[Any] = []
    editors: list[list[Editor]] = [[]]
    for processor in reversed(processors):
        if any(processor is each for each in callers):
            break
        if (editor := editor_of(processor, width)) is not None:
            editors[-1].append(editor)
        elif (key := _warper_key(processor)) is not None:
            keys.append(key)
            warpers.append(processor)
            editors.append([])
        else:
            break
        first -= 1
    own = LogitsProcessorList(processors[:first])
    in_order = tuple(tuple(reversed(run)) for run in reversed(editors))
    return Chain(own, in_order, tuple(reversed(warpers)), False, (*options, bool(own), *keys))


_NO_IDS = torch.zeros(0, 0, dtype=torch.int64)  # warpers do not look at tokens


def process_together(
    warpers: Sequence[Any], scores: torch.Tensor, edits: Sequence[Sequence[Sequence[Edit]]], *, keep: torch.Tensor
) -> torch.Tensor:
    """scores fp32 [num_rows, vocab] -> the scores after editors and warpers, with the bits that transformers' own
    processors give for each row alone. May change `scores` in place, but not `keep`, which may be the same tensor.

    warpers: of all rows. edits: for each row what `Chain.edits` returns, or nothing if the row has no editors.
    """
    for index, warper in enumerate((*warpers, None)):
        now = [row[index] if row else () for row in edits]
        if any(now):
            scores = scores.clone() if scores is keep else scores
            apply_edits(scores, now)
        if warper is not None:
            scores = warper(_NO_IDS, scores)  # a new tensor
    return scores


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
