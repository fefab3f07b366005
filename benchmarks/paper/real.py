"""Runs the engine on this CPU under the loads of a simulation, and the simulator under the loads of the engine.

The clock of a run is the CPU time of this process with one thread, and idle time is skipped, so other work on the
machine changes little. Needs torch and transformers.
"""

from __future__ import annotations

import gc
import hashlib
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.paper.cost import CostModel
from benchmarks.paper.policies.interface import Load, Memory, load_of
from benchmarks.paper.policies.paged import Paged
from benchmarks.paper.requests import SimRequest
from benchmarks.paper.simulator import Completed, Integral, Result, Simulator
from benchmarks.paper.watch import watched
from hf_paged.config import CacheConfig, PreemptionMode, SchedulerConfig
from hf_paged.generation.engine.scheduler import Scheduler, SchedulerOutput

VOCAB = 512
TOKEN_BUDGET = 256
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True)
class RealLoad:
    """Requests, and the engine that serves them. slots: tokens of the K/V pool."""

    name: str
    requests: list[SimRequest]
    slots: int
    block_size: int = 16
    preemption: PreemptionMode = "auto"
    prefix_caching: bool = False
    max_num_seqs: int = 64

    @property
    def num_blocks(self) -> int:
        return self.slots // self.block_size

    def identity(self) -> str:
        """Equal for loads of equal requests and settings."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:12]

    @property
    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=TOKEN_BUDGET,
            prefix_caching=self.prefix_caching,
            preemption=self.preemption,
        )


@dataclass(slots=True)
class RealRun:
    """result: as of a simulation; steps: the load of each step and its seconds; adding: seconds of each
    arrival, and whether its options were known; parents: of the beams, by request."""

    result: Result
    steps: list[tuple[Load, float]]
    adding: list[tuple[float, bool]]
    parents: dict[str, list[list[int]]] = field(default_factory=dict)


def model() -> Any:
    """A random Llama, the same weights every time, which never ends a text by itself."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        **SHAPE, initializer_range=0.2, eos_token_id=None, bos_token_id=None, pad_token_id=0
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


def options_of(request: SimRequest, index: int) -> Any:
    import transformers

    config = transformers.GenerationConfig(
        max_new_tokens=request.output_length,
        num_beams=request.width if request.kind == "beams" else 1,
        num_return_sequences=request.width,
        do_sample=request.kind == "samples",
        top_k=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    if request.kind == "samples":
        config.seed = index
    return config


def prompt_of(request: SimRequest, index: int) -> list[int]:
    own = range(request.input_length - request.prefix_length)
    return [3 + i % 97 for i in range(request.prefix_length)] + [3 + (i * 31 + index * 7) % (VOCAB - 3) for i in own]


def run_engine(language_model: Any, load: RealLoad) -> RealRun:
    """Serve the load to its end."""
    return run_in_turns(language_model, [load])[0]


def run_in_turns(language_model: Any, loads: list[RealLoad]) -> list[RealRun]:
    """Serve each load with an engine and a clock of its own, in seconds of CPU time of this process.

    The engines take turns, step by step, and all come to their end together: if the machine becomes slower for a
    while, as a shared one does, it becomes slower for all of them. Objects that were made before are hidden
    from the garbage collector: scanning them would add a fifth of a second to some step.
    """
    with ExitStack() as stack:
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        drives = [_Drive(load, stack.enter_context(_engine(language_model, load))) for load in loads]
        while unfinished := [drive for drive in drives if drive.is_unfinished]:
            min(unfinished, key=lambda drive: drive.progress).advance()
        return [drive.run() for drive in drives]


def _engine(language_model: Any, load: RealLoad) -> Any:
    import hf_paged

    per_block = 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * load.block_size
    cache = CacheConfig(
        block_size=load.block_size, num_blocks=load.num_blocks, swap_memory=f"{load.num_blocks * per_block} B"
    )
    return hf_paged.Engine(language_model, cache, load.config)


class _Drive:
    """Drives an engine through a load on the CPU clock, and records what the simulator records."""

    def __init__(self, load: RealLoad, engine: Any) -> None:
        self.load = load
        self._engine = engine
        self._now = 0.0
        self._arguments = [(prompt_of(request, i), options_of(request, i)) for i, request in enumerate(load.requests)]
        self._num_added = self._num_advances = self._preemptions = 0
        self._to_advance = sum(request.output_length for request in load.requests)
        self._records: dict[str, Completed] = {}
        self._done: list[Completed] = []
        self._steps: list[tuple[Load, float]] = []
        self._adding: list[tuple[float, bool]] = []
        self._known: set[object] = set()
        self._parents: dict[str, list[list[int]]] = {}
        self._busy, self._window = Integral(), Integral()
        self._pending: tuple[Load, Memory, int, int] | None = None  # of the step in progress

    @property
    def is_unfinished(self) -> bool:
        return self._num_added < len(self.load.requests) or self._engine.has_unfinished_requests()

    @property
    def progress(self) -> float:
        """The share of all output tokens that has been generated; those of samples and beams at a time count as one."""
        return self._num_advances / self._to_advance

    def run(self) -> RealRun:
        """What was recorded."""
        paces = [(seconds, load.rows) for load, seconds in self._steps]
        num_steps, preemptions = len(self._steps), self._preemptions
        result = Result(self._done, self._now, num_steps, preemptions, self._busy, self._window, paces)
        return RealRun(result, self._steps, self._adding, self._parents)

    def advance(self) -> None:
        """Add the requests that have arrived, and run a step."""
        requests = self.load.requests
        while self._num_added < len(requests) and requests[self._num_added].arrival <= self._now:
            self._add(requests[self._num_added])
        if not self._engine.has_unfinished_requests():
            self._now = max(self._now, requests[self._num_added].arrival)
            return
        with watched(self._on_step, self._on_reorder):
            begin = time.process_time()
            outputs = self._engine.step()
            seconds = time.process_time() - begin
        self._now += seconds
        self._num_advances += len(outputs)
        if self._pending is not None:
            work, memory, running, waiting = self._pending
            self._steps.append((work, seconds))
            until_last_arrival = self._now - seconds <= requests[-1].arrival
            for integral, counts in ((self._window, until_last_arrival), (self._busy, waiting > 0)):
                if counts:
                    integral.add(seconds, running, memory)
            self._pending = None
        for output in outputs:
            record = self._records[output.request_id]
            record.first_token = record.first_token or self._now
            if output.finished:
                record.end = self._now
                self._done.append(record)

    def _add(self, request: SimRequest) -> None:
        begin = time.process_time()
        self._engine.add_request(*self._arguments[self._num_added], request_id=request.request_id)
        seconds = time.process_time() - begin
        self._adding.append((seconds, request.options in self._known))
        self._known.add(request.options)
        self._now += seconds
        self._records[request.request_id] = Completed(request)
        self._num_added += 1

    def _on_reorder(self, group: Any, parents: list[int]) -> None:
        self._parents.setdefault(group.request_id, []).append(parents)

    def _on_step(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        size, manager = self.load.block_size, scheduler.manager
        work = load_of(
            output,
            copied_tokens=len(output.block_copies) * size,
            swapped_blocks=len(output.swap_out) + len(output.swap_in),
        )
        used, tokens = manager.allocator.num_used * size, manager.num_filled_slots
        saved = manager.num_logical_blocks * size - used
        memory = Memory(tokens, 0, used - tokens, 0, manager.allocator.num_available * size, saved)
        self._pending = work, memory, scheduler.num_running, scheduler.num_waiting
        self._preemptions = scheduler.num_preemptions_recompute + scheduler.num_preemptions_swap


def simulate(load: RealLoad, cost: CostModel, parents: dict[str, list[list[int]]] | None = None) -> Result:
    """The same load on the virtual clock. With `parents`, the beams fork as they did in the engine."""
    finals = {r.request_id: r.final_length for r in load.requests}
    policy = Paged(load.config, load.slots, finals, block_size=load.block_size)
    history = {name: list(rows) for name, rows in (parents or {}).items()}
    choose = (lambda group: history[group.request_id].pop(0)) if parents else None
    return Simulator(policy, cost, load.requests, block_size=load.block_size, choose=choose).run()
