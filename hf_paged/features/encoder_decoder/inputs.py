"""Turn callers' arguments for an encoder into tensors of one row, and these into what the encoder gets."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_paged.annotations import Model
from hf_paged.features.encoder_decoder.encoders import EncoderInput
from hf_paged.generation.prompts import copied_input
from hf_paged.generation.validation import check_prompts, refuse_placeholders
from hf_paged.integration.names import CACHE_NAMES, PREPARE_ENCODER
from hf_paged.model.devices import device_of
from hf_paged.sockets import Inputs


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


def read(model: Model, given: Inputs, own: EncoderInput) -> None:
    """Make the inputs that `generate` gets for one row of an encoder-decoder model, on the model's device. own: gets
    what the encoder gets, as soon as `generate` has found it.

    The prompt is the encoder's text, [] where it has none. Raises ValueError for what is no tensor of one row, for what
    belongs to a call of `generate` and not to a row, and for a prompt that is missing or that the encoder cannot read.
    Names that the model does not take are refused by `generate` itself.
    """
    prompt, options = given.prompt, given.options
    device, kind = device_of(model), type(model).__name__
    inputs: dict[str, torch.Tensor] = {}
    for name, value in given.others.items():
        if name in _OF_CALL or name in ("input_ids", "inputs_embeds"):
            remedy = "give the text as the prompt" if name.startswith("input") else "give what the encoder reads"
            raise ValueError(f"inputs has {name!r}, which is no input of a row in the engine; {remedy}")
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != 1:
            size = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"inputs[{name!r}] is {size}; a tensor of one row is needed, [1, ...]")
        inputs[name] = copied_input(value, name, device)
    reads_text = model.main_input_name == "input_ids"
    is_empty = isinstance(prompt, (list, tuple)) and not prompt
    if not reads_text and not is_empty:
        raise ValueError(
            f"the encoder of {kind} reads {model.main_input_name}, no text; give the prompt [] and "
            f"inputs={{{model.main_input_name!r}: ...}}; what the decoder begins with is inputs['decoder_input_ids']"
        )
    if not reads_text and model.main_input_name not in inputs:
        raise ValueError(f"inputs has no {model.main_input_name!r}, which the encoder of {kind} reads")
    if reads_text:
        # The encoder gets a mask without padding; this is another name for the argument of the request.
        mask = inputs.pop("attention_mask", None)
        if mask is not None and options.attention_mask is not None:
            raise ValueError("attention_mask is given twice, also as inputs['attention_mask']; drop one of them")
        ids = given.ids(prompt, options.attention_mask if mask is None else mask)
        refuse_placeholders(model, ids)
        inputs["input_ids"] = torch.tensor([ids], dtype=torch.int64, device=device)
        # `given.ids` has taken the padding out.
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    elif options.attention_mask is not None:
        raise ValueError("attention_mask is that of a text; that of other inputs is inputs['attention_mask']")
    # Models of speech begin with tokens for language and task, which their own `generate` would choose.
    if "decoder_input_ids" in inputs:
        check_prompts(model, inputs["decoder_input_ids"], "decoder_input_ids", by_decoder=True)
    elif hasattr(model, "_retrieve_init_tokens"):
        inputs["decoder_input_ids"] = given.run(partial(_own_start, model, inputs, options.generation_config))
    given.read, given.others = inputs, {}
    # `generate` would run the encoder, which the engine does: with those of other requests.
    given.methods.update(dict.fromkeys(PREPARE_ENCODER, partial(_encoder_later, own)))


def _encoder_later(
    own: EncoderInput, tensor: torch.Tensor, model_kwargs: dict[str, Any], name: str, config: Any
) -> dict[str, Any]:
    """Note what the method of `generate` gets that runs the encoder."""
    others = {key: value for key, value in model_kwargs.items() if isinstance(value, torch.Tensor)}
    own.given = EncoderArguments(
        tensor, name, {key: value for key, value in others.items() if not key.startswith("decoder_")}
    )
    states = torch.zeros(1, 1, 1, dtype=torch.float32, device="cpu")  # in the place of those to come
    return {**model_kwargs, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}


_OF_CALL = ("encoder_outputs", *CACHE_NAMES, "decoder_attention_mask", "decoder_inputs_embeds", "labels", "use_cache")


@torch.no_grad()
def _own_start(model: Model, inputs: Mapping[str, torch.Tensor], generation_config: Any) -> torch.Tensor:
    """The tokens with which Whisper's own `generate` begins: its language, which may have to be heard, and task. Raises
    ValueError for what the model cannot hear."""
    # The options of one request must not become those of the model.
    config = copy.deepcopy(model.generation_config)
    for name in ("language", "task", "return_timestamps", "is_multilingual"):
        value = getattr(generation_config, name, None)
        if value is not None or not hasattr(config, name):
            setattr(config, name, value)
    features = inputs[model.main_input_name]
    try:
        start = model._retrieve_init_tokens(features, 1, config, model.config, features.shape[-1], {})
    # A RuntimeError too, but too little memory is no mistake in the features.
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError) as error:  # of the model's forward, for features of a wrong shape or dtype
        raise ValueError(f"inputs[{model.main_input_name!r}]: its language cannot be heard: {error}") from error
    return torch.as_tensor(start, dtype=torch.int64, device=features.device).reshape(1, -1)
