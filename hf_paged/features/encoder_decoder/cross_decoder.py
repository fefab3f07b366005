"""Paged calls of encoder-decoder models: the decoder that takes the model's place in transformers' loops, the check of
their arguments, and the cache that a caller gets back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import Seq2SeqLMOutput

from hf_paged.annotations import Model
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedKVCache
from hf_paged.features.encoder_decoder.cross_attention import PagedPair
from hf_paged.features.encoder_decoder.encoder_decoder import EncoderDecoderModel, rows_of
from hf_paged.fused.overrides import overrides_for_rows
from hf_paged.generation.decoder import PackedDecoder, left_padding
from hf_paged.generation.obstacles import Asked, is_left_padding, mode_obstacle, patches_inputs
from hf_paged.generation.validation import check_inputs, check_prompts
from hf_paged.integration.names import CACHE
from hf_paged.model.support import SupportReport
from hf_paged.sockets import Parts

Encoder = tuple[str, int]
"""Id of the sequence that holds the K/V of one row of the encoder."""


class CrossDecoder(PackedDecoder):
    """`expand` consecutive rows of the batch share a prompt and a row of the encoder (beams, parallel samples).

    The model prepares the inputs of every step itself, as in plain generate, and the executor gets them. The first step
    computes one row of each `expand`; later ones leave out rows that were dropped.
    """

    one_group = True
    _executor: EncoderDecoderModel

    @classmethod
    def takes(cls, asked: Asked) -> bool:
        return asked.report.has_encoder

    @classmethod
    def obstacle(cls, asked: Asked) -> str | None:
        obstacle, given = mode_obstacle(asked.config, asked.mode), asked.model_kwargs
        if obstacle is not None:
            return obstacle
        if asked.cache is not None:
            return f"{CACHE} is given"
        if asked.config.prefill_chunk_size is not None:
            return "prefill_chunk_size cuts the decoder's prompt"
        if patches_inputs(asked.model):
            return f"{asked.report.model} prepares the inputs of a step in a way of its own"
        if given.get("encoder_outputs") is None:
            return "the model's encoder runs in every step"
        mask = given.get("decoder_attention_mask")
        if mask is not None and (mask.ndim != 2 or not is_left_padding(mask)):
            return "the decoder's attention mask is not left padding"
        if asked.report.counts_padding and mask is not None and not bool(mask.all()):
            return f"{asked.report.model} computes other logits for a decoder prompt with left padding on packed rows"
        return None

    def __init__(self, executor: EncoderDecoderModel, asked: Asked, **options: Any) -> None:
        super().__init__(executor, asked, **options)
        # The model asks this cache for lengths.
        self.cache = executor.cache
        self.cache.reorder = self.reorder
        self.encoders: list[Encoder] = []  # of each row

    # -- what the loops ask of a model --------------------------------------------------------------------------

    def prepare_inputs_for_generation(self, *args: object, **kwargs: object) -> dict[str, Any]:
        prepared: dict[str, Any] = self._model.prepare_inputs_for_generation(*args, **kwargs)
        for name in ("tokenizer", "assistant_tokenizer"):  # which generate hands on to layers that do not read it
            prepared.pop(name, None)
        return prepared

    def _update_model_kwargs_for_generation(self, *args: object, **kwargs: object) -> dict[str, Any]:
        updated: dict[str, Any] = self._model._update_model_kwargs_for_generation(*args, **kwargs)
        return updated

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        return GenerationMixin._prefill(self, *args, **kwargs)

    def __call__(self, return_dict: bool = True, **inputs: object) -> Any:  # type: ignore[override]
        self._inputs = inputs
        tokens: Any = inputs["decoder_input_ids"]
        logits = self.decode(tokens) if self.rows else self._first(tokens)
        cache: dict[str, Any] = {CACHE: self.cache}
        return Seq2SeqLMOutput(logits=logits.unsqueeze(1), **cache)

    def _first(self, tokens: torch.Tensor) -> torch.Tensor:
        num_rows, columns = tokens.shape
        mask: Any = self._inputs.get("decoder_attention_mask")
        self.padding = left_padding(mask, num_rows)
        own = [*range(0, num_rows, self._expand)]
        rows, lengths = [next(self._ids) for _ in own], [columns - self.padding[r] for r in own]
        encoders: list[Encoder] = [("encoder", i) for i in range(len(own))]
        if self._check_pool is not None:
            self._check_pool(lengths)
        self.memory.append(list(zip(rows, lengths)))
        parts = Parts(rows, [0] * len(rows), [0] * sum(lengths), lengths, lengths)
        parts.extra = self._beside(own, encoders) | {"check_room": self._check_pool}
        logits = self._run(parts)
        index = [i for i in range(len(own)) for _ in range(self._expand)]
        self.rows = self._fork_rows(rows, index)
        self.encoders = [encoders[i] for i in index]
        self.length = columns
        self.length_beside = self._executor.encoder_length
        self._report()
        return logits if self._expand == 1 else logits.repeat_interleave(self._expand, dim=0)

    def _parts(self, seq_ids: list[int], starts: list[int], tokens: torch.Tensor) -> Parts:
        # The executor reads the tokens from the inputs, on their device.
        return Parts(seq_ids, starts, [0] * len(tokens))

    def _extend(self, parts: Parts) -> None:
        if parts.counts is None:
            rows = self.active
            parts.extra = self._beside(rows, [self.encoders[r] for r in rows])

    def _beside(self, rows: Sequence[int], encoders: Sequence[Encoder]) -> dict[str, Any]:
        """Return what these rows of the batch are computed with."""
        inputs, num_rows = dict(self._inputs), len(self.padding)
        # Of an encoder's states, which are large, only the shape is read after the first forward.
        states = {"encoder_outputs": inputs.pop("encoder_outputs")} if self.rows else {}
        given = rows_of(inputs, rows, num_rows) | states
        return {"inputs": given, "padding": [self.padding[r] for r in rows], "encoder": encoders}

    def _drop_finished(self) -> None:
        super()._drop_finished()
        manager = self.memory.manager
        used = {encoder for encoder, row in zip(self.encoders, self.rows) if row is not None}
        for encoder in set(self.encoders) - used:
            if encoder in manager:
                self.memory.free(encoder)

    def returned_cache(self) -> EncoderDecoderCache:
        """The rows and the states of their encoders, as a caller gets them; they stay in this memory."""
        own = PagedKVCache(memory=self.memory)
        own.take_rows(self.rows, self.padding)  # type: ignore[arg-type]
        layers: list[Any] = [_KeptLayer(self._executor, i, self.encoders) for i in sorted(self.memory.pool.layers)]
        return PagedPair(own, Cache(layers=layers))


class _KeptLayer(DynamicLayer):
    """K/V of the encoder's states in a returned cache: gathered from the blocks when it is first read."""

    def __init__(self, encoded: EncoderDecoderModel, layer_idx: int, encoders: Sequence[Encoder]) -> None:
        self._encoded, self._layer_idx, self._encoders = encoded, layer_idx, list(encoders)
        self._length = encoded.encoder_length
        self._states: list[torch.Tensor | None] = [None, None]
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._length

    def reset(self) -> None:
        """Free the blocks, of all layers."""
        memory = self._encoded.memory
        for encoder in set(self._encoders):
            if encoder in memory.manager:
                memory.free(encoder)
        self._states, self._length, self.is_initialized = [None, None], 0, False

    def _state(self, which: int) -> torch.Tensor:
        state = self._states[which]
        if state is None:
            state = self._encoded.encoder_states(self._layer_idx, which, self._encoders)
            self._states[which] = state
        return state

    @property
    def keys(self) -> torch.Tensor:
        """[rows, num_kv_heads, length of the encoder, head_dim]; zeros where the encoder's input is masked."""
        return self._state(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._states[0] = value

    @property
    def values(self) -> torch.Tensor:
        return self._state(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._states[1] = value


# -- before a call -------------------------------------------------------------------------------------------------


def check_encoder_inputs(model: Model, inputs: object, generation_config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for inputs and options that cannot be served. What is for the encoder may be of any kind."""
    if model.main_input_name == "input_ids":
        check_inputs(model, inputs, generation_config, kwargs)
    else:
        others = {name: value for name, value in kwargs.items() if name not in ("attention_mask", "inputs_embeds")}
        check_inputs(model, None, generation_config, {**others, "input_ids": None})
    ids = kwargs.get("decoder_input_ids")
    if ids is not None:
        check_prompts(model, ids, "decoder_input_ids", by_decoder=True)


def executor_of(model: Model, report: SupportReport, memory: PagedMemory) -> EncoderDecoderModel:
    """Bind the model to a memory for a call."""
    overrides = overrides_for_rows(model, is_call=True)
    return EncoderDecoderModel(model, memory, gathers=report.gathers, overrides=overrides)
