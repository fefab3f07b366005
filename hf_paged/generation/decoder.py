"""PackedDecoder: takes the place of the model in transformers' decoding loops.

The loop keeps its semantics (processors, criteria, scores, beams); only the forward is ours. Rows are sequences of a
PagedMemory, packed without padding. A prompt is prefilled once and forked, and finished rows are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.generation.obstacles import Asked, call_obstacle
from hf_paged.generation.prefill import MAX_PREFILL_TOKENS, Chunk, compute_prompts, is_one_step
from hf_paged.generation.shared_prompts import Prompt, share_prompts
from hf_paged.integration.names import CACHE
from hf_paged.kernels.metadata import to_device
from hf_paged.model.devices import device_of
from hf_paged.sockets import Executor, Parts


def left_padding(attention_mask: torch.Tensor | None, num_rows: int) -> list[int]:
    """Count the zeros in each row of the mask [num_rows, length]. None: no padding."""
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
    """The cache that the loop sees. It may reorder rows and ask for their length."""

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
    """A model for transformers' loops, which runs packed. `expand` consecutive rows share a prompt (beams, samples).

    Invariant between forwards: row r of the batch is sequence `rows[r]` of `memory`, with the K/V of all its tokens but
    the last. `rows[r]` is None if the row has finished and was dropped. With `keep_finished`, finished rows are still
    computed, as in plain generate; calls that return scores or a cache need that. check_code: called before the first
    run, and again when code that runs in the model has changed; it may refuse the model.
    """

    one_group = False
    """Its memory has one group of layers, whatever they keep."""

    @classmethod
    def takes(cls, asked: Asked) -> bool:
        """Return True if calls such as this one are decoded here, or over a dense view."""
        return True

    @classmethod
    def obstacle(cls, asked: Asked) -> str | None:
        """Why this call is not decoded on packed rows, but over a dense view; None: it is."""
        return call_obstacle(asked)

    @classmethod
    def fall_back(cls, obstacle: str) -> None:
        """Raise ValueError if there is no other way to decode such a call."""

    def __init__(
        self,
        executor: Executor,
        asked: Asked,
        *,
        keep_finished: bool,
        check_code: Callable[[], object],
        check_pool: Callable[[Sequence[int]], None] | None = None,
        on_step: Callable[[PagedMemory], None] | None = None,
    ) -> None:
        self._executor = executor
        self._model = executor.model
        # Kept, because transformers looks for it among all parameters.
        self._device = device_of(executor.model)
        self.memory: PagedMemory = executor.memory
        self._check_code = check_code
        executor.is_fixed = True  # each run begins with a look
        self._code, self._structure = -1, executor.weights.structure  # of the last run
        self._expand = asked.expand
        self.keep_finished = keep_finished
        self._chunk = asked.config.prefill_chunk_size
        self._check_pool = check_pool  # raises ValueError if prompts of these lengths do not fit
        self._on_step = on_step
        # Beyond all ids in the memory, which may be a caller's cache with rows: `_free_others` frees from here on.
        known = [seq_id for seq_id in self.memory.manager.seq_ids if isinstance(seq_id, int)]
        self._first_id = max(known, default=-1) + 1
        self._ids = itertools.count(self._first_id)
        self._lent: list[int] = []
        self._num_new = 0  # columns of input_ids that continue the lent rows
        self.criteria: RecordingCriteria | None = None
        self.cache: Any = LoopCache(self)
        self.rows: list[int | None] = []
        self.padding: list[int] = []  # of each row
        self.length = 0  # positions with K/V in every layer, padding included
        self.length_beside = 0  # states of an encoder with K/V that plain generate keeps for each row

    def continue_rows(self, rows: Sequence[int], padding: Sequence[int], length: int, num_new: int) -> None:
        """Start with rows that another owner lends until `give_back`. Each has `length` positions, padding included.

        The last `num_new` columns of the call's input_ids continue the rows.
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
        """Compute prompts; return the logits [num_rows, vocab] after their last tokens.

        input_ids: int64 [num_rows, length], left-padded as attention_mask says. Equal rows are computed once and
        forked. Rows that begin alike share the full blocks of their beginning.
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
        """Return the prompts as int64 [length]. Two of these tokens are equal only if their K/V is."""
        return batch

    def _compute_prompts(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        """Append prompt i to the sequence `seq_ids[i]`. Returns logits [num_prompts, vocab] after the last tokens."""
        # Rows of batches are prompts as wholes; their executor bounds what it computes at once.
        most = MAX_PREFILL_TOKENS if self._executor.is_packed else max(1, sum(len(each.tokens) for each in prompts))

        def compute(chunks: list[Chunk]) -> torch.Tensor:
            tokens = torch.cat([prompts[i].tokens[start:stop] for i, start, stop in chunks])
            counts = [stop - start for _, start, stop in chunks]
            ids = [seq_ids[i] for i, _, _ in chunks]
            # Sequences that continue have tokens before the prompt's.
            starts = [self.memory.manager.num_tokens(own) - count for own, count in zip(ids, counts)]
            parts = self._parts(ids, starts, tokens)
            parts.counts, parts.whole = counts, counts
            parts.wanted = [end - 1 for end in accumulate(counts)]
            return self._run(parts)

        return compute_prompts(self.memory, seq_ids, prompts, compute, self._undivided, self._chunk or most, most)

    def _undivided(self, seq_id: int, start: int, count: int) -> int:
        """Return how many of `count` tokens of a prompt from `start` on can be computed without the next ones."""
        return count

    def _parts(self, seq_ids: list[int], starts: list[int], tokens: torch.Tensor) -> Parts:
        """Return the next tokens of sequences as parts: int64 [num_tokens], one after the other."""
        # Without waiting for a device that has them, where that is possible.
        if self._executor.is_packed and self._device.type != "cpu":
            return Parts(seq_ids, starts, [0] * len(tokens), late=(tokens.to(self._device), None))
        return Parts(seq_ids, starts, tokens.tolist())

    def _run(self, parts: Parts) -> torch.Tensor:
        """Return the logits [num_wanted, vocab] of these parts, whose slots have been appended."""
        weights = self._executor.weights
        weights.look()
        if weights.code != self._code:
            self._check_code()
            self._code = weights.code
        if weights.structure != self._structure:
            self._executor.follow_structure()
            self._structure = weights.structure
        self._extend(parts)
        logits, failed = self._executor.run(parts)
        for error in failed.values():
            raise error
        return cast(torch.Tensor, logits)

    def _extend(self, parts: Parts) -> None:
        """Add what the executor needs besides tokens."""

    def _fork(self, parent_id: int, child_id: int) -> None:
        self.memory.fork(parent_id, child_id)
        self._executor.fork(parent_id, child_id)

    def _free(self, seq_id: int) -> None:
        self.memory.free(seq_id)
        self._executor.free(seq_id)

    def _content(self, seq_id: int) -> bytes:
        """Return bytes that are equal for sequences with the same tokens in the same blocks."""
        manager = self.memory.manager
        return manager.num_tokens(seq_id).to_bytes(8, "little") + manager.block_table(seq_id).tobytes()

    def _fit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts with what this memory can share. Raises ValueError if it is too small for them."""
        drops = self.memory.manager.drops_blocks and not is_one_step(prompts, self._chunk)
        # A state has all tokens of its sequence. Blocks that left a window after an earlier step are not shared.
        if self._executor.has_states or drops:
            prompts = [Prompt(prompt.tokens) for prompt in prompts]
        # Nor are these needed together.
        if drops:
            return prompts
        if self._check_pool is not None:
            self._check_pool([prompt.own_length for prompt in prompts])
        return prompts

    def _fork_rows(self, seq_ids: Sequence[int], index: Sequence[int]) -> list[int | None]:
        """Return a sequence for each row: `seq_ids[i]` for the first row of prompt i, forks of it for the others."""
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
        """Compute the last column of input_ids int64 [num_rows, length]. Returns logits [num_rows, vocab], with zeros
        for dropped rows."""
        device = self._device
        if not self.keep_finished:
            self._drop_finished()
        seq_ids = [row for row in self.rows if row is not None]
        starts = [self.memory.manager.num_tokens(seq_id) for seq_id in seq_ids]
        self.memory.append([(seq_id, 1) for seq_id in seq_ids])
        tokens = input_ids[:, -1].to(device)
        if len(seq_ids) == len(self.rows):
            logits = self._run(self._parts(seq_ids, starts, tokens))
        else:
            index = to_device(np.array(self.active, dtype=np.int64), device)
            some = self._run(self._parts(seq_ids, starts, tokens[index]))
            logits = some.new_zeros(len(self.rows), some.shape[-1]).index_copy_(0, index.to(some.device), some)
        self.memory.step_done(seq_ids)
        self.length += 1
        self._report()
        return logits

    @property
    def active(self) -> list[int]:
        """The rows of the batch that are computed."""
        return [r for r, row in enumerate(self.rows) if row is not None]

    def _drop_finished(self) -> None:
        if self.criteria is None or self.criteria.done is None:
            return
        for r, done in enumerate(self.criteria.done.tolist()):
            row = self.rows[r]
            if done and row is not None:
                self._free(row)
                self.rows[r] = None

    def returned_cache(self) -> Any:
        """Make the cache that the caller gets, which takes over the rows."""
        cache = PagedKVCache(self._model.config, memory=self.memory)
        rows = [row for row in self.rows if row is not None]
        cache.take_rows(rows, self.padding)
        self._executor.give_states(rows, cache)
        return cache

    def reorder(self, parents: Sequence[int]) -> None:
        """Let row i continue row `parents[i]` (beam search). Block tables move, K/V does not."""
        former = [row for row in self.rows if row is not None]
        assert len(former) == len(self.rows)  # beams are all computed to the end
        self.rows = self._fork_rows(former, parents)
        self.padding = [self.padding[p] for p in parents]
        # After all forks, so that no block of a row that is continued is free in between.
        for seq_id in set(former).difference(self.rows):
            self._free(seq_id)

    def give_back(self) -> tuple[list[int], list[int]]:
        """End `continue_rows`; return the rows, which may be other sequences now, and their padding.

        After an error, tokens that lack K/V in some layer are removed. All other sequences made here are freed.
        """
        rows = [row for row in self.rows if row is not None]
        for row, padding in zip(rows, self.padding):
            self.memory.crop(row, max(self.length - padding, 0))
        self._free_others()
        self.rows, self._lent = [], []
        return rows, self.padding[: len(rows)]

    def _free_others(self) -> None:
        """Free lent rows that a fork of an equal row has replaced, and sequences that an error has left unfinished."""
        manager = self.memory.manager
        made = [i for i in manager.seq_ids if isinstance(i, int) and i >= self._first_id]
        for seq_id in {*self._lent, *made}.difference(self.rows):
            if seq_id in manager:
                self.memory.free(seq_id)

    def free(self) -> None:
        """Free every block, also those of prompts whose computation has failed."""
        for seq_id in self.memory.manager.seq_ids:
            self.memory.free(seq_id)
        self._executor.close()
        self.rows = []

    def _report(self) -> None:
        if self._on_step is not None:
            self._on_step(self.memory)
