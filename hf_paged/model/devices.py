"""On which devices a model computes. They need not hold the weights: accelerate can keep them in host memory or on disk
and load each module's weights for its forward."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hf_paged.annotations import Model


def device_of(model: Model) -> torch.device:
    """The device of the model's inputs and of its K/V; `meta` only if no hook loads the weights."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return next(_execution_devices(model), device)


def is_offloaded(model: Model) -> bool:
    """Return True if some weights are offloaded between forwards: their parameters then hold no data."""
    return any(parameter.is_meta for parameter in model.parameters())


def is_spread(model: Model) -> bool:
    """Return True if accelerate has placed modules of the model on several devices (a `device_map`)."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def _execution_devices(model: Model) -> Iterator[torch.device]:
    """The execution devices of accelerate's hooks, in the order of the modules."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        # accelerate joins several hooks of a module in one.
        for part in getattr(hook, "hooks", (hook,)):
            device = getattr(part, "execution_device", None)
            if device is not None:
                yield torch.device(device)
