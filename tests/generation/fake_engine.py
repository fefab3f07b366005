"""An engine around Scheduler without tensors, whose model is a hash: fast enough for long random runs.

The "K/V" of a token is a hash of the token and of the previous K/V. It is kept in simulated slots, which the copies of
a step move. The next token is a hash of all K/V that the sequence reads through its block table. Therefore a wrong
table, a missing copy or a wrong prefix hit changes the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockCopy, BlockManager
from hf_paged.cache.layers import FULL, LayerGroup, Window
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.engine.tables import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, SeqStatus, Sequence, SequenceGroup
from hf_paged.sockets import SideMemory
from tests.preempting import force_preempt

VOCAB = 50
TINY = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16, watermark=0.0)


@dataclass(frozen=True)
class Request:
    """`kind`: "greedy", "samples" (`width` of them) or "beams" (a varying number, from 1 to `width`)."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 8
    kind: str = "greedy"
    width: int = 1
    priority: int = 0
    root: bytes | None = None
    request_id: str = ""
    num_eos: int = 4  # of VOCAB tokens, how many end a sequence


@dataclass
class Result:
    reason: FinishReason
    outputs: list[list[int]] = field(default_factory=list)


def next_kv(previous: int, token: int) -> int:
    return hash((previous, token, 1))


def next_token(read: list[int], sample: int) -> int:
    return hash((*read, sample, 2)) % VOCAB


def next_beams(reads: list[list[int]], width: int) -> tuple[list[int], list[int]]:
    """Parents and tokens of the next beams, best first."""
    candidates = [
        (hash((*read, rank, 3)) % 1000, parent, hash((*read, rank, 4)) % VOCAB)
        for parent, read in enumerate(reads)
        for rank in range(width)
    ]
    count = 1 + hash((*reads[0], 5)) % width
    best = sorted(candidates)[:count]
    return [parent for _, parent, _ in best], [token for _, _, token in best]


def visible(kvs: list[int], windows: tuple[int | None, ...]) -> list[int]:
    """The K/V that the next token attends to: one list per layer group."""
    return [kv for window in windows for kv in (kvs if window is None else kvs[-window:])]


def is_end(token: int, num_output: int, request: Request) -> FinishReason | None:
    if token < request.num_eos:
        return FinishReason.EOS
    return FinishReason.LENGTH if num_output >= request.max_new_tokens else None


def solo(request: Request, windows: tuple[int | None, ...] = (None,)) -> Result:
    """The result of the request without cache, batch and scheduler."""

    def kvs_of(tokens: list[int]) -> list[int]:
        kvs = [0]
        for token in tokens:
            kvs.append(next_kv(kvs[-1], token))
        return kvs[1:]

    start, outputs = list(request.prompt), [[] for _ in range(request.width)]
    if request.kind == "beams":
        outputs = [[]]
        for _ in range(request.max_new_tokens):
            reads = [visible(kvs_of(start + output), windows) for output in outputs]
            parents, tokens = next_beams(reads, request.width)
            outputs = [[*outputs[parent], token] for parent, token in zip(parents, tokens)]
        return Result(FinishReason.LENGTH, outputs)
    for sample, output in enumerate(outputs):
        reason = None
        while reason is None:
            output.append(next_token(visible(kvs_of(start + output), windows), sample))
            reason = is_end(output[-1], len(output), request)
    return Result(reason or FinishReason.LENGTH, outputs)


def due(output: SchedulerOutput) -> dict[SequenceGroup, list[Sequence]]:
    """After `update`: the sequences that get a token now, by group."""
    found: dict[SequenceGroup, list[Sequence]] = {}
    for seq, _ in output.scheduled:
        if seq.finish_reason is None and seq.num_uncomputed_tokens == 0:
            found.setdefault(seq.group, []).append(seq)
    return found


class FakeEngine:
    """`windows` has an entry per layer group of `num_blocks` blocks. `num_host_blocks` 0 means no swap space."""

    def __init__(
        self,
        config: SchedulerConfig = TINY,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 64,
        block_size: int = 4,
        windows: tuple[int | None, ...] = (None,),
        side_memories: Iterable[SideMemory] = (),
    ) -> None:
        self.windows, self.block_size = windows, block_size
        groups = [LayerGroup(FULL if window is None else Window(window)) for window in windows]
        self.manager = BlockManager(BlockAllocator(num_blocks * len(groups)), block_size, groups=groups)
        self.host = BlockManager(BlockAllocator(num_host_blocks * len(groups)), block_size, groups=groups)
        host = self.host if num_host_blocks else None
        self.scheduler = Scheduler(config, self.manager, host, side_memories=side_memories)
        self.slots: dict[int, int] = {}
        self.host_slots: dict[int, int] = {}
        self.requests: dict[str, Request] = {}
        self.results: dict[str, Result] = {}
        self.num_steps = 0
        self.num_idle_steps = 0
        self.forced: list[SequenceGroup] = []  # preempted by a test since the last step

    def add(self, request: Request) -> str:
        request_id = request.request_id or f"r{len(self.requests)}"
        group = SequenceGroup(
            request_id, request.prompt, width=request.width, priority=request.priority,
            arrival=float(len(self.requests)), cache_root=request.root, client=request_id[:1],
        )  # fmt: skip
        self.scheduler.check(group)
        self.scheduler.enqueue(group)
        self.requests[request_id] = request
        return request_id

    def group(self, request_id: str) -> SequenceGroup:
        group = self.scheduler.get(request_id)
        assert group is not None
        return group

    def run(self, max_steps: int = 100_000) -> dict[str, Result]:
        while self.scheduler.has_unfinished():
            self.step()
            assert self.num_steps < max_steps, "it does not end"
        self.check_empty()
        return self.results

    def abort(self, request_id: str) -> None:
        group = self.scheduler.get(request_id)
        if group is not None:
            self.scheduler.finish_group(group, FinishReason.ABORT)
            self._note(group)
        self.scheduler.check_integrity()

    def force_preempt(self, request_id: str, mode: Literal["recompute", "swap"]) -> bool:
        done = force_preempt(self.scheduler, request_id, mode)
        if done:
            self.forced.append(self.group(request_id))
        self.scheduler.check_integrity()
        return done

    def step(self, *, fail: bool = False) -> SchedulerOutput:
        """`fail`: the forward of this step raises after it has written some of its K/V."""
        scheduler = self.scheduler
        running = [group for group in scheduler.groups if group.status is SeqStatus.RUNNING]
        output = scheduler.schedule_without_preempting()
        if output is not None:
            assert all(group.status is SeqStatus.RUNNING for group in running), "a request was preempted"
        else:
            scheduler.check_integrity()
            output = scheduler.schedule()
        self.num_steps += 1
        self._check_decisions(output)
        self._move(output)
        sampling = [seq for seq, count in output.scheduled if count == seq.num_uncomputed_tokens]
        reads = {seq: self._forward(seq, count) for seq, count in output.scheduled}
        for group in output.failed:
            self._note(group)
        if fail:
            scheduler.rollback(output)
            scheduler.check_integrity()
            return output
        singles = [seq for seq in sampling if self._is_single(seq.group)]
        tokens = [(seq, next_token(reads[seq], self._sample_index(seq))) for seq in singles]
        scheduler.update(output)
        for seq, token in tokens:
            seq.token_ids.append(token)
            if reason := is_end(token, len(seq.output_token_ids), self.requests[seq.group.request_id]):
                scheduler.finish(seq, reason)
                self._note(seq.group)
        for group, members in groupby(sampling, key=lambda seq: seq.group):
            if not self._is_single(group):
                self._branch(group, [reads[seq] for seq in members])
        scheduler.check_integrity()
        return output

    def _is_single(self, group: SequenceGroup) -> bool:
        """Whether the group continues with one token per sequence: not beams, nor the step in which samples fork."""
        request = self.requests[group.request_id]
        return request.kind == "greedy" or (request.kind == "samples" and len(group.sequences) == request.width)

    def _sample_index(self, seq: Sequence) -> int:
        return seq.group.sequences.index(seq)

    def _branch(self, group: SequenceGroup, reads: list[list[int]]) -> None:
        request, scheduler = self.requests[group.request_id], self.scheduler
        if request.kind == "samples":
            tokens = [next_token(reads[0], sample) for sample in range(request.width)]
            family = scheduler.fork(group.live[0], tokens)
            assert group.sequences == family
            for seq, token in zip(family, tokens):
                if reason := is_end(token, 1, request):
                    scheduler.finish(seq, reason)
        else:
            parents, tokens = next_beams(reads, request.width)
            beams = scheduler.reorder(group, parents, tokens)
            assert [seq.token_ids[-1] for seq in beams] == tokens
            if len(beams[0].output_token_ids) == request.max_new_tokens:
                scheduler.finish_group(group, FinishReason.LENGTH)
        self._note(group)

    def _note(self, group: SequenceGroup) -> None:
        if group.is_finished:
            reasons = [seq.finish_reason for seq in group.sequences]
            early = {FinishReason.ABORT, FinishReason.ERROR} & set(reasons)
            reason = early.pop() if early else reasons[-1]
            assert None not in reasons and reason is not None
            self.results[group.request_id] = Result(reason, [seq.output_token_ids for seq in group.sequences])

    # -- the device -------------------------------------------------------------------------------------------------

    def _move(self, output: SchedulerOutput) -> None:
        self._copy(output.swap_out, self.slots, self.host_slots)
        self._copy(output.swap_in, self.host_slots, self.slots)
        self._copy(output.block_copies, self.slots, self.slots)

    def _copy(self, copies: list[BlockCopy], source: dict[int, int], target: dict[int, int]) -> None:
        """The copies of one list happen at the same time."""
        destinations = {copy.dst for copy in copies}
        assert len(destinations) == len(copies)
        assert source is not target or not destinations & {copy.src for copy in copies}
        for src, dst in copies:
            for offset in range(self.block_size):
                value = source.get(src * self.block_size + offset)
                if value is not None:
                    target[dst * self.block_size + offset] = value

    def _forward(self, seq: Sequence, count: int) -> list[int]:
        """Write `count` tokens of K/V for every layer group; returns the K/V that the last one attends to."""
        start, stop = seq.num_computed_tokens, seq.num_computed_tokens + count
        read: list[int] = []
        manager, slots = self.manager, self.slots
        for group, window in enumerate(self.windows):
            assert manager.num_tokens(seq.seq_id) == stop
            table = manager.block_table(seq.seq_id, group)
            first = 0 if window is None else max(stop - window, 0)
            places = manager.slots(seq.seq_id, min(first, max(start - 1, 0)), stop, group)
            previous = slots[places[start - 1 - min(first, start - 1)]] if start else 0
            for position in range(start, stop):
                slot = table[position // self.block_size] * self.block_size + position % self.block_size
                assert manager.allocator.ref_count(slot // self.block_size) == 1, "a shared block is written"
                assert slot // self.block_size not in manager.cached_blocks, "a cached block is written"
                previous = slots[slot] = next_kv(previous, seq.token_ids[position])
            read += [slots[slot] for slot in places[-(stop - first) :]]
        return read

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check_decisions(self, output: SchedulerOutput) -> None:
        config, scheduler = self.scheduler.config, self.scheduler
        assert sum(count for _, count in output.scheduled) <= config.max_num_batched_tokens
        assert len({seq for seq, _ in output.scheduled}) == len(output.scheduled) <= config.max_num_seqs
        groups = [group for group, _ in groupby(seq.group for seq, _ in output.scheduled)]
        assert len(set(groups)) == len(groups), "a group's sequences are adjacent"
        running = [group for group in scheduler.groups if group.status is SeqStatus.RUNNING]
        assert sum(max(group.width, len(group.live)) for group in running) <= config.max_num_seqs
        for seq, count in output.scheduled:
            assert 0 < count <= seq.num_uncomputed_tokens
        for group in groups:
            closed = [count == seq.num_uncomputed_tokens for seq, count in output.scheduled if seq.group is group]
            assert not any(closed) or (all(closed) and len(closed) == len(group.live)), "a group samples whole"
        assert [group for group, _ in output.preempted[: len(self.forced)]] == self.forced
        chosen = [group for group, _ in output.preempted[len(self.forced) :]]
        self.forced.clear()
        for victim in chosen:
            assert victim.status is not SeqStatus.RUNNING
            is_last = config.policy != "fcfs" or all(group.order < victim.order for group in groups)
            assert is_last, "the latest arrival is preempted first"
        self.num_idle_steps = 0 if output.scheduled or not scheduler.has_unfinished() else self.num_idle_steps + 1
        assert self.num_idle_steps <= 3, "nothing happens any more"

    def check_empty(self) -> None:
        pins = 0
        if self.scheduler.prefix_cache is not None:
            pinned = self.scheduler.prefix_cache.pins
            pins = self.manager.num_blocks_of(pinned)
        allocator = self.manager.allocator
        assert allocator.num_used == pins
        assert allocator.num_free + allocator.num_cached + pins == allocator.num_blocks
        assert self.host.allocator.num_free == self.host.allocator.num_blocks
        assert self.scheduler.num_waiting == self.scheduler.num_running == self.scheduler.num_swapped == 0
