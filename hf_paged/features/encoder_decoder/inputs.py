"""Turn callers' arguments for an encoder into tensors of one row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.generation.prompts import copied_input
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.validation import check_prompts
from hf_paged.integration.names import CACHE_NAMES
from hf_paged.model.devices import device_of

ReadPrompt = Callable[[Any, Any], list[int]]
Run = Callable[[Callable[[], torch.Tensor]], torch.Tensor]


def encoder_inputs(
    model: Model, prompt_ids: Any, options: RequestOptions, read: ReadPrompt, run: Run
) -> dict[str, torch.Tensor]:
    """Make the inputs that `generate` gets for one row of an encoder-decoder model, on the model's device.

    prompt_ids: the encoder's text, [] where it has none. read: makes token ids of it and its mask. run: calls what
    computes the model, with the request's adapters. Raises ValueError for what is no tensor of one row, for what
    belongs to a call of `generate` and not to a row, and for a prompt that is missing or that the encoder cannot read.
    Names that the model does not take are refused by `generate` itself.
    """
    device, kind = device_of(model), type(model).__name__
    inputs: dict[str, torch.Tensor] = {}
    for name, value in (options.inputs or {}).items():
        if name in _OF_CALL or name in ("input_ids", "inputs_embeds"):
            remedy = "give the text as the prompt" if name.startswith("input") else "give what the encoder reads"
            raise ValueError(f"inputs has {name!r}, which is no input of a row in the engine; {remedy}")
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != 1:
            size = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"inputs[{name!r}] is {size}; a tensor of one row is needed, [1, ...]")
        inputs[name] = copied_input(value, name, device)
    reads_text = model.main_input_name == "input_ids"
    is_empty = isinstance(prompt_ids, (list, tuple)) and not prompt_ids
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
        ids = read(prompt_ids, options.attention_mask if mask is None else mask)
        inputs["input_ids"] = torch.tensor([ids], dtype=torch.int64, device=device)
        # `read` has taken the padding out.
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    elif options.attention_mask is not None:
        raise ValueError("attention_mask is that of a text; that of other inputs is inputs['attention_mask']")
    # Models of speech begin with tokens for language and task, which their own `generate` would choose.
    if "decoder_input_ids" in inputs:
        check_prompts(model, inputs["decoder_input_ids"], "decoder_input_ids", by_decoder=True)
    elif hasattr(model, "_retrieve_init_tokens"):
        inputs["decoder_input_ids"] = run(partial(_own_start, model, inputs, options.generation_config))
    return inputs


_OF_CALL = (
    "encoder_outputs",
    *CACHE_NAMES,
    "decoder_attention_mask",
    "decoder_inputs_embeds",
    "labels",
    "use_cache",
)


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
