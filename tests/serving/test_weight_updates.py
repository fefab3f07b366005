"""New weights over HTTP, for requests in flight and later ones; and what is refused while the server lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file

from hf_paged.serving.settings import Settings
from tests.serving.harness import KEY, NAME, Running, new_model, serving, tokenizer
from tests.waiting import Gate, until

PROMPT = "A list is"
FIELDS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "temperature": 0}


def values_of(model: Any, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value.detach() + 0.02 * torch.randn_like(value) for name, value in model.named_parameters()}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder = tmp_path_factory.mktemp("weights")
    model = new_model()
    for number in (0, 1):
        save_file(values_of(model, number), folder / f"{number}.safetensors")
    with serving(model=model, admin=True, api_keys=(KEY,), weights_folders=(str(folder),)) as running:
        yield running, folder
        running.assert_idle()


def update(running: Running, folder: Path, number: int, **body: Any) -> Any:
    body |= {"path": str(folder / f"{number}.safetensors"), "version": number}
    return running.http.post("/update_weights", json=body)


def alone(running: Running) -> str:
    """The answer of the weights that the server has now, by the model's own `generate`."""
    ids = torch.tensor([tokenizer()(PROMPT).input_ids])
    made = running.engine.model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    return str(tokenizer().decode(made[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.smoke_cases("wait")
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_requests_in_flight(shared: tuple[Running, Path], mode: str) -> None:
    running, folder = shared
    assert update(running, folder, 0).json() == {"status": "updated", "weight_version": 0}
    old = alone(running)
    gate = Gate(running.engine, 1)
    in_flight = running.beside(running.post, "/v1/completions", **FIELDS)
    gate.wait()
    updating = running.beside(update, running, folder, 1, mode=mode)
    running.await_command()
    gate.open()
    assert updating.result(120).json() == {"status": "updated", "weight_version": 1}
    new = alone(running)
    later = running.post("/v1/completions", **FIELDS).json()
    assert later["choices"][0]["text"] == new != old and later["usage"]["weight_versions"] == [1, 1]
    assert running.http.get("/v1/models").json()["data"][0]["weight_version"] == 1
    answer = in_flight.result(120)
    if mode == "abort":
        assert answer.status_code == 503
        return
    text, versions = answer.json()["choices"][0]["text"], answer.json()["usage"].get("weight_versions")
    assert (text == old, versions) == ((True, None) if mode == "wait" else (False, [0, 1])) and text != new


def test_an_update_of_a_paused_server(shared: tuple[Running, Path]) -> None:
    running, folder = shared
    update(running, folder, 0)
    running.http.post("/pause", params={"mode": "keep"})
    waiting = running.beside(running.post, "/v1/completions", **FIELDS)
    until(lambda: running.service.worker.num_in_flight == 1)
    assert update(running, folder, 1).status_code == 200
    # It is still paused, as its admin has left it.
    assert running.http.get("/is_paused").json() == {"is_paused": True} and not waiting.done()
    running.http.post("/resume")
    assert waiting.result(120).json()["usage"]["weight_versions"] == [1, 1]
    assert waiting.result().json()["choices"][0]["text"] == alone(running)
    assert running.http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("is_named", [True, False])
def test_aborted_requests(shared: tuple[Running, Path], is_named: bool) -> None:
    running, _ = shared
    gate = Gate(running.engine, 1)
    made = running.client.completions.with_raw_response.create(
        model=NAME, prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    gate.wait()
    names = made.headers["x-engine-request-ids"].split(",") if is_named else []
    assert running.post("/abort_requests", request_ids=names).json() == {"status": "aborted"}
    gate.open()
    with pytest.raises(openai.APIError, match="aborted"):
        list(made.parse())


def test_what_is_refused_changes_nothing(shared: tuple[Running, Path], tmp_path: Path) -> None:
    running, folder = shared
    update(running, folder, 0)
    before, values = alone(running), values_of(running.engine.model, 1)
    name = "model.norm.weight"
    files = {
        "nan": {**values, name: values[name] * torch.nan},
        "shape": {**values, name: values[name][:5]},
        "lacks": {name: values[name]},
        "named": {**values, "another": values[name].clone()},
    }
    for file, content in files.items():
        save_file(content, folder / file)
    save_file(values, tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "ring").symlink_to(folder / "ring")
    (folder / "cut").write_bytes((folder / "1.safetensors").read_bytes()[:-1])
    (folder / "text").write_text("{}")
    refused = {
        "nan": (400, "not finite"), "shape": (400, "has shape"), "lacks": (400, "is missing"),
        "named": (400, "'another' is no weight"), "cut": (400, "cannot be read"), "text": (400, "cannot be read"),
        "link": (403, "in none of the folders"), "../outside": (403, "in none of|is no file"), "ring": (400, "no file"),
        "nowhere": (400, "is no file"), "a\0b": (400, "is no file"), "a" * 999: (400, "is no file"),
    }  # fmt: skip
    (folder.parent / "outside").write_bytes(b"")
    for file, (status, _) in refused.items():
        answer = running.http.post("/update_weights", json={"path": f"{folder}/{file}", "version": 9})
        assert answer.status_code == status, (file, answer.text)
        assert any(each in answer.json()["error"]["message"] for each in refused[file][1].split("|")), answer.text
    for body in ({}, {"path": ""}, {"path": str(folder), "mode": "now"}, {"path": str(folder), "version": -1}):
        assert running.http.post("/update_weights", json=body).status_code in (400, 422)
    body = {"path": f"{folder}/1.safetensors"}
    for key, status in ((KEY, 403), ("none", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert running.http.post("/update_weights", json=body, headers=headers).status_code == status
    assert running.post("/v1/completions", **FIELDS).json()["choices"][0]["text"] == before == alone(running)
    assert running.engine.weight_version == 0 and not running.service.worker.is_paused


def test_folders_are_needed() -> None:
    with serving(admin=True) as running:
        answer = running.http.post("/update_weights", json={"path": "/tmp/x"})
        assert answer.status_code == 403 and "--weights-folder" in answer.json()["error"]["message"]
    for wrong, message in (({}, "needs --admin-key too"), ({"admin_key": "x"}, "is no folder")):
        with pytest.raises(ValueError, match=message):
            Settings(names=("a",), weights_folders=("/nowhere",), **wrong)  # type: ignore[arg-type]
