"""Packer: turns the plan of a step into host arrays, one packed forward. Knows block tables and tokens; never queues,
requests or sampling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.memory import PagedMemory
from hf_paged.generation.engine.sequence import Plan, Sequence
from hf_paged.generation.sampling.batch import SampledTokens
from hf_paged.kernels.metadata import StepArrays, next_decode, step_arrays, table_matrix, to_device


class LateTokens:
    """Tokens of a step that only the device knows.

    where: pairs (place in the step, index in `sampled`) of tokens; None: the step has all of them, in their order.
    """

    def __init__(self, sampled: torch.Tensor, where: list[tuple[int, int]] | None) -> None:
        self._sampled = sampled
        self._where = None if where is None else np.array(where, dtype=np.int64).T.copy()

    def __call__(self, ids: torch.Tensor) -> None:
        """Write them into ids int64 [at least num_tokens] without waiting for the device."""
        if self._where is None:
            ids[: len(self._sampled)].copy_(self._sampled)
        else:
            places, rows = to_device(self._where, ids.device)
            ids.index_copy_(0, places, self._sampled.index_select(0, rows))


class Packed(NamedTuple):
    """Sequences as one forward.

    tokens int64 [num_tokens]. step: their positions, slots and block tables. seqs: the sequences whose next token is
    due, whose logits come first. wanted int64 [num_rows]: the tokens whose logits are wanted; None for all, in a pure
    decode step. inner: sequences with logits that are wanted within their prompts, with the positions. late: the tokens
    that the host does not know yet.
    """

    tokens: np.ndarray
    step: StepArrays
    seqs: list[Sequence]
    wanted: np.ndarray | None = None
    inner: Iterable[tuple[Sequence, range]] = ()
    late: LateTokens | None = None


@dataclass(frozen=True, slots=True)
class _Decodes:
    """A step of one token for each of these sequences. rewrites: the managers' counters when it was made."""

    seqs: list[Sequence]
    step: StepArrays
    rewrites: list[int]


class Packer:
    """Packs steps over one PagedMemory.

    Most decode steps differ from the one before only in that every sequence is one token longer and some have one more
    block. Such a step is made from the arrays of the last one, and the block tables are changed in place: by then the
    device has its own copy of them, or a CPU has finished the step.
    """

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory
        self._last: _Decodes | None = None

    def pack(self, plan: Plan, sampled: SampledTokens | None) -> Packed:
        """plan: sequences with the same adapters. sampled: the tokens that the host does not know yet."""
        return self._pack_decodes(plan, sampled) or self._pack_any(plan, sampled)

    # -- decode steps -------------------------------------------------------------------------------------------

    def _pack_decodes(self, plan: Plan, sampled: SampledTokens | None) -> Packed | None:
        """A step of the last token of each sequence; None if it is anything else, or the host knows some of the tokens
        only."""
        seqs = [seq for seq, count in plan if count == 1]
        if len(seqs) < len(plan):
            return None
        missing = [len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens for seq in seqs]
        num_late = sum([seq.num_pending for seq in seqs])
        if missing.count(1) < len(seqs) or num_late not in (0, len(seqs)):
            return None
        step = self._decode_step(seqs)
        if not num_late:
            return Packed(np.array([seq.token_ids[-1] for seq in seqs], dtype=np.int64), step, seqs)
        assert sampled is not None
        where = None if seqs == sampled.seqs else [(place, sampled.rows[seq]) for place, seq in enumerate(seqs)]
        late = LateTokens(sampled.tokens, where)
        return Packed(np.zeros(len(seqs), dtype=np.int64), step, seqs, late=late)

    def _decode_step(self, seqs: list[Sequence]) -> StepArrays:
        managers = self._memory.managers
        rewrites = [manager.rewrites for manager in managers]
        positions = np.array([seq.num_computed_tokens for seq in seqs], dtype=np.int64)
        last = self._last
        is_same = last is not None and last.seqs == seqs and last.rewrites == rewrites
        if last is not None and is_same and bool((positions == last.step.positions + 1).all()):
            tables = [
                self._grown_table(manager, table, seqs, positions)
                for manager, table in zip(managers, last.step.block_tables)
            ]
            step = next_decode(last.step, tables, self._memory.block_size)
        else:
            lists = [[manager.block_table(seq.seq_id) for seq in seqs] for manager in managers]
            step = step_arrays(lists, (positions + 1).tolist(), [1] * len(seqs), self._memory.block_size)
        self._last = _Decodes(seqs, step, rewrites)
        return step

    def _grown_table(
        self, manager: BlockManager, table: np.ndarray, seqs: list[Sequence], positions: np.ndarray
    ) -> np.ndarray:
        """The block tables of a layer group, with those blocks to which these positions are the first to belong."""
        if manager.sliding_window is not None:  # blocks leave them as well
            return table_matrix([manager.block_table(seq.seq_id) for seq in seqs])
        rows = np.flatnonzero(positions % manager.block_size == 0)
        if len(rows):
            columns = positions[rows] // manager.block_size
            if (width := int(columns.max()) + 1) > table.shape[1]:
                table = np.pad(table, ((0, 0), (0, width - table.shape[1])))
            table[rows, columns] = [manager.block_table(seqs[row].seq_id)[-1] for row in rows.tolist()]
        return table

    # -- any step -----------------------------------------------------------------------------------------------

    def _pack_any(self, plan: Plan, sampled: SampledTokens | None) -> Packed:
        tokens: list[int] = []
        seqs, rows = [], []
        late: list[tuple[int, int]] = []  # places in `tokens`, rows of `sampled`
        inner: list[tuple[Sequence, range]] = []
        places: list[int] = []  # in `tokens`, of the positions in `inner`
        for seq, count in plan:
            first, known = seq.num_computed_tokens, seq.token_ids
            end = first + count
            if seq.group.scored_from is not None:
                own = inner_positions(seq, first, end)
                inner.append((seq, own))
                places += [len(tokens) - first + position for position in own]
            if end > len(known):
                assert sampled is not None
                tokens += known[first:]
                late.append((len(tokens), sampled.rows[seq]))
                tokens.append(0)
            else:
                tokens += known[first:end]
            if end == len(known) + seq.num_pending:  # `seq.num_tokens`, hundreds of times in a step
                seqs.append(seq)
                rows.append(len(tokens) - 1)
        step = step_arrays(
            [[manager.block_table(seq.seq_id) for seq, _ in plan] for manager in self._memory.managers],
            [seq.num_computed_tokens + count for seq, count in plan],
            [count for _, count in plan],
            self._memory.block_size,
        )
        return Packed(
            np.array(tokens, dtype=np.int64),
            step,
            seqs,
            # A pure decode step needs the logits of every token: no index, no copy of the hidden states.
            None if len(rows) == len(tokens) else np.array(rows + places, dtype=np.int64),
            inner,
            LateTokens(sampled.tokens, late) if sampled is not None and late else None,
        )


def inner_positions(seq: Sequence, first: int, end: int) -> range:
    """The positions from `first` to `end` whose logits are wanted and that another token of the prompt follows."""
    wanted = seq.group.scored_from
    return range(end, end) if wanted is None else range(max(first, wanted), min(end, seq.num_prompt_tokens - 1))
