"""New weights for an engine: all of them or none, and what outputs say about them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.model.new_weights import NewWeights
from tests import models
from tests.model.test_weights import is_close, plain, served

PROMPT = list(range(1, 40))
LONG = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None)
Values = dict[str, torch.Tensor]


def values_of(model: nn.Module, seed: int = 1) -> Values:
    torch.manual_seed(seed)
    own = model.state_dict()
    return {name: weight + 0.3 * torch.randn_like(weight) for name, weight in own.items() if name != "lm_head.weight"}


def built() -> Any:
    model = models.build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight  # tied: files have one of the two names
    return model


@pytest.mark.smoke
@pytest.mark.parametrize("way", ["tensors", "file", "folder", "half"])
def test_requests_have_the_old_weights_or_the_new_ones(way: str, tmp_path: Path) -> None:
    model = built()
    old, given = plain(model), values_of(model)
    source: Any = given
    if way == "half":
        source = {name: value.half() for name, value in given.items()}
        given = {name: value.float() for name, value in source.items()}
    elif way != "tensors":
        names = sorted(given)
        save_file({name: given[name] for name in names[:3]}, tmp_path / "a.safetensors")
        save_file({name: given[name] for name in names[3:]}, tmp_path / "b.safetensors")
        source = tmp_path
        if way == "file":
            source = tmp_path / "one"
            save_file(given, source)
    with Engine(model, CacheConfig(num_blocks=64, block_size=4)) as engine:
        engine.cache_prefix(PROMPT)
        assert is_close(served(engine), old) and engine.weight_version == 0
        assert engine.update_weights(source, 7) == engine.weight_version == 7
        assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items())
        new = plain(model)
        assert not is_close(old, new) and is_close(served(engine), new)
        (output,) = engine.generate([PROMPT], LONG)
        assert output.metrics.weight_versions == (7, 7)
        assert engine.update_weights({"model.norm.weight": torch.zeros(model.config.hidden_size)}, partial=True) == 8


@pytest.mark.parametrize("recompute", [True, False])
def test_requests_that_run_continue_with_the_new_weights(recompute: bool) -> None:
    model = built()
    given = values_of(model)
    with Engine(model, CacheConfig(num_blocks=64, block_size=4)) as engine:
        name = engine.add_request(PROMPT, LONG)
        for _ in range(5):
            engine.step()
        known = engine._requests[name].group.sequences[0].token_ids[:]
        engine.update_weights(given, recompute=recompute)
        while engine.has_unfinished_requests():
            (output,) = engine.step()
        result = [*PROMPT, *output.outputs[0].token_ids]
        assert output.metrics.weight_versions == (0, 1) and result[: len(known)] == known
        rest = model.generate(torch.tensor([known]), max_length=len(result), do_sample=False, eos_token_id=None)
        assert (result == rest[0].tolist()) is recompute
        assert is_close(served(engine, torch.tensor(result)), plain(model, torch.tensor(result)))
        engine.check_integrity()


def test_steps_beside_updates_see_whole_weights() -> None:
    model = built()
    sets = [values_of(model, seed) for seed in (1, 2)]
    with Engine(model, CacheConfig(num_blocks=64, block_size=4)) as engine:
        expected = {}
        for number, each in enumerate(sets):
            engine.update_weights(each, number)
            expected[number] = engine.generate([PROMPT], LONG)[0].outputs[0].token_ids
        assert expected[0] != expected[1]
        ended = threading.Event()

        def update() -> None:
            for number in range(40):
                engine.update_weights(sets[number % 2], number % 2)
            ended.set()

        thread = threading.Thread(target=update)
        thread.start()
        while not ended.is_set():
            (output,) = engine.generate([PROMPT], GenerationConfig(max_new_tokens=1, do_sample=False))
            first, last = output.metrics.weight_versions or (None, None)
            assert first == last and output.outputs[0].token_ids == expected[first][:1]  # type: ignore[index]
        thread.join(60)


def renamed(values: Values) -> Values:
    return {name.replace("layers.0", "layers.7"): value for name, value in values.items()}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Values], Values]:
    return lambda values: {**values, name: change(values[name])}


NORM = "model.norm.weight"
WRONG: dict[str, tuple[Callable[[Values], Values], str]] = {
    "another name": (renamed, "'model.layers.7.* is no weight of the model .and 8 others.; names are those of"),
    "a missing one": (lambda values: {NORM: values[NORM]}, "is missing .* give all weights, or say partial=True"),
    "none": (lambda values: {}, "is missing"),
    "shape": (changed(NORM, lambda value: value[:-1]), r"model.norm.weight has shape \(\d+,\), and the model's has"),
    "dtype": (changed(NORM, torch.Tensor.int), "has dtype torch.int32, which is not rounded to"),
    "nan": (changed(NORM, lambda value: value * torch.nan), "has values that are not finite in torch.float32"),
    "too large": (changed(NORM, lambda value: value.double() * 1e300), "are not finite in torch.float32"),
    "ties": (
        lambda values: {**values, "lm_head.weight": values["model.embed_tokens.weight"] + 1},
        "lm_head.weight and .* are one weight|embed_tokens.weight and lm_head.weight are one weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_changes_nothing(name: str) -> None:
    model = built()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wrong, message = WRONG[name]
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        with pytest.raises(ValueError, match=message):
            engine.update_weights(wrong(values_of(model)))
        for version in (-1, True, "7"):
            with pytest.raises(ValueError, match="give an integer of at least 0"):
                engine.update_weights(values_of(model), version)  # type: ignore[arg-type]
        assert engine.weight_version == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_files_that_are_none(tmp_path: Path) -> None:
    model = built()
    given = values_of(model)
    whole, cut, text, pipe, large = (tmp_path / name for name in ("whole", "cut", "text", "pipe", "large"))
    save_file(given, whole)
    cut.write_bytes(whole.read_bytes()[:-100])
    text.write_text("no weights")
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2**40)
    refused = {cut: "cannot be read as safetensors", text: "cannot be read", pipe: "it is no file"}
    refused |= {large: "and the model's weights have at most", tmp_path / "none": "No such file", tmp_path: "no \\*"}
    for path, message in refused.items():
        with pytest.raises(ValueError, match=message):
            NewWeights.read(model, path)
    new = NewWeights.read(model, whole)
    whole.write_bytes(b"")  # after it was read, nothing depends on the file
    new.write()
    assert torch.equal(model.model.norm.weight, given[NORM])


def test_an_interrupt_leaves_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    given, copy = values_of(model), NewWeights._copy

    def interrupted(new: NewWeights) -> None:
        monkeypatch.setattr(NewWeights, "_copy", copy)
        model.model.norm.weight.data.copy_(given[NORM])
        raise KeyboardInterrupt

    monkeypatch.setattr(NewWeights, "_copy", interrupted)
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(given)
        assert is_close(served(engine), plain(model))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items())
    new = NewWeights(model, given)
    model.model.norm.weight = nn.Parameter(torch.ones(model.config.hidden_size))
    with pytest.raises(ValueError, match="has other modules than when"):
        new.write()
    model.peft_config = {"a": None}
    with pytest.raises(ValueError, match="the model has the adapters 'a', which were trained on"):
        NewWeights(model, given)
