"""Where the Triton kernels run in a test: in the interpreter on a CPU, or on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.triton import launch as triton_launch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INTERPRETED = pytest.mark.skipif(
    not GPU and not triton_launch.INTERPRET, reason="triton was imported before TRITON_INTERPRET was set"
)
LAYERS = [
    INTERPRETED,
    *([pytest.mark.gpu] if GPU else []),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # the interpreter's numpy
]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, dtype)
