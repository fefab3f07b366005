"""Greedy decode steps of a draft model in one native call: the tokens of a step are the input of the next step.

Most of such a step of a small model would be Python, and half of the rest its head, whose weight is read in four bits
here. The tokens may differ from the model's own now and then, which costs drafts, never results.

Knows the model's parts and K/V; never who asks for drafts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_paged.cache.memory import PagedMemory
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu import structs
from hf_paged.fused.cpu.decoder import chain_of
from hf_paged.fused.cpu.norms import norm_of
from hf_paged.fused.cpu.stack import Stack
from hf_paged.kernels import buffers
from hf_paged.kernels.metadata import step_arrays
from hf_paged.kernels.native.ops import is_few
from hf_paged.model.parameters import readable_weight
from hf_paged.model.state import Slot, state_of

MAX_TOKENS = 256
"""Tokens of the first step, at most. Longer ones are computed as usual."""
# As native/draft.c reads the coarse head: columns stored together, and elements of a column.
_COLUMNS, _GROUP = 16, 8


_heads: Slot[tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]] = Slot("heads in four bits")
"""With what shows that they are of the head as it is."""


def has_loops(model: Any) -> bool:
    """Return True if this process has loops for models in this dtype and on this device."""
    is_bf16 = model.dtype == torch.bfloat16 and model.device.type == "cpu"
    return is_bf16 and fused_ops.is_available(torch.bfloat16) and fused_ops.packs()


class DraftLoop:
    """The decode steps of one model over one memory. Make another one after anything of the model has changed."""

    def __init__(
        self,
        stack: Stack,
        embedding: torch.Tensor,
        norm: fused_ops.Norm,
        head: torch.Tensor,
        coarse: tuple[torch.Tensor, torch.Tensor],
        rotary: Any,
    ) -> None:
        """embedding, head: bf16 [vocab, depth]. coarse: what `_coarse` makes of the head. rotary: a module."""
        self._stack, self._embedding, self._norm, self._head, self._rotary = stack, embedding, norm, head, rotary
        self._coarse, self._scales = coarse
        # Kept, because new memory would cost page faults in each draft.
        self._workspace = buffers.empty((0,), torch.uint8)
        self._cos = self._sin = buffers.empty((0, 0), embedding.dtype)  # by position

    @classmethod
    def of(cls, model: Any) -> DraftLoop | None:
        """Make a loop for a model that has run packed steps; None if a part is unknown. Whether the model computes
        anything else is to be seen from its tokens."""
        if not has_loops(model):
            return None
        layers = chain_of(model, model.config.get_text_config().num_hidden_layers)
        # One partition serves all layers, so their bounds must be the same.
        if layers is None or len({layer.attention.bounds for layer in layers}) > 1:
            return None
        base, head = getattr(model, "base_model", None), model.get_output_embeddings()
        embedding, final = model.get_input_embeddings(), getattr(base, "norm", None)
        rotary = getattr(base, "rotary_emb", None)
        if final is None or rotary is None:
            return None
        if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or head.bias is not None:
            return None
        norm, weights = norm_of(final), [readable_weight(part) for part in (embedding, head)]
        if norm is None:
            return None
        shape = embedding.weight.shape
        # The kernel gets addresses of contiguous weights in bf16.
        for weight in (*weights, norm.weight):
            if weight is None or weight.dtype != torch.bfloat16 or not weight.is_contiguous() or not weight.is_cpu:
                return None
        if shape != head.weight.shape or shape[1] != layers[0].before.query.depth or shape[1] % 32:
            return None
        # The head in four bits is made once for each state of its weight.
        moved = state_of(model).weights.moved_at(head.weight), id(head.weight)
        known = _heads.get(model)
        if known is None or known[0] != moved:
            known = moved, _coarse(head.weight.detach())
            _heads.put(model, known)
        return cls(Stack(layers, rough=True), embedding.weight.detach(), norm, head.weight.detach(), known[1], rotary)

    def takes(self, memory: PagedMemory, counts: Sequence[int], longest: int) -> bool:
        """Return True if the loop computes a first step with so many tokens of each sequence over this memory.
        longest: tokens of the longest sequence after the last step."""
        _, attention, _ = self._stack.first
        # With a window, an earlier step may need more memory than the last one, for which memory is taken.
        if longest > (attention.bounds.most or longest):
            return False
        # A layer gets its memory in its first step.
        if len(memory.pool.layers) < self._stack.num_layers:
            return False
        return sum(counts) <= MAX_TOKENS and self.takes_tokens(max(counts))

    def takes_tokens(self, count: int) -> bool:
        """Return True if a first step may have so many tokens of a sequence."""
        before = self._stack.first.before
        return is_few(count, before.query.columns // before.key.columns)

    def draft(
        self,
        memory: PagedMemory,
        seq_ids: Sequence[int],
        computed: Sequence[int],
        new: Sequence[Sequence[int]],
        steps: int,
        least: float = -float("inf"),
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens that follow each sequence, `steps` + 1 of them or less, with their log-probabilities, as rows of
        one token for each sequence. They end when each draft has a token less likely than `least`; without it, the
        log-probabilities are 0.

        computed: tokens of each sequence that have K/V. new: those that come next, one at least, few in all. The slots
        of the new tokens and of `steps` more have been appended.
        """
        counts = list(map(len, new))
        lengths = [before + count for before, count in zip(computed, counts)]
        size, rows = memory.block_size, len(seq_ids)
        tables = [[memory.manager.block_table(seq_id) for seq_id in seq_ids]]
        arrays = step_arrays(tables, lengths, counts, size)
        self._reach(max(lengths) + steps)
        pool, layers = memory.pool, self._stack.num_layers
        caches = [pool[layer] for layer in range(layers)]
        ends = np.array(lengths, dtype=np.int64)
        hidden: torch.Tensor | None = None
        # If each sequence has one new token, the loop begins with it, which saves a call.
        begins = max(counts) == 1
        if begins:
            ends, steps = ends - 1, steps + 1
        else:
            ids = torch.tensor([token for tokens in new for token in tokens], dtype=torch.int64, device="cpu")
            positions = torch.from_numpy(arrays.positions)
            cos, sin = self._cos[positions][None], self._sin[positions][None]
            metadata = arrays.metadata(torch.device("cpu"))
            results = self._stack.call(self._embedding[ids][None], cos, sin, caches, metadata * layers).run()
            hidden = results[-1, 0][torch.from_numpy(arrays.query_start_loc[1:] - 1).long()]

        table = arrays.block_tables[0]
        places = ends + np.arange(max(steps, 1))[:, None]  # of the tokens that are drafted, but for the last ones
        slots = table[np.arange(rows), places // size % table.shape[1]].astype(np.int64) * size + places % size
        last = replace(
            arrays,
            # The lengths of the last step, which needs the most memory.
            seq_lens=(ends + steps).astype(np.int32),
            query_start_loc=np.arange(rows + 1, dtype=np.int32),
            slots=[slots],
            max_query_len=1, max_short_query_len=1, num_short_tokens=rows, max_seq_len=int(ends.max()) + steps,
        )  # fmt: skip
        depth, dim = self._head.shape[1], self._cos.shape[1]
        x = buffers.empty((1, rows, depth), torch.bfloat16)
        angles = buffers.empty((2, rows, dim), torch.bfloat16)
        step = last.metadata(torch.device("cpu"))
        call = self._stack.call(x, angles[:1], angles[1:], caches, step * layers)
        # All layers are of one group.
        (partition,) = call.partitions
        last.seq_lens[:] = ends
        ends -= 1
        tokens = np.zeros((steps + 1, rows), dtype=np.int64)
        logprobs = np.zeros((steps + 1, rows), dtype=np.float32)
        if begins:
            tokens[0] = [token for (token,) in new]
        needed = fused_ops.entry("draft_workspace", torch.bfloat16)(rows, depth, len(self._head))
        # 64 bytes more, to align the start to whole vectors.
        if self._workspace.numel() < needed + 64:
            self._workspace = buffers.empty((needed + 64,), torch.uint8)
        workspace = self._workspace.data_ptr()
        norm = self._norm
        arguments = structs.Draft(
            structs.Head(
                self._coarse.data_ptr(), self._scales.data_ptr(), self._head.data_ptr(), norm.weight.data_ptr(),
                norm.eps, *self._head.shape,
            ),
            *call.addresses, layers, partition.step_address, partition.handle, last.seq_lens.ctypes.data,
            ends.ctypes.data, slots.ctypes.data, self._embedding.data_ptr(), self._cos.data_ptr(),
            self._sin.data_ptr(), 0 if hidden is None else hidden.data_ptr(), x.data_ptr(), angles.data_ptr(), rows,
            dim, steps, workspace + -workspace % 64, torch.get_num_threads(), tokens.ctypes.data,
            logprobs.ctypes.data, least,
        )  # fmt: skip
        made = fused_ops.entry("draft", torch.bfloat16)(ctypes.byref(arguments))
        return tokens[begins:made].tolist(), logprobs[begins:made].tolist()

    def _reach(self, length: int) -> None:
        """Compute the rotation of so many positions, unless it is known."""
        if len(self._cos) >= length:
            return
        # In powers of two, so that growing sequences seldom need further angles.
        positions = torch.arange(max(1024, 1 << length.bit_length()), dtype=torch.int64, device="cpu")
        with torch.no_grad():
            angles = self._rotary(self._embedding[:1, None], positions[None])
        self._cos, self._sin = (each[0].to(torch.bfloat16).contiguous() for each in angles)


def _coarse(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight bf16 [columns, depth] in four bits, as native/draft.c reads it, and fp32 scales of its columns."""
    columns, depth = weight.shape
    panels = -(-columns // _COLUMNS)
    scales = buffers.empty((panels * _COLUMNS,), torch.float32).fill_(1)
    packed = buffers.in_large_pages(panels * _COLUMNS * depth // 2)
    parts = packed.view(panels, depth // _GROUP, _COLUMNS, _GROUP // 2)
    # In parts of 4,096 columns, because the whole head in fp32 takes twice its memory.
    for first in range(0, panels, 256):
        own = weight[first * _COLUMNS : (first + 256) * _COLUMNS].float()
        # Seven steps on each side of zero: with an offset of 8, codes fit four bits.
        scale = own.abs().amax(1) / 7
        scale[scale == 0] = 1.0
        scales[first * _COLUMNS : first * _COLUMNS + len(own)] = scale
        codes = (own / scale[:, None]).round_().add_(8).to(torch.uint8)
        codes = nn.functional.pad(codes, (0, 0, 0, -len(own) % _COLUMNS), value=8)
        low, high = codes.view(-1, _COLUMNS, depth // _GROUP, 2, _GROUP // 2).unbind(3)
        parts[first : first + 256] = (low | high << 4).transpose(1, 2)
    return packed, scales
