"""Every fenced block of the README runs: Python in one namespace, shell commands with this interpreter.

The first two shell blocks make an environment. `.ci/run` runs them word for word; here only their form is checked.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_paged

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


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("page", ["slow", "using-engine", "prefixes", "constrained"])
def test_pages(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The Python blocks of a page, with the names that the page presupposes."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    import hf_paged

    monkeypatch.chdir(ROOT)
    model = AutoModelForCausalLM.from_pretrained("examples/pydoc-lm-qa")
    tokenizer = AutoTokenizer.from_pretrained("examples/pydoc-lm-qa")
    inputs = tokenizer("What is a list?", return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    with hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=64)) as engine:
        known = {"config": GenerationConfig(max_new_tokens=5), "engine": engine, "ids": ids, "inputs": inputs}
        namespace: dict[str, Any] = known | {
            "model": model,
            "tokenizer": tokenizer,
            "torch": torch,
            "hf_paged": hf_paged,
        }
        for text in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / f"{page}.md").read_text(), re.M | re.S):
            exec(compile(text, f"{page}.md", "exec"), namespace)
        if "serve" in namespace:
            assert len(asyncio.run(namespace["serve"](model, [ids, ids]))) == 2
        while engine.has_unfinished_requests():
            assert all(output.error is None for output in engine.step())


@pytest.mark.slow  # processes that import torch
@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands(command: str) -> None:
    line = command.replace(".venv/bin/hf-paged", f"{shlex.quote(sys.executable)} -m hf_paged.cli")
    result = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_no_other_language_hides() -> None:
    assert {language for language, _ in BLOCKS} == {"bash", "python"}


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: hf_paged\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(hf_paged.__all__)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
