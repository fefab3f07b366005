"""Shared by the tests of faster layers."""

from __future__ import annotations

import pytest

from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels.native import build as native_build
from tests.fused import fewer


@pytest.fixture(scope="session")
def bf16_kernels() -> None:
    """The native kernels are built; skips tests on a machine without a compiler."""
    if not native_build.has_compiler():
        pytest.skip("no C compiler on this machine")
    native_build.build()


@pytest.fixture(scope="session")
def packed_weights(bf16_kernels: None) -> None:
    """Skips tests of packed bf16 weights, and of sums in torch's order, on a CPU without AVX-512 and BF16."""
    if not fused_ops.packs():
        pytest.skip("packed weights in bf16 need AVX-512 with BF16")


@pytest.fixture(autouse=True)
def _trusted(trusted_code: None) -> None:
    """What the tests put into a model runs in packed steps, where it must be respected."""


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on a CPU are treated as on a GPU, whose kernels torch computes."""
    fewer.on_cpu(monkeypatch, by_torch=True)
