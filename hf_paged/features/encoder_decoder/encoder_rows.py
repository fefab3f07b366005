"""Computes an encoder-decoder model for an engine: encoders of several requests, and tokens of any decoder rows.

An encoder's input is computed in two parts. `encode` runs the encoder, for inputs of equal shapes together. `write`
runs the decoder's first forward on one token, which writes the K/V of the states to the blocks of a sequence of their
own; the token's own K/V is not kept. From then on every token of the decoder, prompt and recomputation included, is one
row of a forward `[num_rows, 1]` as in `EncoderDecoderModel.later`. Rows of different lengths share a forward where the
model takes left padding; elsewhere rows of equal length do.

Knows models and sequences by id; never requests or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig

from hf_paged.annotations import Model
from hf_paged.cache.block_manager import SeqId
from hf_paged.cache.memory import PagedMemory
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.encoder_decoder.caches import Gather, RowStep
from hf_paged.features.encoder_decoder.encoder_decoder import EncoderDecoderModel, FirstStep, rows_of
from hf_paged.features.rows.pieces import Part, run_pieces
from hf_paged.integration.names import PREPARE_ENCODER
from hf_paged.kernels.metadata import to_device
from hf_paged.model.devices import device_of
from hf_paged.model.inputs import EncoderArguments, encoder_batch, encoder_outputs, encoder_width, step_inputs
from hf_paged.model.overrides import Override
from hf_paged.model.packed import PackedStep
from hf_paged.model.support import rotary_limit
from hf_paged.model.trial import Trial, trying
from hf_paged.sockets import Parts, Results

_Item = TypeVar("_Item")


class _Always(dict[int, bool]):
    """`is_updated` of every layer: its K/V of the encoder's states has been computed."""

    def get(self, key: int, default: object = None) -> bool:
        return True

    def __missing__(self, key: int) -> bool:
        return True


class EncoderRows(EncoderDecoderModel):
    """A model bound to the memory of an engine. Call `measure` first.

    While it `is_alone`, each row and each encoder has a forward of its own. A run first writes what `extra["writes"]`
    says: (digest, token of the decoder) by the id of a sequence of encoder's states. `written`: those that runs have
    written, until somebody takes note.
    """

    def __init__(
        self, model: Model, memory: PagedMemory, *, gathers: bool = False, overrides: Sequence[Override] = ()
    ) -> None:
        super().__init__(model, memory, gathers=gathers, overrides=overrides)
        self._reads_text = model.main_input_name == "input_ids"
        self.mixes_lengths = False
        """True if rows of different lengths may share a forward."""
        # The capacity of such experts is shared by all rows of a forward.
        self._shares_capacity = hasattr(model.config, "moe_eval_capacity_token_fraction")
        self.is_alone = False
        self.no_hidden = f"the decoder of {type(model).__name__} computes rows of its own"
        self.max_length = rotary_limit(model, ["dynamic"])
        self.written: set[SeqId] = set()
        self._outputs: dict[bytes, dict[str, Any]] = {}  # of encoders, until their K/V is written
        self._counts: dict[SeqId, int] = {}  # states with K/V

    def measure(self, tried: Model, num_tokens: int = 0) -> None:
        """Run the decoder on a few tokens, so that every layer allocates its K/V, and find out which rows may share a
        forward: those whose logits are the same as in a forward of their own. tried: computes it in place of the model.
        """
        memory = self.memory
        # Four sequences of up to eight tokens: two of the decoder's and two of states.
        memory.hold(4 * (8 // memory.block_size + 1) * memory.block_size)
        with trying(device_of(tried), autocast=True):
            self._measure(tried, EncoderRows(tried, memory, gathers=self.gathers))
        for seq_id in list(memory.manager.seq_ids):
            memory.free(seq_id)

    def _measure(self, tried: Model, trial: EncoderRows) -> None:
        memory, given = self.memory, encoder_batch(tried)
        tokens = given.pop("decoder_input_ids").tolist()
        for row, own in enumerate(tokens):
            encoder, digest = ("encoder", row), bytes([row])
            trial._outputs[digest] = rows_of(given, [row], len(tokens))
            memory.append([(encoder, trial._outputs[digest]["encoder_outputs"][0].shape[1]), (row, len(own))])
            trial.write(encoder, digest, own[0])
        parts = [
            [Part(row, [token], at, encoder=("encoder", row)) for at, token in enumerate(own)]
            for row, own in enumerate(tokens)
        ]
        alone = [[trial._compute([part])[0] for part in own] for own in parts]
        # A row's padding changes from forward to forward: keys that were rotated by padded positions do not fit then.
        places = (3, 0), (3, 1), (2, 2)
        mixing = Trial(
            tried,
            lambda: [torch.stack([trial._compute([parts[0][long], parts[1][short]]) for long, short in places])],
            [torch.stack([torch.stack([alone[0][long], alone[1][short]]) for long, short in places])],
        )
        self.mixes_lengths = mixing.refusal() is None

    # -- encoders -----------------------------------------------------------------------------------------------

    def encode(self, given: Sequence[tuple[bytes, EncoderArguments]]) -> dict[bytes, int | Exception]:
        """Run the encoder on these inputs, by digest. Returns the number of states of each, or the error it raised."""
        batches: dict[Hashable, list[tuple[bytes, EncoderArguments]]] = {}
        for digest, own in given:
            apart = self.is_alone or self._shares_capacity
            batches.setdefault(digest if apart else own.shape, []).append((digest, own))
        results: dict[bytes, int | Exception] = {}
        for batch in batches.values():
            results.update(zip((digest for digest, _ in batch), _each_or_error(self._encode, batch)))
        return results

    def _encode(self, batch: Sequence[tuple[bytes, EncoderArguments]]) -> list[int]:
        model, count = self.model, len(batch)
        tensor = torch.cat([own.tensor for _, own in batch])
        others = {name: torch.cat([own.others[name] for _, own in batch]) for name in batch[0][1].others}
        prepare = next(found for name in PREPARE_ENCODER if (found := getattr(model, name, None)) is not None)
        config = GenerationConfig(output_attentions=False, output_hidden_states=False)
        made = prepare(tensor, others, batch[0][1].name, config)
        for row, (digest, _) in enumerate(batch):
            self._outputs[digest] = rows_of(made, [row], count)
        return [self._outputs[digest]["encoder_outputs"][0].shape[1] for digest, _ in batch]

    def keep_only(self, digests: Iterable[bytes]) -> None:
        """Drop the outputs of all other encoders."""
        for digest in self._outputs.keys() - set(digests):
            del self._outputs[digest]

    def write(self, encoder: SeqId, digest: bytes, token: int) -> None:
        """Write the K/V of an encoder's states to the slots of the sequence `encoder`. token: any of the decoder."""
        manager, device = self.memory.manager, self.model.device

        def write_encoder(visible: torch.Tensor) -> torch.Tensor:
            count = int(visible.sum())
            if count > manager.num_tokens(encoder):
                raise UnsupportedModelError(f"its decoder attends to {count} states, more than its encoder returns")
            # Sequences end without a word to this object.
            self._counts = {known: own for known, own in self._counts.items() if known in manager}
            self._counts[encoder], self._reads = count, None
            return to_device(np.array(manager.slots(encoder, 0, count), dtype=np.int64), visible.device)

        kept = torch.ones(1, 1, dtype=torch.bool, device="cpu")
        step = RowStep(None, self.memory.pool, 0, [0], keep=kept, write_encoder=write_encoder)
        if self.gathers:
            mask = self._outputs[digest].get("attention_mask") if self._reads_text else None
            step.gather = Gather(visible=None if mask is None else mask != 0)
        # As in a first forward, in which the K/V of states is written.
        self._begin({}, 0)
        given = {"decoder_input_ids": torch.tensor([[token]], dtype=torch.int64, device=device)}
        inputs = step_inputs(self.model, {**self._outputs[digest], **given}, self.cache, 0, 1)
        self._forward(step, inputs, FirstStep)

    def close(self) -> None:
        self._outputs.clear()
        self._counts.clear()
        self._reads = None

    def _begin(self, is_updated: dict[int, bool], length: int) -> None:
        self.cache.is_updated = is_updated
        self.cache.own.length = length

    # -- rows ---------------------------------------------------------------------------------------------------

    @property
    def order_obstacle(self) -> str:
        return "the model has an encoder, which torch computes"

    def beside(self, reason: str | None) -> EncoderRows:
        self.is_alone = reason is not None
        return self

    def run(self, parts: Parts) -> Results:
        failed: dict[int, Exception] = {}
        encoders = parts.extra["encoder"]
        for encoder, (digest, token) in parts.extra["writes"].items():
            try:
                self.write(encoder, digest, token)
            except Exception as error:  # of the model: it ends the requests with this input alone
                failed.update((index, error) for index, own in enumerate(encoders) if own == encoder)
            else:
                self.written.add(encoder)
        ranges = (range(start, start + count) for start, count in zip(parts.starts, parts.lengths))
        pieces = [[(at, at + 1) for at in own] for own in ranges]
        return run_pieces(parts, pieces, self.forward, failed)

    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor | Exception]:
        """The logits [1, vocab] after each part, or the error that its row has raised.

        The parts are of different sequences, and have one token each, whose slots have been appended.
        """
        results: dict[int, torch.Tensor | Exception] = {}
        for batch in self._batches(parts):
            results.update(zip(batch, _each_or_error(self._compute, [parts[index] for index in batch])))
        return [results[index] for index in range(len(parts))]

    def _batches(self, parts: Sequence[Part]) -> Iterable[list[int]]:
        batches: dict[Hashable, list[int]] = {}
        for index, part in enumerate(parts):
            apart = self.is_alone or self._shares_capacity
            # Gathered states of different numbers need a mask, which an encoder of text alone takes for each state.
            states = self._counts[part.encoder] if self.gathers and not self._reads_text else None
            key = index if apart else (None if self.mixes_lengths else part.start, states)
            batches.setdefault(key, []).append(index)
        return batches.values()

    def _compute(self, parts: Sequence[Part]) -> torch.Tensor:
        """Logits [len(parts), 1, vocab] of one forward."""
        memory, device, count = self.memory, self.model.device, len(parts)
        length = max(part.start for part in parts)
        padding = [length - part.start for part in parts]
        ends = [part.start + 1 for part in parts]
        metadata, _ = memory.step_metadata([part.seq_id for part in parts], [1] * count, device, ends)
        step = RowStep(metadata[0], memory.pool, length, padding, encoder_length=1)
        ids = np.zeros((count, length + 1), dtype=np.int64)
        ids[:, -1] = [part.ids[0] for part in parts]
        given: dict[str, Any] = {"decoder_input_ids": to_device(ids, device)}
        encoders = [part.encoder for part in parts]
        counts = [self._counts[encoder] for encoder in encoders]
        if self.gathers:
            step.encoder_length = max(counts)
            missing = [max(counts) - own for own in counts]
            step.gather = self._gather(
                [part.seq_id for part in parts], padding, length + 1, encoders, missing, max(counts)
            )
            if self._reads_text:
                seen = np.arange(max(counts)) >= np.array(missing)[:, None]
                given["attention_mask"] = to_device(seen.astype(np.int64), device)
        else:
            step.encoder = self._reads_of(encoders, counts)
        # No view of one row: some models write to their encoder's states.
        size = count, step.encoder_length, encoder_width(self.model)
        states = torch.zeros(size, dtype=self.model.dtype, device=device)
        given["encoder_outputs"] = encoder_outputs(states)
        if any(padding):
            mask = np.arange(length + 1) >= np.array(padding)[:, None]
            given["decoder_attention_mask"] = to_device(mask.astype(np.int64), device)
        self._begin(_Always(), length)
        logits: torch.Tensor = self._forward(
            step, step_inputs(self.model, given, self.cache, length, length + 1), PackedStep
        )
        return logits[:, -1:]


def _each_or_error(compute: Callable[[Sequence[_Item]], Iterable[object]], batch: Sequence[_Item]) -> list[Any]:
    """Compute all items together; if that raises, compute each alone and return its result or its error."""
    try:
        return list(compute(batch))
    # Of the model, such as a position beyond its table: whose it is, is found alone.
    except Exception as error:
        if len(batch) == 1:
            return [error]
        return [each for item in batch for each in _each_or_error(compute, [item])]
