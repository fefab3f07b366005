"""One server for the tests of each module. Without the packages of the extra, nothing is collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="module")
def shared_server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`SERVER` of the test's module, if there is one, has options of `harness.serving`."""
    from tests.serving.harness import serving

    with serving(admin=True, **getattr(request.module, "SERVER", {})) as running:
        yield running


@pytest.fixture(scope="module")
def shared_format() -> Iterator[Any]:
    from tests.serving.chats import RESPONSES, TEMPLATE
    from tests.serving.harness import serving

    with serving(chat_template=TEMPLATE, response_template=RESPONSES) as running:
        yield running


@pytest.fixture
def formatted(shared_format: Any) -> Iterator[Any]:
    """A server whose answers have reasoning and tool calls; every test has to leave it idle."""
    yield shared_format
    shared_format.assert_idle()


@pytest.fixture
def content_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars leave out reasoning and tool calls, which a model is free to add."""
    from hf_paged.serving.answer_format import AnswerFormat

    monkeypatch.setattr(AnswerFormat, "constraint", lambda self, prompt, content, calls: content)


@pytest.fixture
def server(shared_server: Any) -> Iterator[Any]:
    """The shared server (`harness.Running`); every test has to leave it idle."""
    yield shared_server
    shared_server.assert_idle()
