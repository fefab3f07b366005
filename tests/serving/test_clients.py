"""scripts/check_clients.py: the calls of the client that is installed here, and how it reports failures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import check_clients
from scripts.check_clients import Client
from tests.serving.harness import NAME, serving


@pytest.mark.slow
def test_openai(tmp_path: Path) -> None:
    """OpenAI's calls pass. With another expected text, exactly the calls that return this text fail."""
    task = check_clients.make_task()
    assert task["model"] == NAME and len(set(task["samples"])) > 1 and task["stopped"] != task["completion"]
    client = check_clients.chosen("openai-python")[0]
    template = check_clients.template_with_tools()
    with serving(api_keys=(check_clients.KEY,), chat_template=template) as server:
        task["url"] = server.url
        result = check_clients.check(client, sys.executable, task, tmp_path)
        assert result.summary == "passed" and result.passed and result.version and len(result.calls) > 10
        wrong = check_clients.check(client, sys.executable, {**task, "completion": "else"}, tmp_path)
        server.assert_idle()
    assert [call for call, error in wrong.calls.items() if error] == ["completion", "completion_stream"]
    assert not wrong.passed and "'else'" in wrong.summary


@pytest.mark.parametrize("status, words", [(3, "exit status 3"), (0, "no call was made")])
def test_no_calls(tmp_path: Path, status: int, words: str) -> None:
    """A script that ends before its first call has not passed."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.exit({status})")
    result = check_clients.check(Client("a", str(script), ()), sys.executable, {}, tmp_path)
    assert words in result.summary and not result.passed
