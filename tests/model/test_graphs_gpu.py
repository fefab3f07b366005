"""CUDA graphs on a device: the tokens of eager steps, replays that neither wait nor compile, safe failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.features.graphs.graphs import GraphedSteps
from hf_paged.kernels.metadata import StepArrays
from tests import models
from tests.forwards import graphs_of
from tests.generation.solo import OPTIONS, config
from tests.waiting import no_waits_for_a_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")]

NEVER = models.VOCAB  # as EOS: no request ends before its last token


def opened(model: Any, **options: Any) -> Engine:
    return Engine(model, CacheConfig(num_blocks=400, block_size=16), **options)


def texts(engine: Engine, lengths: tuple[int, ...] = (5, 30, 90), **options: Any) -> list[list[int]]:
    outputs = engine.generate(models.prompts(*lengths), config("greedy", **{"eos_token_id": NEVER, **options}))
    assert [output.error for output in outputs] == [None] * len(lengths)
    return [output.outputs[0].token_ids for output in outputs]


def test_same_outputs_with_and_without(family: str) -> None:
    """With and without graphs and asynchronous scheduling."""
    model = models.build(family).cuda()
    prompts = models.prompts(*range(3, 3 + 2 * len(OPTIONS), 2))
    results = []
    for cuda_graphs, scheduling in ((True, True), (False, True), (True, False)):
        scheduler = SchedulerConfig(async_scheduling=scheduling)
        with opened(model, cuda_graphs=cuda_graphs, scheduler_config=scheduler) as engine:
            results.append(engine.generate(prompts, [config(name) for name in OPTIONS]))
            assert (engine.stats().graph_replays > 0) is cuda_graphs
            results[-1] += engine.generate(prompts[:3], config("greedy", max_new_tokens=100, eos_token_id=NEVER))
    for first, *others in zip(*results, strict=True):
        for other in others:
            assert first.error is other.error is None
            for one, same in zip(first.outputs, other.outputs, strict=True):
                assert one.token_ids == same.token_ids
                assert one.logprobs == pytest.approx(same.logprobs, abs=1e-3)


def compiled() -> int:
    """Number of compiled versions of our kernels so far."""
    from hf_paged.fused.gpu.kernels import gate, norm, rotary
    from hf_paged.kernels.triton import partition, split, whole, write

    modules = (gate, norm, partition, rotary, split, whole, write)
    kernels = [value for module in modules for value in vars(module).values() if hasattr(value, "device_caches")]
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def test_a_replay_neither_waits_nor_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, checked = GraphedSteps.forward, []

    def strict(
        self: GraphedSteps, tokens: np.ndarray, step: StepArrays, variant: object, late: Any, wanted: Any, *shape: Any
    ) -> torch.Tensor | None:
        captured = self._captured.get(variant)
        if captured is None or self.shape_of(len(tokens), wanted, shares=step.shares) not in captured.replays:
            return forward(self, tokens, step, variant, late, wanted, *shape)
        before = compiled()
        with no_waits_for_a_device():
            logits = forward(self, tokens, step, variant, late, wanted, *shape)
        assert compiled() == before
        checked.append(len(tokens))
        return logits

    monkeypatch.setattr(GraphedSteps, "forward", strict)
    with opened(models.build("gemma3").cuda()) as engine:
        texts(engine, (5, 30, 90), max_new_tokens=60)
        texts(engine, (20, 70, 3, 9), max_new_tokens=60)
        assert engine.stats().graph_replays == len(checked) > 0


@pytest.mark.parametrize("scheduling", [True, False])
@pytest.mark.parametrize("name", ["greedy", "sample"])
def test_a_step_waits_for_nothing_but_its_tokens(name: str, scheduling: bool) -> None:
    """It waits for the tokens with an event, which the debug mode permits."""
    scheduler = SchedulerConfig(async_scheduling=scheduling)
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 20} if name == "sample" else {}
    with opened(models.build("llama").cuda(), scheduler_config=scheduler) as engine:
        for prompt in models.prompts(5, 30, 90):
            engine.add_request(prompt, config(name, max_new_tokens=40, eos_token_id=NEVER, **options))
        for _ in range(5):
            engine.step()
        with no_waits_for_a_device():
            for _ in range(10):
                engine.step()


def test_swaps_between_replays() -> None:
    """Blocks are swapped out while graphs are replayed, and swapped in between replays."""
    model = models.build("llama").cuda()
    results = []
    for num_blocks in (400, 24):
        scheduler = SchedulerConfig(preemption="swap", prefix_caching=False)
        with Engine(model, CacheConfig(num_blocks=num_blocks, block_size=16), scheduler) as engine:
            results.append(texts(engine, (40, 60, 80, 95), max_new_tokens=60))
            assert (engine.stats().preemptions_swap > 0) is (num_blocks == 24) and engine.stats().graph_replays > 0
    assert results[0] == results[1]


class Waiting(nn.Module):
    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "a value":
            return self.inner(x) if x.isfinite().all() else x
        torch.cuda.current_stream().synchronize()  # what only CUDA itself refuses in a capture
        return self.inner(x)


@pytest.mark.parametrize("way", ["a value", "the stream"])
def test_what_cannot_be_captured_leaves_everything_as_it_was(way: str) -> None:
    model = models.build("llama").cuda()
    with opened(model, cuda_graphs=False) as engine:
        expected = texts(engine)
    model.model.layers[0].mlp = Waiting(model.model.layers[0].mlp, way).eval()
    stream = torch.cuda.current_stream()
    # The warm-up captures all graphs.
    with pytest.warns(RuntimeWarning, match="LlamaForCausalLM cannot be captured"), opened(model) as engine:
        assert texts(engine) == expected
        assert engine.stats().graph_replays == 0
        assert torch.cuda.current_stream() == stream
        (sampled,) = engine.generate(models.prompts(5), config("sample"))
        assert sampled.error is None
    torch.rand(3, device="cuda")
    torch.cuda.empty_cache()
    with pytest.raises(hf_paged.UnsupportedModelError, match="cuda_graphs=True: LlamaForCausalLM cannot be captured"):
        opened(model, cuda_graphs=True)


def test_weights_and_hooks() -> None:
    model = models.build("llama").cuda()
    with opened(model) as engine:
        before = texts(engine)
        weight = model.model.layers[0].mlp.down_proj.weight
        weight.data = weight.data * -1.5
        after = texts(engine)
        handle = model.lm_head.register_forward_hook(hf_paged.tokenwise(lambda *call: -call[-1]))
        with pytest.warns(RuntimeWarning, match="forward hook"):
            hooked = texts(engine)
        handle.remove()
        replays = engine.stats().graph_replays
        assert texts(engine) == after and engine.stats().graph_replays > replays
    assert before != after != hooked
    with opened(model, cuda_graphs=False) as engine:
        assert texts(engine) == after


def test_engines_after_one_another() -> None:
    model = models.build("llama").cuda()
    layouts, captured = [], []
    for _ in range(3):
        with opened(model) as engine:
            layouts.append(engine._memory.layout)
            captured.append((texts(engine), *graphs_of(engine)._captured.values()))
    for i in (1, 2):
        assert captured[i][0] == captured[0][0]
        assert (captured[i][1] is captured[i - 1][1]) == (layouts[i] == layouts[i - 1])
    hf_paged.release_memory(model)
