"""Owns the block tables: which blocks hold the tokens of which sequence (SOSP'23 sections 4.2 to 4.4).

A sequence has one table for each group of layers (see `layers.py`); all of them draw from one allocator. Knows
sequences by id and counts their tokens; never a tensor, a request or a token id. The copies that the device must
perform (copy-on-write) are returned as data.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.layers import FULL, LayerGroup
from hf_paged.errors import OutOfBlocks

NULL_BLOCK = -1
"""Block-table entry of a block that no later token attends to and that was freed. It must never be read."""

SeqId = Hashable


class BlockCopy(NamedTuple):
    """Copy block `src` to block `dst` in every layer, before the next forward (copy-on-write, swap)."""

    src: int
    dst: int


class _Table:
    """The tables of one sequence. blocks: the table of each group. num_dropped: how many leading NULL_BLOCKs each has.
    drops_at: with fewer tokens than this, no block can be dropped. room: how many tokens still fit into the last
    blocks. It is 0 if an append must first look whether these blocks are in other tables or registered."""

    __slots__ = ("blocks", "drops_at", "num_dropped", "num_tokens", "room")

    def __init__(self, num_groups: int) -> None:
        self.blocks = [array("i") for _ in range(num_groups)]
        self.num_dropped = [0] * num_groups
        self.num_tokens = 0
        self.drops_at = 0.0
        self.room = 0

    def copy(self) -> _Table:
        table = _Table(0)
        table.blocks = [blocks[:] for blocks in self.blocks]
        table.num_dropped = self.num_dropped[:]
        table.num_tokens = self.num_tokens
        return table

    def held(self) -> Iterator[int]:
        """The blocks of all groups."""
        for blocks, first in zip(self.blocks, self.num_dropped):
            yield from blocks[first:] if first else blocks


class BlockManager:
    """Block tables over one BlockAllocator, one for each sequence and group of layers.

    Invariants:

    - a table has `ceil(num_tokens / block_size)` entries, and only its last block may be partly filled;
    - `ref_count(b)` is the number of tables that hold `b`;
    - a slot is written only if its block has `ref_count` 1 and is not registered in the prefix cache.

    Every verb changes the tables of all groups or none. If a group's kind is not Full, a block is freed as soon as no
    later token can attend to it, and its entry becomes NULL_BLOCK. So between two appends of one token, the table of a
    Window or Chunk of W tokens holds at most `ceil(W / block_size) + 1` blocks.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        *,
        groups: Sequence[LayerGroup] = (LayerGroup(),),
        cached_blocks: Container[int] = frozenset(),
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self.allocator = allocator
        self.block_size = block_size
        self.groups = tuple(groups)
        self.drops_blocks = any(group.kind != FULL for group in groups)
        # Blocks registered in the prefix cache. They become cached, not free, when their last table is freed. Before
        # one is written again, which happens only after a crop, `append` removes it from the prefix cache.
        self.cached_blocks = cached_blocks
        self._tables: dict[SeqId, _Table] = {}
        self.num_copies = 0  # copy-on-writes so far
        # Counts changes of tables. New blocks at the end of a table and dropped blocks do not count. While the number
        # stays the same, a decode step can extend the arrays of the step before.
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

    def block_table(self, seq_id: SeqId, group: int = 0) -> array[int]:
        """The live table of block ids, read-only for callers: an `array('i')`, which can be copied as raw memory."""
        return self._tables[seq_id].blocks[group]

    def block_tables(self, seq_id: SeqId) -> list[array[int]]:
        """Return the block tables of all groups."""
        return self._tables[seq_id].blocks

    def slots(self, seq_id: SeqId, start: int, stop: int, group: int = 0) -> list[int]:
        """Slots (`block_id * block_size + offset`) of token positions `start` to `stop - 1`."""
        blocks, size = self._tables[seq_id].blocks[group], self.block_size
        return [blocks[pos // size] * size + pos % size for pos in range(start, stop)]

    def num_blocks_of(self, seq_ids: Iterable[SeqId]) -> int:
        """Number of distinct blocks that these sequences hold."""
        return len({block_id for seq_id in seq_ids for block_id in self._tables[seq_id].held()})

    @property
    def num_logical_blocks(self) -> int:
        """Blocks that the sequences would hold without sharing (the denominator of the paper's Figure 15)."""
        return sum(sum(1 for _ in table.held()) for table in list(self._tables.values()))

    @property
    def num_shared_blocks(self) -> int:
        """Blocks held by more than one table."""
        held = {block_id for table in list(self._tables.values()) for block_id in table.held()}
        return sum(self.allocator.ref_count(block_id) > 1 for block_id in held)

    @property
    def num_filled_slots(self) -> int:
        """Slots that hold a token's K/V; shared blocks are counted once."""
        filled: dict[int, int] = {}
        size = self.block_size
        for table in list(self._tables.values()):
            for blocks in table.blocks:
                last = len(blocks) - 1
                for index, block_id in enumerate(blocks):
                    if block_id != NULL_BLOCK:
                        count = size if index < last else table.num_tokens - last * size
                        filled[block_id] = max(filled.get(block_id, 0), count)
        return sum(filled.values())

    def num_blocks_to_append_all(self, appends: Iterable[tuple[SeqId, int]]) -> int:
        """Count the blocks that these appends would take together. Each must be to a different sequence.

        If several sequences that share a partly filled block append to it, all but the last one copy it.
        """
        num_new, size, ref_counts = 0, self.block_size, self.allocator.ref_counts
        sharers: dict[int, int] = {}
        for seq_id, num_tokens in appends:
            table = self._tables.get(seq_id)
            if table is None:
                num_new += -(-num_tokens // size)
                continue
            num_new += -(-(table.num_tokens + num_tokens) // size) - -(-table.num_tokens // size)
            # With `room`, the last blocks are known to be in no other table.
            if num_tokens > 0 and table.num_tokens % size and not table.room:
                for blocks in table.blocks:
                    sharers[blocks[-1]] = sharers.get(blocks[-1], 0) + 1
        # If all tables that hold a block append to it, the last one keeps it. Otherwise each table that appends copies.
        copied = sum(min(count, ref_counts[block_id] - 1) for block_id, count in sharers.items())
        return num_new * len(self.groups) + copied

    def has_room(self, appends: Collection[tuple[SeqId, int]]) -> bool:
        """Return True if blocks suffice for these appends to different sequences, copies of shared blocks included."""
        available = self.allocator.num_available
        # In the worst case, each append takes one block more than its tokens fill, and copies another one. If there
        # are enough blocks for that, an exact count is not needed.
        worst = sum([count for _, count in appends]) // self.block_size + 2 * len(appends)
        return worst * len(self.groups) <= available or self.num_blocks_to_append_all(appends) <= available

    # -- the verbs ----------------------------------------------------------------------------------------------

    def append(self, seq_id: SeqId, num_tokens: int) -> list[BlockCopy]:
        """Make room for `num_tokens` more tokens at the end of `seq_id` (a new id starts an empty sequence).

        Returns the copies (copy-on-write) that the device must make before it writes the new slots: one for each group
        whose partly filled last block is shared. No copy overwrites a source block, because other tables still hold it.
        Raises OutOfBlocks, and then changes nothing.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens}: must not be negative")
        allocator, size = self.allocator, self.block_size
        table = self._tables.get(seq_id) or _Table(len(self.groups))
        length = table.num_tokens + num_tokens
        num_new = -(-length // size) - -(-table.num_tokens // size)
        # Tables whose last block will be written, and may be shared or registered.
        written = table.blocks if num_tokens and table.num_tokens % size and not table.room else ()
        shared = [blocks for blocks in written if allocator.ref_counts[blocks[-1]] > 1]
        # Counted before anything changes, so that OutOfBlocks leaves all tables as they were.
        if num_new or shared:
            needed = num_new * len(self.groups) + len(shared)
            if needed > allocator.num_available:
                raise OutOfBlocks(needed, allocator.num_available)
        copies: list[BlockCopy] = []
        for blocks in written:
            last = blocks[-1]
            if allocator.ref_counts[last] > 1:
                blocks[-1] = allocator.allocate()
                allocator.free(last)
                copies.append(BlockCopy(last, blocks[-1]))
            elif last in self.cached_blocks:
                allocator.forget(last)
        if shared:
            self.num_copies += len(shared)
            self.rewrites += 1
        for blocks in table.blocks if num_new else ():
            for _ in range(num_new):
                blocks.append(allocator.allocate())
        # The last blocks are in no other table now, so later appends need not look.
        if num_tokens:
            table.room = -length % size
        table.num_tokens = length
        self._tables[seq_id] = table
        return copies

    def append_if_room(self, appends: Sequence[tuple[SeqId, int]]) -> list[BlockCopy] | None:
        """Do `append_all`. If blocks are missing, change nothing and return None."""
        return self.append_all(appends) if self.has_room(appends) else None

    def append_all(self, appends: Sequence[tuple[SeqId, int]]) -> list[BlockCopy]:
        """Append to several sequences. Their blocks must be available (see `has_room`)."""
        copies: list[BlockCopy] = []
        tables = self._tables
        for seq_id, num_tokens in appends:
            if num_tokens == 1 and (table := tables.get(seq_id)) is not None and table.room:
                # Most appends need no block, nor a look at other tables.
                table.room -= 1
                table.num_tokens += 1
            else:
                copies += self.append(seq_id, num_tokens)
        return copies

    def drop_unseen(self, seq_id: SeqId) -> int:
        """Free the blocks that no token from `num_tokens` on can attend to; returns how many.

        Call it after the step that computed the last appended tokens, because those tokens still attend to the blocks.
        """
        table = self._tables[seq_id]
        if table.num_tokens < table.drops_at:
            return 0
        dropped = 0
        for number, group in enumerate(self.groups):
            blocks, start = table.blocks[number], table.num_dropped[number]
            first = min(group.kind.first_visible(table.num_tokens) // self.block_size, len(blocks))
            # The entry changes first, so that after an interrupt no entry names a freed block.
            for index in range(start, first):
                block_id, blocks[index] = blocks[index], NULL_BLOCK
                table.num_dropped[number] = index + 1
                self._free_block(block_id)
                dropped += 1
        ends = zip(self.groups, table.num_dropped)
        # With fewer tokens than `drops_at` nothing can be dropped, so most calls end at their first comparison.
        table.drops_at = min(group.kind.unseen_from((first + 1) * self.block_size) for group, first in ends)
        return dropped

    def fork(self, parent_id: SeqId, child_id: SeqId) -> None:
        """Start `child_id` with all of the parent's tokens, sharing every block. Allocates nothing."""
        if child_id in self._tables:
            raise ValueError(f"sequence {child_id!r} exists already")
        parent = self._tables[parent_id]
        child = parent.copy()
        # The parent's last blocks are in two tables now, so its next append has to look before it writes.
        parent.room = 0
        share = self.allocator.share
        for block_id in child.held():
            share(block_id)
        self._tables[child_id] = child

    def adopt(self, seq_id: SeqId, tables: Sequence[Sequence[int]], num_blocks: int) -> None:
        """Start `seq_id` with full blocks that are already written (a prefix-cache hit), sharing them.

        tables: one for each group, of `num_blocks` entries. Their first entries are NULL_BLOCK, in place of blocks that
        no later token attends to.
        """
        if seq_id in self._tables:
            raise ValueError(f"sequence {seq_id!r} exists already")
        table = _Table(0)
        table.blocks = [array("i", blocks) for blocks in tables]
        table.num_dropped = [blocks.count(NULL_BLOCK) for blocks in table.blocks]
        held = list(table.held())
        # All checks come before a block is shared, so that an error changes nothing.
        if len(tables) != len(self.groups) or set(map(len, tables)) - {num_blocks} or NULL_BLOCK in held:
            raise ValueError(f"tables={[list(blocks) for blocks in tables]}: not the beginning of {len(self.groups)}")
        if len(set(held)) < len(held):
            raise ValueError(f"block_ids={held}: a block appears twice")
        if unwritten := [block_id for block_id in held if not self.allocator.is_held(block_id)]:
            raise ValueError(f"block {unwritten[0]} is free: it has no content to adopt")
        for block_id in held:
            self.allocator.share(block_id)
            self.allocator.num_found[block_id] += 1
        table.num_tokens = num_blocks * self.block_size
        self._tables[seq_id] = table

    def crop(self, seq_id: SeqId, num_tokens: int) -> None:
        """Forget the tokens after the first `num_tokens` (rejected speculation)."""
        table = self._tables[seq_id]
        if not 0 <= num_tokens <= table.num_tokens:
            raise ValueError(f"num_tokens={num_tokens}: sequence {seq_id!r} has {table.num_tokens}")
        # All groups are checked before any table changes.
        for group, dropped in zip(self.groups, table.num_dropped):
            if num_tokens < table.num_tokens and group.kind.first_visible(num_tokens) // self.block_size < dropped:
                raise ValueError(f"num_tokens={num_tokens}: blocks that it needs were freed ({group.kind})")
        self.rewrites += 1
        table.num_tokens, table.room = num_tokens, 0
        keep = -(-num_tokens // self.block_size)
        for blocks in table.blocks:
            while len(blocks) > keep:
                self._free_block(blocks.pop())

    def free(self, seq_id: SeqId) -> None:
        """Remove the sequence. Blocks are freed in reverse order, so that the end of a prefix is evicted first."""
        table = self._tables.pop(seq_id)
        self.rewrites += 1
        for blocks, dropped in zip(table.blocks, table.num_dropped):
            for block_id in reversed(blocks[dropped:]):
                self._free_block(block_id)

    def move_to(self, other: BlockManager, seq_ids: Sequence[SeqId]) -> list[BlockCopy]:
        """Move these tables to the manager of another memory: swap out, or swap in (SOSP'23 section 4.5).

        Returns the copies from this manager's blocks to the other's. A block that several of the sequences share is
        copied once and stays shared. Raises OutOfBlocks if the other manager has too few blocks; then nothing moves.
        """
        if other.block_size != self.block_size or other.groups != self.groups:
            raise ValueError(f"the managers differ: block_size {self.block_size} and {other.block_size}, or groups")
        if taken := [seq_id for seq_id in seq_ids if seq_id in other._tables]:
            raise ValueError(f"sequence {taken[0]!r} exists already")
        # Counted before anything moves, so that OutOfBlocks leaves both managers as they were.
        needed = self.num_blocks_of(seq_ids)
        if needed > other.allocator.num_available:
            raise OutOfBlocks(needed, other.allocator.num_available)
        moved: dict[int, int] = {NULL_BLOCK: NULL_BLOCK}
        for seq_id in seq_ids:
            twin = other._tables[seq_id] = self._tables[seq_id].copy()
            for blocks in twin.blocks:
                for index, block_id in enumerate(blocks):
                    if block_id not in moved:
                        moved[block_id] = other.allocator.allocate()
                    elif block_id != NULL_BLOCK:
                        other.allocator.share(moved[block_id])
                    blocks[index] = moved[block_id]
        for seq_id in seq_ids:
            self.free(seq_id)
        del moved[NULL_BLOCK]
        return [BlockCopy(src, dst) for src, dst in moved.items()]

    def _free_block(self, block_id: int) -> None:
        self.allocator.free(block_id, keep=block_id in self.cached_blocks)

    # -- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of the class, or of its allocator, does not hold."""
        self.allocator.check_integrity()
        counts: dict[int, int] = {}
        size = self.block_size
        for seq_id, table in self._tables.items():
            assert len(table.blocks) == len(self.groups)
            for blocks, dropped in zip(table.blocks, table.num_dropped):
                assert len(blocks) == -(-table.num_tokens // size), f"table of {seq_id!r} has the wrong length"
                assert all(b == NULL_BLOCK for b in blocks[:dropped])
                assert NULL_BLOCK not in blocks[dropped:], f"table of {seq_id!r} has a hole"
                if table.room:
                    assert table.room == -table.num_tokens % size, f"the room of {seq_id!r} is wrong"
                    assert self.allocator.ref_count(blocks[-1]) == 1, f"the last block of {seq_id!r} is shared"
                    assert blocks[-1] not in self.cached_blocks, f"the last block of {seq_id!r} is registered"
            held = list(table.held())
            assert len(set(held)) == len(held), f"a block is twice in the tables of {seq_id!r}"
            for block_id in held:
                counts[block_id] = counts.get(block_id, 0) + 1
        for block_id in range(self.allocator.num_blocks):
            expected, actual = counts.get(block_id, 0), self.allocator.ref_count(block_id)
            assert expected == actual, f"block {block_id}: ref_count {actual}, but {expected} tables hold it"
