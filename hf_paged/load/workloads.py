"""Request lengths and arrivals, synthesised from the statistics of published traces.

For ShareGPT and Alpaca as the paper uses them, it prints the means (Figure 11): the lengths are truncated log-normals
with an assumed spread, rescaled to within 0.2 % of the means. For the Azure traces of 2023 (Azure/AzurePublicDataset),
log-normals were fitted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of lengths in tokens. If `mean` is given, samples are rescaled to it.

    `mu` and `sigma` are the mean and standard deviation of the logarithm.
    """

    sigma: float
    mean: float | None = None
    mu: float | None = None

    def sample(self, count: int, rng: random.Random, longest: int) -> list[int]:
        values = [rng.lognormvariate(self.mu or 0.0, self.sigma) for _ in range(count)]
        if self.mean is None:
            return [min(max(1, round(value)), longest) for value in values]
        # Truncation and rounding shift the mean, so rescale repeatedly.
        scale = self.mean * count / sum(values)
        for _ in range(50):
            lengths = [min(max(1, round(value * scale)), longest) for value in values]
            error = self.mean * count / sum(lengths)
            if abs(error - 1) < 0.002:
                break
            scale *= error
        return lengths


WORKLOADS: dict[str, tuple[Lengths, Lengths]] = {
    "sharegpt": (Lengths(1.2, mean=161.31), Lengths(0.9, mean=337.99)),
    "alpaca": (Lengths(0.5, mean=19.31), Lengths(0.8, mean=58.45)),
    "azure-conv": (Lengths(0.985, mu=6.633), Lengths(0.859, mu=5.019)),
    "azure-code": (Lengths(1.360, mu=6.999), Lengths(0.847, mu=2.788)),
}
# The paper's models (OPT, LLaMA) have 2,048 positions.
LONGEST = 2048


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """One request: `arrival` in seconds after the start, lengths in tokens."""

    arrival: float
    input_length: int
    output_length: int


def synthesise(
    name: str, count: int, *, scale: float = 1.0, rate: float | None = None, seed: int = 0, longest: int = LONGEST
) -> list[TraceRequest]:
    """`count` requests with lengths times `scale`, prompt and output together at most `longest` times `scale`; Poisson
    arrivals at `rate` per second (None: all at time 0)."""
    rng = random.Random(seed)
    inputs, outputs = WORKLOADS[name]
    longest = max(2, int(longest * scale))
    scaled = [dataclasses.replace(l, mean=l.mean * scale if l.mean else None) for l in (inputs, outputs)]
    # A factor of lengths is a sum of their logarithms.
    shift = math.log(scale)
    scaled = [dataclasses.replace(l, mu=l.mu + shift if l.mu else None) for l in scaled]
    ins = scaled[0].sample(count, rng, longest - 1)
    outs = [min(out, longest - n) for n, out in zip(ins, scaled[1].sample(count, rng, longest))]
    arrival = 0.0
    requests: list[TraceRequest] = []
    for n, out in zip(ins, outs):
        requests.append(TraceRequest(arrival, n, out))
        if rate is not None:
            arrival += rng.expovariate(rate)
    return requests


def read_trace(path: Path) -> list[TraceRequest]:
    """A trace in Mooncake's JSON lines: `timestamp` (ms), `input_length`, `output_length`."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    first = min(line["timestamp"] for line in lines)
    return [
        TraceRequest((line["timestamp"] - first) / 1000, line["input_length"], line["output_length"]) for line in lines
    ]


def prompts_for(requests: list[TraceRequest], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids of the requested lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(r.input_length)] for r in requests]


def texts_for(requests: list[TraceRequest], seed: int = 0) -> list[str]:
    """Texts of random short words, one for each token of the requested lengths."""
    rng = random.Random(seed)
    return [" ".join(rng.choice(_WORDS) for _ in range(r.input_length)) for r in requests]


_WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "as",
    "with",
    "was",
    "on",
    "be",
    "at",
    "by",
    "this",
)
