"""Which kernels compute in a test."""

from __future__ import annotations

import threading

import pytest

from hf_paged.kernels import gather, ops
from hf_paged.kernels.native import build

NATIVE = pytest.mark.skipif(not build.has_compiler(), reason="no C compiler on this machine")


def compute_by(patch: pytest.MonkeyPatch, impl: str, device: str = "cpu") -> None:
    """From here on these kernels compute on devices of this type where none are named, with fresh memory."""
    if impl == "native":
        if not build.has_compiler():
            pytest.skip("no C compiler on this machine")
        build.build()
    patch.setitem(ops._default_impl, device, impl)
    patch.setattr(gather, "_local", threading.local())
