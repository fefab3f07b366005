"""One server for the tests of each module. Without the packages of the extra, nothing is collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Any]:
    from tests.serving.harness import serving

    with serving(admin=True) as running:
        yield running


@pytest.fixture
def server(shared_server: Any) -> Iterator[Any]:
    """The shared server (`harness.Running`); every test has to leave it idle."""
    yield shared_server
    shared_server.assert_idle()
