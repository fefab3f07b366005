"""Norms, rotations and whole decoder layers in native kernels: when they apply, equal bits, and complete removal."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm

from hf_paged import CacheConfig, Engine
from hf_paged.fused import overrides as fused_overrides
from hf_paged.fused.cpu import decoder as fused_decoder
from hf_paged.fused.cpu import norms as fused_norms
from hf_paged.fused.cpu import walk as fused_walk
from hf_paged.fused.cpu import weights as fused_weights
from hf_paged.integration.masks import MaskPattern
from hf_paged.kernels.bounds import Bounds
from tests import models
from tests.fused.native import KNOWN, SIZES, build

pytestmark = pytest.mark.usefixtures("bf16_kernels")


@pytest.fixture(params=KNOWN)
def known(request: pytest.FixtureRequest) -> tuple[Any, int]:
    make, count = KNOWN[request.param]
    return build(make()), count


def tokens_and_logprobs(model: Any, **options: Any) -> list[tuple[list[int], list[float]]]:
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Engine(model, CacheConfig(num_blocks=128, block_size=4), **options) as engine:
        outputs = engine.generate(models.prompts(3, 40, 17), config)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


NUMBERS = [("input_layernorm", "variance_epsilon"), ("self_attn", "scaling")]


@pytest.mark.parametrize(("part", "name"), NUMBERS)
def test_changed_numbers(part: str, name: str) -> None:
    model = build(KNOWN["llama"][0]())
    before = tokens_and_logprobs(model, prepack=None)
    module = getattr(model.model.layers[0], part)
    own = getattr(module, name)
    setattr(module, name, own + 3.0)
    changed = tokens_and_logprobs(model, prepack=None)
    assert changed == tokens_and_logprobs(copy.deepcopy(model), prepack=None) != before
    setattr(module, name, own)
    assert tokens_and_logprobs(model, prepack=None) == before


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [("input_layernorm", "variance_epsilon", torch.full([64], 0.5)), ("self_attn", "scaling", torch.tensor(0.4))],
)
def test_tensors_in_the_place_of_numbers(part: str, name: str, value: torch.Tensor) -> None:
    """They are the model's own business, also where they cannot be compared."""
    model = build(KNOWN["llama"][0]())
    (prompt,) = models.prompts(9)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Engine(model, CacheConfig(num_blocks=64), prepack=None) as engine:

        def check() -> list[int]:
            got = engine.generate([prompt], config)[0].outputs[0].token_ids
            assert model.generate(prompt[None], generation_config=config)[0, 9:].tolist() == got
            return got

        first, module = check(), model.model.layers[0].get_submodule(part)
        own = getattr(module, name)
        setattr(module, name, value.clone())
        assert check() != first
        getattr(module, name).mul_(3)
        engine.clear_prefix_cache()
        check()
        setattr(module, name, own)
        assert check() == first


def layers_of(model: Any) -> list[Any]:
    weights = fused_weights.layers_for_engine(model, None)
    assert weights is not None
    decoder = fused_decoder.native_decoder(model, weights)
    assert decoder is not None
    return decoder._layers


def switched_off(patch: pytest.MonkeyPatch, *, norms: bool) -> None:
    patch.setattr(fused_overrides, "native_decoder", lambda *_: None)
    if norms:
        patch.setattr(fused_overrides, "native_layers", lambda *_: None)


@pytest.mark.covering(1)
def test_the_same_bits(known: tuple[Any, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, count = known[0].to(dtype), known[1]
    got = tokens_and_logprobs(model, prepack=None)
    assert sum(layer._verdict is True for layer in layers_of(model)) == count
    unpacked = tokens_and_logprobs(model, prepack=False)
    for norms in (False, True):
        switched_off(monkeypatch, norms=norms)
        assert tokens_and_logprobs(model, prepack=None) == got
    assert tokens_and_logprobs(model, prepack=False) == unpacked


class Flagged(LlamaRMSNorm):  # type: ignore[misc]
    is_centred = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) + (rows if self.is_centred else 0)


class Limited(LlamaMLP):  # type: ignore[misc]
    limit: tuple[float] | list[float] = (6.0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=self.limit[0]) * self.up_proj(x))


class Called(LlamaMLP):  # type: ignore[misc]
    factor: list[float]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) * self.factor[0]


def flag_one_norm(model: Any) -> None:
    model.model.layers[0].input_layernorm.__class__ = model.model.norm.__class__ = Flagged
    model.model.norm.is_centred = True


@torch.no_grad()
def gate_above_limit(model: Any) -> None:
    """Rows with one element, of the length of random ones: it is larger than any of theirs."""
    model.model.embed_tokens.weight.copy_(nn.functional.one_hot(torch.arange(96) % 64, 64))
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.gate_proj.weight.copy_(torch.eye(96, 64))
    layer.post_attention_layernorm.weight.fill_(1.0)
    layer.mlp.__class__ = Limited


def list_a_limit(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.limit = Limited, [1e9]


def call_otherwise(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.factor, layer.mlp.__class__ = [1.0], Called


def lower_the_limits(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.limit[0] = 0.05


def raise_the_factors(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.factor[0] = 3.0


ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16}
UNSEEN: dict[str, list[Callable[[Any], None]]] = {  # what is done to the model before its first step, and after it
    "a flag of one norm": [flag_one_norm],
    "a limit that random rows do not reach": [gate_above_limit],
    "a list that changes": [list_a_limit, lower_the_limits],
    "a class with a call of its own": [call_otherwise, raise_the_factors],
    "a factor of far positions": [],
}


@pytest.mark.parametrize("case", UNSEEN)
def test_what_a_trial_does_not_show(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No native code stands in for code that nobody has read, whatever it computed for random rows."""
    config = KNOWN["llama"][0]()
    if "positions" in case:
        config = transformers.Ministral3Config(**SIZES, rope_parameters={**ROPE, "llama_4_scaling_beta": 0.5})
    model, got = build(config), []
    for change in UNSEEN[case] or [lambda model: None]:
        change(model)
        got.append(tokens_and_logprobs(model, prepack=None))
    switched_off(monkeypatch, norms=True)
    assert got[-1] == tokens_and_logprobs(model, prepack=None) and all(a != b for a, b in itertools.pairwise(got))


class Wide(LlamaRMSNorm):  # type: ignore[misc]
    """Computes like Llama's for weights of one, and only for these."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * wide).to(rows.dtype)


def test_what_is_recognised() -> None:
    norm_of = fused_norms.norm_of
    llama, gemma = (build(KNOWN[name][0]()) for name in ("llama", "gemma3"))
    norms = [module for module in llama.modules() if type(module).__name__ == "LlamaRMSNorm"]
    assert len(norms) == 5 and all(norm_of(norm) is not None for norm in norms)
    assert not any(norm_of(module) is not None for module in gemma.modules())  # multiplies by 1 + weight
    assert norm_of(LlamaRMSNorm(64)) is not None
    assert norm_of(Llama4TextRMSNorm(64, 1e-3)).eps == 1e-3  # type: ignore[union-attr]
    for other in (
        torch.nn.LayerNorm(64), Wide(64, 1e-6).bfloat16(), LlamaRMSNorm(64).double(),
        LlamaRMSNorm(40),  # not a multiple of 16
    ):  # fmt: skip
        assert norm_of(other) is None


def test_a_weight_with_gaps_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_norms, "in_packed_step", lambda: True)
    module, rows = LlamaRMSNorm(64), torch.randn(1, 3, 64)
    forward = fused_norms.NativeNorm(module).forward
    module.weight = torch.nn.Parameter(torch.rand(128)[::2], requires_grad=False)
    assert torch.equal(forward(rows), module(rows))


def test_no_trace_is_left() -> None:
    model = build(KNOWN["qwen3"][0]())
    namespace = vars(__import__(type(model).__module__, fromlist=["x"]))
    before = namespace["apply_rotary_pos_emb"]
    tokens_and_logprobs(model, prepack=None)
    assert namespace["apply_rotary_pos_emb"] is before
    assert not any("forward" in vars(module) for module in model.modules())


def test_hooks_inside_a_layer_are_called(stacks: list[int]) -> None:
    model = build(KNOWN["llama"][0]())
    seen: list[torch.Size] = []
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    with Engine(model, CacheConfig(num_blocks=64), prepack=None) as engine:
        (prompt,) = models.prompts(9)
        first = engine.generate([prompt], config)[0].outputs[0].token_ids
        hook = model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: seen.append(out.shape))
        assert engine.generate([prompt], config)[0].outputs[0].token_ids == first
        assert len(seen) == 4
        hook.remove()
        stacks.clear()
        engine.generate([prompt], config)
        assert len(seen) == 4 and stacks == [2, 2, 2, 2]  # the prompt is short
        turned = model.model.layers[1].register_forward_hook(lambda _, __, out: out.flip(-1))
        engine.clear_prefix_cache()
        other = engine.generate([prompt], config)[0].outputs[0]
        turned.remove()
    assert other.logprobs and other.token_ids != first


def test_layers_of_a_draft_are_computed_ahead(stacks: list[int]) -> None:
    """As those of a decode step, up to the number of tokens that another kernel computes."""

    class Same:
        def draft(self, wanted: Any) -> list[list[int]]:
            return [[5] * each.most for each in wanted]

    model = build(KNOWN["llama"][0]())
    for length, expected in ((3, {2}), (60, set())):
        config = GenerationConfig(max_new_tokens=80, do_sample=False, eos_token_id=None, pad_token_id=0)
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = length, "constant"
        with Engine(model, CacheConfig(num_blocks=64), assistant_model=Same()) as engine:
            engine.add_request(models.prompts(9)[0], config)
            engine.step()
            stacks.clear()
            engine.step()
            assert engine.stats().drafted_tokens == length and set(stacks) == expected


def test_replaced_parts_and_changed_weights() -> None:
    model = build(KNOWN["llama-biased"][0]())
    config = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    (prompt,) = models.prompts(9)
    with Engine(model, CacheConfig(num_blocks=64), prepack=None) as engine:

        def check() -> list[int]:
            engine.clear_prefix_cache()
            got = engine.generate([prompt], config)[0].outputs[0].token_ids
            with Engine(model, CacheConfig(num_blocks=64), prepack=False) as plain:
                assert plain.generate([prompt], config)[0].outputs[0].token_ids == got
            return got

        results = [check()]
        with torch.no_grad():
            model.model.layers[0].mlp.gate_proj.weight.add_(0.3)
            model.model.layers[1].input_layernorm.weight.mul_(-1)
        results.append(check())
        model.model.layers[0].input_layernorm.weight = torch.nn.Parameter(torch.randn(64).bfloat16())
        results.append(check())
        model.model.layers[1].input_layernorm.weight.data = torch.randn(64).bfloat16()
        results.append(check())
        model.model.layers[1].post_attention_layernorm = torch.nn.LayerNorm(64).bfloat16()
        model.model.layers[0].self_attn.v_proj = torch.nn.Linear(64, 64, bias=False).bfloat16()
        results.append(check())
        model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
        results.append(check())
        linear = model.model.layers[1].mlp.up_proj
        linear.bias = torch.nn.Parameter(torch.randn_like(linear.bias) * 5)
        results.append(check())
        linear.bias.data = torch.randn_like(linear.bias) * 5
        results.append(check())
        # Fewer columns than were packed, and more.
        for module, inner in ((model.model.layers[1].mlp, 64), (model.model.layers[0].mlp, 160)):
            shapes = {module.gate_proj: (inner, 64), module.up_proj: (inner, 64), module.down_proj: (64, inner)}
            for linear, shape in shapes.items():
                linear.weight, linear.bias = torch.nn.Parameter(torch.randn(shape).bfloat16()), None
        results.append(check())
    assert len({tuple(result) for result in results}) == 9


# -- consecutive layers: in decode steps one native call computes all of them ------------------------------------------


def deep(layers: int = 5, **options: Any) -> Any:
    return build(transformers.LlamaConfig(**(SIZES | {"num_hidden_layers": layers} | options)))


def same_as_one_by_one(model: Any, patch: pytest.MonkeyPatch) -> list[tuple[list[int], list[float]]]:
    got = tokens_and_logprobs(model, prepack=None)
    with patch.context() as context:
        context.setattr(fused_walk, "MAX_TOKENS_AHEAD", 0)
        assert tokens_and_logprobs(model, prepack=None) == got
    return got


def test_one_call_computes_all_layers(stacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    got = same_as_one_by_one(model, monkeypatch)
    assert set(stacks) == {5} and len(stacks) == 7  # the first token comes with the prompt
    switched_off(monkeypatch, norms=True)
    assert tokens_and_logprobs(model, prepack=None) == got


@pytest.mark.parametrize("name", ["qwen3-windows", "llama-biased"])
def test_masks_groups_and_biases_in_one_call(name: str, stacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    same_as_one_by_one(build(KNOWN[name][0]()), monkeypatch)
    assert set(stacks) == {2} and len(stacks) == 7


def test_layers_that_are_not_native_cut_the_line(stacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.SmolLM3Config(**(SIZES | {"num_hidden_layers": 7}), no_rope_layers=[1, 1, 1, 0, 1, 1, 1])
    same_as_one_by_one(build(config), monkeypatch)
    assert set(stacks) == {3}


def test_layers_of_different_sizes_are_not_in_one_line(stacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    mlp = model.model.layers[3].mlp  # as pruning leaves it
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        linear.weight = torch.nn.Parameter(linear.weight[:64, :64].clone())
    same_as_one_by_one(model, monkeypatch)
    assert set(stacks) == {3}


def changed(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.flip(-1)


def given_another(_: Any, inputs: Any) -> Any:
    return (inputs[0] * 0.5, *inputs[1:])


def given_another_mask(_: Any, inputs: Any, kwargs: Any) -> Any:
    return inputs, kwargs | {"attention_mask": MaskPattern(Bounds(sliding_window=3))}


MEDDLERS = {
    "result": lambda layer: layer.register_forward_hook(changed),
    "input": lambda layer: layer.register_forward_pre_hook(given_another),
    "mask": lambda layer: layer.register_forward_pre_hook(given_another_mask, with_kwargs=True),
}


@pytest.mark.parametrize("meddle", MEDDLERS)
def test_what_is_done_between_layers_counts(meddle: str, stacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two decode steps, other code starts to change what one layer passes to the next, and later stops."""
    model = deep()
    config = GenerationConfig(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)

    def run() -> list[tuple[list[int], list[float]]]:
        with Engine(model, CacheConfig(num_blocks=128, block_size=4), prepack=None) as engine:
            for prompt in models.prompts(3, 40, 17):
                engine.add_request(prompt, config)
            outputs = []
            for step in range(16):
                if step == 5:
                    handle = MEDDLERS[meddle](model.model.layers[2])
                if step == 11:
                    handle.remove()
                outputs += engine.step()
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs if o.finished]

    got = run()
    ahead = list(stacks)
    with monkeypatch.context() as context:
        context.setattr(fused_walk, "MAX_TOKENS_AHEAD", 0)
        expected = run()
    assert got == expected
    untouched = tokens_and_logprobs(model, prepack=None)
    assert [logprobs[5:8] for _, logprobs in got] != [logprobs[5:8] for _, logprobs in untouched]
    # First one call computes all layers, then one call on either side of the change. After it has stopped, one call
    # computes all layers again, unless the change cannot be distinguished from what the model itself does.
    assert ahead[0] == 5 and min(ahead) in (2, 3) and ahead[-1] in (5, 2, 3)


def test_results_between_layers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    seen: list[list[torch.Tensor]] = []
    handles = [x.register_forward_hook(lambda _, __, out: seen[-1].append(out.clone())) for x in model.model.layers]
    for most in (256, 0):
        monkeypatch.setattr(fused_walk, "MAX_TOKENS_AHEAD", most)
        seen.append([])
        tokens_and_logprobs(model, prepack=None)
    for handle in handles:
        handle.remove()
    steps = 7 * 5  # in the engine's check of the model others came before
    assert all(map(torch.equal, seen[0][-steps:], seen[1][-steps:])) and len(seen[1]) > steps
