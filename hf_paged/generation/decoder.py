"""PackedDecoder: takes the place of the model in transformers' decoding loops.

The loop keeps its semantics (processors, criteria, scores, beams); only the forward is ours. Rows are sequences of a
PagedMemory, packed without padding. A prompt is prefilled once and forked, and finished rows are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.generation.prefill import compute_prompts, is_one_step
from hf_paged.generation.shared_prompts import Prompt, share_prompts
from hf_paged.integration.names import CACHE
from hf_paged.kernels.metadata import DecodeStep, to_device
from hf_paged.model.packed import PackedModel
from hf_paged.sockets import Executor


def left_padding(attention_mask: torch.Tensor | None, num_rows: int) -> list[int]:
    """Zeros in each row of the mask [num_rows, length]; None: no padding."""
    if attention_mask is None:
        return [0] * num_rows
    padding: list[int] = (attention_mask == 0).sum(dim=1).tolist()
    return padding


class RecordingCriteria(StoppingCriteriaList):
    """The criteria of a call, unchanged. Records which rows they have stopped."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.done: torch.Tensor | None = None  # bool [num_rows]

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        stopped: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self.done = stopped if self.done is None else self.done | stopped
        return stopped


class LoopCache:
    """Stand-in cache for the loop, which may reorder the rows and ask for their length."""

    is_compileable = False
    is_croppable = False

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder = decoder

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._decoder.reorder(beam_idx.tolist())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._decoder.length


class DecoderOutput(dict[str, Any]):
    """The fields of a ModelOutput that the loop reads; a ModelOutput itself takes longer to make.

    It has `logits` [num_rows, 1, vocab], and the LoopCache under the name that this transformers reads.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class PackedDecoder:
    """`expand` consecutive rows of the batch share a prompt (beams, parallel samples).

    Invariant between forwards: row r of the batch is sequence `rows[r]` of `memory`, holding the K/V of all its tokens
    but the last; None for a finished row that was dropped. With `keep_finished`, finished rows are still computed, as
    in plain generate; calls that return scores or a cache need that.
    """

    def __init__(
        self,
        packed: Executor,
        *,
        expand: int,
        keep_finished: bool,
        prefill_chunk_size: int | None = None,
        check_pool: Callable[[Sequence[int]], None] | None = None,
        on_step: Callable[[PagedMemory], None] | None = None,
    ) -> None:
        self._packed = packed
        self._model = packed.model
        self.memory: PagedMemory = packed.memory
        self._expand = expand
        self.keep_finished = keep_finished
        self._chunk = prefill_chunk_size
        self._check_pool = check_pool  # raises ValueError if prompts of these lengths do not fit
        self._on_step = on_step
        # Beyond all ids in the memory, which may be a caller's cache with rows: `_free_others` frees from here on.
        known = [seq_id for seq_id in self.memory.manager.seq_ids if isinstance(seq_id, int)]
        self._first_id = max(known, default=-1) + 1
        self._ids = itertools.count(self._first_id)
        self._lent: list[int] = []
        self._step: DecodeStep | None = None  # the last one
        self._num_new = 0  # columns of input_ids that continue the lent rows
        self.criteria: RecordingCriteria | None = None
        self.cache = LoopCache(self)
        self.rows: list[int | None] = []
        self.padding: list[int] = []  # of each row
        self.length = 0  # positions with K/V in every layer, padding included
        self.length_beside = 0  # states of an encoder with K/V that plain generate keeps for each row

    def continue_rows(self, rows: Sequence[int], padding: Sequence[int], length: int, num_new: int) -> None:
        """Start with rows that another owner lends until `give_back`: `length` positions each, padding included.

        The last `num_new` columns of the call's input_ids continue them.
        """
        self.rows, self.padding, self.length = list(rows), list(padding), length
        self._lent, self._num_new = list(rows), num_new

    # -- what the loops ask of a model --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # A `_reorder_cache` method of the model would index K/V tensors; LoopCache moves block tables.
        if name == "_reorder_cache":
            raise AttributeError(name)
        return getattr(self._model, name)

    def _valid_auto_compile_criteria(self, *args: object, **kwargs: object) -> bool:
        return False

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: object) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def _update_model_kwargs_for_generation(
        self, outputs: object, model_kwargs: dict[str, Any], **_: object
    ) -> dict[str, Any]:
        return model_kwargs

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], **_: object
    ) -> DecoderOutput:
        return self._output(self.prefill(input_ids, model_kwargs.get("attention_mask")))

    def __call__(self, input_ids: torch.Tensor, **_: object) -> DecoderOutput:
        return self._output(self.decode(input_ids))

    def _output(self, logits: torch.Tensor) -> DecoderOutput:
        return DecoderOutput({"logits": logits.unsqueeze(1), CACHE: self.cache})

    # -- the forwards -------------------------------------------------------------------------------------------

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """input_ids int64 [num_rows, length], left-padded by attention_mask -> logits [num_rows, vocab] of the ends.

        Equal rows are computed once and forked. Rows that begin alike share the full blocks of their beginning.
        """
        columns = input_ids.shape[1]
        new = self._num_new or columns
        repeats = 1 if self.rows else self._expand
        ends = input_ids[::repeats, columns - new :]
        # Prompts are compared on the host. A single one stays on its device, because a copy would wait for the device.
        if len(ends) > 1:
            ends = ends.to("cpu", torch.int64)
        batch = list(ends)
        if not self.rows:
            self.padding = left_padding(attention_mask, len(input_ids))
            batch = [end[padding:] for end, padding in zip(ends, self.padding[::repeats])]
        lent = [row for row in self.rows if row is not None]
        prompts, index = share_prompts(self._compared(batch), self.memory.block_size, list(map(self._content, lent)))
        prompts = self._fit(prompts)
        seq_ids = [lent[index.index(i)] if lent else next(self._ids) for i in range(len(prompts))]
        logits = self._compute_prompts(seq_ids, prompts)
        # A fork copies a block table, which prompts have only now.
        index = [i for i in index for _ in range(repeats)]
        self.rows = self._fork_rows(seq_ids, index)
        self.length += new
        if self._lent:
            self._free_others()
        self._report()
        if index == [*range(len(logits))]:
            return logits
        return logits[to_device(np.array(index, dtype=np.int64), logits.device)]

    def _compared(self, batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The prompts as tokens int64 [length] that are equal where their K/V is."""
        return batch

    def _positions(self, seq_ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """The positions of the next tokens of these sequences, whose indices are given: int64 [num_seqs]."""
        return positions

    def _compute_prompts(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        """Append prompt i to the sequence `seq_ids[i]`; logits [num_prompts, vocab] after the last tokens."""
        assert isinstance(self._packed, PackedModel)
        return compute_prompts(self._packed, seq_ids, prompts, self._chunk)

    def _compute_next(self, seq_ids: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """The logits [num_seqs, vocab] after one more token of each sequence, int64 [num_seqs], whose slots have been
        appended."""
        assert isinstance(self._packed, PackedModel)
        device = self._model.device
        # On a CPU the arrays of the last step are changed in place; a GPU may still read them.
        if device.type == "cpu":
            self._step = self.memory.decode_step(seq_ids, self._step)
            metadata, positions = self._step.metadata, self._step.positions
        else:
            metadata, positions = self.memory.step_metadata(seq_ids, [1] * len(seq_ids), device)
        return self._packed.forward(tokens, self._positions(seq_ids, positions), metadata)

    def _fork(self, parent_id: int, child_id: int) -> None:
        self.memory.fork(parent_id, child_id)
        self._packed.fork(parent_id, child_id)

    def _free(self, seq_id: int) -> None:
        self.memory.free(seq_id)
        self._packed.free(seq_id)

    def _content(self, seq_id: int) -> bytes:
        """Equal for sequences with the same tokens in the same blocks."""
        manager = self.memory.manager
        return manager.num_tokens(seq_id).to_bytes(8, "little") + manager.block_table(seq_id).tobytes()

    def _fit(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts as this memory can share them. Raises ValueError if it is too small for them."""
        if self.memory.manager.drops_blocks and not is_one_step(prompts, self._chunk):
            # Blocks that left a window after an earlier step are neither shared nor needed together.
            return [Prompt(prompt.tokens) for prompt in prompts]
        if self._check_pool is not None:
            self._check_pool([prompt.own_length for prompt in prompts])
        return prompts

    def _fork_rows(self, seq_ids: Sequence[int], index: Sequence[int]) -> list[int | None]:
        """A sequence for each row: `seq_ids[i]` for the first row of prompt i, forks of it for the others."""
        rows: list[int | None] = []
        taken: set[int] = set()
        for i in index:
            row = seq_ids[i]
            if i in taken:
                row = next(self._ids)
                self._fork(seq_ids[i], row)
            taken.add(i)
            rows.append(row)
        return rows

    def decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [num_rows, length] so far -> logits [num_rows, vocab]; zeros for dropped rows."""
        device = self._model.device
        if not self.keep_finished:
            self._drop_finished()
        active = [r for r, row in enumerate(self.rows) if row is not None]
        seq_ids = [row for row in self.rows if row is not None]
        self.memory.append([(seq_id, 1) for seq_id in seq_ids])
        tokens = input_ids[:, -1].to(device)
        if len(active) == len(self.rows):
            logits = self._compute_next(seq_ids, tokens)
        else:
            index = to_device(np.array(active, dtype=np.int64), device)
            some = self._compute_next(seq_ids, tokens[index])
            logits = some.new_zeros(len(self.rows), some.shape[-1]).index_copy_(0, index, some)
        self.memory.step_done(seq_ids)
        self.length += 1
        self._report()
        return logits

    def _drop_finished(self) -> None:
        if self.criteria is None or self.criteria.done is None:
            return
        for r, done in enumerate(self.criteria.done.tolist()):
            row = self.rows[r]
            if done and row is not None:
                self._free(row)
                self.rows[r] = None

    def give_rows(self, cache: PagedKVCache) -> None:
        """`cache`, which has no rows, takes over those of this decoder."""
        cache.take_rows(self.rows, self.padding)  # type: ignore[arg-type]

    def reorder(self, parents: Sequence[int]) -> None:
        """Row i continues row `parents[i]` (beam search): block tables move, K/V does not."""
        self.memory.reorder(self.rows, parents)
        self.padding = [self.padding[p] for p in parents]

    def give_back(self) -> tuple[list[int], list[int]]:
        """Ends `continue_rows`: the rows, which may be others by now, and their padding.

        After an error, tokens without K/V in every layer are removed. Everything else that was made here is freed.
        """
        rows = [row for row in self.rows if row is not None]
        for row, padding in zip(rows, self.padding):
            self.memory.crop(row, max(self.length - padding, 0))
        self._free_others()
        self.rows, self._lent = [], []
        return rows, self.padding[: len(rows)]

    def _free_others(self) -> None:
        """Free the lent rows that forks of equal ones have replaced, and what an error has left unfinished."""
        manager = self.memory.manager
        made = [i for i in manager.seq_ids if isinstance(i, int) and i >= self._first_id]
        for seq_id in {*self._lent, *made}.difference(self.rows):
            if seq_id in manager:
                self.memory.free(seq_id)

    def free(self) -> None:
        """Free every block, also those of prompts whose computation has failed."""
        for seq_id in self.memory.manager.seq_ids:
            self.memory.free(seq_id)
        self._packed.close()
        self.rows = []

    def _report(self) -> None:
        if self._on_step is not None:
            self._on_step(self.memory)
