"""Many replicas behind a router on one virtual clock: each is the paper's simulator with hf_paged's own scheduler, and
the router is that of the server (`hf_paged.serving.routing`).

A replica that computes is looked at only when one of its requests may end or a new one is sent to it. That is exact: in
between, its steps compute one token for each of its sequences.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from benchmarks import workloads
from benchmarks.paper.cost import ASSUMED, CostModel, Setup, cost_of
from benchmarks.paper.policies.paged import Paged
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.simulator import Simulator
from hf_paged.config import SchedulerConfig
from hf_paged.generation.requests.sequence import SequenceGroup
from hf_paged.serving.routing import Router

BLOCK = 16
BUDGET, SEATS = 2048, 256
"""Tokens and sequences of a step, at most."""

# -- requests ----------------------------------------------------------------------------------------------------------

TURNS, ANSWER, THINKING = 8, 10.0, 30.0
APPLICATIONS, SYSTEM = 32, 256
QUESTION = 122
"""Tokens of a turn's own text, on average. With it, prompts are as long on average as Azure's (1,155 tokens)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations of 1 to TURNS turns. A prompt is a system prompt of SYSTEM tokens, which the conversations of an
    application share, all that was said before, and a question. Answers have the lengths of Azure's conversations of
    2023. The next turn comes ANSWER seconds after the last one, and THINKING seconds more on average.

    hourly: requests an hour; variation: standard deviation / mean of the times between conversations (1: Poisson);
    minutes: of arrivals, of which the first `warm_up` are not measured.
    """

    hourly: float
    minutes: float
    warm_up: float
    variation: float = 1.0
    seed: int = 0


def requests_of(traffic: Traffic, longest: int = 8192) -> list[SimRequest]:
    """In order of arrival. Conversations that began before time 0 are in their middle."""
    rng = random.Random(traffic.seed)
    end, before = 60 * traffic.minutes, TURNS * (ANSWER + THINKING)
    every = 3600 / traffic.hourly * (1 + TURNS) / 2
    count = math.ceil((end + before) / every * 1.1) + 100
    questions = iter(workloads.Lengths(0.985, mean=QUESTION).sample(count * TURNS, rng, longest))
    answers = iter(workloads.WORKLOADS["azure-conv"][1].sample(count * TURNS, rng, longest))
    popular = [1 / (rank + 1) for rank in range(APPLICATIONS)]
    applications = rng.choices(range(APPLICATIONS), popular, k=count)
    requests: list[SimRequest] = []
    start = -before
    for index in range(count):
        arrival, length = start, SYSTEM
        for _ in range(rng.randint(1, TURNS)):
            length += next(questions)
            answer = next(answers)
            if length + answer > longest:
                break
            if 0 <= arrival < end:
                name = f"{applications[index]}.{index}"
                requests.append(SimRequest("", arrival, length, answer, prefix_length=SYSTEM, conversation=name))
            length += answer
            arrival += ANSWER + rng.expovariate(1 / THINKING)
        start += rng.gammavariate(traffic.variation**-2, traffic.variation**2 * every)
    requests.sort(key=lambda request: request.arrival)
    return [replace(request, request_id=str(i)) for i, request in enumerate(requests)]


def chain(request: SimRequest, tokens: int = BLOCK) -> tuple[int, ...]:
    """What the router sees of a prompt: one entry for every `tokens` of it, equal for equal beginnings."""
    application, conversation = map(int, request.conversation.split("."))
    shared = SYSTEM // tokens
    own = request.input_length // tokens - shared
    first = (conversation + APPLICATIONS + 1) << 32
    return (*(((application + 1) << 32) + i for i in range(shared)), *(first + i for i in range(own)))


# -- replicas ----------------------------------------------------------------------------------------------------------


@dataclass
class Replica(Simulator):
    """One engine. Requests are appended to `requests` as the router sends them."""

    def _group(self, request: SimRequest) -> SequenceGroup:
        """The first tokens after the system prompt name the conversation; all others are 0, as generated ones are."""
        application, conversation = map(int, request.conversation.split("."))
        own = request.input_length - SYSTEM
        prompt = [0] * SYSTEM + [conversation + 1] * min(own, BLOCK) + [0] * max(own - BLOCK, 0)
        root = b"application %d" % application
        return SequenceGroup(request.request_id, prompt, arrival=request.arrival, cache_root=root)

    def wake_time(self) -> float:
        """A time before which none of its requests ends, if no request is sent to it."""
        if not self.has_work:
            return math.inf
        count = self._quiet_steps() if self._is_settled else 0
        if count <= 1:
            return self.now
        load = self.policy.decode_load()
        seconds = count * self.cost.seconds(load, self.block_size)
        return self.now + seconds * (1 - 1e-9)  # the steps become slower, so this is too early if anything

    def take_ended(self) -> Iterator[tuple[float, float, SimRequest]]:
        """(end, time of the first token, request) of each request that has ended since the last call."""
        for each in self._completed:
            yield each.end, each.first_token, each.request
        self._completed.clear()
        self._paces.clear()

    @property
    def looked_up(self) -> tuple[int, int]:
        """Tokens of prompts so far, and those of them that were cached."""
        assert isinstance(self.policy, Paged)
        cache = self.policy.scheduler.prefix_cache
        assert cache is not None
        return cache.query_tokens, cache.hit_tokens


def make_replica(setup: Setup, cost: CostModel) -> Replica:
    config = SchedulerConfig(max_num_seqs=SEATS, max_num_batched_tokens=BUDGET, prefix_caching=True, preemption="auto")
    return Replica(Paged(config, setup.slots, {}), cost, [], measure_every=1 << 60)


def cost_model(setup: Setup) -> CostModel:
    return cost_of(setup).with_kv_factor(ASSUMED.kv_factor(BLOCK))


# -- the fleet ---------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Of the requests that arrived in the measured window. Seconds, one entry a request."""

    first_token: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)  # for each output token
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    most_in_flight: int = 0  # of a replica


class Fleet:
    """`count` equal replicas. The router knows at once which requests have ended. tokens: of an entry of its chains."""

    def __init__(self, count: int, router: Router[int], setup: Setup, *, tokens: int = BLOCK) -> None:
        cost = cost_model(setup)
        self._router, self._tokens = router, tokens
        self._replicas = [make_replica(setup, cost) for _ in range(count)]
        self._loads: dict[int, float] = dict.fromkeys(range(count), 0)
        self._wakes: list[tuple[float, int]] = []
        self._wake_of = [math.inf] * count  # the entry of `_wakes` that counts
        self._ends: list[tuple[float, int]] = []
        self._measured = Measured()
        self._window = (0.0, math.inf)

    def run(self, requests: Iterable[SimRequest], warm_up: float) -> Measured:
        """All requests to their end; those that arrive after `warm_up` seconds are measured."""
        self._window = (warm_up, math.inf)
        before: tuple[int, int] | None = None
        for request in requests:
            self._advance(request.arrival)
            if before is None and request.arrival >= warm_up:
                before = self._looked_up()
            self._send(request)
        known = before or (0, 0)
        self._advance(math.inf)
        after = self._looked_up()
        measured = self._measured
        measured.prompt_tokens, measured.cached_tokens = (b - a for a, b in zip(known, after))
        measured.preemptions = sum(replica.policy.num_preemptions for replica in self._replicas)
        return measured

    def _looked_up(self) -> tuple[int, int]:
        pairs = [replica.looked_up for replica in self._replicas]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    def _send(self, request: SimRequest) -> None:
        entries = chain(request, self._tokens)
        index = self._router.choose(entries, self._loads).replica
        self._router.sent(entries, index)
        self._loads[index] += 1
        self._measured.most_in_flight = max(self._measured.most_in_flight, int(self._loads[index]))
        self._replicas[index].advance(request.arrival)
        self._replicas[index].requests.append(request)
        self._look(index, max(self._replicas[index].now, request.arrival))

    def _advance(self, until: float) -> None:
        """All steps that begin before `until` and may end a request; and the loads as the router knows them then."""
        while self._wakes and self._wakes[0][0] < until:
            time, index = heapq.heappop(self._wakes)
            if time == self._wake_of[index]:
                # To the next look of another replica at most, so that no step of the far future is taken.
                self._replicas[index].advance(math.nextafter(max(time, self._replicas[index].now), math.inf))
                self._look(index)
        while self._ends and self._ends[0][0] <= until:
            self._loads[heapq.heappop(self._ends)[1]] -= 1

    def _look(self, index: int, at: float | None = None) -> None:
        """Note what has ended, and when the replica is to be looked at next."""
        replica = self._replicas[index]
        for end, first_token, request in replica.take_ended():
            heapq.heappush(self._ends, (end, index))
            if self._window[0] <= request.arrival < self._window[1]:
                self._measured.first_token.append(first_token - request.arrival)
                self._measured.latency.append((end - request.arrival) / request.output_length)
        wake = replica.wake_time() if at is None else at
        self._wake_of[index] = wake
        if wake < math.inf:
            heapq.heappush(self._wakes, (wake, index))
