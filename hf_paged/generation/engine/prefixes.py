"""What the sequences of an engine take from the prefix cache and add to it. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.prefix_cache import CachedPrefix, PrefixCache
from hf_paged.generation.requests.sequence import Sequence, SequenceGroup


class Prefixes:
    """The prefix cache of an engine as its scheduler uses it; without one (None) nothing is found or added.

    A group without a `cache_root` finds and adds nothing.
    """

    def __init__(self, cache: PrefixCache | None, manager: BlockManager) -> None:
        self._cache = cache
        self.is_on = True  # otherwise nothing is found or added
        self._manager = manager

    def match(self, group: SequenceGroup) -> CachedPrefix | None:
        """The cached prefix with which a waiting group can start."""
        if self._cache is None or group.cache_root is None or not self.is_on:
            return None
        leader = group.live[0]
        # The other sequences fork from the leader, so it must not start beyond the first branch.
        limit = min((seq.branch_at for seq in group.live if seq.parent is leader), default=leader.num_tokens)
        if group.scored_from is not None:
            limit = min(limit, group.scored_from)
        return self._cache.match(leader.token_ids, group.cache_root, leader.block_digests, limit)

    def adopt(self, group: SequenceGroup, prefix: CachedPrefix | None) -> None:
        """Record that the group's first sequence starts with these blocks."""
        leader, num_blocks = group.live[0], 0 if prefix is None else prefix.num_blocks
        leader.num_computed_tokens = num_blocks * self._manager.block_size
        leader.num_registered_blocks = num_blocks
        if self._cache is not None and group.cache_root is not None and group.num_preemptions == 0:
            group.num_cached_tokens = leader.num_computed_tokens
            self._cache.count(leader.num_tokens, leader.num_computed_tokens)

    def register(self, seq: Sequence) -> None:
        """Enter the full blocks that the sequence has computed."""
        cache = self._cache
        if cache is None or seq.group.cache_root is None or not self.is_on:
            return
        num_blocks = seq.num_computed_tokens // cache.block_size
        cache.extend_digests(seq.block_digests, seq.token_ids, seq.group.cache_root, num_blocks)
        tables = self._manager.block_tables(seq.seq_id)
        for index in range(seq.num_registered_blocks, num_blocks):
            cache.register(tables, index, seq.block_digests[index])
        seq.num_registered_blocks = num_blocks

    def forget(self, groups: Iterable[SequenceGroup]) -> None:
        """Drop all cached prefixes; `groups`, which have K/V of the old weights, cache no further blocks."""
        if self._cache is not None:
            self._cache.clear()
            for group in groups:
                group.cache_root = None
