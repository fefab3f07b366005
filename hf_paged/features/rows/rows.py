"""Computes sequences as the rows of batches, as `generate` does with a left-padded one, for models that do not run
packed: those that each compute one token are one forward `[num_rows, 1]`, and prompts that begin are another.

- *K/V* lies in the same blocks as in a packed step. The cache shows sequences as its rows (`PagedKVCache.view_rows`).
  Where attention can be routed to our kernels, they read block tables. Elsewhere each layer gathers a dense view, with
  padding on the left, a mask and positions for each row.
- *States* (recurrent, convolution, an indexer's keys) are in `States`: a forward takes those of its rows, joined, and
  changes them in place. A layer has one flag for all rows that says whether there is a state, so that prompts that
  begin and rows that continue never mix. Sequences whose forward is interrupted lose their states: see `lost`.
- *A model without K/V* has states alone. Its memory has no groups of layers, and so no blocks.

Which rows may share a forward is found by trying (`row_trial`). Rows never mix beyond the length from which a rotary
embedding depends on the longest row, nor while third-party code is in the model. Where results depend on how a prompt
is split, it is computed as a whole, then one token at a time; anything else in any pieces. Pieces that continue prompts
share a forward if they have as many tokens. Knows models and the ids of sequences; never requests or sampling.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import LayersChanged
from hf_paged.features.rows.forwards import Rows
from hf_paged.features.rows.pieces import Part, Piece, run_pieces
from hf_paged.model.devices import device_of
from hf_paged.model.hidden import no_hidden
from hf_paged.model.overrides import Override
from hf_paged.model.state import state_of
from hf_paged.model.support import examine, rotary_limit
from hf_paged.sockets import Executor, Parts, Results

Together = Literal["any", "equal", "one"]
"""Rows that share a forward: any, those of equal length, or none."""

PADDED_TOKENS = 1024
"""Positions of a forward that may be padding for any part. In a larger one, at most a fifth of them is padding."""

FORWARDS = 16
"""Most forwards of a run, where each token of a prompt is one."""

# On a GPU, `generation/engine/sizing.py` leaves room for a dense view of so many positions.
VIEWED_TOKENS = 1 << 17
"""Positions of a forward of several parts: each layer gathers their K/V beside the blocks."""


class Way(NamedTuple):
    """The way in which a model computes rows; see the attributes of RowModel with these names."""

    by_tables: bool
    depends_on_split: bool
    prompts: Together
    decodes: Together
    pieces: Together
    state_bytes: dict[torch.device, int]
    tensor_bytes: dict[torch.device, int]
    bytes_per_token: dict[torch.device, int]
    no_prefixes: str


class RowModel(Executor):
    """A model bound to a PagedMemory. `forward` computes the next tokens of sequences, as many rows at once as the
    model allows.

    Invariant: `states` has the state of every sequence with computed tokens, after the last computed token. Its `fork`,
    and `free`, must be called together with those of the block tables. An interrupted `forward` may break it: see
    `lost`.

    `depends_on_split`: results depend on how a sequence is split into forwards. (A recurrent layer may resume its state
    for one token only, a windowed cache returns what it holds at that time, and some models cannot continue a prompt.)
    `no_prefixes`: why a sequence cannot begin with what another one has computed; "" if it can, in any pieces, or by
    single tokens where results depend on the split.
    `is_incremental`: a sequence must be computed as generate does: the whole prompt, then one token at a time. So it is
    if results depend on the split, and the caller sets it while third-party code in the model may depend on it.
    `is_alone`: every forward has one row; the caller sets it in the same case.
    `prompts`, `decodes`, `pieces`: which rows share a forward in which they begin, advance by one token, or by as many.
    `by_tables`: attention reads K/V through the block tables, not a dense view (while `is_alone` is False).
    """

    model: Model
    memory: PagedMemory
    viewed_tokens = VIEWED_TOKENS

    def __init__(self, model: Model, memory: PagedMemory, way: Way, overrides: Sequence[Override] = ()) -> None:
        self.model = model
        self.memory = memory
        self.by_tables, self.depends_on_split = way.by_tables, way.depends_on_split
        self.prompts, self.decodes, self.pieces = way.prompts, way.decodes, way.pieces
        self._rows = Rows(model, memory, by_tables=way.by_tables, overrides=overrides)
        self.states, self.has_states = self._rows.states, self._rows.has_states
        self._limit = rotary_limit(model) or math.inf
        self.state_bytes, self.tensor_bytes = way.state_bytes, way.tensor_bytes
        self.state_bytes_per_token, self.no_prefixes = way.bytes_per_token, way.no_prefixes
        self.is_incremental = self.depends_on_split
        self.is_alone = False
        self.weights = state_of(model).weights
        self.weights.look()
        self._structure = self.weights.structure
        self.max_length = rotary_limit(model, ["dynamic"])
        self.no_hidden = no_hidden(model)

    @property
    def verifies(self) -> bool:
        return not self.is_incremental

    @property
    def splits_prompts(self) -> bool:
        return self.one_order is not None or not self.is_incremental

    @property
    def order_obstacle(self) -> str:
        if self.by_tables or not self._rows.has_kv:
            return ""
        return f"the model reads a dense view of its K/V ({examine(self.model).present.reason})"

    @property
    def chunk(self) -> int | None:
        return None if self.one_order is None else FORWARDS

    def beside(self, reason: str | None) -> RowModel:
        self.is_alone = reason is not None
        self.is_incremental = self.depends_on_split or self.is_alone
        return self

    def measure(self, tried: Model, num_tokens: int) -> None:
        count = num_tokens if device_of(self.model).type == "cuda" else 1
        self.memory.hold(count)
        self.memory.append([(-1, count)])
        self.forward([Part(-1, [0] * count, 0)], tried=tried)
        self.free(-1)
        self.memory.free(-1)

    def fork(self, parent_id: int, child_id: int) -> None:
        self.states.fork(parent_id, child_id)

    def give_states(self, seq_ids: Sequence[int], cache: Any) -> None:
        if self.has_states:
            rows = [(seq_id, self.memory.manager.num_tokens(seq_id)) for seq_id in seq_ids]
            cache.set_states(self.states.joined(rows))

    def suspend(self, seq_id: int, num_tokens: int) -> None:
        self.states.to_host(seq_id, num_tokens)

    def close(self) -> None:
        self.states.clear()

    def lost(self, rows: Iterable[tuple[int, int]]) -> list[int]:
        """The sequences, of (seq_id, number of its computed tokens), without a state after as many tokens: a forward
        with them was interrupted, or its results were. They must be computed again."""
        if not self.has_states:
            return []
        return [seq_id for seq_id, num_computed in rows if num_computed and not self.states.has(seq_id, num_computed)]

    def free(self, seq_id: int) -> None:
        """The sequence has ended."""
        self.states.free(seq_id)
        self.let_go(seq_id)

    def keep(self, rows: Iterable[tuple[int, int, int]], needed: set[int], *, clears: bool) -> list[int]:
        """Make checkpoints: copies of states, as (seq_id, num_tokens, number). clears: drop all former ones first.
        Returns the numbers of those for which there is no memory; for one that is `needed`, the error is raised."""
        if clears:
            self.states.checkpoints.clear()
        lost = []
        for seq_id, num_tokens, number in rows:
            try:
                self.states.keep(seq_id, num_tokens, number)
            except torch.OutOfMemoryError:
                if number in needed:
                    raise
                lost.append(number)
        return lost

    def hold(self, seq_id: int, num_tokens: int) -> None:
        """Keep the state of a sequence, which `go_back` may want again, beside what the next forward makes of it."""
        if self.states.has(seq_id, num_tokens):
            self.states.keep(seq_id, num_tokens, _held(seq_id))

    def let_go(self, seq_id: int) -> None:
        """The state that was held for a sequence is of no use."""
        self.states.drop(_held(seq_id))

    def go_back(self, seq_id: int, num_tokens: int) -> None:
        """The sequence has the state again that was held for it, or none if it has no tokens."""
        if num_tokens:
            self.states.restore(_held(seq_id), seq_id, num_tokens)
        else:
            self.states.free(seq_id)
        self.let_go(seq_id)

    def run(self, parts: Parts) -> Results:
        counts = parts.lengths
        pieces = [
            self._pieces(start, start + count, whole)
            for start, count, whole in zip(parts.starts, counts, parts.whole or counts)
        ]
        return run_pieces(parts, pieces, self._forward, {})

    def _pieces(self, start: int, end: int, whole: int) -> list[Piece]:
        """The tokens from `start` on: at once, or as `generate` computes them, those up to `whole` at once if they are
        due, then one by one; or each by itself, in one order."""
        if self.one_order is None and not self.is_incremental:
            return [(start, end)]
        first = whole if self.one_order is None else 0
        pieces = [(0, first)] if start < first <= end else []
        return pieces + [(position, position + 1) for position in range(max(start, first), end)]

    def _forward(self, parts: list[Part]) -> list[torch.Tensor]:
        with self.one_order or nullcontext():
            return self.forward(parts)

    def forward(self, parts: Sequence[Part], *, tried: Model | None = None) -> list[torch.Tensor]:
        """The logits [keep, vocab_size] of each part, in order; parts of different sequences. tried: computes them in
        place of the model.

        The tokens' slots must have been appended; their K/V is in the blocks afterwards. The caller has looked at the
        weights (`Weights.look`). Raises LayersChanged if the model has other modules than when this object was made;
        the states of all sequences are then of no use.
        """
        if self.weights.structure != self._structure:
            raise LayersChanged(f"the modules of {type(self.model).__name__} have changed")
        self._rows.by_tables = self.by_tables and not self.is_alone
        results: dict[int, torch.Tensor] = {}
        for batch in self._batches(parts):
            logits = self._rows.compute(self.model if tried is None else tried, [parts[index] for index in batch])
            results.update(zip(batch, logits))
        return [results[index] for index in range(len(parts))]

    def _batches(self, parts: Sequence[Part]) -> Iterator[list[int]]:
        """Indexes of the parts of each forward."""
        groups: dict[Hashable, list[int]] = {}
        for index, part in enumerate(parts):
            groups.setdefault(self._key(part) or index, []).append(index)
        for members in groups.values():
            # Nothing is padded or gathered then.
            if self._rows.by_tables and parts[members[0]].start:
                yield members
                continue
            # Neighbours in this order have similar lengths, so that a forward has little padding.
            members.sort(key=lambda index: parts[index].end)
            batch: list[int] = []
            total = 0
            for index in members:
                padded = (len(batch) + 1) * parts[index].end
                # A quarter more than the parts have is a fifth of the whole.
                most = min(max(PADDED_TOKENS, (total + parts[index].end) * 5 // 4), VIEWED_TOKENS)
                if batch and padded > most:
                    yield batch
                    batch, total = [], 0
                batch.append(index)
                total += parts[index].end
            yield batch

    def _key(self, part: Part) -> Hashable:
        """Parts with the same key may share a forward; None: this one has a forward of its own."""
        is_first = part.start == 0
        count = 0 if is_first else len(part.ids)
        together = self.prompts if is_first else self.decodes if count == 1 else self.pieces
        if self.is_alone or together == "one" or part.end > self._limit or part.media is not None:
            return None
        length = part.end if together == "equal" else None
        shape = None
        if self.has_states and not is_first:
            shape = self.states.shape_number(part.seq_id, part.start)
        return count, length, shape, part.keep


def _held(seq_id: int) -> int:
    """The number of the state that is held for a sequence, apart from those of checkpoints."""
    # Numbers of checkpoints are not negative.
    return -1 - seq_id
