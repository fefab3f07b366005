"""Whole steps of a packed model as CUDA graphs, one per padded shape, captured by a warm-up or when first needed.

A replay runs no Python. It is used only while an eager step would launch the same operations as the capture did (see
`guards`); the caller computes all other steps. Knows models and a step's arrays; never sequences, requests or sampling.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.cache.layers import longest_length
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.graphs.graph_inputs import (
    MAX_DRAFT_TOKENS,
    Inputs,
    Shape,
    can_share,
    decode_shape,
    draft_shape,
    mixed_shape,
    mixed_tokens,
    padding_step,
)
from hf_paged.features.watch.guards import ModelWatch
from hf_paged.kernels.metadata import SHORT_QUERY, StepArrays
from hf_paged.model.devices import device_of
from hf_paged.model.packed import PackedModel
from hf_paged.model.state import Slot
from hf_paged.model.trial import first_line
from hf_paged.registry import Variants
from hf_paged.sockets import Executor

# -- the device's part ---------------------------------------------------------------------------------------------


_broken: list[Any] = []
"""Graphs whose capture failed. torch's allocator of pinned memory keeps asking them whether a stream belongs to their
capture, because a capture that CUDA has aborted is never ended there (seen in the source of 2.11)."""


class CudaGraphs:
    """Graphs of one device in a shared memory pool. They run one at a time and keep no data there between replays."""

    device_type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, compute: Callable[[], None]) -> None:
        """Run `compute` once before its capture, so that kernels are compiled and libraries initialised."""
        self._aside(compute)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture `compute` and return its replay, which runs on the current stream and does not wait.

        Raises RuntimeError if it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        # In the list until the capture has succeeded, so that an interrupt leaves it there.
        _broken.append(graph)

        def record() -> None:
            # Other threads may use the device meanwhile.
            # Other threads may compute on the device while this one captures.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()

        try:
            self._aside(record)
        except BaseException:
            self._end_broken_capture()
            self._aside(self._capture_nothing)
            raise
        _broken.remove(graph)
        return graph.replay

    def _capture_nothing(self) -> None:
        """Before torch 2.13 the random numbers of the device stay in capture mode after a capture that CUDA has
        aborted, and the next draw raises. A capture that succeeds ends that mode."""
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.empty(1, dtype=torch.float32, device=self._device).zero_()

    def _end_broken_capture(self) -> None:
        """After CUDA itself has aborted a capture, end it for torch's allocator too."""
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        except RuntimeError:
            return  # the capture has ended properly: the error was raised by Python
        torch._C._cuda_releasePool(self._device.index, self._pool)

    def _aside(self, work: Callable[[], None]) -> None:
        """Run `work` on the capture stream, ordered after and before the work on the current stream."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                # Around torch.cuda.graph too, which stays on its stream if the end of a capture raises.
                with torch.cuda.stream(self._stream):
                    work()
            finally:
                current.wait_stream(self._stream)


class NoHostValues(TorchDispatchMode):
    """Refuses what no graph can do: operations that need a value or a shape on the host, and host-device copies.

    Raises RuntimeError before such an operation runs, so that the capture stays intact; an error from CUDA would break
    it.
    """

    _TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
    _PUTS = frozenset({torch.ops.aten.index_put, torch.ops.aten.index_put_})

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # In inference mode a composite operation arrives whole; its parts are what matters.
        with self:  # in inference mode a composite operation arrives whole; check its parts
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if self._is_refused(func, args, kwargs):
            raise RuntimeError(f"{func} makes the host wait for the device")
        return func(*args, **kwargs)

    def _is_refused(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = func.overloadpacket
        if name is torch.ops.aten._to_copy:
            return bool(torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type)
        if name is torch.ops.aten.copy_:
            return bool(args[0].device.type != args[1].device.type)
        # torch implements it as masked_fill.
        if name in self._PUTS and args[2].numel() == 1 and args[2].device.type == "cpu":
            return False  # torch implements it as masked_fill
        if name in self._PUTS or name is torch.ops.aten.index:
            # Indices are used directly, but a mask must first be counted on the host.
            return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return not self._TAGS.isdisjoint(func.tags)


# -- what graphs read and write ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Captured:
    """Graphs by shape, and all that they read and write besides the model's weights and the K/V at `key`.

    logits [at least max_seqs, vocab]: one buffer for all, or each graph would keep its own.
    """

    key: tuple[object, ...]
    device: CudaGraphs
    inputs: Inputs
    watch: ModelWatch
    logits: torch.Tensor | None = None
    replays: dict[Shape, Callable[[], None]] = field(default_factory=dict)


# Of models whose engine was closed. A graph knows addresses only, so it serves any engine whose K/V lies where that of
# the closed one lay.
_parked: Slot[_Captured] = Slot("CUDA graphs")


# -- decode steps --------------------------------------------------------------------------------------------------


MAX_VARIANTS = 8
"""Limit of variants (sets of adapters) with graphs, which cost memory and time to capture. Others run eagerly."""


class GraphedSteps:
    """Steps of one packed model, at most `max_seqs` sequences of at most `max_len` tokens (rounded up) in each: decode
    steps, steps with drafts of at most `draft_tokens` tokens in all, and steps with prompts of at most `mixed_tokens`
    (see `graph_inputs.StepCosts`).

    The caller looks at the weights before each step. required: raise UnsupportedModelError for a decode step that
    cannot be a graph. Otherwise such a step is declined, with one warning for each reason. replays: number of steps
    that graphs have computed.
    """

    def __init__(self, packed: PackedModel, max_seqs: int, max_len: int, *, required: bool) -> None:
        # Weakly, because it has this: in a cycle, packed weights would wait for a collection of garbage.
        self._packed: PackedModel = weakref.proxy(packed)
        self._max_seqs = max_seqs
        self._max_len = max_len
        self.required = required
        self.mixed_tokens = min(mixed_tokens(packed.model), max_seqs * max_len)
        self.draft_tokens = MAX_DRAFT_TOKENS
        self._can_share = can_share(packed.memory, max_seqs, max_len)
        self._captured: dict[object, _Captured] = {}  # by variant
        self._is_off = False
        self._warned: set[str] = set()
        self.replays = 0

    def shape_of(self, num_tokens: int, wanted: np.ndarray | None, *, shares: bool) -> Shape | None:
        """The shape of the graph for a step; None: it is computed eagerly."""
        if wanted is None:
            return decode_shape(num_tokens, self._max_seqs, shares=shares and self._can_share)
        if num_tokens > self.mixed_tokens:
            return None
        shape = mixed_shape(num_tokens, self._max_seqs)
        return shape if len(wanted) <= (shape.num_rows or 0) else None  # more: a request wants its prompt's logits

    def forward(
        self,
        tokens: np.ndarray,
        step: StepArrays,
        variant: object = None,
        late: Callable[[torch.Tensor], None] | None = None,
        wanted: np.ndarray | None = None,
        shape: Shape | None = None,
    ) -> torch.Tensor | None:
        """tokens int64 [num_tokens] -> logits [num_rows, vocab] of the tokens `wanted`, int64 [num_rows]; None: a
        decode step, one new token of each sequence, all of whose logits are wanted.

        The logits are valid until the next call with the same variant. None: the caller must compute the step eagerly.

        late: writes the tokens that the host does not know yet into the device's tokens, int64 [at least num_tokens].
        variant: identifies what the model computes, for example its set of adapters. Each variant has its own graphs;
        at most MAX_VARIANTS have any. shape: of the graph, if it is not that of `shape_of`.
        """
        if shape is None and wanted is not None and len(wanted) == len(tokens) <= self.draft_tokens:
            shape = draft_shape(len(tokens)) if step.max_query_len <= SHORT_QUERY else None
        shape = shape or self.shape_of(len(tokens), wanted, shares=step.shares)
        if shape is None or self._is_off:
            return None
        captured = self._captured.get(variant)
        if captured is None and len(self._captured) >= MAX_VARIANTS:
            # Loading and deleting adapters outdates all graphs. Those of variants that are gone are never renewed.
            self._captured = {of: each for of, each in self._captured.items() if not each.watch.has_other_weights()}
        if captured is None and len(self._captured) >= MAX_VARIANTS:
            self._decline(f"there are graphs for {MAX_VARIANTS} sets of adapters already")
            return None
        captured = captured or self._take()
        # The caller has looked at the weights in this step.
        if captured.watch.changed(looks=False):
            captured = self._new()
        self._captured[variant] = captured
        obstacle = captured.watch.obstacle
        if obstacle is None and torch.is_autocast_enabled(self._packed.model.device.type):
            obstacle = "autocast is on"  # which a replay would ignore
        if step.max_seq_len > captured.inputs.max_len:
            obstacle = f"a sequence is longer than the {captured.inputs.max_len} tokens of the block tables"
        if obstacle is not None:
            self._decline(obstacle)
            return None
        # The inputs first: a capture's warm-up computes with them, and writes the step's K/V.
        captured.inputs.fill(tokens, step, wanted, shape)
        if late is not None:
            late(captured.inputs.tokens)
        if shape not in captured.replays and not self._capture(captured, shape):
            return None
        captured.replays[shape]()
        self.replays += 1
        assert captured.logits is not None
        return captured.logits[: len(tokens) if wanted is None else len(wanted)]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes to capture, largest first, because smaller graphs can use the memory of larger ones."""
        several = {mixed_shape(count, self._max_seqs) for count in range(1, self.mixed_tokens + 1)}
        several |= {draft_shape(count) for count in range(1, self.draft_tokens + 1)}
        kinds = [(1, False), (2, True)] if self._can_share else [(1, False)]
        decode = {
            decode_shape(count, self._max_seqs, shares=shares)
            for least, shares in kinds
            for count in range(least, self._max_seqs + 1)
        }
        return sorted(several, reverse=True) + sorted(decode, key=lambda s: (s.num_tokens, s.shares), reverse=True)

    def captures(self, adapters: Variants) -> list[Callable[[], None]]:
        """Return functions that capture one graph each: every shape, for up to `MAX_VARIANTS` choices of adapters."""
        if not adapters.seen:
            return [partial(self.capture, shape) for shape in self.shapes]
        return [
            partial(adapters.run, choice, partial(self.capture, shape, adapters.describe(choice)))
            # The active adapters come first, so that the limit never leaves them out.
            for choice in adapters.alone()[:MAX_VARIANTS]
            for shape in self.shapes
        ]

    def try_one(self) -> None:
        """Capture a step of one sequence, to find out whether capturing works."""
        self.capture(decode_shape(1, self._max_seqs))

    @torch.inference_mode()
    def capture(self, shape: Shape, variant: object = None) -> None:
        """Capture, if there is none, the graph of this shape with padding sequences, which write nothing."""
        if shape.num_rows is not None and not self.draft_tokens:
            return  # a capture of several tokens a sequence has failed
        memory = self._packed.memory
        step = padding_step(shape, len(memory.groups), memory.block_size)
        wanted = None if shape.num_rows is None else np.zeros(0, dtype=np.int64)
        # Captures are no steps of requests, so they do not count.
        replays = self.replays
        self.forward(np.zeros_like(step.positions), step, variant, None, wanted, shape)
        self.replays = replays

    def close(self) -> None:
        """Keep the graphs for the next engine on the model."""
        # Of one variant only, because graphs take memory: the one with most of them.
        captured = max(self._captured.values(), key=lambda captured: len(captured.replays), default=None)
        self._captured, self._is_off = {}, True
        if captured is not None and captured.replays:
            _parked.put(self._packed.model, captured)

    def _key(self) -> tuple[object, ...]:
        memory = self._packed.memory
        return self._max_seqs, self._max_len, self.mixed_tokens, memory.block_size, memory.layout

    def _take(self) -> _Captured:
        captured = _parked.take(self._packed.model)
        return captured if captured is not None and captured.key == self._key() else self._new()

    def _new(self) -> _Captured:
        model = self._packed.model
        shapes = [*self.shapes, draft_shape(MAX_DRAFT_TOKENS)]
        largest = Shape(max(shape.num_seqs for shape in shapes), max(shape.num_tokens for shape in shapes))
        inputs = Inputs(self._packed.memory, largest, self._max_len, model.device)
        return _Captured(self._key(), CudaGraphs(model.device), inputs, ModelWatch(model))

    def _capture(self, captured: _Captured, shape: Shape) -> bool:
        """Capture a step of this shape with the current inputs. The warm-up writes the step's K/V."""

        def compute() -> None:
            logits = self._packed.forward(*captured.inputs.of(shape))
            if captured.logits is None:
                # For all shapes at once, because earlier graphs have the address.
                captured.logits = logits.new_empty(max(self._max_seqs, MAX_DRAFT_TOKENS), logits.shape[1])
            captured.logits[: len(logits)].copy_(logits)

        def without_the_host() -> None:
            with NoHostValues():  # type: ignore[no-untyped-call]
                compute()

        captured.device.warm_up(compute)
        name = type(self._packed.model).__name__
        try:
            replay = captured.device.capture(without_the_host)
        except RuntimeError as error:
            reason = f"{name} cannot be captured ({first_line(error)})"
        else:
            # A model that replaces tensors in a forward would replay with the old ones.
            if not captured.watch.changed():
                captured.replays[shape] = replay
                return True
            reason = f"{name} replaces tensors at every step"
        self._captured = {}
        if shape.num_rows is None:
            self._is_off = True
            self._decline(reason)
        else:
            self.mixed_tokens = self.draft_tokens = 0  # decode steps may be captured nevertheless
            self._warn(f"steps with prompts or drafts run without CUDA graphs: {reason}")
        return False

    def _decline(self, reason: str) -> None:
        if self.required:
            raise UnsupportedModelError(f"cuda_graphs=True: {reason}; leave it out, and such steps run without graphs")
        self._warn(f"decode steps run without CUDA graphs: {reason}")

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def graphed_steps(executor: Executor, max_seqs: int, cuda_graphs: bool | None) -> GraphedSteps | None:
    """Graphs for the decode steps of an engine whose K/V tensors have their final addresses. None: run eagerly.

    cuda_graphs: True, False, or None (on a CUDA device, if possible). Raises ValueError for True if it is impossible.
    """
    if cuda_graphs is False:
        return None
    device = device_of(executor.model)
    obstacle = None
    if device.type != CudaGraphs.device_type:
        obstacle = f"the model is on {device}, not on a CUDA device"
    elif not executor.is_packed:
        obstacle = "the model does not run packed (hf_paged.check says why)"
    if obstacle is not None:
        if cuda_graphs:
            raise ValueError(f"cuda_graphs=True: {obstacle}; leave it out")
        return None
    max_len = getattr(executor.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    memory = executor.memory
    blocks, size = memory.pool.num_blocks, memory.block_size
    # No table of a graph needs to be longer than the blocks can fill.
    max_len = longest_length(memory.groups, blocks, size, blocks * size if max_len is None else max_len)
    steps = GraphedSteps(cast(PackedModel, executor), max_seqs, max_len, required=bool(cuda_graphs))
    if cuda_graphs:
        steps.try_one()
    return steps
