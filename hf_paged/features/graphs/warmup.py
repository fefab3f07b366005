"""Warm-up of a packed model on a GPU: steps on padding before the first request, so that serving neither compiles a
kernel nor captures a graph.

Triton compiles a kernel for each combination of its constants. `REHEARSALS` need every combination that any step can
need; `tests/kernels/serving.py` compares them with the steps of serving engines. Knows steps; never requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch
from tqdm.auto import tqdm

from hf_paged.config import SchedulerConfig
from hf_paged.kernels.metadata import SHORT_QUERY, step_arrays
from hf_paged.kernels.sampling import rehearse
from hf_paged.model.devices import device_of
from hf_paged.model.packed import PackedModel
from hf_paged.sockets import Executor

# The type of devices whose kernels are compiled when they are first needed; tests set another one.
DEVICE_TYPE = "cuda"


class Rehearsal(NamedTuple):
    """query_lens: new tokens of each sequence. is_long: sequences may be as long as the model allows, not only
    SHORT_QUERY tokens. shares: some have a common prefix."""

    query_lens: tuple[int, ...]
    is_long: bool = False
    shares: bool = False


REHEARSALS = (
    Rehearsal((1,)),
    Rehearsal((2,)),  # several new tokens: other tiles than those of one
    Rehearsal((1,), is_long=True),
    Rehearsal((2,), is_long=True),
    Rehearsal((1, 1), is_long=True, shares=True),
    Rehearsal((SHORT_QUERY + 1,), is_long=True),
    Rehearsal((SHORT_QUERY + 1, 1), is_long=True),
    Rehearsal((512,), is_long=True),  # so many tokens that K/V is written in larger pieces
)


def rehearsals(max_seqs: int, max_tokens: int) -> list[Rehearsal]:
    """Return the rehearsals that fit into a step of an engine with these limits."""
    return [each for each in REHEARSALS if len(each.query_lens) <= max_seqs and sum(each.query_lens) <= max_tokens]


class WarmUp:
    """The work of a warm-up, in parts. `run` yields after each of the `num_parts`."""

    def __init__(
        self, packed: PackedModel, captures: Sequence[Callable[[], None]], max_seqs: int, max_tokens: int
    ) -> None:
        self._packed = packed
        self._captures = captures
        self._steps = rehearsals(max_seqs, max_tokens)
        self.num_parts = len(self._steps) + len(captures)

    def run(self) -> Iterator[None]:
        """No block of the memory may be in use: it copies one free block to another."""
        for step in self._steps:
            with torch.inference_mode():
                self._rehearse(step)
            yield
        # The copy of copy-on-write, which no forward runs.
        if (pool := self._packed.memory.pool).num_blocks > 1:
            pool.copy_blocks([(0, 1)])
        for capture in self._captures:
            capture()
            yield

    def _rehearse(self, rehearsal: Rehearsal) -> None:
        """A forward of tokens that are written to no slot. They read block 0, whatever it holds. All have position 0,
        which every model has."""
        memory, device = self._packed.memory, device_of(self._packed.model)
        query_lens = rehearsal.query_lens
        tables = [[0] * -(-length // memory.block_size) for length in query_lens]
        step = step_arrays([tables for _ in memory.groups], query_lens, query_lens, memory.block_size)
        for slots in step.slots:
            slots.fill(-1)
        # Launches are chosen by an upper bound of the lengths.
        if rehearsal.is_long:
            step = replace(step, max_seq_len=2**30, shares=rehearsal.shares)
        ids = torch.zeros(sum(query_lens), dtype=torch.int64, device=device)
        # Decode steps take the logits of all tokens.
        wanted = None if rehearsal.query_lens[0] == 1 else ids[-1:]
        rehearse(self._packed.forward(ids, ids, step.metadata(device), wanted))


def warm_up(
    executor: Executor,
    captures: Sequence[Callable[[], None]],
    limits: SchedulerConfig,
    wanted: bool | None,
) -> None:
    """Warm up the model of an engine that has no requests yet, with a bar on stderr if that is a terminal.

    captures: of graphs. limits: of the engine's steps. wanted: True, False, or None (on a CUDA device, if the model
    runs packed). Raises ValueError for True if there is nothing to warm up.
    """
    if wanted is False:
        return
    device = device_of(executor.model)
    obstacle = None
    if device.type != DEVICE_TYPE:
        obstacle = f"the model is on {device}, where no kernel is compiled while it runs"
    elif not executor.is_packed:
        obstacle = "the model does not run packed (hf_paged.check says why)"
    if obstacle is not None:
        if wanted:
            raise ValueError(f"warmup=True: {obstacle}; leave it out")
        return
    # No step is larger than these limits, so larger ones need no rehearsal.
    parts = WarmUp(cast(PackedModel, executor), captures, limits.max_num_seqs, limits.token_budget)
    with tqdm(total=parts.num_parts, desc="warm-up", unit="step", disable=not sys.stderr.isatty()) as bar:
        for _ in parts.run():
            bar.update()
