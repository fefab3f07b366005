"""Models with PEFT adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hf_paged.features.adapters.adapters import layers_of
from tests import models

peft = pytest.importorskip("peft")
functional = pytest.importorskip("peft.functional")

IGNORED = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),  # what PEFT asks
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adapter . was active which is now deleted:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning"),
]
"""Warnings of PEFT: the marks of a test module."""

BASE = "__base__"
NAMES = ("x", "y", "z", BASE)
TARGETS = {"x": ["q_proj", "v_proj", "down_proj"], "y": ["v_proj", "o_proj", "up_proj"], "z": ["k_proj", "down_proj"]}


def lora(targets: Any, **options: Any) -> Any:
    """A LoRA config with random weights, large enough to change the text."""
    return peft.LoraConfig(target_modules=targets, lora_alpha=64, init_lora_weights=False, **options)


# Transformers' own methods do the same, but may ask for a PEFT that is newer than the one installed.


def add(model: Any, options: Any, name: str) -> None:
    """Put an adapter into a transformers model, and make it the active one."""
    peft.inject_adapter_in_model(options, model, name)
    model._hf_peft_config_loaded = True
    activate(model, name)


def activate(model: Any, names: str | list[str]) -> None:
    switch(model, True)
    functional.set_adapter(model, names)


def switch(model: Any, on: bool) -> None:
    for layer in layers_of(model):
        layer.enable_adapters(on)


def delete(model: Any, name: str) -> None:
    del model.peft_config[name]
    functional.delete_adapter(model, name, "lora_")


def with_transformers(model: Any = None, targets: dict[str, Any] | None = None) -> Any:
    model = models.build("llama") if model is None else model
    for name, modules in (targets or TARGETS).items():
        add(model, lora(modules), name)
    return model.eval()


def with_peft(model: Any = None, targets: dict[str, Any] | None = None) -> Any:
    (first, modules), *others = (targets or TARGETS).items()
    wrapped = peft.get_peft_model(models.build("llama") if model is None else model, lora(modules), first)
    for name, modules in others:
        wrapped.add_adapter(name, lora(modules))
    return wrapped.eval()


def inner(model: Any) -> Any:
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


@contextmanager
def activated(model: Any, name: str | None) -> Iterator[None]:
    """Activate only this adapter with PEFT's own methods; the model is restored afterwards."""
    layers = [m for m in model.modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)]
    before = [(m._active_adapter, m._disable_adapters) for m in layers]
    gradients = [p.requires_grad for p in model.parameters()]
    wrappers = [m for m in model.modules() if isinstance(m, peft.utils.other.AuxiliaryTrainingWrapper)]
    wrapped = [(m._active_adapter, m._disable_adapters) for m in wrappers]
    if name == BASE:
        for module in layers + wrappers:
            module.enable_adapters(False)
    elif name is not None and isinstance(model, peft.PeftModel):
        model.set_adapter(name)
    elif name is not None:
        functional.set_adapter(model, name)
    try:
        yield
    finally:
        for module, values in zip(layers + wrappers, before + wrapped):
            module._active_adapter, module._disable_adapters = values
        for parameter, flag in zip(model.parameters(), gradients):
            parameter.requires_grad = flag
