"""Of the tests of kernels."""

from __future__ import annotations

import pytest

from hf_paged.kernels.native import build as native_build
from tests.poison import poison


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__.rpartition(".")[2].startswith("test_triton"):
        poison(monkeypatch)


@pytest.fixture(autouse=True)
def _has_kernels(request: pytest.FixtureRequest) -> None:
    """tests/conftest.py has compiled them."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if parameters.get("impl") == "native" and not native_build.has_compiler():
        pytest.skip("no C compiler on this machine")
