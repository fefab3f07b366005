"""ModelState: everything that hf_paged keeps about one transformers model, in one registry.

Packages above this one keep their values in slots: a `Slot` is a typed place in the state of every model.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, TypeVar

from torch import nn

from hf_paged.annotations import Model
from hf_paged.locks import usable_after_fork
from hf_paged.model.weights import Weights, watch_optimizers

_Value = TypeVar("_Value")


class ModelState:
    """State that hf_paged keeps for one model as long as the model lives.

    lock: held while the model computes with adapters, so that none is loaded or deleted meanwhile. weights: see
    `Weights`. The values of slots only save work or memory and may be dropped at any time (`release`). No value may
    refer to the model itself, because it would keep the model alive.
    """

    __slots__ = ("__weakref__", "lock", "values", "weights")

    def __init__(self, model: nn.Module) -> None:
        self.lock = usable_after_fork(threading.RLock())
        self.weights = Weights(model)
        self.values: dict[Slot[Any], Any] = {}


_states: weakref.WeakKeyDictionary[nn.Module, ModelState] = weakref.WeakKeyDictionary()
# Reentrant, because a finalizer may run in the thread that holds it.
_lock = usable_after_fork(threading.RLock())


def unwrapped(model: object) -> Any:
    """The transformers model that a PEFT wrapper computes and generates through; any other model as it is.

    Raises TypeError for what nn.DataParallel makes of a model for one forward: it has no parameters.
    """
    if getattr(model, "_is_replica", False) is True:
        raise TypeError(
            f"this {type(model).__name__} is a replica of nn.DataParallel; pass the model of which it was made"
        )
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


def follow(made: nn.Module, model: nn.Module) -> None:
    """Give an object with the modules of a model the lock and the `Weights` of that model, which must live as long."""
    own = state_of(model)
    with _lock:
        state = _states[made] = ModelState(model)
        state.lock, state.weights = own.lock, own.weights


def release(model: nn.Module | None = None) -> None:
    """Drop the kept values that take memory, for one model or for all models."""
    with _lock:
        known = _states.get(model) if model is not None else None
        states = list(_states.values()) if model is None else [] if known is None else [known]
    for state in states:
        for slot in list(state.values):
            if slot.is_released:
                state.values.pop(slot, None)
        state.weights.release_views()


def weights_changed(model: Model) -> None:
    """Report that the weights of a model have changed in a way that hf_paged may not notice.

    Everything derived from the weights is invalidated: packed copies, and the cached prefixes of all engines on the
    model. Call it between steps; use `Engine.pause` for a change while requests are running.

    These changes are always noticed: steps of torch's optimizers, in-place operations that increase a tensor's version
    (`with torch.no_grad(): weight.mul_(2)`), and parameters, buffers, modules, `forward`s, hooks or PEFT adapters that
    were replaced, merged or scaled.

    Other writes (`weight.data.mul_(2)`, another library's optimizer, weights loaded in place) are noticed by comparing
    a sample of each tensor, but only while an engine has no running request, or at the start of a `generate` call after
    `prepack`. On an accelerator each comparison takes a part of the tensors, so that a change of one tensor is noticed
    some requests later. A write to a few elements, such as one row of an embedding, is not noticed, nor is a change of
    a plain attribute of a module, such as the `eps` of a norm.

    Args:
        model: A transformers model, or a PEFT model over one.

    Example:
        ```python
        from transformers import AutoModelForCausalLM
        import hf_paged

        model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-base")
        model.model.norm.weight.data[0] *= 2
        hf_paged.weights_changed(model)
        model.model.norm.weight.data[0] /= 2
        hf_paged.weights_changed(model)
        ```
    """
    # A PEFT wrapper computes with the tensors of the model in it.
    state_of(unwrapped(model)).weights.changed()


class Slot(Generic[_Value]):
    """A place for one value in the state of every model. Each method is atomic.

    is_released: whether `release` drops the value, as it should if the value takes memory.
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
        """Return the value, after setting it to `value` if there is none."""
        kept: _Value = state_of(model).values.setdefault(self, value)
        return kept

    def take(self, model: nn.Module) -> _Value | None:
        """Remove the value and return it."""
        value: _Value | None = state_of(model).values.pop(self, None)
        return value

    def __repr__(self) -> str:
        return f"Slot({self.name!r})"
