"""Shared by the tests of faster layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_paged import CacheConfig, Engine
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu import stack as fused_stack
from hf_paged.kernels.native import build as native_build
from tests.fused import fewer
from tests.noted import note_calls


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


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    if not fused_ops.is_available(request.param):
        pytest.skip("this CPU has no kernels for this dtype")
    return request.param


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of a stack computed."""
    return note_calls(monkeypatch, fused_stack.StackCall, "run", lambda call: len(call.ins))


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    """An engine on the module's model, which has run."""
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert fewer.run(engine) == fewer.by_generate(model)
        yield engine


@pytest.fixture(autouse=True)
def _trusted(trusted_code: None) -> None:
    """What the tests put into a model runs in packed steps, where it must be respected."""


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models on a CPU are treated as on a GPU, whose kernels torch computes."""
    fewer.on_cpu(monkeypatch, by_torch=True)
