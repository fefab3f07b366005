"""A buddy allocator of contiguous token slots, as the baselines of the paper use it (section 6.1).

Knows sizes and offsets only. Standard library only.
"""

from __future__ import annotations


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


class BuddyAllocator:
    """Chunks of 2**n slots; freed halves of one chunk merge again.

    A capacity that is no power of two is split into one chunk for each bit that is set, largest first, so every chunk
    starts at a multiple of its size.

    Invariant: free and allocated chunks do not overlap and cover all slots; no two free chunks are buddies.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: at least one slot is needed")
        self.capacity = capacity
        self._free: dict[int, set[int]] = {}  # size -> offsets
        self._used: dict[int, int] = {}  # offset -> size
        self._roots: dict[int, int] = {}  # offset -> size of the chunks that never merge
        offset = 0
        for bit in reversed(range(capacity.bit_length())):
            if capacity >> bit & 1:
                self._roots[offset] = 1 << bit
                self._free.setdefault(1 << bit, set()).add(offset)
                offset += 1 << bit

    @property
    def num_used(self) -> int:
        """Slots of allocated chunks, the part lost by rounding included."""
        return sum(self._used.values())

    def allocate(self, count: int) -> int | None:
        """The offset of a chunk with room for `count` slots, the lowest of the smallest that fit; None if there is
        none."""
        size = power_of_two(count)
        fitting = [free for free, offsets in self._free.items() if free >= size and offsets]
        if not fitting:
            return None
        found = min(fitting)
        offset = min(self._free[found])
        self._free[found].remove(offset)
        while found > size:
            found //= 2
            self._free.setdefault(found, set()).add(offset + found)
        self._used[offset] = size
        return offset

    def free(self, offset: int) -> None:
        """Free the chunk at `offset`. Raises KeyError if none is allocated there."""
        size = self._used.pop(offset)
        while self._roots.get(offset) != size and (buddy := offset ^ size) in self._free.get(size, ()):
            self._free[size].remove(buddy)
            offset = min(offset, buddy)
            size *= 2
        self._free.setdefault(size, set()).add(offset)

    def check_integrity(self) -> None:
        """Raises AssertionError if the invariant of the class does not hold."""
        chunks = [(offset, size) for size, offsets in self._free.items() for offset in offsets]
        for offset, size in chunks:
            root = self._roots.get(offset) == size
            assert root or offset ^ size not in self._free[size], f"free buddies at {offset} are not merged"
        end = 0
        for offset, size in sorted([*chunks, *self._used.items()]):
            assert offset == end, f"a gap or an overlap at slot {end}"
            end += size
        assert end == self.capacity
