"""An encoder-decoder model on rows of one PagedMemory, and whether a model can run so.

The K/V of an encoder's states is a sequence of its own, in the blocks that the decoder's tokens use: it never grows,
and all beams and samples of a row read the same blocks. Knows models and sequences by id; never requests or sampling.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from hf_paged.annotations import Model
from hf_paged.cache.cache_rows import CacheRows
from hf_paged.cache.memory import PagedMemory
from hf_paged.features.encoder_decoder.caches import Gather, PairCache, RowStep
from hf_paged.integration.attention import configs_of, name_ours, name_own, names
from hf_paged.integration.names import CACHE
from hf_paged.kernels.metadata import AttentionMetadata, DecodeArrays, to_device
from hf_paged.kernels.quantised import dequantised
from hf_paged.model.inputs import step_inputs
from hf_paged.model.overrides import Override
from hf_paged.model.packed import Entrance, PackedStep, decode_step, uncompiled
from hf_paged.model.state import state_of
from hf_paged.sockets import Executor, Parts, Results


class FirstStep(PackedStep):
    """The first forward: attention goes through our function, which records K/V, and masks are the model's own."""

    def enter(self) -> None:
        name_ours(self, self._configs)

    def leave(self) -> None:
        names.here.values = self._names
        name_own(self)


class OwnStep(PackedStep):
    """A forward with attention and masks of the model's own."""

    def enter(self) -> None:
        pass

    def leave(self) -> None:
        pass


class EncoderDecoderModel(Executor):
    """A model bound to a PagedMemory. Rows are sequences of it; so are the encoder's states, with ids from `encoders`.

    gathers: its attention is code of its own, which gets K/V gathered from blocks. overrides: as for PackedModel.

    A run computes what `generate` has prepared: `extra["inputs"]` has the arguments of the model's forward for these
    rows, `extra["padding"]` the left padding of each, `extra["encoder"]` the sequence of its encoder's states. A run of
    prompts appends these sequences, if `extra["check_room"]` does not refuse their lengths.
    """

    def __init__(
        self,
        model: Model,
        memory: PagedMemory,
        *,
        gathers: bool = False,
        overrides: Sequence[Override] = (),
    ) -> None:
        self.model = model
        self.memory = memory
        self.gathers = gathers
        self._overrides = (Entrance(model), *overrides)
        self.cache = PairCache()
        self.weights = state_of(model).weights
        self._structure: Any = None
        self._decode_arrays = DecodeArrays(memory.block_size)
        # Its forward writes to the encoder's states, which later ones do not read.
        self._changes_states = False
        self._visible: torch.Tensor  # bool [encoders, length]: which states have K/V
        # The last record of rows' reads of their encoders' states: those encoders, the pool's layout, the record.
        self._reads: tuple[list[Any], object, AttentionMetadata] | None = None

    def run(self, parts: Parts) -> Results:
        """The logits after the last token of each part, whatever is wanted."""
        given = parts.extra
        rows, beside = parts.seq_ids, (given["encoder"], given["padding"], given["inputs"])
        if any(parts.starts):
            return self.later(rows, *beside)[:, -1], {}
        return self.first(rows, *beside, given.get("check_room"))[:, -1], {}

    def first(
        self,
        rows: Sequence[int],
        encoders: Sequence[tuple[str, int]],
        padding: Sequence[int],
        inputs: dict[str, Any],
        check_room: Callable[[Sequence[int]], None] | None = None,
    ) -> torch.Tensor:
        """Compute the prompts of new sequences `rows`, with left padding, and write the K/V of their encoders' states.

        inputs: of the model's forward, for these rows. check_room: raises ValueError if sequences of these lengths do
        not fit. Returns logits [num_rows, tokens, vocab] as the model does.
        """
        memory, device = self.memory, self.model.device
        columns = inputs["decoder_input_ids"].shape[1]
        lengths = [columns - pad for pad in padding]

        def write_encoder(visible: torch.Tensor) -> torch.Tensor:
            counts = visible.sum(dim=1).tolist()
            # Before these are appended: only now is the number of visible states known.
            if check_room is not None:
                check_room([*lengths, *counts])
            memory.append(list(zip(encoders, counts)))
            self._visible = visible
            slots = [memory.manager.slots(encoder, 0, count) for encoder, count in zip(encoders, counts)]
            return to_device(np.array(list(itertools.chain(*slots)), dtype=np.int64), visible.device)

        metadata, _ = memory.step_metadata(rows, lengths, device)
        keep = torch.from_numpy(np.arange(columns) >= np.array(padding)[:, None])
        step = RowStep(
            metadata[0], memory.pool, 0, list(padding), keep=keep.to(device), write_encoder=write_encoder,
            gather=Gather() if self.gathers else None,
        )  # fmt: skip
        self.cache.own.length = 0
        self.cache.is_updated.clear()
        version = _version(inputs["encoder_outputs"][0])
        logits = self._forward(step, inputs, FirstStep)
        # Without a counter of writes nobody knows, so copies are given.
        self._changes_states = version is None or version != _version(inputs["encoder_outputs"][0])
        self.cache.own.length = columns
        return logits

    def later(
        self,
        rows: Sequence[int],
        encoders: Sequence[tuple[str, int]],
        padding: Sequence[int],
        inputs: dict[str, Any],
    ) -> torch.Tensor:
        """Compute one more token of each row; its encoder's states are `encoders[row]`. Logits [num_rows, 1, vocab]."""
        memory, device = self.memory, self.model.device
        starts = [memory.manager.num_tokens(row) - 1 for row in rows]
        arrays = decode_step(self._decode_arrays, memory, list(rows), starts)
        metadata = self._decode_arrays.metadata(arrays, device)
        length, states = self.cache.own.length, self.encoder_length
        step = RowStep(metadata[0], memory.pool, length, list(padding), encoder_length=states)
        if self.gathers:
            step.gather = self._gather(rows, padding, length + 1, encoders, [0] * len(encoders), states)
        else:
            step.encoder = self._reads_of(list(encoders))
        # After the first forward only shapes of the states are read.
        shown = _first_row(inputs["encoder_outputs"], len(rows), as_copy=self._changes_states)
        inputs = {**inputs, "encoder_outputs": shown}
        logits = self._forward(step, inputs, PackedStep)
        self.cache.own.length += 1
        return logits

    @property
    def encoder_length(self) -> int:
        """States of each row of the encoder, masked ones included."""
        return self._visible.shape[1]

    def encoder_states(self, layer_idx: int, which: int, encoders: Sequence[tuple[str, int]]) -> torch.Tensor:
        """K (`which` 0) or V (1) of the states of these encoders in a layer, zeros for masked ones: [len(encoders),
        num_kv_heads, length, (v_)head_dim]."""
        pool, manager, size = self.memory.pool, self.memory.manager, self.memory.block_size
        cache, scales = pool[layer_idx].elements[which], pool[layer_idx].scales[which]
        dtype = pool.written_in(layer_idx)[which]
        states = torch.zeros(len(encoders), self.encoder_length, *cache.shape[2:], dtype=dtype, device=cache.device)
        for row, encoder in enumerate(encoders):
            places = np.array(manager.slots(encoder, 0, manager.num_tokens(encoder)), dtype=np.int64)
            slots = to_device(places, cache.device)
            place = slots // size, slots % size
            own = cache[place] if scales is None else cache.view(torch.int8)[place].view(cache.dtype)
            states[row, self._visible[encoder[1]]] = dequantised(own, None if scales is None else scales[place], dtype)
        return states.transpose(1, 2)

    def _gather(
        self,
        rows: Sequence[int],
        padding: Sequence[int],
        length: int,
        encoders: Sequence[Any],
        encoder_padding: Sequence[int],
        encoder_length: int,
    ) -> Gather:
        """Reads the first tokens of these rows, and the states of their encoders, with padding on the left."""
        views = CacheRows(self.memory), CacheRows(self.memory)
        views[0].view(rows, padding, length)
        views[1].view(encoders, encoder_padding, encoder_length)
        return Gather(
            lambda layer_idx: views[0].dense(layer_idx, 0, length),
            lambda layer_idx: views[1].dense(layer_idx, 0, encoder_length),
        )

    def _reads_of(self, encoders: list[Any], counts: Sequence[int] | None = None) -> AttentionMetadata:
        """The record of the rows' reads of the first `counts` states of their encoders (None: of all), kept while the
        rows are the same and no block has moved."""
        known, layout = self._reads, self.memory.pool.layout
        if known is None or known[:2] != (encoders, layout):
            metadata, _ = self.memory.step_metadata(encoders, [1] * len(encoders), self.model.device, counts)
            known = self._reads = encoders, layout, metadata[0]
        return known[2]

    def _forward(self, step: RowStep, inputs: dict[str, Any], kind: type[PackedStep]) -> torch.Tensor:
        # Before the cache begins a step: new modules may have other configs.
        if not self.is_fixed:
            self.weights.look()
        if self.weights.structure != self._structure:
            self._structure = self.weights.structure
            self._configs = configs_of(self.model)
        self.cache.begin(step)
        given = {**inputs, CACHE: self.cache, "return_dict": True}
        try:
            output = (OwnStep if self.gathers else kind)(self.cache, self._configs, self._overrides).run(
                partial(uncompiled(self.model), **given)
            )
            self.cache.check_reads(self.model)
        finally:
            # Even after an error, so that no mask or gathered state outlives the forward.
            self.cache.cross.forget()
        logits: torch.Tensor = output.logits
        return logits


def _version(states: torch.Tensor) -> int | None:
    """Return torch's count of in-place writes to the tensor; None for inference tensors, where torch keeps no count."""
    return None if states.is_inference() else states._version


def _first_row(outputs: Any, num_rows: int, *, as_copy: bool) -> Any:
    """The outputs of an encoder with its first row in every row: after the first forward, only shapes are read.
    as_copy: the model may write to them."""
    if isinstance(outputs, torch.Tensor):
        shown = outputs[:1].expand(num_rows, *outputs.shape[1:]) if outputs.ndim else outputs
        return shown.clone(memory_format=torch.contiguous_format) if as_copy else shown
    if isinstance(outputs, Mapping):
        return type(outputs)(**{name: _first_row(each, num_rows, as_copy=as_copy) for name, each in outputs.items()})
    if type(outputs) in (list, tuple):
        return type(outputs)(_first_row(each, num_rows, as_copy=as_copy) for each in outputs)
    return outputs


def rows_of(value: Any, rows: Sequence[int], num_rows: int) -> Any:
    """The `rows` of everything in `value` that has `num_rows` rows."""
    if len(rows) == num_rows:
        return value
    if isinstance(value, torch.Tensor):
        if value.ndim and value.shape[0] == num_rows:
            return value[to_device(np.array(rows, dtype=np.int64), value.device)]
        return value
    if isinstance(value, Cache):
        return value
    if isinstance(value, Mapping):
        kept = {name: rows_of(each, rows, num_rows) for name, each in value.items()}
        return kept if type(value) is dict else type(value)(**kept)
    if type(value) in (list, tuple):
        return type(value)(rows_of(each, rows, num_rows) for each in value)
    return value


class TrialRows:
    """Two steps of the rows of `given` over a memory: of their tokens before `start`, and of the one there. gathers: as
    for EncoderDecoderModel."""

    def __init__(self, model: Model, given: dict[str, Any], memory: PagedMemory, *, gathers: bool) -> None:
        self.packed = EncoderDecoderModel(model, memory, gathers=gathers)
        self._given = copy.deepcopy(given)  # some models write to their encoder's states
        self._rows = range(len(given["decoder_input_ids"]))
        self._encoders = [("encoder", row) for row in self._rows]

    def first(self, start: int) -> torch.Tensor:
        padding = self._padding()
        self.packed.memory.append([(row, start - pad) for row, pad in zip(self._rows, padding)])
        return self.packed.first(self._rows, self._encoders, padding, self._inputs(0, start))

    def later(self, start: int, more_padding: int = 0) -> torch.Tensor:
        """more_padding: by which the row is longer than its K/V."""
        padding = [each + more_padding for each in self._padding()]
        self.packed.memory.append([(row, 1) for row in self._rows])
        return self.packed.later(self._rows, self._encoders, padding, self._inputs(start, start + 1))

    def _padding(self) -> list[int]:
        mask = self._given.get("decoder_attention_mask")
        return [0 for _ in self._rows] if mask is None else (mask == 0).sum(1).tolist()

    def _inputs(self, start: int, stop: int) -> dict[str, Any]:
        return step_inputs(self.packed.model, self._given, self.packed.cache, start, stop)


def packed_steps(model: Model, given: dict[str, Any], memory: PagedMemory, *, gathers: bool) -> torch.Tensor:
    """The same as `own_steps` over `memory`. gathers: as for EncoderDecoderModel."""
    rows, last = TrialRows(model, given, memory, gathers=gathers), given["decoder_input_ids"].shape[1] - 1
    return torch.cat([rows.first(last)[:, -1], rows.later(last)[:, -1]])
