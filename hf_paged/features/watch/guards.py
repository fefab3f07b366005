"""ModelWatch: checks, without running it, whether a model's forward would still launch the same operations.

A captured CUDA graph is valid only as long as that is so. Knows modules; never graphs.
"""

from __future__ import annotations

import weakref
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from hf_paged.model.state import state_of

_is_training = itemgetter("training")
_CAPTURING = "transformers.utils.output_capturing"
"""Its hooks stay on the modules once a call has asked for attentions; without such a call they do nothing."""


class ModelWatch:
    """A record of what a forward of the model depends on besides its inputs: the layout of its weights (see `Weights`),
    modes and adapters. In-place changes of weights, such as an optimizer's, do not count.

    `obstacle`: why forwards had to run eagerly at that time; None if they could be captured. Holds parts of the model
    but not the model itself, so that it may be kept as long as the model lives.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._model = weakref.ref(model)
        self._weights = state_of(model).weights
        self._attributes = [vars(module) for module in modules[1:]]
        self._adapters = [module for module in modules[1:] if "merged_adapters" in vars(module)]  # PEFT's layers
        configs = (vars(module).get("config") for module in modules)
        self._configs = list({id(config): config for config in configs if config}.values())
        self._weights.look()
        self._layout = self._weights.layout
        self._settings = self._look()
        self.obstacle = self._obstacle(modules)

    def changed(self, *, looks: bool = True) -> bool:
        """Return True if the model differs from the record.

        looks: compare the weights too, which takes about 0.1 ms for a model of 32 layers; otherwise the caller has
        looked in this step.
        """
        if looks:
            self._weights.look()
        return self.has_other_weights() or self._look() != self._settings

    def has_other_weights(self) -> bool:
        """Return True if the last look found weights, also of adapters, that were added, removed or moved."""
        return self._weights.layout != self._layout

    def _look(self) -> list[Any]:
        """The recorded values that are compared with `==`."""
        model = self._model()
        return [
            torch.get_float32_matmul_precision(),
            model is not None and model.training,
            any(map(_is_training, self._attributes)),  # one of them was an obstacle
            *((layer._active_adapter, layer._disable_adapters) for layer in self._adapters),
            *(getattr(config, "_experts_implementation", None) for config in self._configs),
            list(_module._global_forward_hooks),
            list(_module._global_forward_pre_hooks),
        ]

    def _obstacle(self, modules: list[nn.Module]) -> str | None:
        for module in modules:
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks):
                return f"a {type(module).__name__} has a forward hook"
        if _module._global_forward_hooks or _module._global_forward_pre_hooks:
            return "there is a forward hook on all modules"
        if any(module.training for module in modules):
            return "the model is in training mode"
        parameters = (parameter for module in modules for parameter in module._parameters.values())
        devices = sorted({str(parameter.device) for parameter in parameters if parameter is not None})
        return f"its weights lie on {' and '.join(devices)}" if len(devices) > 1 else None
