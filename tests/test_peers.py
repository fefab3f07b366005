"""benchmarks/peers.py and its engines of this environment, on the shipped toy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "pydoc-lm-base"

pytestmark = pytest.mark.slow  # each engine is a process that loads torch


def test_turns_write_figures_of_each_system_and_say_who_refuses(tmp_path: Path) -> None:
    out, cases = tmp_path / "peers.jsonl", ["one request", "8 samples", "4 beams"]
    options = ["--systems", "engine:fp32,plain:fp32,plain:int8", "--rounds", "1", "--out", str(out)]
    command = [sys.executable, ROOT / "benchmarks" / "peers.py", MODEL, "--cases", ";".join(cases), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "plain:int8: transformers itself has no weights in int8" in done.stdout
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    systems = ["engine:fp32", "plain:fp32"]
    assert [(line["case"], line["system"]) for line in lines] == [(case, each) for case in cases for each in systems]
    assert all(line["seconds"] > 0 and line["peak_mib"] > line["kv_mib"] > 0 for line in lines)


def test_engines_make_plain_tokens_and_margins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import peers

    made = {}
    for engine in ("plain", "paged", "engine"):
        peer = peers.Peer(engine, str(MODEL), "fp32")
        job = {"wants_margins": True} if engine == "plain" else {}
        made[engine] = peer.ask(prompts=[[1, 5, 6, 7, 8], [9, 10, 11]], counts=[8, 3], **job)
        peer.close()
    assert made["plain"]["tokens"] == made["paged"]["tokens"] == made["engine"]["tokens"]
    assert [len(outputs[0]) for outputs in made["plain"]["tokens"]] == [8, 3]
    assert [len(row) for row in made["plain"]["margins"]] == [8, 8]
    assert all(margin >= 0 for row in made["plain"]["margins"] for margin in row)
