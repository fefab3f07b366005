"""Of the tests of kernels."""

from __future__ import annotations

import pytest

from tests.poison import poison


@pytest.fixture(autouse=True)
def _poisoned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.module.__name__.rpartition(".")[2].startswith("test_triton"):
        poison(monkeypatch)
