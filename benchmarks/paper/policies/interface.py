"""What the simulator needs of a memory policy: the calls of hf_paged's Scheduler, and what a step costs and holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hf_paged.generation.engine.scheduler import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, Sequence, SequenceGroup


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one step, padding included.

    rows: sequences; tokens: computed by the linear layers; kv_tokens: positions whose K/V attention reads, once for
    each row; pairs: query-key pairs of rows with several tokens; copied_tokens: K/V copied within the device;
    swapped_blocks: copied between the device and host memory; started: sequences of which nothing
    was computed before, but for a prefix that was found in the cache.
    """

    rows: int
    tokens: int
    kv_tokens: int
    pairs: int = 0
    copied_tokens: int = 0
    swapped_blocks: int = 0
    started: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Slots of the K/V pool by use (the paper's Figure 2).

    tokens: hold K/V, that of the step in progress included, shared ones counted once; reserved: kept for tokens that
    the requests will still generate; internal: allocated, but never to be used; external: unusable between or beyond
    the allocations; free: the rest. saved: slots that the same sequences would hold in addition without sharing.
    """

    tokens: float
    reserved: float
    internal: int
    external: int
    free: float
    saved: int = 0

    @property
    def pool(self) -> float:
        return self.tokens + self.reserved + self.internal + self.external + self.free


class Policy(Protocol):
    """The calls of `hf_paged.generation.engine.scheduler.Scheduler` with the same meaning, and some more.

    `decode_load` is the load of the next step if every running sequence computes one token and nothing is started or
    preempted. `decode_steps` is how many such steps, at most `limit`, are certain to find their memory; 0 if the next
    step may have to preempt. `memory` counts the tokens of the step in progress; `ahead` of them belong to later steps
    that were scheduled with it.
    """

    name: str
    num_preemptions: int

    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_swapped(self) -> int: ...
    @property
    def running(self) -> list[SequenceGroup]: ...

    def add(self, group: SequenceGroup) -> None: ...
    def schedule(self) -> SchedulerOutput: ...
    def update(self, output: SchedulerOutput) -> None: ...
    def fork(self, parent: Sequence, tokens: list[int]) -> list[Sequence]: ...
    def reorder(self, group: SequenceGroup, parents: list[int], tokens: list[int]) -> list[Sequence]: ...
    def finish_group(self, group: SequenceGroup, reason: FinishReason) -> None: ...

    def decode_steps(self, limit: int) -> int: ...
    def decode_load(self) -> Load: ...
    def load(self, output: SchedulerOutput) -> Load: ...
    def memory(self, ahead: float = 0.0) -> Memory: ...


def load_of(output: SchedulerOutput, *, copied_tokens: int = 0, swapped_blocks: int = 0) -> Load:
    """The load of a step without padding. Call it before `update`."""
    tokens = kv_tokens = pairs = started = 0
    for seq, count in output.scheduled:
        length = seq.num_computed_tokens + count
        started += seq.num_computed_tokens <= seq.group.num_cached_tokens
        tokens += count
        kv_tokens += length
        if count > 1:
            pairs += count * length - count * (count - 1) // 2
    return Load(len(output.scheduled), tokens, kv_tokens, pairs, copied_tokens, swapped_blocks, started)


def decode_load_of(groups: list[SequenceGroup]) -> Load:
    rows = kv_tokens = 0
    for group in groups:
        for seq in group.live:
            rows += 1
            kv_tokens += seq.num_computed_tokens + 1
    return Load(rows, rows, kv_tokens)
