"""Adapters as models: loaded at the start or later, each request with its own, the base model unchanged."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import peft
import peft.functional
import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_paged
from hf_paged.model.state import state_of
from hf_paged.serving.adapter_files import AdapterFile, check_adapter
from hf_paged.serving.adapters import load_adapter, unload_adapter
from hf_paged.serving.relay import Asked
from hf_paged.serving.replica import Replica
from hf_paged.serving.service import Service
from hf_paged.serving.settings import Settings
from tests.serving.harness import NAME, Ended, Running, new_model, plain, serving, tokenizer
from tests.waiting import Gate

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning")

PROMPT = list(range(40, 80))


def saved(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(new_model(), config).save_pretrained(folder)
    return str(folder)


@functools.cache
def alone(folder: str) -> list[int]:
    adapted = peft.PeftModel.from_pretrained(new_model(), folder)
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": 12, "eos_token_id": 2048, "attention_mask": torch.ones_like(ids)}
    return list(adapted.generate(input_ids=ids, **options)[0, len(PROMPT) :].tolist())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: saved(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(("sql", "poems", "late"), 1)}


@pytest.fixture(scope="module")
def adapted(folders: dict[str, str]) -> Iterator[Running]:
    model = new_model()
    ready = {name: folders[name] for name in ("sql", "poems")}
    for name, folder in ready.items():
        load_adapter(model, name, folder)
    with serving(model=model, adapters=ready, admin=True) as running:
        yield running


def answer(running: Running, name: str) -> Any:
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return running.post("/v1/completions", model=name, prompt=PROMPT, **fields)


def tokens(running: Running, name: str) -> list[int]:
    return list(answer(running, name).json()["choices"][0]["token_ids"])


def test_each_request_has_its_own_adapter_in_the_same_steps(adapted: Running, folders: dict[str, str]) -> None:
    wanted = {name: alone(folders[name]) for name in ("sql", "poems")}
    wanted[NAME] = plain(PROMPT, max_new_tokens=12, eos_token_id=2048)[0]
    assert len({tuple(each) for each in wanted.values()}) == 3

    async def ask_all() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{adapted.url}/v1", api_key="none", max_retries=0) as client:
            extra = {"ignore_eos": True, "return_token_ids": True}
            calls = (
                client.completions.create(model=name, prompt=PROMPT, max_tokens=12, extra_body=extra)
                for name in list(wanted) * 4
            )
            return await asyncio.gather(*calls)

    for each in asyncio.run(ask_all()):
        assert each.choices[0].token_ids == wanted[each.model]
    adapted.assert_idle()


def test_prefixes_are_found_by_the_same_adapter_only(adapted: Running) -> None:
    tokens(adapted, "sql")  # which is cached then
    assert adapted.http.post("/reset_prefix_cache").status_code == 200

    def cached(name: str) -> int:
        return int(answer(adapted, name).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("sql"), cached("sql"), cached("poems"), cached(NAME), cached(NAME)] == [0, 32, 0, 0, 32]


def test_load_and_unload(adapted: Running, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread does not wait for the search for its patterns."""
    searching: list[int] = []
    monkeypatch.setattr(AdapterFile, "check_patterns", lambda *args: searching.append(threading.get_ident()))
    assert answer(adapted, "late").status_code == 404
    load = {"lora_name": "late", "lora_path": folders["late"]}
    assert adapted.post("/v1/load_lora_adapter", **load).status_code == 200
    assert len(searching) == 1 and searching != [adapted.call(lambda engine: threading.get_ident())]
    assert tokens(adapted, "late") == alone(folders["late"])
    assert tokens(adapted, "sql") == alone(folders["sql"])
    cards = {card.id: card for card in adapted.client.models.list().data}
    assert set(cards) == {NAME, "sql", "poems", "late"} and cards["late"].parent == NAME
    taken = adapted.post("/v1/load_lora_adapter", **load)
    assert taken.status_code == 400 and "taken" in taken.json()["error"]["message"]
    assert adapted.post("/v1/unload_lora_adapter", lora_name="late").status_code == 200
    assert answer(adapted, "late").status_code == 404
    assert adapted.post("/v1/unload_lora_adapter", lora_name="late").status_code == 404
    assert tokens(adapted, NAME) == plain(PROMPT, max_new_tokens=12, eos_token_id=2048)[0]


def test_what_is_no_adapter_is_refused(adapted: Running, folders: dict[str, str], tmp_path: Path) -> None:
    for path, words in {
        "/no/such/folder": "adapter_config.json",
        str(tmp_path): "adapter_config.json",
        "x" * 4096: "not a folder",
        "\0": "adapter_config.json",
    }.items():
        refused = adapted.post("/v1/load_lora_adapter", lora_name="x", lora_path=path)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    with Ended("never") as logged:  # a line end in a name would begin a line of the log
        named = adapted.post("/v1/load_lora_adapter", lora_name="a\n2026 ERROR b", lora_path=folders["late"])
    assert named.status_code == 422 and "printed" in named.json()["error"]["message"] and not logged.lines
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text("{}")
    (pickled / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="safetensors"):
        check_adapter(str(pickled))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((Path(folders["sql"]) / "adapter_config.json").read_text())
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    for _ in range(2):  # the name is free after a failure
        refused = adapted.post("/v1/load_lora_adapter", lora_name="x", lora_path=str(broken))
        assert refused.status_code == 400 and "cannot be loaded" in refused.json()["error"]["message"]
        assert "SafetensorError" in refused.json()["error"]["message"]
    assert tokens(adapted, "sql") == alone(folders["sql"])
    assert answer(adapted, "x").status_code == 404
    assert adapted.post("/v1/load_lora_adapter", lora_name=NAME, lora_path=folders["sql"]).status_code == 400


def test_an_adapter_of_another_model_is_refused(adapted: Running, folders: dict[str, str], tmp_path: Path) -> None:
    """PEFT would load it with a warning, and its requests would get the base model's answers."""
    weights = load_file(Path(folders["sql"]) / "adapter_model.safetensors")
    other = {key.replace("layers.", "blocks."): value for key, value in weights.items()}
    some = dict(list(weights.items())[::2])
    more = {**weights, **{key.replace("layers.", "layers.4"): value.clone() for key, value in weights.items()}}
    for name, changed in {"other": other, "some_": some, "more": more}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text((Path(folders["sql"]) / "adapter_config.json").read_text())
        save_file(changed, folder / "adapter_model.safetensors")
        refused = adapted.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))
        assert refused.status_code == 400 and "not one of this model" in refused.json()["error"]["message"]
        assert answer(adapted, name).status_code == 404
    assert adapted.post("/v1/load_lora_adapter", lora_name="some_", lora_path=folders["late"]).status_code == 200
    assert tokens(adapted, "some_") == alone(folders["late"])
    assert adapted.post("/v1/unload_lora_adapter", lora_name="some_").status_code == 200


def test_a_request_whose_adapter_is_unloaded_fails_alone(adapted: Running, folders: dict[str, str]) -> None:
    adapted.post("/v1/load_lora_adapter", lora_name="late", lora_path=folders["late"])
    gate = Gate(adapted.engine, 1)
    fields: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    stream = adapted.client.completions.create(model="late", stream=True, **fields)
    next(stream)
    gate.wait()
    other = adapted.beside(adapted.client.completions.create, model="sql", **fields)
    adapted.await_command()
    gate.pass_on(1)
    gate.wait()  # in the third step, which has both
    unloading = adapted.beside(adapted.post, "/v1/unload_lora_adapter", lora_name="late")
    adapted.await_command()
    gate.open()
    with pytest.raises(openai.APIError, match="late") as raised:
        list(stream)
    assert raised.value.code == "model_not_found"
    assert other.result(120).choices[0].finish_reason == "length" and unloading.result(120).status_code == 200
    adapted.assert_idle()


def test_an_adapter_that_is_loaded_stays(folders: dict[str, str]) -> None:
    """Two clients may load one name at the same time, or one that tries again."""
    model = new_model()
    load_adapter(model, "sql", folders["sql"])
    for name, words in (("sql", "is loaded already"), ("__base__", "stands for the model without adapters")):
        with pytest.raises(ValueError, match=words):
            load_adapter(model, name, folders["sql"])
    assert "sql" in model.peft_config


def test_requests_are_not_prepared_while_adapters_change(folders: dict[str, str], monkeypatch: Any) -> None:
    """Between the new adapter's config and its layers they would find an adapter without layers."""
    model, held = new_model(), []
    load, delete = peft.inject_adapter_in_model, peft.functional.delete_adapter

    def is_held() -> bool:
        other: list[bool] = []
        lock = state_of(model).lock
        thread = threading.Thread(target=lambda: other.append(not lock.acquire(blocking=False) or lock.release()))
        thread.start()
        thread.join()
        return bool(other[0])

    def watched(call: Any) -> Any:
        return lambda *args, **options: (held.append(is_held()), call(*args, **options))[1]

    monkeypatch.setattr(peft, "inject_adapter_in_model", watched(load))
    monkeypatch.setattr(peft.functional, "delete_adapter", watched(delete))
    load_adapter(model, "sql", folders["sql"])
    unload_adapter(model, "sql")
    assert held == [True] * 2


def test_a_replica_loads_an_adapter_that_is_asked_for(folders: dict[str, str]) -> None:
    """Once, by the first of two requests that name it; requests for the model itself load nothing."""

    async def run() -> list[list[int]]:
        model = new_model()
        engine = hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=256))
        replica = Replica(Service(engine, tokenizer(), Settings(names=(NAME,))), "one", {"late": folders["late"]})

        async def tokens(name: str) -> list[int]:
            fields = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "model": name}
            given, headers = json.dumps(fields).encode(), ((b"content-type", b"application/json"),)
            asked = Asked("POST", "/v1/completions", b"", headers, given, name)
            messages = [message async for part in replica.answer(asked) for message in part.messages]
            whole = json.loads(b"".join(message.get("body", b"") for message in messages))
            return list(whole["choices"][0]["token_ids"])

        await replica.start()
        try:
            base = await tokens(NAME)
            assert "late" not in (vars(model).get("peft_config") or {})
            return [base, *await asyncio.gather(tokens("late"), tokens("late")), await tokens(NAME)]
        finally:
            await replica.stop()

    before, one, other, after = asyncio.run(run())
    assert one == other == alone(folders["late"]) != before == after
