"""Owns the hashes of full blocks: which block holds the K/V of which token prefix.

Knows token ids and block ids; never requests, tensors or the schedule.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hf_paged.cache.block_manager import BlockManager


class _Pin(NamedTuple):
    """The id of the block table that keeps the blocks of a pinned prefix in use."""

    digest: bytes


def root_digest(model_id: str, adapter: str | None = None, salt: str | None = None) -> bytes:
    """Where a chain of block digests starts: sequences with different roots never share a block."""
    return hashlib.sha256(repr((model_id, adapter, salt)).encode()).digest()


class PrefixCache:
    """Full, computed blocks by the sha256 chain over (digest of the previous block, token ids of the block).

    Invariant: digests and blocks map one to one, and every block that the allocator keeps as *cached* has a digest.
    BlockManager never writes a registered block. The allocator evicts the least recently used block that no table holds
    when it needs one. A pinned prefix has a block table of its own, so that its blocks are never evicted.
    """

    def __init__(self, manager: BlockManager) -> None:
        if manager.sliding_window is not None:
            raise ValueError("a manager with a sliding window drops the blocks of a prefix: nothing can be reused")
        if manager.allocator.on_evict is not None:
            raise ValueError("the allocator reports evictions to another prefix cache already")
        self.block_size = manager.block_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.num_evictions = 0
        # Those evicted since a reader emptied the list; None: no reader asks for them.
        self.evicted: list[int] | None = None
        self._manager = manager
        self._digests: dict[int, bytes] = {}  # by block_id
        self._blocks: dict[bytes, int] = {}  # by digest
        manager.cached_blocks = self._digests
        manager.allocator.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._digests)

    def extend_digests(self, digests: list[bytes], token_ids: Sequence[int], root: bytes, num_blocks: int) -> None:
        """Continue the chain `digests` of the prefix of `token_ids` until it has `num_blocks` entries.

        The list belongs to the sequence, so that each block is hashed once however often the sequence is looked up.
        """
        size = self.block_size
        parent = digests[-1] if digests else root
        for index in range(len(digests), num_blocks):
            tokens = array("q", token_ids[index * size : (index + 1) * size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            digests.append(parent)

    def match(self, token_ids: Sequence[int], root: bytes, digests: list[bytes] | None = None) -> list[int]:
        """Blocks of the longest cached prefix that leaves at least one of `token_ids` to compute.

        Only `digests` is changed; pass the result to `BlockManager.adopt` to share the blocks.
        """
        digests = [] if digests is None else digests
        limit = max(len(token_ids) - 1, 0) // self.block_size
        self.extend_digests(digests, token_ids, root, limit)
        return self._chain(digests[:limit])

    def _chain(self, digests: Sequence[bytes]) -> list[int]:
        block_ids: list[int] = []
        for digest in digests:
            block_id = self._blocks.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def count(self, query_tokens: int, hit_tokens: int) -> None:
        """Update the hit rate: a request looked up `query_tokens` tokens and `hit_tokens` of them were cached."""
        self.query_tokens += query_tokens
        self.hit_tokens += hit_tokens

    def register(self, block_id: int, digest: bytes) -> bool:
        """Register `block_id`, which is full and computed. False if another block has the same digest already."""
        known = self._digests.get(block_id)
        assert known is None or known == digest, f"block {block_id} was written after it had been registered"
        if digest in self._blocks:
            return self._blocks[digest] == block_id
        self._blocks[digest] = block_id
        self._digests[block_id] = digest
        return True

    def pin(self, token_ids: Sequence[int], root: bytes) -> int:
        """Keep the cached blocks of this prefix until `unpin`; returns the number of tokens kept (0: none cached).

        Pin a prefix after it has been computed. Pinning it again extends the pin to the blocks that are cached now.
        """
        digests: list[bytes] = []
        self.extend_digests(digests, token_ids, root, len(token_ids) // self.block_size)
        if not digests:
            return 0
        block_ids, pin_id = self._chain(digests), _Pin(digests[-1])
        if pin_id in self._manager:
            self._manager.free(pin_id)
        if block_ids:
            self._manager.adopt(pin_id, block_ids)
        return len(block_ids) * self.block_size

    def unpin(self, token_ids: Sequence[int], root: bytes) -> bool:
        """Unpin a prefix, so that its blocks may be evicted again. False if it was not pinned."""
        digests: list[bytes] = []
        self.extend_digests(digests, token_ids, root, len(token_ids) // self.block_size)
        if not digests or _Pin(digests[-1]) not in self._manager:
            return False
        self._manager.free(_Pin(digests[-1]))
        return True

    @property
    def pins(self) -> list[Hashable]:
        """Ids of the block tables that belong to pinned prefixes."""
        return [seq_id for seq_id in self._manager.seq_ids if isinstance(seq_id, _Pin)]

    def clear(self) -> None:
        """Forget every prefix, pinned or not, for example after the weights changed. Sequences keep their blocks."""
        for pin_id in self.pins:
            self._manager.free(pin_id)
        allocator = self._manager.allocator
        for block_id in self._digests:
            if allocator.is_cached(block_id):
                allocator.drop_cached(block_id)
        self._digests.clear()
        self._blocks.clear()

    def _forget(self, block_id: int) -> None:
        del self._blocks[self._digests.pop(block_id)]
        self.num_evictions += 1
        if self.evicted is not None:
            self.evicted.append(block_id)

    def check_integrity(self) -> None:
        """Raises AssertionError if the invariant of the class does not hold."""
        allocator = self._manager.allocator
        assert self._blocks == {digest: block_id for block_id, digest in self._digests.items()}
        assert len(self._blocks) == len(self._digests), "two blocks have one digest"
        for block_id in range(allocator.num_blocks):
            known = block_id in self._digests
            assert known or not allocator.is_cached(block_id), f"block {block_id} is cached without a digest"
            idle = allocator.ref_count(block_id) == 0 and not allocator.is_cached(block_id)
            assert not (known and idle), f"block {block_id} has a digest, but is free"
