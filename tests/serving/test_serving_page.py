"""The Python blocks of docs/serving.md run: a client's against a server, and the one that starts a server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from hf_paged.serving import server as module
from tests.serving.harness import Running, plain, text_of, tokenizer

ROOT = Path(__file__).parent.parent.parent
CLIENT, PROGRAM = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "serving.md").read_text(), re.M | re.S)


def test_the_client(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    address = "http://127.0.0.1:8000"
    assert address in CLIENT
    names: dict[str, Any] = {}
    exec(compile(CLIENT.replace(address, server.url), "serving.md", "exec"), names)
    names["client"].close()
    ids = tokenizer().apply_chat_template([names["question"]], add_generation_prompt=True)["input_ids"]
    assert capsys.readouterr().out == text_of(plain(ids, max_new_tokens=1024)[0])


def test_a_server_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = {name: create_autospec(getattr(module, name)) for name in ("listen", "run_server")}
    for name, fake in made.items():
        monkeypatch.setattr(module, name, fake)
    names: dict[str, Any] = {}
    exec(compile(PROGRAM, "serving.md", "exec"), names)
    names["engine"].close()
    made["run_server"].assert_called_once()
    assert made["run_server"].call_args.kwargs["sockets"] is made["listen"].return_value
