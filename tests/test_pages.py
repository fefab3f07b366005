"""Each page says what the reader can do, shows it, and is short; its snippets run.

The Python snippets of a page run in order, in one namespace that begins empty. `<!-- not run: REASON -->` before a
fence keeps a snippet from running; it is compiled all the same, and NOT_RUN lists the reasons. A client of port 8000
meets a server of this process; a program that starts a server starts none.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import create_autospec

import pytest
import yaml

import hf_paged
from hf_paged.cli.main import command
from hf_paged.integration.names import CACHE
from hf_paged.serving import server as serving_module
from tests.serving.harness import serving
from tests.versions.marks import needs_media

ROOT = Path(__file__).parent.parent
PAGES = {path.stem: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
DOCS = [name for name in PAGES if name != "README"]
NOT_RUN = {
    "images": ["needs a model that takes images", "needs a model that takes images"], "parallel": ["needs torchrun"],
    "programs": ["needs sentence-transformers"], "requests": ["needs Anthropic's client"],
    "quantised": ["needs torchao"], "speech": ["needs a model of speech"],
    "training": ["trains for a minute", "trains for a minute", "needs processes"],
    "translate": ["needs a model of speech"],
}  # fmt: skip
MOST_BYTES = 15_000
GENERATED = "<!-- Written by "
ADDRESS = "http://127.0.0.1:8000"


class Snippet(NamedTuple):
    reason: str
    """Why it is not run, or the empty string."""
    language: str
    text: str


def snippets(page: str, *languages: str) -> list[Snippet]:
    found = re.findall(r"(?:^<!-- not run: ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", PAGES[page], re.M | re.S)
    return [Snippet(*each) for each in found if not languages or each[1] in languages]


def in_this_version(text: str) -> str:
    """The snippet with the name that the installed transformers has for the cache of a call and of its output."""
    return text.replace("cache=cache", f"{CACHE}=cache").replace("output.cache", f"output.{CACHE}")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize(
    "page",
    [pytest.param(name, marks=needs_media if name == "images" else ()) for name in PAGES if snippets(name, "python")],
)
def test_python_runs(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("listen", "run_server"):
        monkeypatch.setattr(serving_module, name, create_autospec(getattr(serving_module, name)))
    namespace: dict[str, Any] = {"__name__": page}
    with contextlib.ExitStack() as ends:
        for reason, _, text in snippets(page, "python"):
            if ADDRESS in text and not reason:
                text = text.replace(ADDRESS, ends.enter_context(serving()).url)
            code = compile(in_this_version(text), f"{page}.md", "exec")
            if not reason:
                exec(code, namespace)
        if "serve" in namespace:  # a coroutine of asyncio's section
            assert len(asyncio.run(namespace["serve"](namespace["model"], [[5, 6], [7, 8]]))) == 2
        for engine in [each for each in namespace.values() if isinstance(each, hf_paged.Engine)]:
            engine.close()


def test_what_does_not_run_is_listed() -> None:
    reasons = {name: [each.reason for each in snippets(name) if each.reason] for name in PAGES}
    assert {name: each for name, each in reasons.items() if each} == NOT_RUN


def test_commands_parse_and_name_files_that_exist() -> None:
    text = "".join(each.text for name in PAGES for each in snippets(name, "bash")).replace("\\\n", " ")
    before = r"^(?:[A-Z_]+=\S+ |opentelemetry-instrument )*(?:\.venv/bin/)?"
    commands = [shlex.split(x, comments=True) for x in re.findall(rf"{before}hf-paged (.*?)(?: &&.*)?$", text, re.M)]
    assert len(commands) > 20
    for words in commands:
        assert words == ["--version"] or callable(command(words, prog_name="hf-paged", standalone_mode=False)), words
    paths = re.findall(r"(?<![\w./])(?:scripts|benchmarks|examples|tests|deploy)/[\w./-]+", text)
    assert len(paths) > 20 and [path for path in paths if not (ROOT / path).exists()] == []


def test_other_languages() -> None:
    every = [each for name in PAGES for each in snippets(name)]
    assert {each.language for each in every} == {"bash", "python", "text", "yaml"}
    assert all(yaml.safe_load(each.text) for each in every if each.language == "yaml")


@pytest.mark.parametrize("page", [name for name in DOCS if name not in ("api", "index")])
def test_a_page_begins_with_its_use_and_a_snippet(page: str) -> None:
    opening = re.sub(r"<!-- (?!not run).*? -->\n+", "", PAGES[page].split("\n## ")[0])
    title, use, *rest = opening.strip().split("\n\n")
    assert title.startswith("# ") and re.match(r"(?:[A-Z]|`hf|\*\*)", use), use
    assert any(part.lstrip("<!- ").startswith(("```", "not run")) for part in rest[:2]), "no snippet at the top"


def test_pages_are_short_or_generated() -> None:
    long = {name for name in DOCS if len(PAGES[name].encode()) > MOST_BYTES and GENERATED not in PAGES[name]}
    assert long == set()


def test_every_page_is_on_the_map() -> None:
    nav = re.findall(r": ([\w-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.M)
    linked = [name for name in re.findall(r"\]\(([\w-]+)\.md\)", PAGES["index"]) if name != "index"]
    assert sorted(nav) == sorted(DOCS)
    assert sorted(linked) == sorted(set(DOCS) - {"index"})
    assert linked == [name for name in nav if name != "index"], "the same order in both"
