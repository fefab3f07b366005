"""Where a model computes, which is not always where its weights are: accelerate can keep them in host memory or on disk
and move each module's in for its forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def device_of(model: Any) -> torch.device:
    """The device of the model's inputs and of its K/V. `meta` only if nothing brings the weights in."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    return next(_execution_devices(model), device)


def is_offloaded(model: Any) -> bool:
    """Whether some weights are elsewhere between forwards: what the model's parameters hold then is no data."""
    return any(parameter.is_meta for parameter in model.parameters())


def _execution_devices(model: Any) -> Iterator[torch.device]:
    """Of accelerate's hooks, in the order of the modules."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            device = getattr(part, "execution_device", None)
            if device is not None:
                yield torch.device(device)
