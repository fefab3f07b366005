"""Choose the steps that get a CUDA graph, and keep the graphs' inputs at fixed addresses.

Knows a step's arrays; never models' forwards or captures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.annotations import Model
from hf_paged.cache.layers import FULL
from hf_paged.cache.memory import PagedMemory
from hf_paged.kernels.metadata import MIN_SHARED_KEYS, SHORT_QUERY, AttentionMetadata, StepArrays, step_arrays


class Shape(NamedTuple):
    """The size of a graph's step, padding included: sequences, new tokens, and rows of logits.

    num_rows: None in a decode step, which has one new token for each sequence and takes the logits of all.
    shares: of a decode step, whether sequences have a common prefix that is read once: with another attention kernel.
    """

    num_seqs: int
    num_tokens: int
    num_rows: int | None = None
    shares: bool = False


def padded_size(count: int, max_seqs: int, *, coarse: bool = False) -> int:
    """The batch size of the graph for `count` sequences: 1, 2, 4, 8, 16, 24, ..., 128, 144, ..., at most `max_seqs`.

    coarse: above 8 only every second one, 16, 32, 48, ..., 128, 160, ...
    """
    power = 1 << max(count - 1, 0).bit_length()
    if count <= 8:
        return min(power, max_seqs)
    # From 49 sequences on at most an eighth of the batch is padding, a quarter if `coarse`.
    step = max(8, power // 16) * (2 if coarse else 1)
    return min(-(-count // step) * step, max_seqs)


def decode_shape(count: int, max_seqs: int, *, shares: bool = False) -> Shape:
    """Steps that share a prefix have fewer sizes, because each graph costs memory and start-up time."""
    size = padded_size(count, max_seqs, coarse=shares)
    return Shape(size, size, shares=shares)


def can_share(memory: PagedMemory, max_seqs: int, max_len: int) -> bool:
    """Return True if a decode step can have a common prefix that is read once."""
    is_whole = any(group.kind == FULL for group in memory.groups)
    return max_seqs > 1 and max_len > MIN_SHARED_KEYS and is_whole


# -- steps with prompts in them --------------------------------------------------------------------------------------

# Eight graphs up to 512 tokens, where launches stop to matter even for small models (an estimate).
MIXED_SPACING, MAX_MIXED_TOKENS = 64, 512


@dataclass(frozen=True)
class StepCosts:
    """Costs that limit the size of the steps with prompts that are replayed. Estimates for an H200, not measured.

    launch_seconds: host time of one small operation in eager torch. launches: operations of a layer. flops: of the
    linear layers, each second.
    """

    launch_seconds: float = 6e-6
    launches: int = 40
    flops: float = 600e12

    def mixed_tokens(self, num_layers: int, num_parameters: int) -> int:
        """The number of tokens that the device computes while the host launches an eager step. In larger steps launches
        cost nothing, because the device is behind."""
        host_seconds = num_layers * self.launches * self.launch_seconds
        # A token takes two operations, a product and a sum, for each parameter.
        tokens = int(host_seconds * self.flops / (2 * max(num_parameters, 1)))
        return min(tokens, MAX_MIXED_TOKENS) // MIXED_SPACING * MIXED_SPACING


COSTS = StepCosts()


def mixed_tokens(model: Model) -> int:
    """The most tokens of a step with prompts that has a graph; 0: none has."""
    config = model.config.get_text_config(decoder=True)
    return COSTS.mixed_tokens(config.num_hidden_layers, sum(p.numel() for p in model.parameters()))


def mixed_shape(num_tokens: int, max_seqs: int) -> Shape:
    """The smallest shape for `num_tokens` tokens. Each padding token is a sequence of its own."""
    size = -(-max(num_tokens, 1) // MIXED_SPACING) * MIXED_SPACING
    num_seqs = min(size, max_seqs)
    # At most MIXED_SPACING tokens are padding, so there is room for them beside as many sequences as a step may have.
    return Shape(num_seqs + MIXED_SPACING, size, num_seqs)


MAX_DRAFT_TOKENS = 64
"""The largest step, in tokens, of decode and draft tokens for which a CUDA graph is captured."""


def draft_shape(num_tokens: int) -> Shape:
    """The smallest shape for a step whose tokens all have logits that are wanted, some of them of one sequence. Each
    padding token is a sequence of its own."""
    size = padded_size(num_tokens, MAX_DRAFT_TOKENS)
    return Shape(size, size, size)


def padding_step(shape: Shape, num_groups: int, block_size: int) -> StepArrays:
    """A step that `Inputs.fill` pads to this shape, of tokens that are written to no slot, at position 0."""
    # The rest fits into padding sequences.
    count = max(shape.num_tokens - MIXED_SPACING, 0)
    lengths = [len(part) for part in np.array_split(np.arange(count), shape.num_rows or 1) if len(part)]
    tables = [[0] * -(-length // block_size) for length in lengths]
    if shape.num_rows is None:
        lengths, tables = [], []
    step = step_arrays([tables] * num_groups, lengths, lengths, block_size)
    for array in (step.positions, *step.slots):
        array[:] = 0 if array is step.positions else -1
    return step


# -- inputs ----------------------------------------------------------------------------------------------------------


WHOLE_TABLE_IDS = 65_536
"""Tables of so many block ids are sent with all their columns: 256 KiB take 10 us at 25 GB/s (an estimate), as long as
a launch."""


class Inputs:
    """A step's inputs on the device at fixed addresses, for shapes up to `largest` in each size.

    Padding tokens are sequences with one token, which reads one owned slot and writes none. Every row therefore has a
    defined result, also for operations that read all rows (such as the scales of quantised models). Padding sequences
    without a token have no row.
    """

    def __init__(self, memory: PagedMemory, largest: Shape, max_len: int, device: torch.device) -> None:
        self._block_size = memory.block_size
        # Rows are aligned to 64 bytes, because kernels are compiled for aligned addresses and strides.
        columns, width = (-(-n // 16) * 16 for n in (max(largest[:2]), -(-max_len // memory.block_size)))
        self.max_len = width * memory.block_size
        # Row 0: tokens, 1: positions, 2: lengths and 3: starts (int32, in their first halves), 4: rows of logits, from
        # 5 on: slots, one row per group.
        self._numbers = torch.zeros(5 + len(memory.groups), columns + 16, dtype=torch.int64, device=device)
        self._tables = [torch.zeros(largest.num_seqs, width, dtype=torch.int32, device=device) for _ in memory.groups]

    def fill(self, tokens: np.ndarray, step: StepArrays, wanted: np.ndarray | None, shape: Shape) -> None:
        """Send a step padded to `shape`, without waiting for the device. wanted int64: tokens whose logits are wanted
        (None in a decode step)."""
        count, num_seqs, pin = len(tokens), len(step.seq_lens), self._numbers.is_cuda
        end = num_seqs + shape.num_tokens - count  # of the sequences that have tokens
        assert end <= shape.num_seqs
        # New memory every time: torch reuses pinned memory when the copies from it are done.
        host = torch.empty(self._numbers.shape, dtype=torch.int64, device="cpu", pin_memory=pin)
        numbers = host.numpy()
        lengths, starts = numbers[2].view(np.int32), numbers[3].view(np.int32)
        numbers[0, :count], numbers[1, :count], numbers[5:, :count] = tokens, step.positions, step.slots
        numbers[:2, count : shape.num_tokens], numbers[5:, count : shape.num_tokens] = 0, -1
        lengths[:num_seqs], lengths[num_seqs:end], lengths[end : shape.num_seqs] = step.seq_lens, 1, 0
        starts[: num_seqs + 1] = step.query_start_loc
        starts[num_seqs : end + 1] = np.arange(count, shape.num_tokens + 1)
        starts[end : shape.num_seqs + 1] = shape.num_tokens
        if wanted is not None:
            numbers[4, : len(wanted)], numbers[4, len(wanted) : shape.num_rows] = wanted, 0
        self._numbers.copy_(host, non_blocking=True)
        for target, table, slots in zip(self._tables, step.block_tables, step.slots):
            # Whole rows are one copy; to a part of each, torch copies by a temporary and a kernel.
            is_small = end * target.shape[1] <= WHOLE_TABLE_IDS
            width = target.shape[1] if is_small else table.shape[1]
            padded = torch.empty(end, width, dtype=torch.int32, device="cpu", pin_memory=pin)
            ids = padded.numpy()[:, : table.shape[1]]
            ids[:num_seqs] = table
            # The first slot of the block to which the first sequence writes: it is written in this step or earlier.
            ids[num_seqs:] = max(slots[0], 0) // self._block_size if count else 0
            target[:end, :width].copy_(padded, non_blocking=True)

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [at least the tokens of any shape]."""
        return self._numbers[0]

    def of(self, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, list[AttentionMetadata], torch.Tensor | None]:
        """Tokens and positions int64 [num_tokens]; metadata with empty `scratch`, one record per group; and int64
        [num_rows] the tokens whose logits are wanted, None for all."""
        num_seqs, num_tokens, num_rows, shares = shape
        tokens, positions, lengths, starts, wanted, *slots = self._numbers
        metadata = [
            AttentionMetadata(
                block_tables=table[:num_seqs],
                seq_lens=lengths.view(torch.int32)[:num_seqs],
                query_start_loc=starts.view(torch.int32)[: num_seqs + 1],
                slot_mapping=row[:num_tokens],
                max_query_len=1 if num_rows is None else num_tokens,
                max_short_query_len=SHORT_QUERY,
                # A bound for all later steps, because launches are sized by it.
                max_seq_len=self.max_len,
                shares=shares or num_rows is not None,
                in_bounds=True,
            )
            for table, row in zip(self._tables, slots)
        ]
        return tokens[:num_tokens], positions[:num_tokens], metadata, None if num_rows is None else wanted[:num_rows]
