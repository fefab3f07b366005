"""Decoders with another head than that of a language model, or none, as models whose logits are what the head gives.

An engine computes these as it computes a causal LM: `logits` [num_rows, num_labels] of the tokens that are wanted,
where the model's own forward returns those of one token, or of all.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError
from hf_paged.integration.names import cache_argument
from hf_paged.model.devices import device_of
from hf_paged.model.overrides import is_override, mark
from hf_paged.model.state import follow

_HEADS = ("score", "classifier")
"""Linear layers from hidden states to labels, as transformers' classes name them."""

_OF_OBJECT = ("_old_forward", "forward", "_hf_hook")
"""Attributes that accelerate and torch.compile set on a model itself, and that call that model, not its copy."""


class HeadModel:
    """A part of the classes of what `with_head` makes. labels_tokens: the model's own forward has a row of each token,
    as for token classification. made_of: the model, which `Weights` hold weakly."""

    labels_tokens = False
    made_of: tuple[Model, ...] = ()

    @property
    def training(self) -> bool:
        """Return the mode of the modules: it is set through the model, which has the same ones."""
        return any(module.training for module in self.children())  # type: ignore[attr-defined]

    @training.setter
    def training(self, mode: bool) -> None:
        """Leave it to the modules, of which `train` sets each."""


def head_of(model: Model) -> nn.Module | None:
    """Return the layer that a decoder has in place of a language model's head; None: it has none."""
    if model.base_model is model:
        return None
    return next((head for name in _HEADS if isinstance(head := getattr(model, name, None), nn.Module)), None)


def has_labels(model: Any) -> bool:
    """Return True for what `with_head` has made of a classifier."""
    return isinstance(model, HeadModel) and head_of(model) is not None  # type: ignore[arg-type]


def with_head(model: Model) -> Any:
    """Return a model as the engine computes it: itself if it generates, or if nothing is known of its head; otherwise
    an object with the same modules and configs whose logits are what the head gives for each token. Raises
    UnsupportedModelError if the model's own forward was replaced."""
    if model.can_generate() or model.config.is_encoder_decoder:
        return model
    if model.base_model is not model and head_of(model) is None:
        return model
    _refuse_replaced(model)
    made: Any = copy.copy(model)
    for name in _OF_OBJECT:
        vars(made).pop(name, None)
    made.made_of = (model,)
    follow(made, model)
    kind: Any = type(model)
    base: Any = type(model.base_model)
    if base is not kind:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=device_of(model))
        with torch.no_grad():
            made.labels_tokens = model(input_ids=ids, use_cache=False).logits.ndim == 3
    made.__class__ = _class_of(kind, base)
    made.generation_config = GenerationConfig.from_model_config(model.config)
    return made


def _refuse_replaced(model: Model) -> None:
    """Raises UnsupportedModelError if the object has a forward that computes something else than its class's does."""
    own = next((vars(model)[name] for name in _OF_OBJECT if name in vars(model)), None)
    plain = getattr(own, "_torchdynamo_orig_callable", own)
    if own is None or is_override(own) or getattr(plain, "__func__", None) is type(model).forward:
        return
    name = type(model).__name__
    raise UnsupportedModelError(
        f"the forward of this {name} was replaced, but an engine computes its layers and its head without it; "
        "delete it (del model.forward), or replace a forward within the model instead"
    )


@functools.cache
def _class_of(kind: type, base: type) -> Any:
    owner: Any = base
    own = inspect.signature(owner.forward)

    def forward(self: Any, *, logits_to_keep: int | torch.Tensor | list[int] = 0, **kwargs: Any) -> Any:
        output = owner.forward(self, **kwargs) if base is kind else self.base_model(**kwargs)
        wanted: Any = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        states, head, name = output[0][:, wanted], head_of(self), cache_argument(self)
        cache: dict[str, Any] = {} if name is None else {name: output.get(name)}
        return CausalLMOutputWithPast(logits=states if head is None else head(states), **cache)

    # Arguments and their names are those of the base model.
    keep = inspect.Parameter("logits_to_keep", inspect.Parameter.KEYWORD_ONLY, default=0)
    named = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
    others = [each for each in own.parameters.values() if each.kind is each.VAR_KEYWORD]
    forward.__signature__ = own.replace(parameters=[*named, keep, *others])  # type: ignore[attr-defined]
    members = {"forward": mark(forward), "__module__": kind.__module__}
    return type(kind.__name__, (HeadModel, kind, GenerationMixin), members)
