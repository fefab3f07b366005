"""Prefixes that an engine's sequences take from the prefix cache and add to it. Standard library only."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.prefix_cache import CachedPrefix, PrefixCache
from hf_paged.generation.requests.sequence import Plan, SeqStatus, Sequence, SequenceGroup

# Two blocks of the default size.
LEAST_PREFIX = 32
"""Tokens of a prefix that is worth a forward of its own, so that there is a checkpoint at its end."""

SINGLES = 16
"""A model that continues by single tokens only uses a prefix, or is stopped at its end, if the prefix has this many
tokens for each one after it: a forward of one token costs as much as several tokens of a prompt."""


class Prefixes:
    """The prefix cache of an engine as its scheduler uses it; without one (None) nothing is found or added.

    A group without a `cache_root` finds and adds nothing.

    Of a model that keeps states, checkpoints are made: at the last block boundary of a prompt, where a prompt leaves an
    earlier one, and at the latest boundary of each sequence that continues.

    goes_back: a sequence whose draft is wrong goes back to before the step.
    """

    def __init__(self, cache: PrefixCache | None, manager: BlockManager, goes_back: bool) -> None:
        self._cache = cache
        self._goes_back = goes_back
        self.is_on = True  # otherwise nothing is found or added
        self._manager = manager
        self._checkpoints = None if cache is None else cache.checkpoints

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
        rules = self._rules
        if rules is not None and not rules.in_pieces and not self._is_worth_singles(group, prefix.num_blocks):
            return None
        return prefix

    def _is_worth_singles(self, group: SequenceGroup, num_blocks: int) -> bool:
        """Return True if it pays to compute the tokens after a prefix one by one."""
        size = num_blocks * self._manager.block_size
        return (group.live[0].num_tokens - size) * SINGLES <= size

    def adopt(self, group: SequenceGroup, prefix: CachedPrefix | None) -> None:
        """Record that the group's first sequence starts with these blocks."""
        leader, num_blocks = group.live[0], 0 if prefix is None else prefix.num_blocks
        leader.num_computed_tokens = num_blocks * self._manager.block_size
        leader.num_registered_blocks = num_blocks
        if self._cache is None or group.cache_root is None:
            return
        if self._checkpoints is not None and self.is_on:
            if prefix is not None and num_blocks:
                self._checkpoints.use(prefix.digest, leader.seq_id, leader.num_computed_tokens)
            self._stop(group, num_blocks)
        # What a preempted group finds is its own, which saves no other request's work.
        if group.num_preemptions == 0:
            group.num_cached_tokens = leader.num_computed_tokens
            self._cache.count(leader.num_tokens, leader.num_computed_tokens)

    def _stop(self, group: SequenceGroup, num_cached: int) -> None:
        """Choose where to stop for checkpoints in what follows the first `num_cached` blocks."""
        assert self._checkpoints is not None
        rules, leader, size = self._checkpoints.rules, group.live[0], self._manager.block_size
        last = max(leader.num_prompt_tokens - 1, 0) // size
        digests = leader.block_digests[:last]
        met = self._checkpoints.num_seen(digests)  # blocks of the longest common prefix with an earlier prompt
        self._checkpoints.note(digests)
        ends: set[int] = set()
        # A group that starts again still has its stops.
        if group.num_preemptions == 0:
            if rules.in_pieces:
                ends = {met, last}
            elif not num_cached and self._is_worth_singles(group, met):
                ends = {met}
        worth = {end * size for end in ends if end > num_cached and end * size >= LEAST_PREFIX}
        group.stops = tuple(sorted({*worth, *group.stops}))  # with those that the group came with
        if not rules.in_pieces:
            group.whole = num_cached * size or next(iter(group.stops), leader.num_prompt_tokens)

    def computed(self, plan: Plan, drafts: Container[Sequence]) -> None:
        """Count what is computed, enter blocks that are full, and drop those that no layer attends to any more."""
        manager, running = self._manager, SeqStatus.RUNNING
        block_size, shares, drops = manager.block_size, self._cache is not None, manager.drops_blocks
        for seq, num_tokens in plan:
            if seq.finish_reason is not None or seq.group.status is not running:
                continue
            seq.num_computed_tokens = num_computed = seq.num_computed_tokens + num_tokens
            has_draft = drafts and seq in drafts
            # Whether the state keeps these tokens is known when the draft is verified.
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
        """Enter the full blocks that the sequence has computed, and keep its state at the end of one."""
        cache, rules = self._cache, self._rules
        if cache is None or seq.group.cache_root is None or not self.is_on:
            return
        if rules is not None and not rules.in_pieces and seq.num_computed_tokens < seq.group.whole:
            return  # they will be computed with those that follow
        num_blocks, odd = divmod(seq.num_computed_tokens, cache.block_size)
        cache.extend_digests(seq.block_digests, _compared(seq), seq.group.cache_root, num_blocks)
        tables = self._manager.block_tables(seq.seq_id)
        for index in range(seq.num_registered_blocks, num_blocks):
            cache.register(tables, index, seq.block_digests[index])
        seq.num_registered_blocks = num_blocks
        # The state is that after all computed tokens, so only now does it belong to the end of a block.
        if self._checkpoints is not None and not odd:
            num_tokens, digest = seq.num_computed_tokens, seq.block_digests[num_blocks - 1]
            self._checkpoints.keep(digest, seq.seq_id, num_tokens, is_tail=num_tokens not in seq.group.stops)

    def forget(self, groups: Iterable[SequenceGroup]) -> None:
        """Drop all cached prefixes; `groups`, which have K/V of the old weights, cache no further blocks."""
        if self._cache is not None:
            self._cache.clear()
            for group in groups:
                # Without a root a group finds and adds nothing.
                group.cache_root = None

    # -- states -------------------------------------------------------------------------------------------------

    @property
    def _rules(self) -> Any:
        return None if self._checkpoints is None else self._checkpoints.rules


def _compared(seq: Sequence) -> SequenceOf[int]:
    """The tokens by which prefixes are found."""
    # Placeholders of different images are the same token; their keys are not.
    media = seq.group.media
    return seq.token_ids if media is None else media.keyed(seq.token_ids)
