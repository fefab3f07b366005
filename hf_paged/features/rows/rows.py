"""Computes sequences as the rows of batches, as `generate` does with a left-padded one, for models that do not run
packed: those that each compute one token are one forward `[num_rows, 1]`, and prompts that begin are another.

- *K/V* lies in the same blocks as in a packed step. The cache shows sequences as its rows (`PagedKVCache.view_rows`).
  Where attention can be routed to our kernels, they read block tables. Elsewhere each layer gathers a dense view, with
  padding on the left, a mask and positions for each row.
- *States* (recurrent, convolution, an indexer's keys) are in `States`: a forward takes those of its rows, joined, and
  changes them in place. A layer has one flag for all rows that says whether there is a state, so that prompts that
  begin and rows that continue never mix. Sequences whose forward is interrupted lose their states: see `lost`.
- *A model without K/V* has states alone. Its memory has no groups of layers, and so no blocks.

Which rows may share a forward is found by trying (`row_trial`). Rows never mix beyond the length from which a rotary
embedding depends on the longest row, nor while third-party code is in the model. Where results depend on how a prompt
is split, it is computed as a whole, then one token at a time; anything else in any pieces. Pieces that continue prompts
share a forward if they have as many tokens. Knows models and the ids of sequences; never requests or sampling.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import GenerationMixin

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.cache.paged_layers import PagedLayer
from hf_paged.errors import LayersChanged, UnsupportedModelError
from hf_paged.features.media.media import check_heard, embedded, sound_overrides, step_arguments
from hf_paged.features.rows.pieces import Part, Piece, run_pieces
from hf_paged.features.rows.states import States, is_tree
from hf_paged.integration.attention import configs_of
from hf_paged.integration.names import CACHE, cache_argument
from hf_paged.kernels.metadata import AttentionMetadata, DecodeArrays, to_device
from hf_paged.model.devices import device_of
from hf_paged.model.hidden import hidden_states, no_hidden
from hf_paged.model.inputs import makes_own_state, step_positions
from hf_paged.model.overrides import Override
from hf_paged.model.packed import decode_step
from hf_paged.model.packed_step import Entrance, PackedCache, PackedStep, latent_overrides, uncompiled
from hf_paged.model.state import state_of
from hf_paged.model.support import examine, rotary_limit
from hf_paged.sockets import Executor, Parts, Results

Together = Literal["any", "equal", "one"]
"""Rows that share a forward: any, those of equal length, or none."""

PADDED_TOKENS = 1024
"""Positions of a forward that may be padding for any part. In a larger one, at most a fifth of them is padding."""

FORWARDS = 16
"""Most forwards of a run, where each token of a prompt is one."""

# On a GPU, `generation/engine/sizing.py` leaves room for a dense view of so many positions.
VIEWED_TOKENS = 1 << 17
"""Positions of a forward of several parts: each layer gathers their K/V beside the blocks."""


class _OwnCache:
    """The state of a model that keeps it in a list, or in a class of its own: it makes one where it is given None, and
    returns it. The interface is that of a PagedKVCache without rows."""

    keeps_states = True
    layers: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.value: Any = None
        self._like: Any = None  # an object of the model's class, for what is no state in it

    @property
    def states(self) -> Any:
        if is_tree(self.value):
            return self.value
        self._like = self.value
        return {name: part for name, part in vars(self.value).items() if is_tree(part)}

    def set_states(self, states: object) -> None:
        self.value = states
        if states is not None and self._like is not None:
            self.value = copy.copy(self._like)
            vars(self.value).update(states)

    def release_rows(self) -> None:
        self.value = None


class Rows:
    """The forwards of a model over a memory, and the states of sequences.

    by_tables: its attention reads K/V through the block tables, in our kernels. overrides: of such forwards.
    """

    def __init__(
        self, model: Model, memory: PagedMemory, *, by_tables: bool = False, overrides: Sequence[Override] = ()
    ) -> None:
        self._memory = memory
        self.by_tables = by_tables
        self._configs = configs_of(model)
        self._sound = sound_overrides(model)
        self._overrides = (Entrance(model), *latent_overrides(model), *self._sound, *overrides)
        self._packed = PackedCache(memory, model.config.get_text_config(decoder=True).num_hidden_layers)
        self._decode_arrays = DecodeArrays(memory.block_size)
        self._cache_name = cache_argument(model) or CACHE
        self.cache: Any = _OwnCache() if makes_own_state(model) else PagedKVCache(model.config, memory=memory)
        self.states = States()
        self.has_states = self.cache.keeps_states
        self.has_kv = any(isinstance(layer, PagedLayer) for layer in self.cache.layers)
        self._device = device_of(model)
        self._makes_inputs = (
            type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
        )
        self._parameters = inspect.signature(model.forward).parameters

    def compute(self, model: Model, parts: Sequence[Part]) -> torch.Tensor:
        """Logits [len(parts), keep, vocab_size] of one forward. The parts begin their sequences, or have one token
        each, or continue by as many tokens, or there is one part, as with media. The tokens' slots must have been
        appended."""
        width, end = max(len(part.ids) for part in parts), max(part.end for part in parts)
        is_first = parts[0].start == 0
        by_tables = self.by_tables
        if (media := parts[0].media) is not None and media.attends_both_ways:
            # The model makes the mask.
            by_tables = False
            if not is_first:
                raise UnsupportedModelError("tokens that attend both ways must be computed with the first ones")
        # Rows without K/V in a dense view have padding in their first forward alone.
        is_padded = is_first or (self.has_kv and not by_tables)
        padding = [end - part.end if is_padded else 0 for part in parts]
        tokens, positions = np.zeros((2, len(parts), width), dtype=np.int64)
        for row, part in enumerate(parts):
            first = width - len(part.ids)
            tokens[row, first:] = part.ids
            positions[row, first:] = range(part.start + part.delta, part.end + part.delta)
        mask = np.arange(end) >= np.array(padding)[:, None] if any(padding) else None
        starts = [(part.seq_id, part.start) for part in parts]
        # Taken before the forward, which changes them in place; put back only if it has ended.
        self.cache.set_states(self.states.take(starts) if self.has_states and not is_first else None)
        if self.has_kv:
            attend = self._packed.update if by_tables else None
            self.cache.view_rows([part.seq_id for part in parts], padding, end - width, end, attend)
        try:
            call = partial(self._call, model, tokens, positions, mask, parts[0], is_first=is_first)
            if any(part.note for part in parts):
                call = partial(self._noting, model, parts, call)
            if by_tables:
                logits = self._attending(model, parts, mask, call)
            else:
                logits = call() if media is None else self._hearing(call)
            if self.has_kv and (kept := self.cache.get_seq_length()) != end:
                raise UnsupportedModelError(f"it keeps {kept} entries for {end} tokens")
            if self.has_states:
                self.states.put([(part.seq_id, part.end) for part in parts], self.cache.states)
        finally:
            # Even after an error: the rows belong to the engine.
            self.cache.release_rows()
        return logits

    def _noting(self, model: Model, parts: Sequence[Part], call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a forward whose hidden states some parts want."""
        logits: torch.Tensor
        logits, states = hidden_states(model).of(call)
        for part, own in zip(parts, () if states is None else states):
            if part.note is not None:
                part.note(own[-len(part.ids) :])
        return logits

    def _attending(
        self, model: Model, parts: Sequence[Part], mask: np.ndarray | None, call: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The result of a forward in which attention reads K/V through the block tables."""
        metadata, positions = self._step(parts)
        # A prompt starts at 0, so that the mask has the shape of the forward.
        places = None if mask is None else to_device(np.flatnonzero(mask), self._device)
        self._packed.begin_step(metadata, positions, places)
        logits: torch.Tensor = PackedStep(self._packed, self._configs, self._overrides).run(call)
        self._packed.refuse_unread(model)
        return logits

    def _hearing(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of a forward that may ask for the features of audio. If Ctrl-C leaves the functions replaced, they
        still do for others what the model's own do."""
        try:
            for override in self._sound:
                override.apply(self)
            return call()
        finally:
            for override in self._sound:
                override.undo(self)

    def refuse_windows(self) -> None:
        """After a forward by tables: raises UnsupportedModelError if a layer keeps fewer tokens than it attends to."""
        for handle in self._packed.handles:
            kept = self.cache.layers[handle.layer_idx].sliding_window
            if kept is not None and kept != handle.bounds.most:
                raise UnsupportedModelError(f"layer {handle.layer_idx} keeps a window that its attention does not name")

    def _step(self, parts: Sequence[Part]) -> tuple[list[AttentionMetadata], torch.Tensor]:
        """Metadata for each group of layers, and the positions int64 [num_tokens] of the tokens."""
        seq_ids, manager = [part.seq_id for part in parts], self._memory.manager
        if any(len(part.ids) > 1 or part.end < manager.num_tokens(part.seq_id) for part in parts):
            lengths, ends = [len(part.ids) for part in parts], [part.end for part in parts]
            return self._memory.step_metadata(seq_ids, lengths, self._device, ends)
        step = decode_step(self._decode_arrays, self._memory, seq_ids, [part.start for part in parts])
        return self._decode_arrays.metadata(step, self._device), to_device(step.positions, self._device)

    def _call(
        self,
        model: Model,
        tokens: np.ndarray,
        positions: np.ndarray,
        mask: np.ndarray | None,
        part: Part,
        *,
        is_first: bool,
    ) -> torch.Tensor:
        is_own = isinstance(self.cache, _OwnCache)
        kwargs: dict[str, Any] = {self._cache_name: self.cache.value if is_own else self.cache}
        if "logits_to_keep" in self._parameters:
            kwargs["logits_to_keep"] = part.keep
        if mask is not None:
            kwargs["attention_mask"] = to_device(mask.astype(np.int64), self._device)
        ids = to_device(tokens, self._device)
        if "position_ids" in self._parameters:
            # Pass positions as generate does: not every model derives them from its cache.
            kwargs["position_ids"] = to_device(positions, self._device)
            if self._makes_inputs:
                kwargs["position_ids"] = step_positions(model, ids, kwargs["position_ids"], is_first=is_first)
        beside = {} if part.media is None else step_arguments([part.media])
        given = embedded(model, ids, beside) if beside else {}
        output = uncompiled(model)(input_ids=ids, use_cache=True, return_dict=True, **{**kwargs, **given})
        check_heard(model, beside)
        if is_own:
            self.cache.value = output[self._cache_name]
        logits: torch.Tensor = output.logits[:, -part.keep :]
        return logits


class Way(NamedTuple):
    """The way in which a model computes rows; see the attributes of RowModel with these names."""

    by_tables: bool
    depends_on_split: bool
    prompts: Together
    decodes: Together
    pieces: Together
    state_bytes: dict[torch.device, int]
    tensor_bytes: dict[torch.device, int]
    bytes_per_token: dict[torch.device, int]
    no_prefixes: str


class RowModel(Executor):
    """A model bound to a PagedMemory. `forward` computes the next tokens of sequences, as many rows at once as the
    model allows.

    Invariant: `states` has the state of every sequence with computed tokens, after the last computed token. Its `fork`,
    and `free`, must be called together with those of the block tables. An interrupted `forward` may break it: see
    `lost`.

    `depends_on_split`: results depend on how a sequence is split into forwards. (A recurrent layer may resume its state
    for one token only, a windowed cache returns what it holds at that time, and some models cannot continue a prompt.)
    `no_prefixes`: why a sequence cannot begin with what another one has computed; "" if it can, in any pieces, or by
    single tokens where results depend on the split.
    `is_incremental`: a sequence must be computed as generate does: the whole prompt, then one token at a time. So it is
    if results depend on the split, and the caller sets it while third-party code in the model may depend on it.
    `is_alone`: every forward has one row; the caller sets it in the same case.
    `prompts`, `decodes`, `pieces`: which rows share a forward in which they begin, advance by one token, or by as many.
    `by_tables`: attention reads K/V through the block tables, not a dense view (while `is_alone` is False).
    """

    model: Model
    memory: PagedMemory
    viewed_tokens = VIEWED_TOKENS

    def __init__(self, model: Model, memory: PagedMemory, way: Way, overrides: Sequence[Override] = ()) -> None:
        self.model = model
        self.memory = memory
        self.by_tables, self.depends_on_split = way.by_tables, way.depends_on_split
        self.prompts, self.decodes, self.pieces = way.prompts, way.decodes, way.pieces
        self._rows = Rows(model, memory, by_tables=way.by_tables, overrides=overrides)
        self.states, self.has_states = self._rows.states, self._rows.has_states
        self._limit = rotary_limit(model) or math.inf
        self.state_bytes, self.tensor_bytes = way.state_bytes, way.tensor_bytes
        self.state_bytes_per_token, self.no_prefixes = way.bytes_per_token, way.no_prefixes
        self.is_incremental = self.depends_on_split
        self.is_alone = False
        self.weights = state_of(model).weights
        self.weights.look()
        self._structure = self.weights.structure
        self.max_length = rotary_limit(model, ["dynamic"])
        self.no_hidden = no_hidden(model)

    @property
    def verifies(self) -> bool:
        return not self.is_incremental

    @property
    def splits_prompts(self) -> bool:
        return self.one_order is not None or not self.is_incremental

    @property
    def order_obstacle(self) -> str:
        if self.by_tables or not self._rows.has_kv:
            return ""
        return f"the model reads a dense view of its K/V ({examine(self.model).present.reason})"

    @property
    def chunk(self) -> int | None:
        return None if self.one_order is None else FORWARDS

    def beside(self, reason: str | None) -> RowModel:
        self.is_alone = reason is not None
        self.is_incremental = self.depends_on_split or self.is_alone
        return self

    def measure(self, tried: Model, num_tokens: int) -> None:
        count = num_tokens if device_of(self.model).type == "cuda" else 1
        self.memory.hold(count)
        self.memory.append([(-1, count)])
        self.forward([Part(-1, [0] * count, 0)], tried=tried)
        self.free(-1)
        self.memory.free(-1)

    def fork(self, parent_id: int, child_id: int) -> None:
        self.states.fork(parent_id, child_id)

    def give_states(self, seq_ids: Sequence[int], cache: Any) -> None:
        if self.has_states:
            rows = [(seq_id, self.memory.manager.num_tokens(seq_id)) for seq_id in seq_ids]
            cache.set_states(self.states.joined(rows))

    def suspend(self, seq_id: int, num_tokens: int) -> None:
        self.states.to_host(seq_id, num_tokens)

    def close(self) -> None:
        self.states.clear()

    def lost(self, rows: Iterable[tuple[int, int]]) -> list[int]:
        """The sequences, of (seq_id, number of its computed tokens), without a state after as many tokens: a forward
        with them was interrupted, or its results were. They must be computed again."""
        if not self.has_states:
            return []
        return [seq_id for seq_id, num_computed in rows if num_computed and not self.states.has(seq_id, num_computed)]

    def free(self, seq_id: int) -> None:
        """The sequence has ended."""
        self.states.free(seq_id)
        self.let_go(seq_id)

    def keep(self, rows: Iterable[tuple[int, int, int]], needed: set[int], *, clears: bool) -> list[int]:
        """Make checkpoints: copies of states, as (seq_id, num_tokens, number). clears: drop all former ones first.
        Returns the numbers of those for which there is no memory; for one that is `needed`, the error is raised."""
        if clears:
            self.states.checkpoints.clear()
        lost = []
        for seq_id, num_tokens, number in rows:
            try:
                self.states.keep(seq_id, num_tokens, number)
            except torch.OutOfMemoryError:
                if number in needed:
                    raise
                lost.append(number)
        return lost

    def hold(self, seq_id: int, num_tokens: int) -> None:
        """Keep the state of a sequence, which `go_back` may want again, beside what the next forward makes of it."""
        if self.states.has(seq_id, num_tokens):
            self.states.keep(seq_id, num_tokens, _held(seq_id))

    def let_go(self, seq_id: int) -> None:
        """The state that was held for a sequence is of no use."""
        self.states.drop(_held(seq_id))

    def go_back(self, seq_id: int, num_tokens: int) -> None:
        """The sequence has the state again that was held for it, or none if it has no tokens."""
        if num_tokens:
            self.states.restore(_held(seq_id), seq_id, num_tokens)
        else:
            self.states.free(seq_id)
        self.let_go(seq_id)

    def run(self, parts: Parts) -> Results:
        counts = parts.lengths
        pieces = [
            self._pieces(start, start + count, whole)
            for start, count, whole in zip(parts.starts, counts, parts.whole or counts)
        ]
        return run_pieces(parts, pieces, self._forward, {})

    def _pieces(self, start: int, end: int, whole: int) -> list[Piece]:
        """The tokens from `start` on: at once, or as `generate` computes them, those up to `whole` at once if they are
        due, then one by one; or each by itself, in one order."""
        if self.one_order is None and not self.is_incremental:
            return [(start, end)]
        first = whole if self.one_order is None else 0
        pieces = [(0, first)] if start < first <= end else []
        return pieces + [(position, position + 1) for position in range(max(start, first), end)]

    def _forward(self, parts: list[Part]) -> list[torch.Tensor]:
        with self.one_order or nullcontext():
            return self.forward(parts)

    def forward(self, parts: Sequence[Part], *, tried: Model | None = None) -> list[torch.Tensor]:
        """The logits [keep, vocab_size] of each part, in order; parts of different sequences. tried: computes them in
        place of the model.

        The tokens' slots must have been appended; their K/V is in the blocks afterwards. The caller has looked at the
        weights (`Weights.look`). Raises LayersChanged if the model has other modules than when this object was made;
        the states of all sequences are then of no use.
        """
        if self.weights.structure != self._structure:
            raise LayersChanged(f"the modules of {type(self.model).__name__} have changed")
        self._rows.by_tables = self.by_tables and not self.is_alone
        results: dict[int, torch.Tensor] = {}
        for batch in self._batches(parts):
            logits = self._rows.compute(self.model if tried is None else tried, [parts[index] for index in batch])
            results.update(zip(batch, logits))
        return [results[index] for index in range(len(parts))]

    def _batches(self, parts: Sequence[Part]) -> Iterator[list[int]]:
        """Indexes of the parts of each forward."""
        groups: dict[Hashable, list[int]] = {}
        for index, part in enumerate(parts):
            groups.setdefault(self._key(part) or index, []).append(index)
        for members in groups.values():
            # Nothing is padded or gathered then.
            if self._rows.by_tables and parts[members[0]].start:
                yield members
                continue
            # Neighbours in this order have similar lengths, so that a forward has little padding.
            members.sort(key=lambda index: parts[index].end)
            batch: list[int] = []
            total = 0
            for index in members:
                padded = (len(batch) + 1) * parts[index].end
                # A quarter more than the parts have is a fifth of the whole.
                most = min(max(PADDED_TOKENS, (total + parts[index].end) * 5 // 4), VIEWED_TOKENS)
                if batch and padded > most:
                    yield batch
                    batch, total = [], 0
                batch.append(index)
                total += parts[index].end
            yield batch

    def _key(self, part: Part) -> Hashable:
        """Parts with the same key may share a forward; None: this one has a forward of its own."""
        is_first = part.start == 0
        count = 0 if is_first else len(part.ids)
        together = self.prompts if is_first else self.decodes if count == 1 else self.pieces
        if self.is_alone or together == "one" or part.end > self._limit or part.media is not None:
            return None
        length = part.end if together == "equal" else None
        shape = None
        if self.has_states and not is_first:
            shape = self.states.shape_number(part.seq_id, part.start)
        return count, length, shape, part.keep


def _held(seq_id: int) -> int:
    """The number of the state that is held for a sequence, apart from those of checkpoints."""
    # Numbers of checkpoints are not negative.
    return -1 - seq_id
