"""The plan of a step for the torch path: which sequences are attended to together, and where their keys lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_paged.kernels.metadata import AttentionMetadata

# Sequences with at most this many new tokens are batched with others; longer ones are attended to one by one.
MAX_BATCHED_QUERY_LEN = 64
# New tokens of a long prompt that share one mask and one range of keys.
_QUERY_TILE = 256


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences (or one tile of a long one) attended to in one call; padded to `query_len` x `span`.

    slots     int64 [num_seqs, span]: where the keys lie; padding repeats a slot of the same sequence, whose
              values are finite and its own.
    rows      int64 [num_seqs, query_len]: rows of the query; padding repeats the last row. None: `first_row` onwards.
    kept      int64 [n]: the positions in `rows` that are not padding; None: all.
    q_pos, k_pos   int64 [num_seqs, query_len], [num_seqs, span]: positions.
    hidden    bool [num_seqs, query_len, span]: keys a query must not see; None: it sees all of them, or `causal`.
    causal    query i sees keys 0..i; query_len == span.
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
        """x [num_tokens, ...] -> [num_seqs, query_len, ...]"""
        shape = self.q_pos.shape
        if self.rows is None:
            count = shape.numel()
            return (x if count == len(x) else x[self.first_row : self.first_row + count]).unflatten(0, shape)
        return x.index_select(0, self.rows.flatten()).unflatten(0, shape)


def _padded(length: int, quantum: int, digits: int) -> int:
    """`length` rounded up to a multiple of `quantum` and to `digits` binary digits, so that sequences fall into few
    buckets."""
    step = max(quantum, 1 << max(length.bit_length() - digits, 0))
    return -(-length // step) * step


def make_buckets(
    metadata: AttentionMetadata,
    block_size: int,
    sliding_window: int | None,
    chunk_size: int | None,
    whole_prompts: bool,
) -> list[Bucket]:
    """`whole_prompts`: a prompt without a prefix is one bucket (masked by the kernel); otherwise it is cut in tiles."""
    tables = metadata.block_tables.cpu().numpy()
    seq_lens = metadata.seq_lens.cpu().numpy().astype(np.int64)
    starts = metadata.query_start_loc.cpu().numpy().astype(np.int64)
    query_lens = np.diff(starts)
    device = metadata.block_tables.device

    def first_key(position: int) -> int:
        low = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        return low if chunk_size is None else max(low, position // chunk_size * chunk_size)

    def bucket(members: list[tuple[int, int, int]], query_len: int, span: int, *, causal: bool = False) -> Bucket:
        """members: (sequence, first query, one past its last query), queries counted within the step."""
        index, low, high = (np.array(column)[:, None] for column in zip(*members))
        context = seq_lens[index] - query_lens[index]
        q_local = np.minimum(low + np.arange(query_len), high - 1)  # [n, query_len]
        q_pos = context + q_local
        first = np.array([first_key(int(p)) for p in q_pos[:, 0]])[:, None]
        k_pos = first + np.arange(span)  # [n, span]
        k_real = np.minimum(k_pos, q_pos[:, -1:])
        blocks = np.take_along_axis(tables[index[:, 0]], k_real // block_size, axis=1).astype(np.int64)
        slots = blocks * block_size + k_real % block_size
        rows = starts[index] + q_local
        hidden = None
        if not causal:
            hidden = k_pos[:, None, :] > q_pos[:, :, None]
            if sliding_window is not None:
                hidden |= k_pos[:, None, :] <= q_pos[:, :, None] - sliding_window
            if chunk_size is not None:
                hidden |= k_pos[:, None, :] // chunk_size != q_pos[:, :, None] // chunk_size
            # A block that has left the window (-1) is seen by no query; read some slot that is ours instead.
            if slots.min() < 0:
                slots = np.where(slots < 0, slots[:, -1:], slots)
        flat = rows.ravel()
        regular = bool((np.diff(flat) == 1).all())
        real = np.arange(query_len) < high - low
        return Bucket(
            first_row=int(flat[0]),
            rows=None if regular else torch.from_numpy(rows).to(device),
            kept=None if real.all() else torch.from_numpy(real.ravel().nonzero()[0]).to(device),
            slots=torch.from_numpy(slots).to(device),
            q_pos=torch.from_numpy(q_pos).to(device),
            k_pos=torch.from_numpy(k_pos).to(device),
            hidden=torch.from_numpy(hidden).to(device) if hidden is not None and hidden.any() else None,
            causal=causal,
        )

    batched: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    prompts: dict[int, list[tuple[int, int, int]]] = {}
    buckets = []
    for i in range(len(seq_lens)):
        query_len, seq_len = int(query_lens[i]), int(seq_lens[i])
        if query_len == 0:
            continue
        if query_len <= MAX_BATCHED_QUERY_LEN:
            span = seq_len - first_key(seq_len - query_len)
            key = (query_len if query_len <= 2 else _padded(query_len, 8, 4), _padded(span, 64, 3))
            batched.setdefault(key, []).append((i, 0, query_len))
        elif whole_prompts and query_len == seq_len and first_key(seq_len - 1) == 0:
            prompts.setdefault(query_len, []).append((i, 0, query_len))
        else:
            for low in range(0, query_len, _QUERY_TILE):
                high = min(low + _QUERY_TILE, query_len)
                context = seq_len - query_len
                span = context + high - first_key(context + low)
                buckets.append(bucket([(i, low, high)], high - low, span))
    for query_len, members in prompts.items():
        buckets.append(bucket(members, query_len, query_len, causal=True))
    for (query_len, span), members in batched.items():
        buckets.append(bucket(members, query_len, span))
    return buckets


def slice_bucket(bucket: Bucket, low: int, high: int) -> Bucket:
    """Sequences low..high of a bucket."""
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
