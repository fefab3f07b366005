"""The shell commands of the README and of docs/using-generate.md run with this interpreter.

tests/test_pages.py runs the Python of all pages.

The first two shell blocks of the README make an environment. `.ci/run` runs them word for word; here only their form is
checked. So it is with a later `pip install`: its extras are in pyproject.toml.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import hf_paged

ROOT = Path(__file__).parent.parent
README, GENERATE = (
    re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    for page in ("README.md", "docs/using-generate.md")
)
SHELL = [text for language, text in README[2:] + GENERATE if language == "bash"]
COMMANDS = [line for text in SHELL for line in text.splitlines()]


def test_first_two_blocks_are_complete_commands() -> None:
    assert [language for language, _ in README[:2]] == ["bash", "bash"]
    main_job, tests = (text for _, text in README[:2])
    for text in (main_job, tests):
        assert text.startswith("python3 -m venv .venv && .venv/bin/pip install")
        assert "-c constraints.txt" in text
    assert "hf-paged generate examples/pydoc-lm-base" in main_job
    assert "-m pytest" in tests


@pytest.mark.parametrize("command", [each for each in COMMANDS if "pip install" in each])
def test_extras(command: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r'-c constraints.txt -e "\.\[(\w+)\]"$', command)
    assert asked and asked[0] in extras


def _marked(command: str) -> Any:
    """Commands on models that are downloaded run with the tests of these, in their order."""
    return pytest.param(command, marks=[pytest.mark.real] if "real" in command else [])


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize("command", [_marked(each) for each in COMMANDS if "pip install" not in each])
def test_other_commands(command: str) -> None:
    python = shlex.quote(sys.executable)
    line = command.replace(".venv/bin/python", python).replace(".venv/bin/hf-paged", f"{python} -m hf_paged.cli")
    if "hf_paged.cli serve" in line:
        serve(shlex.split(line))
        return
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def serve(argv: list[str]) -> None:
    """Start a server on a free port, ask it for its models, and end it."""
    with subprocess.Popen([*argv, "--port", "0"], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next((each for each in process.stderr if "running on" in each), None)
            assert line is not None, f"the server has not started: exit status {process.wait(120)}"
            url = line.split("running on ")[1].split()[0]
            with urllib.request.urlopen(f"{url}/v1/models", timeout=120) as answer:
                assert "pydoc-lm-qa" in answer.read().decode()
        finally:
            process.kill()


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: hf_paged\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(hf_paged.__all__)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
