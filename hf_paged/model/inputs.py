"""Inputs to try a model on, and those of a step of generate for a model that prepares its own."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from hf_paged.annotations import Model
from hf_paged.cache.paged_cache import plain_cache
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.names import CACHE, cache_argument
from hf_paged.model.devices import device_of
from hf_paged.model.packed import uncompiled
from hf_paged.model.trial import Refusal, attempt


class EncoderArguments(NamedTuple):
    """Encoder inputs of one row, as in `generate`. tensor: the main input, called `name`; others: tensors by name."""

    tensor: torch.Tensor
    name: str
    others: dict[str, torch.Tensor]

    @property
    def shape(self) -> Hashable:
        """Equal for inputs that one forward of the encoder computes together."""
        others = ((name, each.shape, each.dtype) for name, each in sorted(self.others.items()))
        return self.name, self.tensor.shape, self.tensor.dtype, *others

    def digest(self, root: bytes) -> bytes:
        """Equal for equal inputs under the same root."""
        digest = hashlib.sha256(root)
        for name, tensor in [(self.name, self.tensor), *sorted(self.others.items())]:
            # Equal bytes may be other numbers in another shape or dtype.
            digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
            # As bytes, because numpy has no bf16.
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()


def step_positions(
    model: Model, ids: torch.Tensor, positions: torch.Tensor | None, *, is_first: bool
) -> torch.Tensor | None:
    """The `position_ids` that a step of generate passes for tokens at `positions` int64 [batch, length].

    Some models start from another number. None: the model leaves `position_ids` out and computes positions itself.
    """
    from transformers import GenerationMixin

    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    is_own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if not is_own or not takes_ordinary_inputs(model):
        return positions
    inputs = model.prepare_inputs_for_generation(
        ids, position_ids=positions, use_cache=True, is_first_iteration=is_first
    )
    given: torch.Tensor | None = inputs.get("position_ids")
    return given


# Trials use smaller ids, and reading a whole embedding would take long.
_FIRST_ROWS = 64


def trial_ids(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """The ids for a trial, those replaced whose row of the embedding has NaN or infinite numbers: results would compare
    with nothing, though no prompt may ever have the token."""

    def look() -> torch.Tensor:
        weight = model.get_input_embeddings().weight[:_FIRST_ROWS].detach()
        is_finite: torch.Tensor = weight.float().isfinite().all(-1)
        # Where ranks share the weights, each must choose the same ids.
        return is_finite.full_tensor() if hasattr(is_finite, "full_tensor") else is_finite.to(ids.device)

    is_finite = attempt(look)  # it may have no such embedding, one of its own class, or one that is offloaded
    if isinstance(is_finite, Refusal) or len(usable := is_finite.nonzero()[:, 0]) in (0, len(is_finite)):
        return ids
    return torch.where(is_finite[ids], ids, usable[ids % len(usable)])


def takes_ordinary_inputs(model: Model) -> bool:
    """Return True if the model has transformers' generate: prepare_inputs_for_generation gets ordinary arguments."""
    from transformers import GenerationMixin

    return type(model).generate is GenerationMixin.generate


@torch.no_grad()
def makes_own_state(model: Model) -> bool:
    """Tell whether the model, given no cache, makes a state of a class of its own and returns it.

    It is run on two tokens, because the argument may have the same name as that of a cache of transformers.
    """
    name = cache_argument(model)
    if name is None or model._supports_default_dynamic_cache():
        return False
    ids = torch.ones(1, 2, dtype=torch.int64, device=device_of(model))
    output = attempt(lambda: model(input_ids=ids, use_cache=True, return_dict=True))
    state = None if isinstance(output, Refusal) else getattr(output, name, None)
    return state is not None and not isinstance(state, Cache)


def refuse_own_inputs(model: Model, batch: dict[str, torch.Tensor]) -> None:
    """Refuse a model whose prepare_inputs_for_generation does not return what transformers' default returns."""
    from transformers import DynamicCache, GenerationMixin

    if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
        return
    numbers: list[torch.Tensor | None] = []
    # The first step and a later one: some models number the tokens anew in each.
    for prefill in (True, False):
        options: dict[str, Any] = {
            **batch,
            CACHE: DynamicCache(config=model.config),
            "use_cache": True,
            "logits_to_keep": 1,
            "is_first_iteration": prefill,
            "next_sequence_length": None if prefill else 1,
        }
        own = model.prepare_inputs_for_generation(**options)
        plain: dict[str, Any] = GenerationMixin.prepare_inputs_for_generation(model, **options)
        numbers.append(own.get("position_ids"))
        # Positions are left to the comparison of logits.
        for name in (own.keys() | plain.keys()) - {"position_ids"}:
            a, b = own.get(name), plain.get(name)
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                same = torch.equal(a, b)
            else:
                same = a is b or (not isinstance(a or b, torch.Tensor) and (a or None) == (b or None))
            if not same:
                raise UnsupportedModelError(f"its prepare_inputs_for_generation makes its own {name}")
    first, later = numbers
    if (first is None) != (later is None) or (
        first is not None and later is not None and not torch.equal(first[..., -1:], later)
    ):
        raise UnsupportedModelError("its prepare_inputs_for_generation numbers the tokens again at every step")


# -- rows to try a model on ----------------------------------------------------------------------------------------

LENGTHS = (5, 3)
"""Tokens of the two rows of `padded_batch`. They differ, so that a trial has a row with left padding."""
_NUM_STATES = (6, 4)
"""Encoder states of the two rows of `encoder_batch`, so that a mask hides some."""


def trial_batch(model: Model) -> dict[str, Any]:
    """Inputs of the forward of two rows that differ in length, as generate would pass them."""
    return encoder_batch(model) if model.config.is_encoder_decoder else padded_batch(model)


def padded_batch(model: Model) -> dict[str, torch.Tensor]:
    """Inputs of two left-padded rows: int64 [2, 5] each."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    # Different tokens, so that an exchange of two shows.
    ids = torch.tensor([[13, 11, 12, 25, 14], [0, 0, 27, 16, 31]], dtype=torch.int64, device=device_of(model)) % vocab
    ids = trial_ids(model, ids)
    mask = torch.ones_like(ids)
    mask[1, : LENGTHS[0] - LENGTHS[1]] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return batch


def without_padding(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each row of `padded_batch` alone."""
    return [{name: each[row : row + 1, -length:] for name, each in batch.items()} for row, length in enumerate(LENGTHS)]


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


def encoder_batch(model: Model) -> dict[str, Any]:
    """Inputs of two rows of four tokens, with states that an encoder might have computed.

    A model of text also gets a mask that hides the padding of the shorter row.
    """
    config = model.config.get_text_config(decoder=True)
    ids = torch.tensor([[13, 11, 12, 25], [9, 27, 16, 31]], dtype=torch.int64, device=model.device) % config.vocab_size
    size = 2 * _NUM_STATES[0] * (width := encoder_width(model))
    places = torch.arange(size, dtype=torch.float32, device=model.device)
    values = torch.sin(places * 1.7) + torch.cos(places * 0.3)
    states = values.view(2, _NUM_STATES[0], width).to(model.dtype)
    inputs: dict[str, Any] = {"decoder_input_ids": ids, "encoder_outputs": encoder_outputs(states)}
    if model.main_input_name == "input_ids":
        mask = torch.ones(2, _NUM_STATES[0], dtype=torch.int64, device=model.device)
        mask[1, _NUM_STATES[1] :] = 0
        inputs["attention_mask"] = mask
    return inputs


_PADDED = ((1, 0), (0, 1), (1, 2))
"""Rows of `with_padding`: the row of `encoder_batch`, and tokens of left padding. NLLB-MoE's router reads as many
places of the last row's mask as there are rows; some of them have to be padding."""


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


def _own_cache(model: Model) -> Any:
    if not model.config.is_encoder_decoder:
        return plain_cache(model.config)
    config = model.config.get_text_config(decoder=True)
    return EncoderDecoderCache(plain_cache(config), plain_cache(config))


def step_inputs(model: Model, given: dict[str, Any], past: Any, start: int, stop: int) -> dict[str, Any]:
    """Make the arguments that generate passes to the forward of tokens `start` to `stop - 1`."""
    is_first, has_encoder = start == 0, model.config.is_encoder_decoder
    ids, *beside = _OF_TOKENS[has_encoder]
    inputs = {name: each[:, :stop] if name in (ids, *beside) else each for name, each in given.items()}
    options: dict[str, Any] = {CACHE: past, "use_cache": True}
    if not has_encoder and not takes_ordinary_inputs(model):
        return {name: each if name == "attention_mask" else each[:, start:] for name, each in inputs.items()} | options
    # Of the class: PEFT puts a method of its own in place of it during a call.
    made: dict[str, Any] = type(model).prepare_inputs_for_generation(
        model, inputs.pop(ids), **inputs, **options, is_first_iteration=is_first,
        next_sequence_length=None if is_first else stop - start,
    )  # fmt: skip
    return made


_OF_TOKENS = ("input_ids", "attention_mask", "position_ids"), ("decoder_input_ids", "decoder_attention_mask")
"""Arguments with a column for each token: the ids and others, without an encoder and with one."""


def own_steps(model: Model, given: dict[str, Any] | None = None, past: Any = None) -> torch.Tensor:
    """Logits of the last position after a prefill of all tokens but the last, and after a step with the last one: [2 *
    rows, vocab]. given: `trial_batch` if None. past: the cache; that of plain `generate` if None."""
    past = _own_cache(model) if past is None else past
    given = trial_batch(model) if given is None else copy.deepcopy(given)  # some models write to their encoder's states
    end = given[_OF_TOKENS[model.config.is_encoder_decoder][0]].shape[1]
    logits = []
    for start, stop in ((0, end - 1), (end - 1, end)):
        inputs = step_inputs(model, given, past, start, stop)
        logits.append(uncompiled(model)(**inputs, return_dict=True).logits[:, -1])
    return torch.cat(logits)
