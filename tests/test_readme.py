"""Every fenced block of the README and of docs/using-generate.md runs: Python in one namespace for each page, shell
commands with this interpreter.

The first two shell blocks of the README make an environment. `.ci/run` runs them word for word; here only their form is
checked. So it is with a later `pip install`: its extras are in pyproject.toml.
"""

from __future__ import annotations

import asyncio
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
from hf_paged.integration.names import CACHE

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


def in_this_version(text: str) -> str:
    """The block with the name that the installed transformers has for the cache of a call and of its output."""
    return text.replace("cache=cache", f"{CACHE}=cache").replace("output.cache", f"output.{CACHE}")


@pytest.mark.parametrize(
    ("blocks", "printed"),
    [(README, "EngineStats"), (GENERATE, "every layer attends through AttentionInterface")],
    ids=["README", "using-generate"],
)
def test_python_blocks(
    blocks: list[tuple[str, str]], printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    namespace: dict[str, Any] = {}
    for language, text in blocks:
        if language == "python":
            exec(compile(in_this_version(text), "page", "exec"), namespace)
    assert printed in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("page", ["slow", "using-engine", "prefixes", "constrained", "translate"])
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
            "model": model, "tokenizer": tokenizer, "torch": torch, "hf_paged": hf_paged,
        }  # fmt: skip
        for text in re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / f"{page}.md").read_text(), re.M | re.S):
            exec(compile(in_this_version(text), f"{page}.md", "exec"), namespace)
        if "serve" in namespace:
            assert len(asyncio.run(namespace["serve"](model, [ids, ids]))) == 2
        while engine.has_unfinished_requests():
            assert all(output.error is None for output in engine.step())


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


def test_no_other_language_hides() -> None:
    assert {language for language, _ in README + GENERATE} <= {"bash", "python", "text"}


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: hf_paged\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(hf_paged.__all__)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
