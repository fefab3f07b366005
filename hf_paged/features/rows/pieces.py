"""Runs of an executor that computes sequences piece by piece. Knows sequences by id; never requests or sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hf_paged.features.media.media import MediaPart
from hf_paged.sockets import Parts, Results


class Part(NamedTuple):
    """The next tokens of a sequence, after `start` computed ones. Logits are wanted after the last `keep` of them.

    media: what they show. delta: what is added to their indices to get their positions, where media do not say them.
    encoder: id of the sequence of the encoder's states that they read. note: gets its hidden states
    [len(ids), size]."""

    seq_id: int
    ids: Sequence[int]
    start: int
    keep: int = 1
    media: MediaPart | None = None
    delta: int = 0
    encoder: Any = None
    note: Callable[[torch.Tensor], None] | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


Piece = tuple[int, int]
"""The positions of the first token of a piece, and of the one after its last."""


def run_pieces(
    parts: Parts,
    pieces: list[list[Piece]],
    forward: Callable[[list[Part]], Sequence[torch.Tensor | Exception]],
    failed: dict[int, Exception],
) -> Results:
    """Compute the pieces of each part one after another, those of all parts together.

    forward: returns the logits [keep, vocab] of each, or its error. failed: errors of parts that are not computed.
    """
    counts = parts.lengths
    ends = list(accumulate(counts))
    # A forward computes the last rows of a piece, which may be more than are wanted: these are found by their places.
    wanted = range(len(parts.tokens)) if parts.wanted is None else parts.wanted
    is_wanted, found = set(wanted), dict[int, tuple[torch.Tensor, int]]()
    is_hidden, hidden = set(parts.hidden), dict[int, tuple[torch.Tensor, int]]()
    nothing = [None] * len(counts)
    shown, encoders = (parts.extra.get(name, nothing) for name in ("media", "encoder"))
    deltas = parts.extra.get("delta", [0] * len(counts))
    while going := [index for index, own in enumerate(pieces) if own and index not in failed]:
        batch, places = [], []
        for index in going:
            start, stop = pieces[index].pop(0)
            shift = ends[index] - counts[index] - parts.starts[index]
            rows = [place for place in range(start + shift, stop + shift) if place in is_wanted]
            places.append((stop + shift, rows))
            ids, keep = parts.tokens[start + shift : stop + shift], stop + shift - rows[0] if rows else 1
            media = None if shown[index] is None else shown[index].part(start, stop)
            own = [place for place in range(start + shift, stop + shift) if place in is_hidden] if is_hidden else []
            note = partial(_note, hidden, own, start + shift) if own else None
            batch.append(Part(parts.seq_ids[index], ids, start, keep, media, deltas[index], encoders[index], note))
        for index, (end, rows), logits in zip(going, places, forward(batch)):
            if isinstance(logits, Exception):
                failed[index] = logits
            else:
                found.update((place, (logits, place - end + len(logits))) for place in rows)
    lost = {place for index in failed for place in range(ends[index] - counts[index], ends[index])}
    kept = _joined([found[place] for place in wanted if place not in lost])
    noted = [place for place in parts.hidden if place not in lost]
    if noted and hidden.keys() >= set(noted):
        parts.hidden_rows = torch.cat(_joined([hidden[place] for place in noted]))
    return torch.cat(kept) if kept else None, failed


def _note(hidden: dict[int, tuple[torch.Tensor, int]], places: list[int], first: int, states: torch.Tensor) -> None:
    hidden.update((place, (states, place - first)) for place in places)


def _joined(rows: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """These rows of tensors, with neighbours in one: a prompt may want thousands."""
    runs: list[tuple[torch.Tensor, int, int]] = []
    for tensor, row in rows:
        if runs and runs[-1][0] is tensor and runs[-1][2] == row:
            runs[-1] = tensor, runs[-1][1], row + 1
        else:
            runs.append((tensor, row, row + 1))
    return [tensor[start:stop] for tensor, start, stop in runs]
