"""A model's own first layers as a model: what drafts by early exit."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from hf_paged.annotations import Model
from hf_paged.features.watch.foreign import bare_copy
from hf_paged.model.state import unwrapped


def first_layers(model: Model, count: int) -> Any:
    """Make a model of the first decoder layers of this one, to draft for it.

    It has the model's embedding, norm and head, and shares all tensors. It pays for models that were trained to answer
    from their first layers too (LayerSkip), as transformers' `assistant_early_exit`.

    Args:
        model: A transformers model with a list `layers`, or a PEFT model over one.
        count: How many layers, from 1 to one less than the model has.

    Returns:
        A model for `Engine(model, assistant_model=...)`.

    Raises:
        ValueError: If the model has no list `layers` of more than `count`.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, GenerationConfig
        from hf_paged import Engine, first_layers

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        with Engine(model, {"num_blocks": 64}, assistant_model=first_layers(model, 2)) as engine:
            engine.generate([[1, 5, 6]], GenerationConfig(max_new_tokens=8))
        ```
    """
    model = unwrapped(model)
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(count, int) or not 0 < count < len(layers):
        found = f"{len(layers)} layers" if isinstance(layers, nn.ModuleList) else "no list of layers"
        raise ValueError(f"count={count!r}: {type(model).__name__} has {found}; give 1 to one less than it has")
    view = bare_copy(model)
    # A config of its own, because the model's must keep its number of layers.
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    copies = {id(model.config): config, id(model.config.get_text_config(decoder=True)): text}
    for module in view.modules():
        own = vars(module).get("config")
        if id(own) in copies:
            module.config = copies[id(own)]
    view.base_model.layers = nn.ModuleList(list(view.base_model.layers)[:count])
    view.generation_config = copy.deepcopy(model.generation_config)
    return view
