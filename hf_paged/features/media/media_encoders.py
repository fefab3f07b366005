"""Runs a model's encoders of images, videos and audio. Knows models and tensors; never prompts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.features.media.media import ENCODED, Features, place_of_sound, sound_argument, sound_encoder, takes_media
from hf_paged.integration.names import TYPES

_ARGUMENTS = frozenset({ENCODED, *TYPES, "video_second_per_grid", "second_per_grid_ts"})


def arguments_of(model: Model) -> frozenset[str]:
    """The arguments of its forward that `MediaDecoder` understands in a call of `generate`: what transformers makes of
    images and videos, and audio."""
    if not takes_media(model):
        return frozenset()
    if sound_argument(model) is None:
        return _ARGUMENTS
    return _ARGUMENTS | {*inspect.signature(_hearing(model)).parameters, _MASK}


def hear(model: Model, inputs: Mapping[str, Any], step: int) -> dict[str, Features]:
    """The features of the audio among the arguments of a forward, of every `step`-th row; empty: there is none."""
    argument = sound_argument(model)
    if argument is None or inputs.get(argument) is None:
        return {}
    heard = {name: value for name, value in of_encoder(model, "audio", inputs).items() if torch.is_tensor(value)}
    return {"audio": _sound_features(model, {name: value[::step] for name, value in heard.items()})}


def of_encoder(model: Model, kind: str, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if kind == "audio":
        function = sound_encoder(model)
    else:
        function = getattr(model.base_model, f"get_{kind}_features", None)
    names = set() if function is None else set(inspect.signature(function).parameters)
    if kind == "audio" and names:
        names.add(_MASK)
    return {name: value for name, value in inputs.items() if name in names}


_MASK = "input_features_mask"


def encoded_by(model: Model, inputs: Mapping[str, torch.Tensor]) -> dict[str, Features]:
    """Run the model's own encoders."""
    found = {kind: features_of(output) for kind, output in outputs_of(model, inputs).items()}
    if "audio" not in found and (heard := of_encoder(model, "audio", inputs)):
        found["audio"] = _sound_features(model, heard)
    return found


def outputs_of(model: Model, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Run the model's encoders of images and videos, and return their outputs by kind."""
    outputs: dict[str, Any] = model._prepare_multimodal_encoder_kwargs_for_generation(dict(inputs))[ENCODED]
    return outputs


def num_features(output: Any) -> list[int]:
    """Count the features of each image or video in an encoder's output."""
    given = next(value for name in _FIELDS if (value := getattr(output, name, None)) is not None)
    if torch.is_tensor(given) and given.ndim < 3:
        raise ValueError("one list of features does not show where each medium ends")
    return [each.reshape(-1, each.shape[-1]).shape[0] for each in given]


def _sound_features(model: Model, heard: dict[str, torch.Tensor]) -> Features:
    """The features of audio. Where the encoder takes no mask, the mask of the inputs is that of its features."""
    encode = _hearing(model)
    mask = None if _MASK in inspect.signature(encode).parameters else heard.pop(_MASK, None)
    output = encode(**heard, return_dict=True)
    features = replace(features_of(output), argument=place_of_sound(model))
    return features if mask is None else replace(features, pooled=output.pooler_output[mask.bool()])


def _hearing(model: Model) -> Callable[..., Any]:
    encode = sound_encoder(model)
    assert encode is not None
    return encode


def features_of(output: Any) -> Features:
    """Read the features in the output of a model's encoder.

    They are the pooled ones, else the last states, else features for several layers with the number of each layer.
    """
    deep: Any = getattr(output, "deepstack_features", None)
    field = next((name for name in _FIELDS if getattr(output, name, None) is not None), None)
    numbers = None if field is not None else tuple(number for number, _ in deep)
    if field is None:
        deep = [layer for _, layer in deep]
    layers = None if deep is None else [_flat(layer) for layer in deep]
    given = deep[0] if field is None else getattr(output, field)
    pooled = layers[0] if field is None and layers is not None else _flat(given)
    # As the model gives them to itself: its forward, and what others have put into it, may ask for the dimensions.
    shape: Any = "list" if not torch.is_tensor(given) else "rows" if given.dim() == 2 else "batch"
    return Features(pooled, layers, shape, type(output), field=field, layers=numbers)


_FIELDS = ("pooler_output", "last_hidden_state")


def _flat(features: Any) -> torch.Tensor:
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
