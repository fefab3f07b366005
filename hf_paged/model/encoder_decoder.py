"""An encoder-decoder model on rows of one PagedMemory, and whether a model can run so.

The K/V of an encoder's states is a sequence of its own, in the blocks that the decoder's tokens use: it never grows,
and all beams and samples of a row read the same blocks. Knows models and sequences by id; never requests or sampling.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_paged.annotations import Model
from hf_paged.cache.cache_rows import CacheRows
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.attention import configs_of, name_ours, name_own, names
from hf_paged.integration.encoder_decoder import Gather, PairCache, RowStep
from hf_paged.integration.names import CACHE
from hf_paged.kernels.metadata import AttentionMetadata, DecodeStep, to_device
from hf_paged.kernels.quantised import dequantised
from hf_paged.model.overrides import Override
from hf_paged.model.packed import CodeCheck, Entrance, PackedStep, uncompiled
from hf_paged.model.state import state_of
from hf_paged.sockets import Executor


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

    gathers: its attention is code of its own, which gets K/V gathered from blocks. overrides, check_code: as for
    PackedModel.
    """

    def __init__(
        self,
        model: Model,
        memory: PagedMemory,
        check_code: Callable[[], object] | None = None,
        reorder: Any = None,
        *,
        gathers: bool = False,
        overrides: Sequence[Override] = (),
    ) -> None:
        self.model = model
        self.memory = memory
        self.gathers = gathers
        self._overrides = (Entrance(model), *overrides)
        self.cache = PairCache(reorder)
        self.weights = state_of(model).weights
        self._check_code = CodeCheck(self.weights, check_code)
        self._structure: Any = None
        self._last: DecodeStep | None = None
        # Its forward writes to the encoder's states, which later ones do not read.
        self._changes_states = False
        self._visible: torch.Tensor  # bool [encoders, length]: which states have K/V
        # The last record of rows' reads of their encoders' states: those encoders, the pool's layout, the record.
        self._reads: tuple[list[Any], object, AttentionMetadata] | None = None

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
            if check_room is not None:
                check_room([*lengths, *counts])
            memory.append(list(zip(encoders, counts)))
            self._visible = visible
            slots = [memory.manager.slots(encoder, 0, count) for encoder, count in zip(encoders, counts)]
            return to_device(np.array(list(itertools.chain(*slots)), dtype=np.int64), visible.device)

        # Before anything is appended, and again when the number of visible states is known.
        if check_room is not None:
            check_room(lengths)
        memory.append(list(zip(rows, lengths)))
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
        memory.append([(row, 1) for row in rows])
        # On a CPU most steps are the last one with each row a token longer.
        if device.type == "cpu":
            self._last = memory.decode_step(rows, self._last)
            metadata = self._last.metadata
        else:
            metadata, _ = memory.step_metadata(rows, [1] * len(rows), device)
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
        self.weights.look()
        if self.weights.structure != self._structure:
            self._structure = self.weights.structure
            self._configs = configs_of(self.model)
        self._check_code()
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


# -- trying it out -------------------------------------------------------------------------------------------------

# They differ, so that the trial has a row whose mask hides states.
_LENGTHS = (6, 4)
"""Encoder states of the two rows of the trial."""


@dataclass
class EncoderStates(BaseModelOutput):
    """Outputs of an encoder, with what some encoders return besides states, because their models read it.

    pooler_output: the states that the decoder attends to, in models whose encoder calls them so.
    """

    pooler_output: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None


def encoder_outputs(states: torch.Tensor) -> EncoderStates:
    """Wrap states [rows, length, width] in the record that an encoder returns."""
    return EncoderStates(last_hidden_state=states, pooler_output=states)


def trial_inputs(model: Model) -> dict[str, Any]:
    """Inputs of the forward of two rows of four tokens, with states that an encoder might have computed.

    A model of text also gets a mask that hides the padding of the shorter row.
    """
    config = model.config.get_text_config(decoder=True)
    ids = torch.tensor([[13, 11, 12, 25], [9, 27, 16, 31]], dtype=torch.int64, device=model.device) % config.vocab_size
    size = 2 * _LENGTHS[0] * (width := encoder_width(model))
    places = torch.arange(size, dtype=torch.float32, device=model.device)
    values = torch.sin(places * 1.7) + torch.cos(places * 0.3)
    states = values.view(2, _LENGTHS[0], width).to(model.dtype)
    inputs: dict[str, Any] = {
        "decoder_input_ids": ids,
        "encoder_outputs": encoder_outputs(states),
    }
    if model.main_input_name == "input_ids":
        mask = torch.ones(2, _LENGTHS[0], dtype=torch.int64, device=model.device)
        mask[1, _LENGTHS[1] :] = 0
        inputs["attention_mask"] = mask
    return inputs


_PADDED = ((1, 0), (0, 1), (1, 2))
"""Rows of `with_padding`: the row of `trial_inputs`, and tokens of left padding. NLLB-MoE's router reads as many places
of the last row's mask as there are rows; some of them have to be padding."""


def with_padding(given: dict[str, Any]) -> dict[str, Any]:
    """Such inputs with left padding in the decoder's prompt."""
    rows = [row for row, _ in _PADDED]
    ids = given["decoder_input_ids"][rows]
    inputs = {
        "decoder_input_ids": ids,
        "encoder_outputs": encoder_outputs(given["encoder_outputs"].last_hidden_state[rows]),
        "decoder_attention_mask": torch.ones_like(ids),
    }
    for row, (_, padding) in enumerate(_PADDED):
        inputs["decoder_attention_mask"][row, :padding] = 0
    if "attention_mask" in given:
        inputs["attention_mask"] = given["attention_mask"][rows]
    return inputs


def encoder_width(model: Model) -> int:
    """Elements of one state of the encoder."""
    own = getattr(model.get_encoder(), "config", model.config)
    for config in (own, getattr(own, "text_config", None), model.config):
        width = getattr(config, "hidden_size", None)
        if isinstance(width, int):
            return width
    raise UnsupportedModelError("the width of its encoder's states is unknown")


def step_inputs(model: Model, given: dict[str, Any], past: Any, start: int, stop: int) -> dict[str, Any]:
    """Make the arguments that generate passes to the forward of tokens `start` to `stop - 1`."""
    rest = {name: value for name, value in given.items() if name != "decoder_input_ids"}
    if (mask := rest.pop("decoder_attention_mask", None)) is not None:
        rest["decoder_attention_mask"] = mask[:, :stop]
    inputs: dict[str, Any] = type(model).prepare_inputs_for_generation(
        model,
        given["decoder_input_ids"][:, :stop],
        use_cache=True,
        is_first_iteration=start == 0,
        next_sequence_length=stop - start if start else None,
        **{CACHE: past, **rest},
    )
    return inputs


def own_steps(model: Model, given: dict[str, Any], past: Any) -> torch.Tensor:
    """Logits of the last position after a forward of three tokens and after another one, [4, vocab]."""
    # Some models write to their encoder's states.
    logits, given = [], copy.deepcopy(given)
    for start, stop in ((0, 3), (3, 4)):
        inputs = step_inputs(model, given, past, start, stop)
        logits.append(uncompiled(model)(**inputs, return_dict=True).logits[:, -1])
    return torch.cat(logits)


def plain_cache(model: Model) -> EncoderDecoderCache:
    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))


def packed_steps(model: Model, given: dict[str, Any], memory: PagedMemory, *, gathers: bool) -> torch.Tensor:
    """The same as `own_steps` over `memory`. gathers: as for EncoderDecoderModel."""
    packed, given = EncoderDecoderModel(model, memory, gathers=gathers), copy.deepcopy(given)
    rows = range(len(given["decoder_input_ids"]))
    encoders = [("encoder", row) for row in rows]
    padding = [padding for _, padding in _PADDED] if "decoder_attention_mask" in given else [0 for _ in rows]
    logits = [packed.first(rows, encoders, padding, step_inputs(model, given, packed.cache, 0, 3))]
    logits.append(packed.later(rows, encoders, padding, step_inputs(model, given, packed.cache, 3, 4)))
    return torch.cat([each[:, -1] for each in logits])
