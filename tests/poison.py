"""Memory that nobody has written: what `torch.empty` and its like return is filled with NaN or a number, so that a
kernel that relies on zeros, or on the last owner's values, gives a wrong result.

Without it, new memory is often zero in a test, and hardly ever so in a server.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

_MAX_BYTES = 1 << 26  # larger ones, of which a test uses few pages, stay as they are


def poison(patch: pytest.MonkeyPatch) -> None:
    """From here on, on any device."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")):
        patch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        tensor = make(*args, **kwargs)
        if tensor.device.type != "meta" and tensor.nbytes <= _MAX_BYTES:
            with _disable_current_modes():  # which record what the code itself does
                tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
        return tensor

    return made
