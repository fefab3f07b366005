"""Weights that are no plain parameters, put in before the first call, after it and under an engine that runs: the model
computes what its own plain forward computes, and no address of such a weight is used."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine
from tests import models
from tests.fused import foreign_weights as foreign
from tests.fused.test_native_layers import SIZES, build

pytestmark = [
    pytest.mark.usefixtures("bf16_kernels"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROMPTS = models.prompts(9, 21)
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@functools.cache
def _shared() -> Any:
    return build(transformers.LlamaConfig(**SIZES | {"eos_token_id": None}))


def llama(dtype: str) -> Any:
    return copy.deepcopy(_shared()).to(DTYPES[dtype])


def by_plain_generate(model: Any) -> list[list[int]]:
    return [model.generate(ids[None], **OPTIONS)[0, len(ids) :].tolist() for ids in PROMPTS]


def by_generate(model: Any) -> list[list[int]]:
    return [
        model.generate(ids[None], **OPTIONS, cache_implementation="paged")[0, len(ids) :].tolist() for ids in PROMPTS
    ]


def by_engine(engine: Engine) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, GenerationConfig(**OPTIONS))
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.outputs[0].token_ids for output in outputs]


def engine_on(model: Any, prepack: bool | None = None) -> Engine:
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", foreign.CHANGES)
def test_every_door(change: str, dtype: str) -> None:
    """A new model; then, after calls and under engines with and without copies of the weights, another one."""
    apply, new = foreign.CHANGES[change], llama(dtype)
    apply(new)
    assert are_the_models(by_generate(new), new)
    with engine_on(new) as engine:
        assert are_the_models(by_engine(engine), new)
    model = llama(dtype)
    before = by_generate(model)
    with engine_on(model, prepack=True) as packed, engine_on(model, prepack=False) as engine:
        assert before == by_engine(packed) == by_engine(engine)
        apply(model)
        if "shadowed" in change:  # no look finds a plain attribute
            hf_paged.weights_changed(model)
        assert not are_the_models(before, model)  # else this test could not fail
        for tokens in (by_engine(packed), by_engine(engine), by_generate(model)):
            assert are_the_models(tokens, model)
