"""Snapshots: the requests and block tables of an engine as its last step left them, for pages that show them.

A snapshot is made between two steps and only while something asks for it. It reads the scheduler and changes nothing.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from hf_paged.cache.block_manager import NULL_BLOCK
from hf_paged.generation.engine.runner import Runner
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.stats import collect_counters
from hf_paged.generation.engine.stepper import Stepper
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.request import Request
from hf_paged.generation.requests.sequence import SeqStatus, SequenceGroup

# A snapshot copies the block tables of all requests, and nobody reads faster.
INTERVAL = 0.2
"""Seconds between two snapshots during steps, however many ask."""

PATIENCE = 5.0
"""Seconds after which an engine that has not been asked again makes no further snapshots."""

# A queue may have no bound, and nobody reads on.
MAX_WAITING = 100
"""Waiting requests that a snapshot lists; further ones are counted only."""

MAX_EVENTS = 200
"""Events that a snapshot remembers, blocks of one kind in one step being one event."""


class SequenceView(NamedTuple):
    """tokens, computed: how many there are, and of how many there is K/V. tables: block ids by layer group, of device
    blocks or, in a swapped request, of host blocks. Empty while the sequence has none. The entry of a block that has
    left its sliding window is -1."""

    id: int
    tokens: int
    computed: int
    tables: list[array[int]]


class RequestView(NamedTuple):
    """prompt, cached: tokens. limit: tokens that a sequence may have, prompt included. width: sequences that it may
    still have. seconds: since its arrival."""

    id: str
    status: str
    prompt: int
    limit: int
    width: int
    priority: float
    cached: int
    preemptions: int
    seconds: float
    sequences: list[SequenceView]


class PoolView(NamedTuple):
    """The blocks of the engine: how many, and bytes of one. kinds: what the layers of each group keep, in words.
    cached: blocks that only the prefix cache keeps, in the order in which the eviction gets them. pinned: those of
    prefixes that `cache_prefix` keeps. Blocks from `touched` on have never been used. host_blocks, host_used: of the
    swap memory."""

    blocks: int
    touched: int
    block_size: int
    bytes: int
    kinds: list[str]
    cached: list[int]
    pinned: list[int]
    host_blocks: int
    host_used: int


class Event(NamedTuple):
    """Something that a step did. number: counts up. kind: "admit" (blocks: those of a cached prefix), "recompute" and
    "swap_out" (preemptions), "swap_in", "copy" (blocks: source and copy, pair after pair), or "evict"."""

    number: int
    step: int
    kind: str
    request_id: str | None
    blocks: list[int]


class EngineSnapshot(NamedTuple):
    """An engine between two steps. time: of `time.monotonic()`. waiting: requests, of which `requests` may list fewer.
    counters: those of EngineStats that count since the start."""

    number: int
    time: float
    pool: PoolView
    requests: list[RequestView]
    waiting: int
    events: list[Event]
    counters: dict[str, int]


class Watch:
    """Makes the snapshots of one engine. Every method needs that nothing else changes the engine meanwhile.

    While nothing asks, `is_on` is False and a step costs one look at it.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, stepper: Stepper, requests: Mapping[str, Request]) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._stepper = stepper
        self._requests = requests
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._num_snapshots = 0
        self._noted: SchedulerOutput | None = None
        self._until = 0.0
        self.is_on = False
        self.latest: EngineSnapshot | None = None

    def ask(self) -> None:
        """Continue to make snapshots for a while."""
        self._until = time.monotonic() + PATIENCE
        if not self.is_on:
            self.is_on = True
            # The last one may be minutes old, and so would be what is shown first.
            self.latest = None
            if self._scheduler.prefix_cache is not None:
                # The cache notes what it evicts only while this list is there.
                self._scheduler.prefix_cache.evicted = []

    def after_step(self, prompt_tokens: int) -> None:
        """Note what the step has done, and make a snapshot if one is due."""
        now = time.monotonic()
        if now > self._until:
            self.stop()
            return
        output = self._stepper.output
        # A step without requests leaves the output of the one before, which is noted already.
        if output is not None and output is not self._noted:
            self._noted = output
            self._note(output)
        self.refresh(prompt_tokens)

    def refresh(self, prompt_tokens: int) -> None:
        """Make a snapshot if the last one is old, unless nothing has changed."""
        if self.latest is None or (time.monotonic() - self.latest.time >= INTERVAL and not self._is_idle_since()):
            self.latest = self._snapshot(prompt_tokens)
            self._num_snapshots += 1

    def _is_idle_since(self) -> bool:
        """Return True if there has been nothing to do since the last snapshot."""
        scheduler, latest = self._scheduler, self.latest
        return (
            latest is not None
            and not latest.requests
            and not scheduler.has_unfinished()
            and latest.counters["steps"] == self._stepper.steps
            and len(latest.pool.cached) == scheduler.manager.allocator.num_cached
        )

    def stop(self) -> None:
        self.is_on = False
        self._events.clear()
        if self._scheduler.prefix_cache is not None:
            self._scheduler.prefix_cache.evicted = None

    def _snapshot(self, prompt_tokens: int) -> EngineSnapshot:
        scheduler, now = self._scheduler, time.monotonic()
        return EngineSnapshot(
            number=self._num_snapshots,
            time=now,
            pool=self._pool(),
            requests=self._views(now),
            waiting=scheduler.num_waiting,
            events=list(self._events),
            counters=collect_counters(self._runner, scheduler, self._stepper, prompt_tokens),
        )

    # -- events -------------------------------------------------------------------------------------------------

    def _note(self, output: SchedulerOutput) -> None:
        # In the order in which a step does it.
        for group, way in output.preempted:
            self._add("swap_out" if way == "swap" else way, group.request_id, [])
        cache = self._scheduler.prefix_cache
        if cache is not None and cache.evicted:
            self._add("evict", None, cache.evicted)
            cache.evicted = []
        for group in output.resumed:
            self._add("swap_in", group.request_id, [])
        for group in output.admitted:
            self._add("admit", group.request_id, self._hits(group))
        if output.block_copies:
            self._add("copy", None, [block_id for copy in output.block_copies for block_id in copy])

    def _add(self, kind: str, request_id: str | None, blocks: list[int]) -> None:
        self._num_events += 1
        self._events.append(Event(self._num_events, self._stepper.steps, kind, request_id, blocks))

    def _hits(self, group: SequenceGroup) -> list[int]:
        """The cached blocks with which the group began, if it still has them."""
        manager = self._scheduler.manager
        if not group.live or not group.num_cached_tokens or group.live[0].seq_id not in manager:
            return []
        num_blocks = group.num_cached_tokens // manager.block_size
        # Null blocks have left a window since the group began.
        tables = manager.block_tables(group.live[0].seq_id)
        return [block_id for table in tables for block_id in table[:num_blocks] if block_id != NULL_BLOCK]

    # -- what there is ------------------------------------------------------------------------------------------

    def _pool(self) -> PoolView:
        manager, cache, host_manager = (
            self._scheduler.manager,
            self._scheduler.prefix_cache,
            self._scheduler.host_manager,
        )
        host = None if host_manager is None else host_manager.allocator
        tables = [] if cache is None else [table for pin in cache.pins for table in manager.block_tables(pin)]
        return PoolView(
            blocks=manager.allocator.num_blocks,
            touched=manager.allocator.first_unused,
            block_size=manager.block_size,
            bytes=self._runner.memory.pool.bytes_per_block,
            kinds=[str(group.kind) for group in manager.groups],
            cached=manager.allocator.cached_blocks,
            pinned=[block_id for table in tables for block_id in table if block_id != NULL_BLOCK],
            host_blocks=0 if host is None else host.num_blocks,
            host_used=0 if host is None else host.num_used,
        )

    def _views(self, now: float) -> list[RequestView]:
        views: list[RequestView] = []
        num_waiting = 0
        for group in self._scheduler.groups:
            request = self._requests.get(group.request_id)
            is_waiting = group.status is SeqStatus.WAITING
            num_waiting += is_waiting
            if request is None or (is_waiting and num_waiting > MAX_WAITING):
                continue
            views.append(self._view(group, request, now))
        return views

    def _view(self, group: SequenceGroup, request: Request, now: float) -> RequestView:
        manager = {SeqStatus.RUNNING: self._scheduler.manager, SeqStatus.SWAPPED: self._scheduler.host_manager}.get(
            group.status
        )
        sequences = [
            SequenceView(
                seq.seq_id,
                seq.num_tokens,
                seq.num_computed_tokens,
                # A copy, because tables grow in later steps while others read this.
                [table[:] for table in manager.block_tables(seq.seq_id)] if manager and seq.seq_id in manager else [],
            )
            for seq in group.live
        ]
        return RequestView(
            id=group.request_id,
            status=group.status.value,
            prompt=group.num_prompt_tokens,
            limit=request.max_length,
            width=group.width,
            priority=group.priority,
            cached=group.num_cached_tokens,
            preemptions=group.num_preemptions,
            seconds=now - group.arrival,
            sequences=sequences,
        )
