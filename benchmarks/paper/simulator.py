"""Runs a policy on a virtual clock.

Steps in which nothing can happen but one token for every running sequence are scheduled in one go: the scheduler sees
several uncomputed tokens for each sequence. `Simulator(jumps=False)` takes each step by itself, with the same results.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.paper.beams import BeamChoice
from benchmarks.paper.cost import CostModel
from benchmarks.paper.policies.interface import Memory, Policy
from benchmarks.paper.requests import SimRequest
from hf_paged.generation.engine.scheduler import SchedulerOutput
from hf_paged.generation.requests.sequence import FinishReason, SequenceGroup

PREFIX_ROOT = b"shared prefix"


@dataclass(slots=True)
class Completed:
    """Times in seconds after the start of the simulation."""

    request: SimRequest
    first_token: float = 0.0
    end: float = 0.0

    @property
    def normalized_latency(self) -> float:
        """Seconds for each output token, from the arrival to the end (section 6.1)."""
        return (self.end - self.request.arrival) / self.request.output_length


@dataclass(slots=True)
class Integral:
    """Time integrals of what the policy holds; divide by `seconds` for means."""

    seconds: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    free: float = 0.0
    saved: float = 0.0

    def add(self, seconds: float, requests: int, memory: Memory) -> None:
        self.seconds += seconds
        self.requests += seconds * requests
        self.tokens += seconds * memory.tokens
        self.reserved += seconds * memory.reserved
        self.internal += seconds * memory.internal
        self.external += seconds * memory.external
        self.free += seconds * memory.free
        self.saved += seconds * memory.saved


@dataclass(slots=True)
class Result:
    """busy: while requests waited, which is when memory is the limit; window: from `warm_up` to the last arrival.

    paces: the seconds of a step, and how many tokens sequences that got one a step got at this pace.
    """

    completed: list[Completed]
    seconds: float
    num_steps: int
    num_preemptions: int
    busy: Integral
    window: Integral
    paces: list[tuple[float, int]]


Observer = Callable[[SchedulerOutput], None]


@dataclass
class Simulator:
    """One run. `observe` is called with each step before it is computed. `choose` gives the parents of the next beams
    of a group (default: drawn, see BeamChoice). measure_every: memory is looked at in every so many scheduler calls."""

    policy: Policy
    cost: CostModel
    requests: list[SimRequest]
    block_size: int = 16
    seed: int = 0
    jumps: bool = True
    warm_up: float = 0.0
    measure_every: int = 1
    observe: Observer | None = None
    choose: Callable[[SequenceGroup], list[int]] | None = None
    now: float = field(init=False, default=0.0)
    num_steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._next = 0
        self._until = math.inf
        self._records: dict[str, Completed] = {}
        self._completed: list[Completed] = []
        self._ending: list[SequenceGroup] = []
        self._beams: dict[str, BeamChoice] = {}
        self._known: set[object] = set()  # options of requests so far
        self._rng = random.Random(self.seed)
        self._is_settled = False  # the last step changed nothing but lengths
        self._paces: list[tuple[float, int]] = []
        self._unmeasured, self._calls = 0.0, 0
        self._busy, self._window = Integral(), Integral()
        self._last_arrival = self.requests[-1].arrival if self.requests else 0.0

    def run(self) -> Result:
        """All requests, in order of arrival, to their end."""
        self.advance(math.inf)
        num = self.policy.num_preemptions
        return Result(self._completed, self.now, self.num_steps, num, self._busy, self._window, self._paces)

    @property
    def has_work(self) -> bool:
        policy = self.policy
        return bool(policy.num_waiting or policy.num_running or policy.num_swapped)

    def advance(self, until: float) -> None:
        """Every step that begins before `until`. Later calls continue; requests may be added between calls, with
        arrivals not before `until`."""
        self._until = until
        while self.now < until and (self._next < len(self.requests) or self.has_work):
            self._arrive()
            if self.has_work:
                self._step()
            else:
                self.now = max(self.now, self.requests[self._next].arrival)

    # -- arrivals -----------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        requests = self.requests
        while self._next < len(requests) and requests[self._next].arrival <= self.now:
            request = requests[self._next]
            self._next += 1
            if self.cost.request:
                self.now += self.cost.known if request.options in self._known else self.cost.request
                self._known.add(request.options)
            if not self.policy.num_waiting and not self.policy.num_swapped:
                self._is_settled = False
            self._records[request.request_id] = Completed(request)
            self.policy.add(self._group(request))

    def _group(self, request: SimRequest) -> SequenceGroup:
        """Generated tokens are 0 too, so the next turn of a conversation finds all of the last one."""
        own, root = request.input_length - request.prefix_length, None
        prompt = [0] * own
        if request.prefix_length:
            prompt, root = [1] * request.prefix_length + [1 + self._next] * own, PREFIX_ROOT
        elif request.conversation:
            root = request.conversation.encode()
        return SequenceGroup(
            request.request_id,
            prompt,
            width=request.width,
            priority=request.priority,
            arrival=request.arrival,
            cache_root=root,
        )

    # -- a step -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        policy = self.policy
        if self.jumps and self._is_settled and (count := self._quiet_steps()) > 1:
            seconds, count = self._decode_seconds(count)
            for group in policy.running:
                for seq in group.live:
                    seq.token_ids.extend([0] * (count - 1))
            output = policy.schedule()
        else:
            count, before = 1, (policy.num_waiting, policy.num_swapped, policy.num_preemptions)
            output = policy.schedule()
            seconds = self.cost.seconds(policy.load(output), self.block_size)
            unchanged = before == (policy.num_waiting, policy.num_swapped, policy.num_preemptions)
            blocked = not (policy.num_waiting or policy.num_swapped)
            self._is_settled = bool(output.scheduled) and (unchanged or blocked)
        if output.failed:
            raise MemoryError(output.failed[0].error)
        if self.observe is not None:
            self.observe(output)
        self.num_steps += count
        self._paces.append((seconds / count, count * sum([num == 1 for _, num in output.scheduled])))
        # In the mean over several steps, half of the tokens of all but the first are not there yet.
        self._measure(seconds, len(output.scheduled) * (count - 1) / 2)
        self.now += seconds
        policy.update(output)
        self._sample(output)

    def _quiet_steps(self) -> int:
        """How many steps are certain to compute one token for every running sequence, and nothing else."""
        limit, records = 1 << 30, self._records
        for group in self.policy.running:
            if not group.live:
                continue  # padding
            request = records[group.request_id].request
            if request.kind == "beams" or len(group.live) < request.width or group.has_branches:
                return 1
            for seq in group.live:
                length = len(seq.token_ids)
                if length - seq.num_computed_tokens != 1:
                    return 1
                limit = min(limit, request.output_length - length + seq.num_prompt_tokens)
        return self.policy.decode_steps(limit)

    def _decode_seconds(self, count: int) -> tuple[float, int]:
        """The time of at most `count` steps, and how many begin before the next arrival that could be admitted and
        before the time to which the simulation advances."""
        policy, cost = self.policy, self.cost
        load = policy.decode_load()
        first = cost.seconds(load, self.block_size)
        growth = cost.kv_token * load.rows
        end = self._until - self.now
        if self._next < len(self.requests) and not policy.num_waiting and not policy.num_swapped:
            end = min(end, self.requests[self._next].arrival - self.now)
        seconds = 0.0
        for step in range(count):
            if seconds >= end:
                return seconds, step
            seconds += first + step * growth
        return seconds, count

    def _sample(self, output: SchedulerOutput) -> None:
        """Give each sequence whose last token was computed its next one; end those that have all of theirs."""
        forking: dict[SequenceGroup, None] = {}
        records = self._records
        for seq, _ in output.scheduled:
            tokens, group = seq.token_ids, seq.group
            if len(tokens) > seq.num_computed_tokens:
                continue
            record = records[group.request_id]
            request = record.request
            generated = len(tokens) - seq.num_prompt_tokens + 1
            if generated == 1:
                record.first_token = self.now
            is_single = request.kind == "greedy" or (request.kind == "samples" and generated > 1)
            if is_single and generated < request.output_length:
                tokens.append(0)
            else:
                forking[group] = None
        for group in forking:
            self._branch(group)
        if self._ending:
            self._note_ends()

    def _branch(self, group: SequenceGroup) -> None:
        """The group ends, forks into its samples, or continues with other beams."""
        request = self._records[group.request_id].request
        seq = group.live[0]
        generated = len(seq.token_ids) - seq.num_prompt_tokens + 1
        self._is_settled = False
        if generated >= request.output_length:
            self._beams.pop(group.request_id, None)
            self._ending.append(group)
            self.policy.finish_group(group, FinishReason.LENGTH)
        elif request.kind == "samples":
            self.policy.fork(seq, list(range(request.width)))
        else:
            parents = self._parents(group, request.width)
            self.policy.reorder(group, parents, list(range(len(parents))))

    def _parents(self, group: SequenceGroup, width: int) -> list[int]:
        if self.choose is not None:
            return self.choose(group)
        beams = self._beams.get(group.request_id)
        if beams is None:
            beams = self._beams[group.request_id] = BeamChoice(width, self._rng)
        return beams.parents()

    def _note_ends(self) -> None:
        """A static batch ends later than its sequences."""
        for group in self._ending:
            if group.is_finished:
                record = self._records.pop(group.request_id)
                record.end = self.now
                self._completed.append(record)
        self._ending = [group for group in self._ending if not group.is_finished]

    # -- measuring ----------------------------------------------------------------------------------------------

    def _measure(self, seconds: float, ahead: float) -> None:
        self._calls += 1
        self._unmeasured += seconds
        if self._calls % self.measure_every:
            return
        seconds, self._unmeasured = self._unmeasured, 0.0
        policy = self.policy
        in_window = self.warm_up <= self.now <= self._last_arrival
        if not in_window and not policy.num_waiting:
            return
        memory = policy.memory(ahead)
        if policy.num_waiting:
            self._busy.add(seconds, policy.num_running, memory)
        if in_window:
            self._window.add(seconds, policy.num_running, memory)


def run_all(requests: Iterable[SimRequest], policy: Policy, cost: CostModel, **options: object) -> Result:
    return Simulator(policy, cost, list(requests), **options).run()  # type: ignore[arg-type]
