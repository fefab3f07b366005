"""Runner: executes a SchedulerOutput on the device. The only module that turns sequences into tensors.

Knows block tables and tokens; never queues, requests or sampling.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch

from hf_paged.annotations import Model
from hf_paged.cache.block_manager import BlockManager
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.swap import HostPool
from hf_paged.config import SchedulerConfig
from hf_paged.errors import LayersChanged, UnsupportedModelError
from hf_paged.generation.engine.message import Forward, StepMessage
from hf_paged.generation.engine.tables import Drafts, EncoderWrite, SchedulerOutput
from hf_paged.generation.requests.batch import SampledTokens
from hf_paged.generation.requests.sequence import Plan, Sequence, SequenceGroup
from hf_paged.kernels.metadata import DecodeArrays, StepArrays, step_arrays, to_device
from hf_paged.model.adapters import AdapterChoice, Adapters, without_adapters
from hf_paged.model.devices import device_of
from hf_paged.model.encoder_rows import EncoderPart, EncoderRows, EngineModel
from hf_paged.model.foreign import METHODS, bare_copy, foreign_code
from hf_paged.model.graphs import MAX_VARIANTS, GraphedSteps
from hf_paged.model.media import Media, Unit, check_heard, reach_of_step, step_arguments
from hf_paged.model.media_store import MediaStore
from hf_paged.model.packed import PackedModel
from hf_paged.model.row_trial import bind_rows
from hf_paged.model.rows import Part, RowModel
from hf_paged.model.state import state_of
from hf_paged.model.support import draws_dropout, drops_cache
from hf_paged.model.warmup import warm_up


class PromptLogits(NamedTuple):
    """logits [num_rows, vocab] after the prompt's tokens at positions `first`, `first` + 1 and so on, but the last."""

    seq: Sequence
    first: int
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """seqs: the sequences whose next token is due, in the order of the plan; logits [len(seqs), vocab] of them.

    Further rows of logits are those after drafted tokens: `draft_rows` has the first row of each drafted sequence.
    prompts: logits within the prompts of groups that want them. failed: sequences whose forward raised while that of
    others did not, with the error. encoders: what has been written of the encoders' states.
    """

    seqs: list[Sequence]
    logits: torch.Tensor | None
    failed: list[tuple[list[Sequence], Exception]] = field(default_factory=list)
    prompts: list[PromptLogits] = field(default_factory=list)
    encoders: list[EncoderWrite] = field(default_factory=list)
    draft_rows: dict[Sequence, int] = field(default_factory=dict)


class _LateTokens:
    """Tokens of a step that only the device knows.

    where: pairs (place in the step, index in `sampled`) of tokens; None: the step has all of them, in their order.
    """

    def __init__(self, sampled: torch.Tensor, where: list[tuple[int, int]] | None) -> None:
        self._sampled = sampled
        self._where = None if where is None else np.array(where, dtype=np.int64).T.copy()

    def __call__(self, ids: torch.Tensor) -> None:
        """Write them into ids int64 [at least num_tokens] without waiting for the device."""
        if self._where is None:
            ids[: len(self._sampled)].copy_(self._sampled)
        else:
            places, rows = to_device(self._where, ids.device)
            ids.index_copy_(0, places, self._sampled.index_select(0, rows))


class Packed(NamedTuple):
    """Sequences as one forward.

    tokens int64 [num_tokens]. step: their positions, slots and block tables. seqs: the sequences whose next token is
    due, whose logits come first. wanted int64 [num_rows]: the tokens whose logits are wanted; None for all, in a pure
    decode step. inner: sequences with logits that are wanted within their prompts, with the positions. late: the tokens
    that the host does not know yet. drafted: sequences with drafted tokens, and how many, whose logits come second.
    """

    tokens: np.ndarray
    step: StepArrays
    seqs: list[Sequence]
    wanted: np.ndarray | None = None
    inner: Iterable[tuple[Sequence, range]] = ()
    late: _LateTokens | None = None
    drafted: Iterable[tuple[Sequence, int]] = ()


class Runner:
    """One model over one PagedMemory, with a host pool to swap to, if any.

    A PackedModel computes all sequences of a step that have the same adapters in one forward, a RowModel in as few as
    it can, and an EncoderRows those of an encoder-decoder model. `graphs` replay the steps that they can. While
    third-party code runs in the model, a RowModel replaces the PackedModel. Every thread computes under the autocast of
    the one that has made the runner. one_order: what forwards run in so that the sums of a token have the same order
    whatever else is in the step; None: they need not.
    """

    def __init__(
        self,
        model: EngineModel,
        memory: PagedMemory,
        host_pool: HostPool | None,
        adapters: Adapters,
        graphs: GraphedSteps | None = None,
        one_order: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.blocks_swapped_out = self.blocks_swapped_in = 0  # so far
        self._media, self._has_media = MediaStore(), False
        self._num_encoded = 0  # inputs of an encoder-decoder model
        self._adapters = adapters
        self._autocast = _autocast(device_of(model.model))
        self._has_one_dtype = len({each.dtype for each in model.model.parameters() if each.is_floating_point()}) == 1
        self.use_memory(model, memory, host_pool, graphs, one_order)

    def use_memory(
        self,
        model: EngineModel,
        memory: PagedMemory,
        host_pool: HostPool | None,
        graphs: GraphedSteps | None = None,
        one_order: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Run the steps from now on over another memory."""
        self._model: EngineModel = model
        self._bound = model
        self._rows = model if isinstance(model, RowModel) else None
        self._foreign = foreign_code(model.model)
        self.is_plain = True  # no third-party code runs in the model
        self.memory = memory
        self._host_pool = host_pool
        self._decode_arrays = DecodeArrays(memory.block_size)
        self.graphs = graphs
        self._one_order = one_order
        self._weights = state_of(model.model).weights
        self._followed = -1  # `Weights.code` when the way to compute the model was chosen
        self._device = device_of(model.model)
        devices = {self._device, *memory.pool.bytes_per_block_by_device}
        self._cuda_devices = [device for device in devices if device.type == "cuda"]
        self._made_for = _dtype_and_device(model.model)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # of the last step

    def _modes(self) -> AbstractContextManager[None]:
        """Return the context of a step: the runner's autocast, whatever the thread's is, and no gradients; in inference
        mode, which saves a twentieth of a step on a CPU, if the model supports it for certain.

        A module of a user's class, or an attention of its own, may keep a tensor of the step, which a later training
        forward could not save for backward; weights of classes of their own may refuse views.
        """
        # (`inference_mode(False)` would turn gradients on.)
        # What a graph computes was captured in inference mode, so steps beside it write to its tensors there.
        keeps_none = self._foreign.has_library_modules or self.graphs is not None
        supported = self.is_packed and self._weights.are_plain and keeps_none
        gradients = torch.inference_mode() if supported else torch.no_grad()
        if _autocast(self._device) == self._autocast:
            return gradients
        return _both(gradients, torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None))

    def check_model(self) -> None:
        """Raises UnsupportedModelError if the model's dtype or device is no longer that of the K/V in memory, if it
        would keep none, if others have replaced its part in generation, and if its results are random."""
        model = self._model.model
        if model.training and drops_cache(model):
            raise UnsupportedModelError(
                "gradient checkpointing is on in training mode, where a model may keep no K/V; call model.eval() first"
            )
        if model.training and draws_dropout(model):
            raise UnsupportedModelError(
                "the model is in training mode, where dropout makes results random; call model.eval() first"
            )
        if any(name in vars(model) for name in METHODS):
            self._foreign.refuse_choice()
        now = _dtype_and_device(model)
        if now != self._made_for:
            (dtype, device), (new_dtype, new_device) = self._made_for, now
            raise UnsupportedModelError(
                f"this engine was made for a model in {dtype} on {device}, now in {new_dtype} on {new_device}; "
                "change the model back, or close the engine and make a new one"
            )

    def check_caller(self) -> None:
        """Raises UnsupportedModelError if this thread adds a request under another autocast than the runner's, of which
        K/V, prefixes and features are. (To the dtype of all weights, it is as if it were off.)"""
        same = (None, self._made_for[0]) if self._has_one_dtype else (None,)
        own, found = (None if each in same else each for each in (self._autocast, _autocast(self._device)))
        if own != found:
            names = [f"autocast to {each}" if each else "no autocast" for each in (found, own)]
            raise UnsupportedModelError(
                f"{names[0]} is on, and this engine was made and computes with {names[1]}; add its requests so, or "
                "make an engine under this autocast"
            )

    def look(self) -> int:
        """Before a step: take note of changes of the model's modules, weights, hooks and functions. Returns a number
        that is another when modules, hooks or functions have changed."""
        self._weights.look()
        return self._weights.code

    def follow_model(self) -> None:
        """After `look`: choose how the model is computed from now on; `way` is another if that has changed.

        K/V of computed tokens stays valid, but a prompt that is computed in part must be begun again. Raises
        UnsupportedModelError, and nothing has changed, if the model with the third-party code cannot be computed.
        """
        code = self._weights.code
        if code == self._followed:
            return
        reason, model = self._foreign.look(), self._bound
        if reason is not None and self._one_order is not None:
            raise UnsupportedModelError(f"batch_invariant=True: {reason}, which may depend on the batch; leave it out")
        self._foreign.refuse_choice()
        if isinstance(model, EncoderRows):
            model.is_alone = reason is not None
        elif reason is not None:
            model = self._rows = self._rows or self._make_rows(reason)
        if self._rows is not None:
            self._rows.is_incremental = self._rows.depends_on_split or reason is not None
            self._rows.is_alone = reason is not None
        self._model, self.is_plain = model, reason is None
        self._followed = code

    @property
    def way(self) -> tuple[EngineModel, bool]:
        """Return the executor in use, and True if neither third-party hooks nor replaced functions run in the model."""
        return self._model, self.is_plain

    def follow_structure(self) -> None:
        """The model has other modules, whose K/V fits the memory. `follow_model` comes next."""
        if isinstance(self._bound, PackedModel):
            self._bound.follow_structure()
            self._rows, self._followed = None, -1

    def _make_rows(self, reason: str) -> RowModel:
        model = self._bound.model
        if self.graphs is not None and self.graphs.required:
            raise UnsupportedModelError(f"cuda_graphs=True: {reason}; leave it out, and such steps run without graphs")
        with without_adapters(model):  # another engine on it may be in a step, with those of its requests switched on
            rows = bind_rows(model, self.memory, bare_copy(model) if self._foreign.inside else None)
        return rows

    @property
    def verifies(self) -> bool:
        """Return True if a step computes several tokens of a sequence in one forward, as verifying drafts needs."""
        model = self._model
        return isinstance(model, PackedModel) or (isinstance(model, RowModel) and not model.is_incremental)

    @property
    def is_packed(self) -> bool:
        return isinstance(self._model, PackedModel)

    def when_ranks_fail(self, call: Callable[[str], Any]) -> None:
        """`call` gets the reason, in any thread, when another process fails without which no step can run."""

    def warm_up(self, limits: SchedulerConfig, wanted: bool | None) -> None:
        """Before the first step: see `model.warmup`."""
        warm_up(self._bound, self._captures(), limits, wanted)

    def capture_graphs(self) -> None:
        """Capture the graphs that there are not, with the adapters of now."""
        with self._modes():
            for capture in self._captures():
                capture()

    def _captures(self) -> list[Callable[[], None]]:
        """Return functions that capture one graph each: every shape, for up to `MAX_VARIANTS` choices of adapters."""
        graphs = self.graphs
        if graphs is None:
            return []
        if not self._adapters.seen:
            return [partial(graphs.capture, shape) for shape in graphs.shapes]
        return [
            partial(self._adapters.run, choice, partial(graphs.capture, shape, self._adapters.describe(choice)))
            # The active adapters come first, so that the limit never leaves them out.
            for choice in self._adapters.alone()[:MAX_VARIANTS]
            for shape in graphs.shapes
        ]

    @property
    def can_repeat(self) -> bool:
        """Return True if an interrupted forward can be repeated."""
        return True

    def lost(self, groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """After an interrupted `run`: those of the running groups whose states it has changed or lost."""
        model = self._model
        if not isinstance(model, RowModel):
            return []
        least = math.inf if model.is_incremental else 0  # tokens that have a state, if that is less than `whole`
        return [
            group
            for group in groups
            if model.lost(
                (seq.seq_id, seq.num_computed_tokens)
                for seq in group.live
                if seq.parent is None and seq.num_computed_tokens >= min(least, group.whole)
            )
        ]

    def can_prepare_again(self, output: SchedulerOutput) -> bool:
        """Return True if an interrupted `prepare` has lost nothing and can run again."""
        keeps_states = isinstance(self._model, RowModel) and self._model.has_states
        return self.can_repeat and not output.moves_blocks and not (keeps_states and (output.forks or output.states))

    def prepare(self, output: SchedulerOutput) -> None:
        """Perform the work before the forward: swaps, block copies, and forks and ends of sequences that have states.

        If this raises, the contents of the blocks that were to be moved are undefined.
        """
        self._follow_last_step()
        with self._modes():
            if isinstance(self._model, RowModel):
                self._follow(self._model, output)
            if output.moves_blocks:
                self._move_blocks(output)
            if output.untouched:
                self.memory.pool.give_back(output.untouched)
            if output.untouched_on_host and self._host_pool is not None:
                self._host_pool.give_back(output.untouched_on_host)

    def _move_blocks(self, step: SchedulerOutput | StepMessage) -> None:
        if self._host_pool is not None:
            self._host_pool.swap_out(step.swap_out)
            self._host_pool.swap_in(step.swap_in)
            self.blocks_swapped_out += len(step.swap_out)
            self.blocks_swapped_in += len(step.swap_in)
        if step.block_copies:
            self.memory.pool.copy_blocks(step.block_copies)

    def carry_out(self, step: StepMessage) -> None:
        """Do what the driver says: move blocks and write K/V. The driver alone needs the logits."""
        self._follow_last_step()
        with self._modes():
            self._move_blocks(step)
            for forward in step.forwards:
                compute = partial(self._compute, forward)
                if forward.adapters is None:
                    compute()
                else:
                    self._adapters.run(self._adapters.described(forward.adapters), compute)

    def run(self, output: SchedulerOutput, sampled: SampledTokens | None = None) -> StepResult:
        """The forward of all scheduled tokens; `sampled` has those that the host does not know yet (never with a
        RowModel)."""
        self.check_model()
        compute: Callable[[Plan], StepResult]
        if isinstance(self._model, RowModel):
            compute = partial(self._run_rows, self._model, output.drafts)
            if self._has_media:
                compute = partial(self._run_rows_and_media, self._model, compute)
        elif isinstance(self._model, EncoderRows):
            compute = partial(self._run_beside_encoders, self._model, output.encoders)
        else:
            compute = partial(self._run_packed, sampled, output.drafts)
        if not output.scheduled:
            return StepResult([], None)
        with self._modes():
            return self._run_by_adapters(output.scheduled, compute)

    def _follow_last_step(self) -> None:
        """Order this step after the last one if it runs on another CUDA stream of a device."""
        for device in self._cuda_devices:
            current, last = torch.cuda.current_stream(device), self._streams.get(device)
            if last is not None and last != current:
                current.wait_stream(last)
            self._streams[device] = current

    def pause(self) -> None:
        """Between steps: the engine pauses."""

    def check_integrity(self) -> None:
        """Raises AssertionError if something else than this object computes the steps too, and has got others."""

    def wait(self) -> None:
        """Wait until the devices have finished all steps."""
        for stream in self._streams.values():
            stream.synchronize()

    def close(self) -> None:
        """Wait for the device, whose step may still write to the memory, and drop graphs, recurrent states, features of
        media and the host memory for swapped blocks."""
        self.wait()
        self._media.clear()
        self._host_pool = None  # no sequence is in it
        if self.graphs is not None:
            self.graphs.close()
        if self._rows is not None:
            self._rows.states.clear()
        if isinstance(self._bound, EncoderRows):
            self._bound.clear()

    def _run_by_adapters(self, plan: Plan, compute: Callable[[Plan], StepResult]) -> StepResult:
        """Compute the sequences of each set of adapters in turn, with these adapters switched on."""
        if not self._adapters.seen:
            return compute(plan)
        parts = self._parts(plan)
        if len(parts) == 1:
            return self._run_with(next(iter(parts)), partial(compute, plan))
        results, failed = [], []
        for choice, part in parts.items():
            try:
                results.append(self._run_with(choice, partial(compute, part)))
            except LayersChanged:
                raise  # nothing is wrong with these adapters
            except Exception as error:  # any failure is attributed to these adapters; other requests continue
                failed.append(([seq for seq, _ in part], error))
        return _joined(plan, results, failed)

    def _parts(self, plan: Plan) -> dict[AdapterChoice, Plan]:
        """The sequences of each set of adapters, in the order in which they are computed."""
        parts: dict[AdapterChoice, Plan] = {}
        for seq, count in plan:
            parts.setdefault(seq.group.adapters, []).append((seq, count))  # type: ignore[arg-type]
        return parts

    def _run_with(self, choice: AdapterChoice, compute: Callable[[], StepResult]) -> StepResult:
        return self._adapters.run(choice, compute)

    def _run_packed(self, sampled: SampledTokens | None, drafts: Drafts, plan: Plan) -> StepResult:
        """One forward of sequences with the same adapters, and one of those that compute prompts with media."""
        own = [(seq, count) for seq, count in plan if _reads_media(seq)] if self._has_media else []
        if own:
            others = [(seq, count) for seq, count in plan if not _reads_media(seq)]
            results = [self._run_one(sampled, drafts, others)] if others else []
            return _joined(plan, [*results, *self._run_media(own)], [])
        return self._run_one(sampled, drafts, plan)

    def _run_media(self, plan: Plan) -> list[StepResult]:
        """One forward for those that give the same types of tokens. If it fails, one for each sequence, so that only
        those fail which cause it."""
        alike: dict[tuple[str, ...], Plan] = {}
        for seq, count in plan:
            alike.setdefault(tuple(seq.group.media.encoded.types), []).append((seq, count))  # type: ignore[union-attr]
        if len(alike) > 1:
            return [result for own in alike.values() for result in self._run_media(own)]
        try:
            return [self._run_prompts(plan)]
        except LayersChanged:
            raise
        except Exception as error:
            if isinstance(error, UnsupportedModelError):
                error = UnsupportedModelError(
                    f"with images, videos or sound: {error}; use model.generate(..., cache_implementation='paged')"
                )
            if len(plan) == 1:
                return [StepResult([], None, [([plan[0][0]], error)])]
        return [result for entry in plan for result in self._run_media([entry])]

    def _run_prompts(self, plan: Plan) -> StepResult:
        packed = self._pack_any(plan, None, {})
        parts = [seq.group.media.part(seq.num_computed_tokens, seq.num_computed_tokens + n) for seq, n in plan]  # type: ignore[union-attr]
        packed = packed._replace(step=replace(packed.step, reach=reach_of_step(parts)))
        beside = step_arguments(parts)
        result = _result(packed, self._compute(self._forward_of(packed, plan), beside=beside))
        check_heard(self._model.model, beside)
        return result

    def _run_one(self, sampled: SampledTokens | None, drafts: Drafts, plan: Plan) -> StepResult:
        forward, packed = self._pack(sampled, drafts, plan)
        return _result(packed, self._compute(forward, packed.late))

    def _pack(self, sampled: SampledTokens | None, drafts: Drafts, plan: Plan) -> tuple[Forward, Packed]:
        packed = (None if drafts else self._pack_decodes(plan, sampled)) or self._pack_any(plan, sampled, drafts)
        if self._has_media:
            packed = packed._replace(step=_moved(packed.step, plan))
        return self._forward_of(packed, plan), packed

    def _forward_of(self, packed: Packed, plan: Plan) -> Forward:
        adapters = self._adapters.describe(plan[0][0].group.adapters) if self._adapters.seen else None  # type: ignore[arg-type]
        return Forward(packed.tokens, packed.step, packed.wanted, adapters)

    def _pack_decodes(self, plan: Plan, sampled: SampledTokens | None) -> Packed | None:
        """A step of the last token of each sequence; None if it is anything else, or the host knows some of the tokens
        only."""
        seqs = [seq for seq, count in plan if count == 1]
        if len(seqs) < len(plan):
            return None
        missing = [len(seq.token_ids) + seq.num_pending - seq.num_computed_tokens for seq in seqs]
        num_late = sum([seq.num_pending for seq in seqs])
        if missing.count(1) < len(seqs) or num_late not in (0, len(seqs)):
            return None
        manager = self.memory.manager
        step = self._decode_arrays.step(
            seqs,
            [seq.num_computed_tokens for seq in seqs],
            [partial(_block_table, manager, group) for group in range(len(manager.groups))],
            manager.rewrites,
            [group.kind.bounds for group in manager.groups],
        )
        if not num_late:
            return Packed(np.array([seq.token_ids[-1] for seq in seqs], dtype=np.int64), step, seqs)
        assert sampled is not None
        where = None if seqs == sampled.seqs else [(place, sampled.rows[seq]) for place, seq in enumerate(seqs)]
        late = _LateTokens(sampled.tokens, where)
        return Packed(np.zeros(len(seqs), dtype=np.int64), step, seqs, late=late)

    def _pack_any(self, plan: Plan, sampled: SampledTokens | None, drafts: Drafts) -> Packed:
        tokens: list[int] = []
        seqs, rows, counts = [], [], []
        late: list[tuple[int, int]] = []  # places in `tokens`, rows of `sampled`
        inner: list[tuple[Sequence, range]] = []
        places: list[int] = []  # in `tokens`, of the positions in `inner`
        draft_places: list[int] = []  # in `tokens`
        for seq, count in plan:
            first, known = seq.num_computed_tokens, seq.token_ids
            end = first + count
            if seq.group.scored_from is not None:
                own = _inner(seq, first, end)
                inner.append((seq, own))
                places += [len(tokens) - first + position for position in own]
            if end > len(known):
                assert sampled is not None
                tokens += known[first:]
                late.append((len(tokens), sampled.rows[seq]))
                tokens.append(0)
            else:
                tokens += known[first:end]
            if end == len(known) + seq.num_pending:  # `seq.num_tokens`, hundreds of times in a step
                seqs.append(seq)
                rows.append(len(tokens) - 1)
            if drafts and (draft := drafts.get(seq)):
                draft_places += range(len(tokens), len(tokens) + len(draft))
                tokens += draft
                count += len(draft)
            counts.append(count)
        manager = self.memory.manager
        step = step_arrays(
            [[_block_table(manager, group, seq) for seq, _ in plan] for group in range(len(manager.groups))],
            [seq.num_computed_tokens + count for (seq, _), count in zip(plan, counts)],
            counts,
            self.memory.block_size,
        )
        return Packed(
            np.array(tokens, dtype=np.int64),
            step,
            seqs,
            # A pure decode step needs the logits of every token: no index, no copy of the hidden states.
            None if len(rows) == len(tokens) else np.array(rows + draft_places + places, dtype=np.int64),
            inner,
            _LateTokens(sampled.tokens, late) if sampled is not None and late else None,
            [(seq, len(drafts[seq])) for seq, _ in plan if seq in drafts] if drafts else (),
        )

    def _compute(
        self, forward: Forward, late: _LateTokens | None = None, beside: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """The logits [num_rows, vocab] of the tokens that are wanted. beside: see `PackedModel.forward`."""
        assert isinstance(self._model, PackedModel)
        if self.graphs is not None and beside is None:
            replayed = self.graphs.forward(forward.tokens, forward.step, forward.adapters, late, forward.wanted)
            if replayed is not None:
                return replayed
        ids, positions = (to_device(x, self._device) for x in (forward.tokens, forward.step.positions))
        if late is not None:
            late(ids)
        wanted = None if forward.wanted is None else to_device(forward.wanted, self._device)
        if self._one_order is None:
            return self._model.forward(ids, positions, forward.step.metadata(self._device), wanted, beside)
        with self._one_order:
            metadata = forward.step.metadata(self._device, one_order=True)
            return self._model.forward(ids, positions, metadata, wanted, beside)

    def _follow(self, model: RowModel, output: SchedulerOutput) -> None:
        moves = output.states
        late = {seq_id for _, seq_id, _ in moves.restored}  # sequences that begin with a checkpoint, and their forks
        late_forks = []
        for parent_id, child_id in output.forks:
            if parent_id in late:
                late.add(child_id)
                late_forks.append((parent_id, child_id))
            else:
                model.states.fork(parent_id, child_id)
        needed = {number for number, _, _ in moves.restored}
        moves.lost += model.keep(moves.kept, needed, clears=moves.clears)
        moves.clears = False  # done: a later step repeats what is left, if this one is broken off
        moves.kept.clear()
        for seq_id in output.finished_seq_ids:
            model.free(seq_id)
        for group, way in output.preempted:
            for seq in group.sequences:
                if way == "recompute":
                    model.free(seq.seq_id)
                else:
                    model.states.to_host(seq.seq_id, seq.num_computed_tokens)
        for restored in moves.restored:
            model.states.restore(*restored)
        for parent_id, child_id in late_forks:
            model.states.fork(parent_id, child_id)
        for number in moves.dropped:
            model.states.drop(number)

    def goes_back(self, seq: Sequence, num_tokens: int, *, is_right: bool) -> bool:
        """After a step with a draft of `seq`: whether its state is again what it was before, after `num_tokens` tokens,
        because the draft was not right."""
        model = self._model
        if not isinstance(model, RowModel) or not model.has_states:
            return False
        if is_right:
            model.let_go(seq.seq_id)
        else:
            model.go_back(seq.seq_id, num_tokens)
        return not is_right

    def _run_rows(self, model: RowModel, drafts: Drafts, plan: Plan) -> StepResult:
        due: dict[Sequence, torch.Tensor] = {}  # logits [vocab] after the last piece
        drafted: dict[Sequence, list[torch.Tensor]] = {seq: [] for seq, _ in plan if seq in drafts}  # after each token
        if model.has_states:
            for seq in drafted:
                model.hold(seq.seq_id, seq.num_computed_tokens)
        prompts = []
        size: PieceSize = "one" if self._one_order is not None else "prompt" if model.is_incremental else "any"
        pieces = [(seq, _pieces(seq, count + len(drafts.get(seq, ())), size)) for seq, count in plan]
        while pieces := [(seq, own) for seq, own in pieces if own]:
            parts, inners = [], []
            for seq, own in pieces:
                start, stop = own.pop(0)
                inner = _inner(seq, start, stop)
                if seq in drafted:
                    tokens = [*seq.token_ids[start:], *drafts[seq][max(start - len(seq.token_ids), 0) :]]
                    part = Part(seq.seq_id, tokens[: stop - start], start, stop - start)
                else:
                    part = Part(seq.seq_id, seq.token_ids[start:stop], start, stop - inner.start if inner else 1)
                if (media := cast("Media | None", seq.group.media)) is not None:
                    shown = media.part(start, stop) if start < seq.num_prompt_tokens else None
                    part = part._replace(media=shown, delta=media.delta)
                parts.append(part)
                inners.append(inner)
            with self._one_order or nullcontext():
                computed = model.forward(parts)
            for (seq, _), inner, logits in zip(pieces, inners, computed):
                if inner:
                    prompts.append(PromptLogits(seq, inner.start, logits[: len(inner)]))
                if seq in drafted:
                    drafted[seq].extend(logits)
                else:
                    due[seq] = logits[-1]
        due |= {seq: rows[0] for seq, rows in drafted.items()}
        seqs = [seq for seq, count in plan if seq.num_computed_tokens + count == seq.num_tokens]
        rows = [due[seq] for seq in seqs]
        draft_rows = {}
        for seq, after in drafted.items():
            draft_rows[seq] = len(rows)
            rows += after[1:]
        return StepResult(seqs, torch.stack(rows) if rows else None, prompts=prompts, draft_rows=draft_rows)

    # -- images, videos and audio -------------------------------------------------------------------------------

    def encode_media(self, groups: list[SequenceGroup], budget: int) -> list[tuple[SequenceGroup, Exception]]:
        """Run the encoders of the media of these groups, in their order, for about as many placeholders as `budget`
        says, but for one image at least. Returns the groups that failed; others are `encoded`, or resume later."""
        self.check_model()
        is_first, self._has_media = not self._has_media, True
        parts: dict[Any, list[tuple[SequenceGroup, Media]]] = {}
        for group in groups:
            assert isinstance(group.media, Media)
            parts.setdefault(group.adapters, []).append((group, group.media))
        spent = 0
        failed: list[tuple[SequenceGroup, Exception]] = []
        with self._modes():
            for choice, own in parts.items():
                try:
                    spent, errors = self._encode_with(choice, [media for _, media in own], budget, spent, is_first)
                except LayersChanged:
                    raise
                except Exception as error:  # of these adapters, or media; other requests continue
                    failed += [(group, error) for group, _ in own]
                    continue
                for group, media in own:
                    found = [errors[unit] for unit in media.units if unit in errors]
                    try:
                        if not found and not any(unit.features is None for unit in media.units):
                            prompt = group.live[0].token_ids[: group.num_prompt_tokens]  # it may have an answer already
                            media.encoded = self._media.complete(self._model.model, prompt, media)
                    except Exception as error:  # of these media
                        found.append(error)
                    failed += [(group, error) for error in found[:1]]
        return failed

    def _encode_with(
        self, choice: Any, media: list[Media], budget: int, spent: int, is_first: bool
    ) -> tuple[int, dict[Unit, Exception]]:
        computed_with, alone = (self._weights.epoch, choice), self._one_order is not None
        encode = partial(self._media.encode, self._model.model, media, computed_with, budget, spent, alone=alone)
        result: tuple[int, dict[Unit, Exception]] = self._with_adapters(choice, encode)
        if is_first:  # transformers may leave hooks in modules at the first call, which change no result
            now = self._weights.look(), choice
            self._media.move(computed_with, now)
            for each in media:
                each.encoded_with = now
        return result

    def _run_rows_and_media(self, model: RowModel, compute: Callable[[Plan], StepResult], plan: Plan) -> StepResult:
        """Each prompt with media is computed by itself, so that only those fail which cause it."""
        own = [entry for entry in plan if _reads_media(entry[0])]
        others = [entry for entry in plan if not _reads_media(entry[0])]
        results = [compute(others)] if others else []
        failed: list[tuple[list[Sequence], Exception]] = []
        for entry in own:
            try:
                results.append(self._run_rows(model, {}, [entry]))
            except LayersChanged:
                raise
            except Exception as error:  # of these media; other requests continue
                failed.append(([entry[0]], error))
        return _joined(plan, results, failed)

    # -- encoder-decoder models ---------------------------------------------------------------------------------

    def encode(self, groups: list[SequenceGroup]) -> list[tuple[SequenceGroup, int | Exception]]:
        """Run the encoders of these groups: how many states each has, or the error it has raised."""
        model = self._model
        assert isinstance(model, EncoderRows)
        self.check_model()
        parts: dict[Any, list[SequenceGroup]] = {}
        for group in groups:
            parts.setdefault(group.adapters, []).append(group)
        results: list[tuple[SequenceGroup, int | Exception]] = []
        with self._modes():
            for choice, own in parts.items():
                given: Any = [(group.encoder.digest, group.encoder.given) for group in own]  # type: ignore[union-attr]
                try:
                    made = self._with_adapters(choice, partial(model.encode, given))
                except LayersChanged:
                    raise  # nothing is wrong with these adapters
                except Exception as error:  # of these adapters; other requests continue
                    made = dict.fromkeys((digest for digest, _ in given), error)
                results += [(group, made[digest]) for group, (digest, _) in zip(own, given)]
        self._num_encoded += sum(isinstance(result, int) for _, result in results)
        return results

    @property
    def num_encoded(self) -> int:
        """Inputs that the encoder has computed so far."""
        return self._num_encoded + self._media.num_encoded

    @property
    def num_media_hits(self) -> int:
        """Prompts with media whose features were kept."""
        return self._media.num_hits

    def keep_encoded(self, digests: Iterable[bytes]) -> None:
        """Drop the outputs of all encoders but these, which are still needed."""
        if isinstance(self._model, EncoderRows):
            self._model.keep_only(digests)

    def _with_adapters(self, choice: Any, compute: Callable[[], Any]) -> Any:
        return self._run_with(choice, compute) if self._adapters.seen else compute()

    def _run_beside_encoders(self, model: EncoderRows, writes: list[EncoderWrite], plan: Plan) -> StepResult:
        """Write the K/V of new encoders' states, then compute the tokens of the plan one after another, those of all
        sequences together."""
        failed: dict[Sequence, Exception] = {}
        written = []
        for each in writes:
            group = each.groups[0]
            if group.adapters != plan[0][0].group.adapters:
                continue  # another part of the step
            try:
                model.write(each.seq_id, group.encoder.digest, group.live[0].token_ids[0])  # type: ignore[union-attr]
            except Exception as error:  # of the model: it ends the requests with this input alone
                failed.update((seq, error) for own in each.groups for seq in own.live)
            else:
                written.append(each)
        due: dict[Sequence, torch.Tensor] = {}
        prompts = []
        left = [(seq, seq.num_computed_tokens, seq.num_computed_tokens + count) for seq, count in plan]
        left = [each for each in left if each[0] not in failed]
        while left:
            parts = [EncoderPart(seq.seq_id, seq.token_ids[at], at, seq.group.encoder.table) for seq, at, _ in left]  # type: ignore[union-attr]
            for (seq, at, _), logits in zip(left, model.forward(parts)):
                if isinstance(logits, Exception):
                    failed[seq] = logits
                    continue
                if _inner(seq, at, at + 1):
                    prompts.append(PromptLogits(seq, at, logits[None]))
                due[seq] = logits
            left = [(seq, at + 1, stop) for seq, at, stop in left if at + 1 < stop and seq not in failed]
        seqs = [seq for seq, count in plan if seq in due and seq.num_computed_tokens + count == seq.num_tokens]
        seqs = [seq for seq in seqs if seq not in failed]
        logits_of = torch.stack([due[seq] for seq in seqs]) if seqs else None
        return StepResult(seqs, logits_of, [([seq], error) for seq, error in failed.items()], prompts, written)


PieceSize = Literal["any", "prompt", "one"]


def _reads_media(seq: Sequence) -> bool:
    return seq.group.media is not None and seq.num_computed_tokens < seq.num_prompt_tokens


def _moved(step: StepArrays, plan: Plan) -> StepArrays:
    """The step with the positions of tokens that follow media, where the model counts those otherwise than by ones."""
    deltas = [0 if (media := seq.group.media) is None else media.encoded.delta for seq, _ in plan]
    if not any(deltas):
        return step
    counts = np.diff(step.query_start_loc)
    return replace(step, positions=step.positions + np.repeat(np.array(deltas, dtype=np.int64), counts))


def _block_table(manager: BlockManager, group: int, seq: Sequence) -> array[int]:
    return manager.block_table(seq.seq_id, group)


def _autocast(device: torch.device) -> torch.dtype | None:
    """The dtype to which this thread casts; None: autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


def _dtype_and_device(model: Model) -> tuple[torch.dtype, torch.device]:
    """`model.dtype`, and the device on which the model computes. In every step, so that it must cost little: the
    first floating-point parameter, as a rule that of the embedding, has both."""
    module: torch.nn.Module | None = model
    while module is not None:
        for parameter in module._parameters.values():
            if parameter is not None:
                dtype, device = parameter.dtype, parameter.device
                if dtype.is_floating_point and device.type != "meta":
                    return dtype, device
                return model.dtype, device_of(model)
        module = next(iter(module._modules.values()), None)
    return model.dtype, device_of(model)


def _result(packed: Packed, logits: torch.Tensor) -> StepResult:
    """logits [num_rows, vocab] of the forward."""
    draft_rows, stop = {}, len(packed.seqs)
    for seq, count in packed.drafted:
        draft_rows[seq] = stop
        stop += count
    prompts, start = [], stop
    for seq, own in packed.inner:
        prompts.append(PromptLogits(seq, own.start, logits[start : start + len(own)]))
        start += len(own)
    return StepResult(packed.seqs, logits[:stop] if packed.seqs else None, prompts=prompts, draft_rows=draft_rows)


def _joined(plan: Plan, results: list[StepResult], failed: list[tuple[list[Sequence], Exception]]) -> StepResult:
    """Merge the results of parts of the plan, in the order of the plan."""
    logits = [result.logits for result in results if result.logits is not None]
    prompts = [part for result in results for part in result.prompts]
    encoders = [write for result in results for write in result.encoders]
    failed = [*failed, *(each for result in results for each in result.failed)]
    if not logits:
        return StepResult([], None, failed, prompts, encoders)
    starts = np.cumsum([0, *(len(part) for part in logits)]).tolist()  # of the rows of each part
    parts = [result for result in results if result.logits is not None]
    row_of = {seq: start + row for start, part in zip(starts, parts) for row, seq in enumerate(part.seqs)}
    seqs = [seq for seq, _ in plan if seq in row_of]
    order = [row_of[seq] for seq in seqs]
    draft_rows: dict[Sequence, int] = {}
    for start, part, own in zip(starts, parts, logits):
        draft_rows |= {seq: row - len(part.seqs) + len(order) for seq, row in part.draft_rows.items()}
        order += range(start + len(part.seqs), start + len(own))
    joined = torch.cat(logits)
    in_order = joined[to_device(np.array(order, dtype=np.int64), joined.device)]
    return StepResult(seqs, in_order, failed, prompts, encoders, draft_rows)


def _inner(seq: Sequence, first: int, end: int) -> range:
    """The positions from `first` to `end` whose logits are wanted and that another token of the prompt follows."""
    wanted = seq.group.scored_from
    return range(end, end) if wanted is None else range(max(first, wanted), min(end, seq.num_prompt_tokens - 1))


def _pieces(seq: Sequence, count: int, size: PieceSize) -> list[tuple[int, int]]:
    """The next `count` tokens: at once ("any"); as `generate` does ("prompt"), the whole prompt (or
    `SequenceGroup.whole` tokens) at once if it is due, then one by one; or each by itself ("one")."""
    start, end = seq.num_computed_tokens, seq.num_computed_tokens + count
    if size == "any":
        return [(start, end)]
    first = 0 if size == "one" else seq.group.whole
    pieces = [(0, first)] if start < first <= end else []
    return pieces + [(position, position + 1) for position in range(max(start, first), end)]
