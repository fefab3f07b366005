"""While a thread steps, others see the model as its owner has set it: in copies, pickles, forks and calls."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine, EngineError
from hf_paged.integration.attention import in_packed_step
from tests import models
from tests.generation.test_fork import in_child
from tests.model.adapted import IGNORED, activate, with_transformers
from tests.waiting import must

pytestmark = [
    *IGNORED,
    pytest.mark.usefixtures("trusted_code"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

OPTIONS = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@contextmanager
def stepping(model: Any, adapter: str | None = None) -> Iterator[None]:
    """Another thread is in the middle of a forward of an engine on the model."""
    entered, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread and not go.is_set():
            entered.set()
            must(go.wait(120), "the step was never let go")

    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        config = GenerationConfig(**OPTIONS)
        engine.generate([[5, 6, 7]], config, adapter=adapter)  # examines the model
        thread = threading.Thread(target=engine.generate, args=([[5, 6, 7]], config), kwargs={"adapter": adapter})
        handle = model.model.layers[0].mlp.register_forward_hook(wait)
        thread.start()
        must(entered.wait(120), "no step has begun")
        handle.remove()
        try:
            yield
        finally:
            go.set()
            thread.join()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_compute_with_their_own_weights(name: str) -> None:
    model = models.build("llama")
    with stepping(model):
        copied = COPIES[name](model)
        shallow = copy.copy(model.lm_head), model.lm_head._replicate_for_data_parallel()
        state = model.lm_head.__reduce_ex__(4)[2]
    assert state is not vars(model.lm_head), "a step may change these while a copy walks through them"
    with pytest.raises(TypeError, match="this Linear is a replica"):
        hf_paged.check(shallow[1])
    assert not [m for m in (*copied.modules(), *shallow) if "forward" in vars(m)]
    assert copied.config._attn_implementation == model.config._attn_implementation != "hf_paged"
    ids = torch.arange(5)[None]
    assert copied(ids).logits.equal(model(ids).logits)
    nn.init.zeros_(copied.model.norm.weight)
    assert not copied(ids).logits.any() and model(ids).logits.any()


def test_configs_name_their_own_attention() -> None:
    model = models.build("llama")
    own = model.config._attn_implementation
    with stepping(model):
        assert copy.deepcopy(model.config)._attn_implementation == model.config._attn_implementation == own
        model(torch.arange(5)[None])
        model.set_attn_implementation("eager")
        weights = model(torch.arange(5)[None], output_attentions=True).attentions[0]
    assert weights is not None and model.config._attn_implementation == "eager" != own


@pytest.mark.parametrize("where", ["thread", "fork"])
def test_calls_use_the_adapter_that_is_active(where: str) -> None:
    model = with_transformers()
    activate(model, "y")
    ids = torch.arange(5)[None]

    def tokens() -> list[int]:
        return model.generate(ids, **OPTIONS)[0].tolist()

    expected = tokens()
    with stepping(model, "x"):
        found = in_child(lambda: (tokens(), "forward" in vars(model.lm_head))) if where == "fork" else tokens()
    assert found == (str((expected, False)) if where == "fork" else expected)


@pytest.mark.parametrize("part", [None, "model"])
def test_a_handler_of_a_signal_may_call_the_model(part: str | None) -> None:
    """It interrupts a step in its thread, and finds the model as outside of one, but no part of it that attends."""
    model, inputs = with_transformers(), models.batch(9, 5)
    activate(model, "y")

    def calls() -> Any:
        if part is not None and in_packed_step():
            return getattr(model, part)(**inputs)
        return model(**inputs).logits, model.generate(**inputs, **OPTIONS)

    expected, found = calls(), []
    own = signal.signal(signal.SIGINT, lambda *_: found.append(calls()))
    options = GenerationConfig(**OPTIONS)

    def interrupt(*_: Any) -> None:
        if in_packed_step() and not found:
            signal.raise_signal(signal.SIGINT)

    try:
        with Engine(model, CacheConfig(num_blocks=64)) as engine:
            answer = engine.generate([[5, 6, 7]], options, adapter="x")[0].outputs[0].token_ids
            engine.clear_prefix_cache()
            handle = model.model.layers[0].mlp.register_forward_pre_hook(interrupt)
            if part is not None:
                with pytest.raises(EngineError, match=r"<lambda>, the handler of a signal, .* has a LlamaAttention"):
                    engine.generate([[5, 6, 7]], options, adapter="x")
                return
            assert engine.generate([[5, 6, 7]], options, adapter="x")[0].outputs[0].token_ids == answer
            handle.remove()
    finally:
        signal.signal(signal.SIGINT, own)
    for ours, plain in zip(found[0], expected):
        torch.testing.assert_close(ours, plain)
    assert not vars(model).keys() & {"_compiled_call_impl", "forward"}


@pytest.mark.parametrize("window", [None, 8])
def test_a_window_may_change(window: int | None) -> None:
    """Of a window that grows, blocks that were let go are computed again."""
    model, options = models.build("mistral", sliding_window=16), GenerationConfig(**OPTIONS)
    prompt = list(range(1, 60))
    with Engine(model, CacheConfig(num_blocks=64, block_size=8)) as engine:
        engine.add_request(prompt, options)
        first = engine.step()
        model.config.sliding_window = window
        for layer in model.model.layers:
            layer.self_attn.sliding_window = window
        while engine.has_unfinished_requests():
            first = engine.step()
        (token, *rest) = first[0].outputs[0].token_ids
        (new,) = engine.generate([prompt], options)

    def plain(ids: list[int]) -> list[int]:
        return model.generate(torch.tensor([ids]), generation_config=options)[0, len(ids) :].tolist()

    assert rest == plain([*prompt, token])[:-1]
    assert new.outputs[0].token_ids == plain(prompt)
    paged = model.generate(torch.tensor([prompt]), generation_config=options, cache_implementation="paged")
    assert paged[0, len(prompt) :].tolist() == plain(prompt)


@pytest.mark.slow
def test_compiled_layers_follow_the_thread() -> None:
    """torch.compile reads what one thread alone sees, and compiles anew for another value."""
    model = with_transformers()
    activate(model, "y")
    options, prompt = GenerationConfig(**OPTIONS), [5, 6, 7]

    def plain() -> torch.Tensor:
        return model(torch.tensor([prompt])).logits

    def steps(engine: Engine) -> list[list[int]]:
        engine.clear_prefix_cache()
        outputs = engine.generate([prompt] * 3, options, adapter=["x", "y", "__base__"])
        return [output.outputs[0].token_ids for output in outputs]

    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        expected, logits = steps(engine), plain()
        for layer in model.model.layers:
            layer.mlp.compile(backend="eager")
        assert plain().equal(logits)
        assert steps(engine) == expected and expected[0] != expected[1] != expected[2]
        assert plain().equal(logits)


class Other:
    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ()


def test_a_module_may_say_itself_what_its_copies_are() -> None:
    assert copy.copy(type("Module", (nn.Module, Other), {})()) == {}


@pytest.mark.parametrize("way", ["class", "torch"])
def test_a_call_of_others_around_the_model_is_part_of_the_step(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = models.build("llama"), models.prompts(9)
    own, calls = nn.Module.__call__, []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return own(self, *args, **kwargs)

    if way == "class":
        model.__class__ = type("Called", (type(model),), {"__call__": call})
    else:
        monkeypatch.setattr(nn.Module, "__call__", call)
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = model.generate(prompt[None], generation_config=options)[0, len(prompt) :].tolist()
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        calls.clear()
        (output,) = engine.generate([prompt], options)
        is_packed = engine._runner.is_packed
    assert output.outputs[0].token_ids == wanted and sum(each is model for each in calls) >= len(wanted)
    assert is_packed == (way == "class")  # what is called of every module runs each row alone


def test_merged_adapters_stay_merged() -> None:
    """PEFT would unmerge a layer that is disabled, in the user's weights."""
    model, prompts = with_transformers(targets={"a": ["q_proj"], "b": ["v_proj"]}), models.prompts(9, 5)
    activate(model, "a")
    layers = [each for each in model.modules() if "b" in getattr(each, "lora_A", {})]
    for layer in layers:
        layer.merge(adapter_names=["b"])
    before = copy.deepcopy(model.state_dict())
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = [model.generate(each[None], generation_config=options)[0, len(each) :].tolist() for each in prompts]
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        engine.warm_up()
        assert [each.outputs[0].token_ids for each in engine.generate(prompts, options)] == wanted
    assert all(layer.merged_adapters == ["b"] for layer in layers)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
