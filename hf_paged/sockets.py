"""The sockets of the scheduler: read this first. What may be plugged into the core, and when the core calls it.

A feature that needs more than block tables is a `SideMemory`, an order of requests a `Policy`. The core knows these two
classes alone: a tenant of a socket changes no line of it. All methods are called by the thread that runs a step or a
change between two steps. None may raise: that breaks off the step.

A `Group` is a request as the scheduler sees it (`hf_paged.generation.requests.sequence.SequenceGroup`) with its
`request_id`, `priority`, `arrival`, `width` (sequences that it may have) and `live` (those that it has). An `Output` is
one step as data (`hf_paged.generation.engine.tables.SchedulerOutput`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

Group = Any
Output = Any


class Policy:
    """The order of requests, of one engine: `SchedulerConfig(policy=...)`. This one is "fcfs"; another is

        class FairShare(Policy):
            is_static = False

            def __init__(self, client_of):
                self.client_of, self.served = client_of, Counter()

            def key(self, group):
                return self.served[self.client_of(group.request_id)]

            def on_served(self, group, num_tokens):
                self.served[self.client_of(group.request_id)] += num_tokens

    Whatever it says, running groups keep their order (that of their keys if those are static, else that in which they
    began), and none is preempted for one behind it. So the first always makes progress.
    """

    is_static = True
    """Keys never change, so that groups are sorted as they come. False: those that wait are sorted before each step."""

    def key(self, group: Group) -> Any:
        """Smaller keys go first, equal ones in the order in which they came."""
        return group.priority, group.arrival

    def victim(self, candidates: Sequence[Group]) -> Group:
        """Choose the group to preempt, because blocks have run out. candidates: running groups, in order."""
        return candidates[-1]

    def on_served(self, group: Group, num_tokens: int) -> None:
        """A step has computed so many tokens of the group, those of its prompt and of drafts included."""


class SideMemory:
    """Memory that groups need besides their block tables; `OpenedMemory.side_memories` lists those of an engine. By
    default the methods do nothing. A quota, for example:

    class Licences(SideMemory):
        def __init__(self, count):
            self.count, self.holders = count, set()

        def is_ready(self, group):
            return len(self.holders) < self.count

        def take(self, group):
            self.holders.add(group)

        def give_up(self, group, *, restarts):
            self.holders.discard(group)

        def recover(self):
            self.holders.clear()
    """

    goes_back = False
    """A wrong draft takes a sequence back to before the step, because what it has of a step is whole or nothing."""

    stops_prompts = False
    """Prompts end steps early, so that blocks for their ends are left over when others start."""

    def bind(self, schedule: Any) -> None:
        """The scheduler gets tables, or others, and no group holds blocks. `schedule` is the scheduler, to be read:
        `manager` and `host_manager` (block tables), `prefix_cache`, `waiting`, `running`, `swapped`, `next_in_line()`.
        """

    # -- a group starts, and stops ------------------------------------------------------------------------------

    def is_ready(self, group: Group) -> bool:
        """Return True if a group may start. Those behind it wait too, so it must become ready while others end."""
        return True

    def blocks_needed(self, group: Group) -> int:
        """Blocks that `take` will use for a group that is ready."""
        return 0

    def blocks_beside(self, num_seqs: int) -> int:
        """Blocks whose memory so many sequences of a group take, on the device or, swapped out, on the host."""
        return 0

    def take(self, group: Group) -> None:
        """A group begins to run. Its first sequence has a table, with what was found in the prefix cache."""

    def give_up(self, group: Group, *, restarts: bool) -> None:
        """A group runs no more, or ends before. restarts: it waits, to compute all of its tokens again."""

    def ended(self, seq: Any, *, is_lost: bool) -> None:
        """A sequence ends. is_lost: as a beam that goes nowhere."""

    # -- a step -------------------------------------------------------------------------------------------------

    def hold(self, num_drafts: int) -> bool:
        """The next step computes so many sequences with drafts: take memory for them instead of what was held. False:
        there is not so much, and nothing has changed. A step begins with 0, which is granted."""
        return True

    def verified(self, seq: Any) -> None:
        """The draft of one of these is done with."""

    def settle(self) -> None:
        """Other groups run, or have other memory: adapt what is withheld from the allocator."""

    def fill(self, output: Output) -> None:
        """The step is decided: enter what it is to do for this memory."""

    def computed(self, output: Output) -> None:
        """The step is computed; its tokens are not yet counted in `num_computed_tokens`."""

    # -- memory that can be given up, and interrupts ------------------------------------------------------------

    def num_idle_blocks(self, but: Group | None) -> int:
        """Blocks that `evict` can free."""
        return 0

    def evict(self, but: Group | None) -> bool:
        """Free some blocks that no running group uses, nor `but`, which may start. False: there are none."""
        return False

    def forget(self) -> None:
        """The weights have changed: no later group may use what was computed."""

    @property
    def table_ids(self) -> Collection[Hashable]:
        """Ids of its own tables in the block manager."""
        return ()

    def recover(self) -> None:
        """A step was broken off, and no group runs: keep what is whole."""

    def check_integrity(self) -> None:
        """Raises AssertionError if something does not fit together (between two steps)."""
