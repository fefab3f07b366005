"""Whole decode steps of a packed model as CUDA graphs, one per padded batch size, captured when first needed.

A replay runs no Python. It is used only while an eager step would launch the same operations as the capture did (see
`guards`); the caller computes all other steps. Knows models and a step's arrays; never sequences, requests or sampling.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import UnsupportedModelError
from hf_paged.kernels.metadata import AttentionMetadata, StepArrays, step_arrays
from hf_paged.model.devices import device_of
from hf_paged.model.guards import ModelWatch
from hf_paged.model.packed import PackedModel
from hf_paged.model.sequential import RowModel
from hf_paged.model.state import Slot
from hf_paged.model.support import first_line

# -- the device's part ---------------------------------------------------------------------------------------------


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
        """What replays it, on the current stream and without waiting. Raises RuntimeError if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()

        def record() -> None:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()

        try:
            self._aside(record)
        except BaseException:
            self._end_broken_capture()
            self._aside(self._capture_nothing)
            raise
        return graph.replay

    def _capture_nothing(self) -> None:
        """Before torch 2.13 the random numbers of the device stay in capture mode after a capture that CUDA has
        aborted, and the next draw raises. A capture that succeeds ends that mode."""
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"):
            torch.empty(1, device=self._device).zero_()

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
        if name in self._PUTS and args[2].numel() == 1 and args[2].device.type == "cpu":
            return False  # torch implements it as masked_fill
        if name in self._PUTS or name is torch.ops.aten.index:
            # Indices are used directly, but a mask must first be counted on the host.
            return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return not self._TAGS.isdisjoint(func.tags)


# -- what graphs read and write ------------------------------------------------------------------------------------


class _Inputs:
    """A step's inputs on the device at fixed addresses, for up to `max_seqs` sequences with one new token each.

    Padding rows are sequences with one token, which reads one owned slot and writes none. Every row therefore has a
    defined result, also for operations that read all rows (such as the scales of quantised models).
    """

    def __init__(self, memory: PagedMemory, max_seqs: int, max_len: int, device: torch.device) -> None:
        self._block_size = memory.block_size
        # Rows are aligned to 64 bytes, because kernels are compiled for aligned addresses and strides.
        columns, width = -(-max_seqs // 16) * 16, -(-max_len // memory.block_size // 16) * 16
        self.max_len = width * memory.block_size
        # Row 0: tokens, 1: positions, 2: lengths (int32, in its first half), from 3 on: slots, one row per group.
        self._numbers = torch.zeros(3 + len(memory.groups), columns, dtype=torch.int64, device=device)
        self._tables = [torch.zeros(max_seqs, width, dtype=torch.int32, device=device) for _ in memory.groups]
        self._starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)

    def fill(self, tokens: np.ndarray, step: StepArrays, size: int) -> None:
        """Send a step padded to `size` sequences, without waiting for the device."""
        count, pin = len(tokens), self._numbers.is_cuda
        # New memory every time: torch reuses pinned memory when the copies from it are done.
        host = torch.empty(self._numbers.shape, dtype=torch.int64, device="cpu", pin_memory=pin)
        numbers = host.numpy()
        lengths = numbers[2].view(np.int32)
        numbers[0, :count], numbers[1, :count], lengths[:count], numbers[3:, :count] = (
            tokens, step.positions, step.seq_lens, step.slots,
        )  # fmt: skip
        numbers[:2, count:size], lengths[count:size], numbers[3:, count:size] = 0, 1, -1
        self._numbers.copy_(host, non_blocking=True)
        for target, table, slots in zip(self._tables, step.block_tables, step.slots):
            padded = torch.empty(size, table.shape[1], dtype=torch.int32, device="cpu", pin_memory=pin)
            padded.numpy()[:count] = table
            # The first slot of the block to which the first sequence writes: it is written in this step or earlier.
            padded.numpy()[count:] = slots[0] // self._block_size if count else 0
            target[:size, : table.shape[1]].copy_(padded, non_blocking=True)

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [at least `max_seqs`]."""
        return self._numbers[0]

    def of(self, size: int) -> tuple[torch.Tensor, torch.Tensor, list[AttentionMetadata]]:
        """Tokens and positions int64 [size], and metadata with empty `scratch`, one record per group."""
        tokens, positions, lengths, *slots = self._numbers
        return tokens[:size], positions[:size], [
            AttentionMetadata(
                block_tables=table[:size],
                seq_lens=lengths.view(torch.int32)[:size],
                query_start_loc=self._starts[: size + 1],
                slot_mapping=row[:size],
                max_query_len=1,
                max_seq_len=self.max_len,  # a bound for all later steps, because launches are sized by it
                in_bounds=True,
            )
            for table, row in zip(self._tables, slots)
        ]  # fmt: skip


@dataclass(slots=True)
class _Captured:
    """Graphs by batch size, and all that they read and write besides the model's weights and the K/V at `key`.

    logits [max_seqs, vocab]: one buffer for all, or each graph would keep its own.
    """

    key: tuple[object, ...]
    device: CudaGraphs
    inputs: _Inputs
    watch: ModelWatch
    logits: torch.Tensor | None = None
    replays: dict[int, Callable[[], None]] = field(default_factory=dict)


# Of models whose engine was closed. A graph knows addresses only, so it serves any engine whose K/V lies where that of
# the closed one lay.
_parked: Slot[_Captured] = Slot("CUDA graphs")


# -- decode steps --------------------------------------------------------------------------------------------------


MAX_VARIANTS = 8
"""Limit of variants (sets of adapters) with graphs, which cost memory and time to capture. Others run eagerly."""


def padded_size(count: int, max_seqs: int) -> int:
    """The batch size of the graph for `count` sequences: 1, 2, 4, 8, 16, 24, ..., 128, 144, ..., at most `max_seqs`."""
    power = 1 << max(count - 1, 0).bit_length()
    if count <= 8:
        return min(power, max_seqs)
    step = max(8, power // 16)
    return min(-(-count // step) * step, max_seqs)


class GraphedSteps:
    """Decode steps of one packed model, at most `max_seqs` sequences of at most `max_len` tokens (rounded up) in each.

    required: raise UnsupportedModelError for a step that cannot be a graph. Otherwise such a step is declined, with one
    warning for each reason. replays: number of steps that graphs have computed.
    """

    def __init__(self, packed: PackedModel, max_seqs: int, max_len: int, *, required: bool) -> None:
        self._packed = packed
        self._max_seqs = max_seqs
        self._max_len = max_len
        self._required = required
        self._captured: dict[object, _Captured] = {}  # by variant
        self._is_off = False
        self._warned: set[str] = set()
        self.replays = 0

    def forward(
        self,
        tokens: np.ndarray,
        step: StepArrays,
        variant: object = None,
        late: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """tokens int64 [num_seqs], one new token of each sequence -> logits [num_seqs, vocab].

        The logits are valid until the next call with the same variant. None: the caller must compute the step eagerly.

        late: writes the tokens that the host does not know yet into the device's tokens, int64 [at least num_seqs].
        variant: identifies what the model computes, for example its set of adapters. Each variant has its own graphs;
        at most MAX_VARIANTS have any.
        """
        return self._replay(tokens, step, variant, late, padded_size(len(tokens), self._max_seqs))

    def _replay(
        self,
        tokens: np.ndarray,
        step: StepArrays,
        variant: object,
        late: Callable[[torch.Tensor], None] | None,
        size: int,
    ) -> torch.Tensor | None:
        """`forward` with the graph for `size` sequences."""
        if self._is_off:
            return None
        captured = self._captured.get(variant)
        if captured is None and len(self._captured) >= MAX_VARIANTS:
            # Loading and deleting adapters outdates all graphs. Those of variants that are gone are never renewed.
            self._captured = {of: each for of, each in self._captured.items() if not each.watch.has_other_weights()}
        if captured is None and len(self._captured) >= MAX_VARIANTS:
            self._decline(f"there are graphs for {MAX_VARIANTS} sets of adapters already")
            return None
        captured = captured or self._take()
        if captured.watch.changed():
            captured = self._new()
        self._captured[variant] = captured
        obstacle = captured.watch.obstacle or _obstacle_of_modes(self._packed.model.device.type)
        if step.max_seq_len > captured.inputs.max_len:
            obstacle = f"a sequence is longer than the {captured.inputs.max_len} tokens of the block tables"
        if obstacle is not None:
            self._decline(obstacle)
            return None
        captured.inputs.fill(tokens, step, size)
        if late is not None:
            late(captured.inputs.tokens)
        if size not in captured.replays and not self._capture(captured, size):
            return None
        captured.replays[size]()
        self.replays += 1
        assert captured.logits is not None
        return captured.logits[: len(tokens)]

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that have a graph of their own, in ascending order."""
        return sorted({padded_size(count, self._max_seqs) for count in range(1, self._max_seqs + 1)})

    def capture_all(self) -> Iterator[int]:
        """Capture the graphs of all sizes; yields each size. The largest one comes first, because the smaller ones can
        use its memory."""
        for size in reversed(self.sizes):
            self._capture_padding(size)
            yield size

    def try_one(self) -> None:
        """Capture a step of one sequence, to find out whether capturing works."""
        self._capture_padding(1)

    @torch.inference_mode()
    def _capture_padding(self, size: int) -> None:
        """Capture, if there is none, the graph for `size` sequences with padding sequences, which write nothing."""
        memory = self._packed.memory
        no_tokens = step_arrays([[] for _ in memory.groups], [], [], memory.block_size)
        self._replay(np.zeros(0, dtype=np.int64), no_tokens, None, None, size)
        self.replays = 0

    def close(self) -> None:
        """Keep the graphs for the next engine on the model."""
        captured = max(self._captured.values(), key=lambda captured: len(captured.replays), default=None)
        self._captured, self._is_off = {}, True
        if captured is not None and captured.replays:
            _parked.put(self._packed.model, captured)

    def _key(self) -> tuple[object, ...]:
        return self._max_seqs, self._max_len, self._packed.memory.block_size, self._packed.memory.layout

    def _take(self) -> _Captured:
        captured = _parked.take(self._packed.model)
        return captured if captured is not None and captured.key == self._key() else self._new()

    def _new(self) -> _Captured:
        model = self._packed.model
        inputs = _Inputs(self._packed.memory, self._max_seqs, self._max_len, model.device)
        return _Captured(self._key(), CudaGraphs(model.device), inputs, ModelWatch(model))

    def _capture(self, captured: _Captured, size: int) -> bool:
        """Capture a step of `size` sequences with the current inputs. The warm-up writes the step's K/V."""

        def compute() -> None:
            logits = self._packed.forward(*captured.inputs.of(size))
            if captured.logits is None:
                captured.logits = logits.new_empty(self._max_seqs, logits.shape[1])
            captured.logits[:size].copy_(logits)

        def without_the_host() -> None:
            with NoHostValues():
                compute()

        captured.device.warm_up(compute)
        name = type(self._packed.model).__name__
        try:
            replay = captured.device.capture(without_the_host)
        except RuntimeError as error:
            reason = f"{name} cannot be captured ({first_line(error)})"
        else:
            if not captured.watch.changed():
                captured.replays[size] = replay
                return True
            reason = f"{name} replaces tensors at every step"
        self._captured, self._is_off = {}, True
        self._decline(reason)
        return False

    def _decline(self, reason: str) -> None:
        if self._required:
            raise UnsupportedModelError(f"cuda_graphs=True: {reason}; leave it out, and such steps run without graphs")
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"decode steps run without CUDA graphs: {reason}", RuntimeWarning, stacklevel=2)


def _obstacle_of_modes(device_type: str) -> str | None:
    """A mode of this thread that a replay would ignore."""
    if torch.is_autocast_enabled(device_type):
        return "autocast is on"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    return None


def graphed_steps(model: PackedModel | RowModel, max_seqs: int, cuda_graphs: bool | None) -> GraphedSteps | None:
    """Graphs for the decode steps of an engine whose K/V tensors have their final addresses. None: run eagerly.

    cuda_graphs: True, False, or None (on a CUDA device, if possible). Raises ValueError for True if it is impossible.
    """
    if cuda_graphs is False:
        return None
    device = device_of(model.model)
    obstacle = None
    if device.type != CudaGraphs.device_type:
        obstacle = f"the model is on {device}, not on a CUDA device"
    elif not isinstance(model, PackedModel):
        obstacle = "the model computes one sequence at a time (hf_paged.check says why)"
    if obstacle is not None:
        if cuda_graphs:
            raise ValueError(f"cuda_graphs=True: {obstacle}; leave it out")
        return None
    assert isinstance(model, PackedModel)
    max_len = getattr(model.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    capacity = model.memory.groups[0].pool.num_blocks * model.memory.block_size
    if max_len is None or any(manager.sliding_window is None for manager in model.memory.managers):
        max_len = min(max_len or capacity, capacity)  # full-attention layers keep all tokens
    steps = GraphedSteps(model, max_seqs, max_len, required=bool(cuda_graphs))
    if cuda_graphs:
        steps.try_one()
    return steps
