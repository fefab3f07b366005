"""Edits: changes of a few scores in a row, made for the rows of many requests at once.

Most processors of transformers change few of a row's scores. What each changes is decided on the host (editors.py); the
changes of all rows are carried out here, in a handful of operations. Knows neither requests nor processors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hf_paged.kernels.metadata import to_device
from hf_paged.kernels.sampling import divide_

Ids = NDArray[np.int64]
Words = NDArray[np.int32]
"""A bit for each token, from the lowest bit of the first word on."""


class Op(IntEnum):
    """SCALE: negative scores times `factor`, others divided by it. ADD: plus `values`. FILL: -inf. FORCE: 0 and all
    other scores of the row -inf. GROW: plus the absolute value times `factor`, where that is finite. KEEP: all scores
    but those of the tokens in `words` -inf."""

    SCALE = 0
    ADD = 1
    FILL = 2
    FORCE = 3
    GROW = 4
    KEEP = 5


class Edit(NamedTuple):
    """A change of the scores of tokens `ids`, int64 [n], all different and within the vocabulary.

    values: fp32 [n], for ADD only. factor: for SCALE and GROW only. words: int32 [ceil(vocab / 32)], for KEEP only,
    which has no ids.
    """

    op: Op
    ids: Ids
    values: NDArray[np.float32] | None = None
    factor: float = 0.0
    words: Words | None = None


def apply_edits(scores: torch.Tensor, rows: Sequence[Sequence[Edit]]) -> None:
    """Change scores fp32 [num_rows, vocab], contiguous, in place; each row by its edits, in their order.

    Rows do not depend on each other, so edits of one kind are done together wherever they are in their rows.
    """
    queues = {row: deque(edits) for row, edits in enumerate(rows) if edits}
    while queues:
        op = min(queue[0].op for queue in queues.values())
        chosen: list[tuple[int, Edit]] = []
        for row, queue in queues.items():
            while queue and queue[0].op == op:
                chosen.append((row, queue.popleft()))
                if op not in (Op.FILL, Op.KEEP):
                    break  # the next edit must see the result of this one
        _apply(scores, op, chosen)
        queues = {row: queue for row, queue in queues.items() if queue}


def _apply(scores: torch.Tensor, op: Op, chosen: list[tuple[int, Edit]]) -> None:
    """Carry out edits of one op."""
    if op is Op.KEEP:
        masks: dict[int, Words] = {}
        for row, edit in chosen:
            # A token is left only if every grammar of the row allows it.
            masks[row] = _words(edit) & masks.get(row, _ALL)
        keep_only(scores, list(masks), np.stack(list(masks.values())))
        return
    width = scores.shape[1]
    flat = scores.view(-1)
    index = to_device(np.concatenate([edit.ids + row * width for row, edit in chosen]), scores.device)
    if op is Op.FILL:
        flat.index_fill_(0, index, -torch.inf)
    elif op is Op.FORCE:
        scores.index_fill_(0, to_device(np.array([row for row, _ in chosen]), scores.device), -torch.inf)
        flat.index_fill_(0, index, 0.0)
    else:
        # Read once: an id is there once in a row, so that no change needs another one's result.
        before = flat.index_select(0, index)
        if op is Op.SCALE:
            factor, is_negative = _factor(chosen, scores.device), before < 0
            grown = before * factor
            after = torch.where(is_negative, grown, divide_(before, factor))
        elif op is Op.GROW:
            # An infinite score stays as it is: minus infinity plus infinity would be NaN.
            grown = (before.abs() * _factor(chosen, scores.device)).masked_fill(~before.isfinite(), 0.0)
            after = before + grown
        else:
            after = before + to_device(np.concatenate([_values(edit) for _, edit in chosen]), scores.device)
        flat.index_copy_(0, index, after)


def _factor(chosen: list[tuple[int, Edit]], device: torch.device) -> float | torch.Tensor:
    """The factor of all edits, or fp32 [number of their ids]."""
    factors = [edit.factor for _, edit in chosen]
    if factors.count(factors[0]) == len(factors):
        return factors[0]
    return to_device(np.repeat(np.array(factors, dtype=np.float32), [len(edit.ids) for _, edit in chosen]), device)


def _values(edit: Edit) -> NDArray[Any]:
    assert edit.values is not None
    return edit.values


_ALL = np.int32(-1)


def _words(edit: Edit) -> Words:
    assert edit.words is not None
    return edit.words


def keep_only(scores: torch.Tensor, rows: Sequence[int], words: NDArray[np.int32]) -> None:
    """Set the scores [*, vocab] in these rows to -inf, in place, but for the tokens of words int32 [len(rows),
    ceil(vocab / 32)]. The rows are all different."""
    width = scores.shape[1]
    if scores.device.type == "cpu":
        bits = np.unpackbits((~words).view(np.uint8), axis=1, bitorder="little")[:, :width].view(np.bool_)
        if scores.dtype == torch.bfloat16:  # which numpy does not have
            for row, forbidden in zip(rows, torch.from_numpy(bits)):
                scores[row].masked_fill_(forbidden, -torch.inf)
            return
        values = scores.detach().numpy()
        for row, forbidden in zip(rows, bits):
            np.copyto(values[row], -np.inf, where=forbidden)
        return
    every = np.full((len(scores), words.shape[1]), _ALL)
    every[list(rows)] = words
    scores.masked_fill_(_forbidden(to_device(every, scores.device))[:, :width], -torch.inf)


def _forbidden(words: torch.Tensor) -> torch.Tensor:
    """words int32 [rows, n] -> bool [rows, 32 n]: the bits that are not set."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and(1).eq(0).view(len(words), -1)
