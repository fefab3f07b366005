"""Makes every change to a block table, for all layer groups at once, on the device and in host memory.

Decides nothing and knows no queue. Copies that the device has to do are added to lists of the caller, one for each
layer group. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_paged.cache.block_manager import BlockCopy, BlockManager
from hf_paged.generation.engine.sequence import Plan, Sequence, SequenceGroup

Copies = list[list[BlockCopy]]


class Tables:
    """One block table for each sequence and layer group: in `managers`, or in `hosts` while it is swapped out.

    Invariant: a sequence without a parent has a table in every manager or in every host, or in none. A sequence that
    still has a parent has no table, and is skipped when its group is freed or moved.
    """

    def __init__(self, managers: list[BlockManager], hosts: list[BlockManager]) -> None:
        self.managers = managers
        self.hosts = hosts

    # -- is there room? -----------------------------------------------------------------------------------------

    def check_fits_alone(self, group: SequenceGroup) -> None:
        """Raises ValueError if the tokens of the group do not fit even an empty cache."""
        for manager in self.managers:
            needed, total = _blocks_needed(group, manager), manager.allocator.num_blocks
            if needed > total:
                raise ValueError(
                    f"a prompt of {group.num_prompt_tokens} tokens needs {needed} blocks of {manager.block_size}, "
                    f"but the cache has {total}; give the cache more memory or shorten the prompt"
                )

    def fits(self, group: SequenceGroup, hits: list[int], watermark: float) -> bool:
        """Whether a group without blocks can start with the cached blocks `hits` and leave a share `watermark` free."""
        for manager in self.managers:
            # Unreferenced blocks count as available until they are adopted.
            idle_hits = sum([manager.allocator.ref_count(block_id) == 0 for block_id in hits])
            if not _leaves_free(manager, _blocks_needed(group, manager) - len(hits) + idle_hits, watermark):
                return False
        return True

    def fits_swapped(self, group: SequenceGroup, watermark: float) -> bool:
        """Whether a swapped group, with one more token for each sequence, fits and leaves a share `watermark` free."""
        seq_ids = _with_table(group.live)
        for manager, host in zip(self.managers, self.hosts):
            needed = host.num_blocks_of(seq_ids) + host.num_blocks_to_append_all((seq_id, 1) for seq_id in seq_ids)
            if not _leaves_free(manager, needed, watermark):
                return False
        return True

    def has_room(self, plan: Plan) -> bool:
        """Whether there are blocks for the plan, copies of shared blocks included."""
        num_tokens = sum([count for _, count in plan])
        for manager in self.managers:
            available = manager.allocator.num_available
            # No need to count exactly if there are enough blocks for the worst case: a new and a copied one each.
            if num_tokens // manager.block_size + 2 * len(plan) > available:
                needed = manager.num_blocks_to_append_all((seq.seq_id, count) for seq, count in plan)
                if needed > available:
                    return False
        return True

    def room(self, seq: Sequence) -> int:
        """Upper bound on the tokens that can be appended to `seq`; a copy of its last block is not counted."""
        return min(
            -manager.num_tokens(seq.seq_id) % manager.block_size + manager.allocator.num_available * manager.block_size
            for manager in self.managers
        )

    # -- changes ------------------------------------------------------------------------------------------------

    def start(self, seq: Sequence, hits: list[int]) -> None:
        """Make a table that begins with the blocks `hits` of the prefix cache."""
        for manager in self.managers:
            manager.adopt(seq.seq_id, hits)

    def append(self, plan: Plan, copies: Copies) -> bool:
        """Append slots for the whole plan, or return False and change nothing."""
        if not self.has_room(plan):
            return False
        for manager, manager_copies in zip(self.managers, copies):
            for seq, count in plan:
                manager_copies += manager.append(seq.seq_id, count)
        return True

    def take_back(self, seq: Sequence) -> None:
        """Undo the appends of tokens that were not computed."""
        for manager in self.managers:
            manager.crop(seq.seq_id, seq.num_computed_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        for manager in self.managers:
            manager.fork(parent.seq_id, child.seq_id)

    def free(self, seqs: Iterable[Sequence]) -> None:
        seq_ids = _with_table(seqs)
        for manager in self.managers:
            for seq_id in seq_ids:
                manager.free(seq_id)

    def free_swapped(self, seqs: Iterable[Sequence], swap_out: Copies) -> None:
        """Free host blocks, and drop the pending copies into them from `swap_out`."""
        seq_ids = _with_table(seqs)
        for host, copies in zip(self.hosts, swap_out):
            for seq_id in seq_ids:
                host.free(seq_id)
            # The blocks may be allocated again before the step that would have filled them.
            copies[:] = [copy for copy in copies if host.allocator.ref_count(copy.dst)]

    def swap_out(self, group: SequenceGroup, copies: Copies) -> bool:
        """Move the whole group to host memory, or return False and change nothing."""
        seq_ids = _with_table(group.live)
        pairs = list(zip(self.managers, self.hosts))
        if not pairs or any(m.num_blocks_of(seq_ids) > host.allocator.num_available for m, host in pairs):
            return False
        for (manager, host), manager_copies in zip(pairs, copies):
            manager_copies += manager.move_to(host, seq_ids)
        return True

    def swap_in(self, group: SequenceGroup, copies: Copies) -> None:
        seq_ids = _with_table(group.live)
        for manager, host, manager_copies in zip(self.managers, self.hosts, copies):
            manager_copies += host.move_to(manager, seq_ids)
        for seq in group.live:
            seq.num_registered_blocks = 0  # they have moved to other blocks

    # -- diagnostics ---------------------------------------------------------------------------------------------

    def usage(self) -> str:
        return ", ".join(f"{m.allocator.num_used} of {m.allocator.num_blocks} blocks in use" for m in self.managers)

    def check_integrity(self, running: list[SequenceGroup], swapped: list[SequenceGroup], pins: set[object]) -> None:
        """Raises AssertionError unless exactly these groups (and `pins`) have tables, covering what is computed."""
        for groups, managers, others in ((running, self.managers, pins), (swapped, self.hosts, set())):
            seqs = [seq for group in groups for seq in group.live if seq.parent is None]
            for manager in managers:
                manager.check_integrity()
                assert set(manager.seq_ids) - others == {seq.seq_id for seq in seqs}, "tables of others, or none"
                for seq in seqs:
                    assert manager.num_tokens(seq.seq_id) == seq.num_computed_tokens


def _with_table(seqs: Iterable[Sequence]) -> list[int]:
    return [seq.seq_id for seq in seqs if seq.parent is None]


def _leaves_free(manager: BlockManager, needed: int, watermark: float) -> bool:
    allocator = manager.allocator
    return needed + int(watermark * allocator.num_blocks) <= allocator.num_available


def _blocks_needed(group: SequenceGroup, manager: BlockManager) -> int:
    """Blocks for all tokens of a group that holds none, with prefixes shared up to the branches."""
    size, window = manager.block_size, manager.sliding_window
    needed = 0
    for seq in group.live:
        own = -(-seq.num_tokens // size) - seq.branch_at // size
        # With a sliding window, a prefill in small chunks needs no more blocks than the window covers.
        needed += own if window is None else min(own, -(-window // size) + 1)
    return needed
