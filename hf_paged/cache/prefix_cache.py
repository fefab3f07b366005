"""Owns the hashes of full blocks: which block holds the K/V of which token prefix.

Knows token ids and block ids; never requests, tensors or the schedule.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from hf_paged.cache.block_manager import NULL_BLOCK, BlockManager
from hf_paged.cache.layers import FULL
from hf_paged.policies import Eviction, eviction_of


class _Pin(NamedTuple):
    """The id of the block table that keeps the blocks of a pinned prefix in use."""

    digest: bytes


def root_digest(model_id: str, variant: str | None = None, salt: str | None = None) -> bytes:
    """Return the start of a chain of block digests: sequences with different roots never share a block."""
    # `repr`, so that no two of these triples are the same text.
    return hashlib.sha256(repr((model_id, variant, salt)).encode()).digest()


class CachedPrefix(NamedTuple):
    """The blocks of a cached prefix: for each group of layers a table of `num_blocks` entries, in which NULL_BLOCK
    stands for blocks that no later token attends to. num_idle: blocks that no table holds now. digest: of its last
    block; b"" if it has none. lacking: digests of the blocks after it that were looked for."""

    num_blocks: int
    tables: list[list[int]]
    num_idle: int
    digest: bytes = b""
    lacking: Sequence[bytes] = ()

    @property
    def num_held(self) -> int:
        return sum(self.num_blocks - table.count(NULL_BLOCK) for table in self.tables)


class Ends(Protocol):
    """Where prefixes of a model end that keeps more than K/V of them, by the digest of the last block."""

    def __contains__(self, digest: bytes) -> bool: ...

    def pays(self, group: Any, num_tokens: int) -> bool:
        """Return True if a group may as well begin with a prefix of so many tokens."""

    def stop(self, group: Any, num_cached: int, size: int) -> None:
        """Choose where a group that begins with `num_cached` blocks of `size` tokens ends steps."""

    def is_early(self, seq: Any) -> bool:
        """Return True if the computed tokens of a sequence are computed again, with those that follow."""

    def use(self, digest: bytes, seq_id: int, num_tokens: int) -> None:
        """Begin a sequence there."""

    def keep(self, digest: bytes, seq_id: int, num_tokens: int, *, is_tail: bool) -> None:
        """Keep what a sequence has there."""

    def pin(self, digest: bytes) -> None: ...

    def unpin(self, digest: bytes) -> None: ...

    def clear(self) -> None: ...

    def check_integrity(self) -> None: ...


class PrefixCache:
    """Full, computed blocks by the sha256 chain over (digest of the previous block, token ids of the block).

    A block holds the tokens for one group of layers, so each group has blocks of its own under one digest. A prefix is
    found if the groups have what a next token attends to: of layers that keep all tokens the whole chain, of layers
    with a window the blocks of the last window. Of a model that keeps more, or nothing else, a prefix ends at `ends`.

    Invariant: (group, digest) and blocks map one to one, and every block that the allocator keeps as *cached* has a
    digest. BlockManager never writes a registered block. When the allocator needs a block, it evicts one that no table
    holds, which `evict_by` chooses; the other groups' blocks that become useless with it are free then. A pinned prefix
    has a block table of its own, so that its blocks are never evicted.
    """

    def __init__(self, manager: BlockManager, ends: Ends | None = None, evict_by: Eviction | str = "lru") -> None:
        if manager.allocator.on_evict is not None:
            raise ValueError("the allocator reports evictions to another prefix cache already")
        self.block_size = manager.block_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.num_evictions = 0
        # Those evicted since a reader emptied the list; None: no reader asks for them.
        self.evicted: list[int] | None = None
        # Each is called with a block, its group and digest, while it still has its content.
        self.heirs: Iterable[Callable[[int, int, bytes], None]] = ()
        self.ends = ends
        self._manager = manager
        self._kinds = [group.kind for group in manager.groups]
        self._windowed = [number for number, kind in enumerate(self._kinds) if kind != FULL]
        self._digests: dict[int, tuple[int, bytes]] = {}  # group and digest by block_id
        self._blocks: list[dict[bytes, int]] = [{} for _ in self._kinds]  # of each group, by digest
        self._pinned_at: dict[_Pin, bytes] = {}  # the digest with which a pinned prefix ends
        manager.cached_blocks = self._digests
        manager.allocator.on_evict, manager.allocator.evict_by = self._forget, eviction_of(evict_by)

    def __len__(self) -> int:
        return len(self._digests)

    def extend_digests(self, digests: list[bytes], token_ids: Sequence[int], root: bytes, num_blocks: int) -> None:
        """Continue the chain `digests` of the prefix of `token_ids` until it has `num_blocks` entries.

        The list belongs to the sequence, so that each block is hashed once however often the sequence is looked up.
        """
        size = self.block_size
        parent = digests[-1] if digests else root
        for index in range(len(digests), num_blocks):
            # 64 bits with a sign, because keys of media take the place of tokens.
            tokens = array("q", token_ids[index * size : (index + 1) * size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            digests.append(parent)

    def match(
        self, token_ids: Sequence[int], root: bytes, digests: list[bytes] | None = None, limit: int | None = None
    ) -> CachedPrefix:
        """The longest cached prefix, of at most `limit` tokens, that leaves at least one of `token_ids` to compute.

        Only `digests` is changed; pass the tables to `BlockManager.adopt` to share the blocks.
        """
        digests = [] if digests is None else digests
        # Without a token to compute, there would be no logits.
        most = max(len(token_ids) - 1, 0) // self.block_size
        self.extend_digests(digests, token_ids, root, most)
        return self._chain(digests[: most if limit is None else min(most, limit // self.block_size)])

    def _chain(self, digests: Sequence[bytes]) -> CachedPrefix:
        """The longest cached prefix of this chain."""
        count = len(digests)
        for kind, blocks in zip(self._kinds, self._blocks):
            if kind == FULL:
                count = next((index for index in range(count) if digests[index] not in blocks), count)
        # Each group may ask for a shorter prefix than the one before has left.
        while (shorter := self._shorter(digests, count)) is not None:
            count = shorter
        tables = [
            [NULL_BLOCK] * (first := self._first(number, count)) + [blocks[each] for each in digests[first:count]]
            for number, blocks in enumerate(self._blocks)
        ]
        allocator = self._manager.allocator
        num_idle = sum(allocator.is_cached(block_id) for table in tables for block_id in table)
        return CachedPrefix(count, tables, num_idle, digests[count - 1] if count else b"", digests[count:])

    def _shorter(self, digests: Sequence[bytes], count: int) -> int | None:
        """Return a smaller number of blocks if no prefix can end after `count`: nothing else is kept there, or a window
        needs a block that is not cached. None if it can."""
        if count and self.ends is not None and digests[count - 1] not in self.ends:
            return count - 1
        for number in self._windowed:
            blocks = self._blocks[number]
            for index in range(count - 1, self._first(number, count) - 1, -1):
                if digests[index] not in blocks:
                    return index
        return None

    def _first(self, number: int, count: int) -> int:
        """Return the first block of a group that a token after `count` blocks attends to; `count` if there is none."""
        return min(self._kinds[number].first_visible(count * self.block_size) // self.block_size, count)

    def count(self, query_tokens: int, hit_tokens: int) -> None:
        """Update the hit rate: a request looked up `query_tokens` tokens and `hit_tokens` of them were cached."""
        self.query_tokens += query_tokens
        self.hit_tokens += hit_tokens

    def count_on(self, former: PrefixCache) -> None:
        """Count from the figures of the cache that this one takes the place of."""
        self.count(former.query_tokens, former.hit_tokens)
        self.num_evictions, self.evicted = former.num_evictions, former.evicted

    def register(self, tables: Sequence[Sequence[int]], index: int, digest: bytes) -> None:
        """Register the blocks at `index` of a sequence's tables, which are full and computed. A group in which another
        block has the digest already keeps that one."""
        for number, (table, blocks) in enumerate(zip(tables, self._blocks)):
            block_id = table[index]
            if block_id != NULL_BLOCK and blocks.setdefault(digest, block_id) == block_id:
                known = self._digests.setdefault(block_id, (number, digest))
                assert known == (number, digest), f"block {block_id} was written after it had been registered"

    def pin(self, token_ids: Sequence[int], root: bytes) -> int:
        """Keep the cached blocks of this prefix until `unpin`; returns the number of tokens kept (0: none cached).

        Pin a prefix after it has been computed. Pinning it again extends the pin to the blocks that are cached now.
        Raises ValueError if pinned states leave no room for its state.
        """
        digests: list[bytes] = []
        self.extend_digests(digests, token_ids, root, len(token_ids) // self.block_size)
        if not digests:
            return 0
        prefix, pin_id = self._chain(digests), _Pin(digests[-1])
        if pin_id in self._manager:
            self._unpin(pin_id)
        if prefix.num_blocks:
            # Before the blocks are adopted, because it may raise.
            if self.ends is not None:
                self.ends.pin(prefix.digest)
            self._manager.adopt(pin_id, prefix.tables, prefix.num_blocks)
            self._pinned_at[pin_id] = prefix.digest
        return prefix.num_blocks * self.block_size

    def unpin(self, token_ids: Sequence[int], root: bytes) -> bool:
        """Unpin a prefix, so that its blocks may be evicted again. False if it was not pinned."""
        digests: list[bytes] = []
        self.extend_digests(digests, token_ids, root, len(token_ids) // self.block_size)
        if not digests or _Pin(digests[-1]) not in self._manager:
            return False
        self._unpin(_Pin(digests[-1]))
        return True

    def _unpin(self, pin_id: _Pin) -> None:
        self._manager.free(pin_id)
        digest = self._pinned_at.pop(pin_id)
        # Prefixes of different lengths may have one end.
        if self.ends is not None and digest not in self._pinned_at.values():
            self.ends.unpin(digest)

    @property
    def pins(self) -> list[Hashable]:
        """Ids of the block tables that belong to pinned prefixes."""
        return [seq_id for seq_id in self._manager.seq_ids if isinstance(seq_id, _Pin)]

    def clear(self) -> None:
        """Forget every prefix, pinned or not, for example after the weights changed. Sequences keep their blocks."""
        # Pins first: their blocks become cached, and are dropped below with the others.
        for pin_id in self.pins:
            self._manager.free(pin_id)
        self._pinned_at.clear()
        if self.ends is not None:
            self.ends.clear()
        allocator = self._manager.allocator
        for block_id in self._digests:
            if allocator.is_cached(block_id):
                allocator.drop_cached(block_id)
        self._digests.clear()
        for blocks in self._blocks:
            blocks.clear()

    def _forget(self, block_id: int) -> None:
        """The content of a block is about to be overwritten."""
        number, digest = self._remove(block_id)
        # Without a block of a layer that keeps all tokens, no prefix that contains it is found; without one of a
        # window, none that ends soon after it.
        for other, kind in enumerate(self._kinds):
            twin = self._blocks[other].get(digest)
            is_useless = self._kinds[number] in (FULL, kind)
            if twin is not None and is_useless and self._manager.allocator.is_cached(twin):
                self._remove(twin)
                self._manager.allocator.drop_cached(twin)

    def _remove(self, block_id: int) -> tuple[int, bytes]:
        number, digest = self._digests.pop(block_id)
        del self._blocks[number][digest]
        self.num_evictions += 1
        if self.evicted is not None:
            self.evicted.append(block_id)
        for tell in self.heirs:
            tell(block_id, number, digest)
        return number, digest

    def check_integrity(self) -> None:
        """Raise AssertionError if the invariant of the class does not hold."""
        allocator = self._manager.allocator
        entries = {
            block_id: (number, digest)
            for number, blocks in enumerate(self._blocks)
            for digest, block_id in blocks.items()
        }
        assert entries == self._digests, "blocks and digests do not map one to one"
        assert sum(map(len, self._blocks)) == len(self._digests), "two blocks have one digest"
        for block_id in range(allocator.num_blocks):
            known = block_id in self._digests
            assert known or not allocator.is_cached(block_id), f"block {block_id} is cached without a digest"
            idle = allocator.ref_count(block_id) == 0 and not allocator.is_cached(block_id)
            assert not (known and idle), f"block {block_id} has a digest, but is free"
        assert set(self._pinned_at) == set(self.pins)
        if self.ends is not None:
            self.ends.check_integrity()
