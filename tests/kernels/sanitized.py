"""A pytest plugin that loads the kernels from $HF_PAGED_SANITIZED with exact workspaces; see `test_sanitizers.py`."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels.native import build as native_build
from hf_paged.kernels.native import ops as native_ops

FLAGS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIBRARY = "HF_PAGED_SANITIZED"

_kept: list[torch.Tensor] = []
_used: set[str] = set()


class Recorded:
    """A library that notes which of its functions were asked for."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        _used.add(name)
        return getattr(self._library, name)


def exact_workspace(num_bytes: int) -> int:
    """Like `native_ops.workspace`, but new memory of exactly this size."""
    _kept[:] = [torch.empty(num_bytes, dtype=torch.uint8)]
    return _kept[0].data_ptr()


def pytest_configure(config: Any) -> None:
    path = Path(os.environ[LIBRARY])
    library: Any = Recorded(native_build.load(path))
    native_build.library = lambda: library
    native_build.build = lambda: path
    native_build.status = lambda: f"sanitized: {library.hfp_target().decode()}"
    native_ops.workspace = fused_ops.workspace = exact_workspace


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"entry points: {' '.join(sorted(_used))}")
