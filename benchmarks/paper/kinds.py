"""Kinds of layer memory: how much of a pool holds K/V that a later token can still see, while requests wait.

Not in the paper, whose models keep all tokens in all layers. The scheduler, the block tables and the groups of layers
are hf_paged's own; sizes are those of published models. Steps need no clock here: all requests wait from the beginning.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper import published
from benchmarks.paper.reading import Effort, Figure, Outcomes
from hf_paged.cache.allocator import BlockAllocator
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.layers import FULL, Kind, Layers, LayerSize, Layout, Window, layout_of
from hf_paged.config import SchedulerConfig
from hf_paged.generation.engine.scheduler import Scheduler
from hf_paged.generation.requests.sequence import FinishReason, SequenceGroup

Data = dict[str, Any]
Lengths = Sequence[tuple[int, int]]
"""Tokens of prompts and of outputs."""

BLOCK_SIZE = 16
BUDGET = 2048
"""Tokens of a step, at most."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers of a model: their K/V heads and the size of one; every `period`-th layer keeps all tokens, the others the
    last `window` (None: all layers keep all)."""

    name: str
    layers: int
    heads: int
    head_dim: int
    window: int | None = None
    period: int = 1

    def kinds(self) -> Layers:
        size = LayerSize(self.heads * self.head_dim, self.heads * self.head_dim)
        return tuple((index, self._kind(index), size) for index in range(self.layers))

    def _kind(self, index: int) -> Kind:
        return FULL if self.window is None or (index + 1) % self.period == 0 else Window(self.window)


SHAPES = (
    Shape("Llama 3.1 8B", 32, 8, 128),
    Shape("gpt-oss 20B", 24, 8, 64, 128, 2),
    Shape("Gemma 3 4B", 34, 4, 256, 1024, 6),
    Shape("Gemma 3 27B", 62, 16, 128, 1024, 6),
)


def short(count: int, rng: random.Random) -> Lengths:
    """ShareGPT's, from the paper's Figure 11."""
    return published.pairs("sharegpt", count, rng, 2048)


def long(count: int, rng: random.Random) -> Lengths:
    """Documents of 4,000 to 24,000 tokens, and answers of 50 to 500."""
    return [(rng.randrange(4_000, 24_000), rng.randrange(50, 500)) for _ in range(count)]


def mixed(count: int, rng: random.Random) -> Lengths:
    """Three quarters are short; the order is random."""
    lengths = [*short(count - count // 4, rng), *long(count // 4, rng)]
    rng.shuffle(lengths)
    return lengths


def changing(count: int, rng: random.Random) -> Lengths:
    """Short ones, then long ones, then short ones again."""
    part = count // 3
    return [*short(part, rng), *long(part, rng), *short(count - 2 * part, rng)]


@dataclass(frozen=True, slots=True)
class Demand:
    """A number of requests with such lengths. pool: tokens for which it has room, if every layer keeps all of them."""

    draw: Callable[[int, random.Random], Lengths]
    requests: int
    pool: int

    def lengths(self) -> Lengths:
        return self.draw(self.requests, random.Random(0))


DEMANDS = {
    "short": Demand(short, 1500, 1 << 15),
    "long": Demand(long, 100, 1 << 17),
    "mixed": Demand(mixed, 600, 1 << 17),
    "changing": Demand(changing, 600, 1 << 17),
}


@dataclass(frozen=True, slots=True)
class Held:
    """Means over the steps in which requests wait. visible: share of the blocks in use that has K/V which a later token
    can see. requests: running at a time."""

    visible: float
    requests: float


def held(kinds: Layers, demand: Demand) -> Held:
    """Run the requests through a pool for layers of these kinds."""
    layout = layout_of(kinds, BLOCK_SIZE)
    per_block = BLOCK_SIZE * _elements_per_slot(layout, kinds)
    pool = demand.pool * sum(size.total for _, _, size in kinds)
    manager = BlockManager(BlockAllocator(pool // per_block), BLOCK_SIZE, groups=layout.groups)
    config = SchedulerConfig(max_num_seqs=512, max_num_batched_tokens=BUDGET, preemption="recompute")
    scheduler = Scheduler(config, manager, None)
    outputs = {}
    for index, (prompt, output) in enumerate(demand.lengths()):
        outputs[str(index)] = output
        scheduler.enqueue(SequenceGroup(str(index), [index] * prompt, width=1, priority=0, arrival=0.0))
    sums = {kind: sum(size.total for _, each, size in kinds if each == kind) for _, kind, _ in kinds}
    visible, running, steps = 0.0, 0, 0
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        if scheduler.num_waiting:
            tokens = [manager.num_tokens(seq.seq_id) for group in scheduler.running for seq in group.live]
            visible += _visible(tokens, sums) / (manager.allocator.num_used * per_block)
            running += len(tokens)
            steps += 1
        scheduler.update(step)
        for seq, _ in step.scheduled:
            if len(seq.token_ids) == seq.num_computed_tokens:
                if len(seq.token_ids) - seq.num_prompt_tokens + 1 >= outputs[seq.group.request_id]:
                    scheduler.finish_group(seq.group, FinishReason.LENGTH)
                else:
                    seq.token_ids.append(0)
    return Held(visible / steps, running / steps)


def _elements_per_slot(layout: Layout, kinds: Layers) -> int:
    if not layout.block_sizes:
        return sum(size.total for _, _, size in kinds)
    return sum(size for _, size in layout.block_sizes)


def _visible(lengths: Iterable[int], sums: dict[Kind, int]) -> int:
    """Elements that a later token can see."""
    return sum((length - kind.first_visible(length)) * size for length in lengths for kind, size in sums.items())


def everything(kinds: Layers) -> Layers:
    """The same layers for a system that does not know windows."""
    return tuple((index, FULL, size) for index, _, size in kinds)


def read_kinds(_: Outcomes) -> Data:
    rows, bars = [], {}
    for shape in SHAPES:
        for load, demand in DEMANDS.items():
            ours, whole = held(shape.kinds(), demand), held(everything(shape.kinds()), demand)
            rows.append((shape.name, load, ours, whole))
            share = 100 * ours.visible
            bars.setdefault(load, {})[shape.name] = {"median": share, "low": share, "high": share}
    panels = [
        {"title": f"{load} requests", "ylabel": "K/V that a token can see, %", "bars": each}
        for load, each in bars.items()
    ]
    least = min(rows, key=lambda row: row[2].visible)
    best = max(rows, key=lambda row: row[2].requests / row[3].requests)
    name, load, ours, whole = best
    sentence = (
        f"While requests wait, {100 * least[2].visible:.1f} % or more of the blocks in use hold K/V that a later token "
        f"can see (least: {least[0]} with {least[1]} requests), whatever the windows of a model and the mix of short "
        f"and long requests. The rest is in last blocks that are not full, in blocks at the edge of a window, in the "
        f"prompts that a step computes, and, where layers cannot be dealt out evenly, in groups with a layer less. "
        f"{name} runs {ours.requests:.3g} {load} requests at a time, in memory for {whole.requests:.3g} if every layer "
        f"kept all tokens."
    )
    return {"panels": panels, "checks": [], "sentence": sentence}


def runs_kinds(_: Effort) -> list[Any]:
    return []


KINDS = Figure("kinds", "Windows in one pool", runs_kinds, read_kinds)
