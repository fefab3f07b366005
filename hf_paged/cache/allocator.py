"""Owns which block is free, used or kept for reuse, and how many block tables hold it.

Knows block ids and counts only: no tokens, no tensors, no sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from hf_paged.errors import OutOfBlocks


class BlockAllocator:
    """A free list with reference counts.

    Invariant: every block is in exactly one of three states: *free*; *used* (`ref_count` >= 1 block tables hold it);
    *cached* (held by no table, kept for the prefix cache, taken back in least-recently-used order).
    `num_free + num_used + num_cached == num_blocks`.

    A block is *touched* once it has been handed out: from then on its memory counts, where the system gives memory
    page by page. `allocate` takes, in this order: a touched free block; a fresh one while fewer than `touch_limit` are
    touched (None = all of them may be); a cached one; a fresh one. So the prefix cache fills at most `touch_limit`
    blocks, or as many as sequences have once used at the same time.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int], None] | None = None, *, touch_limit: int | None = None
    ) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks}: must not be negative")
        # A stack: the block freed last is the one whose memory is warm in the caches. Fresh blocks are handed out in
        # ascending order, so that a new sequence gets consecutive ones (the CPU path then needs no gather).
        self._free: list[int] = []
        self._num_touched = 0  # the blocks from here on are fresh: free, and in no list
        self.touch_limit = touch_limit
        self._ref_counts = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.on_evict = on_evict  # told of every block whose content must not be found again

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_touched(self) -> int:
        """Blocks that have ever been handed out."""
        return self._num_touched

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_touched

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_touched - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones."""
        return self.num_free + len(self._cached)

    def ref_count(self, block_id: int) -> int:
        if 0 <= block_id < len(self._ref_counts):
            return self._ref_counts[block_id]
        raise ValueError(f"block {block_id} does not exist: there are {self.num_blocks}")

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def is_held(self, block_id: int) -> bool:
        """Used or cached: its content has a meaning."""
        return self.ref_count(block_id) > 0 or block_id in self._cached

    def allocate(self) -> int:
        """A block with `ref_count` 1, if need be the least recently used cached one, which is evicted.

        Raises OutOfBlocks when there is none.
        """
        fresh = self._num_touched
        if self._free:
            block_id = self._free.pop()
        elif fresh < self.num_blocks and (not self._cached or self.touch_limit is None or fresh < self.touch_limit):
            block_id = fresh
            self._num_touched += 1
        elif self._cached:
            block_id, _ = self._cached.popitem(last=False)
            self.forget(block_id)
        else:
            raise OutOfBlocks(1, 0, "free sequences or give the cache more blocks")
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """One more table holds `block_id`; a cached block comes back into use."""
        if self.ref_count(block_id) == 0:
            if block_id not in self._cached:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            del self._cached[block_id]
        self._ref_counts[block_id] += 1

    def free(self, block_id: int, *, keep: bool = False) -> int:
        """One table less holds `block_id`; returns the new `ref_count`. At 0 it is free, or cached if `keep`."""
        count = self.ref_count(block_id) - 1
        if count < 0:
            raise ValueError(f"block {block_id} is not in use (freed twice?)")
        self._ref_counts[block_id] = count
        if count == 0:
            if keep:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)
        return count

    def drop_cached(self, block_id: int) -> None:
        """A cached block that nobody will ask for again becomes free."""
        if block_id not in self._cached:
            raise ValueError(f"block {block_id} is not cached")
        del self._cached[block_id]
        self._free.append(block_id)

    def forget(self, block_id: int) -> None:
        """The content of `block_id` is about to be overwritten: tell the prefix cache, if there is one."""
        if self.on_evict is not None:
            self.on_evict(block_id)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`; never shrinks."""
        old = self.num_blocks
        if num_blocks < old:
            raise ValueError(f"num_blocks={num_blocks}: cannot shrink from {old}")
        self._ref_counts.extend([0] * (num_blocks - old))

    def restart(self, num_blocks: int) -> None:
        """Have `num_blocks` fresh blocks, more or fewer than before. Raises ValueError unless all are free."""
        if self.num_used or self._cached:
            raise ValueError(f"{self.num_used} block(s) are used and {self.num_cached} cached; free them first")
        self._free, self._num_touched, self._ref_counts = [], 0, [0] * num_blocks

    def check_integrity(self) -> None:
        """Raises AssertionError if the invariant of the class does not hold."""
        free, cached = set(self._free), set(self._cached)
        fresh = range(self._num_touched, self.num_blocks)
        assert len(free) == len(self._free) and free.isdisjoint(fresh), "a block is twice in the free list"
        free.update(fresh)
        assert not free & cached, "a block is both free and cached"
        for block_id, count in enumerate(self._ref_counts):
            idle = block_id in free or block_id in cached
            assert count >= 0, f"block {block_id} has a negative ref_count"
            assert idle == (count == 0), f"block {block_id}: ref_count {count}, but {'idle' if idle else 'not idle'}"
