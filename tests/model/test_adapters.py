"""Requests with different adapters in one engine, against `generate` with that adapter active."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import hf_paged
from hf_paged import CacheConfig, Engine, SchedulerConfig
from hf_paged.features.adapters import adapters
from hf_paged.model.state import state_of
from tests import models
from tests.forwards import before_forwards, bound_model
from tests.generation.solo import OPTIONS, assert_idle, config, ended, row_by_row, solo
from tests.model.adapted import (
    BASE,
    IGNORED,
    NAMES,
    TARGETS,
    activate,
    activated,
    add,
    delete,
    inner,
    lora,
    peft,
    switch,
    with_peft,
    with_transformers,
)
from tests.schedulings import in_both_schedulings

pytestmark = IGNORED


def expected(model: Any, name: str | None, prompt: torch.Tensor, options: GenerationConfig) -> list[list[int]]:
    with activated(model, name):
        return solo(inner(model), prompt, options)[0]


def tokens(output: hf_paged.RequestOutput) -> list[list[int]]:
    assert output.error is None
    return [one.token_ids for one in output.outputs]


def state(model: Any) -> list[Any]:
    """All state that a step may change, including the instance attributes of layers."""
    own = [
        {name: value for name, value in vars(module).items() if name in ("_active_adapter", "_disable_adapters")}
        for module in model.modules()
    ]
    ids = [{name: id(value) for name, value in values.items()} for values in own]
    return [own, ids, [p.requires_grad for p in model.parameters()], [p._version for p in model.parameters()]]


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    model = bound_model(engine)
    forward = model.forward

    def one_forward(*args: Any) -> Any:
        counts[-1] += 1
        return forward(*args)

    before_forwards(engine, lambda _: counts.append(0))
    monkeypatch.setattr(model, "forward", one_forward)
    return counts


def wanted(count: int, seed: int = 0) -> list[tuple[str | None, torch.Tensor, GenerationConfig]]:
    """Requests that cover every decoding mode with every adapter, including the model's active one."""
    names = itertools.cycle([*NAMES, None])
    lengths = [1 + (7 * n) % 37 for n in range(count)]
    options = itertools.cycle(map(config, OPTIONS))
    return list(zip(names, models.prompts(*lengths, seed=seed), options))


def assert_as_generate(model: Any, cache: CacheConfig, scheduler: SchedulerConfig | None, count: int) -> Any:
    requests = wanted(count)
    names, prompts, options = zip(*requests)
    before = state(model)
    with Engine(model, cache, scheduler) as engine:
        outputs = engine.generate(prompts, options, adapter=names)
        assert_idle(engine)
        stats = engine.stats()
    assert state(model) == before
    for request, output in zip(requests, outputs):
        assert tokens(output) == expected(model, *request), request[0]
    return stats


@in_both_schedulings
@pytest.mark.covering(1)
@pytest.mark.smoke_cases("llama")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_family(family: str) -> None:
    targets = dict.fromkeys("xy", "all-linear")
    model = with_transformers(models.build(family), targets)
    requests = [(name, *rest) for name, (_, *rest) in zip(itertools.cycle(["x", BASE, "y"]), wanted(len(OPTIONS)))]
    names, prompts, options = zip(*requests)
    with Engine(model, CacheConfig(memory="64MiB")) as engine:
        outputs = engine.generate(prompts, options, adapter=names)
    for request, output in zip(requests, outputs):
        assert tokens(output) == expected(model, *request)


def test_a_small_pool_and_short_steps() -> None:
    scheduler = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24, preemption="swap")
    stats = assert_as_generate(with_peft(), CacheConfig(num_blocks=26, block_size=4), scheduler, 14)
    assert stats.preemptions_swap > 0


def test_models_that_cannot_run_packed() -> None:
    model = with_transformers(row_by_row(), dict.fromkeys("xyz", "all-linear"))
    stats = assert_as_generate(model, CacheConfig(num_blocks=26, block_size=4), None, 10)
    assert stats.preemptions_recompute + stats.preemptions_swap > 0


def test_packed_weights_of_linear_layers() -> None:
    """Copies are made of the layers that adapters wrap and of the adapters' own layers."""
    model = with_peft()
    (prompt,) = models.prompts(9)
    with Engine(model, CacheConfig(num_blocks=64), prepack=True) as engine:
        outputs = engine.generate([prompt] * 4, config("greedy"), adapter=NAMES)
    assert [tokens(o) for o in outputs] == [expected(model, name, prompt, config("greedy")) for name in NAMES]


def test_modules_that_an_adapter_replaces() -> None:
    """modules_to_save and trainable tokens, which PEFT keeps in wrappers, not in layers."""
    model = peft.get_peft_model(models.build("llama"), lora(TARGETS["x"], modules_to_save=["lm_head"]), "x")
    model.add_adapter("y", lora(TARGETS["y"]))
    model.add_adapter("z", lora(TARGETS["z"], trainable_token_indices=[3, 4, 5, 6, 7]))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "trainable_tokens_delta" in name:
                parameter.normal_(std=0.6)
    assert any("trainable_tokens_delta" in name for name, _ in model.named_parameters())
    prompts, options = models.prompts(9, 5), config("greedy", max_new_tokens=12)
    before = state(model)
    requests = [(name, prompt, options) for prompt in prompts for name in NAMES]
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        outputs = engine.generate([p for _, p, _ in requests], options, adapter=[name for name, *_ in requests])
    assert state(model) == before
    for request, output in zip(requests, outputs):
        assert tokens(output) == expected(model, *request), request[0]


@pytest.mark.parametrize("kind", ["IA3Config", "OFTConfig"])
def test_other_kinds_of_adapters(kind: str) -> None:
    own = {"IA3Config": {"feedforward_modules": []}, "OFTConfig": {"oft_block_size": 8, "use_cayley_neumann": False}}
    options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], **own[kind]}
    make = getattr(peft, kind)
    model = peft.get_peft_model(models.build("llama"), make(**options), "x")
    model.add_adapter("y", make(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".x", ".y", ".x.weight", ".y.weight")):
                parameter.add_(torch.randn_like(parameter))
    model.eval()
    (prompt,) = models.prompts(9)
    names = ("x", "y", BASE)
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        outputs = engine.generate([prompt] * 3, config("greedy"), adapter=names)
    texts = [tokens(output) for output in outputs]
    assert texts == [expected(model, name, prompt, config("greedy")) for name in names]
    assert texts[0] != texts[1] != texts[2] != texts[0]


def test_one_forward_for_each_adapter_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_transformers()
    activate(model, "y")
    prompts = models.prompts(5, 9, 3, 7, 6, 4)
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        counts = counted(engine, monkeypatch)
        outputs = engine.generate(prompts, config("greedy"), adapter=["x", None, BASE, "y", "z", "x"])
        assert all(output.error is None for output in outputs)
        assert counts[0] == max(counts) == 4, "x, y (which is active too), z, and none"
        counts.clear()
        engine.generate(prompts, config("greedy"), adapter=["y", None, "y", None, None, "y"])
        assert set(counts) == {1}


def test_a_forward_that_raises_fails_the_requests_of_its_adapter_only() -> None:
    model = with_peft()
    prompts = models.prompts(5, 9, 7, 4)
    before = state(model)

    def broken(*args: Any) -> None:
        raise RuntimeError("no such device")

    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        for name, prompt in zip(NAMES, prompts):
            engine.add_request(prompt, config("beams"), request_id=name, adapter=name)
        engine.step()
        layer = inner(model).model.layers[1].self_attn.v_proj
        handle = layer.lora_A["y"].register_forward_pre_hook(broken)
        outputs = ended(engine)
        handle.remove()
        assert_idle(engine)
        failed = outputs.pop("y")
        assert failed.error == "the forward failed: RuntimeError: no such device"
        assert failed.outputs[0].finish_reason == "error"
        for name, output in outputs.items():
            assert tokens(output) == expected(model, name, prompts[NAMES.index(name)], config("beams"))
        # All of a step, too.
        handle = layer.lora_A["y"].register_forward_pre_hook(broken)
        (output,) = engine.generate([prompts[0]], config("greedy"), adapter="y", raise_on_error=False)
        handle.remove()
        assert output.error == failed.error
        assert_idle(engine)
    assert state(model) == before


def test_prefixes_are_shared_within_an_adapter() -> None:
    model = with_peft()
    (prompt,) = models.prompts(40)
    options = config("greedy")
    with Engine(model, CacheConfig(num_blocks=64)) as engine:

        def ask(name: str | None) -> int:
            (output,) = engine.generate([prompt], options, adapter=name)
            assert tokens(output) == expected(model, name, prompt, options)
            return output.metrics.num_cached_tokens

        assert [ask(name) for name in NAMES] == [0, 0, 0, 0]
        assert [ask(name) for name in NAMES] == [32, 32, 32, 32]
        assert ask(None) == 32, "what is active is adapter x"
        with model.disable_adapter():
            assert ask(None) == 32


def test_a_prefix_that_is_held_belongs_to_an_adapter() -> None:
    model = with_peft()
    (prompt,) = models.prompts(40)
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        assert engine.cache_prefix(prompt, adapter="y") == 32
        outputs = engine.generate([prompt] * 2, config("greedy"), adapter=["y", "x"])
        assert [output.metrics.num_cached_tokens for output in outputs] == [32, 0]
        assert not engine.release_prefix(prompt)
        assert not engine.release_prefix(prompt, adapter="x")
        assert engine.release_prefix(prompt, adapter="y")


def test_none_is_what_was_active_on_arrival() -> None:
    model = with_transformers()
    (prompt,) = models.prompts(9)
    options = config("greedy")
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        for name in "xyz":
            activate(model, name)
            engine.add_request(prompt, options, request_id=name)
        switch(model, False)
        engine.add_request(prompt, options, request_id=BASE)
        switch(model, True)
        activate(model, ["x", "y"])
        engine.add_request(prompt, options, request_id="both")
        engine.step()
        activate(model, "z")
        before = state(model)
        outputs = ended(engine)
        assert state(model) == before
        assert {name for layer in adapters.layers_of(model) for name in layer.active_adapters} == {"z"}
    for name in NAMES:
        assert tokens(outputs[name]) == expected(model, name, prompt, options)
    activate(model, ["x", "y"])
    assert tokens(outputs["both"]) == solo(model, prompt, options)[0]


def test_layers_that_are_switched_one_by_one() -> None:
    model = with_transformers()
    activate(model, "x")
    layers = inner(model).model.layers
    layers[0].self_attn.v_proj.set_adapter("y")
    layers[1].mlp.down_proj.enable_adapters(False)
    (prompt,) = models.prompts(9)
    wanted = solo(model, prompt, config("greedy"))[0]
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        engine.add_request(prompt, config("greedy"), request_id="mixed")
        layers[1].mlp.down_proj.enable_adapters(True)
        activate(model, "z")
        engine.add_request(prompt, config("greedy"), request_id="z")
        outputs = ended(engine)
    assert tokens(outputs["mixed"]) == wanted
    assert tokens(outputs["z"]) == expected(model, "z", prompt, config("greedy"))


def test_adapters_loaded_into_a_running_engine() -> None:
    model = models.build("llama")
    (prompt,) = models.prompts(40)
    options = config("greedy")
    plain = solo(model, prompt, options)[0]
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        engine.add_request(prompt, options, request_id="before")
        engine.add_request(prompt, options, request_id="base", adapter=BASE)
        engine.step()
        add(model, lora(TARGETS["x"]), "x")  # which makes it active
        engine.add_request(prompt, options, request_id="x")
        engine.step()
        add(model, lora("all-linear"), "y")
        model.eval()
        engine.add_request(prompt, options, request_id="y", adapter="y")
        outputs = ended(engine)
        assert_idle(engine)
    assert tokens(outputs["before"]) == tokens(outputs["base"]) == plain
    for name in "xy":
        assert tokens(outputs[name]) == expected(model, name, prompt, options) != plain


def test_an_adapter_that_is_deleted_and_loaded_again() -> None:
    model = with_peft()
    (prompt,) = models.prompts(40)
    options = config("greedy")
    scheduler = SchedulerConfig(max_num_seqs=3)
    with Engine(model, CacheConfig(num_blocks=64), scheduler) as engine:
        for request_id in ("y", "x", BASE, "y that waits"):
            engine.add_request(prompt, options, request_id=request_id, adapter=request_id.split()[0])
        engine.step()
        model.delete_adapter("y")
        with pytest.raises(ValueError, match="adapter='y' is not loaded: choose one of 'x', 'z' or '__base__'"):
            engine.add_request(prompt, options, adapter="y")
        model.add_adapter("y", lora(TARGETS["y"]))
        model.eval()
        engine.add_request(prompt, options, request_id="y again", adapter="y")
        outputs = ended(engine)
        assert_idle(engine)
    for request_id in ("y", "y that waits"):
        error = outputs.pop(request_id).error
        assert error is not None and "adapter 'y' was deleted or replaced" in error
    assert outputs["y again"].metrics.num_cached_tokens == 0
    for request_id, output in outputs.items():
        assert tokens(output) == expected(model, request_id.split()[0], prompt, options)


def test_a_name_that_is_taken_again_at_once() -> None:
    """Nothing has looked at the model while it had no such adapter."""
    model = with_transformers()
    known = adapters.Adapters(model)
    old = known.choose("y")
    assert known.choose("y") is old
    delete(model, "y")
    add(model, lora(TARGETS["y"]), "y")
    new = known.choose("y")
    assert new is not old and new.key != old.key
    with pytest.raises(RuntimeError, match="adapter 'y' was deleted or replaced"):
        known.run(old, lambda: None)


def test_adapters_unloaded_from_a_running_engine() -> None:
    model = with_peft()
    (prompt,) = models.prompts(9)
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        for name in ("x", BASE):
            engine.add_request(prompt, config("greedy"), request_id=name, adapter=name)
        engine.step()
        plain = model.unload()
        outputs = ended(engine)
    assert outputs["x"].error is not None and "adapter 'x' was deleted" in outputs["x"].error
    assert tokens(outputs[BASE]) == solo(plain, prompt, config("greedy"))[0]


def test_what_is_refused_on_arrival() -> None:
    (prompt,) = models.prompts(5)
    model = with_peft()
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        known = "choose one of 'x', 'y', 'z' or '__base__', or load it with load_adapter"
        for wrong in ("d", "", 1, ["x"]):
            with pytest.raises(ValueError) as caught:
                engine.add_request(prompt, config("greedy"), adapter=wrong)
            assert str(caught.value) == f"adapter={wrong!r} is not loaded: {known}"
        for ask in (engine.generate, engine.stream):
            with pytest.raises(ValueError, match="adapter='d' is not loaded"):
                ask([prompt, prompt], config("greedy"), adapter=["x", "d"])
            with pytest.raises(ValueError, match="adapter: a list of 1 for 2 prompts; give one"):
                ask([prompt, prompt], config("greedy"), adapter=["x"])
        with pytest.raises(ValueError, match="adapter='d' is not loaded"):
            engine.cache_prefix(prompt, adapter="d")
        assert_idle(engine)
        model.peft_config["p"] = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
        with pytest.raises(ValueError, match="'p' is of the kind PROMPT_TUNING, which changes the inputs of generate"):
            engine.add_request(prompt, config("greedy"), adapter="p")
        del model.peft_config["p"]
        assert tokens(engine.generate([prompt], config("greedy"), adapter="x")[0])
    plain = models.shared("llama")
    with Engine(plain, CacheConfig(num_blocks=64)) as engine:
        with pytest.raises(ValueError, match="adapter='x' is not loaded: the model has no adapters; load it with"):
            engine.add_request(prompt, config("greedy"), adapter="x")
        (output,) = engine.generate([prompt], config("greedy"), adapter=BASE)
        assert tokens(output) == solo(plain, prompt, config("greedy"))[0]


def test_merged_adapters_cannot_be_switched() -> None:
    model = with_peft()
    (prompt,) = models.prompts(9)
    options = config("greedy")
    with Engine(model, CacheConfig(num_blocks=64)) as engine:
        engine.add_request(prompt, options, request_id="y", adapter="y")
        engine.add_request(prompt, options, request_id="active")
        engine.step()
        model.merge_adapter(["x"])
        for name in ("x", "y", BASE):
            with pytest.raises(ValueError, match=f"adapter='{name}': adapter 'x' is merged .* call unmerge_adapter"):
                engine.add_request(prompt, options, adapter=name)
        engine.add_request(prompt, options, request_id="merged")
        outputs = ended(engine)
        assert outputs["y"].error is not None and "adapter 'x' was merged into the weights" in outputs["y"].error
        wanted = solo(inner(model), prompt, options)[0]
        assert tokens(outputs["active"]) == tokens(outputs["merged"]) == wanted
        model.unmerge_adapter()
        (output,) = engine.generate([prompt], options, adapter="y")
        assert tokens(output) == expected(model, "y", prompt, options)


def test_adapters_that_need_more_than_rows() -> None:
    model = models.build("llama")
    add(model, lora(TARGETS["x"]), "x")
    add(model, lora(TARGETS["y"], task_type="CAUSAL_LM", alora_invocation_tokens=[5, 6]), "y")
    (prompt,) = models.prompts(9)
    with Engine(model.eval(), CacheConfig(num_blocks=64)) as engine:
        for name in ("y", None):
            with pytest.raises(
                ValueError, match=r"adapter 'y' is switched on by tokens of the prompt \(alora_invocation"
            ):
                engine.add_request(prompt, config("greedy"), adapter=name)
        (output,) = engine.generate([prompt], config("greedy"), adapter="x")
        assert tokens(output) == expected(model, "x", prompt, config("greedy"))


def test_adapters_that_no_layer_has() -> None:
    """Configs as PEFT leaves them for kinds that it does not put into layers."""
    model = with_transformers()
    model.peft_config |= {"nowhere": lora(["q_proj"]), "poly": peft.PolyConfig(target_modules=["q_proj"])}
    known = adapters.Adapters(model)
    with pytest.raises(ValueError, match="'nowhere' has no weights in layers that can be switched"):
        known.choose("nowhere")
    with pytest.raises(ValueError, match="'poly' is of the kind POLY, which takes arguments of its own"):
        known.choose("poly")
    assert known.choose(BASE).key is None and known.choose("x").names.keys() < known._layers.keys()


def test_a_model_without_adapters_is_not_waited_for() -> None:
    """A request for the base model alone needs no lock, which a forward may hold for long."""
    model = models.build("llama")
    known, chosen = adapters.Adapters(model), []
    with state_of(model).lock:
        other = threading.Thread(target=lambda: chosen.extend([known.choose(None), known.choose(BASE)]), daemon=True)
        other.start()
        other.join(60)
        assert len(chosen) == 2 and chosen[0] is chosen[1]
