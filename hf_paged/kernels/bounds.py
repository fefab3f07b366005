"""Bounds on how far back a token attends, for all but the kernels in C and Triton. Standard library only.

A new bound is a field of `Bounds`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """Bounds on how far back a token attends. sliding_window: to so many tokens, its own included. chunk_size: to none
    before its chunk of so many tokens. None: that bound does not apply."""

    sliding_window: int | None = None
    chunk_size: int | None = None

    @property
    def most(self) -> int | None:
        """Tokens that a token attends to at most; None: all."""
        return min(filter(None, self), default=None)

    def first(self, position: Any, larger: Callable[[Any, Any], Any] = max) -> Any:
        """The first position that the token at `position` attends to. larger: `np.maximum` for an array of int64."""
        first = position * 0
        if self.sliding_window is not None:
            first = larger(first, position - self.sliding_window + 1)
        if self.chunk_size is not None:
            first = larger(first, position // self.chunk_size * self.chunk_size)
        return first

    def hidden(self, query: Any, key: Any) -> Any:
        """Return True where a query at position `query` does not attend to the key at `key`, which is too far back.
        Both are tensors or arrays of int64 that broadcast together -> bool. None: nothing is hidden."""
        hidden = None
        if self.sliding_window is not None:
            hidden = key <= query - self.sliding_window
        if self.chunk_size is not None:
            before = key < query // self.chunk_size * self.chunk_size
            hidden = before if hidden is None else hidden | before
        return hidden


UNBOUNDED = Bounds()
