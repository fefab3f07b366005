"""Owns the block tables: which blocks hold the tokens of which sequence (SOSP'23 sections 4.2 to 4.4).

Knows sequences by id and counts their tokens; never a tensor, a request or a token id. The copies that the device must
perform (copy-on-write) are returned as data.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import NamedTuple

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.errors import OutOfBlocks

NULL_BLOCK = -1
"""Block-table entry of a block that left the sliding window and was freed. It must never be read."""

SeqId = Hashable


class BlockCopy(NamedTuple):
    """Copy block `src` to block `dst` in every layer, before the next forward (copy-on-write, swap)."""

    src: int
    dst: int


class _Table:
    __slots__ = ("blocks", "num_dropped", "num_tokens")

    def __init__(self) -> None:
        self.blocks = array("i")
        self.num_tokens = 0
        self.num_dropped = 0  # leading NULL_BLOCKs


class BlockManager:
    """Block tables over one BlockAllocator.

    Invariants:

    - a table has `ceil(num_tokens / block_size)` entries, and only its last block may be partly filled;
    - `ref_count(b)` is the number of tables that hold `b`;
    - a slot is written only if its block has `ref_count` 1 and is not registered in the prefix cache.

    With a `sliding_window` of W tokens, blocks that no later token can attend to are freed as the sequence grows, and
    their entries become NULL_BLOCK. Between two appends of one token, a sequence holds at most
    `ceil(W / block_size) + 1` blocks.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        *,
        sliding_window: int | None = None,
        cached_blocks: Container[int] = frozenset(),
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window={sliding_window}: must be at least 1")
        self.allocator = allocator
        self.block_size = block_size
        self.sliding_window = sliding_window
        # Blocks registered in the prefix cache. They become cached, not free, when their last table is freed. Before
        # one is written again, which happens only after a crop, `append` removes it from the prefix cache.
        self.cached_blocks = cached_blocks
        self._tables: dict[SeqId, _Table] = {}
        self.num_copies = 0  # copy-on-writes so far
        # How often a table has changed otherwise than by new blocks at its end and blocks that left the window.
        self.rewrites = 0

    # -- reading ------------------------------------------------------------------------------------------------

    def __contains__(self, seq_id: SeqId) -> bool:
        return seq_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    @property
    def seq_ids(self) -> list[SeqId]:
        return list(self._tables)

    def num_tokens(self, seq_id: SeqId) -> int:
        return self._tables[seq_id].num_tokens

    def block_table(self, seq_id: SeqId) -> array[int]:
        """The live table of block ids, read-only for callers: an `array('i')`, which can be copied as raw memory."""
        return self._tables[seq_id].blocks

    def slots(self, seq_id: SeqId, start: int, stop: int) -> list[int]:
        """Slots (`block_id * block_size + offset`) of token positions `start` to `stop - 1`."""
        blocks, size = self._tables[seq_id].blocks, self.block_size
        return [blocks[pos // size] * size + pos % size for pos in range(start, stop)]

    def num_blocks_of(self, seq_ids: Iterable[SeqId]) -> int:
        """Number of distinct blocks that these sequences hold."""
        held: set[int] = set()
        for seq_id in seq_ids:
            held.update(self._tables[seq_id].blocks)
        held.discard(NULL_BLOCK)
        return len(held)

    @property
    def num_logical_blocks(self) -> int:
        """Blocks that the sequences would hold without sharing (the denominator of the paper's Figure 15)."""
        return sum(len(table.blocks) - table.num_dropped for table in list(self._tables.values()))

    @property
    def num_shared_blocks(self) -> int:
        """Blocks held by more than one table."""
        allocator = self.allocator
        held = {b for table in list(self._tables.values()) for b in table.blocks if b != NULL_BLOCK}
        return sum(allocator.ref_count(b) > 1 for b in held)

    @property
    def num_filled_slots(self) -> int:
        """Slots that hold a token's K/V; shared blocks are counted once."""
        filled: dict[int, int] = {}
        for table in list(self._tables.values()):
            size = self.block_size
            last = len(table.blocks) - 1
            for index, block_id in enumerate(table.blocks):
                if block_id != NULL_BLOCK:
                    count = size if index < last else table.num_tokens - last * size
                    filled[block_id] = max(filled.get(block_id, 0), count)
        return sum(filled.values())

    def num_blocks_to_append_all(self, appends: Iterable[tuple[SeqId, int]]) -> int:
        """Blocks that these appends to different sequences would take together.

        Of the sequences that share a partly filled block, all but the last to append copy it; the last one keeps it.
        """
        needed, size, ref_counts = 0, self.block_size, self.allocator.ref_counts
        sharers: dict[int, int] = {}
        for seq_id, num_tokens in appends:
            table = self._tables.get(seq_id)
            if table is None:
                needed += -(-num_tokens // size)
                continue
            needed += -(-(table.num_tokens + num_tokens) // size) - len(table.blocks)
            if num_tokens > 0 and table.num_tokens % size:
                last = table.blocks[-1]
                sharers[last] = sharers.get(last, 0) + 1
        return needed + sum(min(count, ref_counts[block_id] - 1) for block_id, count in sharers.items())

    # -- the verbs ----------------------------------------------------------------------------------------------

    def append(self, seq_id: SeqId, num_tokens: int) -> list[BlockCopy]:
        """Make room for `num_tokens` more tokens at the end of `seq_id` (a new id starts an empty sequence).

        Returns the copy-on-writes that the device must perform before it writes the new slots: one if the partly
        filled last block is shared, else none. Other tables still hold the source block, so no copy overwrites it
        before they are freed. Raises OutOfBlocks, and then changes nothing.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: must not be negative")
        allocator, size = self.allocator, self.block_size
        table = self._tables.get(seq_id) or _Table()
        blocks, length = table.blocks, table.num_tokens + num_tokens
        last = blocks[-1] if num_tokens and table.num_tokens % size else NULL_BLOCK  # about to be written
        is_shared = last != NULL_BLOCK and allocator.ref_counts[last] > 1
        num_new = -(-length // size) - len(blocks)
        if (num_new or is_shared) and num_new + is_shared > allocator.num_available:
            raise OutOfBlocks(num_new + is_shared, allocator.num_available)
        copies: list[BlockCopy] = []
        if is_shared:
            blocks[-1] = allocator.allocate()
            allocator.free(last)
            copies.append(BlockCopy(last, blocks[-1]))
            self.num_copies += 1
            self.rewrites += 1
        elif last in self.cached_blocks:
            allocator.forget(last)
        for _ in range(num_new):
            blocks.append(allocator.allocate())
        table.num_tokens = length
        self._tables[seq_id] = table
        return copies

    def append_all(self, appends: Sequence[tuple[SeqId, int]]) -> list[BlockCopy]:
        """`append` for several sequences, whose blocks must be available (see `num_blocks_to_append_all`)."""
        copies: list[BlockCopy] = []
        tables, size = self._tables, self.block_size
        ref_counts, cached_blocks = self.allocator.ref_counts, self.cached_blocks
        for seq_id, num_tokens in appends:
            if num_tokens == 1 and (table := tables.get(seq_id)) is not None and table.num_tokens % size:
                last = table.blocks[-1]
                if ref_counts[last] == 1 and last not in cached_blocks:  # most appends: a slot in a block of its own
                    table.num_tokens += 1
                    continue
            copies += self.append(seq_id, num_tokens)
        return copies

    def drop_outside_window(self, seq_id: SeqId) -> int:
        """Free the blocks that no token from `num_tokens` on can attend to; returns how many.

        Call it after the step that computed the last appended tokens, because those tokens still attend to the blocks.
        """
        if self.sliding_window is None:
            return 0
        table = self._tables[seq_id]
        first = min(self._first_visible(table.num_tokens), len(table.blocks))
        for index in range(table.num_dropped, first):
            self._free_block(table.blocks[index])
            table.blocks[index] = NULL_BLOCK
        dropped = max(first - table.num_dropped, 0)
        table.num_dropped = max(first, table.num_dropped)
        return dropped

    def _first_visible(self, num_tokens: int) -> int:
        """Index of the first block with a position that the token at position `num_tokens` attends to."""
        if self.sliding_window is None:
            return 0
        return max(num_tokens - self.sliding_window + 1, 0) // self.block_size

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        """Start `child_id` with all of the parent's tokens, sharing every block. Allocates nothing."""
        if child_id in self._tables:
            raise ValueError(f"sequence {child_id!r} exists already")
        parent = self._tables[parent_id]
        child = _Table()
        child.blocks = parent.blocks[:]
        child.num_tokens, child.num_dropped = parent.num_tokens, parent.num_dropped
        share = self.allocator.share
        for block_id in child.blocks[child.num_dropped :]:
            share(block_id)
        self._tables[child_id] = child

    def adopt(self, seq_id: SeqId, block_ids: Iterable[int]) -> None:
        """Start `seq_id` with full blocks that are already written (a prefix-cache hit), sharing them."""
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id!r} exists already")
        table = _Table()
        table.blocks.extend(block_ids)
        if len(set(table.blocks)) < len(table.blocks):
            raise ValueError(f"block_ids={list(table.blocks)}: a block appears twice")
        if unwritten := [block_id for block_id in table.blocks if not self.allocator.is_held(block_id)]:
            raise ValueError(f"block {unwritten[0]} is free: it has no content to adopt")
        for block_id in table.blocks:
            self.allocator.share(block_id)
        table.num_tokens = len(table.blocks) * self.block_size
        self._tables[seq_id] = table

    def crop(self, seq_id: SeqId, num_tokens: int) -> None:
        """Forget the tokens after the first `num_tokens` (rejected speculation)."""
        table = self._tables[seq_id]
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"num_tokens={num_tokens}: sequence {seq_id!r} has {table.num_tokens}")
        if num_tokens < table.num_tokens and self._first_visible(num_tokens) < table.num_dropped:
            raise ValueError(f"num_tokens={num_tokens}: its blocks left the sliding window of {self.sliding_window}")
        self.rewrites += 1
        keep = -(-num_tokens // self.block_size)
        while len(table.blocks) > keep:
            self._free_block(table.blocks.pop())
        table.num_tokens = num_tokens

    def free(self, seq_id: SeqId) -> None:
        """Remove the sequence. Blocks are freed in reverse order, so that the end of a prefix is evicted first."""
        table = self._tables.pop(seq_id)
        self.rewrites += 1
        for block_id in reversed(table.blocks[table.num_dropped :]):
            self._free_block(block_id)

    def move_to(self, other: BlockManager, seq_ids: Sequence[SeqId]) -> list[BlockCopy]:
        """Move these tables to the manager of another memory: swap out, or swap in (SOSP'23 section 4.5).

        Returns the copies from this manager's blocks to the other's. A block that several of the sequences share is
        copied once and stays shared. Raises OutOfBlocks if the other manager has too few blocks; then nothing moves.
        """
        if other.block_size != self.block_size:
            raise ValueError(f"block_size {self.block_size} and {other.block_size} differ")
        if taken := [seq_id for seq_id in seq_ids if seq_id in other._tables]:
            raise ValueError(f"sequence {taken[0]!r} exists already")
        needed = self.num_blocks_of(seq_ids)
        if needed > other.allocator.num_available:
            raise OutOfBlocks(needed, other.allocator.num_available)
        moved: dict[int, int] = {}
        for seq_id in seq_ids:
            table = self._tables[seq_id]
            twin = _Table()
            twin.num_tokens, twin.num_dropped = table.num_tokens, table.num_dropped
            twin.blocks = table.blocks[: table.num_dropped]
            for block_id in table.blocks[table.num_dropped :]:
                if block_id in moved:
                    other.allocator.share(moved[block_id])
                else:
                    moved[block_id] = other.allocator.allocate()
                twin.blocks.append(moved[block_id])
            other._tables[seq_id] = twin
        for seq_id in seq_ids:
            self.free(seq_id)
        return [BlockCopy(src, dst) for src, dst in moved.items()]

    def rename(self, old_id: SeqId, new_id: SeqId) -> None:
        """Give the table of `old_id` to the unused id `new_id`; no block moves."""
        if new_id in self._tables:
            raise ValueError(f"sequence {new_id!r} exists already")
        self._tables[new_id] = self._tables.pop(old_id)
        self.rewrites += 1

    def _free_block(self, block_id: int) -> None:
        self.allocator.free(block_id, keep=block_id in self.cached_blocks)

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of the class, or of its allocator, does not hold."""
        self.allocator.check_integrity()
        counts: dict[int, int] = {}
        for seq_id, table in self._tables.items():
            size = self.block_size
            assert len(table.blocks) == -(-table.num_tokens // size), f"table of {seq_id!r} has the wrong length"
            held = table.blocks[table.num_dropped :]
            assert all(b == NULL_BLOCK for b in table.blocks[: table.num_dropped])
            assert NULL_BLOCK not in held, f"table of {seq_id!r} has a hole"
            assert len(set(held)) == len(held), f"a block is twice in the table of {seq_id!r}"
            for block_id in held:
                counts[block_id] = counts.get(block_id, 0) + 1
        for block_id in range(self.allocator.num_blocks):
            expected, actual = counts.get(block_id, 0), self.allocator.ref_count(block_id)
            assert expected == actual, f"block {block_id}: ref_count {actual}, but {expected} tables hold it"
