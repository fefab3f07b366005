"""Weight changes of every kind, and everything derived from weights: against the changed model's own `generate`."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.model.state import state_of
from hf_paged.model.weights import Weights
from tests import models
from tests.generation.solo import ended
from tests.noted import note_calls
from tests.preempting import force_preempt

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # what PEFT asks

PROMPT = models.prompts(26)[0]
GREEDY = GenerationConfig(
    max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, output_scores=True,
    return_dict_in_generate=True,
)  # fmt: skip


def plain(model: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> tuple[list[int], torch.Tensor]:
    """New tokens, and the log-probabilities of each, of transformers' own generate or (by options) of ours."""
    ids = prompt[None]
    result = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=GREEDY, **options)
    tokens = result.sequences[0, len(prompt) :].tolist()
    logprobs = [scores[0].float().log_softmax(-1)[token] for scores, token in zip(result.scores, tokens)]
    return tokens, torch.stack(logprobs)


def served(engine: Engine, prompt: torch.Tensor = PROMPT) -> tuple[list[int], torch.Tensor]:
    output = engine.generate([prompt], GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None))[0]
    assert output.error is None
    return output.outputs[0].token_ids, torch.tensor(output.outputs[0].logprobs)


def whole(output: hf_paged.RequestOutput) -> torch.Tensor:
    return torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])


def is_close(actual: tuple[list[int], torch.Tensor], expected: tuple[list[int], torch.Tensor]) -> bool:
    return actual[0] == expected[0] and torch.allclose(actual[1], expected[1], atol=2e-3)


def assert_other(engine: Engine, model: Any, before: Any) -> Any:
    """The engine serves what `generate` returns, which is returned here, and that is something else than before."""
    expected = plain(model)
    assert not is_close(before, expected) and is_close(served(engine), expected)
    return expected


def engine_on(model: Any, **options: Any) -> Engine:
    return Engine(model, CacheConfig(num_blocks=96, block_size=4), **options)


Change = Callable[[Any], object]


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())) * 0.5
    return values.to(tensor.dtype)


def step(model: Any, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    for parameter in model.parameters():
        parameter.grad = random_like(parameter)
    optimizer = make(model.parameters())
    optimizer.step()
    optimizer.zero_grad()


def add_in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(random_like(parameter))


def write_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.add_(random_like(parameter))


def replace_data_twice(model: Any) -> None:
    """The second of two small weights takes the address of the first, unless a reference keeps the first alive."""
    weight = model.get_parameter("model.layers.0.self_attn.q_proj.weight")
    for _ in range(2):
        weight.data = random_like(weight)


def from_vector(model: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector + random_like(vector), model.parameters())


def replace_twice(model: Any) -> None:
    layer = model.model.layers[0].self_attn.q_proj
    for _ in range(2):
        layer.weight = nn.Parameter(random_like(layer.weight))


def write_into_dictionary(model: Any) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer._parameters["weight"] = nn.Parameter(random_like(layer.weight))


def replace_buffer(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 3


def replace_layer(model: Any) -> None:
    model.model.layers[0].mlp = models.build("llama", seed=7).to(model.dtype).model.layers[0].mlp


class Negated(nn.Module):
    """Computes something else with the parameters of `inner`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return -self.inner(rows)


def wrap_layer(model: Any) -> None:
    layer = model.model.layers[0]
    layer.mlp = Negated(layer.mlp)


def swap_layers(model: Any) -> None:
    layers = model.model.layers
    attention = [layer.self_attn for layer in layers[:2]]
    for layer, other in zip(layers, reversed(attention)):
        layer.self_attn = other
        other.layer_idx = list(layers).index(layer)


def set_forward(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    forward = norm.forward
    norm.forward = lambda rows: forward(rows).flip(-1)


def forward_after_a_deletion(model: Any) -> None:
    """The module has as many attributes as before."""
    mlp = model.model.layers[0].mlp
    del mlp.hidden_size
    mlp.forward = lambda rows: rows.flip(-1)


CHANGES: dict[str, Change] = {
    "adamw": lambda model: step(model, lambda p: torch.optim.AdamW(p, lr=0.3, foreach=True)),
    "fused adamw": lambda model: step(model, lambda p: torch.optim.AdamW(p, lr=0.3, fused=True)),
    "in place": add_in_place, "data": write_data,
    "data of one": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(-3),
    "data replaced twice": replace_data_twice, "vector": from_vector,
    "load_state_dict": lambda model: model.load_state_dict(models.build("llama", seed=7).state_dict()),
    "replaced twice": replace_twice, "dictionary": write_into_dictionary,
    "buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(3),
    "buffer data": lambda model: model.model.rotary_emb.inv_freq.data.mul_(3), "buffer replaced": replace_buffer,
    "submodule": replace_layer, "submodule with the same weights": wrap_layer, "submodules swapped": swap_layers,
    "activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()), "forward": set_forward,
    "forward after a deletion": forward_after_a_deletion,
    "over a submodule": lambda model: vars(model.model.layers[0].mlp).update(act_fn=nn.Tanh()),
    "over a parameter": lambda model: vars(model.lm_head).update(weight=random_like(model.lm_head.weight)),
    "over the head": lambda model: vars(model).update(lm_head=models.build("llama", seed=7).lm_head),
    "scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 3.0),
    "epsilon": lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 3.0),
    "rotary scaling": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    "hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, result: result * -2),
}  # fmt: skip
NUMBERS = {"scaling", "epsilon", "rotary scaling"}
NEED_A_SAMPLE = {"data", "data of one", "vector", "buffer data", "forward after a deletion"} | NUMBERS


@pytest.mark.quick_cases(
    "[adamw", "[in place", "twice", "[vector", "buffer replaced", "swapped", "[activation", "after a deletion",
    "over a parameter", "[epsilon", "[hook",
)  # fmt: skip
@pytest.mark.covering(1)
@pytest.mark.parametrize("prepack", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_requests_and_calls_after_a_change(name: str, prepack: bool) -> None:
    """The same prompt again: its prefix is cached, weights are packed for calls and may be for the engine."""
    model = models.build("llama")
    hf_paged.prepack(model)
    with engine_on(model, prepack=prepack) as engine:
        before = served(engine)
        assert is_close(before, plain(model)) and is_close(before, plain(model, cache_implementation="paged"))
        assert is_close(served(engine), before) and engine.stats().prefix_cache_hit_tokens
        CHANGES[name](model)
        expected = assert_other(engine, model, before)
        assert is_close(served(engine), expected) and is_close(plain(model, cache_implementation="paged"), expected)
        engine.check_integrity()


def test_the_first_tensor_of_a_module_is_seen() -> None:
    model = models.build("llama")
    weights = state_of(model).weights
    weights.look()
    before = weights.epoch
    model.model.layers[0].mlp.register_buffer("gain", torch.ones(1))
    weights.look()
    assert weights.epoch > before


def test_a_vector_that_is_the_weights() -> None:
    """Parameters that were set from a vector are views of it: set from it again, they keep address and version."""
    model = models.build("llama")
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    with engine_on(model, prepack=True) as engine:
        before = served(engine)
        vector += random_like(vector)
        nn.utils.vector_to_parameters(vector, model.parameters())
        assert_other(engine, model, before)


@pytest.mark.parametrize("prepack", [False, True])
def test_a_weight_with_the_address_and_version_of_another(prepack: bool) -> None:
    """As the allocator places a weight that is replaced twice: the second takes the memory that the first has left."""
    model = models.build("llama")
    layer = model.model.layers[0].mlp.down_proj
    memory = layer.weight.detach().clone().numpy()
    layer.weight = nn.Parameter(torch.from_numpy(memory))
    with engine_on(model, prepack=prepack) as engine:
        before = served(engine)
        known = layer.weight.data_ptr(), layer.weight._version
        memory[5] += 3  # a single row: no sample of contents need see it
        layer.weight = nn.Parameter(torch.from_numpy(memory))
        assert known == (layer.weight.data_ptr(), layer.weight._version)
        assert_other(engine, model, before)


@pytest.mark.parametrize("name", ["adamw", "data", "data replaced twice"])
def test_a_change_with_a_request_in_flight(name: str) -> None:
    """Its K/V is of both: no other request may use it. What leaves no trace but in the contents is told."""
    model = models.build("llama")
    with engine_on(model) as engine:
        served(engine)
        request_id = engine.add_request(PROMPT, GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=None))
        for _ in range(6):
            engine.step()
        CHANGES[name](model)
        if name in NEED_A_SAMPLE:
            engine.weights_changed()
        assert is_close(served(engine), plain(model))
        both = whole(ended(engine)[request_id])
        for length in (26, 36, 48, len(both)):
            assert is_close(served(engine, both[:length]), plain(model, both[:length]))
        engine.check_integrity()


def test_a_change_between_two_requests_without_a_look_in_between() -> None:
    """The request in flight when weights change caches more blocks before anybody looks."""
    model = models.build("llama")
    with engine_on(model) as engine:
        engine.add_request(PROMPT, GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=None))
        engine.step()
        add_in_place(model)
        (output,) = ended(engine).values()
        both = whole(output)
        assert is_close(served(engine, both), plain(model, both))


def test_every_engine_and_call_learns_of_a_change() -> None:
    """One that the sample does not see is told."""
    model = models.build("llama")
    hf_paged.prepack(model)
    with engine_on(model) as one, engine_on(model, prepack=True) as two:
        before = served(one), served(two)
        write_data(model)
        expected = plain(model)
        assert is_close(served(one), expected) and is_close(served(two), expected)
        model.model.layers[0].mlp.down_proj.weight.data[5] += 3
        two.weights_changed()
        changed = plain(model)
        assert not is_close(changed, expected) and not is_close(changed, before[0])
        assert is_close(served(one), changed) and is_close(served(two), changed)
        assert is_close(plain(model, cache_implementation="paged"), changed)
        model.model.embed_tokens.weight.data[PROMPT[0]] += 1  # a few elements: not noticed
        hf_paged.weights_changed(model)
        expected = plain(model)
        assert is_close(served(one), expected) and is_close(served(two), expected)


def test_what_is_equal_is_no_change() -> None:
    """Some models replace their frequencies by equal ones in a forward. Optimizers of other weights do not count."""
    model, other = models.build("llama"), models.build("llama", seed=1)
    weights = state_of(model).weights
    with engine_on(model) as engine:
        served(engine)
        weights.look(contents=True)
        epoch = weights.epoch
        model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq.clone(), persistent=False)
        step(other, lambda parameters: torch.optim.AdamW(parameters, fused=True))
        served(engine)
        weights.look(contents=True)
        assert weights.epoch == epoch
        assert engine.stats().prefix_cache_hit_tokens >= 24


def test_only_changed_weights_are_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.fused.cpu.weights import LinearLayer

    packs = note_calls(monkeypatch, LinearLayer, "_function", lambda layer, *_: layer)
    model = models.build("llama")
    with engine_on(model, prepack=True) as engine:
        served(engine)
        packs.clear()
        served(engine)
        assert not packs
        for change in (
            lambda weight: weight.data.mul_(2),
            lambda weight: nn.init.normal_(weight),
            lambda weight: setattr(weight, "data", weight.data.clone()),
        ):
            change(model.model.layers[1].mlp.gate_proj.weight)
            served(engine)
            assert len(packs) == 1
            packs.clear()


def with_adapter(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **options)
    torch.manual_seed(3)
    return peft.get_peft_model(models.build("llama"), config).eval()


def layers_of(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "scaling") and hasattr(module, "lora_A"))


def set_scale(model: Any) -> None:
    for layer in layers_of(model):
        layer.set_scale("default", 5.0)


def scale_layer(model: Any) -> None:
    for layer in layers_of(model):
        layer.scale_layer(5.0)


def train_adapter(model: Any) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = random_like(parameter)
    torch.optim.AdamW(parameters, lr=0.5, fused=True).step()


def write_adapter(model: Any) -> None:
    for layer in layers_of(model):
        layer.lora_B["default"].weight.data.mul_(-4)


ADAPTER_CHANGES: dict[str, Change] = {
    "set_scale": set_scale, "scale_layer": scale_layer, "trained": train_adapter, "data": write_adapter,
    "merged": lambda model: model.merge_adapter(),
}  # fmt: skip


@pytest.mark.parametrize("name", ADAPTER_CHANGES)
def test_adapters_that_change(name: str) -> None:
    model = with_adapter(lora_alpha=32)
    hf_paged.prepack(model)
    with engine_on(model, prepack=True) as engine:
        before = served(engine)
        assert is_close(before, plain(model))
        assert is_close(plain(model, cache_implementation="paged"), before)
        ADAPTER_CHANGES[name](model)
        expected = plain(model)
        assert is_close(before, expected) == (name == "merged")
        assert is_close(served(engine), expected)
        assert is_close(plain(model, cache_implementation="paged"), expected)


LONG = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_pause(recompute: bool, is_async: bool) -> None:
    model = models.build("llama")
    with engine_on(model, scheduler_config=SchedulerConfig(async_scheduling=is_async)) as engine:
        request_ids = [engine.add_request(prompt, LONG) for prompt in (PROMPT, *models.prompts(7, 15, seed=4))]
        for _ in range(6):
            engine.step()
        with engine.pause(recompute=recompute):
            known = {r: engine._requests[r].group.sequences[0].token_ids[:] for r in request_ids}
            write_data(model)
        outputs, options = ended(engine), {"do_sample": False, "eos_token_id": None}
        for request_id, tokens in known.items():
            output, both = outputs[request_id], whole(outputs[request_id])
            assert output.error is None and len(output.outputs[0].token_ids) == 24
            assert both[: len(tokens)].tolist() == tokens
            if recompute:
                assert both.equal(model.generate(torch.tensor([tokens]), max_length=len(both), **options)[0])
        assert is_close(served(engine, both), plain(model, both))
        assert is_close(served(engine), plain(model))
        engine.check_integrity()


def test_other_threads_in_a_pause() -> None:
    model = models.build("llama")
    with engine_on(model) as engine:
        results: list[Any] = []
        reader = threading.Thread(target=lambda: results.extend(engine.generate([PROMPT], LONG)))
        with engine.pause():
            reader.start()
            other = threading.Thread(target=lambda: results.append(engine.abort(engine.add_request(PROMPT, LONG))))
            other.start()
            other.join(60)
            assert results == [True]
            while not engine._requests:
                pass
            steps = engine.stats().steps
            write_data(model)
            assert engine.stats().steps == steps
        reader.join(60)
        assert results[1].outputs[0].token_ids[:8] == plain(model)[0]


def test_closing_an_engine_that_is_paused_elsewhere() -> None:
    model = models.build("llama")
    engine, errors = engine_on(model), []

    def read() -> None:
        try:
            engine.generate([PROMPT], LONG)
        except RuntimeError as error:
            errors.append(str(error))

    reader = threading.Thread(target=read)
    engine.sleep()
    reader.start()
    while not engine._requests:
        pass
    with engine.pause():
        engine.close()
    reader.join(60)
    assert len(errors) == 1 and "closed" in errors[0]


def test_a_step_in_ones_own_pause_and_a_pause_in_a_step() -> None:
    model = models.build("llama")
    with engine_on(model) as engine:
        with pytest.raises(RuntimeError, match="this thread has paused the engine"), engine.pause():
            served(engine)
        assert is_close(served(engine), plain(model))
        with engine.pause(), engine.pause():
            pass

        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            with engine.pause():
                raise AssertionError
            return scores

        engine.add_request(PROMPT, LONG, logits_processor=[processor])
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert "may add and abort requests, nothing else" in outputs[-1].error
        assert is_close(served(engine), plain(model))


def test_a_pause_that_ends_with_an_error() -> None:
    model = models.build("llama")
    with engine_on(model) as engine:
        served(engine)
        with pytest.raises(KeyError), engine.pause():
            model.model.layers[0].mlp.down_proj.weight.data[5] += 3
            raise KeyError
        assert is_close(served(engine), plain(model))


def test_a_prefix_that_is_held_goes_with_its_weights() -> None:
    model = models.build("llama")
    with engine_on(model) as engine:
        assert engine.cache_prefix(PROMPT) == 24
        add_in_place(model)
        assert is_close(served(engine), plain(model))
        assert not engine.release_prefix(PROMPT)
        assert engine.cache_prefix(PROMPT) == 24
        assert is_close(served(engine), plain(model))


@pytest.mark.parametrize("contents", [False, True])
def test_what_else_changes_beside_a_replaced_weight(contents: bool) -> None:
    """Between two looks: in place, and through `.data`, which only a look at the contents can see."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    weights = Weights(model)
    weights.look(contents=contents)
    first, second, third = model
    first.weight = nn.Parameter(torch.randn(4, 4))
    with torch.no_grad():
        second.weight.mul_(2.0)
    third.weight.data.fill_(3.0)
    weights.look(contents=contents)
    assert [weights.moved_at(layer.weight) > 0 for layer in model] == [True, True, contents]
    assert not any(weights.moved_at(layer.bias) for layer in model)
    weights.changed()
    assert all(weights.moved_at(layer.bias) == weights.epoch for layer in model)
    with torch.no_grad():
        second.weight.mul_(2.0)
    # Versions are compared when somebody asks, maybe some looks later.
    for _ in range(2):
        weights.look()
    assert weights.moved_at(second.weight) == weights.epoch > weights.moved_at(second.bias)


def test_a_model_that_is_given_up_is_freed() -> None:
    model = models.build("llama")
    # As accelerate does it: an attribute of the model refers to it.
    model.forward = functools.update_wrapper(functools.partial(type(model).forward, model), model.forward)
    hf_paged.check(model)
    hf_paged.prepack(model)
    plain(model, cache_implementation="paged")
    with engine_on(model, prepack=True) as engine:
        served(engine)
    state = weakref.ref(state_of(model))
    reference = weakref.ref(model)
    del model, engine
    gc.collect()
    assert reference() is None and state() is None


def test_released_weights_are_not_held() -> None:
    """What a model has given up, for an offload say, is not kept alive once engines are closed."""
    model = models.build("llama")
    storage = weakref.ref(model.lm_head.weight.untyped_storage())
    with engine_on(model) as engine:
        served(engine)
    before = [weight.untyped_storage()._weak_ref() for weight in model.parameters()]
    for weight in model.parameters():
        weight.data = weight.data.clone()
    gc.collect()
    assert all(torch.UntypedStorage._expired(reference) for reference in before)
    for reference in before:
        torch.UntypedStorage._free_weak_ref(reference)
    assert storage() is None


@pytest.mark.parametrize("scheduling", [True, False], ids=["async", "sync"])
def test_a_request_admitted_after_a_swapped_one(scheduling: bool) -> None:
    """A step that resumes a swapped request may admit another one, which uses no prefix of the old weights."""
    model = models.build("llama")
    other = models.prompts(9)[0]
    options = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=None)
    with engine_on(model, scheduler_config=SchedulerConfig(async_scheduling=scheduling)) as engine:
        served(engine)  # caches the prefix
        engine.add_request(other, options, request_id="swapped")
        engine.step()
        with engine._lock:
            engine._stepper.settle()
            assert force_preempt(engine._scheduler, "swapped", "swap")
        waiting = engine.add_request(PROMPT, options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(random_like(parameter))
        assert ended(engine)[waiting].outputs[0].token_ids == plain(model)[0]
