"""Experts and routers in few launches on GPUs: what is recognised, the same tokens, and others' code in effect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers.integrations import moe

from hf_paged import CacheConfig, Engine
from hf_paged.fused.expert_modules import projections_of
from hf_paged.fused.gpu import model as fused_model
from hf_paged.fused.gpu.kernels import experts as kernels
from hf_paged.integration.attention import packed_cache
from tests.architectures.tiny import tiny_model
from tests.fused import fewer
from tests.fused.fewer import INTERPRETED, NEW_TOKENS, by_generate, computes_as_plain, run, shortened
from tests.generation import tape

pytestmark = INTERPRETED

MIXTURE, ROUTER = "expert mixture", "router"


def counts(model: Any) -> tuple[int, int]:
    parts = fused_model.fused_parts(model)
    assert parts is not None
    return parts.counts()[MIXTURE], parts.counts()[ROUTER]


# Type -> layers with experts and a known router; those of aria_text are transposed. Routers: softmax before or after
# the choice, sigmoid with a bias and groups, with a bias as an argument, with a linear layer of their own.
TYPES = {
    "mixtral": 4, "gpt_oss": 4, "granitemoe": 4, "aria_text": 4, "cohere2_moe": 4, "glm4_moe": 3, "minimax_m2": 4,
    "hunyuan_v1_moe": 4, "afmoe": 3, "ernie4_5_moe": 3, "phimoe": 4,
}  # fmt: skip
QUICK = ("mixtral", "gpt_oss", "glm4_moe")


@pytest.mark.usefixtures("by_torch")
@pytest.mark.quick_cases(*QUICK)
@pytest.mark.parametrize("name", TYPES)
def test_types(name: str) -> None:
    model = tiny_model(name)
    assert counts(copy.deepcopy(model).bfloat16()) == counts(model) == (TYPES[name], TYPES[name])
    if name in QUICK:
        with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
            assert run(engine) == by_generate(model)


@pytest.mark.slow
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "aria_text", "afmoe", "ernie4_5_moe", "phimoe"])
def test_kernels_beside_the_modules(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is found only if our kernels, with either size of tiles, give what transformers' module gave."""
    fewer.on_cpu(monkeypatch)
    assert counts(shortened(tiny_model(name), 5 - TYPES[name]).to(dtype)) == (1, 1)  # of some the first has none


@pytest.fixture
def model(by_torch: None) -> Any:
    return copy.deepcopy(tiny_model("mixtral"))


def blocks(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def test_groups_and_factors(by_torch: None) -> None:
    model = copy.deepcopy(tiny_model("glm4_moe"))
    routers = [layer.mlp.gate for layer in model.model.layers[1:]]
    for router in routers:
        del router.routed_scaling_factor
        router.temperature, router.routed_scaling_factor = 1.0, 1.0  # of which one counts
        router.num_group, router.topk_group = 2, 1
        router.e_score_correction_bias.copy_(torch.randn(4))
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert counts(model) == (3, 3) and computes_as_plain(engine, model)
        for router in routers:  # read in every step
            router.routed_scaling_factor = 2.5
            router.e_score_correction_bias.neg_()
        assert computes_as_plain(engine, model)


def test_the_numbers_of_a_gate(by_torch: None) -> None:
    model = copy.deepcopy(tiny_model("gpt_oss"))
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        run(engine)
        for block in blocks(model):
            block.experts.limit, block.experts.alpha = 0.05, 0.5
        assert counts(model) == (4, 4) and computes_as_plain(engine, model)


def test_behaviour_that_few_tokens_do_not_show(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that few values reach, a factor that is 1 as yet."""

    for block in blocks(model):
        block.experts.act_fn = fewer.Limited()
    assert counts(model) == (0, 4)

    owner = type(blocks(model)[0].gate)
    forward = owner.forward

    def scaled(*args: Any) -> Any:
        logits, weights, index = forward(*args)
        return logits, weights * 1.0, index

    monkeypatch.setattr(owner, "forward", scaled)
    assert counts(copy.deepcopy(tiny_model("mixtral"))) == (4, 0)


def test_tiles_that_are_wrong(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes are tried, although a few tokens need one."""

    def wrong(*args: Any, size: str | None = None, **kwargs: Any) -> torch.Tensor:
        return fewer.product(*args, **kwargs) * (0.5 if size == "large" else 1)

    monkeypatch.setattr(kernels, "product", wrong)
    assert counts(model) == (0, 4)


def test_other_implementations(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours stands in for transformers' own ones, but not for one that was registered."""
    calls: list[Any] = []

    def halves(self: Any, *args: Any) -> torch.Tensor:
        calls.append(self)
        return moe.batched_mm_experts_forward(self, *args) * 0.5

    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "halves", halves)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        for name in ("batched_mm", "eager", "grouped_mm"):
            model.set_experts_implementation(name)
            assert run(engine) == by_generate(model)
        model.set_experts_implementation("halves")
        expected = by_generate(model)
        calls.clear()
        assert run(engine) == expected and len(calls) == 4 * NEW_TOKENS
        model.set_experts_implementation("grouped_mm")
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", halves)
        calls.clear()
        assert run(engine) == expected and len(calls) == 4 * NEW_TOKENS


def test_replayed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of a graph are those of its capture, whatever experts are chosen later."""
    model = shortened(tiny_model("mixtral"))
    tape.install(monkeypatch)
    tape.record_launches(monkeypatch)
    fewer.on_cpu(monkeypatch, by_torch=True)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True, cuda_graphs=True) as engine:
        for length in (5, 7):
            assert run(engine, length) == by_generate(model, length)
        assert engine.stats().graph_replays >= NEW_TOKENS - 1


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "experts": lambda model: blocks(model)[1].experts, "activation": lambda model: blocks(model)[1].experts.act_fn,
    "router": lambda model: blocks(model)[1].gate, "block": lambda model: blocks(model)[1],
}  # fmt: skip


def halved(result: Any) -> Any:
    return (result[0], result[1] * 0.5, result[2]) if isinstance(result, tuple) else result * 0.5


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_and_a_forward(place: str, model: Any, engine: Engine) -> None:
    module = PLACES[place](model)
    handle = module.register_forward_hook(lambda module, args, result: halved(result))
    assert computes_as_plain(engine, model)
    handle.remove()
    forward = module.forward
    module.forward = lambda *args, **kwargs: halved(forward(*args, **kwargs))
    assert computes_as_plain(engine, model)


def test_a_class_and_a_method_patched_later(model: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks(model)[0].experts, blocks(model)[0].gate):
        owner = type(module)
        with monkeypatch.context() as patch:
            patch.setattr(owner, "forward", lambda *args, own=owner.forward, **kwargs: halved(own(*args, **kwargs)))
            assert computes_as_plain(engine, model)
    owner, own = type(blocks(model)[0].experts), type(blocks(model)[0].experts)._apply_gate
    with monkeypatch.context() as patch:
        patch.setattr(owner, "_apply_gate", lambda self, x: own(self, x) * 0.5)
        assert computes_as_plain(engine, model)
    experts = blocks(model)[2].experts
    experts._apply_gate = lambda x: own(experts, x) * 0.5
    assert computes_as_plain(engine, model)


def test_weights_replaced_changed_and_parametrized(model: Any, engine: Engine) -> None:
    experts, router = blocks(model)[1].experts, blocks(model)[2].gate
    with torch.no_grad():
        experts.down_proj.mul_(-2), router.weight.neg_()
    assert computes_as_plain(engine, model)
    blocks(model)[3].experts = copy.deepcopy(experts)
    assert computes_as_plain(engine, model)
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().transpose(1, 2).contiguous().transpose(1, 2))
    assert projections_of(experts, torch.empty(1, 64)) is None
    assert computes_as_plain(engine, model)

    for module, name in ((blocks(model)[0].experts, "gate_up_proj"), (router, "weight")):
        register_parametrization(module, name, fewer.Halves())
        assert computes_as_plain(engine, model)


def test_a_child_of_a_router(by_torch: None) -> None:
    model = copy.deepcopy(tiny_model("ernie4_5_moe"))
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert counts(model) == (3, 3)
        run(engine)
        model.model.layers[1].mlp.gate.moe_statics.register_forward_hook(lambda module, args, result: -result)
        assert computes_as_plain(engine, model)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT reads it
def test_adapters(model: Any) -> None:
    """PEFT changes the classes of experts and routers while they compute, also of parts that were known before."""
    peft = pytest.importorskip("peft")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=names, init_lora_weights=False, lora_dropout=0.0
    )
    plain = by_generate(model)
    known = fused_model.fused_parts(model)
    assert known is not None
    adapted = peft.get_peft_model(model, config).eval()
    with Engine(adapted, CacheConfig(num_blocks=64), fuse=True) as engine:
        assert run(engine) == by_generate(adapted) != plain
    with torch.no_grad():
        known.apply(model)
    token = packed_cache.set(object())  # as in a packed step
    try:
        block, rows = blocks(model)[1], torch.randn(1, 3, 64)
        assert "forward" in vars(block.experts.get_base_layer()) and "forward" in vars(block.gate.get_base_layer())
        inside = block(rows)
    finally:
        packed_cache.reset(token)
        known.undo(model)
    torch.testing.assert_close(inside, block(rows))
