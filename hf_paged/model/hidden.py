"""Hidden states of a model's tokens, as its base model returns them to the head, taken from a forward in this thread.

Knows models; never sequences, requests or sampling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_paged.annotations import Model
from hf_paged.model.overrides import ABSENT, Overrides, Patch, is_override, mark, uncompiled_modules
from hf_paged.model.state import Slot


class _Noted(threading.local):
    """base: the module whose next output in this thread is wanted. states: that output."""

    base: Any = None
    states: Any = None


_noted = _Noted()


def no_hidden(model: Model) -> str:
    """Return why no forward has hidden states of the model's tokens; "": it may have."""
    base, name = _base_of(model), type(model).__name__
    if base is model:
        return f"{name} has no base model, whose output its head reads"
    if base not in uncompiled_modules(model):
        return f"the base model of this {name} is compiled, so that its output is not seen; compile the whole model"
    return ""


def _base_of(model: Model) -> Any:
    """The module whose output the model's head reads; the model itself if there is none."""
    # Some models call the decoder of their base model, and not that.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return model.base_model if decoder is None or decoder is model else decoder


class HiddenStates:
    """An override: what the base model of a model returns in the next forward of this thread is kept until `take`."""

    def __init__(self, model: Model) -> None:
        self._base = _base_of(model)
        self._own = vars(self._base).get("forward")  # accelerate sets one, for example
        patch = mark(partial(_forward, self._base, self._own))
        replaces = ABSENT if self._own is None else self._own
        self._overrides = Overrides([Patch(vars(self._base), "forward", patch, replaces)])

    def fits(self, model: Model) -> bool:
        """Return True if the base model is the one that it was made for, with the same forward."""
        base = _base_of(model)
        now = vars(base).get("forward")
        # Another thread may be in a forward.
        return base is self._base and (now is self._own or is_override(now))

    def apply(self, user: object) -> None:
        _noted.base, _noted.states = self._base, None
        self._overrides.apply(user)

    def undo(self, user: object) -> None:
        _noted.base = None
        self._overrides.undo(user)

    def take(self) -> torch.Tensor | None:
        """Return them, [num_rows, num_tokens, size]. None if the model has not called its base model's forward."""
        states, _noted.states = _noted.states, None
        return states if isinstance(states, torch.Tensor) and states.ndim == 3 else None

    def of(self, call: Callable[[], Any]) -> tuple[Any, torch.Tensor | None]:
        """Return what a forward without further overrides returns, and the hidden states, as `take` does."""
        try:
            self.apply(self)
            return call(), self.take()
        finally:
            self.undo(self)


def _forward(base: nn.Module, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """In place of the base model's forward, which other threads, or a handler of a signal within it, may call too."""
    is_wanted, _noted.base = _noted.base is base, None
    output = type(base).forward(base, *args, **kwargs) if own is None else own(*args, **kwargs)
    if is_wanted:
        _noted.states = output[0]
    return output


_known: Slot[HiddenStates] = Slot("hidden states")


def hidden_states(model: Model) -> HiddenStates:
    """Return the override of a model, one for all threads. Its base model may be another than before."""
    known = _known.get(model)
    if known is None or not known.fits(model):
        known = HiddenStates(model)
        _known.put(model, known)
    return known
