"""Heads with norms after the rotation, other rotations or growing factors: what is recognised, and the same tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged import CacheConfig, Engine
from hf_paged.fused.gpu.attention import AttentionPart
from hf_paged.fused.gpu.model import fused_parts
from tests.architectures.tiny import tiny_model
from tests.fused import fewer
from tests.fused.fewer import INTERPRETED, NEW_TOKENS, by_generate, complete, computes_as_plain, new, run, shortened
from tests.generation import tape
from tests.versions.marks import since

pytestmark = [INTERPRETED, pytest.mark.usefixtures("by_torch")]

LENGTH = 30  # of prompts: the factors of tiny models grow at every 16th position


def attentions(model: Any) -> list[Any]:
    found: Any = fused_parts(model)
    return [part for part in found._parts if isinstance(part, AttentionPart)]


has_angles_in_rows = since("5.20", "the angles of Llama 4 have a strided last dimension: its heads are left to torch")
LLAMA_4 = pytest.param("llama4_text", marks=has_angles_in_rows)


@pytest.mark.parametrize("name", [LLAMA_4, "ministral3", "persimmon", "nanochat"])
def test_the_same_tokens(name: str) -> None:
    model = new(name)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        found = attentions(model)
        assert len(found) == model.config.get_text_config().num_hidden_layers
        factors, last = [part._factor is not None for part in found], [part._sources[0].norm_is_last for part in found]
        assert factors == [name == "ministral3" or (name.startswith("llama4") and i % 2 == 1) for i in range(4)]
        assert last == [name == "nanochat" or (name.startswith("llama4") and i % 2 == 0) for i in range(4)]
        assert run(engine, LENGTH) == by_generate(model, LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", [LLAMA_4, "ministral3", "persimmon", "nanochat"])
def test_the_same_tokens_with_our_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fewer.on_cpu(monkeypatch)
    count, length = 2 if name == "llama4_text" else 1, 17
    model = shortened(new(name), count)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert len(attentions(model)) == count
        assert run(engine, length, 2) == by_generate(model, length, 2)


@pytest.mark.parametrize("name", [LLAMA_4, "ministral3"])
def test_replayed_graphs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay computes the factor of its own positions: a prompt of 14 tokens is replayed over position 16."""
    monkeypatch.undo()
    tape.install(monkeypatch)
    tape.record_launches(monkeypatch)
    fewer.on_cpu(monkeypatch, by_torch=True)
    model = new(name)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True, cuda_graphs=True) as engine:
        for length in (5, 14, LENGTH):
            assert run(engine, length) == by_generate(model, length)
        assert len(attentions(model)) == 4 and engine.stats().graph_replays >= 3 * (NEW_TOKENS - 1)


def _attention_of(model: Any) -> Any:
    return model.model.layers[3].self_attn


def _rope_of(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.config.rope_parameters
    return found


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "growth": ("llama4_text", lambda model: setattr(_attention_of(model), "attn_scale", 3.0)),
    "limit of a config": ("ministral3", lambda m: _rope_of(m).update(original_max_position_embeddings=5)),
    "epsilon": ("nanochat", lambda model: setattr(_attention_of(model).q_norm, "eps", 100.0)),
    "bias": ("persimmon", lambda model: _attention_of(model).q_layernorm.bias.data.mul_(-20)),
}


LATER = [pytest.param(key, marks=has_angles_in_rows) if CHANGES[key][0] == "llama4_text" else key for key in CHANGES]


@pytest.mark.parametrize("change", LATER)
def test_what_is_changed_later(change: str) -> None:
    name, function = CHANGES[change]
    model = new(name)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        before = complete(engine, LENGTH)
        assert before.token_ids == by_generate(model, LENGTH)
        function(model)
        after = complete(engine, LENGTH)
        assert after.token_ids == by_generate(model, LENGTH) and after.logprobs != before.logprobs
        assert computes_as_plain(engine, model, LENGTH) and len(attentions(model)) == 4


def test_factors_that_a_trial_does_not_show() -> None:
    model = copy.deepcopy(tiny_model("ministral3"))
    _rope_of(model)["original_max_position_embeddings"] = 10_000  # all factors are 1
    assert not attentions(model)


@pytest.mark.parametrize("change", ["shift", "twice"])
def test_other_factors(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other operations or numbers, or of other positions, are the model's own."""
    model = copy.deepcopy(tiny_model("ministral3"))
    space = inspect.unwrap(type(_attention_of(model)).forward).__globals__
    own = space["get_llama_4_attn_scale"]

    def factor(positions: torch.Tensor, growth: float, limit: int) -> torch.Tensor:
        return own(positions + 1, growth, limit) if change == "shift" else own(positions, growth, limit) * 1.0

    monkeypatch.setitem(space, "get_llama_4_attn_scale", factor)
    assert not attentions(model)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert run(engine, LENGTH) == by_generate(model, LENGTH)
