"""Prefixes that an engine's sequences take from the prefix cache and add to it. Standard library only."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as SequenceOf

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.prefix_cache import CachedPrefix, PrefixCache
from hf_paged.generation.requests.sequence import Plan, SeqStatus, Sequence, SequenceGroup
from hf_paged.sockets import SideMemory


class Prefixes:
    """The prefix cache of an engine as its scheduler uses it; without one (None) nothing is found or added.

    A group without a `cache_root` finds and adds nothing.

    Where the cache has `Ends`, they choose the prefixes and where sequences stop for later ones.

    sides: they may keep blocks that the cache evicts. If one of them `goes_back`, a sequence whose draft is wrong goes
    back to before the step.
    """

    def __init__(self, cache: PrefixCache | None, manager: BlockManager, sides: SequenceOf[SideMemory]) -> None:
        self._cache = cache
        self._goes_back = any(side.goes_back for side in sides)
        self._heirs = [side for side in sides if type(side).evicted is not SideMemory.evicted]
        if cache is not None:
            cache.heirs = [side.evicted for side in self._heirs]
        self.is_on = True  # otherwise nothing is found or added
        self._manager = manager
        self._ends = None if cache is None else cache.ends

    def match(self, group: SequenceGroup) -> CachedPrefix | None:
        """The cached prefix with which a waiting group can start."""
        if self._cache is None or group.cache_root is None or not self.is_on:
            return None
        leader = group.live[0]
        # The other sequences fork from the leader, so it must not start beyond the first branch.
        limit = min((seq.branch_at for seq in group.live if seq.parent is leader), default=leader.num_tokens)
        if group.task is not None:
            limit = min(limit, group.task.start)  # cached prefixes have K/V, but no output
        prefix = self._cache.match(_compared(leader), group.cache_root, leader.block_digests, limit)
        if self._ends is not None and not self._ends.pays(group, prefix.num_blocks * self._manager.block_size):
            return None
        return prefix

    def adopt(self, group: SequenceGroup, prefix: CachedPrefix | None) -> None:
        """Record that the group's first sequence starts with these blocks."""
        leader, num_blocks = group.live[0], 0 if prefix is None else prefix.num_blocks
        leader.num_computed_tokens = num_blocks * self._manager.block_size
        leader.num_registered_blocks = num_blocks
        if self._cache is None or group.cache_root is None:
            return
        if prefix is not None and prefix.lacking and self._ends is None:
            leader.num_computed_tokens += self._recall(leader, prefix.lacking)
        if self._ends is not None and self.is_on:
            if prefix is not None and num_blocks:
                self._ends.use(prefix.digest, leader.seq_id, leader.num_computed_tokens)
            self._ends.stop(group, num_blocks, self._manager.block_size)
        # What a preempted group finds is its own, which saves no other request's work.
        if group.num_preemptions == 0:
            group.num_cached_tokens = leader.num_computed_tokens
            self._cache.count(leader.num_tokens, leader.num_computed_tokens)

    def _recall(self, seq: Sequence, lacking: SequenceOf[bytes]) -> int:
        """Let a side memory continue the prefix of a sequence that starts. Returns the number of tokens."""
        manager = self._manager
        for side in self._heirs:
            num_tokens = side.num_kept(lacking) * manager.block_size
            if num_tokens and manager.append_if_room([(seq.seq_id, num_tokens)]) is not None:
                tables = [table[seq.num_registered_blocks :] for table in manager.block_tables(seq.seq_id)]
                side.recall([*zip(lacking, *tables)])
                return num_tokens
        return 0

    def computed(self, plan: Plan, drafts: Container[Sequence]) -> None:
        """Count what is computed, enter blocks that are full, and drop those that no layer attends to any more."""
        manager, running = self._manager, SeqStatus.RUNNING
        block_size, shares, drops = manager.block_size, self._cache is not None, manager.drops_blocks
        for seq, num_tokens in plan:
            if seq.finish_reason is not None or seq.group.status is not running:
                continue
            seq.num_computed_tokens = num_computed = seq.num_computed_tokens + num_tokens
            has_draft = drafts and seq in drafts
            # Whether these tokens stay computed is known when the draft is verified.
            if has_draft and self._goes_back:
                continue
            if shares and num_computed // block_size > seq.num_registered_blocks:
                self.register(seq)
            if drops and not has_draft:  # whose tables are too long yet
                manager.drop_unseen(seq.seq_id)

    def accepted(self, seq: Sequence) -> None:
        """One more token of the sequence, which was drafted, is computed."""
        seq.num_computed_tokens += 1
        # Blocks of a model that may go back are entered when the draft is verified.
        if not self._goes_back and seq.num_computed_tokens % self._manager.block_size == 0:
            self.register(seq)

    def verified(self, seq: Sequence) -> None:
        """The draft of the sequence is done with."""
        if self._goes_back and seq.num_computed_tokens // self._manager.block_size > seq.num_registered_blocks:
            self.register(seq)
        if self._manager.drops_blocks:
            self._manager.drop_unseen(seq.seq_id)

    def register(self, seq: Sequence) -> None:
        """Enter the full blocks that the sequence has computed."""
        cache = self._cache
        if cache is None or seq.group.cache_root is None or not self.is_on:
            return
        if self._ends is not None and self._ends.is_early(seq):
            return
        num_blocks, odd = divmod(seq.num_computed_tokens, cache.block_size)
        cache.extend_digests(seq.block_digests, _compared(seq), seq.group.cache_root, num_blocks)
        tables = self._manager.block_tables(seq.seq_id)
        for index in range(seq.num_registered_blocks, num_blocks):
            cache.register(tables, index, seq.block_digests[index])
        seq.num_registered_blocks = num_blocks
        # What is kept is that after all computed tokens, so only now does it belong to the end of a block.
        if self._ends is not None and not odd:
            num_tokens, digest = seq.num_computed_tokens, seq.block_digests[num_blocks - 1]
            self._ends.keep(digest, seq.seq_id, num_tokens, is_tail=num_tokens not in seq.group.stops)

    def forget(self, groups: Iterable[SequenceGroup]) -> None:
        """Drop all cached prefixes; `groups`, which have K/V of the old weights, cache no further blocks."""
        if self._cache is not None:
            self._cache.clear()
            for group in groups:
                # Without a root a group finds and adds nothing.
                group.cache_root = None


def _compared(seq: Sequence) -> SequenceOf[int]:
    """The tokens by which prefixes are found."""
    found: SequenceOf[int] = seq.token_ids
    for each in seq.group.beside.values():
        found = each.keyed(found)
    return found
