"""Splits a request's logits processors into those it runs alone and those done together with other requests'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList

from hf_paged.features.watching import stranger
from hf_paged.generation.sampling.editors import Editor, OwnProcessor, editor_of, is_own
from hf_paged.generation.sampling.edits import Edit, apply_edits
from hf_paged.generation.sampling.warpers import is_drawn_through, is_nucleus, warp, warp_nucleus, warper_key


@dataclass(frozen=True, slots=True)
class Chain:
    """The processors of a request in the order in which they run: `own`, then editors and warpers in turn, beginning
    and ending with (possibly no) editors: len(editors) == len(warpers) + 1.

    `own` need the request's row alone. Requests with equal `sampling_key` can be sampled together: their warpers can
    share a call, and either all or none of them have processors of their own; their editors may differ. With
    `is_custom`, some processor is neither transformers' nor ours (`OwnProcessor`). Nothing is known about it, so the
    request is processed alone and all its processors are `own`.

    top_p: the last of all processors, where native code draws a token from what it keeps; it is not in `warpers`.
    """

    own: LogitsProcessorList
    editors: tuple[tuple[Editor, ...], ...]
    warpers: tuple[Any, ...]
    is_custom: bool
    sampling_key: object
    top_p: Any = None

    @property
    def has_editors(self) -> bool:
        return any(self.editors)

    def edits(self, token_ids: Sequence[int]) -> list[list[Edit]]:
        """List the editors' changes after these tokens, prompt included, one list for each run of editors.

        Successive calls pass extensions of one sequence.
        """
        return [[edit for each in run if (edit := each.edit(token_ids)) is not None] for run in self.editors]

    def fork(self) -> Chain:
        """Copy for a text that begins like this one's and continues differently."""
        return replace(self, editors=tuple(tuple(each.fork() for each in run) for run in self.editors))


def chain_of(
    processors: LogitsProcessorList,
    width: int,
    *options: object,
    callers: Sequence[Any] = (),
    is_drawn: bool = False,
) -> Chain:
    """width: number of scores in a row. options: whatever else must be equal for two requests to be sampled together.
    callers: those of the processors that are the caller's objects, whose settings may change at any time.
    is_drawn: native code draws the tokens, and the scores have no other use."""
    if not all(is_known(processor) for processor in processors):
        return Chain(processors, ((),), (), True, object())
    first = len(processors)
    keys: list[object] = []
    warpers: list[Any] = []
    editors: list[list[Editor]] = [[]]
    top_p = None
    # From the end, because only what follows the last processor that runs alone can be shared.
    for processor in reversed(processors):
        if any(processor is each for each in callers):
            break
        if (editor := editor_of(processor, width)) is not None:
            editors[-1].append(editor)
        elif is_drawn and first == len(processors) and is_drawn_through(processor):
            top_p = processor
        elif (key := warper_key(processor)) is not None:
            keys.append(key)
            warpers.append(processor)
            editors.append([])
        else:
            break
        first -= 1
    own = LogitsProcessorList(processors[:first])
    in_order = tuple(tuple(reversed(run)) for run in reversed(editors))
    sampling_key = (*options, bool(own), top_p is not None, *keys)
    return Chain(own, in_order, tuple(reversed(warpers)), False, sampling_key, top_p)


def is_known(processor: Any) -> bool:
    """Return True if the processor is transformers' or ours, and so treats each row as if it were alone."""
    kind = type(processor)
    return is_own(processor) or (kind.__module__.startswith("transformers.") and stranger(kind.__call__) is None)


def of_one_request(processors: LogitsProcessorList, prompt_length: int) -> LogitsProcessorList:
    """The processors for a request of its own: ours follow the answers to one prompt, and other requests may have the
    same object."""
    if not any(isinstance(processor, OwnProcessor) for processor in processors):
        return processors
    return LogitsProcessorList(
        processor.at(prompt_length) if isinstance(processor, OwnProcessor) else processor for processor in processors
    )


def process_together(
    chains: Sequence[Chain], scores: torch.Tensor, edits: Sequence[Sequence[Sequence[Edit]]]
) -> torch.Tensor:
    """scores fp32 [num_rows, vocab], contiguous, a chain for each row, all of one sampling key -> the scores after
    editors and warpers, with the bits that transformers' own processors give for each row alone. May change `scores`.

    edits: for each row what `Chain.edits` returns, or nothing.
    """
    warpers = list(zip(*[chain.warpers for chain in chains]))  # in order, each for all rows
    index = 0
    while True:
        now = [row[index] if row else () for row in edits]
        if any(now):
            apply_edits(scores, now)
        if index == len(warpers):
            return scores
        pair = warpers[index : index + 2]
        is_alone = len(pair) == 1 or any(row and row[index + 1] for row in edits)
        # Edits between the two would see the scores after the first one.
        if not is_alone and is_nucleus(pair[0], pair[1], scores):
            scores, index = warp_nucleus(pair[0], pair[1], scores), index + 2
        else:
            scores, index = warp(pair[0], scores), index + 1


def checked_scores(scores: object, given: torch.Tensor) -> torch.Tensor:
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
