"""Rollouts of models whose weights a trainer has divided among two processes: tokens and weights of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_paged import CacheConfig, Engine
from hf_paged.bridges.sharded import WholeCopy
from tests import models
from tests.parallel import ranks

GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=None)
CACHE = CacheConfig(num_blocks=64, block_size=4)
BATCH = torch.arange(1, 25)[None]
Tokens = list[list[int]]


def tokens_of(engine: Engine) -> Tokens:
    return [output.outputs[0].token_ids for output in engine.generate(models.prompts(5, 9, 13), GREEDY)]


def plain(model: Any) -> Tokens:
    prompts = models.prompts(5, 9, 13)
    return [model.generate(input_ids=p[None], generation_config=GREEDY)[0, len(p) :].tolist() for p in prompts]


def trained(model: Any, draw: Callable[[], Tokens]) -> list[Tokens]:
    """What is drawn before, between and after two steps."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        found.append(draw())
        optimizer.zero_grad()
        model.train()(input_ids=BATCH, labels=BATCH).loss.backward()
        optimizer.step()
    return found


def by_fsdp2(say: Any, folder: str) -> None:
    distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    copy = WholeCopy(model)

    def draw() -> Tokens:
        model(input_ids=BATCH)  # leaves the weights of the outermost module whole
        copy.refresh()
        with Engine(copy.model, CACHE) as engine:
            # The ranks draw more or less: nothing is exchanged while they do.
            return [tokens_of(engine) for _ in range(1 + distributed.get_rank())][-1]

    say(trained(model, draw))


@pytest.mark.slow
def test_rollouts_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = trained(model, lambda: plain(model.eval()))
    assert expected[0] != expected[1] != expected[2]
    assert ranks.run(2, by_fsdp2, str(tmp_path)) == [[expected]] * 2


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # what PEFT asks
@pytest.mark.parametrize("bits", [None, 8])
def test_a_copy_of_a_tied_model_with_adapters(bits: int | None) -> None:
    from peft import LoraConfig, get_peft_model

    base = models.build("llama", hidden_size=64, tie_word_embeddings=True)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)).train()
    copy = WholeCopy(model, bits=bits)
    whole = copy.num_bytes
    assert whole == sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    copy.refresh()
    assert model.training and not copy.model.training and not {*model.modules()} & {*copy.model.modules()}
    with Engine(copy.model, CACHE) as engine:
        found = tokens_of(engine)
        assert bits or found == plain(model.eval())
        with torch.no_grad():
            base.model.layers[0].mlp.up_proj.weight.mul_(-1.5)
        if bits:
            assert copy.num_bytes < whole * 0.5
            with pytest.raises(ValueError, match="bits=8: rounded weights are kept; leave free"):
                copy.free()
        else:
            engine.sleep()
            copy.free()
            assert copy.num_bytes < whole // 50
        copy.refresh()
        engine.wake()
        fresh = WholeCopy(model, bits=bits)
        fresh.refresh()
        with Engine(fresh.model, CACHE) as other:
            assert tokens_of(engine) == tokens_of(other) != found
    base.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    if bits:
        with pytest.raises(ValueError, match="weight has values from nan"):
            copy.refresh()


def test_weights_that_are_divided_as_deepspeed_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its interface: shapes at parameters, and a context in which they are whole."""
    model: Any = models.build("llama")
    expected, whole = {n: e.clone() for n, e in model.state_dict().items()}, {id(e): e.data for e in model.parameters()}

    @contextmanager
    def gather(parameters: list[nn.Parameter]) -> Iterator[None]:
        (one,) = parameters
        one.data = whole[id(one)]
        yield
        one.data = one.new_empty(0)

    fake: Any = ModuleType("deepspeed")
    fake.zero, fake.GatheredParameters = fake, gather
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    for each in model.parameters():
        each.ds_shape, each.data = each.shape, each.new_empty(0)
    copy = WholeCopy(type("DeepSpeedEngine", (nn.Module,), {"module": model})())
    copy.refresh()
    assert all(torch.equal(each, expected[name]) for name, each in copy.model.state_dict().items())
    assert copy.num_gathered_bytes == max(each.nbytes for each in whole.values())


def test_what_a_copy_would_not_have_is_refused() -> None:
    model: Any = models.build("llama")
    model._original_forward, model.forward = model.forward, lambda **_: None  # a cast by accelerate
    assert "forward" not in vars(WholeCopy(model).model)
    with pytest.raises(ValueError, match="bits=3: use 8, 4"):
        WholeCopy(model, bits=3)
    head, inner = model.lm_head, model.lm_head.forward
    head.forward = MethodType(lambda _, states: inner(states), head)  # would compute with the divided weights
    with pytest.raises(ValueError, match="calls no method of this one module"):
        WholeCopy(model)
    del head.forward
    model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a hook of tests"):
        WholeCopy(model)
    model.model.norm.forward = lambda states: states
    model.model.norm._forward_hooks.clear()
    with pytest.raises(ValueError, match="a `forward` of tests"):
        WholeCopy(model)
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        WholeCopy(type("FullyShardedDataParallel", (nn.Module,), {})())
