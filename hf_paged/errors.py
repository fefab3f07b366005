"""The exceptions of hf_paged. Knows nothing else; standard library only."""

from __future__ import annotations


class OutOfBlocks(MemoryError):
    """The pool has too few free blocks for an operation, which therefore changed nothing.

    `needed` and `available` are counted in blocks.
    """

    def __init__(self, needed: int, available: int, hint: str = "") -> None:
        self.needed = needed
        self.available = available
        message = f"{needed} block(s) needed, {available} available"
        super().__init__(f"{message}: {hint}" if hint else message)


class UnsupportedModelError(ValueError):
    """The model (or this call on it) cannot be served from a paged cache. Raised before anything runs."""


class QueueFull(RuntimeError):
    """So many requests wait already that another one is not taken; try again later."""
