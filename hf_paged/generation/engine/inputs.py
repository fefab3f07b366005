"""Turn callers' arguments for an encoder into tensors of one row."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.features.encoder_decoder.encoder_rows import EncoderArguments
from hf_paged.features.media.media import KINDS, Media, placeholders, takes_media
from hf_paged.generation.request_options import RequestOptions
from hf_paged.generation.validation import check_prompts, refuse_meta
from hf_paged.integration.names import CACHE_NAMES, ENCODES_MEDIA, TYPES
from hf_paged.model.devices import device_of
from hf_paged.versions import installed

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
        inputs[name] = _copied(value, name, device)
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


def media_of(
    model: Model, prompt: list[int], inputs: Mapping[str, Any], *, can_run: bool, salt: str | None = None
) -> Media:
    """The images, videos and audio of a prompt. inputs: what the model's processor returns beside `input_ids`, for this
    prompt. can_run: whether the engine computes such prompts. salt: the request's `cache_salt`. Raises ValueError for
    what is no such input, and for a prompt without placeholders."""
    kind = type(model).__name__
    if not takes_media(model):
        raise ValueError(f"inputs has {min(inputs)!r}: {kind} takes no such inputs in the engine; leave it out")
    if not ENCODES_MEDIA:
        raise ValueError(
            f"inputs has {min(inputs)!r}, but transformers {installed()} encodes media in each forward, whose tokens "
            "the engine cannot share; use transformers 5.18 or newer, or paged model.generate"
        )
    if not can_run:
        raise ValueError(f"inputs has {min(inputs)!r}: a model on several ranks takes texts only; use one process")
    known = _names_of(model)
    tensors: dict[str, torch.Tensor] = {}
    device = device_of(model)
    for name, value in inputs.items():
        if name == "attention_mask":
            raise ValueError("inputs has 'attention_mask'; give it as the request's own attention_mask")
        # An input that no part of the model reads would change nothing, and nobody would notice.
        if name not in known:
            raise ValueError(f"inputs has {name!r}, which {kind} does not take; leave it out")
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"inputs[{name!r}] is a {type(value).__name__}; a tensor is needed")
        # The mask has taken padding out of the prompt, but not out of this tensor.
        if name in TYPES and value.shape != (1, len(prompt)):
            size = f"[1, {len(prompt)}] is needed, for the tokens of the prompt without padding"
            raise ValueError(f"inputs[{name!r}] has the shape {list(value.shape)}; {size}")
        tensors[name] = _copied(value, name, device)
    places = placeholders(model, prompt)
    if not places:
        raise ValueError(
            f"inputs has {min(inputs)!r}, but the prompt has no placeholders; use the model's processor for both"
        )
    return Media(tensors, places, salt)


def _copied(value: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """A copy, because the encoder runs later and others may find what it makes of this. Raises ValueError."""
    refuse_meta(value, f"inputs[{name!r}]")
    if value.layout is not torch.strided:
        raise ValueError(f"inputs[{name!r}] has the layout {value.layout}; give a dense tensor")
    return value.detach().to(device, copy=True)


def _names_of(model: Model) -> set[str]:
    """The inputs of the model's forward and of its encoders."""
    encoders = [getattr(model.base_model, f"get_{kind}_features", None) for kind in KINDS]
    functions = [type(model).forward, *(each for each in encoders if each is not None)]
    names = {name for function in functions for name in signature(function).parameters}
    return (names | {"mm_token_type_ids"}).difference(_OF_STEP)


_OF_STEP = (
    "self", "kwargs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", *CACHE_NAMES, "labels",
    "use_cache", "logits_to_keep", "mm_encoder_outputs", "output_attentions", "output_hidden_states", "return_dict",
    "cache_position", "rope_deltas",
)  # fmt: skip
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


def digest_of(encoder: EncoderArguments, root: bytes) -> bytes:
    """Equal for equal inputs under the same root."""
    digest = hashlib.sha256(root)
    for name, tensor in [(encoder.name, encoder.tensor), *sorted(encoder.others.items())]:
        # Equal bytes may be other numbers in another shape or dtype.
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        # As bytes, because numpy has no bf16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
