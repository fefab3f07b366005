"""The weights that draw the rollouts of a trainer, and how they compute meanwhile. Knows trainers; never engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_paged.annotations import Model
from hf_paged.model.devices import device_of


def own_model(trainer: Any) -> Any:
    """Return the trained model, which TRL calls `generate` of: without what accelerate wraps around it."""
    return trainer.accelerator.unwrap_model(trainer.model)


def check_weights(trainer: Any) -> None:
    """Raise ValueError if the trainer holds no whole weights."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("DeepSpeed and FSDP divide the weights, which the engine needs whole; train without them")


@contextmanager
def rollout_weights(trainer: Any) -> Iterator[Model]:
    """Yield the model whose weights draw the rollouts now: whole, in evaluation mode, with the active adapters.

    On a CPU it computes in the dtype of its weights: accelerate's autocast, by which the trainer computes gradients
    faster, rounds by the batch.
    """
    model = own_model(trainer)
    modes = [(module, module.training) for module in model.modules()]
    # In training mode it may leave out the cache.
    model.eval()
    try:
        with _without_autocast(model):
            yield model
    finally:
        for module, mode in modes:  # a part may be frozen in evaluation mode
            module.training = mode


@contextmanager
def _without_autocast(model: Any) -> Iterator[None]:
    """Take away accelerate's autocast on a CPU: what it wraps around `forward`, and what is on in this thread."""
    device = device_of(model)
    wrapped, before = vars(model).get("forward"), vars(model).get("_original_forward")
    if device.type != "cpu" or wrapped is None or before is None:
        yield
        return
    model.forward = before
    try:
        with torch.autocast("cpu", enabled=False):
            yield
    finally:
        model.forward = wrapped
