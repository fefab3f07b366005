"""The requests of a simulation: lengths, arrivals, samples and beams, shared prefixes, chats."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks import workloads

Kind = Literal["greedy", "samples", "beams"]


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request: `arrival` in seconds, lengths in tokens. Each of its `width` samples or beams generates
    `output_length` tokens. The first `prefix_length` tokens of the prompt are those of every other request with a
    prefix."""

    request_id: str
    arrival: float
    input_length: int
    output_length: int
    kind: Kind = "greedy"
    width: int = 1
    prefix_length: int = 0

    @property
    def final_length(self) -> int:
        return self.input_length + self.output_length


def poisson(name: str, count: int, rate: float, seed: int, *, kind: Kind = "greedy", width: int = 1):
    """`count` requests of a workload (`benchmarks.workloads`), `rate` of them a second."""
    trace = workloads.synthesise(name, count, rate=rate, seed=seed)
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
    turns = workloads.synthesise("sharegpt", count * CHAT_ROUNDS, seed=seed)
    arrival, requests = 0.0, []
    for i in range(count):
        rounds = turns[i * CHAT_ROUNDS : i * CHAT_ROUNDS + rng.randint(1, CHAT_ROUNDS)]
        history = sum(t.input_length + t.output_length for t in rounds[:-1])
        prompt = min(history + rounds[-1].input_length, CHAT_PROMPT)
        requests.append(SimRequest(f"r{i}", arrival, prompt, min(rounds[-1].output_length, CHAT_OUTPUT)))
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


def apart(requests: list[SimRequest]) -> list[SimRequest]:
    """The same requests for a system without sharing: every sample is a request, and computes its own prompt."""
    if any(request.kind == "beams" for request in requests):
        raise ValueError("kind='beams': beams of one request depend on each other; only samples can be taken apart")
    return [
        replace(request, request_id=f"{request.request_id}.{i}", kind="greedy", width=1)
        for request in requests
        for i in range(request.width)
    ]
