"""Notes of calls, for tests that ask what was called and with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


def note_calls(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """From here on each call of `owner.name` first adds `note(*args, **kwargs)` to the returned list."""
    notes: list[Any] = []
    own = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        notes.append(note(*args, **kwargs))
        return own(*args, **kwargs)

    patch.setattr(owner, name, noted)
    return notes


class Counted(TorchDispatchMode):
    """count: how many of torch's operations in the block `counts` was true of."""

    def __init__(self, counts: Callable[[Any], bool]) -> None:
        super().__init__()
        self.counts, self.count = counts, 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.counts(func)
        return func(*args, **(kwargs or {}))
