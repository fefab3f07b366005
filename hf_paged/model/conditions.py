"""The conditions under which an engine computes its model: dtype, device, autocast, mode, and third-party code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from hf_paged.annotations import Model
from hf_paged.errors import UnsupportedModelError
from hf_paged.features.watching import METHODS, foreign_code
from hf_paged.model.devices import device_of
from hf_paged.model.support import draws_dropout, drops_cache
from hf_paged.sockets import Executor


class Conditions:
    """The conditions under which an executor computes: in every thread the autocast of the one that has made this."""

    def __init__(self, executor: Executor) -> None:
        self._autocast = _autocast(device_of(executor.model))
        floating = {each.dtype for each in executor.model.parameters() if each.is_floating_point()}
        self._has_one_dtype = len(floating) == 1
        self.use(executor)

    def use(self, executor: Executor) -> None:
        """The executor is another one from now on, of the same model, which may have changed."""
        self._model: Model = executor.model
        self._weights = executor.weights
        self._foreign = foreign_code(self._model)
        self.device = device_of(self._model)
        self._made_for = _dtype_and_device(self._model)

    def modes(self, executor: Executor) -> AbstractContextManager[None]:
        """Return the context of a step: the autocast, whatever the thread's is, and no gradients; in inference mode,
        which saves a twentieth of a step on a CPU, if the model supports it for certain.

        A module of a user's class, or an attention of its own, may keep a tensor of the step, which a later training
        forward could not save for backward; weights of classes of their own may refuse views.
        """
        # (`inference_mode(False)` would turn gradients on.)
        # What a graph computes was captured in inference mode, so steps beside it write to its tensors there.
        keeps_none = self._foreign.has_library_modules or executor.graphs is not None
        supported = executor.is_packed and self._weights.are_plain and keeps_none
        gradients = torch.inference_mode() if supported else torch.no_grad()
        if _autocast(self.device) == self._autocast:
            return gradients
        return _both(gradients, torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None))

    def check_model(self) -> None:
        """Raises UnsupportedModelError if the model's dtype or device is no longer that of the K/V in memory, if it
        would keep none, if others have replaced its part in generation, and if its results are random."""
        model = self._model
        if model.training and drops_cache(model):
            raise UnsupportedModelError(
                "gradient checkpointing is on in training mode, where a model may keep no K/V; call model.eval() first"
            )
        if model.training and draws_dropout(model):
            raise UnsupportedModelError(
                "the model is in training mode, where dropout makes results random; call model.eval() first"
            )
        if any(name in vars(model) for name in METHODS):
            self._foreign.refuse_choice()
        now = _dtype_and_device(model)
        if now != self._made_for:
            (dtype, device), (new_dtype, new_device) = self._made_for, now
            raise UnsupportedModelError(
                f"this engine was made for a model in {dtype} on {device}, now in {new_dtype} on {new_device}; "
                "change the model back, or close the engine and make a new one"
            )

    def check_caller(self) -> None:
        """Raises UnsupportedModelError if this thread adds a request under another autocast than this one, of which
        K/V, prefixes and features are. (To the dtype of all weights, it is as if it were off.)"""
        same = (None, self._made_for[0]) if self._has_one_dtype else (None,)
        own, found = (None if each in same else each for each in (self._autocast, _autocast(self.device)))
        if own != found:
            names = [f"autocast to {each}" if each else "no autocast" for each in (found, own)]
            raise UnsupportedModelError(
                f"{names[0]} is on, and this engine was made and computes with {names[1]}; add its requests so, or "
                "make an engine under this autocast"
            )

    def third_party(self, executor: Executor) -> str | None:
        """Return the third-party code that is in the model; None: there is none. Raises UnsupportedModelError if the
        model cannot be computed with it."""
        reason = self._foreign.look()
        if reason is not None and executor.one_order is not None:
            raise UnsupportedModelError(f"batch_invariant=True: {reason}, which may depend on the batch; leave it out")
        self._foreign.refuse_choice()
        return reason


def _autocast(device: torch.device) -> torch.dtype | None:
    """The dtype to which this thread casts; None: autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with first, second:
        yield


def _dtype_and_device(model: Model) -> tuple[torch.dtype, torch.device]:
    """`model.dtype`, and the device on which the model computes. In every step, so that it must cost little: the
    first floating-point parameter, as a rule that of the embedding, has both."""
    module: torch.nn.Module | None = model
    while module is not None:
        for parameter in module._parameters.values():
            if parameter is not None:
                dtype, device = parameter.dtype, parameter.device
                if dtype.is_floating_point and device.type != "meta":
                    return dtype, device
                return model.dtype, device_of(model)
        module = next(iter(module._modules.values()), None)
    return model.dtype, device_of(model)
