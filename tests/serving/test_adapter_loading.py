"""Loading an adapter leaves the base and the other adapters as they are, whatever its file says, or it is refused."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_paged.features.adapters.adapters import BASE, Adapters
from hf_paged.model.support import examine
from hf_paged.serving import adapter_files
from hf_paged.serving.adapters import load_adapter, unload_adapter
from tests import models

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning")

TARGETS = ["q_proj", "v_proj"]
IDS = torch.tensor([[5, 9, 11, 23, 7]])


def tied() -> Any:
    return models.build("llama", tie_word_embeddings=True)


def saved(folder: Path, *, random: str = "", save_embedding_layers: Any = "auto", **options: Any) -> Path:
    """An adapter. random: weights that are drawn, by a part of their names."""
    torch.manual_seed(len(str(options)))
    config = peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **options})
    adapted = peft.get_peft_model(tied(), config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if random and random in name:
                weight.normal_(std=0.5)
    adapted.save_pretrained(folder, save_embedding_layers=save_embedding_layers)
    return folder


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    file = folder / "adapter_model.safetensors"
    save_file({key: each.contiguous() for key, each in change(load_file(file)).items()}, file)
    return folder


def reconfigured(folder: Path, **options: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return folder


@torch.no_grad()
def logits(model: Any, name: str = BASE) -> torch.Tensor:
    known = Adapters(model)
    found: torch.Tensor = known.run(known.choose(name), lambda: model(IDS).logits)
    return found


@cache
@torch.no_grad()
def alone(folder: Path) -> torch.Tensor:
    """What PEFT computes with the adapter and nothing else."""
    found: torch.Tensor = peft.PeftModel.from_pretrained(tied(), str(folder)).eval()(IDS).logits
    return found


def everything(model: Any) -> list[Any]:
    return [(name, type(each), sorted(vars(each))) for name, each in model.named_modules()] + [
        (name, id(each), each.data_ptr(), each.requires_grad) for name, each in model.named_parameters()
    ]


def with_base_weights(folder: Path) -> Path:
    """As `save_embedding_layers=True` writes them, with other values than the server's base."""
    saved(folder, save_embedding_layers=True)
    return edited(folder, lambda all: {key: each + (1 if "embed" in key else 0) for key, each in all.items()})


def of_nan(folder: Path) -> Path:
    return edited(saved(folder), lambda all: {key: each * float("nan") for key, each in all.items()})


def with_another_rank(folder: Path) -> Path:
    return reconfigured(saved(folder), r=200_000)


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "pissa": (lambda f: saved(f, init_lora_weights="pissa"), "init_lora_weights='pissa': it was trained beside a base"),
    "olora": (lambda f: saved(f, init_lora_weights="olora"), "path_initial_model_for_weight_conversion"),
    "replicated": (lambda f: reconfigured(saved(f), layer_replication=[[0, 2], [1, 2]]), "repeats layers of the base"),
    "base weights": (with_base_weights, "a weight of the base model, with other values"),
    "a key of the base": (
        lambda f: edited(saved(f), lambda all: {**all, "base_model.model.model.norm.weight": torch.zeros(32)}),
        "it has model.norm.weight, a weight of the base model, with other values",
    ),
    "rank": (with_another_rank, r"has shape \(4, 32\), and that of config LORA has \(200000, 32\)"),
    "NaN": (of_nan, "has values that are not finite"),
    "a larger vocabulary": (
        lambda f: edited(
            saved(f), lambda all: {**all, "base_model.model.model.embed_tokens.weight": torch.zeros(200, 32)}
        ),
        r"its model.embed_tokens.weight has shape \(200, 32\), and the base model's has",
    ),
    "a prompt": (lambda f: reconfigured(saved(f), peft_type="PROMPT_TUNING", num_virtual_tokens=3), "PROMPT_TUNING"),
}


def test_what_would_change_the_base(tmp_path: Path) -> None:
    """It is refused, for a true reason, and leaves the model as it was, also beside another adapter."""
    model = tied()
    cases = [(str(make(tmp_path / name)), reason) for name, (make, reason) in WRONG.items()]
    for _ in range(2):
        before, base = everything(model), logits(model)
        known = {name: logits(model, name) for name in vars(model).get("peft_config") or ()}
        for wrong, reason in cases:
            with pytest.raises(ValueError, match=reason):
                load_adapter(model, "wrong", wrong)
            assert everything(model) == before and torch.equal(logits(model), base), reason
            assert all(torch.equal(logits(model, name), each) for name, each in known.items()), reason
        if not known:
            load_adapter(model, "good", str(saved(tmp_path / "good")))
            assert torch.equal(logits(model), base)


RIGHT: dict[str, Callable[[Path], Path]] = {
    "lora": saved,
    "dora": lambda f: saved(f, use_dora=True, random="magnitude"),
    "token rows": lambda f: saved(f, trainable_token_indices=[5, 23], random="trainable_tokens"),
    "head": lambda f: saved(f, target_modules=["q_proj", "lm_head"]),
    "embeddings": lambda f: saved(f, target_modules=["v_proj", "embed_tokens"]),
    "modules to save": lambda f: saved(f, modules_to_save=["lm_head"], random="modules_to_save"),
    "base weights as they are": lambda f: saved(f, save_embedding_layers=True),
    "rows and ranks": lambda f: saved(f, rank_pattern={"q_proj": 7}, use_rslora=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp("right")) for name, make in RIGHT.items()}


@pytest.mark.parametrize("case", RIGHT)
def test_kinds_of_adapters(case: str, folders: dict[str, Path]) -> None:
    """Each computes what PEFT alone does, the base stays, and unloading leaves nothing."""
    folder, model = folders[case], tied()
    before, base = everything(model), logits(model)
    load_adapter(model, "it", str(folder))
    torch.testing.assert_close(logits(model, "it"), alone(folder))
    assert not torch.equal(logits(model, "it"), base) and torch.equal(logits(model), base)
    unload_adapter(model, "it")
    assert torch.equal(logits(model), base)
    assert [each[:2] for each in everything(model)] == [each[:2] for each in before]


def test_several_kinds_at_a_time(folders: dict[str, Path]) -> None:
    """Each may join those that are there, or is refused; none takes the others or the base with it."""
    for order in (1, -1):
        model, loaded = tied(), []
        base = logits(model)
        for name in [*folders][::order]:
            try:
                load_adapter(model, name, str(folders[name]))
            except ValueError as error:
                assert "beside" in str(error)
            else:
                loaded.append(name)
            assert torch.equal(logits(model), base)
        for each in loaded:
            torch.testing.assert_close(logits(model, each), alone(folders[each]))
        assert len(loaded) >= 4


def test_an_adapter_that_spoils_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PEFT does to the base or to other adapters is seen, and undone."""
    own, folder, model = peft.inject_adapter_in_model, saved(tmp_path / "new"), tied()
    load_adapter(model, "old", str(saved(tmp_path / "old", r=6)))
    for reason, spoil in {
        "PEFT changes 1 weights of the base model": lambda: setattr(
            model.model.norm.weight, "data", model.model.norm.weight * 3
        ),
        "adapter 'old' computes other logits": lambda: setattr(
            model.model.layers[0].self_attn.q_proj, "scaling", {"old": 50.0}
        ),
        "cannot be loaded: RuntimeError: spoilt": lambda: (_ for _ in ()).throw(RuntimeError("spoilt")).send(None),
    }.items():
        before, wanted = everything(model), logits(model, "old")
        monkeypatch.setattr(peft, "inject_adapter_in_model", lambda *a, **o: (own(*a, **o), spoil()))  # noqa: B023
        with pytest.raises(ValueError, match=reason):
            load_adapter(model, "new", str(folder))
        assert everything(model) == before and torch.equal(logits(model, "old"), wanted)


def test_a_weight_that_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT does not; it would be named, since it cannot be undone."""
    own, model = peft.inject_adapter_in_model, tied()
    spoil = lambda: model.model.norm.weight.data.mul_(3)  # noqa: E731
    monkeypatch.setattr(peft, "inject_adapter_in_model", lambda *a, **o: (own(*a, **o), spoil()))
    with pytest.raises(ValueError, match=r"PEFT changes 1 weights .* they cannot be restored; start anew"):
        load_adapter(model, "new", str(saved(tmp_path)))


def test_looks_at_the_model_run_without_adapters(tmp_path: Path) -> None:
    """An active adapter of NaN is no fault of the base."""
    model = tied()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=TARGETS), model, "x")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.lora_B["x"].weight.fill_(float("nan"))
    assert examine(model).present.native


SLOW = "(.*)*(.*)*(.*)*(.*)*x"


SEARCHED: dict[str, Any] = {
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), SLOW),
    "modules_to_save": ["lm_head", SLOW], "rank_pattern": {"q_proj": 2, SLOW: 4}, "alpha_pattern": {SLOW: 4},
}  # fmt: skip


def test_patterns_that_are_searched_for_ages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would run in the meantime."""
    monkeypatch.setattr(peft, "inject_adapter_in_model", lambda *args, **options: pytest.fail("it is searched here"))
    monkeypatch.setattr(adapter_files, "_SECONDS", 0.1)
    model, folder = tied(), saved(tmp_path)
    plain = (folder / "adapter_config.json").read_text()
    for field, value in SEARCHED.items():
        (folder / "adapter_config.json").write_text(plain)
        options = {field: value} | ({"layers_to_transform": [0]} if field == "layers_pattern" else {})
        with pytest.raises(ValueError, match=rf"pattern '\(\.\*\)\*.* in its {field}, which cannot be matched"):
            load_adapter(model, "it", str(reconfigured(folder, **options)))


def test_patterns_that_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_files, "_SECONDS", 120)  # in which the process starts too
    model, folder = tied(), saved(tmp_path, target_modules=r".*\.(q|v)_proj", rank_pattern={r"layers\.0\..*q_proj": 2})
    load_adapter(model, "it", str(folder))
    torch.testing.assert_close(logits(model, "it"), alone(folder))
    with pytest.raises(ValueError, match=r"cannot be loaded: (re\.)?error"):
        load_adapter(model, "other", str(reconfigured(folder, target_modules="(q_proj")))


def test_only_warnings_that_say_something(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tied()
    with warnings.catch_warnings(record=True) as seen, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        for name in "xy":
            load_adapter(model, name, str(saved(tmp_path / name)))
        unload_adapter(model, "x")
    assert not [str(each.message) for each in seen if "peft" in each.filename] and not caplog.records
