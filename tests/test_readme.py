"""Every fenced block of the README runs: Python in one namespace, shell commands with this interpreter.

The first two shell blocks make an environment; `.ci/run` runs them word for word; here only their form is checked.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
SHELL = [text for language, text in BLOCKS if language == "bash"]
COMMANDS = [line for text in SHELL[2:] for line in text.splitlines()]


def test_first_two_blocks_are_complete_commands() -> None:
    assert [language for language, _ in BLOCKS[:2]] == ["bash", "bash"]
    main_job, tests = (text for _, text in BLOCKS[:2])
    for text in (main_job, tests):
        assert text.startswith("python3 -m venv .venv && .venv/bin/pip install")
        assert "-c constraints.txt" in text
    assert "hf-paged generate examples/pydoc-lm-qa" in main_job
    assert "-m pytest" in tests


def test_python_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "README.md", "exec"), namespace)
    out = capsys.readouterr().out
    assert "every layer attends through AttentionInterface" in out
    assert "EngineStats" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands(command: str) -> None:
    line = command.replace(".venv/bin/hf-paged", f"{shlex.quote(sys.executable)} -m hf_paged.cli")
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_no_other_language_hides() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python"}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
