"""ModelState: everything that hf_paged keeps about one transformers model, in one registry.

Rooms above this one keep what is theirs in slots: a `Slot` is a typed place in the state of every model.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar

from torch import nn

from hf_paged.model.weights import Weights, watch_optimizers

_Value = TypeVar("_Value")


class ModelState:
    """What is kept about one model, for as long as the model lives.

    lock: held while the model computes with adapters switched, so that engines on one model take turns. weights: see
    `Weights`. The values of slots may be dropped at any time (`release`): they are only kept to save work or memory.
    No value may refer to the model itself; it would keep the model alive.
    """

    __slots__ = ("__weakref__", "lock", "values", "weights")

    def __init__(self, model: nn.Module) -> None:
        self.lock = threading.RLock()
        self.weights = Weights(model)
        self.values: dict[Slot[Any], Any] = {}


_states: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()
_lock = threading.RLock()  # a model may be collected, and another registered, while it is held


def unwrapped(model: Any) -> Any:
    """The transformers model that a PEFT wrapper computes and generates through; any other model as it is."""
    base = getattr(model, "get_base_model", None)
    return model if base is None else base()


def state_of(model: nn.Module) -> ModelState:
    """The state of a transformers model (not of a PEFT wrapper, see `unwrapped`)."""
    with _lock:
        state = _states.get(model)
        if state is None:
            state = _states[model] = ModelState(model)
            watch_optimizers(state.weights)
    return state


def release(model: nn.Module | None = None) -> None:
    """Drop what takes memory of the values that are kept for a model, or for all models."""
    with _lock:
        known = _states.get(model) if model is not None else None
        states = list(_states.values()) if model is None else [] if known is None else [known]
    for state in states:
        for slot in list(state.values):
            if slot.is_released:
                state.values.pop(slot, None)
        state.weights.rest()


def weights_changed(model: Any) -> None:
    """Say that the weights of a model have changed where it may not be noticed.

    model: a transformers model, or a PEFT model over one. What has been derived from the weights is made anew: packed
    copies, and the cached prefixes of all engines on the model. To be called between steps; `Engine.pause` is for a
    change with requests in flight.

    There is no need to call it after steps of torch's optimizers, after autograd has seen the change in place
    (`with torch.no_grad(): weight.mul_(2)`), or when parameters, buffers, modules, `forward`s, hooks or the adapters of
    PEFT were replaced, merged or scaled. Other writes (`weight.data.mul_(2)`, another library's optimizer, weights
    loaded in place) are noticed by a sample of each tensor, and only when an engine has no request in flight or a
    `generate` call after `prepack` begins; a write to a few elements, such as one row of an embedding, is not. Nor is a
    plain attribute of a module, such as the `eps` of a norm.
    """
    state_of(unwrapped(model)).weights.changed()


class Slot(Generic[_Value]):
    """A place for one value in the state of every model. Each method is atomic.

    is_released: whether `release` drops the value, as it should where that takes memory.
    """

    __slots__ = ("is_released", "name")

    def __init__(self, name: str, *, is_released: bool = True) -> None:
        self.name = name
        self.is_released = is_released

    def get(self, model: nn.Module) -> _Value | None:
        value: _Value | None = state_of(model).values.get(self)
        return value

    def put(self, model: nn.Module, value: _Value) -> None:
        state_of(model).values[self] = value

    def setdefault(self, model: nn.Module, value: _Value) -> _Value:
        """Get the value; put this one if there is none."""
        kept: _Value = state_of(model).values.setdefault(self, value)
        return kept

    def take(self, model: nn.Module) -> _Value | None:
        """Get the value and remove it."""
        value: _Value | None = state_of(model).values.pop(self, None)
        return value

    def __repr__(self) -> str:
        return f"Slot({self.name!r})"
