"""Layers that others put into a model under a live engine: answers are those of the model as it is now."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from tests.architectures.tiny import redraw, tiny_config, tiny_model

NEW = 8
CONFIG = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]


def plain(model: Any, prompt: list[int], count: int = NEW) -> list[int]:
    config = copy.deepcopy(CONFIG)
    config.max_new_tokens = count
    result: list[int] = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    return result


def another(model: Any, **changes: Any) -> Any:
    config = tiny_config(model.config.model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    other = type(model)(config).float().eval()
    redraw(other, 7)
    return other


def same_place(model: Any) -> None:
    model.model.layers[1] = another(model).model.layers[1]


def more_heads(model: Any) -> None:
    model.model.layers[1] = another(model, num_key_value_heads=4).model.layers[1]


def fewer_layers(model: Any) -> None:
    del model.model.layers[2]


def more_layers(model: Any) -> None:
    model.config.num_hidden_layers = 5
    model.model.layers.append(another(model, num_hidden_layers=5).model.layers[4])


def another_epsilon(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon += 1.0


CHANGES = [same_place, more_heads, fewer_layers, more_layers]


def run(engine: hf_paged.Engine) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in engine.generate(PROMPTS, CONFIG)]


@pytest.mark.quick_cases("[llama", "[gemma3_text")
@pytest.mark.parametrize(
    ("model_type", "change"),
    [*(("llama", change) for change in CHANGES[1:]), *((name, more_heads) for name in ("falcon_h1", "gemma3_text"))],
)
def test_requests_after_a_change(model_type: str, change: Callable[[Any], None]) -> None:
    model = tiny_model(model_type)
    with hf_paged.Engine(model, {"num_blocks": 64, "block_size": 4}) as engine:
        assert run(engine) == [plain(model, prompt) for prompt in PROMPTS]
        change(model)
        assert run(engine) == [plain(model, prompt) for prompt in PROMPTS]
        engine.check_integrity()


@pytest.mark.covering(1)
@pytest.mark.parametrize("change", [same_place, more_heads], ids=lambda change: str(change.__name__))
@pytest.mark.parametrize("is_async", [True, False])
def test_running_requests(is_async: bool, change: Callable[[Any], None]) -> None:
    """They go on with the changed model: over the K/V they have, or all of it computed again if it differs in size."""
    model = tiny_model("llama")
    with hf_paged.Engine(model, {"num_blocks": 64, "block_size": 4}, {"async_scheduling": is_async}) as engine:
        name = engine.add_request(PROMPTS[0], CONFIG)
        before: list[int] = []
        while len(before) < 3:
            before = [*before, *(t for output in engine.step() for t in output.outputs[0].token_ids[len(before) :])]
        change(model)
        outputs = [output for _ in range(2 * NEW) for output in engine.step() if output.request_id == name]
        tokens = list(outputs[-1].outputs[0].token_ids)
        assert outputs[-1].finished and outputs[-1].error is None and len(tokens) == NEW
        if change is more_heads:
            done = next(n for n in (3, 4) if tokens[n:] == plain(model, PROMPTS[0] + tokens[:n], NEW - n))
            assert tokens[:3] == before and done - len(before) <= is_async
        assert run(engine) == [plain(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("change", [same_place, more_heads], ids=lambda change: str(change.__name__))
def test_a_prefix_kept_after_a_change(change: Callable[[Any], None]) -> None:
    model, prefix = tiny_model("llama"), list(range(3, 20))
    with hf_paged.Engine(model, {"num_blocks": 64, "block_size": 4}) as engine:
        assert engine.cache_prefix(prefix) == 16
        change(model)
        assert engine.cache_prefix(prefix) == 16
        (output,) = engine.generate([[*prefix, 7]], CONFIG)
        assert output.outputs[0].token_ids == plain(model, [*prefix, 7])
        assert engine.stats().prefix_cache_hit_tokens == 16 and engine.release_prefix(prefix)
        assert engine.stats().blocks_used == 0
        engine.check_integrity()


def test_figures_count_on_after_a_change() -> None:
    model, prompt = tiny_model("llama"), list(range(3, 20))
    samples = GenerationConfig(max_new_tokens=4, do_sample=True, num_return_sequences=2, pad_token_id=0)
    names = ["prefix_cache_query_tokens", "prefix_cache_hit_tokens", "prefix_cache_evictions", "cow_copies"]
    with hf_paged.Engine(model, {"num_blocks": 8, "block_size": 4}) as engine:
        engine.snapshot()  # someone watches
        figures = [[0] * len(names)]
        for _ in range(3):
            for _ in range(2):
                engine.generate([prompt, prompt[:7][::-1]], samples)
            more_heads(model)
            figures.append([getattr(engine.stats(), name) for name in names])
        assert all(now > before for old, new in itertools.pairwise(figures) for before, now in zip(old, new)), figures
        assert sum(len(event.blocks) for event in engine._watch._events if event.kind == "evict") > figures[1][2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_change_whose_following_is_interrupted(error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with hf_paged.Engine(model, {"num_blocks": 64, "block_size": 4}) as engine:
        run(engine)
        more_heads(model)
        with monkeypatch.context() as patch, pytest.raises(error):
            patch.setattr("hf_paged.generation.engine.binding.open_memory", mock.Mock(side_effect=error))
            run(engine)
        assert run(engine) == [plain(model, prompt) for prompt in PROMPTS]
        engine.check_integrity()


def test_layers_that_share_an_index_are_named() -> None:
    model = tiny_model("llama")
    with hf_paged.Engine(model, {"num_blocks": 64}) as engine:
        run(engine)
        kept = model.model.layers[1]
        model.model.layers[1] = another(model).model.layers[3]
        for output in engine.generate(PROMPTS, CONFIG, raise_on_error=False):
            assert output.error is not None and "2 of its layers keep their K/V as layer 3" in output.error
        with pytest.raises(hf_paged.UnsupportedModelError, match="layer_idx of its own"):
            model.generate(torch.tensor(PROMPTS[:1]), generation_config=CONFIG, cache_implementation="paged")
        model.model.layers[1].self_attn.layer_idx = 1  # as the error says
        model.model.layers[1] = copy.deepcopy(model.model.layers[1])
        assert run(engine) == [plain(model, prompt) for prompt in PROMPTS]
        model.model.layers[1] = kept
        assert run(engine) == [plain(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("change", [more_heads, fewer_layers, another_epsilon], ids=lambda change: str(change.__name__))
def test_calls_of_generate(change: Callable[[Any], None]) -> None:
    """The memory that one call leaves to the next is that of the former layers."""
    model = tiny_model("llama")
    for _ in range(2):
        paged = model.generate(torch.tensor(PROMPTS[:1]), generation_config=CONFIG, cache_implementation="paged")
        assert paged[0, 4:].tolist() == plain(model, PROMPTS[0])
        change(model)
        change = same_place
