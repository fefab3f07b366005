"""Tables of the K/V of encoders' states, the requests that read each, and when the encoder runs.

The states of an encoder's input are a sequence of their own in the block manager. All sequences of a running request
read its table, and so do requests with equal inputs. A table that no running request reads is kept for later ones until
memory is needed: the least recently used one is dropped first. A request that is preempted gives its table up like this
too, whichever way it goes: blocks are kept, and not copied, while there is room, and else the encoder runs again.

Knows counts, digests and block ids, never a tensor. Standard library only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from hf_paged.cache.block_manager import SeqId
from hf_paged.errors import LayersChanged
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import Plan, SequenceGroup, by_adapters
from hf_paged.sockets import Executor, Parts, SideMemory

# The share of cached prefixes in a pool of the default size: what is kept for later must not let the process grow to
# the whole pool.
KEPT_FRACTION = 1 / 8
"""Share of the pool's blocks that tables which no running request reads may hold."""

# Few, because no pool counts their memory.
ENCODED_AHEAD = 8
"""Outputs of encoders, outside the pool, that wait for their requests to start; beside that of the first in line."""


class EncoderWrite(NamedTuple):
    """In this step: write the K/V of the encoder's states that these groups read to the slots of `seq_id`."""

    seq_id: SeqId
    groups: list[SequenceGroup]


@dataclass(eq=False, slots=True)
class _Table:
    """users: ids of the running requests that read it. is_shared: other requests may find it."""

    seq_id: SeqId
    digest: bytes
    num_blocks: int
    users: dict[str, SequenceGroup] = field(default_factory=dict)
    is_written: bool = False
    is_shared: bool = True


class EncoderTables(SideMemory):
    """The tables of encoders' states over the scheduler's block manager, of an executor `EncoderRows`.

    num_computed: inputs of encoders. num_hits: requests that have started with states that were there.
    """

    def use(self, executor: Executor) -> None:
        # Weakly, so that its memory is freed with the last reference, not with the next collection of garbage.
        self._rows: Any = weakref.proxy(executor)

    def bind(self, schedule: Scheduler) -> None:
        self._schedule, self._manager = schedule, schedule.manager
        self._numbers = count()
        self._tables: dict[SeqId, _Table] = {}  # by last use
        self._found: dict[bytes, _Table] = {}
        self._of: dict[str, _Table] = {}  # of running requests
        self.encoded: dict[bytes, int] = {}
        """Numbers of states of inputs that the encoder has computed, whose K/V is not written yet."""

    @property
    def table_ids(self) -> set[SeqId]:
        return set(self._tables)

    @property
    def unlisted_blocks(self) -> tuple[int, int]:
        return -(idle := self.num_idle_blocks()), idle

    def num_idle_blocks(self, but: SequenceGroup | None = None) -> int:
        return sum(table.num_blocks for table in self._idle(but))

    def _idle(self, but: SequenceGroup | None) -> list[_Table]:
        kept = None if but is None or but.encoder is None else but.encoder.digest
        return [table for table in self._tables.values() if not table.users and table.digest != kept]

    # -- before a group runs ------------------------------------------------------------------------------------

    def is_ready(self, group: SequenceGroup) -> bool:
        """Return True if the number of its encoder's states is known."""
        encoder = group.encoder
        return encoder is None or encoder.digest in self._found or encoder.digest in self.encoded

    def unready(self) -> list[SequenceGroup]:
        """One group for each input that the encoder has not computed yet."""
        wanted: dict[bytes, SequenceGroup] = {}
        if not self._schedule.may_admit:
            return []
        # Groups may have been aborted since, and their outputs would stay.
        self._keep_encoded((*self._schedule.swapped, *self._schedule.waiting))
        for place, group in enumerate(self._schedule.next_in_line()):
            if group.encoder is not None and not self.is_ready(group):
                # The first in line is encoded in any case, or nothing would start.
                if place and len(self.encoded) + len(wanted) >= ENCODED_AHEAD:
                    break
                wanted.setdefault(group.encoder.digest, group)
        return list(wanted.values())

    def _keep_encoded(self, groups: Iterable[SequenceGroup]) -> None:
        """Forget the outputs that neither one of these groups needs nor a table that has no contents yet."""
        digests = {group.encoder.digest for group in groups if group.encoder is not None}
        digests |= {table.digest for table in self._tables.values() if not table.is_written}
        for digest in self.encoded.keys() - digests:
            del self.encoded[digest]

    def compute(
        self, groups: list[SequenceGroup], run: Callable[[Any, Callable[[], Any]], Any]
    ) -> list[tuple[SequenceGroup, Exception]]:
        """Run the encoders of these groups."""
        failed: list[tuple[SequenceGroup, Exception]] = []
        for choice, own in by_adapters(groups, lambda group: group).items():
            given: Any = [(group.encoder.digest, group.encoder.given) for group in own]  # type: ignore[union-attr]
            try:
                made = run(choice, partial(self._rows.encode, given))
            except LayersChanged:
                raise  # nothing is wrong with these adapters
            except Exception as error:  # of these adapters; other requests continue
                made = dict.fromkeys((digest for digest, _ in given), error)
            for group, (digest, _) in zip(own, given):
                if isinstance(made[digest], Exception):
                    failed.append((group, made[digest]))
                else:
                    self.num_computed += 1
                    self.ran(group, made[digest])
        return failed

    def ran(self, group: SequenceGroup, num_states: int) -> None:
        """The encoder has computed the input of this group, and of all with the same one."""
        assert group.encoder is not None
        self.encoded[group.encoder.digest] = num_states

    def blocks_needed(self, group: SequenceGroup) -> int:
        encoder = group.encoder
        if encoder is None or encoder.digest in self._found:
            return 0
        return self._blocks(self.encoded[encoder.digest])

    def _blocks(self, num_states: int) -> int:
        return -(-num_states // self._manager.block_size) * len(self._manager.groups)

    # -- a group runs, and stops --------------------------------------------------------------------------------

    def take(self, group: SequenceGroup) -> None:
        if group.encoder is None or group.request_id in self._of:
            return
        digest = group.encoder.digest
        table = self._found.get(digest)
        if table is None:
            seq_id = ("encoder", next(self._numbers))
            # The blocks are there: `blocks_needed` was counted before the group was started.
            self._manager.append_all([(seq_id, self.encoded[digest])])
            table = _Table(seq_id, digest, self._blocks(self.encoded[digest]))
            self._tables[seq_id] = self._found[digest] = table
        else:
            self.num_hits += 1
            # To the end, because the least recently used table is dropped first.
            self._tables[table.seq_id] = self._tables.pop(table.seq_id)
        table.users[group.request_id] = group
        group.encoder.table = table.seq_id
        self._of[group.request_id] = table

    def give_up(self, group: SequenceGroup, *, restarts: bool = False) -> None:
        table = self._of.pop(group.request_id, None)
        if table is None:
            return
        del table.users[group.request_id]
        if table.users:
            return
        # Contents that are missing, or of old weights, are of no use to a later request.
        if not table.is_written or not table.is_shared:
            self._drop(table)
            return
        most = int(self._manager.allocator.num_blocks * KEPT_FRACTION)
        while self.num_idle_blocks() > most and self.evict():
            pass

    def recover(self) -> None:
        # The dictionaries change one after the other, and an interrupt may have come in between.
        self._of.clear()
        for table in list(self._tables.values()):
            table.users.clear()
            if not table.is_written or not table.is_shared:
                self._drop(table)
        self._found = {table.digest: table for table in self._tables.values()}

    def fill(self, output: SchedulerOutput) -> None:
        """The tables of running groups that have no contents yet are written."""
        unwritten = (table for table in self._tables.values() if not table.is_written)
        output.encoders += [EncoderWrite(table.seq_id, [*table.users.values()]) for table in unwritten if table.users]

    def extend(self, parts: Parts, plan: Plan, output: SchedulerOutput) -> None:
        """The encoder of each part, and the tables that are to be written first, with the same adapters."""
        parts.extra["encoder"] = [seq.group.encoder.table for seq, _ in plan]  # type: ignore[union-attr]
        parts.extra["writes"] = {
            each.seq_id: (group.encoder.digest, group.live[0].token_ids[0])
            for each in output.encoders
            if (group := each.groups[0]).adapters == plan[0][0].group.adapters
        }

    def computed(self, output: SchedulerOutput) -> None:
        if self._rows.written:
            self.wrote(self._rows.written)
            self._rows.written.clear()
            # States that are written to their tables need not be kept.
            self._rows.keep_only(self.encoded)

    def wrote(self, tables: Iterable[SeqId]) -> None:
        """These tables have their contents."""
        for seq_id in tables:
            table = self._tables.get(seq_id)
            if table is not None:
                table.is_written = True
                if table.is_shared:
                    self.encoded.pop(table.digest, None)

    # -- memory -------------------------------------------------------------------------------------------------

    def evict(self, but: SequenceGroup | None = None) -> bool:
        """Drop the table that has been idle for longest, unless it is the one for the group `but`."""
        idle = self._idle(but)
        if idle:
            self._drop(idle[0])
        return bool(idle)

    def forget(self) -> None:
        """Running requests continue with what has been computed."""
        for table in list(self._tables.values()):
            table.is_shared = False
            if not table.users:
                self._drop(table)
        self._found.clear()
        self.encoded.clear()

    def _drop(self, table: _Table) -> None:
        if self._found.get(table.digest) is table:
            del self._found[table.digest]
        del self._tables[table.seq_id]
        self._manager.free(table.seq_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the running groups read tables."""
        readers = {group.request_id for group in self._schedule.running if group.encoder is not None}
        assert readers == set(self._of) == {user for table in self._tables.values() for user in table.users}
        assert all(table.is_written or table.users for table in self._tables.values()), "a table without contents"
