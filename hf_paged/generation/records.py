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
    """The route, the steps and the memory of one paged call of `generate`.

    Counts of blocks are peaks over the steps. On the route "hf_loop" the figures are those at the end of the call,
    which counts as one step.

    Attributes:
        model: Name of the model's class.
        route: "packed" (packed rows, our kernels) or "hf_loop" (transformers' loop over a PagedKVCache).
        reason: Why the route is "hf_loop"; None for "packed".
        steps: Steps of the call, each with a forward of all rows; 1 on the route "hf_loop".
        block_size: Tokens in a block.
        peak_blocks_used: Blocks that rows held, at most.
        peak_blocks_shared: Blocks that several rows held, at most.
        cow_copies: Blocks that the call has copied on write (PagedAttention, section 4.4).
        kv_bytes_reserved: Size of the K/V tensors, at most.
        kv_bytes_used: Bytes of the blocks held at the peak.
        kv_bytes_filled: Bytes of the slots that held a token at this peak.
        kv_bytes_contiguous: What contiguous K/V tensors of the same rows at the final length take.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with hf_paged.record_calls() as records:
            model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, cache_implementation="paged")
        [record] = records
        print(record.route, record.reason, record.peak_blocks_used * record.block_size)
        ```
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
        """Begin with a memory that earlier calls may have used."""
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
        """Note what contiguous tensors would have taken. length: in tokens, prompt included."""
        per_token = memory.pool.bytes_per_block // memory.block_size
        self.kv_bytes_contiguous = num_rows * length * per_token


_lists: ContextVar[tuple[list[CallRecord], ...]] = ContextVar("hf_paged_recorders", default=())


@contextlib.contextmanager
def record_calls() -> Iterator[list[CallRecord]]:
    """Collect a CallRecord for every paged call of `generate` that returns inside the `with` block.

    Calls in other threads and asyncio tasks are not collected. Blocks may be nested, and each gets the calls inside it.

    Yields:
        A list that grows with each call.

    Example:
        ```python
        import torch
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with hf_paged.record_calls() as records:
            model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, cache_implementation="paged")
        assert [record.route for record in records] == ["packed"]
        ```
    """
    records: list[CallRecord] = []
    # A new tuple, because contexts that were copied before keep the old one.
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
