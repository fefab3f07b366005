"""Metadata of one step for the kernels, computed once from its block tables and shared by all layers.

Knows tensors and lengths, never sequences or requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hf_paged.kernels.bounds import Bounds

REPEATABLE = "repeatable"
"""The key in a step's `scratch` of its attention call, prepared for layers with tensors of the same layout."""

SHORT_QUERY = 16
"""Sequences with up to this many new tokens are decode (one token, or speculative tokens to verify), others prefill."""

MIN_SHARED_KEYS = 256
"""Reading a shorter common prefix once saves less than writing and reading its partial results costs (a guess)."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step's ragged batch. All tensors live on the device of the K/V pool.

    Sequence i has `query_len = query_start_loc[i + 1] - query_start_loc[i]` new tokens in this step, at rows
    `query_start_loc[i] : query_start_loc[i + 1]` of the query. They are its *last* tokens: their positions are
    `seq_lens[i] - query_len` to `seq_lens[i] - 1`. A sequence with `seq_lens[i] == 0` and `query_len == 0` is padding.

    block_tables     int32 [num_seqs, max_blocks]: logical block -> block_id. Entries past the last block, and blocks
                     that left the sliding window or chunk (-1), are never read.
    seq_lens         int32 [num_seqs]: K/V length after this step, in tokens.
    query_start_loc  int32 [num_seqs + 1]: first query row of each sequence; the last entry is num_tokens.
    slot_mapping     int64 [num_tokens]: where each new token's K/V goes (`block_id * block_size + offset`);
                     -1 = padding, not written.
    max_query_len, max_seq_len: host integers, upper bounds of the lengths above; they size launch grids.
    max_short_query_len: the same for the query lengths up to SHORT_QUERY; 0 if the step has no such sequence.
    num_short_tokens: an upper bound of the new tokens of all sequences with such query lengths (None: unknown).
    shares           False if no two sequences with one new token are known to have a common prefix that is worth
                     reading once. It decides which kernel is used, never its results.
    one_order        True if the sums of a token must run in the same order whatever else is in the step, and however
                     its prompt was divided (`SchedulerConfig.batch_invariant`): "native" and "triton" do so.
    in_bounds        True if hf_paged derived the values above from its own block tables; see `kernels.validation`.
    reach            int32 [num_tokens]: the last position that each new token attends to, which is its own, or a later
                     one where tokens of this step attend to one another both ways (of an image). None: its own.
    contiguous       True if every sequence's blocks are known to be consecutive ids in ascending order.
    scratch          values derived from the above (masks, gather indices, partitions), computed by the first layer
                     that needs them and reused by the other layers.
    checked          the checks that `kernels.validation` has passed.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    max_short_query_len: int = SHORT_QUERY
    num_short_tokens: int | None = None
    reach: torch.Tensor | None = None
    contiguous: bool = False
    shares: bool = True
    one_order: bool = False
    in_bounds: bool = False
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)
    checked: set[Any] = field(default_factory=set, init=False, repr=False)

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    @property
    def causal(self) -> AttentionMetadata:
        """The same step, in which no token attends to a later one."""
        if self.reach is None:
            return self
        if "causal" not in self.scratch:
            self.scratch["causal"] = replace(self, reach=None, scratch={})
        found: AttentionMetadata = self.scratch["causal"]
        return found

    @property
    def short_query_len(self) -> int:
        """An upper bound of the new tokens of a sequence with at most SHORT_QUERY of them."""
        return min(self.max_query_len, self.max_short_query_len)

    @property
    def short_tokens(self) -> int:
        """An upper bound of the new tokens of all these sequences."""
        bound = min(self.num_tokens, self.num_seqs * self.short_query_len)
        return bound if self.num_short_tokens is None else min(bound, self.num_short_tokens)


_announced: ContextVar[Sequence[AttentionMetadata]] = ContextVar("hf_paged_announced", default=())


def announce(step: Sequence[AttentionMetadata]) -> None:
    """Name the records of the step that this thread computes, for `announced`; none when it ends."""
    _announced.set(step)


def announced(*tensors: torch.Tensor) -> AttentionMetadata | None:
    """The record of the step in progress with these block tables, lengths, starts and slots; None: there is none.

    An operation in a graph of torch.compile gets tensors only. With the record it finds what other layers have derived.
    """
    for record in _announced.get():
        own = (record.block_tables, record.seq_lens, record.query_start_loc, record.slot_mapping)
        if all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in zip(own, tensors, strict=True)):
            return record
    return None


def metadata_on(step: Sequence[AttentionMetadata], device: torch.device) -> list[AttentionMetadata]:
    """Copies of a step's records, one per group, on another device. The host does not wait for them."""
    copies: dict[int, torch.Tensor] = {}  # groups share some tensors

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.to(device, non_blocking=True)
        return copies[id(tensor)]

    return [
        replace(
            each,
            block_tables=copy(each.block_tables),
            seq_lens=copy(each.seq_lens),
            query_start_loc=copy(each.query_start_loc),
            slot_mapping=copy(each.slot_mapping),
            reach=None if each.reach is None else copy(each.reach),
            # What was derived lies on the other device.
            scratch={},
        )
        for each in step
    ]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The metadata of a packed step as host arrays; one entry of block_tables and slots per group.

    positions int64 [num_tokens], seq_lens int32 [num_seqs], query_start_loc int32 [num_seqs + 1],
    block_tables int32 [num_seqs, max_blocks], slots int64 [num_tokens], reach int32 [num_tokens] or None. See
    AttentionMetadata.
    """

    positions: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    block_tables: list[np.ndarray]
    slots: list[np.ndarray]
    max_query_len: int
    max_short_query_len: int
    num_short_tokens: int
    max_seq_len: int
    shares: bool
    reach: np.ndarray | None = None

    def metadata(self, device: torch.device, *, one_order: bool = False) -> list[AttentionMetadata]:
        """One record per group."""
        query_start_loc, seq_lens = to_device(self.query_start_loc, device), to_device(self.seq_lens, device)
        reach = None if self.reach is None else to_device(self.reach, device)
        return [
            AttentionMetadata(
                block_tables=to_device(table, device),
                seq_lens=seq_lens,
                query_start_loc=query_start_loc,
                slot_mapping=to_device(slots, device),
                max_query_len=self.max_query_len,
                max_short_query_len=self.max_short_query_len,
                num_short_tokens=self.num_short_tokens,
                max_seq_len=self.max_seq_len,
                reach=reach,
                shares=self.shares,
                one_order=one_order,
                in_bounds=True,
            )
            for table, slots in zip(self.block_tables, self.slots)
        ]


def step_arrays(
    block_tables: Sequence[Sequence[Sequence[int]]],
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    block_size: int,
) -> StepArrays:
    """The metadata of a packed step in which sequence i computes the last `query_lens[i]` of its `seq_lens[i]` tokens.

    block_tables: for each layer group the block ids of each sequence.
    """
    ends = np.asarray(seq_lens, dtype=np.int64)
    # A decode step takes a third of the time this way.
    if set(query_lens) == {1}:
        longest, longest_short, num_short = 1, 1, len(ends)
        starts = np.arange(len(ends) + 1, dtype=np.int32)
        rows, positions = starts[:-1], ends - 1
    else:
        lengths = np.asarray(query_lens, dtype=np.int64)
        longest = int(lengths.max(initial=0))
        longest_short = int(lengths.max(initial=0, where=lengths <= SHORT_QUERY))
        num_short = int(lengths.sum(where=lengths <= SHORT_QUERY))
        starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(int(starts[-1])) + np.repeat(ends - lengths - starts[:-1], lengths)
    tables, slot_arrays = [], []
    for group in block_tables:
        table = table_matrix(group)
        slots = table[rows, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        tables.append(table)
        slot_arrays.append(slots)
    return StepArrays(
        positions=positions,
        seq_lens=ends.astype(np.int32),
        query_start_loc=starts,
        block_tables=tables,
        slots=slot_arrays,
        max_query_len=longest,
        max_short_query_len=longest_short,
        num_short_tokens=num_short,
        max_seq_len=max(seq_lens, default=0),
        shares=any(_share(table, ends, block_size) for table in tables),
    )


class DecodeArrays:
    """Makes the arrays of decode steps: one token for each sequence.

    Most decode steps differ from the one before only in that every sequence is one token longer and some have one more
    block. The arrays of such a step are made from the last ones, and the block tables are changed in place: by then the
    device has its own copy of them, or a CPU has finished the step. On a CPU all is changed in place if no block comes
    or goes: making it anew takes longer than the attention of a small batch.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys: list[Any] = []
        self._rewrites = -1
        self._expected: list[int] = []  # positions of the next step, if it follows the last one
        self._quiet = 0  # so many steps follow in which no block comes or goes, at least
        self._last: StepArrays | None = None
        # On a CPU: of which step, and whether sums have one order there.
        self._made: tuple[StepArrays, bool, list[AttentionMetadata]] | None = None

    def follow(self, keys: list[Any], positions: list[int], rewrites: int) -> StepArrays | None:
        """The step of these tokens, if no block comes or goes with them: the last one, changed in place. Else None, and
        nothing is changed: see `step`."""
        made, last = self._made, self._last
        if not self._quiet or last is None or made is None or made[0] is not last or rewrites != self._rewrites:
            return None
        if positions != self._expected or keys != self._keys:
            return None
        self._last = None  # an interrupt may leave half of a step
        self._followed(last, *made[1:])
        self._expected, self._quiet = [position + 1 for position in positions], self._quiet - 1
        self._last = last
        return last

    def step(
        self,
        keys: list[Any],
        positions: list[int],
        block_tables: Sequence[Callable[[Any], Sequence[int]]],
        rewrites: int,
        bounds: Sequence[Bounds],
    ) -> StepArrays:
        """The step of the tokens at these positions, one for each sequence.

        keys: the sequences. block_tables: for each layer group a function from a key to the block ids. rewrites: a
        number that changes if any table has changed otherwise than by new blocks at its end and by blocks that left
        the window or chunk. bounds: of each layer group.
        """
        last, self._last = self._last, None
        is_next = positions == self._expected and keys == self._keys and rewrites == self._rewrites
        made = self._made if self._made is not None and self._made[0] is last else None
        # The device has its own copy of the last tables, so only new blocks are entered.
        if last is not None and is_next:
            now = np.array(positions, dtype=np.int64)
            rows = np.flatnonzero(now % self._block_size == 0).tolist()  # their tokens are the first of a block
            left = [self._left(now, own) for own in bounds]
            if rows or any(left) or made is None:
                tables = [
                    self._grown(table, keys, rows, now, blocks, gone)
                    for table, blocks, gone in zip(last.block_tables, block_tables, left, strict=True)
                ]
                step = self._next(last, tables, is_longer=bool(rows))
            else:
                self._followed(last, *made[1:])
                step = last
        else:
            lists = [list(map(blocks, keys)) for blocks in block_tables]
            step = step_arrays(lists, [position + 1 for position in positions], [1] * len(keys), self._block_size)
        has_bounds, size = any(own.most is not None for own in bounds), self._block_size
        # Blocks leave bounds at other times than at the ends of blocks.
        self._quiet = 0 if has_bounds else min([size - 1 - position % size for position in positions], default=0)
        self._expected = [position + 1 for position in positions]
        self._keys, self._rewrites, self._last = keys, rewrites, step
        return step

    def metadata(self, step: StepArrays, device: torch.device, *, one_order: bool = False) -> list[AttentionMetadata]:
        """Return the records of a step, which is the last one that was made here, or any other."""
        # Records have no positions, which media move.
        if (last := self._last) is not None and step.seq_lens is last.seq_lens and step.reach is last.reach:
            step = last
        if self._made is not None and self._made[0] is step and self._made[1] == one_order:
            return self._made[2]
        records = step.metadata(device, one_order=one_order)
        self._made = (step, one_order, records) if device.type == "cpu" and step is self._last else None
        return records

    def _left(self, positions: np.ndarray, bounds: Bounds) -> list[tuple[int, int]]:
        """Return the rows whose blocks left the bounds before this step, and how many of the table."""
        if bounds.most is None:
            return []
        now, last = (bounds.first(each, np.maximum) // self._block_size for each in (positions, positions - 1))
        return [(row, int(now[row])) for row in np.flatnonzero(now != last).tolist()]

    def _grown(
        self,
        table: np.ndarray,
        keys: list[Any],
        rows: list[int],
        positions: np.ndarray,
        blocks: Callable[[Any], Sequence[int]],
        left: list[tuple[int, int]],
    ) -> np.ndarray:
        """The table with the new blocks of these rows, and without those that have left."""
        if rows:
            columns = positions[rows] // self._block_size
            if (width := int(columns.max()) + 1) > table.shape[1]:
                table = np.pad(table, ((0, 0), (0, width - table.shape[1])))
            table[rows, columns] = [blocks(keys[row])[-1] for row in rows]
        for row, count in left:
            table[row, :count] = -1
        return table

    def _followed(self, last: StepArrays, one_order: bool, records: list[AttentionMetadata]) -> None:
        """Change the last step into the next one in the same blocks, with the records that share its memory."""
        self._made = None
        for numbers in (last.positions, last.seq_lens, *last.slots):
            numbers += 1
        longest = last.max_seq_len + 1
        # As their arrays, because making them anew takes as long as all else here.
        for record in (last, *records):
            object.__setattr__(record, "max_seq_len", longest)
        for scratch in (each.scratch for each in records):
            repeatable = scratch.get(REPEATABLE)
            # Masks and indices were made for the old lengths; only the prepared call can follow.
            scratch.clear()
            if repeatable is not None and repeatable.follow():
                scratch[REPEATABLE] = repeatable
        self._made = last, one_order, records

    def _next(self, last: StepArrays, tables: list[np.ndarray], *, is_longer: bool) -> StepArrays:
        positions, seq_lens, rows = last.positions + 1, last.seq_lens + 1, last.query_start_loc[:-1]
        size = self._block_size
        blocks, offsets = np.divmod(positions, size)
        return replace(
            last,
            positions=positions,
            seq_lens=seq_lens,
            block_tables=tables,
            slots=[table[rows, blocks].astype(np.int64) * size + offsets for table in tables],
            max_seq_len=last.max_seq_len + 1,
            # Only with a new block can two sequences have more keys in common.
            shares=any(_share(table, seq_lens, size) for table in tables) if is_longer else last.shares,
        )


def table_matrix(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Block tables as int32 [num_seqs, max_blocks]; 0 past the end of each."""
    width = max(map(len, tables), default=0) or 1
    matrix = np.zeros((len(tables), width), dtype=np.int32)
    flat = matrix.reshape(-1).data  # memory is copied in a third of numpy's time for a short row
    for start, blocks in zip(range(0, matrix.size, width), tables):
        flat[start : start + len(blocks)] = blocks if type(blocks) is array else array("i", blocks)
    return matrix


def _share(table: np.ndarray, ends: np.ndarray, block_size: int) -> bool:
    """Return True if two sequences share the block with key number MIN_SHARED_KEYS, and have keys after it."""
    column = -(-MIN_SHARED_KEYS // block_size) - 1
    # Whoever shares keeps a private part, so there must be a further block.
    if len(table) < 2 or table.shape[1] <= column + 1:
        return False
    ids = table[ends > (column + 1) * block_size, column]
    ids = ids[ids >= 0]  # without those that have left a window
    return len(set(ids.tolist())) < len(ids)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`, copied through pinned memory: CUDA copies from other memory synchronously."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
