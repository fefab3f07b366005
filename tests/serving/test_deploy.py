"""What lies beside the server: image, containers, dashboard and pages name flags, extras, ports, metrics that exist."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
import yaml

from hf_paged.cli.main import app
from hf_paged.config import CacheConfig, SchedulerConfig
from hf_paged.serving.settings import Settings
from tests.serving.harness import Running

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "hf-paged.json").read_text())
PARAMETERS = {each.name: each for each in typer.main.get_command(app).commands["serve"].params}  # type: ignore[attr-defined]
FLAGS = {name for each in PARAMETERS.values() for name in (*each.opts, *each.secondary_opts)}
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PORT = 8000


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
    assert {each["restart"] for each in COMPOSE["services"].values()} == {"unless-stopped"}
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).exists(), source
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
    server = COMPOSE["services"]["server"]
    assert {word for word in server["command"] if word.startswith("--")} <= FLAGS
    assert (DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    assert server["command"][0].removeprefix("/models/") in {each.name for each in (ROOT / "examples").iterdir()}
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{PORT}"]}] and server["ports"] == [
        f"127.0.0.1:{PORT}:{PORT}"
    ]
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in COMPOSE["services"]["prometheus"]["secrets"]
    key = PARAMETERS["api_key"].envvar
    assert COMPOSE["secrets"][secret] == {"environment": key} and list(server["environment"]) == [key]
    assert int(server["stop_grace_period"].removesuffix("s")) > PARAMETERS["drain_seconds"].default
    gpu = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
    assert set(gpu["services"]["server"]["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", dockerfile(), re.M))


def test_grafana_finds_the_dashboard() -> None:
    grafana = COMPOSE["services"]["grafana"]
    folders = {volume.split(":")[1]: DEPLOY / volume.split(":")[0] for volume in grafana["volumes"]}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/hf-paged.yaml").read_text())["providers"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (folders[str(home.parent)] / home.name).is_file()
    assert (folders["/etc/grafana/provisioning"] / "datasources").is_dir()


def dockerfile() -> str:
    return (DEPLOY / "Dockerfile").read_text()


def test_the_image_copies_what_exists() -> None:
    sources = [name for line in re.findall(r"^COPY (.*)$", dockerfile(), re.M) for name in line.split()[:-1]]
    assert len(sources) >= 5 and all((ROOT / name).exists() for name in sources)
    kept = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(sources) == kept
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", dockerfile(), re.M)[0])
    assert entry[:2] == ["hf-paged", "serve"] and {word for word in entry if word.startswith("--")} <= FLAGS
    assert entry[entry.index("--port") + 1] == str(PORT)
    assert re.findall(r"^EXPOSE (.*)$", dockerfile(), re.M) == [str(PORT)]
    assert PARAMETERS["api_key"].envvar in dockerfile()


def test_the_image_installs_what_exists(server: Running) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = "".join((DEPLOY / name).read_text() for name in ("Dockerfile", "kuberay.yaml"))
    extras = set(re.findall(r"EXTRA=([\w-]+)", named))
    assert extras == {"serve", "ray"} and extras <= set(project["optional-dependencies"])
    assert "hf-paged" in project["scripts"]
    assert len(re.findall(r"^torch==", (ROOT / "constraints.txt").read_text(), re.M)) == 1
    (checked,) = re.findall(r"urlopen\('http://127.0.0.1:(\d+/\w+)'", dockerfile())
    port, path = checked.split("/")
    assert port == str(PORT) and httpx.get(f"{server.url}/{path}").status_code == 200


def test_the_service_and_the_deployment_start_with_flags_that_exist(server: Running) -> None:
    unit = (DEPLOY / "hf-paged.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    assert "\nRestartPreventExitStatus=2\n" in unit
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {word for word in [*command.split(), *container["args"]] if word.startswith("--")} <= FLAGS
    for asked in [container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "readiness", "liveness")]:
        assert asked["port"] == PORT and httpx.get(f"{server.url}{asked['path']}").status_code == 200
    assert container["env"][0]["name"] == PARAMETERS["api_key"].envvar
    assert service["spec"]["ports"] == [{"port": PORT}] and command.split()[1] == "serve"


@pytest.mark.parametrize("file", ["deploy/kuberay.yaml", "docs/ray.md"])
def test_the_applications_for_ray_have_fields_that_exist(file: str) -> None:
    """Read without Ray, which is no dependency of the tests."""
    text = (ROOT / file).read_text()
    if file.endswith(".md"):
        (text,) = re.findall(r"```yaml\n(.*?)```", text, re.S)
    *_, content = yaml.safe_load_all(text)
    content = yaml.safe_load(content["spec"]["serveConfigV2"]) if "spec" in content else content
    (application,) = content["applications"]
    module, _, function = application["import_path"].partition(":")
    parsed = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    defined = {each.name: each for each in parsed.body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
    fields = {each.target.id for each in defined["AppArgs"].body if isinstance(each, ast.AnnAssign)}  # type: ignore[union-attr]
    args = application["args"]
    assert function in defined and set(args) <= fields
    CacheConfig(**args.get("cache", {})), SchedulerConfig(**args.get("scheduler", {}))
    given = args["settings"]
    Settings(**{**given, **{name: tuple(given[name]) for name in ("names", "api_keys") if name in given}})
    assert content["http_options"]["port"] == PORT


def test_the_cluster_has_what_its_pods_need() -> None:
    claim, service = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    cluster = service["spec"]["rayClusterConfig"]
    (worker,) = cluster["workerGroupSpecs"]
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    assert cluster["enableInTreeAutoscaling"] is True  # else no pod is added for a further replica
    assert (worker["minReplicas"], worker["maxReplicas"]) == (args["replicas"], args["max_replicas"])
    assert re.fullmatch(r"2\.\d+\.\d+", cluster["rayVersion"])
    for group in (cluster["headGroupSpec"], worker):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        mounted = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
        assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert mounted["/cache"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        (key,) = container["env"]  # of a Secret: it does not stand in the file
        assert key["name"] == PARAMETERS["api_key"].envvar and key["valueFrom"]["secretKeyRef"]["name"] == "hf-paged"
    assert "api_keys" not in args["settings"]
    assert PARAMETERS["api_key"].envvar in (ROOT / "hf_paged/serving/ray.py").read_text()


@pytest.mark.parametrize("page", ["from-vllm.md", "from-tgi.md"])
def test_newcomers_find_flags_that_exist(page: str, server: Running) -> None:
    """In the tables the first column has the other server's flags, the second ours. What is missing is missing."""
    text = (ROOT / "docs" / page).read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    named = set()
    for theirs, ours, *_ in (row for row in rows if "--" in row[0]):
        named |= set(re.findall(r"(?<!\w)--[\w-]+", theirs if ours.startswith("the same") else "")) | set(
            re.findall(r"(?<!\w)--[\w-]+", ours)
        )
    assert len(named) > 10
    assert named - {"--version"} <= FLAGS, named - FLAGS
    lacking = set(re.findall(r"`(--[\w-]+)`", text.split("**Missing:**")[1].split("\n- ")[0]))
    assert len(lacking) > 7 and not lacking & FLAGS, lacking & FLAGS
    kept = set(re.findall(r"`(--[\w-]+)`", text.partition("keep name and meaning")[2].partition("\n\n")[0]))
    assert kept <= FLAGS and (kept or page == "from-tgi.md")
    exposed = metrics(server)
    for name in re.findall(r"hf_paged:(\w+)", text):
        assert f"hf_paged:{name}" in exposed or f"hf_paged:{name}_count" in exposed, name
