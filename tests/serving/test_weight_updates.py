"""New weights over HTTP, for requests in flight and later ones; and what is refused while the server lives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_paged.serving.settings import Settings
from tests.model.test_new_weights import values_of
from tests.serving.harness import KEY, Running, new_model, serving, tokenizer
from tests.waiting import Gate, until

PROMPT = "A list is"
FIELDS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    folder, model = tmp_path_factory.mktemp("weights"), new_model()
    for number in (0, 1):
        save_file(values_of(model, number, 0.02), folder / f"{number}.safetensors")
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
    assert answer.status_code == (503 if mode == "abort" else 200)
    if mode != "abort":
        text, versions = answer.json()["choices"][0]["text"], answer.json()["usage"].get("weight_versions")
        assert (text == old, versions) == ((True, None) if mode == "wait" else (False, [0, 1])) and text != new


def test_an_update_of_a_paused_server(shared: tuple[Running, Path]) -> None:
    running, folder = shared
    running.http.post("/pause", params={"mode": "keep"})
    waiting = [running.beside(running.post, "/v1/completions", **FIELDS) for _ in range(2)]
    until(lambda: running.service.worker.num_in_flight == 2)
    mine = next(iter(running.service.worker._jobs))
    for status, aborted in {"aborted": [mine], "unknown": []}.items():
        answer = running.post("/abort_requests", request_ids=[*aborted, "other"]).json()
        assert answer == {"status": status, "aborted": aborted, "unknown": ["other"]}
    assert update(running, folder, 1).status_code == 200
    # It is still paused, as its admin has left it.
    assert running.http.get("/is_paused").json() == {"is_paused": True} and not all(each.done() for each in waiting)
    running.http.post("/resume")
    aborted, answer = sorted((each.result(120) for each in waiting), key=lambda each: -each.status_code)
    assert aborted.status_code == 503 and answer.json()["usage"]["weight_versions"] == [1, 1]
    assert answer.json()["choices"][0]["text"] == alone(running)
    assert running.http.get("/is_paused").json() == {"is_paused": False}
    running.service.weights._is_draining = True
    assert {update(running, folder, 1).status_code, running.http.post("/pause").status_code} == {503}
    running.service.weights._is_draining = False


def test_what_is_refused_changes_nothing(shared: tuple[Running, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    running, folder = shared
    update(running, folder, 0)
    before, values = alone(running), values_of(running.engine.model)
    save_file(values, folder.parent / "outside")
    save_file({name: value * torch.nan for name, value in values.items()}, folder / "nan")
    save_file({name: value[:5] for name, value in values.items()}, folder / "shape")
    (folder / "link").symlink_to(folder.parent / "outside")
    (folder / "links").mkdir()
    (folder / "links" / "a.safetensors").symlink_to(folder.parent / "outside")
    (folder / "ring").symlink_to(folder / "ring")
    (folder / "cut").write_bytes((folder / "1.safetensors").read_bytes()[:-1])
    os.mkfifo(folder / "pipe")
    (folder / "empty").mkdir()
    with (folder / "large").open("wb") as file:
        file.truncate(2**40)
    refused = {
        "nan": (400, "not finite"), "shape": (400, "has shape"), "cut": (400, "cannot be read"),
        "ring": (400, "no file"), "link": (403, "in none of the"), "../outside": (403, "in none of the"),
        "pipe": (400, "it is no file"), "large": (400, "weights have at most"), "empty": (400, "has no *.safetensors"),
        "a\0b": (400, "is no file"), "a" * 999: (400, "is no file"), "links": (403, "in none of the"),
    }  # fmt: skip
    for file, expected in refused.items():
        answer = running.http.post("/update_weights", json={"path": f"{folder}/{file}", "version": 9})
        assert answer.status_code == expected[0] and expected[1] in answer.json()["error"]["message"], answer.text
    for late in (folder.parent, folder / "late"):
        late.mkdir(exist_ok=True)
        save_file(values, late / "2.safetensors")
    read = running.engine.read_weights

    def swapped(*args: Any, **kwargs: Any) -> Any:
        (folder / "late").rename(folder / "was")
        (folder / "late").symlink_to(folder.parent)
        return read(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(running.engine, "read_weights", swapped)  # after the path was checked
        answer = update(running, folder / "late", 2)
    assert answer.status_code == 400 and "2.safetensors cannot be opened" in answer.text
    for body in ({}, {"path": str(folder), "mode": "now"}, {"path": str(folder), "version": -1}):
        assert running.http.post("/update_weights", json=body).status_code in (400, 422)
    for key, status in ((KEY, 403), ("none", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert running.http.post("/update_weights", json={"path": "/"}, headers=headers).status_code == status
    assert running.post("/v1/completions", **FIELDS).json()["choices"][0]["text"] == before == alone(running)
    assert running.engine.weight_version == 0 and not running.service.worker.is_paused
    for wrong, message in (({}, "needs --admin-key too"), ({"admin_key": "x"}, "is no folder")):
        with pytest.raises(ValueError, match=message):
            Settings(names=("a",), weights_folders=("/nowhere",), **wrong)  # type: ignore[arg-type]
