"""New weights for an engine: all of them or none, and what outputs say about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine, prepack
from hf_paged.features.new_weights.new_weights import NewWeights, files_of, open_files
from tests import models
from tests.model.test_weights import is_close, plain, served

PROMPT = list(range(1, 40))
LONG = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None)
CACHE = CacheConfig(num_blocks=64, block_size=4)
NORM = "model.norm.weight"
Values = dict[str, torch.Tensor]


def built() -> Any:
    model = models.build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight  # tied: one name suffices
    return model


def values_of(model: nn.Module, seed: int = 1, spread: float = 0.3) -> Values:
    torch.manual_seed(seed)
    return {name: weight.detach() + spread * torch.randn_like(weight) for name, weight in model.named_parameters()}


@pytest.mark.smoke_cases("folder")
@pytest.mark.parametrize("way", ["folder", "half"])
def test_later_requests_have_the_new_weights(way: str, tmp_path: Path) -> None:
    model = built()
    old, given = plain(model), values_of(model)
    if way == "half":
        source: Any = {name: value.half() for name, value in given.items()}
        given = {name: value.float() for name, value in source.items()}
    else:
        source, names = tmp_path, sorted(given)
        save_file({name: given[name] for name in names[:3]}, tmp_path / "a.safetensors")
        save_file({name: given[name] for name in names[3:]}, tmp_path / "b.safetensors")
    with Engine(model, CACHE) as engine:
        engine.cache_prefix(PROMPT)
        assert is_close(served(engine), old) and engine.weight_version == 0
        assert engine.update_weights(source, 7) == engine.weight_version == 7
        assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items())
        new = plain(model)
        assert not is_close(old, new) and is_close(served(engine), new)
        assert engine.generate([PROMPT], LONG)[0].metrics.weight_versions == (7, 7)
        assert engine.update_weights({NORM: given[NORM] * 2}, partial=True) == 8


WRONG: dict[str, tuple[Any, str]] = {
    "name": (lambda v: {n.replace("layers.0", "layers.7"): v[n] for n in v}, "is no weight of the model .and 8"),
    "missing": (lambda v: {NORM: v[NORM]}, "is missing .* give all weights, or say partial=True"),
    "shape": (lambda v: v | {NORM: v[NORM][:-1]}, r"model.norm.weight has shape \(\d+,\), and the model's has"),
    "dtype": (lambda v: v | {NORM: v[NORM].int()}, "has dtype torch.int32, which is not rounded to"),
    "too large": (lambda v: v | {NORM: v[NORM].double() * 1e300}, "are not finite in torch.float32"),
    "ties": (lambda v: v | {"lm_head.weight": v["model.embed_tokens.weight"] + 1}, "are one weight of the model"),
}


def test_what_does_not_fit_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = built()
    before, given = {name: value.clone() for name, value in model.state_dict().items()}, values_of(model)
    monkeypatch.setattr("hf_paged.features.new_weights.new_weights._HEADER", 2**12)
    for place in "abc":  # two of them have as many bytes as fp64 has
        save_file({place + name: value for name, value in given.items()}, tmp_path / f"{place}.safetensors")
    with pytest.raises(ValueError, match=r"weights have at most \d+ more"):
        NewWeights.read(model, open_files(files_of(tmp_path)))
    with Engine(model, CACHE) as engine:
        for wrong, message in WRONG.values():
            with pytest.raises(ValueError, match=message):
                engine.update_weights(wrong(given))
        for version in (-1, True, "7"):
            with pytest.raises(ValueError, match="give an integer of at least 0"):
                engine.update_weights(given, version)  # type: ignore[arg-type]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        copy = NewWeights._copy

        def interrupted(new: NewWeights) -> None:
            monkeypatch.setattr(NewWeights, "_copy", copy)
            model.model.norm.weight.data.copy_(given[NORM])
            raise KeyboardInterrupt

        monkeypatch.setattr(NewWeights, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(given)
        # What has begun is done to its end: a part of the new weights would be neither.
        assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items())
        assert is_close(served(engine), plain(model))
    new = NewWeights(model, given)
    model.model.norm.weight = nn.Parameter(torch.ones(model.config.hidden_size))
    with pytest.raises(ValueError, match="has other modules than when"):
        new.write()
    prepack(model, "int8", group_size=32)
    with pytest.raises(ValueError, match="is kept as CodedWeight, and cannot be written"):
        NewWeights(model, given)
    model.peft_config = {"a": None}
    with pytest.raises(ValueError, match="the model has the adapters 'a', which were trained on"):
        NewWeights(model, given)
