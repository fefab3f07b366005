"""PackedDecoder: takes the place of the model in transformers' decoding loops.

The loop keeps its semantics (processors, criteria, scores, beams); only the forward is ours. Rows are sequences of a
PagedMemory, packed without padding. A prompt is prefilled once and forked, and finished rows are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged.cache.memory import PagedMemory
from hf_paged.generation.prompts import Prompt, share_prompts
from hf_paged.model.packed import PackedModel

MAX_PREFILL_TOKENS = 8192
"""Tokens of prompts computed in one forward: bounds the activations, not the prompts."""


class RecordingCriteria(StoppingCriteriaList):  # type: ignore[misc]
    """The criteria of a call, unchanged. Records which rows they have stopped."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        super().__init__(criteria)
        self.done: torch.Tensor | None = None  # bool [num_rows]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stopped: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self.done = stopped if self.done is None else self.done | stopped
        return stopped


class RowsCache:
    """What the loop holds as `past_key_values`: it may reorder the rows and ask for their length."""

    is_compileable = False
    is_croppable = False

    def __init__(self, decoder: PackedDecoder) -> None:
        self._decoder = decoder

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._decoder.reorder(beam_idx.tolist())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._decoder.length


class PackedDecoder:
    """`expand` consecutive rows of the batch share a prompt (beams, parallel samples).

    Invariant between forwards: row r of the batch is sequence `rows[r]` of `memory`, holding the K/V of all its tokens
    but the last; None for a finished row that was dropped. With `keep_finished`, finished rows are still computed, as
    in plain generate; calls that return scores or a cache need that.
    """

    def __init__(
        self,
        packed: PackedModel,
        *,
        expand: int,
        keep_finished: bool,
        prefill_chunk_size: int | None = None,
        check_pool: Callable[[Sequence[int]], None] | None = None,
        on_step: Callable[[PagedMemory], None] | None = None,
    ) -> None:
        self._packed = packed
        self._model = packed.model
        self.memory = packed.memory
        self._expand = expand
        self.keep_finished = keep_finished
        self._chunk = prefill_chunk_size
        self._check_pool = check_pool  # raises ValueError if prompts of these lengths do not fit
        self._on_step = on_step
        self._next_id = 0
        self.criteria: RecordingCriteria | None = None
        self.cache = RowsCache(self)
        self.rows: list[int | None] = []
        self.padding: list[int] = []
        self.length = 0

    # -- what the loops ask of a model --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # A `_reorder_cache` method of the model would index K/V tensors; RowsCache moves block tables.
        if name == "_reorder_cache":
            raise AttributeError(name)
        return getattr(self._model, name)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **_: Any
    ) -> dict[str, Any]:
        return model_kwargs

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], **_: Any
    ) -> CausalLMOutputWithPast:
        return self._output(self.prefill(input_ids, model_kwargs.get("attention_mask")))

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:
        return self._output(self.decode(input_ids))

    def _output(self, logits: torch.Tensor) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=logits.unsqueeze(1), past_key_values=self.cache)

    # -- the forwards -------------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def prefill(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """input_ids int64 [num_rows, length], left-padded by attention_mask -> logits [num_rows, vocab] of the ends.

        Equal rows are computed once and forked. Rows that begin alike share the full blocks of their beginning.
        """
        heads = input_ids[:: self._expand]
        self.length = input_ids.shape[1]
        if attention_mask is None:
            padding = [0] * len(heads)
        else:
            padding = (attention_mask[:: self._expand] == 0).sum(dim=1).tolist()
        if len(heads) > 1:
            heads = heads.to("cpu", torch.int64)
        prompts, index = share_prompts([head[pad:] for head, pad in zip(heads, padding)], self.memory.block_size)
        prompts = self._fit(prompts)
        seq_ids = [self._new_id() for _ in prompts]
        logits = self._compute(seq_ids, prompts)
        index = [i for i in index for _ in range(self._expand)]
        self.rows = self._fork_rows(seq_ids, index)
        self.padding = [pad for pad in padding for _ in range(self._expand)]
        self._report()
        return logits if index == [*range(len(logits))] else logits[torch.tensor(index, device=logits.device)]

    def _fit(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts as this memory can share them. Raises ValueError if it is too small for them."""
        has_windows = any(manager.sliding_window is not None for manager in self.memory.managers)
        lengths = [prompt.own_length for prompt in prompts]
        in_one_step = sum(lengths) <= MAX_PREFILL_TOKENS and max(lengths) <= (self._chunk or MAX_PREFILL_TOKENS)
        if has_windows and not in_one_step:
            # Blocks that left a window after an earlier step are neither shared nor needed together.
            return [Prompt(prompt.tokens) for prompt in prompts]
        if self._check_pool is not None:
            self._check_pool(lengths)
        return prompts

    def _fork_rows(self, seq_ids: Sequence[int], index: Sequence[int]) -> list[int | None]:
        """A sequence for each row: `seq_ids[i]` for the first row of prompt i, forks of it for the others."""
        rows: list[int | None] = []
        taken: set[int] = set()
        for i in index:
            row = seq_ids[i]
            if i in taken:
                row = self._new_id()
                self.memory.fork(seq_ids[i], row)
            taken.add(i)
            rows.append(row)
        return rows

    def _compute(self, seq_ids: Sequence[int], prompts: Sequence[Prompt]) -> torch.Tensor:
        """Compute prompts, packed, in chunks; logits [num_prompts, vocab] after the last token of each."""
        device = self._model.device
        done = [0] * len(prompts)
        logits: list[torch.Tensor | None] = [None] * len(prompts)
        while any(row is None for row in logits):
            chunks = self._append_chunks(seq_ids, prompts, done)
            ids = [seq_ids[i] for i, _ in chunks]
            metadata, positions = self.memory.step_metadata(ids, [count for _, count in chunks], device)
            tokens = torch.cat([prompts[i].tokens[done[i] : done[i] + count] for i, count in chunks]).to(device)
            last = metadata[0].query_start_loc[1:].long() - 1
            rows = self._packed.forward(tokens, positions, metadata, last)
            for (i, count), row in zip(chunks, rows):
                done[i] += count
                if done[i] == len(prompts[i].tokens):
                    logits[i] = row
            self.memory.step_done(ids)
        return torch.stack([row for row in logits if row is not None])

    def _append_chunks(
        self, seq_ids: Sequence[int], prompts: Sequence[Prompt], done: list[int]
    ) -> list[tuple[int, int]]:
        """Append the next step's tokens; returns (index of the prompt, number of tokens). Notes what is shared as done.

        A prompt starts with the blocks of its source as soon as these are written, which may be in the same step: each
        layer writes the K/V of the whole step before it attends.
        """
        budget = MAX_PREFILL_TOKENS
        chunks: list[tuple[int, int]] = []
        appends: list[tuple[int, int]] = []
        appended = list(done)
        for i, prompt in enumerate(prompts):
            count = min(len(prompt.tokens) - max(done[i], prompt.shared), self._chunk or budget, budget)
            if count <= 0 or (prompt.source is not None and appended[prompt.source] < prompt.shared):
                continue
            if prompt.source is not None and not done[i]:
                self.memory.append(appends)
                appends = []
                self.memory.fork(seq_ids[prompt.source], seq_ids[i])
                self.memory.crop(seq_ids[i], prompt.shared)
                done[i] = appended[i] = prompt.shared
            appends.append((seq_ids[i], count))
            chunks.append((i, count))
            appended[i] += count
            budget -= count
        self.memory.append(appends)
        return chunks

    def decode(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [num_rows, length] so far -> logits [num_rows, vocab]; zeros for dropped rows."""
        device = self._model.device
        self.length = input_ids.shape[1]
        if not self.keep_finished:
            self._drop_finished()
        active = [r for r, row in enumerate(self.rows) if row is not None]
        seq_ids = [self.rows[r] for r in active]
        counts = [1] * len(active)
        self.memory.append(list(zip(seq_ids, counts)))
        metadata, positions = self.memory.step_metadata(seq_ids, counts, device)
        tokens = input_ids[:, -1].to(device)
        if len(active) == len(self.rows):
            logits = self._packed.forward(tokens, positions, metadata)
        else:
            index = torch.tensor(active, device=device)
            some = self._packed.forward(tokens[index], positions, metadata)
            logits = some.new_zeros(len(self.rows), some.shape[-1]).index_copy_(0, index, some)
        self.memory.step_done(seq_ids)
        self._report()
        return logits

    def _drop_finished(self) -> None:
        if self.criteria is None or self.criteria.done is None:
            return
        for r, done in enumerate(self.criteria.done.tolist()):
            row = self.rows[r]
            if done and row is not None:
                self.memory.free(row)
                self.rows[r] = None

    def reorder(self, parents: Sequence[int]) -> None:
        """Row i continues row `parents[i]` (beam search): block tables move, K/V does not."""
        self.memory.reorder(self.rows, parents)
        self.padding = [self.padding[p] for p in parents]

    def free(self) -> None:
        """Free every block, also those of prompts whose computation has failed."""
        for seq_id in self.memory.managers[0].seq_ids:
            self.memory.free(seq_id)
        self.rows = []

    def _report(self) -> None:
        if self._on_step is not None:
            self._on_step(self.memory)
