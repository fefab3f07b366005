"""Queues of groups that wait, run or are swapped out, in the order of a policy; side memories hear of each move.

Standard library only.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import TypeVar
from weakref import WeakValueDictionary

from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import SeqStatus, SequenceGroup
from hf_paged.sockets import Policy, SideMemory, policy_of

_Tenant = TypeVar("_Tenant", bound=SideMemory)
_by_order = attrgetter("order")
_users: WeakValueDictionary[int, Queues] = WeakValueDictionary()
"""Who uses the policy with this id. They keep it alive, so that no other one has its id."""


class Queues:
    """Every unfinished group, in exactly one queue, which is sorted by `order`.

    `order` is the policy's key and the number of the group. With keys that change, it is brought up to date by
    `sort_waiting`, and a running group has the number of its start in place of the key.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = policy_of(config.policy)
        if _users.setdefault(id(self.policy), self) is not self:
            raise ValueError(
                f"policy={self.policy!r} is that of another engine, whose requests it would count too; make an object "
                "for each engine, or close the other one first"
            )
        # Asked once, so that steps count and divide tokens only for a policy that wants to.
        self._is_told = type(self.policy).on_served is not Policy.on_served
        self._is_divided = type(self.policy).shares is not Policy.shares
        self._shares: Mapping[SequenceGroup, int] = {}  # of this step: the most tokens of groups
        self.side_memories: tuple[SideMemory, ...] = ()
        self._groups: dict[str, SequenceGroup] = {}
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self._queues = {
            SeqStatus.WAITING: self.waiting,
            SeqStatus.RUNNING: self.running,
            SeqStatus.SWAPPED: self.swapped,
        }
        self._numbers = itertools.count(1).__next__

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_swapped(self) -> int:
        return len(self.swapped)

    @property
    def groups(self) -> list[SequenceGroup]:
        """All unfinished groups in the order in which they were added."""
        return list(self._groups.values())

    def get(self, request_id: str) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @property
    def may_admit(self) -> bool:
        """Return True if the next step might start a group and look for its prefix: places may become free during the
        step, and a swapped group may be started over."""
        return bool(self.waiting or self.swapped)

    @property
    def is_idle(self) -> bool:
        """No group has computed anything yet."""
        return not self.running and not self.swapped

    @property
    def num_seqs(self) -> int:
        """Sequences that the running groups may have."""
        return sum([group.width for group in self.running])

    def next_in_line(self) -> list[SequenceGroup]:
        """Groups for which there are places."""
        self.sort_waiting()
        places, next_in_line = self.config.max_num_seqs - self.num_seqs, []
        # Swapped groups resume before new ones start, as in a step.
        for group in (*self.swapped, *self.waiting):
            places -= group.width
            if places < 0:
                break
            next_in_line.append(group)
        return next_in_line

    # -- changes ------------------------------------------------------------------------------------------------

    def enqueue(self, group: SequenceGroup) -> None:
        """Queue a group that has passed `check`. Its id is not in use. An interrupt, or an error of the policy, leaves
        the group unknown, so that it may be queued again."""
        if group.order[1] and group in self.waiting:  # an interrupt struck the last line
            self.waiting.remove(group)
        # The number keeps the order of arrival among groups with equal keys.
        group.order = (self.policy.key(group), self._numbers())
        insort(self.waiting, group, key=_by_order)
        self._groups[group.request_id] = group

    def _set_status(self, group: SequenceGroup, status: SeqStatus) -> None:
        """Move the group from one queue to another."""
        # Side memories first: after an interrupt the group is still where it was, and they are told again.
        for side in self.side_memories:
            if status is SeqStatus.RUNNING:
                side.take(group)
            else:
                side.give_up(group, restarts=status is SeqStatus.WAITING)
        with suppress(ValueError):  # it is not there if an interrupt struck the last change
            self._queues[group.status].remove(group)  # keys that do not compare, such as NaN, cannot hide it
        # Out of `_groups` before its status says so: after an interrupt, a group with this status is not finished
        # again.
        if status is SeqStatus.FINISHED:
            self._groups.pop(group.request_id, None)
        group.status = status
        if status is not SeqStatus.FINISHED:
            if not self.policy.is_static:
                key = self._numbers() if status is SeqStatus.RUNNING else self.policy.key(group)
                group.order = (key, group.order[1])
            insort(self._queues[status], group, key=_by_order)
        self._settle()

    def release_policy(self) -> None:
        """Let another engine use the policy: this one has ended."""
        if _users.get(id(self.policy)) is self:
            del _users[id(self.policy)]

    @contextmanager
    def releasing_policy(self) -> Iterator[None]:
        """Release the policy if what is within raises: no engine has been made then, which one could close."""
        try:
            yield
        except BaseException:
            self.release_policy()
            raise

    def sort_waiting(self) -> None:
        """Sort the groups that do not run by what their keys are now."""
        if not self.policy.is_static:
            for queue in (self.waiting, self.swapped):
                for group in queue:
                    group.order = (self.policy.key(group), group.order[1])
                queue.sort(key=_by_order)

    def _victim(self, index: int) -> SequenceGroup:
        """Who gives up its blocks to the running group at `index`: one behind it, or itself, if it is the last."""
        # Only those behind, so that the first in order always makes progress.
        candidates = self.running[index + 1 :] or self.running[index:]
        victim: SequenceGroup = self.policy.victim(candidates)
        if victim not in candidates:
            raise ValueError(f"{self.policy!r}: victim() returned {victim!r}; return one of those that it was given")
        return victim

    def _divide(self, budget: int, starting: Callable[[], SequenceOf[SequenceGroup]]) -> Mapping[SequenceGroup, int]:
        """Ask the policy for the most tokens of groups in a step. starting: returns waiting groups that have room."""
        own, waiting = self.running, starting()
        shares = self.policy.shares(own, waiting, budget) or {}
        for group, share in shares.items():
            if not isinstance(share, int) or share < 0:
                raise ValueError(f"{self.policy!r}: shares() returned {share!r} for {group!r}; return ints from 0 on")
        # Images and such may need several tokens at once, which no share counts.
        self._shares = {group: share for group, share in shares.items() if not group.has_runs}
        for group in (*own, *waiting)[:1] if self._shares else ():
            # The first one always makes progress.
            self._shares[group] = max(self._shares.get(group, budget), group.width)
        return self._shares

    def _tell(self, output: SchedulerOutput) -> None:
        """Tell the policy what a step has computed."""
        served: dict[SequenceGroup, int] = {}
        for seq, num_tokens in output.scheduled if self._is_told else ():
            served[seq.group] = served.get(seq.group, 0) + num_tokens + len(output.drafts.get(seq, ()))
        for group, num_tokens in served.items():
            self.policy.on_served(group, num_tokens)

    def _restore(self) -> None:
        """Put the queues in order after an interrupt, when no group runs."""
        for status, queue in self._queues.items():
            queue[:] = [group for group in self._groups.values() if group.status is status]
        if self.policy.is_static:
            self.waiting.sort(key=_by_order)
        with suppress(Exception):  # what the policy raises here, the next step raises too
            self.sort_waiting()

    # -- side memories ------------------------------------------------------------------------------------------

    def side(self, kind: type[_Tenant]) -> _Tenant | None:
        """The side memory of this class, for those who do its part of a step."""
        return next((side for side in self.side_memories if isinstance(side, kind)), None)

    def _is_ready(self, group: SequenceGroup) -> bool:
        return all(side.is_ready(group) for side in self.side_memories)

    def _may_start(self, group: SequenceGroup) -> bool:
        return self._shares.get(group, 1) > 0 and self._is_ready(group)

    def _blocks_needed(self, group: SequenceGroup) -> int:
        return sum([side.blocks_needed(group) for side in self.side_memories])

    def _blocks_beside(self, num_seqs: int) -> int:
        return sum([side.blocks_beside(num_seqs) for side in self.side_memories])

    def _hold(self, num_drafts: int) -> bool:
        return all(side.hold(num_drafts) for side in self.side_memories)

    def _settle(self) -> None:
        for side in self.side_memories:
            side.settle()

    def check_queues(self) -> None:
        """Raises AssertionError if an invariant of the class does not hold."""
        queued = [group for queue in self._queues.values() for group in queue]
        assert len(queued) == len(self._groups) and set(queued) == set(self._groups.values()), "a group is lost"
        for status, queue in self._queues.items():
            assert queue == sorted(queue, key=_by_order), f"{status} is out of order"
            for group in queue:
                assert group.status is status and group.live, f"{group!r} is in the queue {status}"
        assert self.num_seqs <= self.config.max_num_seqs
