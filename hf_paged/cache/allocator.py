"""Tracks the state of every block (free, used or cached) and how many block tables hold it.

Knows block ids and counts only: no tokens, no tensors, no sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from hf_paged.errors import OutOfBlocks
from hf_paged.policies import Eviction, lru


class BlockAllocator:
    """A free list with reference counts.

    Invariant: every block is in exactly one of three states, so `num_free + num_used + num_cached == num_blocks`:

    - *free*;
    - *used*: `ref_count` >= 1 block tables hold it;
    - *cached*: no table holds it, but the prefix cache keeps its content until `allocate` evicts it (`evict_by`).

    A block is *touched* once it has been allocated for the first time; before that it is *fresh*. The operating system
    commits memory page by page, so on a CPU only touched blocks take physical memory. `allocate` prefers, in this
    order: a touched free block; a fresh block while fewer than `touch_limit` blocks are touched (None: no limit); the
    cached block that `evict_by` chooses; a fresh block beyond the limit. The prefix cache therefore grows to at most
    `touch_limit` blocks, or to the largest number of blocks that sequences have used at one time.

    Where memory of the same size holds other things too, `withhold` says how many blocks it would be. So many stay
    free, and are fresh again once the caller has given back the memory of those that `untouch` returns.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int], None] | None = None, *, touch_limit: int | None = None
    ) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks}: must not be negative")
        # A stack: the block freed last is most likely still in the CPU's caches. Fresh blocks are allocated in
        # ascending order, so that a new sequence gets consecutive blocks, which the torch path reads without a gather.
        self._free: list[int] = []
        self._num_touched = 0  # blocks with this id or above are fresh: free, but not in `_free`
        self._untouched: list[int] = []  # free blocks below it that are fresh again
        self.num_withheld = 0
        self.touch_limit = touch_limit
        self.ref_counts = [0] * num_blocks  # by block id; read-only for callers
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.evict_by: Eviction = lru
        self.num_found = [0] * num_blocks  # how often a block was adopted since it was allocated, by block id
        self.on_evict = on_evict  # called with each block whose content is about to be overwritten

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def num_touched(self) -> int:
        """Count the blocks that have been allocated at least once and are not fresh again."""
        return self._num_touched - len(self._untouched)

    @property
    def first_unused(self) -> int:
        """Blocks with this id or above have never been allocated."""
        return self._num_touched

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self.num_touched

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def cached_blocks(self) -> list[int]:
        """The cached blocks, those used least recently first."""
        return list(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_touched - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Count the blocks that `allocate` can return: free and cached blocks, less the withheld number."""
        return self.num_free + len(self._cached) - self.num_withheld

    def ref_count(self, block_id: int) -> int:
        if 0 <= block_id < len(self.ref_counts):
            return self.ref_counts[block_id]
        raise ValueError(f"block {block_id} does not exist: there are {self.num_blocks}")

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def is_held(self, block_id: int) -> bool:
        """True if the block is used or cached, so that its content is valid."""
        return self.ref_count(block_id) > 0 or block_id in self._cached

    def allocate(self) -> int:
        """Return a block with `ref_count` 1, evicting a cached block if necessary.

        Raises OutOfBlocks if no block is available.
        """
        # Withheld blocks are free in number only: others have their memory.
        may_take_free = not self.num_withheld or self.num_free > self.num_withheld
        if self._free and may_take_free:
            block_id = self._free.pop()
        elif (
            may_take_free
            and self.num_touched < self.num_blocks
            # Within `touch_limit` memory is cheaper than computing a prefix again.
            and (not self._cached or self.touch_limit is None or self.num_touched < self.touch_limit)
        ):
            if self._untouched:
                block_id = self._untouched.pop()
            else:
                block_id = self._num_touched
                self._num_touched += 1
        elif self._cached:
            block_id = self._evict()
        else:
            raise OutOfBlocks(1, 0, "free sequences or give the cache more blocks")
        self.ref_counts[block_id], self.num_found[block_id] = 1, 0
        return block_id

    def share(self, block_id: int) -> None:
        """Add one reference to `block_id`; a cached block becomes used again. Raises ValueError if it is free."""
        if self.ref_count(block_id) == 0:
            if block_id not in self._cached:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            del self._cached[block_id]
        self.ref_counts[block_id] += 1

    def free(self, block_id: int, *, keep: bool = False) -> int:
        """Drop one reference to `block_id` and return the new `ref_count`.

        At 0 the block becomes free, or cached if `keep`. Raises ValueError if the block is not in use.
        """
        count = self.ref_count(block_id) - 1
        if count < 0:
            raise ValueError(f"block {block_id} is not in use (freed twice?)")
        self.ref_counts[block_id] = count
        if count == 0:
            if keep:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)
        return count

    def drop_cached(self, block_id: int) -> None:
        """Free a cached block whose content is no longer wanted. Raises ValueError if it is not cached."""
        if block_id not in self._cached:
            raise ValueError(f"block {block_id} is not cached")
        del self._cached[block_id]
        self._free.append(block_id)

    def withhold(self, num_blocks: int) -> None:
        """Give the memory of so many blocks to other uses, and evict cached blocks for it. Raises OutOfBlocks if fewer
        blocks are available."""
        if num_blocks > self.num_free + len(self._cached):
            raise OutOfBlocks(num_blocks, self.num_free + len(self._cached))
        self.num_withheld = num_blocks
        while self.num_free < num_blocks:
            self._free.append(self._evict())

    def _evict(self) -> int:
        """Choose the cached block that is needed least, and take it from the prefix cache."""
        block_id = self.evict_by(self._cached, self.num_found)
        if block_id not in self._cached:
            raise ValueError(f"{self.evict_by!r} returned {block_id!r}; return one of the blocks that it was given")
        del self._cached[block_id]
        self.forget(block_id)
        return block_id

    def untouch(self) -> list[int]:
        """Free blocks that were touched, and whose memory others have taken. The caller gives it back to the system."""
        excess = self.num_touched + self.num_withheld - self.num_blocks
        if excess <= 0:
            return []
        # Those freed longest ago: `allocate` takes blocks from the other end.
        taken = self._free[:excess]
        del self._free[:excess]
        self._untouched += taken
        return taken

    def forget(self, block_id: int) -> None:
        """Notify the prefix cache, if there is one, that the content of `block_id` is about to be overwritten."""
        if self.on_evict is not None:
            self.on_evict(block_id)

    def grow(self, num_blocks: int) -> None:
        """Add free blocks until there are `num_blocks`. Raises ValueError if there are more already."""
        old = self.num_blocks
        if num_blocks < old:
            raise ValueError(f"num_blocks={num_blocks}: cannot shrink from {old}")
        self.ref_counts.extend([0] * (num_blocks - old))
        self.num_found.extend([0] * (num_blocks - old))

    def restart(self, num_blocks: int) -> None:
        """Start over with `num_blocks` fresh blocks, however many there were. Raises ValueError unless all are free."""
        if self.num_used or self._cached:
            raise ValueError(f"{self.num_used} block(s) are used and {self.num_cached} cached; free them first")
        self._free, self._untouched, self._num_touched, self.ref_counts = [], [], 0, [0] * num_blocks
        self.num_withheld, self.num_found = 0, [0] * num_blocks

    def check_integrity(self) -> None:
        """Raise AssertionError if the invariant of the class does not hold."""
        free, cached = set(self._free), set(self._cached)
        fresh = range(self._num_touched, self.num_blocks)
        assert len(free) == len(self._free) and free.isdisjoint(fresh), "a block is twice in the free list"
        assert len({*free, *self._untouched}) == len(free) + len(self._untouched), "a block is free and untouched"
        free.update(fresh, self._untouched)
        assert self.num_withheld <= self.num_free, "more blocks are withheld than are free"
        assert not free & cached, "a block is both free and cached"
        for block_id, count in enumerate(self.ref_counts):
            idle = block_id in free or block_id in cached
            assert count >= 0, f"block {block_id} has a negative ref_count"
            assert idle == (count == 0), f"block {block_id}: ref_count {count}, but {'idle' if idle else 'not idle'}"
