"""`hf_paged.prepack`: packed weights for `generate`."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn.utils import prune
from transformers import GenerationConfig

import hf_paged
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.cpu import weights as fused_weights
from tests import models
from tests.conftest import state_of

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT reads it

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "temperature": 2.5, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
}


def generate(model: Any, mode: str = "greedy", lengths: tuple[int, ...] = (5, 12, 1), **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(
        **models.batch(*lengths), **MODES[mode], max_new_tokens=6, eos_token_id=None, pad_token_id=0, **options
    )


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each forward with packed weights."""
    calls: list[int] = []
    apply = fused_weights.LinearLayers.apply

    def noted(self: fused_weights.LinearLayers, user: object) -> None:
        if self._layers[0]._copies is not fused_weights.Copies.NONE:
            calls.append(1)
        apply(self, user)

    monkeypatch.setattr(fused_weights.LinearLayers, "apply", noted)
    return calls


@pytest.mark.covering(1)
@pytest.mark.smoke_cases("llama")
@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens(family: str, mode: str, packed_calls: list[int]) -> None:
    model = models.build(family)
    plain = generate(model, mode)
    assert generate(model, mode, cache_implementation="paged").equal(plain) and not packed_calls
    before = state_of(model)
    hf_paged.prepack(model)
    assert generate(model, mode, cache_implementation="paged").equal(plain)
    assert len(packed_calls) >= 6
    assert state_of(model) == before
    assert generate(model, mode).equal(plain)


@pytest.mark.usefixtures("packed_weights")
@pytest.mark.parametrize("mode", ["samples", "beams"])
def test_bf16_to_the_bit(mode: str) -> None:
    """With at most 32 rows in a step, torch sums in the same order."""
    model = models.build("llama").bfloat16()
    expected = generate(model, mode, cache_implementation="paged")
    hf_paged.prepack(model)
    assert generate(model, mode, cache_implementation="paged").equal(expected)


@pytest.mark.usefixtures("bf16_kernels")
def test_bf16_is_refused_where_copies_would_not_be_faster() -> None:
    model = models.build("llama").bfloat16()
    if fused_ops.packs():
        hf_paged.prepack(model)
        return
    with pytest.raises(ValueError, match="prepack=True: without AVX-512 and BF16"):
        hf_paged.prepack(model)
    assert generate(model, cache_implementation="paged").shape == generate(model).shape


def test_released_weights_are_gone(packed_calls: list[int]) -> None:
    model = models.build("llama")
    for released in (model, None):
        hf_paged.prepack(model)
        generate(model, cache_implementation="paged")
        copies = weakref.ref(fused_weights._known[fused_weights.Copies.PACKED].get(model))
        hf_paged.release_memory(released)
        gc.collect()
        assert copies() is None
        packed_calls.clear()
        generate(model, cache_implementation="paged")
        assert not packed_calls


def test_an_engine_alone_packs_for_no_call(packed_calls: list[int]) -> None:
    model = models.build("llama")
    with hf_paged.Engine(model, prepack=True) as engine:
        hf_paged.release_memory(model)  # it keeps the copies that the engine uses
        engine.generate(models.prompts(5), GenerationConfig(max_new_tokens=4))
    assert packed_calls
    packed_calls.clear()
    generate(model, cache_implementation="paged")
    assert not packed_calls


def test_a_model_that_is_no_longer_what_it_was() -> None:
    model = models.build("llama")
    hf_paged.prepack(model)
    forward = model.lm_head.forward
    model.lm_head.forward = lambda rows: -forward(rows)
    assert generate(model, cache_implementation="paged").equal(generate(model))
    del model.lm_head.forward
    assert generate(model, cache_implementation="paged").equal(generate(model))
    model.half()
    with pytest.raises(ValueError, match=r"prepack was called .*float16 cannot be packed.* release_memory\(model\)"):
        generate(model, cache_implementation="paged")
    hf_paged.release_memory(model)
    model.float()
    assert generate(model, cache_implementation="paged").equal(generate(model))


def test_released_and_packed_again_beside_an_engine_that_steps() -> None:
    model = models.build("llama")
    options = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    with hf_paged.Engine(model, prepack=True) as engine:
        expected = [output.outputs[0].token_ids for output in engine.generate(models.prompts(5, 9), options)]

        def work() -> list[Any]:
            made = [engine.generate(models.prompts(5, 9), options, progress=False) for _ in range(2)]
            return [[output.outputs[0].token_ids for output in outputs] for outputs in made]

        layers = sum(type(module) is torch.nn.Linear for module in model.modules())
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(work)
            while not found.done():
                hf_paged.release_memory(model)
                hf_paged.prepack(model)
                assert len(fused_weights._known[fused_weights.Copies.PACKED].get(model)._layers) == layers
    assert found.result() == [expected] * 2


def test_pruned_weights_are_left_to_torch() -> None:
    """They are computed before each forward. If none is left to pack, the error says what to do, which works."""
    model = models.build("llama").eval()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for layer in layers:
        prune.l1_unstructured(layer, "weight", amount=0.5)
    with pytest.raises(ValueError, match=r"weights are computed .* make them permanent|no linear layers"):
        hf_paged.prepack(model)
    for layer in layers:
        prune.remove(layer, "weight")
    hf_paged.prepack(model)
