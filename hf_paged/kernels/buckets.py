"""The buckets of a step for the torch implementation: which sequences are attended to together, and where
their keys lie.

Computed on the host, once per step and mask. Knows lengths and block tables; never K or V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.kernels.bounds import Bounds
from hf_paged.kernels.metadata import AttentionMetadata

# Sequences with at most this many new tokens share a bucket with others; longer ones have buckets of their own.
MAX_BATCHED_QUERY_LEN = 64
# New tokens of a long prompt that share one mask and one range of keys.
_QUERY_TILE = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences, or a tile of a long one, of one call of attention, padded to `query_len` queries and `span` keys.

    slots     int64 [num_seqs, span]: slots of the keys. Padding repeats a slot of the same sequence, because unowned
              slots may hold NaN.
    rows      int64 [num_seqs, query_len]: rows of the query; padding repeats the last row. None: consecutive rows from
              `first_row` on.
    kept      int64 [n]: indices into the flattened `rows` that are not padding. None: all.
    q_pos     int64 [num_seqs, query_len]: positions of the queries in their sequences.
    k_pos     int64 [num_seqs, span]: positions of the keys.
    hidden    bool [num_seqs, query_len, span]: keys that a query must not see. None: none, or see `causal`.
    causal    query i sees keys 0 to i; query_len == span.
    """

    first_row: int
    rows: torch.Tensor | None
    kept: torch.Tensor | None
    slots: torch.Tensor
    q_pos: torch.Tensor
    k_pos: torch.Tensor
    hidden: torch.Tensor | None
    causal: bool = False

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """The bucket's rows of x [num_tokens, ...] -> [num_seqs, query_len, ...]; a view if they are consecutive."""
        shape = self.q_pos.shape
        if self.rows is None:
            count = shape.numel()
            own = x if count == len(x) else x[self.first_row : self.first_row + count]
        else:
            own = x.index_select(0, self.rows.flatten())
        rows: torch.Tensor = own.unflatten(0, shape)
        return rows


def _padded(length: int, quantum: int, digits: int) -> int:
    """`length` rounded up to a multiple of `quantum` and to `digits` significant bits, so that few buckets suffice."""
    step = max(quantum, 1 << max(length.bit_length() - digits, 0))
    return -(-length // step) * step


def make_buckets(
    metadata: AttentionMetadata,
    block_size: int,
    bounds: Bounds,
    whole_prompts: bool,
) -> list[Bucket]:
    """Divide a step's sequences into buckets; every new token is in exactly one.

    Sequences with few new tokens and similar lengths share a bucket. Each `_QUERY_TILE` new tokens of a longer one are
    a bucket. With `whole_prompts`, all tokens of a prompt without cached tokens are one bucket, and the attention call
    applies the causal mask.
    """
    step = _Step(metadata, block_size, bounds)
    # The attention call's own causal mask cannot show tokens of an image to one another.
    whole_prompts = whole_prompts and metadata.reach is None
    batched: dict[tuple[int, int], list[_Part]] = {}
    prompts: dict[int, list[_Part]] = {}
    buckets = []
    for i, (query_len, seq_len) in enumerate(zip(step.query_lens.tolist(), step.seq_lens.tolist())):
        if query_len == 0:
            continue
        if query_len <= MAX_BATCHED_QUERY_LEN:
            span = seq_len - step.first_key(seq_len - query_len)
            # Rounded, so that sequences meet in a bucket: from 256 keys on less than a quarter of a span is padding.
            # One or two tokens are not padded, because that would multiply their products.
            key = (query_len if query_len <= 2 else _padded(query_len, 8, 4), _padded(span, 64, 3))
            batched.setdefault(key, []).append(_Part(i, 0, query_len))
        # The causal mask of the call needs as many keys as queries, and knows no bound in between.
        elif whole_prompts and query_len == seq_len and step.first_key(seq_len - 1) == 0:
            prompts.setdefault(query_len, []).append(_Part(i, 0, query_len))
        else:
            for low in range(0, query_len, _QUERY_TILE):
                high = min(low + _QUERY_TILE, query_len)
                # A tile reads keys up to its own end, so that most products with later tokens are left out.
                context = seq_len - query_len
                span = step.end_key(i, low, high) - step.first_key(context + low)
                buckets.append(step.bucket([_Part(i, low, high)], high - low, span))
    for query_len, parts in prompts.items():
        buckets.append(step.bucket(parts, query_len, query_len, causal=True))
    for (query_len, span), parts in batched.items():
        buckets.append(step.bucket(parts, query_len, span))
    return buckets


class _Part(NamedTuple):
    """New tokens [low, high) of a sequence, counted from its first new token."""

    seq: int
    low: int
    high: int


class _Step:
    """The lengths and block tables of a step on the host, and the mask of its layers."""

    def __init__(self, metadata: AttentionMetadata, block_size: int, bounds: Bounds) -> None:
        self._tables = metadata.block_tables.cpu().numpy()
        self._starts = metadata.query_start_loc.cpu().numpy().astype(np.int64)
        self._device = metadata.block_tables.device
        self._block_size = block_size
        self._reach = None if metadata.reach is None else metadata.reach.cpu().numpy().astype(np.int64)
        self._bounds = bounds
        self.first_key = bounds.first
        self.seq_lens = metadata.seq_lens.cpu().numpy().astype(np.int64)
        self.query_lens = np.diff(self._starts)

    def end_key(self, seq: int, low: int, high: int) -> int:
        """The position behind the last one that new tokens [low, high) of a sequence see."""
        if self._reach is None:
            return int(self.seq_lens[seq] - self.query_lens[seq]) + high
        return int(self._reach[self._starts[seq] + low : self._starts[seq] + high].max()) + 1

    def bucket(self, parts: list[_Part], query_len: int, span: int, *, causal: bool = False) -> Bucket:
        """The bucket of some parts of sequences, padded to `query_len` new tokens and `span` keys each."""
        index, low, high = (np.array(column)[:, None] for column in zip(*parts))
        local = np.minimum(low + np.arange(query_len), high - 1)  # [num_seqs, query_len]
        q_pos = self.seq_lens[index] - self.query_lens[index] + local
        first = np.array([self.first_key(position) for position in q_pos[:, 0].tolist()])[:, None]
        k_pos = first + np.arange(span)  # [num_seqs, span]
        rows = self._starts[index] + local
        is_contiguous = bool((np.diff(rows.ravel()) == 1).all())
        real = np.arange(query_len) < high - low
        last = q_pos if self._reach is None else self._reach[rows]
        hidden = None if causal else self._hidden(q_pos, k_pos, last)
        return Bucket(
            first_row=int(rows[0, 0]),
            rows=None if is_contiguous else self._tensor(rows),
            kept=None if real.all() else self._tensor(real.ravel().nonzero()[0]),
            slots=self._tensor(self._slots(index[:, 0], np.minimum(k_pos, last.max(axis=1, keepdims=True)))),
            q_pos=self._tensor(q_pos),
            k_pos=self._tensor(k_pos),
            hidden=self._tensor(hidden) if hidden is not None and hidden.any() else None,
            causal=causal,
        )

    def _hidden(self, q_pos: np.ndarray, k_pos: np.ndarray, last: np.ndarray) -> np.ndarray:
        """bool [num_seqs, query_len, span]: the keys that a query must not see. last: the last one that each sees."""
        q, k = q_pos[:, :, None], k_pos[:, None, :]
        hidden: np.ndarray = k > last[:, :, None]
        before = self._bounds.hidden(q, k)
        return hidden if before is None else hidden | before

    def _slots(self, seqs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [num_seqs, span]: the slots of these positions of these sequences."""
        blocks = np.take_along_axis(self._tables[seqs], positions // self._block_size, axis=1).astype(np.int64)
        slots: np.ndarray = blocks * self._block_size + positions % self._block_size
        if slots.min() < 0:  # a block that has left the window (-1): no query sees it, so read a slot of the sequence
            slots = np.where(slots < 0, slots[:, -1:], slots)
        return slots

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def slice_bucket(bucket: Bucket, low: int, high: int) -> Bucket:
    """Sequences [low, high) of a bucket; the bucket itself if these are all."""
    num_seqs, query_len = bucket.q_pos.shape
    if low == 0 and high >= num_seqs:
        return bucket
    kept = bucket.kept
    if kept is not None:
        inside = (kept >= low * query_len) & (kept < high * query_len)
        kept = kept[inside] - low * query_len
    return Bucket(
        first_row=bucket.first_row + low * query_len,
        rows=None if bucket.rows is None else bucket.rows[low:high],
        kept=kept,
        slots=bucket.slots[low:high],
        q_pos=bucket.q_pos[low:high],
        k_pos=bucket.k_pos[low:high],
        hidden=None if bucket.hidden is None else bucket.hidden[low:high],
        causal=bucket.causal,
    )
