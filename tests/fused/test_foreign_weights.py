"""Weights that are no plain parameters, put in at any time: what plain forwards compute, without their addresses."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine
from hf_paged.fused.cpu import ops as fused_ops
from hf_paged.fused.gpu import model as fused_model
from hf_paged.kernels.buffers import as_plain
from tests import models
from tests.architectures.tiny import tiny_model
from tests.fused import fewer
from tests.fused import foreign_weights as foreign
from tests.fused.native import SIZES, build

pytestmark = [
    pytest.mark.usefixtures("bf16_kernels"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = models.prompts(9, 21)
OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


QUICK = ("sealed linears", "opposite norms", "tagged linears", "pruned norms", "property linears")


@functools.cache
def _shared(kind: str) -> Any:
    if kind == "experts":
        model = tiny_model("mixtral").bfloat16()
        model.generation_config.eos_token_id = None
        return model
    return build(transformers.LlamaConfig(**SIZES | {"eos_token_id": None}, attention_bias=kind == "biased"))


def new_model(dtype: str, kind: str = "llama") -> Any:
    return copy.deepcopy(_shared(kind)).to(DTYPES[dtype])


def by_plain_generate(model: Any) -> list[list[int]]:
    return [model.generate(ids[None], **OPTIONS)[0, len(ids) :].tolist() for ids in PROMPTS]


def by_generate(model: Any) -> list[list[int]]:
    return [model.generate(p[None], **OPTIONS, cache_implementation="paged")[0, len(p) :].tolist() for p in PROMPTS]


def by_engine(engine: Engine) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, GenerationConfig(**OPTIONS))
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.outputs[0].token_ids for output in outputs]


def engine_on(model: Any, prepack: bool | None = None) -> Engine:
    """prepack=True: where the kernels have packed weights of this dtype."""
    if prepack and model.dtype == torch.bfloat16 and not fused_ops.packs():
        prepack = None
    return Engine(model, CacheConfig(num_blocks=64, block_size=4), prepack=prepack)


@torch.no_grad()
def are_the_models(tokens: list[list[int]], model: Any) -> bool:
    """Whether plain generate gives these tokens; in bf16, whether each is the most likely one but for rounding."""
    if model.dtype == torch.float32:
        return tokens == by_plain_generate(model)
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        logits = model(torch.cat([prompt, torch.tensor(new)])[None]).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
        if not bool((chosen >= logits.amax(1) - 0.03 * logits.abs().amax()).all()):
            return False
    return True


def check_every_door(change: foreign.Change, make: Callable[[], Any], *, is_seen: bool = True) -> None:
    """A new model; then, after calls and under engines with and without copies of the weights, another one."""
    new = make()
    change(new)
    assert are_the_models(by_generate(new), new)
    with engine_on(new) as engine:
        assert are_the_models(by_engine(engine), new)
    model = make()
    before = by_generate(model)
    with engine_on(model, prepack=True) as packed, engine_on(model, prepack=False) as engine:
        by_engine(packed), by_engine(engine)
        change(model)
        if not is_seen:
            hf_paged.weights_changed(model)
        assert not are_the_models(before, model)  # else this test could not fail
        for tokens in (by_engine(packed), by_engine(engine), by_generate(model)):
            assert are_the_models(tokens, model)


@pytest.mark.quick_cases(*QUICK)
@pytest.mark.parametrize("change", foreign.CHANGES)
def test_each_door(change: str) -> None:
    # No look finds a plain attribute.
    check_every_door(foreign.CHANGES[change], lambda: new_model("bf16"), is_seen="shadowed" not in change)


def test_the_doors_in_fp32() -> None:
    check_every_door(foreign.CHANGES["pruned linears"], lambda: new_model("fp32"))


@pytest.mark.quick_cases("tagged", "head", "biases", "wrapped experts")
@pytest.mark.parametrize("change", foreign.OTHERS)
def test_other_places(change: str) -> None:
    kind = next((kind for kind, word in (("experts", "experts"), ("biased", "biases")) if word in change), "llama")
    check_every_door(foreign.OTHERS[change], lambda: new_model("bf16", kind))


@pytest.mark.parametrize("change", foreign.REMOVABLE)
def test_computed_and_removed_again(change: str) -> None:
    """In the middle of requests too: each token is computed with the weights of its step."""
    model = new_model("bf16")
    with engine_on(model, prepack=True) as packed, engine_on(model, prepack=False) as engine:
        for way in (foreign.REMOVABLE[change], foreign.removed):
            for module in foreign.linears(model):
                way(module)
            for tokens in (by_engine(packed), by_engine(engine), by_generate(model)):
                assert are_the_models(tokens, model)


@pytest.mark.usefixtures("packed_weights")
@pytest.mark.parametrize("computed", ["some", "all"])
def test_prepack_leaves_out_what_is_computed(computed: str) -> None:
    model = new_model("bf16")
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for module in layers[: None if computed == "all" else 3]:
        foreign.pruned(module)
    if computed == "some":
        with engine_on(model, prepack=True) as engine:
            assert are_the_models(by_engine(engine), model)
    else:
        with pytest.raises(ValueError, match="no linear layers with weights that are parameters"):
            engine_on(model, prepack=True)


@pytest.mark.usefixtures("packed_weights")
@pytest.mark.parametrize("kind", ["wrapped", "pruned"])
def test_prepacked_calls(kind: str) -> None:
    """`generate` after `prepack`: computed weights are left out, wrapped ones refused."""
    model = new_model("bf16")
    hf_paged.prepack(model)
    by_generate(model)
    foreign.CHANGES[f"{kind} linears"](model)
    if kind == "pruned":
        assert are_the_models(by_generate(model), model)
    else:
        with pytest.raises(ValueError, match="release_memory"):
            by_generate(model)
        hf_paged.release_memory(model)
        assert are_the_models(by_generate(model), model)


def checked(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to which no tensor without memory of its own may be given."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for item in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(item, torch.Tensor):
                as_plain(item)
        return compute(*args, **kwargs)

    return call


@pytest.mark.parametrize("change", ["wrapped norms", "pruned linears", "tagged linears"])
def test_fewer_launches(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer.on_cpu(monkeypatch, by_torch=True)
    for module, name in fewer.OPERATIONS:
        monkeypatch.setattr(module, name, checked(getattr(module, name)))
    new, model = new_model("fp32"), new_model("fp32")
    foreign.CHANGES[change](new)
    with Engine(new, CacheConfig(num_blocks=64), prepack=False) as engine:
        assert are_the_models(by_engine(engine), new)
    with Engine(model, CacheConfig(num_blocks=64), fuse=True) as engine:
        before = by_engine(engine)
        assert fused_model.fused_parts(model)
        foreign.CHANGES[change](model)
        assert not are_the_models(before, model)
        assert are_the_models(by_engine(engine), model)
