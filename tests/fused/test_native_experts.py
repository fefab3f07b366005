"""The experts of mixtures in one native call: torch's bits, and code of others that stays in effect."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_paged import Engine, prepack, release_memory, weights_changed
from hf_paged.fused import overrides as fused_overrides
from hf_paged.fused.cpu import mixtures as native
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.kernels.native import build as native_build
from tests.architectures.tiny import tiny_model
from tests.noted import note_calls
from tests.versions.marks import since

pytestmark = pytest.mark.usefixtures("packed_weights")

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def experts_of(depth: int, inner: int, num_experts: int) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(hidden_size=depth, moe_intermediate_size=inner, num_experts=num_experts)
    config._experts_implementation = "grouped_mm"
    module = Qwen3MoeExperts(config).bfloat16()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def chosen(num_tokens: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, index = torch.topk(torch.randn(num_tokens, num_experts).softmax(-1), top_k)
    return index, weights


def by_kernel(module: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    layer = fused_ops.ExpertWeights.of(module.gate_up_proj.detach(), module.down_proj.detach())
    result, by_copy = (fused_ops.experts(each, rows, index, weights) for each in (layer, layer.packed()))
    assert result is not None and by_copy is not None and by_copy.equal(result)
    return result


@pytest.mark.covering(1)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(64, 32, 8), (48, 16, 5), (208, 112, 3), (1040, 32, 2)], ids=str)
def test_the_bits_of_transformers(shape: tuple[int, int, int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        module = experts_of(*shape)
        for num_tokens in (1, 2, 7, 30, 90):
            rows = torch.randn(num_tokens, shape[0]).bfloat16()
            index, weights = chosen(num_tokens, shape[2], 2)
            for given in (weights, weights.bfloat16()):
                with torch.no_grad():
                    expected = module(rows, index, given)
                result = by_kernel(module, rows, index, given)
                # A single row of an expert is added up in another order; with AMX many rows, and the ends of rows that
                # are no whole tiles.
                if shape[0] > 1024 or num_tokens > 32 or (shape[0] % 32 and "AMX" in native_build.status()):
                    assert torch.allclose(result.float(), expected.float(), atol=0.02, rtol=0.02)
                else:
                    assert torch.equal(result, expected)
    finally:
        torch.set_num_threads(before)


def test_a_token_does_not_depend_on_the_others() -> None:
    module = experts_of(1040, 32, 4)
    rows = torch.randn(33, 1040).bfloat16()
    index, weights = chosen(33, 4, 2)
    together = by_kernel(module, rows, index, weights)
    each = [by_kernel(module, rows[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(33)]
    assert torch.equal(together, torch.cat(each))


def test_all_tokens_to_one_expert_and_none_to_others() -> None:
    module = experts_of(64, 32, 6)
    rows, weights = torch.randn(20, 64).bfloat16(), torch.rand(20, 2)
    index = torch.tensor([[4, 1]]).repeat(20, 1)
    with torch.no_grad():
        assert torch.equal(by_kernel(module, rows, index, weights), module(rows, index, weights))


@pytest.mark.parametrize("expert", [-1, 6])
def test_an_expert_that_does_not_exist(expert: int) -> None:
    module = experts_of(64, 32, 6)
    rows, index = torch.randn(2, 64).bfloat16(), torch.tensor([[0, 1], [2, expert]])
    layer = fused_ops.ExpertWeights.of(module.gate_up_proj.detach(), module.down_proj.detach())
    assert fused_ops.experts(layer, rows, index, torch.rand(2, 2)) is None


def test_infinite_and_missing_values() -> None:
    module = experts_of(64, 32, 4)
    rows = torch.randn(6, 64).bfloat16()
    rows[1, 3], rows[2, 5], rows[4] = torch.inf, torch.nan, 3e38
    index, weights = chosen(6, 4, 2)
    with torch.no_grad():
        expected = module(rows, index, weights)
    layer = fused_ops.ExpertWeights.of(module.gate_up_proj.detach(), module.down_proj.detach())
    result = fused_ops.experts(layer, rows, index, weights)
    assert result is not None and torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(0, 1, -1), expected.nan_to_num(0, 1, -1))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each call of the kernel the number of tokens; negative with packed copies."""

    def note(layer: fused_ops.ExpertWeights, rows: torch.Tensor, *_: Any) -> int:
        return -len(rows) if layer.is_packed else len(rows)

    return note_calls(monkeypatch, fused_ops, "experts", note)


def model_of(name: str) -> Any:
    model = copy.deepcopy(tiny_model(name)).bfloat16()
    assert model.config.get_text_config(decoder=True)._experts_implementation == "grouped_mm"
    return model


def scores_of(model: Any) -> torch.Tensor:
    """The scores of each new token of a paged call, [new tokens, 1, vocab]."""
    prompt = torch.arange(3, 12)[None]
    paged = {"cache_implementation": "paged", "return_dict_in_generate": True, "output_scores": True}
    return torch.stack(model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS, **paged).scores)


def by_torch(model: Any) -> torch.Tensor:
    """The scores with experts computed by torch. (Plain `generate` rounds its attention otherwise in bf16.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_overrides, "native_experts", lambda model, prepack: None)
        return scores_of(model)


def assert_as_torch(model: Any, calls: list[int]) -> None:
    expected = by_torch(model)
    calls.clear()
    assert scores_of(model).equal(expected) and calls


def assert_left_to_torch(model: Any, calls: list[int]) -> None:
    expected = by_torch(model)
    calls.clear()
    assert scores_of(model).equal(expected) and not calls


@pytest.mark.parametrize("name", ["mixtral", "glm4_moe", "granitemoe"])
def test_types(name: str, calls: list[int]) -> None:
    model = model_of(name)
    expected = by_torch(model)
    assert not calls
    assert scores_of(model).equal(expected) and calls
    calls.clear()
    with Engine(model, prepack=False) as engine:
        outputs = engine.generate([list(range(3, 12)), list(range(5, 9))], GenerationConfig(**OPTIONS))
    assert outputs[0].outputs[0].token_ids == expected[:, 0].argmax(-1).tolist() and 2 in calls


@pytest.mark.parametrize(
    "name", ["gpt_oss", pytest.param("aria_text", marks=since("5.18", "has no experts of the interface"))]
)
def test_other_experts_are_left_to_torch(name: str, calls: list[int]) -> None:
    """Of the first the gate is another one, those of the second are transposed."""
    assert_left_to_torch(model_of(name), calls)


@pytest.fixture
def mixtral() -> Any:
    return model_of("mixtral")


def experts_in(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "MixtralExperts"]


def test_another_implementation_is_left_to_torch(mixtral: Any, calls: list[int]) -> None:
    scores_of(mixtral)
    for name in ("eager", "batched_mm"):
        mixtral.set_experts_implementation(name)
        assert_left_to_torch(mixtral, calls)
    mixtral.set_experts_implementation("grouped_mm")
    assert_as_torch(mixtral, calls)


def smaller(module: Any) -> None:
    """Inner rows of 24 elements."""
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach()[:, :48].contiguous())
    module.down_proj = nn.Parameter(module.down_proj.detach()[:, :, :24].contiguous())


def transposed(module: Any) -> None:
    module.down_proj.data = module.down_proj.data.transpose(1, 2).contiguous().transpose(1, 2)


LEFT: dict[str, Callable[[Any], Any]] = {
    "fp32": lambda module: module.float(), "another activation": lambda module: setattr(module, "act_fn", nn.GELU()),
    "a hook on the activation": lambda module: module.act_fn.register_forward_hook(lambda *call: call[-1] * 2),
    "a forward of the activation": lambda module: setattr(module.act_fn, "forward", torch.tanh),
    "a gate of its own": lambda module: setattr(module, "_apply_gate", lambda both: both.chunk(2, -1)[0]),
    "other sizes": smaller, "another layout": transposed,
}  # fmt: skip


@pytest.mark.parametrize("change", LEFT)
def test_what_is_changed_later_is_left_to_torch(change: str, mixtral: Any, calls: list[int]) -> None:
    scores_of(mixtral)
    for module in [mixtral] if change == "fp32" else experts_in(mixtral):
        LEFT[change](module)
    assert_left_to_torch(mixtral, calls)


@pytest.mark.parametrize("name", ["_apply_gate", "forward"])
def test_a_method_of_the_class(name: str, mixtral: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    scores_of(mixtral)
    owner = type(experts_in(mixtral)[0])
    own = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: own(*args) * 2)
    assert_left_to_torch(mixtral, calls)


def test_calls_outside_of_a_step_are_unaffected(mixtral: Any, calls: list[int]) -> None:
    found = native.native_experts(mixtral, False)
    assert found is not None
    found.apply(found)
    try:
        mixtral(torch.arange(3, 12)[None])
    finally:
        found.undo(found)
    assert not calls


def test_a_hook_on_the_experts_sees_their_results(mixtral: Any, calls: list[int]) -> None:
    for module in experts_in(mixtral):
        module.register_forward_hook(lambda module, args, output: output * 2)
    assert_as_torch(mixtral, calls)


def test_under_autocast(mixtral: Any, calls: list[int]) -> None:
    with torch.autocast("cpu", torch.float16):
        scores_of(mixtral)
    assert not calls


def test_copies(mixtral: Any, calls: list[int]) -> None:
    """Those of an engine are used by calls too, and follow changes of the weights."""
    expected = by_torch(mixtral)
    prompts = [list(range(3, 12)), list(range(5, 9))]
    with Engine(mixtral) as engine:
        outputs = engine.generate(prompts, GenerationConfig(**OPTIONS))
    assert outputs[0].outputs[0].token_ids == expected[:, 0].argmax(-1).tolist() and max(calls) < 0
    assert_as_torch(mixtral, calls)
    assert max(calls) < 0
    for module in experts_in(mixtral):
        with torch.no_grad():
            module.down_proj.mul_(-3)
    assert_as_torch(mixtral, calls)
    for module in experts_in(mixtral):
        module.gate_up_proj.data.mul_(2)  # found by its contents
    assert_as_torch(mixtral, calls)
    for module in experts_in(mixtral):
        module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach() * 2)
    assert_as_torch(mixtral, calls)
    assert max(calls) < 0
    release_memory(mixtral)
    for module in experts_in(mixtral):
        module.down_proj.data.mul_(-3)
    assert_as_torch(mixtral, calls)
    assert min(calls) > 0


def test_engines_share_copies_also_after_weights_changed(mixtral: Any) -> None:
    found = []
    engines = []
    for _ in range(2):
        engines.append(Engine(mixtral))
        found.append(native.native_experts(mixtral, None))
        weights_changed(mixtral)
    for engine in engines:
        engine.generate([list(range(3, 12))], GenerationConfig(**OPTIONS))
    copies = [[mixture._copy for mixture in each._mixtures] for each in found]
    assert found[0] is not found[1] and None not in copies[0] and copies[0] == copies[1]
    for engine in engines:
        engine.close()


def test_no_copies_where_the_memory_is_short(mixtral: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "fits", lambda num_bytes: num_bytes < 1000)
    with Engine(mixtral) as engine:
        engine.generate([list(range(3, 12))], GenerationConfig(**OPTIONS))
    assert min(calls) > 0


def test_copied_weights_that_inference_tensors_replace(mixtral: Any, calls: list[int]) -> None:
    assert_as_torch(mixtral, calls)
    assert min(calls) > 0
    prepack(mixtral)
    assert_as_torch(mixtral, calls)
    assert max(calls) < 0
    for module in experts_in(mixtral):
        with torch.inference_mode():
            module.down_proj = nn.Parameter(module.down_proj.detach() * -3, requires_grad=False)
    assert_as_torch(mixtral, calls)
    with Engine(mixtral) as engine:
        engine.generate([list(range(3, 12))], GenerationConfig(**OPTIONS))
    assert min(calls) > 0


def test_replaced_experts(mixtral: Any, calls: list[int]) -> None:
    scores_of(mixtral)
    num_calls = len(calls)
    old = weakref.ref(experts_in(mixtral)[0])
    mixtral.model.layers[0].mlp.experts = copy.deepcopy(experts_in(mixtral)[1])
    assert_as_torch(mixtral, calls)
    assert len(calls) == num_calls
    gc.collect()
    assert old() is None


def test_nothing_is_kept_for_a_model_that_is_gone() -> None:
    model = model_of("mixtral")
    scores_of(model)
    found = weakref.ref(native.native_experts(model, False))
    assert found() is not None
    del model
    gc.collect()
    assert found() is None
