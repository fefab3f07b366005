"""CallRecord: what one paged generate call did, for `hf_paged.record_calls`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from hf_paged.cache.memory import PagedMemory


@dataclass(slots=True)
class CallRecord:
    """What one paged generate call did. Block counts are peaks over its steps, bytes at the peak.

    `route`: "packed" (packed rows, our kernels) or "hf_loop" (transformers' loop over a PagedKVCache, for `reason`).
    `kv_bytes_contiguous`: what contiguous K/V tensors of the same rows at the final length take.
    """

    model: str
    route: Literal["packed", "hf_loop"] = "hf_loop"
    reason: str | None = None
    steps: int = 0
    block_size: int = 0
    peak_blocks_used: int = 0
    peak_blocks_shared: int = 0
    cow_copies: int = 0
    kv_bytes_reserved: int = 0
    kv_bytes_used: int = 0
    kv_bytes_filled: int = 0
    kv_bytes_contiguous: int = 0
    _copies_before: int = 0  # of earlier calls, in the memory that this call takes over

    def start(self, memory: PagedMemory) -> None:
        self._copies_before = memory.stats().cow_copies

    def observe(self, memory: PagedMemory) -> None:
        """Note the state after one step."""
        self.steps += 1
        stats = memory.stats()
        self.block_size = memory.block_size
        self.peak_blocks_shared = max(self.peak_blocks_shared, stats.blocks_shared)
        self.kv_bytes_reserved = max(self.kv_bytes_reserved, stats.bytes_reserved)
        self.cow_copies = stats.cow_copies - self._copies_before
        if stats.blocks_used >= self.peak_blocks_used:
            self.peak_blocks_used = stats.blocks_used
            self.kv_bytes_used = stats.bytes_used
            self.kv_bytes_filled = stats.bytes_filled

    def finish(self, memory: PagedMemory, num_rows: int, length: int) -> None:
        per_token = memory.pool.bytes_per_block // memory.block_size
        self.kv_bytes_contiguous = num_rows * length * per_token


_lists: ContextVar[tuple[list[CallRecord], ...]] = ContextVar("hf_paged_recorders", default=())


@contextlib.contextmanager
def record_calls() -> Iterator[list[CallRecord]]:
    """Collect a CallRecord for every paged generate call inside the `with` block (this thread, this task)."""
    records: list[CallRecord] = []
    token = _lists.set((*_lists.get(), records))
    try:
        yield records
    finally:
        _lists.reset(token)


def is_recording() -> bool:
    return bool(_lists.get())


def add_record(record: CallRecord) -> None:
    """To the list of every `record_calls` block around this call."""
    for records in _lists.get():
        records.append(record)
