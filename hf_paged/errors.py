"""The exceptions of hf_paged. Knows nothing else; standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


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


class EngineError(RuntimeError):
    """Requests of `Engine.generate` ended with an error. The exception of the first one is the `__cause__`.

    `outputs` has the RequestOutput of every prompt, in the order of the prompts: those that ended well too.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)
        failed = [(number, output) for number, output in enumerate(self.outputs, 1) if output.error is not None]
        number, first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(self.outputs)} requests failed, the first for prompt {number} "
            f"({first.request_id!r}): {first.error}. The outputs of all requests are in this exception's `outputs`; "
            "raise_on_error=False returns them"
        )
