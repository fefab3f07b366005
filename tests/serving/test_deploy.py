"""What lies beside the server: the dashboard names metrics that exist, and the pages for newcomers flags that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from hf_paged.cli.main import app
from tests.serving.harness import Running

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "hf-paged.json").read_text())
FLAGS = {
    name
    for parameter in typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    for name in (*parameter.opts, *parameter.secondary_opts)
}


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [each for inner in value.values() for each in strings(inner)]
    if isinstance(value, list):
        return [each for inner in value for each in strings(inner)]
    return [value] if isinstance(value, str) else []


def metrics(server: Running) -> set[str]:
    server.post("/v1/completions", prompt="a", max_tokens=2)
    lines = server.http.get("/metrics").text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_every_metric_of_the_dashboard_exists(server: Running) -> None:
    named = set(re.findall(r"hf_paged:\w+", " ".join(strings(DASHBOARD))))
    assert len(named) > 25
    assert named <= metrics(server)


def test_the_dashboard_uses_our_datasource() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {source["uid"]}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"


def test_the_compose_file_names_what_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), source
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
    server = compose["services"]["server"]
    assert {word for word in server["command"] if word.startswith("--")} <= FLAGS
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    assert server["command"][0].removeprefix("/models/") in {each.name for each in (ROOT / "examples").iterdir()}
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    assert set(gpu["services"]["server"]["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", dockerfile(), re.M))


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_the_image_copies_what_exists() -> None:
    sources = [name for line in re.findall(r"^COPY (.*)$", dockerfile(), re.M) for name in line.split()[:-1]]
    assert len(sources) >= 5 and all((ROOT / name).exists() for name in sources)
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == kept
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", dockerfile(), re.M)[0])
    assert entry[:2] == ["hf-paged", "serve"] and {word for word in entry if word.startswith("--")} <= FLAGS


@pytest.mark.parametrize("page", ["from-vllm.md", "from-tgi.md"])
def test_newcomers_find_flags_that_exist(page: str, server: Running) -> None:
    """In the tables the first column has the other server's flags, the second ours; what is missing is missing."""
    text = (ROOT / "docs" / page).read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    named = set()
    for theirs, ours, *_ in (row for row in rows if "--" in row[0]):
        named |= set(re.findall(r"(?<!\w)--[\w-]+", theirs if ours.startswith("the same") else "")) | set(
            re.findall(r"(?<!\w)--[\w-]+", ours)
        )
    assert len(named) > 10
    assert named - {"--version"} <= FLAGS, named - FLAGS
    missing = text.split("Missing:" if page == "from-tgi.md" else "## Flags that are missing")[1].split("\n## ")[0]
    lacking = set(re.findall(r"`(--[\w-]+)`", missing))
    assert len(lacking) > 20 and not lacking & FLAGS, lacking & FLAGS
    exposed = metrics(server)
    for name in re.findall(r"hf_paged:(\w+)", text):
        assert f"hf_paged:{name}" in exposed or f"hf_paged:{name}_count" in exposed, name
