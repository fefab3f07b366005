"""The requests of a simulation: lengths, arrivals, samples and beams, shared prefixes, chats, bursts, priorities."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks import workloads
from benchmarks.paper import published

Kind = Literal["greedy", "samples", "beams"]


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request: `arrival` in seconds, lengths in tokens. Each of its `width` samples or beams generates
    `output_length` tokens. The first `prefix_length` tokens of the prompt are those of every other request with a
    prefix. The prompt of a request with a `conversation` begins with the prompts and outputs of the earlier requests of
    that conversation. `priority`: lower is more urgent."""

    request_id: str
    arrival: float
    input_length: int
    output_length: int
    kind: Kind = "greedy"
    width: int = 1
    prefix_length: int = 0
    conversation: str = ""
    priority: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """What the engine looks at when a request arrives and remembers. Samples have a seed of their own."""
        return self.kind, str(self.width), str(self.output_length), self.request_id if self.kind == "samples" else ""

    @property
    def final_length(self) -> int:
        return self.input_length + self.output_length


def poisson(
    name: str, count: int, rate: float, seed: int, *, kind: Kind = "greedy", width: int = 1, longest: int = 2048
) -> list[SimRequest]:
    """`count` requests, `rate` of them a second: with the lengths of the paper's Figure 11 (ShareGPT, Alpaca), or of
    another workload of `benchmarks.workloads`."""
    if name in published.MEANS:
        rng, arrival, requests = random.Random(seed), 0.0, []
        for i, pair in enumerate(published.pairs(name, count, rng, longest)):
            requests.append(SimRequest(f"r{i}", arrival, *pair, kind, width))
            arrival += rng.expovariate(rate)
        return requests
    trace = workloads.synthesise(name, count, rate=rate, seed=seed, longest=longest)
    return [SimRequest(f"r{i}", r.arrival, r.input_length, r.output_length, kind, width) for i, r in enumerate(trace)]


CHAT_PROMPT, CHAT_OUTPUT = 1024, 1024
CHAT_ROUNDS = 20


def chat(count: int, rate: float, seed: int) -> list[SimRequest]:
    """The paper's chatbot (section 6.5): a prompt is the end of the conversation so far, at most 1,024 tokens, and the
    model generates at most 1,024.

    Turns have the lengths of ShareGPT, which are means over single turns. A conversation has 1 to CHAT_ROUNDS turns, so
    that most prompts have 1,024 tokens, as in the paper.
    """
    rng = random.Random(seed)
    turns = published.pairs("sharegpt", count * CHAT_ROUNDS, rng, workloads.LONGEST)
    arrival, requests = 0.0, []
    for i in range(count):
        rounds = turns[i * CHAT_ROUNDS : i * CHAT_ROUNDS + rng.randint(1, CHAT_ROUNDS)]
        question, output = rounds.pop()
        prompt = min(sum(map(sum, rounds)) + question, CHAT_PROMPT)
        requests.append(SimRequest(f"r{i}", arrival, prompt, min(output, CHAT_OUTPUT)))
        arrival += rng.expovariate(rate)
    return requests


TRANSLATION_INPUT, TRANSLATION_OUTPUT, TRANSLATION_SIGMA = 30, 40, 0.6


def translation(count: int, rate: float, seed: int, prefix_length: int) -> list[SimRequest]:
    """Sentences to translate after a shared instruction with examples (section 6.4): 80 tokens for one example, 341
    for five. The lengths of the sentences are assumed."""
    rng = random.Random(seed)
    inputs = workloads.Lengths(TRANSLATION_SIGMA, mean=TRANSLATION_INPUT).sample(count, rng, 256)
    outputs = workloads.Lengths(TRANSLATION_SIGMA, mean=TRANSLATION_OUTPUT).sample(count, rng, 256)
    arrival, requests = 0.0, []
    for i, (own, output) in enumerate(zip(inputs, outputs)):
        requests.append(SimRequest(f"r{i}", arrival, prefix_length + own, output, prefix_length=prefix_length))
        arrival += rng.expovariate(rate)
    return requests


TURNS, THINKING = 8, 30.0


def turns(count: int, rate: float, seed: int) -> list[SimRequest]:
    """Conversations of at most TURNS turns with ShareGPT's lengths. A prompt is all that was said before, and the next
    question. A conversation ends before 2,048 tokens. THINKING seconds on average lie between two questions."""
    rng = random.Random(seed)
    lengths = published.pairs("sharegpt", count, rng, workloads.LONGEST)
    conversations: list[list[tuple[int, int]]] = []
    while lengths:
        history, said = 0, []
        for _ in range(rng.randint(1, TURNS)):
            if not lengths or history + sum(lengths[-1]) > workloads.LONGEST:
                break
            question, output = lengths.pop()
            said.append((history + question, output))
            history += question + output
        conversations.append(said)
    start, requests = 0.0, []
    for index, said in enumerate(conversations):
        arrival = start
        for prompt, output in said:
            requests.append(SimRequest("", arrival, prompt, output, conversation=f"c{index}"))
            arrival += rng.expovariate(1 / THINKING)
        start += rng.expovariate(rate * len(conversations) / count)
    requests.sort(key=lambda request: request.arrival)
    return [replace(request, request_id=f"r{i}") for i, request in enumerate(requests)]


def in_bursts(requests: list[SimRequest], rate: float, variation: float, seed: int) -> list[SimRequest]:
    """The same requests, with times between arrivals of which the standard deviation is `variation` times the mean
    (gamma distribution)."""
    rng, arrival, moved = random.Random(seed), 0.0, []
    for request in requests:
        moved.append(replace(request, arrival=arrival))
        arrival += rng.gammavariate(variation**-2, variation**2 / rate)
    return moved


def with_urgent(requests: list[SimRequest], share: float, seed: int) -> list[SimRequest]:
    """The same requests; `share` of them, drawn at random, come before all others."""
    rng = random.Random(seed)
    return [replace(request, priority=0 if rng.random() < share else 1) for request in requests]


def apart(requests: list[SimRequest]) -> list[SimRequest]:
    """The same requests for a system without sharing: every sample is a request, and computes its own prompt."""
    if any(request.kind == "beams" for request in requests):
        raise ValueError("kind='beams': beams of one request depend on each other; only samples can be taken apart")
    return [
        replace(request, request_id=f"{request.request_id}.{i}", kind="greedy", width=1)
        for request in requests
        for i in range(request.width)
    ]
