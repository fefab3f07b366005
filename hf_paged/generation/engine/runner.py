"""Runner: carries out a SchedulerOutput on the device. It makes `Parts` of the plan, and an executor computes them.

Knows block tables and tokens; never queues, requests or sampling, nor how a model is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from hf_paged.cache.swap import HostPool
from hf_paged.errors import LayersChanged
from hf_paged.generation.engine.tables import Copies, Drafts, SchedulerOutput
from hf_paged.generation.requests.batch import SampledTokens
from hf_paged.generation.requests.sequence import Plan, Sequence, SequenceGroup, by_adapters
from hf_paged.kernels.metadata import to_device
from hf_paged.model.conditions import Conditions
from hf_paged.registry import Choice, Variants
from hf_paged.sockets import Executor, Parts, SideMemory

_Result = TypeVar("_Result")


class TaskRows(NamedTuple):
    """The rows that a group's task wants, after the tokens of `seq` at positions `first`, `first` + 1 and so on."""

    seq: Sequence
    first: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step.

    seqs: the sequences whose next token is due, in the order of the plan. logits: [num_rows, vocab]; the first
    len(seqs) rows are theirs, and the others follow drafted tokens. draft_rows: the first row of each sequence with a
    draft. kept: rows for tasks. failed: sequences whose forward has raised, with the error, while that of others has
    not.
    """

    seqs: list[Sequence]
    logits: torch.Tensor | None
    failed: list[tuple[list[Sequence], Exception]] = field(default_factory=list)
    kept: list[TaskRows] = field(default_factory=list)
    draft_rows: dict[Sequence, int] = field(default_factory=dict)


class Work(NamedTuple):
    """A plan as the parts of one run. Its logits have this order: those of `seqs`, whose next token is due; those after
    the drafted tokens of `drafted`, with the length of each draft; those that tasks want at positions of prompts
    (`kept`). Of `kept`, the others are wanted before the head (`Parts.hidden`). failed: what is in no part, with the
    error of its task."""

    plan: Plan
    parts: Parts
    seqs: list[Sequence]
    kept: Iterable[tuple[Sequence, range, bool]] = ()  # True: before the head
    drafted: Iterable[tuple[Sequence, int]] = ()
    failed: Mapping[Sequence, Exception] = {}


class Runner:
    """One executor, with a host pool to swap to, if any.

    A run has all sequences of a step with the same adapters, except those that a side memory keeps apart. While
    third-party code is in the model, another executor may replace this one (`Executor.beside`).
    """

    def __init__(
        self, executor: Executor, host_pool: HostPool | None, adapters: Variants, sides: Iterable[SideMemory] = ()
    ) -> None:
        self.blocks_swapped_out = self.blocks_swapped_in = 0  # so far
        self._adapters = adapters
        self._conditions = Conditions(executor)
        self.use_memory(executor, host_pool, sides)

    def use_memory(self, executor: Executor, host_pool: HostPool | None, sides: Iterable[SideMemory] = ()) -> None:
        """Run the steps from now on by another executor, over its memory."""
        self._executor = self._bound = executor
        self._conditions.use(executor)
        self.is_plain = True  # no third-party code runs in the model
        self.memory = executor.memory
        self._host_pool, self._sides = host_pool, tuple(sides)
        self._followed = -1  # `Weights.code` when the way to compute the model was chosen
        devices = {self._conditions.device, *self.memory.pool.bytes_per_block_by_device}
        self._cuda_devices = [device for device in devices if device.type == "cuda"]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of the last step

    # -- the model ----------------------------------------------------------------------------------------------

    def check_model(self) -> None:
        """Raises UnsupportedModelError if no step can run: see `Conditions`."""
        self._conditions.check_model()

    def check_caller(self) -> None:
        """Raises UnsupportedModelError if this thread may not add requests: see `Conditions`."""
        self._conditions.check_caller()

    def look(self) -> int:
        """Notice, before a step, changes of the model's modules, weights, hooks and functions. Returns a number that
        changes with modules, hooks and functions, but not with weights."""
        self._bound.weights.look()
        code: int = self._bound.weights.code
        return code

    def follow_model(self) -> None:
        """Choose, after `look`, how the model is computed from now on. `way` changes if that changes.

        K/V of computed tokens stays valid, but a partly computed prompt must begin again. If the model cannot be
        computed with its third-party code, raises UnsupportedModelError and changes nothing.
        """
        code = self._bound.weights.code
        if code == self._followed:
            return
        reason = self._conditions.third_party(self._bound)
        self._executor, self.is_plain = self._bound.beside(reason), reason is None
        self._followed = code

    @property
    def way(self) -> tuple[Executor, bool]:
        """Return the executor in use, and True if neither third-party hooks nor replaced functions run in the model."""
        return self._executor, self.is_plain

    def follow_structure(self) -> None:
        """Follow replaced modules, whose K/V fits the memory. Call `follow_model` next."""
        self._bound.follow_structure()
        self._followed = -1

    @property
    def verifies(self) -> bool:
        """Return True if a step computes several tokens of a sequence in one forward, as verifying drafts needs."""
        return self._executor.verifies

    @property
    def is_packed(self) -> bool:
        return self._executor.is_packed

    is_alone = takes_requests = True
    """False if other processes compute the steps too; if one of these takes the requests."""

    def follow(self, on_pause: Callable[[], Any] | None) -> None:
        """Carry out the steps of the process that takes the requests. on_pause: called when it begins a pause."""

    def when_ranks_fail(self, call: Callable[[str], Any]) -> None:
        """`call` gets the reason, in any thread, when another process fails without which no step can run."""

    def capture_graphs(self) -> None:
        """Capture missing graphs, with the model's present adapters."""
        with self._conditions.modes(self._bound):
            for capture in self.captures():
                capture()

    @property
    def graph_replays(self) -> int:
        """Steps that graphs have computed."""
        return 0 if self._bound.graphs is None else self._bound.graphs.replays

    def captures(self) -> list[Callable[[], None]]:
        """Return calls that capture the missing graphs."""
        graphs = self._bound.graphs
        return [] if graphs is None else graphs.captures(self._adapters)

    # -- before the forward -------------------------------------------------------------------------------------

    @property
    def can_repeat(self) -> bool:
        """Return True if an interrupted forward can be repeated."""
        return True

    def can_prepare_again(self, output: SchedulerOutput) -> bool:
        """Return True if an interrupted `prepare` has lost nothing and can run again."""
        return self.can_repeat and not output.moves_blocks and all(side.can_move_again(output) for side in self._sides)

    def compute_beside(self, side: SideMemory, groups: list[SequenceGroup]) -> list[tuple[SequenceGroup, Exception]]:
        """Have a side memory compute what these groups need before they can start. Returns those that failed."""
        self.check_model()
        with self._conditions.modes(self._executor):
            return side.compute(groups, self._with_adapters)

    def prepare(self, output: SchedulerOutput) -> None:
        """Perform the work before the forward: swaps, block copies, and that of side memories.

        If this raises, the contents of the blocks that were to be moved are undefined.
        """
        self._follow_last_step()
        with self._conditions.modes(self._executor):
            for side in self._sides:
                side.move(output)
            if output.moves_blocks:
                self._move_blocks(output.swap_out, output.swap_in, output.block_copies)
            if output.untouched:  # last, because a block that was freed may have been swapped out or copied above
                self.memory.pool.give_back(output.untouched)
            if output.untouched_on_host and self._host_pool is not None:
                self._host_pool.give_back(output.untouched_on_host)

    def _move_blocks(self, swap_out: Copies, swap_in: Copies, block_copies: Copies) -> None:
        # In this order: what is swapped out frees blocks for what is swapped in, of which a copy may be made at once.
        if self._host_pool is not None:
            self._host_pool.swap_out(swap_out)
            self._host_pool.swap_in(swap_in)
            self.blocks_swapped_out += len(swap_out)
            self.blocks_swapped_in += len(swap_in)
        if block_copies:
            self.memory.pool.copy_blocks(block_copies)

    def _follow_last_step(self) -> None:
        """Order this step after the last one if it runs on another CUDA stream of a device."""
        for device in self._cuda_devices:
            current, last = torch.cuda.current_stream(device), self._streams.get(device)
            if last is not None and last != current:
                current.wait_stream(last)
            self._streams[device] = current

    # -- the forward --------------------------------------------------------------------------------------------

    def run(self, output: SchedulerOutput, sampled: SampledTokens | None = None) -> StepResult:
        """Run the forward of all scheduled tokens. sampled: has the tokens that the host does not know yet."""
        self.check_model()
        if not output.scheduled:
            return StepResult([], None)
        compute = partial(self._run_apart, output, sampled)
        with self._conditions.modes(self._executor):
            return self._run_by_adapters(output.scheduled, compute)

    def _run_by_adapters(self, plan: Plan, compute: Callable[[Plan], StepResult]) -> StepResult:
        """Compute the sequences of each set of adapters in turn, with these adapters switched on."""
        if not self._adapters.seen:
            return compute(plan)
        parts = by_adapters(plan, lambda entry: entry[0].group)
        if len(parts) == 1:
            return self._run_with(next(iter(parts)), partial(compute, plan))
        results, failed = [], []
        for choice, part in parts.items():
            try:
                results.append(self._run_with(choice, partial(compute, part)))
            except LayersChanged:
                raise  # this is not the fault of these adapters
            except Exception as error:  # any other failure counts as these adapters'; other requests continue
                failed.append(([seq for seq, _ in part], error))
        return _joined(plan, results, failed)

    def _run_with(self, choice: Choice, compute: Callable[[], _Result]) -> _Result:
        return self._adapters.run(choice, compute)

    def _with_adapters(self, choice: Any, compute: Callable[[], _Result]) -> _Result:
        return self._run_with(choice, compute) if self._adapters.seen else compute()

    def _run_apart(self, output: SchedulerOutput, sampled: SampledTokens | None, plan: Plan) -> StepResult:
        """Run the sequences of a plan, which have the same adapters; separately those that side memories keep apart."""
        apart = [own for side in self._sides for own in side.apart(plan, self._executor)]
        if not apart:
            return self._run_one(output, sampled, plan)
        kept = {seq for own in apart for seq, _ in own}
        others = [entry for entry in plan if entry[0] not in kept]
        results = [self._run_one(output, sampled, others)] if others else []
        return _joined(plan, [*results, *chain(*(self._run_confined(output, own) for own in apart))], [])

    def _run_confined(self, output: SchedulerOutput, plan: Plan) -> list[StepResult]:
        """Run the plan in one forward. If that fails, run each sequence alone, so that only the faulty ones fail."""
        try:
            return [self._run_one(output, None, plan, drafts={})]
        except LayersChanged:
            raise
        except Exception as error:  # of these sequences; other requests continue
            if len(plan) == 1:
                return [StepResult([], None, [([plan[0][0]], error)])]
        return [result for entry in plan for result in self._run_confined(output, [entry])]

    def _run_one(
        self, output: SchedulerOutput, sampled: SampledTokens | None, plan: Plan, drafts: Drafts | None = None
    ) -> StepResult:
        work = self._work(output, sampled, plan, output.drafts if drafts is None else drafts)
        if work.failed and not work.plan:
            return _result(work, None, {})
        return _result(work, *self._executor.run(work.parts))

    def _work(self, output: SchedulerOutput, sampled: SampledTokens | None, plan: Plan, drafts: Drafts) -> Work:
        splits, tasks = self._executor.splits_prompts, output.tasks
        # Most steps: no group has a task.
        has_task = bool(tasks) and any(seq.group in tasks for seq, _ in plan)
        work = _decodes(plan, sampled) if splits and not (drafts or has_task) else None
        work = work or _any_work(plan, sampled, drafts, splits=splits)
        if self._adapters.seen:
            work.parts.adapters = self._adapters.describe(plan[0][0].group.adapters)
        for side in self._sides:
            side.extend(work.parts, work.plan, output)
        return work

    # -- the end ------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Between steps: the engine pauses."""

    def check_integrity(self) -> None:
        """Raises AssertionError if other processes compute the steps too, and have other ones."""

    def wait(self) -> None:
        """Wait until the devices have finished all steps."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait for the device, whose step may still write to the memory, and drop what the executor and side memories
        keep, and the host memory for swapped blocks."""
        self.wait()
        self._host_pool = None  # no sequence is in it
        self._bound.close()
        for side in self._sides:
            side.close()


def _decodes(plan: Plan, sampled: SampledTokens | None) -> Work | None:
    """Return the work of a pure decode step. None if it is another step, or if the host knows only some of the
    tokens."""
    seqs = [seq for seq, count in plan if count == 1]
    if len(seqs) < len(plan):
        return None
    missing = [len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens for seq in seqs]
    num_late = sum([seq.num_pending for seq in seqs])
    if missing.count(1) < len(seqs) or num_late not in (0, len(seqs)):
        return None
    ids, starts = [seq.seq_id for seq in seqs], [seq.num_computed_tokens for seq in seqs]
    if not num_late:
        return Work(plan, Parts(ids, starts, [seq.token_ids[-1] for seq in seqs]), seqs)
    assert sampled is not None
    where = None if seqs == sampled.seqs else [(place, sampled.rows[seq]) for place, seq in enumerate(seqs)]
    return Work(plan, Parts(ids, starts, [0] * len(seqs), late=(sampled.tokens, where)), seqs)


def _any_work(plan: Plan, sampled: SampledTokens | None, drafts: Drafts, *, splits: bool = True) -> Work:
    tokens: list[int] = []
    kept: Plan = []
    seqs, rows, starts, counts = [], [], [], []
    late: list[tuple[int, int]] = []  # places in `tokens`, rows of `sampled`
    wanted: list[tuple[Sequence, range, bool]] = []
    places: tuple[list[int], list[int]] = [], []  # in `tokens`, of the rows in `wanted`: logits, and hidden ones
    draft_places: list[int] = []  # in `tokens`
    failed: dict[Sequence, Exception] = {}
    for seq, count in plan:
        first, known = seq.num_computed_tokens, seq.token_ids
        end = first + count
        if not splits and first < seq.group.whole:
            if end < seq.group.whole:
                continue  # computed together with the others, when the last of them is due
            first, count = 0, end
        own = range(0) if (task := seq.group.task) is None else seq.group.wanted(first, end)
        if isinstance(own, Exception):  # of this task; other requests continue
            failed[seq] = own
            continue
        kept.append((seq, count))
        starts.append(first)
        if task is not None and own:
            is_hidden = task.keeps == "hidden"
            wanted.append((seq, own, is_hidden))
            places[is_hidden].extend(len(tokens) - first + position for position in own)
        if end > len(known):
            assert sampled is not None
            tokens += known[first:]
            late.append((len(tokens), sampled.rows[seq]))
            tokens.append(0)
        else:
            tokens += known[first:end]
        # `seq.num_tokens` without the call, hundreds of times in a step.
        if end == len(known) + seq.num_pending and (task is None or task.generates):
            seqs.append(seq)
            rows.append(len(tokens) - 1)
        if drafts and (draft := drafts.get(seq)):
            draft_places += range(len(tokens), len(tokens) + len(draft))
            tokens += draft
            count += len(draft)
        counts.append(count)
    parts = Parts(
        [seq.seq_id for seq, _ in kept],
        starts,
        tokens,
        counts,
        [seq.group.whole for seq, _ in kept],
        # A pure decode step needs the logits of every token: no index, no copy of the last outputs.
        None if len(rows) == len(tokens) and not places[False] else rows + draft_places + places[False],
        places[True],
        late=(sampled.tokens, late) if sampled is not None and late else None,
    )
    drafted = [(seq, len(drafts[seq])) for seq, _ in kept if seq in drafts] if drafts else ()
    return Work(kept, parts, seqs, wanted, drafted, failed)


def _result(work: Work, logits: torch.Tensor | None, failed: Mapping[int, Exception]) -> StepResult:
    """Split the logits [num_rows, vocab] of the parts that have not failed."""
    lost = {**work.failed, **{work.plan[index][0]: error for index, error in failed.items()}}
    seqs = [seq for seq in work.seqs if seq not in lost] if lost else work.seqs
    draft_rows, stop = {}, len(seqs)
    for seq, count in work.drafted:
        if seq not in lost:
            draft_rows[seq] = stop
            stop += count
    kept, starts, rows = [], [stop, 0], (logits, work.parts.hidden_rows)
    for seq, own, is_hidden in work.kept:
        if seq not in lost and (found := rows[is_hidden]) is not None:
            start = starts[is_hidden]
            starts[is_hidden] += len(own)
            kept.append(TaskRows(seq, own.start, found[start : start + len(own)]))
    errors = [([seq], error) for seq, error in lost.items()]
    return StepResult(seqs, logits[:stop] if seqs and logits is not None else None, errors, kept, draft_rows)


def _joined(plan: Plan, results: list[StepResult], failed: list[tuple[list[Sequence], Exception]]) -> StepResult:
    """Merge the results of parts of the plan, in the order of the plan."""
    parts = [(result, result.logits) for result in results if result.logits is not None]
    kept = [part for result in results for part in result.kept]
    failed = [*failed, *(each for result in results for each in result.failed)]
    if not parts:
        return StepResult([], None, failed, kept)
    starts = list(accumulate((len(own) for _, own in parts), initial=0))  # of the rows of each part
    row_of = {seq: start + row for start, (part, _) in zip(starts, parts) for row, seq in enumerate(part.seqs)}
    seqs = [seq for seq, _ in plan if seq in row_of]
    order = [row_of[seq] for seq in seqs]
    draft_rows: dict[Sequence, int] = {}
    for start, (part, own) in zip(starts, parts):
        draft_rows |= {seq: row - len(part.seqs) + len(order) for seq, row in part.draft_rows.items()}
        order += range(start + len(part.seqs), start + len(own))
    joined = torch.cat([own for _, own in parts])
    in_order = joined[to_device(np.array(order, dtype=np.int64), joined.device)]
    return StepResult(seqs, in_order, failed, kept, draft_rows)
