"""Weights in mapped files, which an engine moves into large pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from hf_paged.fused.cpu import large_pages
from hf_paged.kernels import buffers
from tests import models

GREEDY = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(large_pages, "LEAST_BYTES", 1)
    models.shared("llama").save_pretrained(tmp_path)
    return transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()


def in_files(model: Any) -> list[str]:
    """The linear weights that are in mapped files."""
    files = buffers.mapped_files()
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    return [name for name, layer in layers.items() if any(layer.weight.data_ptr() in file for file in files)]


def tokens(model: Any, **options: Any) -> list[int]:
    with hf_paged.Engine(model, hf_paged.CacheConfig(num_blocks=16), **options) as engine:
        return list(engine.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids)


def test_weights_leave_their_file(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named, plain = dict(model.named_parameters()), model.generate(torch.tensor([[5, 6, 7]]), GREEDY)[0, 3:].tolist()
    layers = in_files(model)
    assert len(layers) >= 14
    assert tokens(model, prepack=False) == plain and in_files(model) == layers
    with monkeypatch.context() as patch:
        patch.setattr(large_pages, "LEAST_BYTES", 1 << 30)
        assert tokens(model) == plain and in_files(model) == layers
    kept = model.model.layers[1].mlp.down_proj.weight.detach()  # by a program, which would miss changes of the weight
    assert tokens(model) == plain and in_files(model) == ["model.layers.1.mlp.down_proj"]
    assert all(parameter is named[name] and parameter.requires_grad for name, parameter in model.named_parameters())
    addresses = [parameter.data_ptr() for parameter in named.values()]
    with torch.no_grad():
        for parameter in named.values():
            parameter.mul_(1.5)
    changed = model.generate(torch.tensor([[5, 6, 7]]), GREEDY)[0, 3:].tolist()
    assert tokens(model) == changed and kept.equal(model.model.layers[1].mlp.down_proj.weight)
    assert [parameter.data_ptr() for parameter in named.values()] == addresses
